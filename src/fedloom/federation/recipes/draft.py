"""A first recipe for a folder of images, an .npz archive or a table: what `fedloom init` asks and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, RecipeError, choices
from fedloom.data.inputs import SUFFIXES, kinds_of
from fedloom.data.prepare import Store
from fedloom.data.tables.columns import Draft
from fedloom.models.signal import Kind

_SIZE = 64
"""Images of a folder are resized to so many pixels a side, which the small CNN is for."""
_TEST = 0.2
_IMAGES: dict[str, Any] = {"size": _SIZE, "test_fraction": _TEST}
MODELS: dict[Kind, str] = {"image": "small-cnn", "series": "conv1d", "features": "mlp", "tokens": "transformer"}
RATE = 0.003
"""Adam's rate for tables. On `heart` and `ist`, after 20 rounds, the validation AUC of .001, .003 and .01 differs by
noise only; `fedloom tune` chooses a rate for a table."""
BATCHES, STEPS = (32, 64, 128, 256, 512, 1024), 50
"""Batch sizes for tables: the first with which an epoch of a site of mean size has at most STEPS steps. With 32 always,
a table of 35,000 rows per site would train for hours where minutes do."""
_MOST = 100
"""A column of whole numbers with more values than these is no class label."""


@dataclass(frozen=True)
class Found:
    """The content of the data."""

    data: dict[str, Any]
    """The recipe's section, without labels and domains."""
    columns: tuple[str, ...]
    """Columns that may be a label or a client; none for a folder, whose classes are folders."""
    groups: bool = False
    """True if the data has domains without a column for them."""
    signal: Kind = "image"
    """The kind of input."""
    suffix: str = ""
    """The end of a column's key, after its name: '_{split}', or nothing."""


def look(path: Path) -> Found:
    """Return what the data has, by the kind of file or the layout of the folder. Raises DataError for other kinds."""
    if path.is_dir() and not any(path.glob("*.npy")):
        return _folder(path)
    if path.suffix != ".npz" and not path.is_dir():
        raise DataError(f"{path}: expected a folder of images, a .npz file or a table (.csv, .gz, .xz, .parquet)")
    with Store(path.expanduser()) as store:
        return _arrays(path, {key: store.read(key) for key in store.keys})


def draft(content: Found, name: str, labels: Sequence[str], clients: str, method: str, rounds: int) -> dict[str, Any]:
    """Return the recipe, to be checked by `load`.

    `clients` is a number, of each group where the data has groups, or the column that says whose an example is.
    Raises RecipeError for a column that is not there.
    """
    data = dict(content.data)
    by_number = clients.isdigit()
    for column in (*labels, *([] if by_number else [clients])):
        if column not in content.columns:
            more = choices("Found", column, content.columns)
            raise RecipeError(f"no column {column!r} that could be a label or name the client of each row.{more}")
    if content.columns:
        data["labels"] = {label: label + content.suffix for label in labels}
    if not by_number:
        data["domain"] = clients + content.suffix
    grouped = content.groups or not by_number
    partition = {"name": "domains" if grouped else "iid", "clients": int(clients) if by_number else 1}
    return _recipe(name, data, partition, MODELS[content.signal], method, rounds)


def draft_of_table(
    content: Draft, path: Path, name: str, clients: int | None, method: str, rounds: int
) -> dict[str, Any]:
    """Return the recipe of a table, to be checked by `load`; `clients` share it where no column says whose a row is."""
    partition = {"name": "own"} if clients is None else {"name": "iid", "clients": clients}
    data = {"name": "table", "path": str(path.resolve()), **content.section}
    frame, site = content.table.frame, content.table.site
    sites = clients or (1 if site is None else frame[site].nunique())
    recipe = _recipe(name, data, partition, "mlp", method, rounds, RATE)
    fits = (size for size in BATCHES if len(frame) / sites <= STEPS * size)
    recipe["training"]["batch_size"] = next(fits, BATCHES[-1])
    return recipe


def _recipe(
    name: str,
    data: Mapping[str, Any],
    partition: Mapping[str, Any],
    model: str,
    method: str,
    rounds: int,
    rate: float = 0.001,
) -> dict[str, Any]:
    return {
        "name": name,
        "data": data,
        "partition": partition,
        "model": model,
        "method": method,
        "training": {"rounds": rounds, "epochs": 1, "batch_size": 32, "optimizer": {"name": "adam", "lr": rate}},
    }


def _folder(path: Path) -> Found:
    """Return the layout CLASS/IMAGE, DOMAIN/CLASS/IMAGE or {train,test}/CLASS/IMAGE."""
    inside = sorted(entry for entry in path.iterdir() if entry.is_dir())
    root, name = path.resolve().parent, path.resolve().name
    if inside and all(_has_images(folder) for folder in inside):
        return Found({"name": "domain-folders", "root": str(root), "domains": [name], **_IMAGES}, ())
    deeper = [entry for folder in inside for entry in folder.iterdir() if entry.is_dir()]
    if not deeper or not all(_has_images(folder) for folder in deeper):
        raise DataError(f"{path}: expected images in CLASS, DOMAIN/CLASS or train/CLASS and test/CLASS below it")
    if {folder.name for folder in inside} == {"train", "test"}:
        return Found({"name": "class-folders", "root": str(root), "sets": [name], "size": _SIZE}, ())
    return Found({"name": "domain-folders", "root": str(path.resolve()), **_IMAGES}, (), groups=True)


def _has_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in SUFFIXES for entry in folder.iterdir())


def _arrays(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Found:
    split = [key.removesuffix("_train") for key in arrays if key.endswith("_train")]
    split = [key for key in split if f"{key}_test" in arrays]
    parts = {key: arrays[f"{key}_train"] for key in split} or arrays
    inputs = [key for key, a in parts.items() if a.ndim in (2, 3, 4) and (a.dtype == np.uint8 or a.dtype.kind == "f")]
    if not inputs:
        raise DataError(f"{path}: expected an array of inputs (N x F or images; uint8 or floating point), found none")
    chosen = "x" if "x" in inputs else inputs[0]
    could = tuple(key for key, a in parts.items() if a.ndim == 1 and len(a) == len(parts[chosen]) and _counts(a))
    suffix = "_{split}" if split else ""
    section: dict[str, Any] = {"name": "arrays", "path": str(path.resolve()), "images": chosen + suffix}
    section |= {} if split else {"test_fraction": _TEST}
    kinds = kinds_of(parts[chosen])
    section |= {"signal": kinds[0]} if len(kinds) > 1 else {}  # else `arrays` would ask
    return Found(section, could, signal=kinds[0], suffix=suffix)


def _counts(column: np.ndarray[Any, Any]) -> bool:
    """Return whether a column may be a label, or say whose an example is."""
    values = np.unique(column)
    return len(values) <= min(_MOST, len(column) // 2) and (
        column.dtype.kind == "U" or (column.dtype.kind in "biu" and values[0] >= -1)
    )
