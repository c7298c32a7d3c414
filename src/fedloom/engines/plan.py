"""The plan of a run and its cost, without doing it: the dry run behind `fedloom show`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.untrusted import Array
from fedloom.engines.peers.messages import signal_fields
from fedloom.engines.peers.rounds import community_of
from fedloom.federation.rounds import seen
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import constant_scores
from fedloom.federation.rounds.federation import Common, cohort
from fedloom.federation.rounds.measure import unmeasured
from fedloom.federation.rounds.messages import Message, Payload, blank, count_bytes, nothing, rows_of
from fedloom.federation.rounds.privacy import forecast, share_of
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch, server_init, server_step
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
    rough: dict[str, str] = field(default_factory=dict)
    """'up', 'down' -> 'up to', 'at least' or 'about', where the bytes are not exactly those of a run's later rounds."""
    constant: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Task -> its metric, and the score of the constant prediction on test data (see `constant_scores`)."""


def plan(built: Built) -> Plan:
    """Plan a run: parameters by role, the partition, bytes of one full round, memory, the constant prediction."""
    return replace(plan_of(built), constant=constant_scores(built.federation))


def _messages(built: Built) -> dict[str, Message]:
    """Return what the server sends in the second round, when it has vectors of tasks and what stages broadcast."""
    method, clients = built.method, built.federation.clients
    state: State = initial_state(built)["server"]
    if method.task_vectors:
        state["tasks"] = dict.fromkeys((task.name for task in built.federation.tasks), _noise(state["model"].shape))
        if state["buffers"] is not None and len(state["buffers"]):
            state["task_buffers"] = dict.fromkeys(state["tasks"], state["buffers"])
    messages = dispatch(built, state, clients)
    needed = frozenset[str]().union(*(rule.needs for rule in method.rules))
    known = {f"broadcast:{name}" for message in messages.values() for name in message.broadcast}
    if built.recipe.peers is not None or needed <= known or _unsized(built):
        return messages
    # a first step shows it on a model with one value per block as well as on the whole one, unless products are taken
    blocks = built.layout.blocks
    if not any(block.role == "adapter" for block in blocks):
        blocks = tuple(replace(block, shape=(1,) * len(block.shape)) for block in blocks)
    small = Common(method, Layout(blocks), built.federation)
    state = server_init(method, small.layout, _noise((sum(block.size for block in blocks),)), {}, built.recipe.seed)
    first = dispatch(small, state, clients)
    noise = _rows_of_noise(small)
    payloads = [_payload(small, name, message, noise) for name, message in first.items()]
    ctx = Ctx(1, built.recipe.seed, rows_of(small, clients), len(clients), held=built.federation.held)
    second = dispatch(small, server_step(small, payloads, state, ctx), clients)

    def whole(tensor: Tensor) -> Tensor:
        return nothing(1, built.shared.d, tensor.dtype)[0] if tensor.shape == (small.shared.d,) else tensor

    return {
        name: replace(
            message,
            vector=None if second[name].vector is None else message.vector,
            broadcast={key: whole(tensor) for key, tensor in second[name].broadcast.items()},
        )
        for name, message in messages.items()
    }


def _payload(common: Common, name: str, message: Message, noise: Tensor) -> Payload:
    """Return what a client would send after this message, were its update `noise` where it trains."""
    method, shared, rows = common.method, common.shared, rows_of(common, [name])
    X = noise[: len(rows)]
    if method.phases:
        X = X.clone()
        trained = {block for phase in method.phases for block in shared.select(phase.select).names}
        for block in shared.names:
            if block not in trained:
                X[:, shared.slice(block)] = 0
    updates = blank(shared, common.federation, rows, X)
    for rule in method.rules:
        updates = rule.moved(updates, dict(message.broadcast))
    updates, _ = method.edge(updates, method.edge.init(shared), Ctx(1))
    return Payload(
        (name, None),
        1.0,
        method.codec.pack(updates),
        {key: common.federation.client(name).class_counts if key == "classes" else 0.0 for key in method.extras},
        dict.fromkeys(method.auxiliary, X[0]),
        torch.zeros(len(rows), len(shared.blocks)) if method.wants_support else None,
        message.buffers,
        message.integers,
        tasks={task: 1.0 for _, task in rows if task is not None},
    )


def _noise(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _rows_of_noise(common: Common) -> Tensor:
    """Return as many rows as a client sends at most."""
    most = max((len(rows_of(common, [name])) for name in common.federation.clients), default=0)
    return _noise((most, common.shared.d))


def _unsized(built: Built) -> list[str]:
    """Return the extras whose sizes are known in a run only."""
    return [name for name, value in built.method.extra_values.items() if isinstance(value, Array)]


def _rough(built: Built) -> dict[str, str]:
    """Return by how much the bytes of each way may be off (see `Plan.rough`)."""
    method, words = built.method, {(True, False): "up to", (False, True): "at least", (True, True): "about"}
    more = bool(_unsized(built))
    ways = {
        "up": (method.codec.varies, more),
        "down": (method.codec.varies and method.task_vectors, more and any(rule.needs for rule in method.rules)),
    }
    return {way: words[found] for way, found in ways.items() if any(found)}


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
    up = down = 0
    noise = _rows_of_noise(built)
    for name, message in () if built.method.turn.pool else _messages(built).items():
        down += sum(count_bytes(built, name, message).values())
        up += sum(count_bytes(built, name, _payload(built, name, message, noise)).values())
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
        notes.append("bytes are those of random updates; real ones may be sparser")
    if sized_in_a_run := _unsized(built):
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
    return Plan(str(built.method), dict(parameters), clients, up, down, memory, notes, shape, _rough(built))


def _signals(built: Built) -> int:
    """Return the bytes of the signals by which peers judge each other, in the first round in which they send them."""
    community = community_of(built)
    first = community.context.first
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
