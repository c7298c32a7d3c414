"""Excel workbooks (.xlsx) as tables: cells as they were saved, formulas as their results. No macro or link is run."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import twice
from fedloom.core.lazy import need
from fedloom.core.machine import need_memory

if TYPE_CHECKING:
    import pandas

_NO_RESULT = re.compile(rb'<c (?![^>]*t="str")[^>]*>\s*<f([^>]*/>|[^>]*>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>')
"""A cell with a formula and without its result: a program wrote it, and no spreadsheet has computed it yet."""
_ROW, _CELL = re.compile(rb"<(?:\w+:)?row\b"), re.compile(rb"<(?:\w+:)?c\b")
_NUMBER, _LETTERS = (re.compile(rb"""\sr\s*=\s*["']""" + place) for place in (rb"[A-Za-z]*(\d+)", rb"([A-Za-z]+)\d"))
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ABOVE = 20
"""So many rows are searched for the names of columns."""
_BYTES = 100
"""Memory that a cell takes, also an empty one between others, while the reader and pandas both hold it."""


def harmless(text: str) -> str:
    """Return a text with a sign in place of each control character, with which a table could write to a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def names_of(cells: Iterable[Any]) -> list[str]:
    """Return the names of columns, of a blank one by its place. Raises ValueError where two are the same."""
    names = [" ".join(str(cell).split()) for cell in cells]
    return different([name or f"column {place}" for place, name in enumerate(names, 1)])


def different(names: list[str]) -> list[str]:
    """Return names of columns, without control characters. Raises ValueError where two are the same."""
    names = [*map(harmless, names)]
    for name in twice(names)[:1]:
        places = [str(place) for place, other in enumerate(names, 1) if other == name]
        raise ValueError(f"columns {' and '.join(places)} are all named {name!r}; rename them")
    return names


def sheets(path: Path) -> tuple[dict[str, pandas.DataFrame], tuple[str, ...]]:
    """Read the sheets that have cells, by their names; the first row with cells names the columns. A sheet without
    columns of the largest one, such as a list of codes, is left out, with a note.

    Raises ValueError where sheets have some columns in common and others not, cells are merged, a formula has no
    result, or lines stand above the names."""
    calamine = need("python_calamine", "excel")
    with zipfile.ZipFile(path) as archive:
        need_memory(8 * sum(part.file_size for part in archive.infolist()), str(path))
        for part in archive.infolist():
            with archive.open(part) as opened:  # a whole part would be unpacked first, whatever size it states
                _check(opened.read(part.file_size))
    book = calamine.CalamineWorkbook.from_path(str(path))
    found = [
        book.get_sheet_by_name(each.name)
        for each in book.sheets_metadata
        if each.typ is calamine.SheetTypeEnum.WorkSheet
    ]
    cells = {sheet.name: full for sheet in found if len(full := _cells(sheet))}
    if not cells:
        raise ValueError("it is empty")
    largest = max(cells, key=lambda name: cells[name].count().sum())
    names = [*cells[largest].iloc[0].dropna()]
    related = {name: each.head(_ABOVE).isin(names).sum(axis=1).max() > 1 for name, each in cells.items()}
    related[largest] = True
    tables = {sheet.name: _table(sheet, cells[sheet.name]) for sheet in found if related.get(sheet.name)}
    (first, one), *others = tables.items()
    for name, other in others:
        for column in one.columns.symmetric_difference(other.columns, sort=False):
            has, lacks = (first, name) if column in one else (name, first)
            raise ValueError(
                f"sheet {has!r} has a column {column!r}, sheet {lacks!r} has none; expected the same columns in the "
                "sheet of each site, and no other sheet with them"
            )
    away = [name for name, is_table in related.items() if not is_table]
    return tables, tuple(f"sheet {name!r} is left out: it has no columns of sheet {largest!r}" for name in away)


def _cells(sheet: Any) -> pandas.DataFrame:
    from pandas import DataFrame

    return DataFrame(sheet.to_python(skip_empty_area=False), dtype=object).map(_value).dropna(how="all")


def _table(sheet: Any, cells: pandas.DataFrame) -> pandas.DataFrame:
    if sheet.merged_cell_ranges:
        found = f"sheet {sheet.name!r}: cells are merged, so all but the first would be empty"
        raise ValueError(f"{found}; unmerge them and fill each")
    head, body = cells.iloc[0], cells.iloc[1:]
    few, most = head.count(), max(body.count(axis=1), default=0)
    if few < most - 1:  # pandas leaves its index without a name
        found = f"sheet {sheet.name!r}: the first row with cells has {few}, a row below {most}"
        raise ValueError(f"{found}; remove rows above the names, and name each column")
    frame = body.set_axis(names_of("" if cell is None or cell != cell else cell for cell in head), axis=1)
    return frame.loc[:, (head.notna() | body.notna().any()).to_numpy()].infer_objects()


def _value(cell: Any) -> Any:
    if isinstance(cell, float):
        return int(cell) if cell.is_integer() else cell
    if isinstance(cell, time | timedelta):
        return str(cell)
    if isinstance(cell, date) and not isinstance(cell, datetime):
        return datetime(cell.year, cell.month, cell.day)
    return None if cell == "" else cell


def _check(xml: bytes) -> None:
    """Raise ValueError for a formula without a result, and UserError for cells too far apart: the reader allocates all
    cells between them, and the process ends where it cannot."""
    if _NO_RESULT.search(xml):
        raise ValueError("formulas without a result found; open the file in a spreadsheet program and save it")
    rows = _ROW.split(xml)
    row = max(len(rows), *map(int, {*_NUMBER.findall(xml), b"0"}))
    column = max(*(len(_CELL.findall(cells)) for cells in rows), *map(_column, {*_LETTERS.findall(xml), b""}))
    need_memory(_BYTES * row * column, f"a table that ends in row {row} and column {column}")


def _column(letters: bytes) -> int:
    """Return the number of a column: 1 for A, 27 for AA."""
    return reduce(lambda number, letter: 26 * number + letter - 64, letters.upper(), 0)
