"""The plan of a run and its cost, without doing it: the dry run behind `fedloom show`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from fedloom.core.context import Ctx, State
from fedloom.core.untrusted import Array
from fedloom.engines.peers.messages import signal_fields
from fedloom.engines.peers.rounds import community_of
from fedloom.federation.rounds import seen
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import constant_scores
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.measure import unmeasured
from fedloom.federation.rounds.messages import Payload, blank, count_bytes, rows_of
from fedloom.federation.rounds.privacy import forecast, share_of
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.federation.runs.reader import human_bytes
from fedloom.models.signal import blank as blank_input
from fedloom.models.signal import sized


@dataclass(frozen=True)
class Plan:
    """The plan of a run, without doing it."""

    method: str
    parameters: dict[str, int]
    clients: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    memory: dict[str, int]
    notes: list[str] = field(default_factory=list)
    input_shape: tuple[int, ...] = ()
    constant: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Task -> its metric, and the score of the constant prediction on test data (see `constant_scores`)."""


def plan(built: Built) -> Plan:
    """Plan a run: parameters by role, the partition, bytes of one full round, memory, the constant prediction."""
    return replace(plan_of(built), constant=constant_scores(built.federation))


def _second_round(built: Built) -> State:
    """Return the server's first state, with a vector for every task, which it lacks before the first round."""
    state: State = initial_state(built)["server"]
    if built.method.task_vectors:
        vector = torch.zeros_like(state["model"])
        state["tasks"] = {task.name: vector for task in built.federation.tasks}
        if state["buffers"] is not None and len(state["buffers"]):
            state["task_buffers"] = dict.fromkeys(state["tasks"], state["buffers"])
    return state


def plan_of(built: Built) -> Plan:
    """Plan a run that is already built, without the constant prediction, which reads data."""
    recipe = built.recipe
    layout, federation = built.layout, built.federation
    shared = built.shared
    parameters = Counter[str]()
    for block in layout.blocks:
        parameters[block.role] += block.size
    if frozen := sum(p.numel() for p in built.frozen.values()):
        parameters["frozen"] = frozen
    messages = dispatch(built, _second_round(built), federation.clients)
    noise = torch.randn(1, shared.d, generator=torch.Generator().manual_seed(0))
    up = down = 0
    for name in () if built.method.turn.pool else federation.clients:
        down += sum(count_bytes(built, name, messages[name]).values())
        rows = rows_of(built, [name])
        updates = blank(shared, federation, rows, noise.expand(len(rows), -1))
        updates, _ = built.method.edge(updates, built.method.edge.init(shared), Ctx(1))
        payload = Payload(
            (name, None),
            1.0,
            built.method.codec.pack(updates),
            dict.fromkeys(built.method.extras, 0.0),
            dict.fromkeys(built.method.auxiliary, noise[0]),
            torch.zeros(len(rows), len(shared.blocks)) if built.method.wants_support else None,
            messages[name].buffers,
            messages[name].integers,
            tasks={task: 1.0 for _, task in rows if task is not None},
        )
        up += sum(count_bytes(built, name, payload).values())
    taking_part = len(cohort(list(federation.trainers), recipe.training.participation, recipe.seed, 1))
    moments = {"sgd": 1 if recipe.training.optimizer.momentum else 0}.get(recipe.training.optimizer.name, 2)
    p = layout.parameters.d
    vectors = taking_part * (1 + len(built.method.auxiliary))
    workers = recipe.runtime.processes
    memory = {
        "matrix of updates (participants x shared parameters)": vectors * shared.d * 4,
        "models, gradients, optimiser (per worker)": workers * (3 + moments) * p * 4,
        "activations of a batch (per worker)": workers * activations(built) * recipe.training.batch_size,
        "data": sum(t.nbytes for t in (built.dataset.train, built.dataset.test)),
    }
    if recipe.training.keep_optimizer and moments:
        memory["optimiser state of all clients"] = len(federation.trainers) * moments * p * 4
    if frozen:
        memory["frozen parameters (per worker)"] = workers * sum(p.nbytes for p in built.frozen.values())
    notes = [*built.dataset.doubts, *built.dataset.notes, *(f"not measured: {gap}" for gap in unmeasured(built))]
    if missing := [name for name in recipe.evaluation.models if name not in (*built.models, "trained")]:
        notes.append(f"{missing[0]} models are not measured: {built.method.name} has none")
    if built.method.private is not None and not built.method.private_part(layout).blocks:
        notes.append(f"the model has nothing that matches {built.method.private}, so all of it is shared")
    if recipe.peers is not None:
        more = f"; signals are {human_bytes(sent)} more per round" if (sent := _signals(built)) else ""
        notes.append(f"bytes are those of one model of each peer; it goes to every peer that asks for it{more}")
    if built.method.turn.pool:
        notes.append("one model is trained on the examples of all clients in one place; nothing is sent")
    elif taking_part < len(federation.clients):
        notes.append(f"{taking_part} of {len(federation.clients)} clients train in a round; bytes are for all of them")
    if recipe.training.stacked == "auto":
        notes.append(f"clients train {'stacked' if built.stacked else 'one at a time'}")
    if built.method.codec.varies:
        notes.append("bytes up are those of a random update; a real one may be sparser")
    if sized_in_a_run := [name for name, value in built.method.extra_values.items() if isinstance(value, Array)]:
        notes.append(
            f"bytes leave out {' and '.join(sized_in_a_run)}: their sizes are known in a run only (bytes.jsonl)"
        )
    if recipe.attack is not None:
        notes.append(f"attack: {', '.join(built.attacks)} are hostile ({recipe.attack.name}); no number counts them")
        for group, count, hostile, factor in built.attacked_groups:
            z = "" if factor is None else f", with the factor {factor:.3g}"
            notes.append(f"attack: {hostile} of the {count} clients with {group} act together{z}")
    if built.terms is not None and recipe.privacy is not None:
        share = share_of(recipe.training, built.terms)
        least, rounds = built.method.stage.traits.hides, recipe.training.rounds
        notes += forecast(recipe.privacy, built.terms, shared.d, len(federation.trainers), share, rounds, least)
    notes += seen.visibility(built)
    clients, shape = built.partition.table(built.pool), tuple(built.dataset.input_shape)
    notes.append(f"inputs: {sized(shape, built.dataset.signal)}")
    return Plan(str(built.method), dict(parameters), clients, up, down, memory, notes, shape)


def _signals(built: Built) -> int:
    """Return the bytes of the signals by which peers judge each other, in the first round in which they send them."""
    community = community_of(built)
    warmup = community.context.config.warmup
    first = 1 if warmup is None else warmup.alone
    fields = signal_fields(community.context.at(community.names[0]), first)
    sizes = {"features": getattr(getattr(built.module, "encoder", None), "features", 0)}
    one = sum(
        prod(sizes[n] if isinstance(n, str) else n for n in field.shape) * field.dtype.itemsize
        for field in fields.values()
    )
    graph = community.graph(first)
    return one * sum(len(graph.receivers(name)) for name in community.names)


def activations(built: Built) -> int:
    """Return the bytes that the forward pass of one example keeps for its backward pass, beside the parameters."""
    module = built.module
    kept = {name: b.clone() for name, b in module.named_buffers()}
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    one = blank_input(built.dataset.input_shape, built.dataset.signal)
    tasks = tuple(task.name for task in built.federation.tasks)
    module.train()
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        outputs = module(torch.cat([one, one]), tasks)  # batch norm does not train on a single example
    del outputs
    for name, buffer in module.named_buffers():
        buffer.copy_(kept[name])
    return sum(sizes.values()) // 2
