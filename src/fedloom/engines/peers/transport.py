"""How peers talk: messages of named tensors and plain values, a transport that carries their bytes, and a mailbox.

A mailbox takes no message on trust: one that is late, doubled, corrupted or of another model is dropped and logged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core.context import Log
from fedloom.core.untrusted import plain

Lost = Callable[[int, str, str, int], bool] | None
"""Whether a message is lost: takes (round, sender, receiver, attempt), attempts counting from 0. None loses none."""
_DIGEST = 16


@dataclass(frozen=True, eq=False)
class PeerMessage:
    """What one peer tells another.

    kind     what it is about; in a round a peer sends another one at most one message of a kind
    layout   hash of the sender's model layout (`Layout.hash`): tensors mean the same only where it is the same
    tensors  bytes are counted on these
    values   anything JSON can hold
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
    def decode(data: bytes) -> PeerMessage:
        """Inverse of `encoded`. Raises ValueError for bytes that are not exactly what was sent."""
        digest, body = data[:_DIGEST], data[_DIGEST:]
        if _digest(body) != digest:
            raise ValueError("its checksum is wrong")
        try:
            size = int.from_bytes(body[:8], "little")
            head = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["message"])
            tensors = load(body)
            return PeerMessage(head["kind"], head["sender"], head["round"], head["layout"], tensors, head["values"])
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it cannot be read ({plain(str(error), 200)})") from None


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a tree can hold them (uint8)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


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
    """Queues of messages between the peers of one process, of which some may be lost.

    `decode` is `PeerMessage.decode` that reads what one sender tells many only once: equal bytes give one message that
    all its receivers share within a round and must not write to. What cannot be read is an error for each of them.
    """

    def __init__(self, lost: Lost = None) -> None:
        self._lost = lost
        self._round = 0
        self._attempts: dict[tuple[str, str], int] = {}
        self._queues: dict[str, dict[str, tuple[bytes, ...]]] = {}
        self.decode = lru_cache(maxsize=None)(PeerMessage.decode)

    def begin(self, round: int) -> None:
        """A new round begins, from which attempts count."""
        self._round, self._attempts = round, {}
        self.decode.cache_clear()

    def here(self, name: str) -> bool:
        """Whether a peer is in this process."""
        return True

    def known(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """One number a peer: given those of the peers in this process, returns those of all peers."""
        return values

    def carry(self, sent: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Bring to other processes what was posted for their peers, at the end of each phase of a round.

        `sent` is what the peers of this process sent, as (sender, receiver, bytes); returned is what all peers sent.
        """
        return sent

    def cancel(self, sender: str, receiver: str) -> int:
        """Remove what one peer has sent another and would come too late. Returns the number of messages."""
        return len(self._queues.get(receiver, {}).pop(sender, ()))

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        """Put a message into the receiver's queue, unless it is lost."""
        if self._lost is not None:
            attempt = self._attempts.get((sender, receiver), 0)
            self._attempts[sender, receiver] = attempt + 1
            if self._lost(self._round, sender, receiver, attempt):
                return
        self.put(sender, receiver, data)

    def put(self, sender: str, receiver: str, data: bytes) -> None:
        """Put a message into the receiver's queue."""
        # tuples of bytes, for a million lists would keep the garbage collector busy
        queue = self._queues.setdefault(receiver, {})
        queue[sender] = (*queue.get(sender, ()), data)

    def take(self, receiver: str) -> list[bytes]:
        """Empty the receiver's queue, and return what was in it."""
        queue = self._queues.pop(receiver, {})
        return [data for sender in sorted(queue) for data in queue[sender]]


@dataclass(frozen=True)
class NetworkEnd:
    """One peer's end of a Network: a Transport."""

    network: Network
    name: str

    def send(self, receiver: str, data: bytes) -> None:
        self.network.post(self.name, receiver, data)

    def receive(self) -> list[bytes]:
        return self.network.take(self.name)


Decode = Callable[[bytes], PeerMessage]


class Mailbox:
    """What a peer sends and accepts. Every message that is dropped is logged.

    Messages of later rounds, from peers that are ahead, are kept until their round. `decode` reads a message; a network
    within one process reads it once for all its receivers (`Network.decode`).
    """

    def __init__(
        self, name: str, layout: str, transport: Transport, log: Log, decode: Decode = PeerMessage.decode
    ) -> None:
        self.name, self.layout, self.transport, self.log = name, layout, transport, log
        self.decode = decode
        self._early: list[PeerMessage] = []
        self._seen: dict[str, set[str]] = {}
        self._round = 0

    def send(self, receiver: str, message: PeerMessage) -> None:
        """Send a message."""
        self.transport.send(receiver, message.encoded)

    def receive(self, round: int, kind: str) -> list[PeerMessage]:
        """Good messages of this kind and round, sorted by sender. Those of other kinds are kept for their own call."""
        if round > self._round:
            self._round, self._seen = round, {}
        seen = self._seen.setdefault(kind, set())
        good: list[PeerMessage] = []
        rest: list[PeerMessage] = []
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
        return sorted(good, key=lambda message: message.sender)

    def _waiting(self) -> list[PeerMessage]:
        """Messages that were kept and those that came since, undamaged and of this model."""
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

    def _drop(self, what: str, message: PeerMessage | None, fields: dict[str, Any]) -> None:
        about = {} if message is None else {"sender": message.sender, "kind": message.kind}
        self.log("message dropped", {"peer": self.name, "what": what, **about, **fields})


class Newest(Mailbox):
    """A mailbox for peers that do not wait for each other: a message's round is its sender's own.

    Of each sender the newest message of a kind counts; an older one, or one that was taken before, is dropped. `seen`
    are the rounds of what was taken so far, kind -> sender -> round.
    """

    def __init__(
        self,
        name: str,
        layout: str,
        transport: Transport,
        log: Log,
        decode: Decode = PeerMessage.decode,
        seen: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        super().__init__(name, layout, transport, log, decode)
        self.seen: dict[str, dict[str, int]] = {kind: dict(rounds) for kind, rounds in (seen or {}).items()}
        self._by_kind: dict[str, list[PeerMessage]] = {}

    def receive(self, round: int, kind: str) -> list[PeerMessage]:
        """Good messages of this kind since the last call, one a sender, sorted. Others are kept for their own call."""
        seen = self.seen.setdefault(kind, {})
        newest: dict[str, PeerMessage] = {}
        for message in self._sorted().pop(kind, ()):
            if message.round <= seen.get(message.sender, 0):
                self._drop("doubled or overtaken", message, {"of round": message.round})
            else:  # one that nobody read before a newer one came is no fault
                seen[message.sender] = message.round
                newest[message.sender] = message
        return [newest[sender] for sender in sorted(newest)]

    def kept(self) -> list[bytes]:
        """Encoded messages that nobody has received yet, by kind, and within a kind in the order in which they came."""
        waiting = self._sorted()
        return [message.encoded for kind in sorted(waiting) for message in waiting[kind]]

    def _sorted(self) -> dict[str, list[PeerMessage]]:
        """Messages by kind, so that who looks for one kind need not go through all the others that wait."""
        came, self._early = self._waiting(), []
        for message in came:
            self._by_kind.setdefault(message.kind, []).append(message)
        return self._by_kind
