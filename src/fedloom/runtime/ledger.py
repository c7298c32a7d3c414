"""What a round cost: bytes up and down per client, role and task, and seconds per phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.codecs import ByteCount
from fedloom.methods.method import Method
from fedloom.runtime.federation import Client, Federation
from fedloom.runtime.steps import Message, Payload, blank
from fedloom.updates import Layout


@dataclass
class Ledger:
    """The entries of one round."""

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

    def entries(self, direction: str) -> list[dict[str, Any]]:
        """One entry per client, role and task."""
        return [
            {"client": client, "role": role, "task": task, "bytes": count}
            for client, counts in sorted({"up": self.up, "down": self.down}[direction].items())
            for (role, task), count in sorted(counts.items(), key=lambda c: (c[0][0], c[0][1] or ""))
        ]


def count_up(method: Method, layout: Layout, federation: Federation, payload: Payload) -> ByteCount:
    """Bytes of one payload by (role, task), counted on the packed tensors."""
    if not payload.finite:
        return {}
    shared = method.shared_part(layout)
    rows = payload.rows
    bytes_ = method.codec.count(payload.packed, blank(shared, federation, rows, torch.zeros(len(rows), shared.d)))
    if shared.blocks or payload.extra:  # of each row the number of examples and extras; a bit a block for support
        bits = 0 if payload.support is None else payload.support.numel()
        vectors = sum(v.nbytes for v in payload.side.values())
        numbers = 8 * len(rows) + sum(map(_size, payload.extra.values()))
        bytes_["side", None] = numbers + -(-bits // 8) + vectors
    return _with_buffers(bytes_, method.shared_buffers(layout), payload.buffers, payload.integers)


def _size(value: Any) -> int:
    """Bytes of an extra: 8 for a number or a short text."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 8


def count_down(method: Method, layout: Layout, federation: Federation, client: Client, message: Message) -> ByteCount:
    """Bytes of what one client receives, by (role, task)."""
    shared = method.shared_part(layout)
    have = federation.present(client, shared)
    bytes_: ByteCount = {}
    for i, block in enumerate(shared.blocks):
        if message.vector is not None and (have is None or bool(have[0, i])):
            key = (block.role, block.task)
            bytes_[key] = bytes_.get(key, 0) + block.size * message.vector.element_size()
    if message.tasks:
        rows = tuple((client.id, task) for task in message.tasks)
        like = blank(shared, federation, rows, torch.zeros(len(rows), shared.d))
        bytes_ |= method.codec.count(message.packed, like)
    if message.told:
        bytes_["side", None] = sum(v.nbytes for v in message.told.values())
    return _with_buffers(bytes_, method.shared_buffers(layout), message.buffers, message.integers)


def _with_buffers(
    bytes_: ByteCount, shared: Layout, buffers: Tensor | None, integers: Mapping[str, Tensor]
) -> ByteCount:
    if buffers is not None:
        for block in shared.blocks:
            key = ("buffer", block.task)
            bytes_[key] = bytes_.get(key, 0) + block.size * buffers.element_size()
    if integers:
        bytes_["buffer", None] = bytes_.get(("buffer", None), 0) + sum(b.nbytes for b in integers.values())
    return bytes_
