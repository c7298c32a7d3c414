"""What each field of a payload and of a peer message must be: what an honest node of this client could send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import Codec, Raw
from fedloom.core.context import Row
from fedloom.core.layout import Layout
from fedloom.core.untrusted import Array, Each, Exactly, Named, Nothing, Number, OneOf, Sender, Text, Untrusted, shown
from fedloom.core.updates import Updates
from fedloom.engines.peers.community import PeerContext
from fedloom.engines.peers.judging import due, signal_fields
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.messages import blank
from fedloom.federation.runs.checkpoint import join_tree
from fedloom.training.flat import integer_buffers

_MANY = 1 << 53


@dataclass(frozen=True, eq=False)
class Packed:
    """What a codec packs of rows like these."""

    codec: Codec
    like: Updates

    def read(self, value: Any, sender: Sender) -> Mapping[str, Tensor]:
        return self.codec.read(value, self.like)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Float buffers of a layout, end to end; variances are not negative."""

    layout: Layout

    def read(self, value: Any, sender: Sender) -> Tensor:
        read = Array((self.layout.d,)).read(value, sender)
        for block, s in zip(self.layout.blocks, self.layout.slices, strict=True):
            if block.name.endswith("running_var") and bool((read[s] < 0).any()):
                raise ValueError(f"expected variances of at least 0 in {block.name}, found {float(read[s].min()):g}")
        return read


def payload_fields(
    built: Built, client: BuiltClient, tree: Any, part: Layout, codec: Codec, buffers: Layout
) -> tuple[Named, Sender]:
    """(the fields of a payload of a client, what they are judged by): rows over `part`, buffers of that layout.

    `tree` is what came: it says which of the client's tasks are there. Raises ValueError where it does not.
    """
    method, shared = built.method, built.method.shared_part(built.layout)
    n = len(client.train) if method.counts_examples else 1
    tasks = _tasks(client, tree) if method.turn.by_task else ()
    rows: tuple[Row, ...] = tuple((client.id, task) for task in tasks) or ((client.id, None),)
    values = torch.zeros(1, 1).expand(len(rows), part.d)
    support = Array((len(rows), len(shared.blocks)) if tasks else (len(shared.blocks),), torch.bool)
    one = [_extras(built, client.only(task)) for task in tasks] or [_extras(built, client)]
    extras: dict[str, Untrusted] = {
        name: Each(tuple(each[name] for each in one)) if tasks else one[0][name] for name in one[0]
    }
    sent = method.buffers != "local"
    fields: dict[str, Untrusted] = {
        "n": Exactly(n),
        "tasks": Named({task: Number(1, n, whole=True) for task in tasks}),
        "packed": Packed(codec, blank(part, built.federation, rows, values)),
        "extra": Named(extras),
        "side": Named(dict.fromkeys(method.auxiliary, Array((shared.d,)))),
        "support": support if method.wants_support else Nothing(),
        "buffers": Statistics(buffers) if sent and method.shared_buffers(built.layout).d else Nothing(),
        "integers": Named(integer_fields(built) if sent else {}),
    }
    return Named(fields), sender_of(built, client)


def _tasks(client: BuiltClient, tree: Any) -> tuple[str, ...]:
    told = tree.get("tasks") if isinstance(tree, Mapping) else None
    if not (isinstance(told, Mapping) and told and [*told] == [task for task in sorted(client.tasks) if task in told]):
        raise ValueError(f"tasks: expected some of {', '.join(sorted(client.tasks))}, sorted, found {shown(told)}")
    return tuple(told)


def _extras(built: Built, client: BuiltClient) -> dict[str, Untrusted]:
    """What the stages declare, and closer what the server knows: the client's domain and tasks."""
    first = next((task.channels for task, _ in client.tasks.values() if task.kind == "classification"), 0)
    known: dict[str, Untrusted] = {
        "steps": Number(0, _MANY, whole=True),
        "domain": Exactly(client.domain or ""),
        "tasks": Exactly(",".join(sorted(client.tasks))),
        "classes": Array((first,), torch.float64, 0, _MANY),
    }
    return {name: known.get(name, value) for name, value in built.method.extra_values.items()}


def integer_fields(built: Built) -> dict[str, Array]:
    """Integer buffers. Counters are not negative; others, such as positions, stay in the range of the model's own."""
    return {
        name: Array(tuple(value.shape), value.dtype, 0, _MANY)
        if not value.ndim or value.dtype == torch.bool
        else Array(tuple(value.shape), value.dtype, float(value.min()), float(value.max()))
        for name, value in integer_buffers(built.module).items()
    }


def sender_of(built: Built, client: BuiltClient) -> Sender:
    """What is known of a client."""
    heads, encoder = list(getattr(built.module, "heads", ())), getattr(built.module, "encoder", None)
    classes = {heads.index(n): task.channels for n, (task, _) in client.tasks.items() if task.kind == "classification"}
    width = getattr(encoder, "features", None)
    return Sender({} if width is None else {"features": width}, classes)


def read_peer_message(built: Built, context: PeerContext, peer_message: PeerMessage, round: int) -> None:
    """Check what a peer tells others; `context` are at this peer. Raises ValueError with the field.

    Peer messages are carried as they came, so nothing in them is cast.
    """
    me, sender = context.client, sender_of(built, context.client)
    Named({"round": Exactly(round), "sender": Exactly(me.id), "layout": Exactly(context.layout.hash)}).read(
        {"round": peer_message.round, "sender": peer_message.sender, "layout": peer_message.layout}, sender
    )
    OneOf(("signal", "request", "model")).read(peer_message.kind, sender)
    scope, flag = OneOf(("full", "encoder")), OneOf((True, False))
    tasks = Named({task: Number(0) for task in me.tasks})
    if peer_message.kind == "signal":
        now = due(context, round)
        Named({"tasks": tasks, "due": Exactly(now)}).read(peer_message.values, sender)
        Named(signal_fields(context) if now else {}).read(peer_message.tensors, sender)
    elif peer_message.kind == "request":
        Named({"base": Text(), "scope": scope}).read(peer_message.values, sender)
        Named({}).read(peer_message.tensors, sender)
    else:
        about = dict(peer_message.values)
        skeleton = about.pop("payload", None)
        Named({"update": flag, "scope": scope, "tasks": tasks}).read(about, sender)
        _read_model(built, context, peer_message, join_tree(skeleton, peer_message.tensors))


def _read_model(built: Built, context: PeerContext, peer_message: PeerMessage, tree: Any) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"payload: expected fields, found {shown(tree)}")
    about, start = peer_message.values, tree.pop("start", None)
    part, buffers = context.part(about["scope"]), context.buffers(about["scope"])
    codec = context.method.codec if about["update"] or context.by_task else Raw()
    fields, sender = payload_fields(built, context.client, tree, part, codec, buffers)
    read = fields.read(tree, sender)
    if start is not None:
        like = blank(part, context.federation, ((context.client.id, None),), torch.zeros(1, 1).expand(1, part.d))
        read["start"] = Raw().read({"values": start}, like)["values"]
    came = {id(t) for t in peer_message.tensors.values()}
    if any(id(t) not in came for t in _tensors(read)):  # it was cast
        raise ValueError("payload: expected the dtypes of the model")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [t for one in inside for t in _tensors(one)]
