"""A matrix whose columns lie in several processes, and what a rule then needs from the other processes.

Inside `spread` every process runs the same stage on all rows, but only on its own columns: its layout has all blocks,
each with only the columns that this process has. A rule that treats every column alike need not know this. Sums over
columns go through `total`; state holds whole vectors, which `cut` takes apart and `join` puts together. Outside
`spread` the process has all columns, and each of these functions returns its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from fedloom.core.layout import Layout


class Spread(Protocol):
    """Which process has which columns. All processes call the methods in the same order."""

    def total(self, x: Tensor) -> Tensor: ...
    def cut(self, layout: Layout, vector: Tensor) -> Tensor: ...
    def at(self, layout: Layout, index: Tensor) -> Tensor: ...
    def join(self, layout: Layout, part: Tensor) -> Tensor: ...
    def whole(self, layout: Layout) -> Layout: ...


_NOW: ContextVar[Spread | None] = ContextVar("spread", default=None)


@contextmanager
def spread(how: Spread) -> Iterator[None]:
    """Stages called inside see only the columns of this process."""
    token = _NOW.set(how)
    try:
        yield
    finally:
        _NOW.reset(token)


def total(x: Tensor) -> Tensor:
    """The sum over all processes of x, which each has summed over its own columns; the same bits in each."""
    now = _NOW.get()
    return x if now is None else now.total(x)


def cut(layout: Layout, vector: Tensor) -> Tensor:
    """The columns of this process, from a vector over all columns of the layout's blocks."""
    now = _NOW.get()
    return vector if now is None else now.cut(layout, vector)


def at(layout: Layout, index: Tensor) -> Tensor:
    """Those of the columns `index` (positions among all) that this process has, as positions among its own."""
    now = _NOW.get()
    return index if now is None else now.at(layout, index)


def join(layout: Layout, part: Tensor) -> Tensor:
    """The whole vector, from this process's columns and those of the others."""
    now = _NOW.get()
    return part if now is None else now.join(layout, part)


def whole(layout: Layout) -> Layout:
    """The layout with all its columns."""
    now = _NOW.get()
    return layout if now is None else now.whole(layout)
