"""Codecs, which pack an update to travel: as named tensors, and back. Bytes are counted on these tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import Row
from fedloom.core.layout import Block, Layout
from fedloom.core.settings.section import Checked
from fedloom.core.taskvectors import Upload, modulate, unify
from fedloom.core.untrusted import Array, Named, Sender
from fedloom.core.updates import RowList, Rows, Updates, Zeros, row_norms

Packed = Mapping[str, Tensor]
ByteCount = dict[tuple[str, str | None], int]
"""(role, task) -> bytes; the role "codec" stands for what a codec adds beside the values."""


class Codec(Checked):
    """The encoding of updates: it packs X into tensors and unpacks it. Everything else is sent beside it.

    `stays_packed`: rows of several senders stay packed (see `gather`); they are not written to a matrix.
    """

    stays_packed: ClassVar[bool] = False
    unpacks_each: ClassVar[bool] = False
    """True if there is `unpack_each`."""
    varies: ClassVar[bool] = False
    """True if the number of bytes depends on the values."""

    def gather(self, parts: Sequence[tuple[Packed, Updates]]) -> Rows:
        """Return the rows of several senders (packed, like), as they arrived, in the order of the rows."""
        raise NotImplementedError

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        """Return the named tensors to send; blocks that a row does not have are left out."""
        raise NotImplementedError

    def pack_each(self, X: Tensor, layout: Layout, present: Tensor | None) -> Sequence[Packed] | None:
        """Pack K rows (K x d), each as one sender's, with the blocks `present` (None: all); None if it cannot."""
        return None

    def unpack_each(self, packed: Sequence[Packed]) -> Tensor:
        """Return the rows (K x d) of K senders, each of which packed one row with all blocks."""
        raise NotImplementedError

    def read(self, packed: Any, like: Updates) -> Packed:
        """Return packed tensors from a sender, if `pack` could have made them. Raises ValueError naming the tensor."""
        X = self.unpack(packed, like.replace(X=torch.zeros_like(like.data)))
        Array((len(like), like.layout.d), like.data.dtype).read(X, Sender())
        return cast(Packed, packed)

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        """Return X (K x d) again; `like` has the layout, rows and presence, and an X of zeros that is filled."""
        raise NotImplementedError

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        """Count the bytes by role and task; the sum is exactly the size of the tensors."""
        raise NotImplementedError


def by_block(like: Updates, itemsize: int, sent: Tensor | None = None) -> ByteCount:
    """Count the bytes of the rows' values, or of the values `sent` (K x d, bool), by role and task."""
    if like.present is None and sent is None:
        return {key: len(like) * size * itemsize for key, size in like.layout.sizes.items() if size}
    bytes_: ByteCount = {}
    have = like.has
    rows = have.sum(0).tolist()
    for there, count, block, s in zip(have.T, rows, like.layout.blocks, like.layout.slices, strict=True):
        if total := count * block.size if sent is None else int(sent[there, s].sum()):
            key = (block.role, block.task)
            bytes_[key] = bytes_.get(key, 0) + total * itemsize
    return bytes_


def _pieces(like: Updates) -> list[tuple[int, slice, Block]]:
    """Return (row, columns, block) for all blocks that the rows have."""
    blocks = [*zip(like.layout.slices, like.layout.blocks, strict=True)]
    return [(k, *b) for k, have in enumerate(like.has.tolist()) for b, there in zip(blocks, have, strict=True) if there]


def _values(updates: Updates) -> Tensor:
    """Return the values in the columns that the rows have, as one vector."""
    if updates.present is None or bool(updates.present.all()):
        return updates.X.reshape(-1)
    return torch.cat([updates.X.new_zeros(0), *(updates.X[k, s] for k, s, _ in _pieces(updates))])


def _count(like: Updates) -> int:
    """Return how many values there are in the columns that the rows have."""
    return len(like) * like.layout.d if like.present is None else sum(b.size for *_, b in _pieces(like))


def _fill(values: Tensor, like: Updates) -> Tensor:
    """Invert `_values`."""
    if like.present is None or bool(like.present.all()):
        return values.view(len(like), like.layout.d)
    pieces = _pieces(like)
    sizes = [block.size for *_, block in pieces]
    for (k, s, _), part in zip(pieces, values[: sum(sizes)].split(sizes), strict=True):
        like.X[k, s] = part
    return like.X


@dataclass(frozen=True)
class Raw(Codec):
    """The values, unchanged."""

    unpacks_each = True

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        return {"values": _values(updates)}

    def pack_each(self, X: Tensor, layout: Layout, present: Tensor | None) -> Sequence[Packed]:
        if present is not None:
            sizes = torch.tensor([block.size for block in layout.blocks], dtype=torch.int64)
            X = X[:, present[0].repeat_interleave(sizes)]
        return [{"values": row} for row in X.to("cpu")]

    def unpack_each(self, packed: Sequence[Packed]) -> Tensor:
        return torch.stack([one["values"] for one in packed])

    def fields(self, like: Updates) -> dict[str, Array]:
        """Return the required form of each tensor."""
        return {"values": Array((_count(like),), like.data.dtype)}

    def read(self, packed: Any, like: Updates) -> Packed:
        return Named(self.fields(like)).read(packed, Sender())

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        return _fill(packed["values"], like)

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        return by_block(like, packed["values"].element_size())


@dataclass(frozen=True)
class Sparse(Codec):
    """The non-zero values, and one bit per coordinate that locates them. Lossless; sent as `Raw` if that is shorter."""

    varies = True

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        values = _values(updates)
        mask = values != 0
        kept = values[mask]
        bits = torch.from_numpy(np.packbits(mask.cpu().numpy()))
        if kept.nbytes + bits.nbytes >= values.nbytes:
            return {"values": values}
        return {"values": kept, "mask": bits}

    def read(self, packed: Any, like: Updates) -> Packed:
        size = _count(like)
        if not isinstance(packed, Mapping) or "mask" not in packed:
            return Raw().read(packed, like)
        bits = Array((-(-size // 8),), torch.uint8)
        kept = int(np.unpackbits(bits.read(packed["mask"], Sender()).numpy(), count=size).sum())
        return Named({"values": Array((kept,), like.data.dtype), "mask": bits}).read(packed, Sender())

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        if "mask" not in packed:
            return _fill(packed["values"], like)
        size = _count(like)
        mask = torch.from_numpy(np.unpackbits(packed["mask"].cpu().numpy(), count=size)).bool()
        values = packed["values"].new_zeros(size)
        values.masked_scatter_(mask.to(values.device), packed["values"])
        return _fill(values, like)

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        if "mask" not in packed:
            return Raw().count(packed, like)
        nonzero = self.unpack(packed, like.replace(X=torch.zeros_like(like.X))) != 0
        bytes_ = by_block(like, packed["values"].element_size(), nonzero)
        return {**bytes_, ("codec", None): packed["mask"].nbytes}


@dataclass(frozen=True)
class Cropped(Codec):
    """Each block as a matrix without its trailing zero rows and columns, and the numbers left of both. Lossless.

    The cost of low-rank factors follows their rank; an unchanged block costs two numbers. Longer results stay unpacked.
    """

    varies = True

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        pieces = [_matrix(updates, *piece) for piece in _pieces(updates)]
        corners = [tuple(_end((x != 0).any(i)) for i in (1, 0)) for x in pieces]
        parts = [x[:rows, :columns].flatten() for x, (rows, columns) in zip(pieces, corners, strict=True)]
        sides = torch.tensor(corners, dtype=torch.int32).view(-1, 2)
        whole = _values(updates)
        if sum(part.nbytes for part in parts) + sides.nbytes >= whole.nbytes:
            return {"values": whole}
        return {"values": torch.cat(parts), "corners": sides}

    def read(self, packed: Any, like: Updates) -> Packed:
        if not isinstance(packed, Mapping) or "corners" not in packed:
            return Raw().read(packed, like)
        pieces = _pieces(like)
        sides = Array((len(pieces), 2), torch.int32, low=0)
        corners = Named({"corners": sides}).read({"corners": packed["corners"]}, Sender())["corners"].tolist()
        for (*_, block), (rows, columns) in zip(pieces, corners, strict=True):
            h, w = _sides(block)
            if rows > h or columns > w:
                raise ValueError(f"corners: expected at most {h} x {w} for {block.name}, found {rows} x {columns}")
        values = Array((sum(rows * columns for rows, columns in corners),), like.data.dtype)
        return Named({"values": values, "corners": sides}).read(packed, Sender())

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        if "corners" not in packed:
            return _fill(packed["values"], like)
        corners = packed["corners"].tolist()
        parts = packed["values"].split([rows * columns for rows, columns in corners])
        for piece, (rows, columns), part in zip(_pieces(like), corners, parts, strict=True):
            _matrix(like, *piece)[:rows, :columns] = part.view(rows, columns)
        return like.X

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        if "corners" not in packed:
            return Raw().count(packed, like)
        bytes_: ByteCount = {("codec", None): packed["corners"].nbytes}
        for (*_, block), (rows, columns) in zip(_pieces(like), packed["corners"].tolist(), strict=True):
            if size := rows * columns * packed["values"].element_size():
                key = (block.role, block.task)
                bytes_[key] = bytes_.get(key, 0) + size
        return bytes_


def _sides(block: Block) -> tuple[int, int]:
    """Return rows and columns of a block as a matrix: a row for each output, or one row."""
    rows = block.shape[0] if len(block.shape) > 1 and block.size else 1
    return rows, block.size // rows


def _matrix(updates: Updates, row: int, columns: slice, block: Block) -> Tensor:
    """Return a view of one block of one row."""
    return updates.X[row, columns].view(_sides(block))


def _end(some: Tensor) -> int:
    """Return the position after the last that is true."""
    return int(some.nonzero().max()) + 1 if bool(some.any()) else 0


@dataclass(frozen=True)
class Unified(Codec):
    """One vector for all rows of a sender, with a mask and a scale for each row (MaTU, eq. 2).

    Columns that belong to a task are sent unchanged. A single row is exact; several rows share one vector, which is
    lossy. k rows over d common columns take 32 d + k (8 ceil(d / 8) + 32) bits; nothing else is added.
    """

    stays_packed = True

    def gather(self, parts: Sequence[tuple[Packed, Updates]]) -> Folded:
        return Folded(tuple(parts))

    def pack(self, updates: Updates) -> dict[str, Tensor]:
        layout = updates.layout
        common, own = layout.common, layout.own
        given = updates.given if updates.mixing is None else None
        rows = given.vectors if isinstance(given, RowList) else tuple(updates.X)
        vector, masks, scales = unify([layout.take(x, common) for x in rows], packed=True)
        packed = {"vector": vector, "masks": masks, "scales": scales}
        if not own.blocks:
            return packed
        return {**packed, "own": _values(_of_tasks(updates, torch.stack([layout.take(x, own) for x in rows])))}

    def read(self, packed: Any, like: Updates) -> Packed:
        common, own = like.layout.common, like.layout.own
        k, kind = len(like), like.data.dtype
        masks = Array((k, -(-common.d // 8)), torch.uint8)
        arrays = {"vector": Array((common.d,), kind), "masks": masks, "scales": Array((k,), kind)}
        if own.blocks:
            arrays["own"] = Array((_count(_of_tasks(like)),), kind)
        return Named(arrays).read(packed, Sender())

    def unpack(self, packed: Packed, like: Updates) -> Tensor:
        common, own = like.layout.common, like.layout.own
        into = like.layout.take(like.X, common)
        modulate(packed["vector"], packed["masks"], packed["scales"], out=into)
        if len(like.layout.spans(common)) != 1:  # not a view
            like.layout.put(like.X, common, into)
        return like.layout.put(like.X, own, _own(packed, like))

    def count(self, packed: Packed, like: Updates) -> ByteCount:
        size = packed["vector"].element_size()
        common = {key: columns * size for key, columns in like.layout.common.sizes.items()}
        bytes_ = common | by_block(_of_tasks(like), size)
        return {**bytes_, ("codec", None): packed["masks"].nbytes + packed["scales"].nbytes}


@dataclass(frozen=True, eq=False)
class Folded(Rows):
    """Rows of several senders as `Unified` packed them. Senders are in the order of their rows."""

    parts: tuple[tuple[Packed, Updates], ...]

    @property
    def layout(self) -> Layout:
        """The columns."""
        return self.parts[0][1].layout

    @property
    def rows(self) -> tuple[Row, ...]:
        """The keys of the rows."""
        return tuple(row for _, like in self.parts for row in like.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.layout.d

    @property
    def _pieces(self) -> list[tuple[Packed, Updates, int, int]]:
        """Each part with the positions of its first row and of the row after its last."""
        ends = accumulate((len(like) for _, like in self.parts), initial=0)
        return [(*part, *span) for part, span in zip(self.parts, pairwise(ends), strict=True)]

    def dense(self) -> Tensor:
        X = torch.zeros(self.shape, dtype=self.parts[0][0]["vector"].dtype)
        for packed, like, a, b in self._pieces:
            Unified().unpack(packed, like.replace(X=X[a:b]))
        return X

    def own(self) -> Tensor:
        """Return the columns that belong to tasks (K x number of these columns)."""
        return torch.cat([_own(packed, like) for packed, like in self.parts])

    def uploads(self, counts: Tensor) -> list[Upload]:
        """Return the common columns as each sender sent them; `counts` (K) are the examples of each row."""
        by_sender = []
        for packed, like, a, b in self._pieces:
            tasks = tuple(str(task) for _, task in like.rows)
            n, client = tuple(counts[a:b].tolist()), like.rows[0][0]
            by_sender.append(Upload(packed["vector"], tasks, n, packed["masks"], packed["scales"], client))
        return by_sender

    def keep(self, index: Sequence[int]) -> Folded:
        kept: list[tuple[Packed, Updates]] = []
        for packed, like, a, b in self._pieces:
            mine = [i - a for i in index if a <= i < b]
            if mine:
                left = like.keep(mine)
                fewer = {**packed, "masks": packed["masks"][mine], "scales": packed["scales"][mine]}
                if "own" in packed:
                    fewer["own"] = _values(_of_tasks(left, _own(packed, like)[mine]))
                kept.append((fewer, left))
        return Folded(tuple(kept))

    def norms(self) -> Tensor:
        """Bound the rows' norms (K): a row is a part of its sender's vector times its scale, plus its own columns."""
        bounds = []
        for packed, like in self.parts:
            common = row_norms(packed["vector"][None]) * packed["scales"].double().abs()
            norms = torch.stack([common, row_norms(_own(packed, like))]).norm(dim=0)
            if not bool(norms.isfinite().all()):  # which of the rows it is
                norms = row_norms(Unified().unpack(packed, like.replace(X=torch.zeros(len(like), self.layout.d))))
            bounds.append(norms)
        return torch.cat(bounds)

    def take(self, index: Tensor) -> Tensor:
        common, own = self.layout.common, self.layout.own
        X = self.parts[0][0]["vector"].new_empty(len(self.rows), len(index))
        here, columns = self.layout.places(common, index)
        for packed, _, a, b in self._pieces:
            mask = packed["masks"][:, columns // 8] >> (7 - columns % 8) & 1  # as `pack_mask` orders the bits
            X[a:b, here] = modulate(packed["vector"][columns], mask.bool(), packed["scales"])
        here, columns = self.layout.places(own, index)
        X[:, here] = self.own().index_select(1, columns)
        return X


def _of_tasks(like: Updates, X: Tensor | None = None) -> Updates:
    """Return the rows in the columns that belong to tasks alone: X, or zeros."""
    own = like.layout.own
    present = None if like.present is None else like.present[:, like.layout.positions(own)]
    given = Zeros((len(like), own.d), like.data.dtype) if X is None else X
    return Updates(own, like.rows, given, like.n, like.weight, present=present)


def _own(packed: Packed, like: Updates) -> Tensor:
    """Return one sender's rows in the columns of tasks; zero in columns of another task than the row's."""
    mine = _of_tasks(like)
    return _fill(packed["own"], mine) if mine.layout.blocks else mine.X
