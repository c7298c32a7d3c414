"""Excel workbooks (.xlsx) as tables: cells as they were saved, formulas as their results. No macro or link is run."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from datetime import time, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.machine import need_memory

if TYPE_CHECKING:
    import pandas

_MERGED = re.compile(rb"<(\w+:)?mergeCell ")
_NO_RESULT = re.compile(rb'<c (?![^>]*t="str")[^>]*>\s*<f([^>]*/>|[^>]*>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>')
"""A cell with a formula and without its result: a program wrote it, and no spreadsheet has computed it yet."""
_ROW, _CELL = re.compile(rb"<(?:\w+:)?row\b"), re.compile(rb"<(?:\w+:)?c\b")
_NUMBER, _LETTERS = (re.compile(rb"""\sr\s*=\s*["']""" + place) for place in (rb"[A-Za-z]*(\d+)", rb"([A-Za-z]+)\d"))
_BYTES = 100
"""Memory that a cell takes, also an empty one between others, while the reader and pandas both hold it."""


def names_of(cells: Iterable[Any]) -> list[str]:
    """Return the names of columns, of a blank one by its place. Raises ValueError where two are the same."""
    names = [" ".join(str(cell).split()) for cell in cells]
    return different([name or f"column {place}" for place, name in enumerate(names, 1)])


def different(names: list[str]) -> list[str]:
    """Return names of columns as they are. Raises ValueError where two are the same."""
    for name in names:
        places = [str(place) for place, other in enumerate(names, 1) if other == name]
        if len(places) > 1:
            raise ValueError(f"columns {' and '.join(places)} are all named {name!r}; rename them")
    return names


def sheets(path: Path) -> dict[str, pandas.DataFrame]:
    """Read the sheets that have cells, by their names; the first row with cells names the columns. Raises ValueError
    where sheets have other columns, cells are merged, a formula has no result, or lines stand above the names."""
    import pandas

    with zipfile.ZipFile(path) as archive:
        need_memory(8 * sum(part.file_size for part in archive.infolist()), str(path))
        for part in archive.infolist():
            _check(archive.read(part))
    found = pandas.read_excel(
        path, sheet_name=None, header=None, dtype=object, keep_default_na=False, engine="calamine"
    )
    full = {str(name): cells.map(_value).dropna(how="all") for name, cells in found.items()}
    tables = {name: _named(cells) for name, cells in full.items() if len(cells)}
    if not tables:
        raise ValueError("it is empty")
    (first, one), *others = tables.items()
    for name, other in others:
        for column in one.columns.symmetric_difference(other.columns, sort=False):
            has, lacks = (first, name) if column in one else (name, first)
            raise ValueError(
                f"sheet {has!r} has a column {column!r}, sheet {lacks!r} has none; expected one sheet with cells, or a "
                "sheet with the same columns for each site"
            )
    return tables


def _named(cells: pandas.DataFrame) -> pandas.DataFrame:
    head, body = cells.iloc[0], cells.iloc[1:]
    few, most = head.count(), max(body.count(axis=1), default=0)
    if few < most - 1:  # pandas leaves its index without a name
        raise ValueError(
            f"the first row with cells has {few}, a row below {most}; remove rows above the names, and name each column"
        )
    frame = body.set_axis(names_of("" if cell is None or cell != cell else cell for cell in head), axis=1)
    return frame.loc[:, (head.notna() | body.notna().any()).to_numpy()].infer_objects()


def _value(cell: Any) -> Any:
    return None if cell == "" else str(cell) if isinstance(cell, time | timedelta) else cell


def _check(xml: bytes) -> None:
    """Raise ValueError for what the cells alone do not tell, and UserError for cells too far apart: the reader
    allocates all cells between them, and the process ends where it cannot."""
    if _MERGED.search(xml):
        raise ValueError("cells are merged, so all but the first would be empty; unmerge them and fill each")
    if _NO_RESULT.search(xml):
        raise ValueError("formulas without a result found; open the file in a spreadsheet program and save it")
    rows = _ROW.split(xml)
    row = max(len(rows), *map(int, {*_NUMBER.findall(xml), b"0"}))
    column = max(*(len(_CELL.findall(cells)) for cells in rows), *map(_column, {*_LETTERS.findall(xml), b""}))
    need_memory(_BYTES * row * column, f"a table that ends in row {row} and column {column}")


def _column(letters: bytes) -> int:
    """Return the number of a column: 1 for A, 27 for AA."""
    return reduce(lambda number, letter: 26 * number + letter - 64, letters.upper(), 0)
