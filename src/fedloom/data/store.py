"""Named arrays on disk, an .npz archive or a folder of .npy files, and what is read of them. Nothing is unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.prepare import SPLITS, Array
from fedloom.errors import DataError, RecipeError, nearest


@dataclass
class ArrayPart:
    """One part as it was read: inputs in their own layout, and labels and domains of each (int64 or label images)."""

    key: str
    inputs: Array
    labels: dict[str, Array]
    domain: Array | None

    def take(self, index: Array) -> ArrayPart:
        """The part at `index` (positions or a mask)."""
        domain = None if self.domain is None else self.domain[index]
        return ArrayPart(self.key, self.inputs[index], {k: v[index] for k, v in self.labels.items()}, domain)

    def strata(self) -> Array:
        """Numbers (N) of the combinations of the first task's class, if it has one per example, and the domain."""
        columns = [column for column in self.labels.values() if column.ndim == 1][:1]
        columns = columns or [np.zeros(len(self.inputs), np.int64)]
        if self.domain is not None:
            columns.append(self.domain)
        return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)


def splits(name: str, keys: Sequence[str], test_fraction: float | None) -> tuple[str, ...]:
    """What `{split}` stands for in the keys: "train" and "test", or "pool" where no key has it.

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
    """Named arrays of an .npz archive or a folder; an array is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive: Any = None
        if path.is_dir():
            self.keys = sorted(file.stem for file in path.glob("*.npy"))
        elif path.is_file():
            if not zipfile.is_zipfile(path):
                raise DataError(f"arrays: {path} is neither an .npz archive nor a folder of .npy files")
            self.archive = np.load(path, allow_pickle=False)
            self.keys = sorted(self.archive.files)
        else:
            raise DataError(f"arrays: there is no file or folder {path}")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        if self.archive is not None:
            self.archive.close()

    def read(self, key: str) -> Array:
        """The array of a key: in memory from an archive, mapped from a folder."""
        if key not in self.keys:
            known = ", ".join(self.keys) or "none"
            raise DataError(f"arrays, {self.path}: no key {key!r}.{nearest(key, self.keys)} Found: {known}")
        try:
            if self.archive is not None:
                array = self.archive[key]
            else:
                # Mapped copy-on-write: torch refuses read-only memory with a warning, and nothing is ever written.
                array = np.load(self.path / f"{key}.npy", mmap_mode="c", allow_pickle=False)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"arrays, {self.path}: {key!r} cannot be read as a plain array: {error}") from error
        return np.asarray(array)

    def integers(self, key: str, expected: int, beside: str) -> Array:
        """A column of `expected` integers, as int64 in memory."""
        column = self.read(key)
        if column.ndim != 1 or column.dtype.kind not in "biu":
            raise DataError(
                f"arrays, {self.path}: {key!r} expected one integer per example, found {column.dtype} of shape "
                f"{column.shape}"
            )
        if len(column) != expected:
            raise DataError(
                f"arrays, {self.path}: expected as many {key!r} as {beside!r}, {expected}, found {len(column)}"
            )
        if column.dtype == np.uint64 and len(column) and column.max() > np.iinfo(np.int64).max:
            raise DataError(f"arrays, {self.path}: {key!r} expected integers below 2^63, found {column.max()}")
        return column.astype(np.int64)

    def names(self, key: str) -> tuple[str, ...]:
        """A column of names."""
        column = self.read(key)
        if column.ndim != 1 or column.dtype.kind not in "US":
            raise DataError(
                f"arrays, {self.path}: {key!r} expected a list of names, found {column.dtype} of shape {column.shape}"
            )
        return tuple(column.astype(str).tolist())
