"""How peers talk: messages of named tensors and plain values, a transport that carries bytes, and a mailbox.

A mailbox takes no message on trust: one that is late, doubled, corrupted or of another model is dropped and logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

_DIGEST = 16


@dataclass(frozen=True, eq=False)
class Message:
    """What one peer tells another.

    kind    what it is about; a peer sends another one message of a kind in a round
    layout  hash of the sender's model layout (`Layout.hash`): tensors mean the same only where it is the same
    tensors what bytes are counted on
    values  anything JSON can hold
    """

    kind: str
    sender: str
    round: int
    layout: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def encoded(self) -> bytes:
        """On the wire: a checksum, then safetensors whose metadata holds the rest. Made once for all receivers."""
        head = {k: getattr(self, k) for k in ("kind", "sender", "round", "layout", "values")}
        tensors = {name: t.detach().contiguous().clone() for name, t in self.tensors.items()}
        body = save(tensors, metadata={"message": json.dumps(head, sort_keys=True)})
        return _digest(body) + body

    @staticmethod
    def decode(data: bytes) -> Message:
        """Inverse of `encoded`. Raises ValueError for bytes that are not exactly what was sent."""
        digest, body = data[:_DIGEST], data[_DIGEST:]
        if _digest(body) != digest:
            raise ValueError("its checksum is wrong")
        try:
            size = int.from_bytes(body[:8], "little")
            head = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["message"])
            tensors = load(body)
            return Message(head["kind"], head["sender"], head["round"], head["layout"], tensors, head["values"])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"it cannot be read ({error})") from None


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


class Transport(Protocol):
    """One peer's connection to the others. It may lose, double, delay and damage what it carries."""

    def send(self, receiver: str, data: bytes) -> None:
        """Send without waiting for an answer."""
        ...

    def receive(self) -> list[bytes]:
        """What has come since the last call, ordered by sender and then by the order in which it was sent."""
        ...


class Network:
    """Peers in one process. `lost(round, sender, receiver, attempt)` says which messages are lost.

    Attempts count the messages of a pair in a round, from 0.
    """

    def __init__(self, lost: Callable[[int, str, str, int], bool] | None = None) -> None:
        self._lost = lost
        self._round = 0
        self._attempts: dict[tuple[str, str], int] = {}
        self._queues: dict[str, list[tuple[str, int, bytes]]] = {}
        self._number = 0

    def begin(self, round: int) -> None:
        """A new round, for `lost`."""
        self._round, self._attempts = round, {}

    def cancel(self, sender: str, receiver: str) -> int:
        """Take back what is on its way between two peers, for it would come too late. Returns how many messages."""
        queue = self._queues.get(receiver, [])
        self._queues[receiver] = [entry for entry in queue if entry[0] != sender]
        return len(queue) - len(self._queues[receiver])

    def post(self, sender: str, receiver: str, data: bytes) -> bool:
        """Put a message into the receiver's queue, unless it is lost. Returns whether it was put there."""
        attempt = self._attempts.get((sender, receiver), 0)
        self._attempts[sender, receiver] = attempt + 1
        if self._lost is not None and self._lost(self._round, sender, receiver, attempt):
            return False
        self._queue(sender, receiver, data)
        return True

    def take(self, receiver: str) -> list[bytes]:
        """The receiver's queue, which is empty then."""
        return [data for _, _, data in sorted(self._queues.pop(receiver, []), key=lambda entry: entry[:2])]

    def _queue(self, sender: str, receiver: str, data: bytes) -> None:
        self._queues.setdefault(receiver, []).append((sender, self._number, data))
        self._number += 1


@dataclass(frozen=True)
class InMemory:
    """One peer's end of a Network: a Transport."""

    network: Network
    name: str

    def send(self, receiver: str, data: bytes) -> None:
        self.network.post(self.name, receiver, data)

    def receive(self) -> list[bytes]:
        return self.network.take(self.name)


class Mailbox:
    """What a peer sends and accepts. `log` takes (event, fields) for every message that is dropped.

    Messages of later rounds, from peers that are ahead, are kept until their round.
    """

    def __init__(
        self, name: str, layout: str, transport: Transport, log: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.name, self.layout, self.transport, self.log = name, layout, transport, log
        self._early: list[Message] = []
        self._seen: set[tuple[str, str, int]] = set()
        self._round = 0

    def send(self, receiver: str, message: Message) -> None:
        """Send a message."""
        self.transport.send(receiver, message.encoded)

    def receive(self, round: int, kind: str) -> list[Message]:
        """Good messages of this kind and round, sorted by sender. Others of the round are kept for their own call."""
        if round > self._round:
            self._round, self._seen = round, set()
        for data in self.transport.receive():
            try:
                self._early.append(Message.decode(data))
            except ValueError as error:
                self._drop("corrupted", {"why": str(error)})
        good: list[Message] = []
        rest: list[Message] = []
        for message in self._early:
            key = message.sender, message.kind, message.round
            about = {"sender": message.sender, "kind": message.kind}
            if message.layout != self.layout:
                self._drop("wrong layout", {**about, "expected": self.layout, "found": message.layout})
            elif message.round < round:
                self._drop("late", {**about, "of round": message.round})
            elif message.round > round or message.kind != kind:
                rest.append(message)
            elif key in self._seen:
                self._drop("doubled", about)
            else:
                self._seen.add(key)
                good.append(message)
        self._early = rest
        return sorted(good, key=lambda m: m.sender)

    def _drop(self, what: str, fields: dict[str, Any]) -> None:
        self.log("message dropped", {"peer": self.name, "what": what, **fields})
