"""What travels: an update as named tensors, and back. Bytes are counted on these tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.updates import Updates

Packed = Mapping[str, Tensor]
ByteCount = dict[tuple[str, str | None], int]
"""(role, task) -> bytes; the role "codec" stands for what a codec adds beside the values."""


class Codec:
    """Packs the X of Updates into tensors and unpacks it. Everything else travels beside it."""

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        """Named tensors to send; blocks that a row does not have are left out."""
        raise NotImplementedError

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        """X (K x d) again; `like` has the layout, rows and presence, and an X of zeros that is filled."""
        raise NotImplementedError

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        """Bytes by role and task; the sum is exactly the size of the tensors."""
        raise NotImplementedError


def _by_block(like: Updates, values: Tensor, itemsize: int) -> ByteCount:
    """Bytes of `values` (K x d, counts per coordinate or one for all) summed by role and task."""
    bytes_: ByteCount = {}
    have = like.present
    for i, (block, s) in enumerate(zip(like.layout.blocks, like.layout.slices, strict=True)):
        count = values[:, s] if have is None else values[:, s] * have[:, i : i + 1]
        if total := int(count.sum()):
            key = (block.role, block.task)
            bytes_[key] = bytes_.get(key, 0) + total * itemsize
    return bytes_


def _values(updates: Updates) -> Tensor:
    """The columns that the rows have, as one vector."""
    if updates.present is None or bool(updates.present.all()):
        return updates.X.reshape(-1)
    rows = []
    for x, have in zip(updates.X, updates.present.tolist(), strict=True):
        rows += [x[s] for s, h in zip(updates.layout.slices, have, strict=True) if h]
    return torch.cat(rows) if rows else updates.X.new_zeros(0)


def _fill(values: Tensor, like: Updates) -> Tensor:
    """Inverse of `_values`."""
    if like.present is None or bool(like.present.all()):
        return values.view(like.X.shape)
    at = 0
    for x, have in zip(like.X, like.present.tolist(), strict=True):
        for s, h in zip(like.layout.slices, have, strict=True):
            if h:
                x[s] = values[at : at + s.stop - s.start]
                at += s.stop - s.start
    return like.X


@dataclass(frozen=True)
class Raw(Codec):
    """Every value as it is."""

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        return {"values": _values(updates)}

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        return _fill(packed["values"], like)

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        return _by_block(like, torch.ones_like(like.X), packed["values"].element_size())


@dataclass(frozen=True)
class Sparse(Codec):
    """Values that are not zero, and one bit a coordinate that says where they are. Lossless.

    An update that would not shrink is sent as it is.
    """

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        values = _values(updates)
        mask = values != 0
        kept = values[mask]
        bits = torch.from_numpy(np.packbits(mask.cpu().numpy()))
        if kept.nbytes + bits.nbytes >= values.nbytes:
            return {"values": values}
        return {"values": kept, "mask": bits}

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        if "mask" not in packed:
            return _fill(packed["values"], like)
        size = like.X.numel() if like.present is None else _values(like).numel()
        mask = torch.from_numpy(np.unpackbits(packed["mask"].cpu().numpy(), count=size)).bool()
        values = packed["values"].new_zeros(size)
        values.masked_scatter_(mask.to(values.device), packed["values"])
        return _fill(values, like)

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        if "mask" not in packed:
            return Raw().count(packed, like)
        nonzero = self.unpack(packed, like.replace(X=torch.zeros_like(like.X))) != 0
        bytes_ = _by_block(like, nonzero, packed["values"].element_size())
        return {**bytes_, ("codec", None): packed["mask"].nbytes}
