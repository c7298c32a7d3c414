"""Excel workbooks (.xlsx) as tables: cells as they were saved, formulas as their results. No macro or link is run."""

from __future__ import annotations

import re
import warnings
import zipfile
from contextlib import closing
from datetime import time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.core.lazy import need
from fedloom.core.machine import need_memory

if TYPE_CHECKING:
    import pandas

_MERGED = re.compile(rb"<(\w+:)?mergeCell ")
_NO_RESULT = re.compile(rb'<c (?![^>]*t="str")[^>]*>\s*<f([^>]*/>|[^>]*>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>')
"""A cell with a formula and without its result: a program wrote it, and no spreadsheet has computed it yet."""
Row = list[Any]


def sheet(path: Path) -> pandas.DataFrame:
    """Read the only sheet that has cells; the first row with cells names the columns. Raises ValueError where two
    sheets have cells, cells are merged, a formula has no result, or lines stand above the names."""
    import pandas

    openpyxl = need("openpyxl", "excel")
    need("defusedxml", "excel")  # openpyxl reads XML by it, without entities that blow up
    with zipfile.ZipFile(path) as archive:
        need_memory(8 * sum(part.file_size for part in archive.infolist()), str(path))
        for part in archive.namelist():
            _check(archive.read(part) if part.startswith("xl/worksheets/") else b"")
    with warnings.catch_warnings(action="ignore"), closing(openpyxl.open(path, read_only=True, data_only=True)) as book:
        found = {one.title: rows for one in book.worksheets if (rows := _rows(one, path))}
    if not found:
        raise ValueError("it is empty")
    if len(found) > 1:
        both = " and ".join(map(repr, [*found][:2]))
        raise ValueError(f"sheets {both} have cells, expected one such sheet; save each as a file of its own")
    ((head, *body),) = found.values()
    few, most = (max((sum(cell is not None for cell in row) for row in rows), default=0) for rows in ([head], body))
    if few < most - 1:  # pandas leaves its index without a name
        raise ValueError(
            f"the first row with cells has {few}, a row below {most}; remove rows above the names, and name each column"
        )
    wide = max(map(len, (head, *body)))
    need_memory(8 * wide * len(body), str(path))
    head, *body = (row + [None] * (wide - len(row)) for row in (head, *body))
    names = [f"column {i}" if name is None else " ".join(str(name).split()) for i, name in enumerate(head, 1)]
    frame = pandas.DataFrame(body, columns=names)
    return frame.loc[:, [name is not None for name in head] | frame.notna().any().to_numpy()]


def _check(xml: bytes) -> None:
    """Raise ValueError for what the cells alone do not tell."""
    if _MERGED.search(xml):
        raise ValueError("cells are merged, so all but the first would be empty; unmerge them and fill each")
    if _NO_RESULT.search(xml):
        raise ValueError("formulas without a result found; open the file in a spreadsheet program and save it")


def _rows(one: Any, path: Path) -> list[Row]:
    """Return the rows of a sheet that have cells, without the empty cells at their ends."""
    one.reset_dimensions()  # what the file claims may be wrong
    rows: list[Row] = []
    held = 0
    for cells in one.iter_rows(values_only=True):
        row = [str(cell) if isinstance(cell, time | timedelta) else cell for cell in cells]
        while row and (row[-1] is None or row[-1] == ""):
            row.pop()
        if row:
            rows.append(row)
            held += 64 * len(row)
            if not len(rows) % 1000:
                need_memory(held, str(path))
    return rows
