"""Loading a received message, and what a client keeps, into the client's model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.layout import Layout
from fedloom.core.updates import RowList
from fedloom.federation.rounds.federation import BuiltFederation
from fedloom.federation.rounds.messages import Message, blank, unpacked
from fedloom.federation.runs.checkpoint import map_tensors
from fedloom.methods.method import Method
from fedloom.training.flat import FlatModel


def task_messages(
    method: Method, model: FlatModel, federation: BuiltFederation, client: str, received: Message
) -> dict[str, Message]:
    """A received message as one message per task, each with a whole vector: the task's own, or that of all."""
    tasks = federation.client(client).tasks
    if not method.task_vectors:
        return dict.fromkeys(tasks, received)
    params, shared = model.layout.parameters, method.shared_part(model.layout)
    origin = params.take(model.initial[: params.d], shared).to("cpu")
    start = dict.fromkeys(tasks, origin)
    if received.tasks:
        rows = tuple((client, task) for task in received.tasks)
        X, _ = unpacked(method, shared, federation, rows, received.packed, origin.dtype)
        start |= {task: origin + x for task, x in zip(received.tasks, X, strict=True)}
    return {task: Message(vector, received.buffers, received.integers) for task, vector in start.items()}


def for_task(
    method: Method, model: FlatModel, federation: BuiltFederation, client: str, received: Message, task: str | None
) -> Message:
    """A message with the whole vector of one task; unchanged if tasks have no models of their own."""
    return received if task is None else task_messages(method, model, federation, client, received)[task]


def personal_state(model: FlatModel, params: Tensor, more: State | None = None) -> State:
    """A client's own model as state."""
    state = {"vector": torch.cat([params, model.buffers]), "integers": dict(model.integers), **(more or {})}
    kept: State = map_tensors(state, lambda t: t.to("cpu", copy=True))
    return kept


def load_personal(model: FlatModel, personal: State) -> None:
    """Load a client's own model, if there is one, over the loaded one."""
    if personal:
        model.vector.copy_(personal["vector"])
        model.load_integers(personal["integers"])


def load(method: Method, model: FlatModel, received: Message, state: State) -> Tensor:
    """Load what the server sent, and what the client keeps for itself, into the model.

    Returns the loaded vector, which nobody may change: what was sent where that is all of it, else a copy.
    """
    layout = model.layout
    params, shared = layout.parameters, method.shared_part(layout)
    if shared is not params:  # all others are written below
        rest = params.without(shared)
        params.put(model.params, rest, params.take(model.initial[: params.d], rest))
    model.buffers.copy_(model.initial[params.d :])
    model.load_integers(model.initial_integers)
    vector = state["own"] if received.vector is None else received.vector
    params.put(model.params, shared, vector.to(model.device))
    if "private" in state:
        params.put(model.params, method.private_part(layout), state["private"].to(model.device))
    buffers = state.get("buffers") if method.buffers == "local" else received.buffers
    if buffers is not None:
        layout.buffers.put(model.buffers, method.shared_buffers(layout), buffers.to(model.device))
    if "private_buffers" in state:
        own = layout.buffers.without(method.shared_buffers(layout))
        layout.buffers.put(model.buffers, own, state["private_buffers"].to(model.device))
    model.load_integers(state.get("integers", {}) if method.buffers == "local" else dict(received.integers))
    loaded = model.vector
    whole = vector.shape == loaded.shape and vector.dtype == loaded.dtype and vector.device == loaded.device
    return vector if whole else loaded.clone()


def pack_tasks(
    method: Method, layout: Layout, federation: BuiltFederation, state: State, client: str, tasks: Iterable[str]
) -> Message:
    """The vectors of some tasks, packed as the client will pack its own; tasks without a vector are left out."""
    tasks = tuple(task for task in sorted(tasks) if task in state["tasks"])
    packed: Mapping[str, Tensor] = {}
    if tasks:
        vectors = RowList(tuple(state["tasks"][task] for task in tasks))
        rows = tuple((client, task) for task in tasks)
        packed = method.codec.pack(blank(method.shared_part(layout), federation, rows, vectors))
    return Message(None, state["buffers"], state["integers"], packed=packed, tasks=tasks)
