"""The talk of peers: messages of named tensors and plain values, a network that carries their bytes, and a mailbox.

A mailbox takes no message on trust. It drops and logs a message that is late, doubled, corrupted or of another model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core.context import Log
from fedloom.core.untrusted import plain

Lost = Callable[[int, str, str, int], bool] | None
"""A function that says whether a message is lost: (round, sender, receiver, attempt from 0). None loses none."""
_DIGEST = 16


@dataclass(frozen=True, eq=False)
class PeerMessage:
    """A message from one peer to another.

    kind     what it is about; in a round a peer sends another one at most one message of a kind
    layout   hash of the sender's model layout (`Layout.hash`): tensors mean the same only where it is the same
    tensors  bytes are counted on these
    values   anything JSON can hold
    counted  bytes of tensors by (role, task), once somebody has counted them for all who share the message
    """

    kind: str
    sender: str
    round: int
    layout: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    counted: dict[Any, int] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def encoded(self) -> bytes:
        """The bytes on the wire: a checksum, then safetensors whose metadata has the rest. Shared by all receivers."""
        head = {k: getattr(self, k) for k in ("kind", "sender", "round", "layout", "values")}
        tensors = {name: t.detach().contiguous().clone() for name, t in self.tensors.items()}
        body = save(tensors, metadata={"message": json.dumps(head, sort_keys=True)})
        return _digest(body) + body

    @staticmethod
    def size(data: bytes) -> int:
        """Return `nbytes` of an encoded message, without decoding it."""
        return len(data) - _DIGEST - 8 - int.from_bytes(data[_DIGEST : _DIGEST + 8], "little")

    @staticmethod
    def decode(data: bytes) -> PeerMessage:
        """Invert `encoded`. Raises ValueError for bytes that differ from those that were sent."""
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
    """Return bytes as a tensor (uint8), which a tree can hold."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


class Network:
    """Queues of messages between the peers of one process; some messages may be lost.

    `decode` is `PeerMessage.decode` with a memory. One sender tells many the same bytes, and decoding them once per
    receiver would cost most of a round. All receivers share the message within a round and must not write to it.
    Bytes that cannot be read are an error for each receiver.
    """

    def __init__(self, lost: Lost = None) -> None:
        self._lost = lost
        self._round = 0
        self._attempts: dict[tuple[str, str], int] = {}
        self._queues: dict[str, dict[str, tuple[bytes, ...]]] = {}
        self.decode = lru_cache(maxsize=None)(PeerMessage.decode)

    def begin(self, round: int) -> None:
        """Begin a new round, from which attempts count."""
        self._round, self._attempts = round, {}
        self.decode.cache_clear()

    def here(self, name: str) -> bool:
        """Return whether a peer is in this process."""
        return True

    def known(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return one number per peer of the run, from those of the peers in this process."""
        return values

    def carry(self, sent: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Bring messages to other processes; return all (sender, receiver, bytes), of which `sent` are from here."""
        return sent

    def cancel(self, sender: str, receiver: str) -> int:
        """Remove the messages of one peer to another, which would come too late. Returns their number."""
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
        # tuples, because a million lists would keep the garbage collector busy
        queue = self._queues.setdefault(receiver, {})
        queue[sender] = (*queue.get(sender, ()), data)

    def take(self, receiver: str) -> list[bytes]:
        """Empty the receiver's queue and return its messages, ordered by sender and then by when they were sent."""
        queue = self._queues.pop(receiver, {})
        return [data for sender in sorted(queue) for data in queue[sender]]


class Mailbox:
    """The messages that a peer sends and accepts. It logs every message that it drops.

    It keeps messages of later rounds until their round. `post` sends bytes to a receiver; `fetch` returns the messages
    since its last call. Both may lose, double, delay and damage messages. `decode` is as in `Network.decode`.
    """

    def __init__(
        self,
        name: str,
        layout: str,
        post: Callable[[str, bytes], None],
        fetch: Callable[[], list[bytes]],
        log: Log,
        decode: Callable[[bytes], PeerMessage] = PeerMessage.decode,
    ) -> None:
        self.name, self.layout, self.post, self.fetch, self.log = name, layout, post, fetch, log
        self.decode = decode
        self._early: list[PeerMessage] = []
        self._seen: dict[str, set[str]] = {}
        self._round = 0

    def send(self, receiver: str, message: PeerMessage) -> None:
        """Send a message."""
        self.post(receiver, message.encoded)

    def receive(self, round: int, kind: str) -> list[PeerMessage]:
        """Return good messages of this kind and round, sorted by sender. Other kinds wait for their own call."""
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
        """Return the messages that wait, with the new ones that are undamaged and of this model."""
        for data in self.fetch():
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

    Of each sender and kind only newer messages than the last one count; `seen` is kind -> sender -> round.
    """

    def __init__(self, *about: Any, seen: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__(*about)
        self.seen: dict[str, dict[str, int]] = {kind: dict(rounds) for kind, rounds in seen.items()}
        self._by_kind: dict[str, list[PeerMessage]] = {}

    def receive(self, round: int, kind: str) -> list[PeerMessage]:
        """Return good messages of this kind since the last call, one per sender, sorted. Other kinds wait."""
        seen = self.seen.setdefault(kind, {})
        newest: dict[str, PeerMessage] = {}
        for message in self._sorted().pop(kind, ()):
            if message.round <= seen.get(message.sender, 0):
                self._drop("doubled or overtaken", message, {"of round": message.round})
            else:  # a message that a newer one replaced before anybody read it is no fault, so it is not logged
                seen[message.sender] = message.round
                newest[message.sender] = message
        return [newest[sender] for sender in sorted(newest)]

    def kept(self) -> list[bytes]:
        """Return the encoded messages that nobody has received yet: by kind, then in their order of arrival."""
        waiting = self._sorted()
        return [message.encoded for kind in sorted(waiting) for message in waiting[kind]]

    def _sorted(self) -> dict[str, list[PeerMessage]]:
        """Return messages by kind: a search for one kind then skips all others, of which many may wait."""
        arrived, self._early = self._waiting(), []
        for message in arrived:
            self._by_kind.setdefault(message.kind, []).append(message)
        return self._by_kind
