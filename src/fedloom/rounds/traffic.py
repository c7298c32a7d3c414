"""What a round cost: bytes up and down per client, role and task, and seconds per phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.codecs import ByteCount
from fedloom.core.layout import Layout
from fedloom.methods.method import Method
from fedloom.rounds.federation import Client, Federation
from fedloom.rounds.messages import Message, Payload, blank


def count_up(method: Method, layout: Layout, federation: Federation, payload: Payload) -> ByteCount:
    """Bytes of one payload by (role, task), counted on the packed tensors."""
    if not payload.finite:
        return {}
    shared = method.shared_part(layout)
    rows = payload.rows
    bytes_ = method.codec.count(payload.packed, blank(shared, federation, rows, torch.zeros(len(rows), shared.d)))
    if shared.blocks or payload.extra:  # per row the number of examples, and extras; for support one bit a block
        bits = 0 if payload.support is None else payload.support.numel()
        vectors = sum(v.nbytes for v in payload.auxiliary.values())
        numbers = 8 * len(rows) + sum(map(_size, payload.extra.values()))
        bytes_["side", None] = numbers + -(-bits // 8) + vectors
    return _with_buffers(bytes_, method.shared_buffers(layout), payload.buffers, payload.integers)


def _size(value: Any) -> int:
    """Bytes of an extra: 8 for a number or a short text."""
    if isinstance(value, list):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 8


def count_down(method: Method, layout: Layout, federation: Federation, client: Client, message: Message) -> ByteCount:
    """Bytes of the message to one client, by (role, task)."""
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
    if message.broadcast:
        bytes_["side", None] = sum(v.nbytes for v in message.broadcast.values())
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
