"""The values that travel in a round, a Message to a client and a Payload from it, and their cost: bytes and seconds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import ByteCount, by_block
from fedloom.core.context import Row, State
from fedloom.core.layout import Layout
from fedloom.core.updates import EVERYONE, RowList, Rows, Updates, Zeros
from fedloom.federation.rounds.federation import BuiltFederation, Common

ALL = EVERYONE[0]


def form(value: Any) -> Any:
    """Return what the bytes of a message depend on: messages of one form have equal bytes unless the codec `varies`."""
    if value is None or isinstance(value, Tensor | tuple | bool):
        return getattr(value, "nbytes", value)
    if isinstance(value, Message | Payload):
        parts = [each for each in vars(value).items() if each[0] not in ("row", "n")]
        return tuple([(name, form(part)) for name, part in parts if isinstance(part, Tensor) or part])
    if isinstance(value, dict | Mapping):  # to ask for a Mapping alone takes ten times as long
        return tuple([(name, form(part)) for name, part in value.items()]) if value else ()
    return tuple(map(form, value)) if isinstance(value, list) else 8


@dataclass(frozen=True, eq=False)
class Message:
    """From the server to one client: the shared parameters, the buffers unless they are local, stages' broadcasts.

    `vector` is None if the client continues from its own model, which it has, and if rows are (client, task). Then
    `packed` has the vectors of `tasks`, and `buffers` a row for each of them (T x b); any other task starts from the
    initial model.
    """

    vector: Tensor | None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()

    form = cached_property(form)
    """Its form, worked out once for all clients that are sent the same message."""


@dataclass(frozen=True, eq=False)
class Payload:
    """From one client to the server: packed updates, number of examples, extras, auxiliary vectors, buffers.

    `n`, and each number in `tasks`, is 1 where the method does not read numbers of examples (`Method.counts_examples`).
    `finite` is False if local training produced nan or inf; the payload is then empty. If rows are (client, task),
    `tasks` are the numbers of examples of the rows, an extra is a list, and support and buffers are matrices of as many
    rows.
    """

    row: Row
    n: float
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    support: Tensor | None = None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    finite: bool = True
    tasks: Mapping[str, float] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """Return all fields but the client as plain values, for messages and checkpoints. `of` is the inverse."""
        tree = {name: value for name, value in vars(self).items() if name not in ("row", "finite")}
        tree["side"] = tree.pop("auxiliary")  # the key in files
        return tree if self.finite else {**tree, "finite": False}

    @staticmethod
    def of(client: str, tree: Mapping[str, Any]) -> Payload:
        """Return a client's payload from its tree."""
        values = {"auxiliary" if key == "side" else key: value for key, value in tree.items()}
        return Payload((client, None), **values)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The keys of its rows."""
        return tuple((self.row[0], task) for task in self.tasks) or (self.row,)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The number of examples of each row."""
        return tuple(self.tasks.values()) or (self.n,)


def clip_counts(common: Common, payload: Payload) -> Payload:
    """Return a payload with the numbers of examples that count (`Method.weights`, `Method.max_examples`)."""
    if (method := common.method).weights != "declared" and method.max_examples is None:
        return payload
    client, most = common.federation.client(payload.row[0]), method.max_examples or math.inf

    def count(claimed: float, task: str | None = None) -> float:
        known = client if task is None else client.only(task)
        return float(min(len(known.train) if method.weights == "declared" else claimed, most))

    return replace(payload, n=count(payload.n), tasks={task: count(n, task) for task, n in payload.tasks.items()})


def rows_of(common: Common, clients: Iterable[str]) -> tuple[Row, ...]:
    """Return the rows that these clients will send."""
    return tuple(row for c in clients for row in common.method.turn.rows(c, [*common.federation.client(c).tasks]))


def blank(shared: Layout, federation: BuiltFederation, rows: tuple[Row, ...], X: Tensor | Rows) -> Updates:
    """Return rows X of one client with their presence, for a codec that packs them, or fills them from zeros."""
    return Updates(shared, rows, X, _ones(len(rows)), _ones(len(rows)), present=federation.presence(shared, rows))


@lru_cache
def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


def unpacked(
    common: Common, rows: tuple[Row, ...], packed: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Updates]:
    """Return what a client packed, or the server for it: (X, which may be a view of it; rows like these to pack)."""
    shared = common.shared
    like = blank(shared, common.federation, rows, Zeros((len(rows), shared.d), dtype))
    return common.method.codec.unpack(packed, like), like


def pack_tasks(common: Common, state: State, client: str, tasks: Iterable[str]) -> Message:
    """Return the vectors of some tasks, packed as the client packs its own; tasks without a vector are left out."""
    tasks = tuple(task for task in sorted(tasks) if task in state["tasks"])
    packed: Mapping[str, Tensor] = {}
    buffers = state["buffers"]
    if tasks:
        vectors = RowList(tuple(state["tasks"][task] for task in tasks))
        rows = tuple((client, task) for task in tasks)
        packed = common.method.codec.pack(blank(common.shared, common.federation, rows, vectors))
        if of_tasks := state.get("task_buffers"):
            buffers = torch.stack([of_tasks[task] for task in tasks])
    return Message(None, buffers, state["integers"], packed=packed, tasks=tasks)


@lru_cache
def nothing(rows: int, d: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a matrix of zeros that is only looked at: it takes no memory."""
    return torch.zeros(1, 1, dtype=dtype).expand(rows, d)


def count_bytes(common: Common, client: str, sent: Message | Payload) -> ByteCount:
    """Return the bytes of what a client sends or is sent, by (role, task), counted on the packed tensors."""
    shared, codec, bytes_ = common.shared, common.method.codec, ByteCount()
    rows = tuple((client, task) for task in sent.tasks) or ((client, None),)
    like = blank(shared, common.federation, rows, nothing(len(rows), shared.d))
    if isinstance(sent, Message):
        if sent.vector is not None:
            bytes_ = by_block(like, sent.vector.element_size())
        elif sent.tasks:
            bytes_ = codec.count(sent.packed, like)
        if sent.broadcast:
            bytes_["side", None] = _within(like, sent.broadcast)
    elif sent.finite:
        bytes_ = codec.count(sent.packed, like)
        if shared.blocks or sent.extra:  # per row the number of examples, and extras; for support one bit a block
            bits = 0 if sent.support is None else sent.support.numel()
            vectors = _within(like, sent.auxiliary) if sent.auxiliary else 0
            bytes_["side", None] = 8 * len(rows) + _size([*sent.extra.values()]) + vectors + -(-bits // 8)
    if sent.buffers is not None and len(sent.buffers):
        each = sent.buffers.element_size() * (len(sent.buffers) if sent.buffers.ndim > 1 else 1)
        bytes_ |= {key: size * each for key, size in common.shared_buffers.sizes.items()}
    if sent.integers:
        bytes_["buffer", None] = bytes_.get(("buffer", None), 0) + _size([*sent.integers.values()])
    return bytes_


def _within(like: Updates, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors; of a vector over all columns, those of the blocks that the client has."""
    there = d = like.layout.d
    if like.present is not None:
        there = sum(b.size for b, has in zip(like.layout.blocks, like.present.any(0), strict=True) if has)
    return sum(t.element_size() * there if t.shape == (d,) else t.nbytes for t in tensors.values())


def _size(value: Any) -> int:
    """Return the bytes of tensors and extras: 8 for a number or a short text."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 8


@dataclass
class Ledger:
    """The cost of a round: bytes up and down per client, role and task, and seconds per phase."""

    up: dict[str, ByteCount] = field(default_factory=dict)
    down: dict[str, ByteCount] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def bytes(self) -> dict[str, list[dict[str, Any]]]:
        """One entry per client, role and task, for each direction."""
        once = {id(counts): counts for counts in (*self.up.values(), *self.down.values())}  # clients share counts
        ordered = {i: sorted(counts.items(), key=lambda c: (c[0][0], c[0][1] or "")) for i, counts in once.items()}
        return {
            way: [
                {"client": client, "role": role, "task": task, "bytes": count}
                for client, counts in sorted(sent.items())
                for (role, task), count in ordered[id(counts)]
            ]
            for way, sent in (("up", self.up), ("down", self.down))
        }
