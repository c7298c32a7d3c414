"""Label images from any archive: brought into the form in which dense examples are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.data.augment import Augment
from fedloom.data.dense import DenseExamples, Stored, annotated_in, checksum
from fedloom.data.dense_label import DenseLabel
from fedloom.data.prepare import Array
from fedloom.data.store import ArrayPart
from fedloom.data.transforms import padded
from fedloom.models.tasks.dense import KINDS
from fedloom.models.tasks.task import IGNORE, Task

SHORT = 0.1  # a stored normal shorter than this means that there is no normal


def pictures(images: Array, where: str) -> Tensor:
    """Images as N x 3 x H x W, uint8; grey ones are repeated. DataError for anything else."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(f"{where}: dense labels need uint8 images, found {images.dtype} of shape {images.shape}")
    x = torch.from_numpy(images)
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.shape[1] not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels in the last or second place, found {images.shape}")
    return x.expand(-1, 3, -1, -1)


def decode(array: Array, label: DenseLabel, where: str) -> Array:
    """One task's labels in the raw form of `fedloom.data.transforms` (N x H x W, or N x 3 x H x W for normals)."""
    if label.kind == "normals":
        return _normals(array, label, where)
    if array.ndim == 4 and 1 in (array.shape[1], array.shape[3]):
        array = array.reshape(len(array), *(array.shape[2:] if array.shape[1] == 1 else array.shape[1:3]))
    if array.ndim != 3:
        raise DataError(f"{where}: expected label images N x H x W, found {array.shape}")
    if label.kind == "depth":
        if array.dtype.kind not in "fiu":
            raise DataError(f"{where}: expected depth in numbers, found {array.dtype}")
        if label.factor == 1 and array.dtype in (np.float16, np.float32):
            return array
        with np.errstate(over="ignore", invalid="ignore"):  # an infinite depth is none
            metres = (array * label.factor).astype(np.float32)
            lost = np.isfinite(array) & ~np.isfinite(metres)
        if lost.any():
            raise DataError(
                f"{where}: expected depths that float32 can hold, found {array[lost][0]:g} x {label.factor:g}"
            )
        return metres
    if label.threshold is not None:
        if array.dtype.kind not in "fu":
            raise DataError(f"{where}: expected shares as uint8 or floating point, found {array.dtype}")
        whole = 1 if array.dtype.kind == "f" else np.iinfo(array.dtype).max
        return (array >= label.threshold * whole).astype(np.uint8)
    return _classes(array, label, where)


def _classes(array: Array, label: DenseLabel, where: str) -> Array:
    if array.dtype.kind not in "biu":
        raise DataError(f"{where}: expected integers, found {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < -1 or high > IGNORE:
        raise DataError(f"{where}: expected labels in 0..254, or 255 or -1 to ignore, found {low}..{high}")
    array = array.astype(np.uint8)  # -1 becomes 255
    if label.boundaries:
        return boundaries(array)
    if label.kind in ("saliency", "edge"):
        other = array[(array > 1) & (array != IGNORE)]
        if len(other):
            raise DataError(
                f"{where}: expected 0, 1 and 255 (ignore), found {other[0]}; state a threshold where these are shares"
            )
    return array


def boundaries(classes: Array, gap: int = 2) -> Array:
    """Edges (N x H x W: 0, 1; 255 = ignore) of class images (255 = ignore): one pixel wide, where the right or the
    lower neighbour has another class.

    Hand-drawn segments often leave a thin gap between them. Classes therefore first grow by `gap` pixels into what is
    ignored; what remains is ignored, and there is no edge towards it.
    """
    grown = classes.copy()
    for _ in range(gap):
        before = grown.copy()
        for axis in (1, 2):
            for step in (1, -1):
                neighbour = np.full_like(before, IGNORE)
                to, source = [slice(None)] * 3, [slice(None)] * 3
                to[axis], source[axis] = (slice(1, None), slice(None, -1))[::step]
                neighbour[tuple(to)] = before[tuple(source)]
                np.copyto(grown, neighbour, where=(grown == IGNORE) & (neighbour != IGNORE))
    edge = np.zeros(classes.shape, np.uint8)
    known = grown != IGNORE
    edge[:, :, :-1] |= (grown[:, :, :-1] != grown[:, :, 1:]) & known[:, :, 1:]
    edge[:, :-1] |= (grown[:, :-1] != grown[:, 1:]) & known[:, 1:]
    edge[~known] = IGNORE
    return edge


def _normals(array: Array, label: DenseLabel, where: str) -> Array:
    if array.ndim == 4 and array.shape[3] == 3:
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] != 3 or not (array.dtype in (np.uint8, np.int8) or array.dtype.kind == "f"):
        raise DataError(
            f"{where}: expected normals N x H x W x 3 or N x 3 x H x W as uint8, int8 or floating point, found "
            f"{array.dtype} of shape {array.shape}"
        )
    if array.dtype != np.uint8:
        return array
    values = array / np.float32(255)
    if label.encoding == "centred":
        values = 2 * values - 1
        values[(array == 0).all(1, keepdims=True).repeat(3, 1)] = 0
    values *= np.sqrt((values * values).sum(1, keepdims=True)) >= SHORT
    return values.astype(np.float16)


def build(
    where: str,
    labels: Mapping[str, DenseLabel],
    parts: Sequence[ArrayPart],
    augment: Augment | None,
    crop: tuple[int, int] | None,
    multiple: int,
) -> tuple[tuple[Task, ...], DenseExamples, DenseExamples]:
    """Tasks and examples of a train and a test part with raw labels."""
    heads = []
    for task, label in labels.items():
        options = {}
        if label.kind in ("semseg", "human_parts"):
            arrays = [part.labels[task] for part in parts]
            largest = max(int(np.where(array == IGNORE, -1, array.astype(np.int16)).max()) for array in arrays)
            if largest < 0:
                raise DataError(f"{where}, task {task!r}: no pixel is labelled")
            count = label.classes or (max(7, largest + 1) if label.kind == "human_parts" else largest + 1)
            if largest >= count:
                raise DataError(f"{where}, task {task!r}: expected labels below {count}, found {largest}")
            options = {"channels": count}
        heads.append(KINDS[label.kind](task, **options))
    train, test = (_examples(where, labels, part, augment, crop, multiple) for part in parts)
    return tuple(heads), train, test


def _examples(
    where: str,
    labels: Mapping[str, DenseLabel],
    part: ArrayPart,
    augment: Augment | None,
    crop: tuple[int, int] | None,
    multiple: int,
) -> DenseExamples:
    key, raw = part.key, part.labels
    pixels = pictures(part.inputs, f"{where}, {key!r}")
    height, width = pixels.shape[2:]
    for task, array in raw.items():
        if (len(array), *array.shape[-2:]) != (len(pixels), height, width):
            raise DataError(
                f"{where}, task {task!r}: expected {len(pixels)} labels of {height} x {width}, as {key!r} has, found "
                f"{len(array)} of {array.shape[-2]} x {array.shape[-1]}"
            )
    source = Stored(pixels, {task: torch.from_numpy(array) for task, array in raw.items()})
    return DenseExamples(
        source,
        {task: label.kind for task, label in labels.items()},
        padded((height, width), multiple),
        augment,
        crop or (height, width),
        {task: annotated_in(label.kind, raw[task]) for task, label in labels.items()},
        None if part.domain is None else torch.from_numpy(part.domain),
        checksum(raw),
    )
