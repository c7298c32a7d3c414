"""What a run would do and cost, found without doing it: the dry run behind `fedloom show`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fedloom.core.context import Ctx, State
from fedloom.methods.method import Method
from fedloom.recipes.schema import Recipe
from fedloom.rounds import refusals
from fedloom.rounds.build import build
from fedloom.rounds.built import Built
from fedloom.rounds.messages import Payload, blank, count_down, count_up, rows_of
from fedloom.rounds.rounds import cohort, initial_state
from fedloom.rounds.server import dispatch


@dataclass(frozen=True)
class Plan:
    """What a run would do, without doing it."""

    method: str
    parameters: dict[str, int]
    clients: list[dict[str, Any]]
    bytes_up: int
    bytes_down: int
    memory: dict[str, int]
    notes: list[str] = field(default_factory=list)
    input_shape: tuple[int, ...] = ()


def plan(recipe: Recipe, method: Method | None = None) -> Plan:
    """Build everything, train nothing: parameters by role, the partition, bytes of one full round, memory."""
    refusals.method_in_python(recipe, method)
    return plan_of(build(recipe, method))


def _second_round(built: Built) -> State:
    """The server's state at the beginning, with a vector for every task, which it lacks before the first round."""
    state: State = initial_state(built)["server"]
    if built.method.task_vectors:
        vector = torch.zeros_like(state["model"])
        state["tasks"] = {task.name: vector for task in built.federation.tasks}
    return state


def plan_of(built: Built) -> Plan:
    """The plan of a run that is already built."""
    recipe = built.recipe
    layout, federation = built.layout, built.federation
    shared = built.method.shared_part(layout)
    parameters: dict[str, int] = {}
    for block in layout.blocks:
        parameters[block.role] = parameters.get(block.role, 0) + block.size
    if frozen := sum(p.numel() for p in built.frozen.values()):
        parameters["frozen"] = frozen
    messages = dispatch(built.method, layout, federation, _second_round(built), federation.clients)
    noise = torch.randn(1, shared.d, generator=torch.Generator().manual_seed(0))
    up = down = 0
    for name, client in federation.clients.items():
        down += sum(count_down(built.method, layout, federation, client, messages[name]).values())
        rows = rows_of(built.method, federation, [name])
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
        up += sum(count_up(built.method, layout, federation, payload).values())
    taking_part = len(cohort(list(federation.clients), recipe.training.participation, recipe.seed, 1))
    moments = {"sgd": 1 if recipe.training.optimizer.momentum else 0}.get(recipe.training.optimizer.name, 2)
    p = layout.parameters.d
    memory = {
        "matrix of updates (participants x shared parameters)": taking_part
        * shared.d
        * 4
        * (1 + len(built.method.auxiliary)),
        "models, gradients, optimiser (per worker)": recipe.runtime.workers * (3 + moments) * p * 4,
        "data": sum(t.nbytes for t in (built.dataset.train, built.dataset.test)),
    }
    if recipe.training.keep_optimizer and moments:
        memory["optimiser state of all clients"] = len(federation.clients) * moments * p * 4
    notes = [f"not measured: {gap}" for gap in refusals.unmeasured(built)]
    if missing := [name for name in recipe.evaluation.models if name not in (*built.models, "trained")]:
        notes.append(f"not measured: {missing[0]} models, for {built.method.name} has only {built.models[0]} ones")
    if built.method.private is not None and not built.method.private_part(layout).blocks:
        notes.append(f"the model has nothing that matches {built.method.private}, so all of it is shared")
    if recipe.peers is not None:
        notes.append("bytes are those of one model of each peer; it goes to every peer that asks for it")
    if taking_part < len(federation.clients):
        notes.append(f"{taking_part} of {len(federation.clients)} clients train in a round; bytes are for all of them")
    if built.method.codec.varies:
        notes.append("bytes up are those of a random update; a real one may be sparser")
    clients, shape = built.partition.table(built.pool), tuple(built.dataset.input_shape)
    return Plan(str(built.method), parameters, clients, up, down, memory, notes, shape)
