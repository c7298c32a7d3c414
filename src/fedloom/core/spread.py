"""Columns of one matrix that lie in several processes, and what a rule then needs of the others.

Inside `spread` every process runs the same stage on all rows and its own columns: a layout with the same blocks, of
which each has only the columns that are here. A rule that treats every column alike need not know. What is added up
over columns goes through `total`; state holds whole vectors, which `cut` and `join` take apart and put together.
Outside of it all columns are here, and each of these functions gives back what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from fedloom.core.layout import Layout


class Spread(Protocol):
    """How the columns lie. All processes call its methods in the same order."""

    def total(self, x: Tensor) -> Tensor: ...
    def cut(self, layout: Layout, vector: Tensor) -> Tensor: ...
    def at(self, layout: Layout, index: Tensor) -> Tensor: ...
    def join(self, layout: Layout, part: Tensor) -> Tensor: ...
    def whole(self, layout: Layout) -> Layout: ...


_NOW: ContextVar[Spread | None] = ContextVar("spread", default=None)


@contextmanager
def spread(how: Spread) -> Iterator[None]:
    """Stages called inside see only the columns that are here."""
    token = _NOW.set(how)
    try:
        yield
    finally:
        _NOW.reset(token)


def total(x: Tensor) -> Tensor:
    """The sum over all processes of what each has added up over its columns; the same bits in each."""
    now = _NOW.get()
    return x if now is None else now.total(x)


def cut(layout: Layout, vector: Tensor) -> Tensor:
    """Of a vector over the whole of a layout's blocks the columns that are here."""
    now = _NOW.get()
    return vector if now is None else now.cut(layout, vector)


def at(layout: Layout, index: Tensor) -> Tensor:
    """Of columns, by position in the whole of a layout's blocks, those that are here, by position here."""
    now = _NOW.get()
    return index if now is None else now.at(layout, index)


def join(layout: Layout, part: Tensor) -> Tensor:
    """The whole vector, from the columns of a layout that are here and those of the others."""
    now = _NOW.get()
    return part if now is None else now.join(layout, part)


def whole(layout: Layout) -> Layout:
    """The layout with all its columns."""
    now = _NOW.get()
    return layout if now is None else now.whole(layout)
