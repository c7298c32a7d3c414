"""The content of peer messages: how peers write and read it, and how many bytes it counts for.

Others judge a peer by its signal, ask for its model by a request, and get the model in a model message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.codecs import ByteCount, Raw
from fedloom.core.layout import Layout
from fedloom.engines.peers.community import PeerContext, Trained
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Part
from fedloom.federation.rounds.messages import Payload, blank
from fedloom.federation.runs.checkpoint import join_tree, split_tree

Age = tuple[int, float]
NEW: Age = (0, 0.0)


@dataclass(frozen=True, eq=False)
class Heard:
    """A neighbour's model, as a peer reads it from a message.

    payload  its row is the displacement from `start` to the model (d; 0 out of scope), unless rows are (client, task)
    start    where the neighbour's training started (d), if messages say so; else where this peer's did
    age      (own local rounds that have ended, simulated seconds) since the neighbour's model was trained
    model    the neighbour's model (d), `start` out of scope; None where no stage or penalty reads it
    """

    payload: Payload
    start: Tensor
    age: Age
    model: Tensor | None = None


def write(
    context: PeerContext, trained: Trained, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> PeerMessage:
    """Write a message of the peer about its trained model."""
    time = {} if trained.ended is None else {"made": trained.ended}
    return PeerMessage(kind, context.client.id, trained.round, context.layout.hash, tensors, {**values, **time})


def model_message(context: PeerContext, trained: Trained, same: bool, scope: str) -> PeerMessage:
    """Write the trained model, or the update alone for a receiver that started from the `same` model."""
    payload, part = trained.payload, context.part(scope)
    packed, buffers = payload.packed, payload.buffers
    # an update is shorter than a model where the codec compresses it, but needs a start that the receiver has
    update = same or context.tells_update
    if not context.by_task and (not update or scope != "full"):
        vector, codec = (trained.update, context.method.codec) if update else (trained.model, Raw())
        packed = codec.pack(blank(part, context.federation, (payload.row,), context.shared.take(vector, part)[None]))
    if buffers is not None:
        buffers = context.method.shared_buffers(context.layout).take(buffers, context.buffers(scope))
    tree = replace(payload, packed=packed, buffers=buffers).tree()
    if not same and context.tells_start:
        start = context.shared.take(trained.start, part)[None]
        tree["start"] = Raw().pack(blank(part, context.federation, (payload.row,), start))["values"]
    skeleton, tensors = split_tree(tree)
    about = {"update": update, "scope": scope, "tasks": context.client.shares, "payload": skeleton}
    return write(context, trained, "model", tensors, about)


def digest(context: PeerContext, vector: Tensor, scope: str) -> str:
    """Return a hash by which two peers see whether they started from the same model, in scope."""
    values = context.shared.take(vector, context.part(scope)).contiguous()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()


def acquainted(context: PeerContext, messages: Iterable[PeerMessage]) -> BuiltFederation:
    """Return the peer with the senders of messages; it knows their tasks, as they state them, and no data of theirs."""
    known = {task.name: task for task in context.federation.tasks}
    nothing = Part(context.client.train.examples, np.zeros(0, dtype=np.int64), "unknown")
    clients = dict(context.federation.clients)
    for message in messages:
        if message.sender not in clients:
            tasks = {task: (known[task], w * known[task].weight) for task, w in message.values["tasks"].items()}
            clients[message.sender] = BuiltClient(message.sender, tasks, nothing, nothing, nothing)
    return replace(context.federation, clients=dict(sorted(clients.items())))


def read(context: PeerContext, message: PeerMessage, own: Trained, age: Age = NEW) -> Heard:
    """Read a neighbour's model from its message, at a peer that has trained itself."""
    about = join_tree(message.values["payload"], message.tensors)
    start, theirs = about.pop("start", None), own.start
    payload = aged(context, Payload.of(message.sender, about), age)
    if context.by_task:
        return Heard(payload, theirs, age)
    federation, scope = acquainted(context, [message]), str(message.values["scope"])
    part = context.part(scope)
    if start is not None:
        theirs = filled(context, message, start, part, own.start)
    like = blank(part, federation, (payload.row,), torch.zeros(1, part.d, dtype=own.start.dtype))
    codec = context.method.codec if message.values["update"] else Raw()
    values = codec.unpack(payload.packed, like)[0]
    # blocks that the neighbour lacks hold any values here: no reader looks at them
    inside = values if message.values["update"] else values - context.shared.take(own.start, part)
    displacement = context.shared.put(torch.zeros_like(own.start), part, inside)
    model = None
    if context.method.turn.start == "own" or context.config.penalty or context.fine is not None:
        model = theirs + displacement
        if not message.values["update"]:  # exactly as received, because a difference and a sum may round
            model = context.shared.put(model, part, values)
    if payload.buffers is not None and own.payload.buffers is not None:
        every = context.method.shared_buffers(context.layout)
        buffers = every.put(own.payload.buffers.clone(), context.buffers(scope), payload.buffers)
        payload = replace(payload, buffers=buffers)
    return Heard(as_row(context, federation, payload, displacement), theirs, age, model)


def aged(context: PeerContext, payload: Payload, age: Age) -> Payload:
    """Return a payload with its age, where stages read that."""
    about, rows = dict(zip(("staleness", "age"), map(float, age), strict=True)), len(payload.tasks)
    extra = {name: [v] * rows if rows else v for name, v in about.items() if name in context.method.extras}
    return replace(payload, extra={**payload.extra, **extra})


def as_row(context: PeerContext, federation: BuiltFederation, payload: Payload, displacement: Tensor) -> Payload:
    """Return a payload whose row is a displacement (d) from a start to a model."""
    return replace(payload, packed=Raw().pack(blank(context.shared, federation, (payload.row,), displacement[None])))


def filled(context: PeerContext, message: PeerMessage, values: Tensor, part: Layout, rest: Tensor) -> Tensor:
    """Return a copy of `rest` (d) with raw values of a message in a part of the shared columns."""
    mine = context.shared.take(rest, part).clone().unsqueeze(0)
    like = blank(part, acquainted(context, [message]), ((message.sender, None),), mine)
    return context.shared.put(rest.clone(), part, Raw().unpack({"values": values}, like)[0])


def count(context: PeerContext, message: PeerMessage) -> ByteCount:
    """Count the bytes of a message's tensors by (role, task); they add up to `nbytes`."""
    if message.kind != "model":
        return {("signal", None): message.nbytes} if message.nbytes else {}
    about = join_tree(message.values["payload"], message.tensors)
    part = context.part(message.values["scope"])
    rows = tuple((message.sender, task) for task in about["tasks"]) or ((message.sender, None),)
    like = blank(part, acquainted(context, [message]), rows, torch.zeros(len(rows), part.d))
    bytes_ = (context.method.codec if message.values["update"] else Raw()).count(about["packed"], like)
    buffers = [*([] if about["buffers"] is None else [about["buffers"]]), *about["integers"].values()]
    if buffers:
        bytes_["buffer", None] = sum(t.nbytes for t in buffers)
    if beside := message.nbytes - sum(bytes_.values()):
        bytes_["side", None] = bytes_.get(("side", None), 0) + beside
    return bytes_
