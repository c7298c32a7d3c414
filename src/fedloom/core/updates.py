"""The matrix of updates and what stands beside it: Updates.

A federated round is a K x d matrix: one row per client (or client and task), one column per parameter; the Layout says
which columns belong to which part of the model and to which task.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core.context import Row
from fedloom.core.layout import Block, Layout, dtype_name


class Spread:
    """The whole matrix in this process; subclasses say which process has which columns of it.

    Inside `spread` every process runs the same stage on all rows, but only on its own columns: its layout has all
    blocks, each with only the columns that this process has. A rule that treats every column alike need not know this.
    Sums over columns go through `total`; state holds whole vectors, which `cut` takes apart and `join` puts together.
    All processes call the methods in the same order.
    """

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over all processes of x, which each has summed over its own columns; the same bits in each."""
        return x

    def cut(self, layout: Layout, vector: Tensor) -> Tensor:
        """Return the columns of this process, from a vector over all columns of the layout's blocks."""
        return vector

    def at(self, layout: Layout, index: Tensor) -> Tensor:
        """Return those of the columns `index` (positions among all) that are here, as positions among those here."""
        return index

    def join(self, layout: Layout, part: Tensor) -> Tensor:
        """Return the whole vector, from this process's columns and those of the others."""
        return part

    def whole(self, layout: Layout) -> Layout:
        """Return the layout with all its columns."""
        return layout


_NOW: ContextVar[Spread] = ContextVar("spread", default=Spread())  # noqa: B039


@contextmanager
def spread(how: Spread) -> Iterator[None]:
    """Let stages called inside see only the columns of this process."""
    token = _NOW.set(how)
    try:
        yield
    finally:
        _NOW.reset(token)


def columns_here() -> Spread:
    """Return how columns are spread over processes."""
    return _NOW.get()


EVERYONE: Row = ("*", None)
"""The key of a row for every client, such as the row of a mean; ("*", task) is for all that hold the task."""

_COLUMNS = 1 << 17
"""So many columns are mixed at a time where rows are separate: the product of so many has the bits of that of all."""

_BY_ROW = {"n": "k", "weight": "k", "coef": "kd", "base": "kd", "present": "kb", "support": "kb"}
_AXES = {"given": "kd", "mixing": "kk", **_BY_ROW}
"""The shapes of fields of Updates: k rows, d columns, b blocks."""


class Rows(Protocol):
    """Rows (K x d) in a form of their own, which become a matrix only when it is needed."""

    @property
    def shape(self) -> tuple[int, int]:
        """K, d."""

    def dense(self) -> Tensor:
        """Return the matrix (K x d)."""

    def keep(self, index: Sequence[int]) -> Rows:
        """Return some of the rows, by position in ascending order."""

    def norms(self) -> Tensor:
        """Return the rows' norms (K), or bounds of them, as `Updates.norms`."""

    def take(self, index: Tensor) -> Tensor:
        """Return the columns `index` of the rows (K x their number), without the matrix."""


class Distributed(Rows):
    """Rows that can be summed without being brought together: they lie in several processes, or are summed already.

    `take` expects positions among all columns, and returns those columns that this process has.
    """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    @abstractmethod
    def select(self, part: Layout) -> Distributed:
        """Return the columns of some blocks."""

    @abstractmethod
    def summed(self, runs: Sequence[tuple[int, int, Tensor]]) -> Tensor:
        """Return the sums, as `Updates.summed` does."""


@dataclass(frozen=True)
class Zeros:
    """Rows of zeros, which take no memory until they are filled; fulfils `Rows`."""

    shape: tuple[int, int]
    dtype: torch.dtype

    def dense(self) -> Tensor:
        """Return a new matrix (K x d)."""
        return torch.zeros(self.shape, dtype=self.dtype)

    def keep(self, index: Sequence[int]) -> Zeros:
        """Return as many rows as asked for."""
        return Zeros((len(index), self.shape[1]), self.dtype)

    def norms(self) -> Tensor:
        """Return the rows' norms (K)."""
        return torch.zeros(self.shape[0], dtype=torch.float64)

    def take(self, index: Tensor) -> Tensor:
        """Return as many columns as asked for."""
        return torch.zeros(self.shape[0], len(index), dtype=self.dtype)


@dataclass(frozen=True, eq=False)
class RowList(Rows):
    """Separate rows, each a vector (d)."""

    vectors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.vectors), len(self.vectors[0])

    def dense(self) -> Tensor:
        """Return a copy of them as a matrix (K x d)."""
        return torch.stack(self.vectors)

    def keep(self, index: Sequence[int]) -> RowList:
        return RowList(tuple(self.vectors[i] for i in index))

    def norms(self) -> Tensor:
        return torch.cat([row_norms(x[None]) for x in self.vectors])

    def take(self, index: Tensor) -> Tensor:
        return torch.stack([x[index] for x in self.vectors])


class RowsNeededError(Exception):
    """Single rows are needed, of which only the sum is known."""


@dataclass(frozen=True, eq=False)
class Summed(Distributed):
    """Rows that were added up as they came, each times its share, and not kept.

    layout   which column is which
    total    in a list, from which `summed` takes it: sum_k (share_k / unit) X_k (d), over the rows of finite norm
    unit     the share of the row that came first
    shares   K, float64: `Stage.row_weights` of the rows
    sizes    the rows' norms (K, float64)
    among    how many rows were asked for
    columns  c columns, of which the values of each row are kept
    looked   these values (K x c)
    """

    layout: Layout
    total: list[Tensor]
    unit: float
    shares: Tensor
    sizes: Tensor
    among: int
    columns: Tensor
    looked: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.shares), self.layout.d

    @property
    def dtype(self) -> torch.dtype:
        return self.looked.dtype

    def dense(self) -> Tensor:
        """Raise RowsNeededError."""
        raise RowsNeededError

    def select(self, part: Layout) -> Summed:
        """Raise RowsNeededError."""
        raise RowsNeededError

    def keep(self, index: Sequence[int]) -> Summed:
        """Drop rows that were not added, for their norms are not finite. Raises RowsNeededError for any other."""
        dropped = torch.ones(len(self.shares)).bool().index_fill(0, torch.tensor(index, dtype=torch.int64), False)
        if bool(self.sizes[dropped].isfinite().any()):
            raise RowsNeededError
        return replace(self, shares=self.shares[index], sizes=self.sizes[index], looked=self.looked[index])

    def norms(self) -> Tensor:
        return self.sizes

    def take(self, index: Tensor) -> Tensor:
        """Return the rows in the columns that are kept. Raises RowsNeededError for any other."""
        if not torch.equal(index, self.columns):
            raise RowsNeededError
        return self.looked

    def summed(self, runs: Sequence[tuple[int, int, Tensor]]) -> Tensor:
        """Return the sums, as `Updates.summed`, once. Raises ValueError where rows do not count by their shares."""
        total = self.total.pop()
        for first, end, p in runs:
            counted = p != 0
            factors = p[counted] / self.shares[counted]
            if not torch.allclose(factors, factors[:1], rtol=1e-9, atol=0):
                raise ValueError("the stage weighs rows otherwise than its `row_weights` say")
            total[self.layout.run(first, end)] *= float(factors[0]) * self.unit
        return total


@dataclass(frozen=True, eq=False)
class Updates:
    """The updates of one round (new minus old parameters) with their weights and other values.

    layout    which column is which (d columns)
    rows      K keys (client, task or None), always sorted
    X         K x d: `mixing @ data`, or `data` itself where `mixing` is None
    given     K x d: a matrix, or rows that are not a matrix yet
    data      K x d: `given` as a matrix
    n         K, float64: examples per row; never rewritten
    weight    K, float64: how much a row counts; starts as n
    coef      K x d (numbers or bool) or None: where a row counts
    present   K x blocks, bool, or None for all: which blocks a row has
    support   K x blocks, bool, or None where no stage wants it: which blocks a row's training changed
    extra     values beside a row: name -> K values (tensor or sequence)
    mixing    K x K, float64, or None: the product with `data` is computed when X is read, so that rules that only
              combine rows (projections, normalisation) need no second K x d matrix
    base      K x d or None (zeros): the model that each row starts from
    auxiliary name -> K x d: values with one column per parameter, such as control variates
    """

    layout: Layout
    rows: tuple[Row, ...]
    given: Tensor | Rows
    n: Tensor
    weight: Tensor
    coef: Tensor | None = None
    present: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    mixing: Tensor | None = None
    base: Tensor | None = None
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    support: Tensor | None = None

    def __post_init__(self) -> None:
        size = {"k": len(self.rows), "d": self.layout.d, "b": len(self.layout.blocks)}
        fields = [("X" if name == "given" else name, getattr(self, name), axes) for name, axes in _AXES.items()]
        fields += [(f"auxiliary {name!r}", value, "kd") for name, value in self.auxiliary.items()]
        for name, value, axes in fields:
            if value is not None and value.shape != (shape := tuple(map(size.get, axes))):
                raise ValueError(f"{name}: expected shape {shape}, found {tuple(value.shape)}")
        for name, value in self.extra.items():
            if len(value) != size["k"]:
                raise ValueError(f"extra {name!r}: expected {size['k']} values, found {len(value)}")
        if any(a >= b for a, b in pairwise(_keys(self.rows))):
            raise ValueError(f"rows must be sorted and distinct, found {self.rows}")

    @cached_property
    def data(self) -> Tensor:
        """The field `given` as a matrix (K x d), before `mixing`."""
        return self.given if isinstance(self.given, Tensor) else self.given.dense()

    @cached_property
    def X(self) -> Tensor:  # noqa: N802
        """The rows (K x d)."""
        return self.data if self.mixing is None else self.mixing.to(self.data) @ self.data

    @property
    def has(self) -> Tensor:
        """The blocks that each row has (K x blocks, bool): `present`, filled in where every row has all."""
        return torch.ones(len(self), len(self.layout.blocks)).bool() if self.present is None else self.present

    def part(self, row: int) -> Layout:
        """Return the blocks that a row has."""
        return self.layout if self.present is None else self.layout.having(self.present[row].tolist())

    @property
    def start(self) -> Tensor:
        """The model that each row starts from (K x d): `base`, filled in where that is zeros."""
        return torch.zeros_like(self.X) if self.base is None else self.base

    def vectors(self, into: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the rows, each a vector (d). Rows that are not computed yet are computed without X and not stored.

        With `into` (K x d) they are written there, even if it is the matrix from which they are computed.
        """
        if into is None and ("X" in vars(self) or (self.mixing is None and isinstance(self.given, Tensor))):
            yield from self.X
            return
        beside = self.mixing is None and isinstance(self.given, Beside)
        rows = (self.given if beside else Beside(self.layout, ((self.layout, self),))).separate(into)  # type: ignore[union-attr]
        while rows:
            yield rows.pop(0)

    @cached_property
    def norms(self) -> Tensor:
        """The rows' Euclidean norms (K, float64), of packed rows bounds; not finite for rows with nan or inf alone."""
        return row_norms(self.X) if isinstance(self.given, Tensor) or self.mixing is not None else self.given.norms()

    @staticmethod
    def of(
        X: Any,
        n: Any = None,
        layout: Layout | None = None,
        rows: Sequence[str | Row] | None = None,
        *,
        weight: Any = None,
        coef: Any = None,
        present: Any = None,
        support: Any = None,
        base: Any = None,
        auxiliary: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> Updates:
        """Build Updates from a plain K x d matrix, sorted by key. Without `n` all rows count the same; without `layout`
        there is one block, "x"."""
        X = torch.as_tensor(X)
        X = X if X.is_floating_point() else X.float()
        if X.ndim != 2:
            raise ValueError(f"X: expected a matrix (K x d), found shape {tuple(X.shape)}")
        k = len(X)
        if rows is None:
            width = len(str(k - 1))
            rows = [f"c{i:0{width}d}" for i in range(k)]
        keys: list[Row] = [(r, None) if isinstance(r, str) else r for r in rows]
        if len(keys) != k:
            raise ValueError(f"rows: expected {k} keys, found {len(keys)}")
        order = sorted(range(k), key=lambda i: _keys(keys)[i])
        n = torch.ones(k) if n is None else n
        own = {"n": n, "weight": n if weight is None else weight, "present": present, "support": support}
        own |= {"given": X, "coef": coef, "base": base}
        kinds = {"n": torch.float64, "weight": torch.float64, "present": torch.bool, "support": torch.bool}
        given = {name: torch.as_tensor(v).to(kinds.get(name, X.dtype)) for name, v in own.items() if v is not None}
        beside = {name: torch.as_tensor(value).to(X.dtype) for name, value in (auxiliary or {}).items()}
        if order != list(range(k)):
            given = {name: value[order] for name, value in given.items()}
            extra = {name: _pick(value, order) for name, value in extra.items()}
            beside = {name: value[order] for name, value in beside.items()}
        if layout is None:
            layout = Layout((Block("x", (X.shape[1],), dtype_name(X)),))
        return Updates(layout, tuple(keys[i] for i in order), extra=extra, auxiliary=beside, **given)

    def __len__(self) -> int:
        return len(self.rows)

    def replace(self, **changes: Any) -> Updates:
        """Return a copy with some fields changed; a new X is not checked."""
        if "X" in changes:
            changes |= {"given": changes.pop("X"), "mixing": None}
        return replace(self, **changes)

    def empty(self, rows: int) -> Tensor:
        """Return an uninitialised matrix (rows x d) of X's dtype and device, without computing X."""
        if isinstance(self.given, Distributed):
            return torch.empty(rows, self.layout.d, dtype=self.given.dtype)
        return self.data.new_empty(rows, self.layout.d)

    def summed(self, runs: Sequence[tuple[int, int, Tensor]]) -> Tensor:
        """Return sum_k p_k X_k (d) over runs of blocks (first, end, p of K numbers); 0 where there is no run."""
        if self.mixing is not None:
            runs = [(first, end, p @ self.mixing) for first, end, p in runs]
        if isinstance(self.given, Distributed):
            return self.given.summed(runs)
        return sums(self.data, self.layout, runs)

    def mixed(self, W: Tensor) -> Updates:
        """Replace each row by a combination of the rows: W X (W is K x K). The product is computed when X is read."""
        W = W.double()
        return replace(self, mixing=W if self.mixing is None else W @ self.mixing)

    def select(self, part: Layout) -> Updates:
        """Return the columns of `part` only (X is a view where they are consecutive)."""
        blocks = self.layout.positions(part)
        return replace(
            self,
            layout=part,
            given=self.given.select(part) if isinstance(self.given, Distributed) else self.layout.take(self.data, part),
            coef=None if self.coef is None else self.layout.take(self.coef, part),
            present=None if self.present is None else self.present[:, blocks],
            support=None if self.support is None else self.support[:, blocks],
            base=None if self.base is None else self.layout.take(self.base, part),
            auxiliary={k: self.layout.take(v, part) for k, v in self.auxiliary.items()},
        )

    def keep(self, index: Sequence[int]) -> Updates:
        """Return some rows only, given by position in ascending order."""
        index = list(index)
        if index == list(range(len(self))):
            return self
        whole = self.mixing is not None or isinstance(self.given, Tensor)
        return replace(
            self,
            rows=tuple(self.rows[i] for i in index),
            given=self.X[index] if whole else self.given.keep(index),  # type: ignore[union-attr]
            mixing=None,
            extra={name: _pick(value, index) for name, value in self.extra.items()},
            auxiliary={name: value[index] for name, value in self.auxiliary.items()},
            **{name: value[index] for name in _BY_ROW if (value := getattr(self, name)) is not None},
        )

    def finite(self) -> tuple[Updates, tuple[Row, ...]]:
        """Drop rows with nan or inf; return what is left and the keys of the dropped rows."""
        bad = {i for i, norm in enumerate(self.norms.tolist()) if not math.isfinite(norm)}
        if not bad:
            return self, ()
        return self.keep([i for i in range(len(self)) if i not in bad]), tuple(self.rows[i] for i in sorted(bad))

    def reduced(self, x: Tensor) -> Updates:
        """Return the result of a rule that returns one vector (d) for everyone."""
        present = None if self.present is None or not len(self) else self.present.any(dim=0, keepdim=True)
        n, weight = self.n.sum().reshape(1), self.weight.sum().reshape(1)
        return Updates(self.layout, (EVERYONE,), x.reshape(1, -1), n, weight, present=present)


@dataclass(frozen=True, eq=False)
class Beside(Rows):
    """Rows in parts, each some of the columns with a mixing of its own."""

    layout: Layout
    parts: tuple[tuple[Layout, Updates], ...]
    """The columns of each part, all together those of `layout`, and its rows, the same in all."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.parts[0][1]), self.layout.d

    def dense(self) -> Tensor:
        X = self.parts[0][1].empty(self.shape[0]).new_empty(self.shape)
        for part, rows in self.parts:
            spans = self.layout.spans(part)
            if rows.mixing is not None and len(spans) == 1:
                # straight to its place: computed separately, it would be one more matrix
                torch.mm(rows.mixing.to(X), rows.data, out=X[:, spans[0]])
            else:
                self.layout.put(X, part, rows.X)
        return X

    def separate(self, into: Tensor | None = None) -> list[Tensor]:
        """Return the rows, each in memory of its own, or as the rows of a matrix `into` (see `Updates.vectors`)."""
        new = self.parts[0][1].data.new_empty
        vectors = [new(self.layout.d) for _ in range(self.shape[0])] if into is None else list(into)
        for part, rows in self.parts:
            W, at = None if rows.mixing is None else rows.mixing.to(rows.data), 0
            for s in (piece for span in self.layout.spans(part) for piece in _pieces(span)):
                data = rows.data[:, at : at + s.stop - s.start]
                for x, values in zip(vectors, data if W is None else W @ data, strict=True):
                    x[s] = values
                at += s.stop - s.start
        return vectors

    def take(self, index: Tensor) -> Tensor:
        X = self.parts[0][1].data.new_empty(self.shape[0], len(index))
        for part, rows in self.parts:
            here, columns = self.layout.places(part, index)
            values = rows.data.index_select(1, columns)
            X[:, here] = values if rows.mixing is None else rows.mixing.to(values) @ values
        return X

    def keep(self, index: Sequence[int]) -> Beside:
        return Beside(self.layout, tuple((part, rows.keep(index)) for part, rows in self.parts))

    def norms(self) -> Tensor:
        return row_norms(self.dense())


def _pieces(columns: slice) -> list[slice]:
    """Return consecutive columns in pieces of _COLUMNS; the last one is longer, so that no piece is short."""
    a, count = columns.start, max(1, (columns.stop - columns.start) // _COLUMNS)
    return [slice(a + i * _COLUMNS, a + (i + 1) * _COLUMNS if i + 1 < count else columns.stop) for i in range(count)]


def sums(X: Tensor, layout: Layout, runs: Sequence[tuple[int, int, Tensor]]) -> Tensor:
    """Return sum_k p_k X_k (d) over runs of a layout's blocks (first, end, p of K numbers); 0 where there is no run."""
    out = X.new_zeros(layout.d)
    for first, end, p in runs:
        s = layout.run(first, end)
        torch.mv(X[:, s].t(), p.to(X), out=out[s])
    return out


def row_norms(X: Tensor) -> Tensor:
    """Return the Euclidean norms of a matrix's rows (K, float64), not finite only for rows with nan or inf."""
    norms = torch.linalg.vector_norm(X, dim=1).double()
    for i in (~norms.isfinite()).nonzero().flatten().tolist():  # squares may overflow
        x = X[i].double()
        norms[i] = (largest := x.abs().amax()) * (x / largest).norm()
    return norms


def _keys(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return [(client, task or "") for client, task in rows]


def _pick(values: Any, index: Sequence[int]) -> Any:
    return values[list(index)] if isinstance(values, Tensor) else [values[i] for i in index]
