"""Named arrays on disk, an .npz archive or a folder of .npy files, and parts of data sets. No pickle."""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from fedloom.core.errors import DataError, RecipeError, choices, nearest, parsing
from fedloom.core.machine import need_memory
from fedloom.data.prepare import SPLITS, Array, stratified, subset

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Part:
    """Examples as they were read: inputs in their own layout, labels per task (N or N x ...), and domains (N)."""

    inputs: Array
    labels: dict[str, Array]
    domain: Array | None = None
    key: str = ""

    def take(self, index: Array) -> Part:
        """Return the part at `index` (positions or a mask)."""
        domain = None if self.domain is None else self.domain[index]
        return Part(self.inputs[index], {k: v[index] for k, v in self.labels.items()}, domain, self.key)

    def cut(self, fraction: float, seed: int) -> list[Part]:
        """Split off a test part of this share, stratified by the domain and the first task with classes."""
        columns = [column for column in self.labels.values() if column.ndim == 1][:1]
        columns = columns or [np.zeros(len(self.inputs), np.int64)]
        if self.domain is not None:
            columns.append(self.domain)
        strata = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)
        test = stratified(strata, fraction, seed)
        return [self.take(~test), self.take(test)]

    def tensors(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return labels and domains as `TensorExamples` has them."""
        import torch

        domain = None if self.domain is None else torch.from_numpy(self.domain)
        return {task: torch.from_numpy(column) for task, column in self.labels.items()}, domain


def limited(parts: Sequence[Part], limit: int | None, seed: int) -> list[Part]:
    """Return the train part and the test part with at most `limit` random examples each."""
    kept = [subset(len(part.inputs), limit, seed, split) for part, split in zip(parts, SPLITS, strict=True)]
    return [part if index is None else part.take(index) for part, index in zip(parts, kept, strict=True)]


def splits(name: str, keys: Sequence[str], test_fraction: float | None) -> tuple[str, ...]:
    """Return the values of `{split}` in the keys: "train" and "test", or "pool" where no key has it.

    RecipeError where only some keys have it, a pool comes without `test_fraction`, or `test_fraction` without a pool.
    """
    pooled = ["{split}" not in key for key in keys]
    if any(pooled) != all(pooled):
        raise RecipeError(f"{name}: expected {{split}} in all keys or in none, found {', '.join(keys)}")
    if pooled[0] != (test_fraction is not None):
        problem = "needs test_fraction" if pooled[0] else "has a test part, so test_fraction has no use"
        raise RecipeError(f"{name}: a data set with the key {keys[0]!r} {problem}")
    return ("pool",) if pooled[0] else SPLITS


class Store:
    """Named arrays of an .npz archive or a folder, read when they are asked for.

    What an array's header says is believed only if as many bytes follow it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive: zipfile.ZipFile | None = None
        if path.suffix == ".csv":
            raise DataError(
                f"arrays: {path}: a table found; `data: {{name: table}}` reads it, `fedloom init {path}` writes that"
            )
        if path.is_dir():
            self.keys = sorted(file.stem for file in path.glob("*.npy"))
        elif path.is_file():
            with parsing(f"arrays: {path} is neither an .npz archive nor a folder of .npy files"):
                self.archive = zipfile.ZipFile(path)
            self.keys = sorted(name.removesuffix(".npy") for name in self.archive.namelist())
        else:
            raise DataError(f"arrays: there is no file or folder {path}")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        if self.archive is not None:
            self.archive.close()

    def read(self, key: str) -> Array:
        """Read the array of a key, of one dimension or more: in memory from a file, mapped from a folder."""
        if key not in self.keys:
            raise DataError(f"arrays, {self.path}: no key {key!r}.{choices('Found', key, self.keys)}")
        with parsing(f"arrays, {self.path}: {key!r} cannot be read as a plain array"):
            array = self._mapped(key) if self.archive is None else _unpacked(self.archive, key)
        if not array.ndim:
            raise DataError(f"arrays, {self.path}: {key!r} expected a value for each example, found a single one")
        return array

    def _mapped(self, key: str) -> Array:
        file = self.path / f"{key}.npy"
        with file.open("rb") as opened:
            shape, order, kind = _header(opened, file.stat().st_size)
            start = opened.tell()
        if not math.prod(shape):
            return np.zeros(shape, kind)
        # Mapped copy-on-write: torch refuses read-only memory with a warning, and nothing is ever written.
        return np.asarray(np.memmap(file, kind, "c", start, shape, order))

    def integers(self, key: str, expected: int, beside: str) -> Array:
        """Read a column of `expected` integers, as int64 in memory."""
        column, where = self.read(key), f"arrays, {self.path}"
        if column.ndim != 1 or column.dtype.kind not in "biu":
            shown = f"{column.dtype} of shape {column.shape}"
            raise DataError(f"{where}: {key!r} expected one integer per example, found {shown}")
        if len(column) != expected:
            raise DataError(f"{where}: expected as many {key!r} as {beside!r}, {expected}, found {len(column)}")
        if column.dtype.kind == "u" and column.size and column.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where}: {key!r} expected integers below 2^63, found {column.max()}")
        return column.astype(np.int64)

    def names(self, key: str) -> tuple[str, ...]:
        """Read a column of names."""
        column = self.read(key)
        if column.ndim != 1 or column.dtype.kind not in "US":
            shown = f"{column.dtype} of shape {column.shape}"
            raise DataError(f"arrays, {self.path}: {key!r} expected a list of names, found {shown}")
        return tuple(column.astype(str).tolist())


def _unpacked(archive: zipfile.ZipFile, key: str) -> Array:
    """Read an array of an archive into memory."""
    name = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
    size = archive.getinfo(name).file_size
    need_memory(size, f"arrays, {archive.filename}: {key!r}")
    with archive.open(name) as opened:
        shape, order, kind = _header(opened, size)
        data = opened.read()
    return np.frombuffer(bytearray(data), kind).reshape(shape, order=order)


def _header(opened: IO[bytes], size: int) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """Read (shape, order, type) of an .npy file of so many bytes, and stop at its values. ValueError for others."""
    with parsing("its header is damaged"):  # numpy reads it as Python
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, kind = read(opened)
    if kind.hasobject:
        raise ValueError("it holds Python objects, which could run foreign code")
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != size - opened.tell():
        raise ValueError(f"its header says {kind} of shape {shape}, but {size - opened.tell()} bytes follow")
    return shape, "F" if by_column else "C", kind


def read_table(path: Path, where: str, wanted: Collection[str]) -> dict[str, list[str]]:
    """Read the wanted columns of a .csv file: name -> cells, without the space around them.

    The first line has the names; cells are separated by commas. DataError for lines of another length, a name that is
    empty or there twice, one that is absent, and a file without examples.
    """
    if not path.is_file():
        raise DataError(f"{where}: there is no such file")
    with parsing(f"{where} is not a .csv file in UTF-8"), path.open(encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, strict=True)
        lines = [(reader.line_num, line) for line in reader if line]
    if len(lines) < 2:
        raise DataError(f"{where}: expected a line of names and a line for each example, found {len(lines)} lines")
    head = lines[0][1]
    for name in wanted:
        if name not in head:
            raise DataError(f"{where}: no column {name!r}.{nearest(name, head)} Found: {', '.join(head)}")
        if not name.strip() or head.count(name) > 1:
            raise DataError(f"{where}: expected a name of its own for each column, found {name!r}")
    for number, line in lines:
        if len(line) != len(head):
            raise DataError(f"{where}, line {number}: expected {len(head)} cells, found {len(line)}")
    return {name: [line[head.index(name)].strip() for _, line in lines[1:]] for name in wanted}
