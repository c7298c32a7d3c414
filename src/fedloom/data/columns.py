"""Columns of a .csv file as arrays. What is not as it should be is refused with its line."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError, parsing
from fedloom.core.machine import need_memory
from fedloom.data.prepare import Array

_BYTES = 60
"""About how many bytes Python takes for a cell of one character and its separator, per byte of the file."""


def read_columns(path: Path) -> dict[str, Array]:
    """Name -> column: whole numbers (int64), numbers (float64, NaN where a cell is empty) or texts, as all cells allow.

    The first line has the names; cells are separated by commas. DataError for lines of another length, a name that is
    empty or there twice, and a file without examples.
    """
    where = f"arrays: {path}"
    need_memory(_BYTES * path.stat().st_size, where)
    with parsing(f"{where} is not a .csv file in UTF-8"), path.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, strict=True)
        lines = [(reader.line_num, line) for line in reader if line]
    if len(lines) < 2:
        raise DataError(f"{where}: expected a line of names and a line for each example, found {len(lines)} lines")
    names = lines[0][1]
    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise DataError(f"{where}: expected a name of its own for each column, found {name!r}")
    for number, line in lines:
        if len(line) != len(names):
            raise DataError(f"{where}, line {number}: expected {len(names)} cells, found {len(line)}")
    return {name: _column([line[i].strip() for _, line in lines[1:]]) for i, name in enumerate(names)}


def _column(cells: Sequence[str]) -> Array:
    if any("_" in cell for cell in cells):  # Python takes 1_000 for a number
        return np.array(cells)
    try:
        return np.array([int(cell) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(cell or "nan") for cell in cells], np.float64)
    except ValueError:
        return np.array(cells)


def side_by_side(where: str, columns: dict[str, Array]) -> Array:
    """Columns of numbers as features (N x F, float64). DataError for one of texts."""
    for name, column in columns.items():
        if column.dtype.kind == "U":
            raise DataError(f"{where}: column {name!r} expected numbers, found {str(column[0])!r}")
    return np.stack(list(columns.values()), 1).astype(np.float64)


def numbered(texts: Array) -> tuple[Array, Array]:
    """(the number of each text among the names, -1 for an empty one; the names: all texts there are, sorted)."""
    names = np.unique(texts[texts != ""])
    return np.where(texts == "", -1, np.searchsorted(names, texts)), names
