"""How peers talk: messages of named tensors and plain values, a transport that carries bytes, and a mailbox.

A mailbox takes no message on trust: one that is late, doubled, corrupted or of another model is dropped and logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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

    @cached_property
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
    def size(data: bytes) -> int:
        """`nbytes` of an encoded message, without decoding it."""
        return len(data) - _DIGEST - 8 - int.from_bytes(data[_DIGEST : _DIGEST + 8], "little")

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

    `decode` is `Message.decode` that reads what one sender tells many only once: equal bytes give one message, which
    all its receivers share within a round and may not write to. What cannot be read is refused to each.
    """

    def __init__(self, lost: Callable[[int, str, str, int], bool] | None = None) -> None:
        self._lost = lost
        self._round = 0
        self._attempts: dict[tuple[str, str], int] = {}
        self._queues: dict[str, dict[str, tuple[bytes, ...]]] = {}
        self.decode = lru_cache(maxsize=None)(Message.decode)

    def begin(self, round: int) -> None:
        """A new round, for `lost`."""
        self._round, self._attempts = round, {}
        self.decode.cache_clear()

    def here(self, name: str) -> bool:
        """Whether a peer is in this process."""
        return True

    def known(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Numbers of the peers that are here, with those of all others."""
        return values

    def carry(self, sent: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Bring to other processes what was posted for their peers; return `sent` (sender, receiver, bytes) by all.

        Called at the end of each phase of a round.
        """
        return sent

    def cancel(self, sender: str, receiver: str) -> int:
        """Take back what is on its way between two peers, for it would come too late. Returns how many messages."""
        return len(self._queues.get(receiver, {}).pop(sender, ()))

    def post(self, sender: str, receiver: str, data: bytes) -> bool:
        """Put a message into the receiver's queue, unless it is lost. Returns whether it was put there."""
        if self._lost is not None:
            attempt = self._attempts.get((sender, receiver), 0)
            self._attempts[sender, receiver] = attempt + 1
            if self._lost(self._round, sender, receiver, attempt):
                return False
        self.put(sender, receiver, data)
        return True

    def put(self, sender: str, receiver: str, data: bytes) -> None:
        """Put a message into the receiver's queue."""
        # tuples of bytes, for a million lists would keep the garbage collector busy
        queue = self._queues.setdefault(receiver, {})
        queue[sender] = (*queue.get(sender, ()), data)

    def take(self, receiver: str) -> list[bytes]:
        """The receiver's queue, which is empty then."""
        queue = self._queues.pop(receiver, {})
        return [data for sender in sorted(queue) for data in queue[sender]]


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

    Messages of later rounds, from peers that are ahead, are kept until their round. `decode` is what reads a message;
    a network within one process has one that reads it once for all (`Network.decode`).
    """

    def __init__(
        self,
        name: str,
        layout: str,
        transport: Transport,
        log: Callable[[str, dict[str, Any]], None],
        decode: Callable[[bytes], Message] = Message.decode,
    ) -> None:
        self.name, self.layout, self.transport, self.log = name, layout, transport, log
        self.decode = decode
        self._early: list[Message] = []
        self._seen: dict[str, set[str]] = {}
        self._round = 0

    def send(self, receiver: str, message: Message) -> None:
        """Send a message."""
        self.transport.send(receiver, message.encoded)

    def receive(self, round: int, kind: str) -> list[Message]:
        """Good messages of this kind and round, sorted by sender. Others of the round are kept for their own call."""
        if round > self._round:
            self._round, self._seen = round, {}
        seen = self._seen.setdefault(kind, set())
        good: list[Message] = []
        rest: list[Message] = []
        for message in self._waiting():
            if message.round < round:
                self._drop("late", message, {"of round": message.round})
            elif message.round > round or message.kind != kind:
                rest.append(message)
            elif message.sender in seen:
                self._drop("doubled", message, {})
            else:
                seen.add(message.sender)
                good.append(message)
        self._early = rest
        return sorted(good, key=lambda m: m.sender)

    def _waiting(self) -> list[Message]:
        """What was kept and what has come since, undamaged and of this model."""
        for data in self.transport.receive():
            try:
                message = self.decode(data)
            except ValueError as error:
                self._drop("corrupted", None, {"why": str(error)})
                continue
            if message.layout == self.layout:
                self._early.append(message)
            else:
                self._drop("wrong layout", message, {"expected": self.layout, "found": message.layout})
        return self._early

    def _drop(self, what: str, message: Message | None, fields: dict[str, Any]) -> None:
        about = {} if message is None else {"sender": message.sender, "kind": message.kind}
        self.log("message dropped", {"peer": self.name, "what": what, **about, **fields})


class Newest(Mailbox):
    """A mailbox for peers that do not wait for each other: a message's round is its sender's own.

    Of each sender the newest message of a kind counts; older ones, and one that came before, are dropped. `seen` are
    the rounds of what was taken so far, kind -> sender -> round.
    """

    def __init__(
        self,
        name: str,
        layout: str,
        transport: Transport,
        log: Callable[[str, dict[str, Any]], None],
        decode: Callable[[bytes], Message] = Message.decode,
        seen: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__(name, layout, transport, log, decode)
        self.seen: dict[str, dict[str, int]] = {kind: dict(rounds) for kind, rounds in (seen or {}).items()}
        self._by_kind: dict[str, list[Message]] = {}

    def receive(self, round: int, kind: str) -> list[Message]:
        """Good messages of this kind since the last call, one a sender, sorted. Others are kept for their own call."""
        seen = self.seen.setdefault(kind, {})
        newest: dict[str, Message] = {}
        for message in self._sorted().pop(kind, ()):
            if message.round <= seen.get(message.sender, 0):
                self._drop("doubled or overtaken", message, {"of round": message.round})
            else:  # one that nobody read before a newer one came is no fault
                seen[message.sender] = message.round
                newest[message.sender] = message
        return [newest[sender] for sender in sorted(newest)]

    def kept(self) -> list[bytes]:
        """What has come and was not asked for yet, encoded; by kind, each in the order in which it came."""
        waiting = self._sorted()
        return [message.encoded for kind in sorted(waiting) for message in waiting[kind]]

    def _sorted(self) -> dict[str, list[Message]]:
        """What has come, by kind, so that a look for one kind does not pass by all the others that wait."""
        came, self._early = self._waiting(), []
        for message in came:
            self._by_kind.setdefault(message.kind, []).append(message)
        return self._by_kind
