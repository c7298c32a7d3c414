"""Any labelled arrays: an .npz archive or a folder of .npy files. Never reads pickled objects."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.data.augment import Augment, resolve
from fedloom.data.dense_label import DenseLabel
from fedloom.data.prepare import Array, channel_statistics, stratified, subset
from fedloom.data.registry import DATASETS
from fedloom.errors import DataError, RecipeError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset

Count = Annotated[int, Field(ge=1)]
SPLITS = ("train", "test")
ROWS = 1024  # examples converted at a time


@DATASETS.register("arrays")
def arrays(
    seed: int,
    *,
    path: str,
    images: str = "x_{split}",
    labels: Annotated[dict[str, str], Field(min_length=1)] | None = None,
    dense: Annotated[dict[str, DenseLabel], Field(min_length=1)] | None = None,
    domain: str | None = None,
    domain_names: str | None = None,
    classes: dict[str, Count] | None = None,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None,
    size: Count | None = None,
    channels: Literal[1, 3] | None = None,
    limit: Count | None = None,
    augment: bool | Augment = True,
    crop: tuple[Count, Count] | None = None,
    multiple: Count = 32,
) -> Dataset:
    """Images or feature vectors with class labels, or images with dense labels, from an .npz archive or a folder of
    .npy files.

    `images`, `labels` (task -> key; default: task `label`, key `y_{split}`) and `domain` are keys, in which `{split}`
    stands for `train` and `test`. Keys without `{split}` name one pool, of which `test_fraction` (stratified by the
    first task and the domain) becomes the test part. `domain_names` is the key of an array of names; without it,
    domains are named by their numbers.

    Inputs: uint8 or floating point; N x H x W, N x H x W x C, N x C x H x W (C = 1 or 3) or N x F. Images become
    N x C x H x W. Uint8 is scaled to 0..1 per batch, floating point becomes float32. Both are normalised per channel
    (per feature) by the mean and standard deviation of the train part. `size` resizes bilinearly to size x size;
    `channels: 1` makes images grey (ITU-R BT.601 luma), `channels: 3` repeats grey ones. `limit` keeps that many random
    examples of each part.

    Labels: N integers from 0; -1 means unlabelled. `classes` (task -> number) defaults to the largest label plus one.

    `dense` (task -> kind, key and more) takes the place of `labels`. Images are then uint8 and normalised with
    ImageNet's mean and standard deviation; grey ones are repeated. Label images have the images' height and width:
    semseg and human_parts are classes (255 or -1 = ignore); saliency and edge are 0, 1 and 255 (ignore), or shares
    with a `threshold`; depth times `factor` is metres, 0 = no value; normals are N x H x W x 3 or N x 3 x H x W,
    x right, y up, z towards the viewer, zero = no value. In training, images are changed as `augment` says and cropped
    to `crop` (height, width; default: whole); in evaluation, they are padded so that `multiple` divides their sides.

    Arrays in a folder stay on disk and are read batch by batch, unless a split, `size`, `channels`, `limit` or a
    conversion to float32 makes a copy. Raises DataError for anything absent or inconsistent, naming the key.
    """
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.tasks.classification import Classification

    if dense is not None:
        for what, value in {"labels": labels, "classes": classes, "size": size, "channels": channels}.items():
            if value is not None:
                raise RecipeError(f"arrays: {what} has no use beside dense")
    labels = {} if dense is not None else labels or {"label": "y_{split}"}
    dense = dense or {}
    patterns = [images, *labels.values(), *(label.key for label in dense.values()), *([domain] if domain else [])]
    pooled = ["{split}" not in pattern for pattern in patterns]
    if any(pooled) != all(pooled):
        raise RecipeError(f"arrays: expected {{split}} in all keys or in none, found {', '.join(patterns)}")
    if pooled[0] != (test_fraction is not None):
        need = "needs test_fraction" if pooled[0] else "has a test part, so test_fraction has no use"
        raise RecipeError(f"arrays: a data set with the key {images!r} {need}")
    if domain_names is not None and domain is None:
        raise RecipeError("arrays: domain_names needs domain")
    for task in classes or {}:
        if task not in labels:
            raise RecipeError(f"arrays: classes names the unknown task {task!r}.{nearest(task, labels)}")

    with Store(Path(path).expanduser()) as store:
        where = f"arrays, {store.path}"
        splits = ("pool",) if pooled[0] else SPLITS
        parts = [_read(store, split, images, labels, domain) for split in splits]
        for part, split in zip(parts, splits, strict=True):
            for task, label in dense.items():
                part.labels[task] = _dense(store, label.key.replace("{split}", split), label, part)
        names = store.names(domain_names) if domain_names is not None else None

    if test_fraction is not None:
        pool = parts[0]
        test = stratified(pool.strata(), test_fraction, seed)
        if not test.any():
            raise DataError(f"{where}: no class has two examples, so no test part can be split off")
        parts = [pool.take(~test), pool.take(test)]
    tasks = tuple(Classification(task, _classes(where, task, parts, classes or {})) for task in labels)
    names = _number_domains(where, parts, names)
    for number, split in enumerate(SPLITS):
        kept = subset(len(parts[number].inputs), limit, seed, split)
        if kept is not None:
            parts[number] = parts[number].take(kept)
    if dense:
        from fedloom.data.dense_arrays import build

        raw = [(part.key, part.inputs, part.labels, part.domain) for part in parts]
        return Dataset(store.path.stem, *build(where, dense, raw, resolve(augment), crop, multiple), names)

    inputs = [as_images(part.inputs, size, channels, f"{where}, {part.key!r}") for part in parts]
    if inputs[0].shape[1:] != inputs[1].shape[1:] or inputs[0].dtype != inputs[1].dtype:
        found = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in inputs)
        raise DataError(f"{where}: expected train and test inputs of one shape and type, found {found}")
    statistics = [channel_statistics(x) for x in inputs]
    for part, (mean, std) in zip(parts, statistics, strict=True):
        if not np.isfinite([*mean, *std]).all():
            raise DataError(f"{where}, {part.key!r}: expected finite inputs, found NaN or infinity")
    mean, std = statistics[0]
    train, test_part = (
        TensorExamples(
            x,
            {task: torch.from_numpy(values) for task, values in part.labels.items()},
            None if part.domain is None else torch.from_numpy(part.domain),
            mean,
            std,
        )
        for x, part in zip(inputs, parts, strict=True)
    )
    return Dataset(store.path.stem, tasks, train, test_part, names)


@dataclass
class _Part:
    """One part as it was read: inputs in their own layout, and int64 columns."""

    key: str
    inputs: Array
    labels: dict[str, Array]
    domain: Array | None

    def take(self, index: Array) -> _Part:
        """The part at `index` (positions or a mask)."""
        domain = None if self.domain is None else self.domain[index]
        return _Part(self.key, self.inputs[index], {k: v[index] for k, v in self.labels.items()}, domain)

    def strata(self) -> Array:
        """Numbers (N) of the combinations of the first task's class, if it has one per example, and the domain."""
        columns = [column for column in self.labels.values() if column.ndim == 1][:1]
        columns = columns or [np.zeros(len(self.inputs), np.int64)]
        if self.domain is not None:
            columns.append(self.domain)
        return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)


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
        return column.astype(np.int64)

    def names(self, key: str) -> tuple[str, ...]:
        """A column of names."""
        column = self.read(key)
        if column.ndim != 1 or column.dtype.kind not in "US":
            raise DataError(
                f"arrays, {self.path}: {key!r} expected a list of names, found {column.dtype} of shape {column.shape}"
            )
        return tuple(column.astype(str).tolist())


def _read(store: Store, split: str, images: str, labels: Mapping[str, str], domain: str | None) -> _Part:
    """One part, or the pool: its keys looked up and checked."""
    key = images.replace("{split}", split)
    inputs = store.read(key)
    if inputs.ndim not in (2, 3, 4) or not (inputs.dtype == np.uint8 or inputs.dtype.kind == "f"):
        raise DataError(
            f"arrays, {store.path}: {key!r} expected uint8 or floating point of shape N x F, N x H x W, N x H x W x C "
            f"or N x C x H x W, found {inputs.dtype} of shape {inputs.shape}"
        )
    if not inputs.size:
        raise DataError(f"arrays, {store.path}: {key!r} is empty, its shape is {inputs.shape}")
    columns = {}
    for task, pattern in labels.items():
        column = store.integers(pattern.replace("{split}", split), len(inputs), key)
        if column.min() < -1:
            raise DataError(
                f"arrays, {store.path}, task {task!r}: expected labels from 0, or -1 for unlabelled, found "
                f"{column.min()}"
            )
        columns[task] = column
    places = None if domain is None else store.integers(domain.replace("{split}", split), len(inputs), key)
    return _Part(key, inputs, columns, places)


def _dense(store: Store, key: str, label: DenseLabel, part: _Part) -> Array:
    """The label images of one task of a part."""
    from fedloom.data.dense_arrays import decode

    array = store.read(key)
    if len(array) != len(part.inputs):
        raise DataError(
            f"arrays, {store.path}: expected as many {key!r} as {part.key!r}, {len(part.inputs)}, found {len(array)}"
        )
    return decode(array, label, f"arrays, {store.path}, {key!r}")


def _classes(where: str, task: str, parts: Sequence[_Part], stated: Mapping[str, int]) -> int:
    """The number of classes of a task: as stated, or the largest label plus one."""
    largest = max(int(part.labels[task].max()) for part in parts)
    if largest < 0:
        raise DataError(f"{where}, task {task!r}: no example is labelled")
    if largest >= stated.get(task, largest + 1):
        raise DataError(f"{where}, task {task!r}: expected labels below {stated[task]}, found {largest}")
    return stated.get(task, largest + 1)


def _number_domains(where: str, parts: Sequence[_Part], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Check the domains against their names; without names, number the values that occur and name them so."""
    columns = [part.domain for part in parts if part.domain is not None]
    if not columns:
        return ()
    values = np.unique(np.concatenate(columns))
    if names is None:
        for part, column in zip(parts, columns, strict=True):
            part.domain = np.searchsorted(values, column)
        return tuple(map(str, values.tolist()))
    wrong = values[(values < 0) | (values >= len(names))]
    if len(wrong):
        raise DataError(f"{where}: expected domains in 0..{len(names) - 1}, found {wrong[0]}")
    return names


def as_images(array: Array, size: int | None, channels: int | None, where: str) -> Tensor:
    """Inputs as N x F or N x C x H x W, uint8 or float32; a view of `array` where nothing changes."""
    import torch

    wanted = np.uint8 if array.dtype == np.uint8 else np.float32
    mapped = isinstance(array.base, np.memmap) and array.dtype == wanted
    x = torch.from_numpy(array.astype(wanted, copy=False))
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    elif x.ndim == 4 and x.shape[1] not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels in the last or second place, found {tuple(x.shape)}")
    if x.ndim == 2:
        if size is not None or channels is not None:
            raise RecipeError(f"{where}: size and channels are for images, found feature vectors {tuple(x.shape)}")
        return x
    if channels is not None and channels != x.shape[1]:
        x = x.expand(-1, 3, -1, -1) if channels == 3 else _grey(x)
    if size is not None and x.shape[2:] != (size, size):
        x = _resize(x, size)
    return x if mapped else x.contiguous()


def _grey(x: Tensor) -> Tensor:
    """Colour images as grey ones, N x 1 x H x W, in their own type."""
    import torch

    grey = torch.empty(len(x), 1, *x.shape[2:], dtype=x.dtype)
    luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    for part, out in zip(x.split(ROWS), grey.split(ROWS), strict=True):
        y = (part * luma).sum(1, keepdim=True)
        out.copy_(y if x.is_floating_point() else y.round())
    return grey


def _resize(x: Tensor, size: int) -> Tensor:
    """Images resized to size x size, in their own type; antialiased where they shrink."""
    import torch
    from torch.nn.functional import interpolate

    resized = torch.empty(*x.shape[:2], size, size, dtype=x.dtype)
    for part, out in zip(x.split(ROWS), resized.split(ROWS), strict=True):
        y = interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
        out.copy_(y if x.is_floating_point() else y.round().clamp(0, 255))
    return resized
