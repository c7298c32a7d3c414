"""Checks of what nodes send: it is accepted only if an honest node could send it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import ByteCount
from fedloom.core.untrusted import Array, Sender, Text, shown
from fedloom.engines.flower.fields import payload_fields, read_peer_message, sender_of
from fedloom.engines.flower.relay import as_counts
from fedloom.engines.flower.wire import RefusedError, decode, expect, head_of, numbers_of, said, size_of
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import Scores
from fedloom.federation.rounds.messages import Payload, rows_of
from fedloom.federation.runs.reader import described
from fedloom.models.tasks.task import Task
from fedloom.training.flat import integer_buffers
from fedloom.training.loop import LocalResult

_BESIDE = 1 << 20
"""Most bytes of one extra of one row."""
ANSWER = 1 << 20
"""Most bytes of an answer's texts and numbers, beside a payload."""
_LINES = 1000
"""Most records, and most events, of one turn of a peer."""


def open_reply(content: Any, limit: int, **expected: Any) -> tuple[Any, dict[str, float]]:
    """(tree, numbers) of an answer of at most `limit` bytes. RefusedError, with the node's words, if it failed."""
    size = size_of(content)
    if size > limit:
        raise RefusedError(f"payload: expected at most {limit} bytes, found {size}")
    head = head_of(content)
    if "error" in head:
        raise RefusedError(said(head["error"]))
    expect(head, **expected)
    return decode(content), numbers_of(content)


def limit_of(built: Built, client: str) -> int:
    """Most bytes of a client's payload: the largest result of the codec, and all that travels beside it."""
    method, shared = built.method, built.method.shared_part(built.layout)
    rows = len(rows_of(method, built.federation, [client]))
    vector = 4 * shared.d
    packed = rows * (vector + shared.d // 8 + len(shared.blocks) + 1024)
    sender = sender_of(built, built.federation.clients[client])
    points = 8 * sum(sender.classes.values()) * (sender.sizes.get("features", 0) + 3)
    beside = len(method.auxiliary) * vector + rows * (len(method.extras) * (_BESIDE + points) + len(shared.blocks))
    buffers = 8 * built.layout.buffers.d + sum(t.nbytes for t in integer_buffers(built.module).values())
    return packed + beside + buffers + ANSWER


def payload_of(built: Built, client: str, tree: Any) -> Payload:
    """A client's payload. Raises ValueError, with the field, if it does not fit the method and the model."""
    held = built.federation.clients[client]
    if isinstance(tree, dict) and tree.get("finite", True) is False:
        return Payload((client, None), 1.0, finite=False)
    shared, buffers = built.method.shared_part(built.layout), built.method.shared_buffers(built.layout)
    fields, sender = payload_fields(built, held, tree, shared, built.method.codec, buffers)
    return Payload.of(client, fields.read(tree, sender))


@dataclass(frozen=True, eq=False)
class Told:
    """What a peer's turn left, as its node tells it: peer messages (receiver, bytes), records, events, byte counts."""

    peer_messages: list[tuple[str, Tensor]]
    records: list[tuple[str, dict[str, Any]]]
    events: list[str]
    """In the node's words."""
    up: ByteCount
    down: ByteCount


def told_by(built: Built, community: Community, client: str, round: int, tree: Any) -> Told:
    """A peer's turn. Raises ValueError, with the field, for what an honest peer would not tell in this round."""
    if not isinstance(tree, dict) or tree.keys() != {"peer_messages", "records", "events", "up", "down"}:
        raise ValueError("expected peer_messages, records, events, up, down")
    terms, names = community.context.at(client), built.federation.clients
    peer_messages = []
    for receiver, data in _some(tree["peer_messages"], "peer_messages", len(names)):
        if receiver not in names:
            raise ValueError(f"peer_messages: expected a client of this run, found {shown(receiver)}")
        data = Array((data.numel(),), torch.uint8).read(data, Sender())
        peer_messages.append((receiver, data))
    # the same bytes to several are one tensor
    for data in {id(data): data for _, data in peer_messages}.values():
        read_peer_message(built, terms, PeerMessage.decode(data.numpy().tobytes()), round)
    records = [(name, _record(client, name, fields)) for name, fields in _some(tree["records"], "records", _LINES)]
    events = _some(tree["events"], "events", _LINES)
    words = [said(f"{event}{described(fields) if isinstance(fields, dict) else ''}") for event, fields in events]
    return Told(peer_messages, records, words, as_counts(tree["up"]), as_counts(tree["down"]))


def _some(value: Any, field: str, most: int) -> list[Any]:
    if not (isinstance(value, list) and len(value) <= most and all(isinstance(v, list) and len(v) == 2 for v in value)):
        raise ValueError(f"{field}: expected at most {most} pairs, found {shown(value)}")
    return value


def _record(client: str, kind: Any, fields: Any) -> dict[str, Any]:
    """A record of a peer, of plain values, and about itself alone."""
    Text(50).read(kind, Sender())
    if not isinstance(fields, dict) or "kind" in fields or fields.get("peer", client) != client:
        raise ValueError(f"records: expected fields of peer {client!r}, found {shown(fields)}")
    try:
        size = len(json.dumps(fields))
    except TypeError as error:
        raise ValueError(f"records: expected plain values, but {error}") from None
    if size > ANSWER:
        raise ValueError(f"records: expected at most {ANSWER} bytes, found {size}")
    return fields


def result_of(numbers: Mapping[str, float], tasks: Mapping[str, Any], withheld: bool = False) -> LocalResult:
    """The numbers of a training: steps, examples, losses by task; losses are nan where they are `withheld`."""
    by_task = {
        task: LocalResult(_count(numbers, f"steps/{task}"), _count(numbers, f"examples/{task}"))
        for task in tasks
        if withheld or f"loss/{task}" in numbers
    }
    return LocalResult(
        _count(numbers, "steps"),
        _count(numbers, "examples"),
        {task: float(numbers.get(f"loss/{task}", math.nan)) for task in by_task},
        waiting=seconds_of(numbers, "waiting"),
        by_task=by_task,
    )


def _count(numbers: Mapping[str, float], name: str) -> int:
    value = numbers.get(name, 0)
    return int(value) if 0 <= value <= 1 << 53 else 0


def seconds_of(numbers: Mapping[str, float], name: str) -> float:
    """Seconds that a node told; 0 for what cannot be."""
    value = numbers.get(name, 0.0)
    return float(value) if 0 <= value <= 1e9 else 0.0


def scores_of(prefix: str, numbers: Mapping[str, float], tasks: Mapping[str, Task]) -> Scores:
    """Scores that arrived as PREFIX/TASK/METRIC: only these tasks, and only metrics that they have."""
    return {
        name: {
            metric: float(numbers[f"{prefix}/{name}/{metric}"])
            for metric in (*task.metrics, "loss")
            if f"{prefix}/{name}/{metric}" in numbers
        }
        for name, task in tasks.items()
    }
