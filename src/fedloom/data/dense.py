"""Examples whose labels are images: arrays of any archive, or files that are read one by one."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch, TensorExamples
from fedloom.data.inputs import channels_second
from fedloom.data.prepare import Array, Augment, DenseKind, DenseLabel, Part, Reader
from fedloom.data.transforms import MEAN, STD, Dense, padded, raw_ignore
from fedloom.models.tasks.dense import KINDS
from fedloom.models.tasks.task import IGNORE, Task

SHORT = 0.1  # a stored normal shorter than this means that there is no normal


Labels = Mapping[str, Tensor]
Masks = Mapping[str, Array]


def stored(
    images: Tensor, labels: Labels, change: Dense, annotated: Masks, domain: Tensor | None, version: str
) -> TensorExamples:
    """Make examples in memory, or mapped, of images (N x 3 x H x W, uint8) and raw labels per task (N x ...).
    `annotated` (task -> N, bool) says which have a label; by default all. `version` changes with the contents."""
    known = {task: annotated.get(task, np.ones(len(images), bool)) for task in labels}
    mark = mark_of(version, change.kinds, known)
    return TensorExamples(images, labels, domain, MEAN, STD, change, known, mark, checked=False)


def mark_of(version: str, kinds: Mapping[str, DenseKind], annotated: Mapping[str, Array]) -> bytes:
    """Return bytes that change with the version, the tasks and what is annotated."""
    parts = [version, *(f"{task} {kind}" for task, kind in sorted(kinds.items()))]
    return "\n".join(parts).encode() + b"".join(np.where(annotated[task], 0, -1).tobytes() for task in sorted(kinds))


@dataclass(frozen=True, eq=False)
class DenseFiles:
    """Dense examples that `reader` reads one by one, at any sizes: those at `positions`."""

    reader: Reader
    change: Dense
    positions: tuple[int, ...]

    def __call__(self, index: Tensor, device: torch.device, rng: Generator | None, tasks: Collection[str]) -> Batch:
        """Return images and ready labels. DataError where the reader breaks its contract or an image is too large."""
        single = [self._one(i, device, rng, tasks) for i in index.tolist()]
        return torch.cat([x for x, _ in single]), {task: torch.cat([y[task] for _, y in single]) for task in tasks}

    def _one(self, number: int, device: torch.device, rng: Generator | None, tasks: Collection[str]) -> Batch:
        """Return one example as a batch of one."""
        where, read = f"example {number}", self.reader(self.positions[number], tasks)
        image = read["image"]
        if image is None or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            shape = "none" if image is None else f"{image.dtype} of shape {image.shape}"
            raise DataError(f"{where}: expected an image H x W x 3, uint8, found {shape}")
        size, kinds = image.shape[:2], self.change.kinds
        labels = {t: raw_label(read.get(t), kinds[t], size, f"{where}, task {t!r}") for t in tasks}
        try:
            x = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
            return self.change(x, labels, device, rng)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None


def raw_label(label: Array | None, kind: DenseKind, size: tuple[int, ...], where: str) -> Tensor:
    """Check a reader's label of one task; return it as a batch of one (1 x H x W or 1 x 3 x H x W)."""
    shape = (*size, 3) if kind == "normals" else size
    if label is None:
        label = np.full(shape, raw_ignore(kind), np.float32 if kind == "depth" else np.uint8)
    if label.shape != shape:
        raise DataError(f"{where}: expected shape {shape}, found {label.shape}")
    if kind == "normals":
        label = label.transpose(2, 0, 1)
    elif kind != "depth" and label.dtype != np.uint8:
        if label.dtype.kind not in "biu" or (label.size and (label.min() < 0 or label.max() > 255)):
            raise DataError(f"{where}: expected integers in 0..255, found {label.dtype} {label.min()}..{label.max()}")
        label = label.astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(label))[None]


def annotated_in(kind: DenseKind, raw: Array, rows: int = 256) -> Array:
    """Return which examples (N, bool) of an array of raw labels have any: a value, or for human_parts a part."""
    result = np.empty(len(raw), bool)
    for start in range(0, len(raw), rows):
        part = np.asarray(raw[start : start + rows])
        if kind in ("depth", "normals"):
            valid = part != 0
        else:
            valid = (part != raw_ignore(kind)) & ((part > 0) | (kind != "human_parts"))
        result[start : start + rows] = valid.reshape(len(part), -1).any(1)
    return result


def checksum(arrays: Mapping[str, Array]) -> str:
    """Return a short text that changes with the contents of any array."""
    sums = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in arrays.items()}
    return " ".join(f"{name}:{value:08x}" for name, value in sorted(sums.items()))


def pictures(images: Array, where: str) -> Tensor:
    """Return images as N x 3 x H x W, uint8; grey ones are repeated. DataError for anything else."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(f"{where}: dense labels need uint8 images, found {images.dtype} of shape {images.shape}")
    return channels_second(torch.from_numpy(images), where).expand(-1, 3, -1, -1)


def decode(array: Array, label: DenseLabel, where: str) -> Array:
    """Return one task's labels in the raw form of `transforms` (N x H x W, or N x 3 x H x W for normals)."""
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
        if len(lost := array[np.isfinite(array) & ~np.isfinite(metres)]):
            raise DataError(f"{where}: expected depths that float32 can hold, found {lost[0]:g} x {label.factor:g}")
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
        raise DataError(f"{where}: expected labels from 0 to 254, or 255 or -1 (ignore), found {low}..{high}")
    array = array.astype(np.uint8)  # -1 becomes 255
    if label.boundaries:
        return boundaries(array)
    if label.kind in ("saliency", "edge") and len(other := array[(array > 1) & (array != IGNORE)]):
        advice = "if these values are shares, add a threshold"
        raise DataError(f"{where}: expected 0, 1 and 255 (ignore), found {other[0]}; {advice}")
    return array


def boundaries(classes: Array, gap: int = 2) -> Array:
    """Return edges (N x H x W: 0, 1; 255 = ignore) of class images (255 = ignore).

    An edge is one pixel wide, where the right or the lower neighbour has another class. Classes first grow by `gap`
    pixels into what is ignored, for hand-drawn segments leave thin gaps; what remains is ignored.
    """
    grown = classes.copy()
    for _ in range(gap):
        before = np.pad(grown, [(0, 0), (1, 1), (1, 1)], constant_values=IGNORE)
        # In this order: from above, from below, from the left, from the right.
        for neighbour in (before[:, :-2, 1:-1], before[:, 2:, 1:-1], before[:, 1:-1, :-2], before[:, 1:-1, 2:]):
            np.copyto(grown, neighbour, where=grown == IGNORE)
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
        forms = "N x H x W x 3 or N x 3 x H x W as uint8, int8 or floating point"
        raise DataError(f"{where}: expected normals {forms}, found {array.dtype} of shape {array.shape}")
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
    parts: Sequence[Part],
    augment: Augment | None,
    crop: tuple[int, int] | None,
    multiple: int,
) -> tuple[tuple[Task, ...], TensorExamples, TensorExamples]:
    """Make tasks and examples of a train and a test part with raw labels."""
    heads = []
    for task, label in labels.items():
        channels: tuple[int, ...] = ()  # other tasks know their channels
        if label.kind in ("semseg", "human_parts"):
            arrays = [part.labels[task] for part in parts]
            largest = max(int(np.where(array == IGNORE, -1, array.astype(np.int16)).max()) for array in arrays)
            if largest < 0:
                raise DataError(f"{where}, task {task!r}: no pixel is labelled")
            count = label.classes or (max(7, largest + 1) if label.kind == "human_parts" else largest + 1)
            if largest >= count:
                raise DataError(f"{where}, task {task!r}: expected labels below {count}, found {largest}")
            channels = (count,)
        heads.append(KINDS[label.kind](task, *channels))
    kinds = {task: label.kind for task, label in labels.items()}

    def examples(part: Part) -> TensorExamples:
        pixels = pictures(part.inputs, f"{where}, {part.key!r}")
        height, width = pixels.shape[2:]
        for task, array in part.labels.items():
            if (len(array), *array.shape[-2:]) != (len(pixels), height, width):
                expected = f"{len(pixels)} labels of {height} x {width}, as {part.key!r} has"
                found = f"{len(array)} of {array.shape[-2]} x {array.shape[-1]}"
                raise DataError(f"{where}, task {task!r}: expected {expected}, found {found}")
        change = Dense(kinds, padded((height, width), multiple), augment, crop or (height, width))
        annotated = {task: annotated_in(kind, part.labels[task]) for task, kind in kinds.items()}
        tensors, domain = part.tensors()
        return stored(pixels, tensors, change, annotated, domain, checksum(part.labels))

    train, test = map(examples, parts)
    return tuple(heads), train, test
