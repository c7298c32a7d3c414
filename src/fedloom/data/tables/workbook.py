"""Excel workbooks (.xlsx) as tables: cells as they were saved, formulas as their results. No macro or link is run."""

from __future__ import annotations

import re
import zipfile
from datetime import time, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.lazy import need
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


def sheet(path: Path) -> pandas.DataFrame:
    """Read the only sheet that has cells; the first row with cells names the columns. Raises ValueError where two
    sheets have cells, cells are merged, a formula has no result, or lines stand above the names."""
    import pandas

    need("python_calamine", "excel")
    with zipfile.ZipFile(path) as archive:
        need_memory(8 * sum(part.file_size for part in archive.infolist()), str(path))
        for part in archive.infolist():
            _check(archive.read(part))
    sheets = pandas.read_excel(
        path, sheet_name=None, header=None, dtype=object, keep_default_na=False, engine="calamine"
    )
    full = {name: cells.map(_value).dropna(how="all").dropna(axis=1, how="all") for name, cells in sheets.items()}
    found = {name: cells for name, cells in full.items() if len(cells)}
    if not found:
        raise ValueError("it is empty")
    if len(found) > 1:
        both = " and ".join(map(repr, [*found][:2]))
        raise ValueError(f"sheets {both} have cells, expected one such sheet; save each as a file of its own")
    (cells,) = found.values()
    few, *others = cells.notna().sum(axis=1)
    if few < max(others, default=0) - 1:  # pandas leaves its index without a name
        most = f"a row below {max(others)}; remove rows above the names, and name each column"
        raise ValueError(f"the first row with cells has {few}, {most}")
    head = cells.iloc[0].items()
    names = [f"column {i + 1}" if pandas.isna(name) else " ".join(str(name).split()) for i, name in head]
    return cells.iloc[1:].set_axis(names, axis=1).infer_objects()


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
