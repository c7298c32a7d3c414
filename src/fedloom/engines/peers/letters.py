"""What peers write into their letters and read from them, and the bytes that they count for.

A signal is what others judge its sender by, a request asks for a model, and a model letter answers it.
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
from fedloom.engines.peers.community import Terms, Trained
from fedloom.engines.peers.transport import Letter
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Part
from fedloom.federation.rounds.messages import Payload, blank
from fedloom.federation.runs.checkpoint import join_tree, split_tree

Age = tuple[int, float]
NEW: Age = (0, 0.0)


@dataclass(frozen=True, eq=False)
class Heard:
    """A neighbour's model, as a peer reads it from a letter.

    payload  its row is the displacement from `start` to the model (d; 0 out of scope), unless rows are (client, task)
    start    where the neighbour's training started (d), if letters tell that; else where this peer's did
    age      (own local rounds that have ended, simulated seconds) since the neighbour's model was made
    model    the neighbour's model (d), `start` out of scope; None where no stage or penalty looks at it
    """

    payload: Payload
    start: Tensor
    age: Age
    model: Tensor | None = None


def write(
    terms: Terms, trained: Trained, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> Letter:
    """A letter of the peer about its trained model."""
    made = {} if trained.made is None else {"made": trained.made}
    return Letter(kind, terms.client.id, trained.round, terms.layout.hash, tensors, {**values, **made})


def model_letter(terms: Terms, trained: Trained, same: bool, scope: str) -> Letter:
    """The trained model, or the update alone for a receiver that started from the `same` model."""
    payload, part = trained.payload, terms.part(scope)
    packed, buffers = payload.packed, payload.buffers
    update = same or terms.tells_update
    if not terms.by_task and (not update or scope != "full"):
        vector, codec = (trained.update, terms.method.codec) if update else (trained.model, Raw())
        packed = codec.pack(blank(part, terms.federation, (payload.row,), terms.shared.take(vector, part)[None]))
    if buffers is not None:
        buffers = terms.method.shared_buffers(terms.layout).take(buffers, terms.buffers(scope))
    tree = replace(payload, packed=packed, buffers=buffers).tree()
    if not same and terms.tells_start:
        start = terms.shared.take(trained.start, part)[None]
        tree["start"] = Raw().pack(blank(part, terms.federation, (payload.row,), start))["values"]
    skeleton, tensors = split_tree(tree)
    about = {"update": update, "scope": scope, "tasks": terms.client.shares, "payload": skeleton}
    return write(terms, trained, "model", tensors, about)


def digest(terms: Terms, vector: Tensor, scope: str) -> str:
    """A hash by which two peers see whether they started from the same model, in scope."""
    values = terms.shared.take(vector, terms.part(scope)).contiguous()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()


def acquainted(terms: Terms, letters: Iterable[Letter]) -> BuiltFederation:
    """The peer itself and the senders of letters, of whom it knows the tasks that they say they have, and no data."""
    known = {task.name: task for task in terms.federation.tasks}
    nothing = Part(terms.client.train.examples, np.zeros(0, dtype=np.int64), "unknown")
    clients = dict(terms.federation.clients)
    for letter in letters:
        if letter.sender not in clients:
            held = {task: (known[task], w * known[task].weight) for task, w in letter.values["tasks"].items()}
            clients[letter.sender] = BuiltClient(letter.sender, held, nothing, nothing, nothing)
    return replace(terms.federation, clients=dict(sorted(clients.items())))


def read(terms: Terms, letter: Letter, own: Trained, age: Age = NEW) -> Heard:
    """A neighbour's model from its letter, at a peer that has trained itself."""
    about = join_tree(letter.values["payload"], letter.tensors)
    start, theirs = about.pop("start", None), own.start
    payload = aged(terms, Payload.of(letter.sender, about), age)
    if terms.by_task:
        return Heard(payload, theirs, age)
    federation, scope = acquainted(terms, [letter]), str(letter.values["scope"])
    part = terms.part(scope)
    if start is not None:
        theirs = filled(terms, letter, start, part, own.start)
    like = blank(part, federation, (payload.row,), torch.zeros(1, part.d, dtype=own.start.dtype))
    codec = terms.method.codec if letter.values["update"] else Raw()
    values = codec.unpack(payload.packed, like)[0]
    # nobody looks at blocks that the neighbour does not have
    inside = values if letter.values["update"] else values - terms.shared.take(own.start, part)
    displacement = terms.shared.put(torch.zeros_like(own.start), part, inside)
    model = None
    if terms.method.turn.start == "own" or terms.config.penalty or terms.fine is not None:
        model = theirs + displacement
        if not letter.values["update"]:  # exactly as it came: a difference and a sum may round
            model = terms.shared.put(model, part, values)
    if payload.buffers is not None and own.payload.buffers is not None:
        every = terms.method.shared_buffers(terms.layout)
        buffers = every.put(own.payload.buffers.clone(), terms.buffers(scope), payload.buffers)
        payload = replace(payload, buffers=buffers)
    return Heard(as_row(terms, federation, payload, displacement), theirs, age, model)


def aged(terms: Terms, payload: Payload, age: Age) -> Payload:
    """A payload with its age, where stages read that."""
    about, rows = dict(zip(("staleness", "age"), map(float, age), strict=True)), len(payload.tasks)
    extra = {name: [v] * rows if rows else v for name, v in about.items() if name in terms.method.extras}
    return replace(payload, extra={**payload.extra, **extra})


def as_row(terms: Terms, federation: BuiltFederation, payload: Payload, displacement: Tensor) -> Payload:
    """A payload whose row is a displacement (d) from a start to a model."""
    return replace(payload, packed=Raw().pack(blank(terms.shared, federation, (payload.row,), displacement[None])))


def filled(terms: Terms, letter: Letter, values: Tensor, part: Layout, rest: Tensor) -> Tensor:
    """Raw values of a letter over a part of the shared columns, in a copy of `rest` (d)."""
    mine = terms.shared.take(rest, part).clone().unsqueeze(0)
    like = blank(part, acquainted(terms, [letter]), ((letter.sender, None),), mine)
    return terms.shared.put(rest.clone(), part, Raw().unpack({"values": values}, like)[0])


def count(terms: Terms, letter: Letter) -> ByteCount:
    """Bytes of a letter's tensors by (role, task); they add up to `nbytes`."""
    if letter.kind != "model":
        return {("signal", None): letter.nbytes} if letter.nbytes else {}
    about = join_tree(letter.values["payload"], letter.tensors)
    part = terms.part(letter.values["scope"])
    rows = tuple((letter.sender, task) for task in about["tasks"]) or ((letter.sender, None),)
    like = blank(part, acquainted(terms, [letter]), rows, torch.zeros(len(rows), part.d))
    bytes_ = (terms.method.codec if letter.values["update"] else Raw()).count(about["packed"], like)
    buffers = [*([] if about["buffers"] is None else [about["buffers"]]), *about["integers"].values()]
    if buffers:
        bytes_["buffer", None] = sum(t.nbytes for t in buffers)
    if beside := letter.nbytes - sum(bytes_.values()):
        bytes_["side", None] = bytes_.get(("side", None), 0) + beside
    return bytes_
