"""Examples whose labels are images: in memory, mapped from disk, or read one by one."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError
from fedloom.data.augment import Augment
from fedloom.data.dataset import Batch
from fedloom.data.dense_label import Kind, Reader
from fedloom.data.digests import digest
from fedloom.data.prepare import Array
from fedloom.data.transforms import augmented, plain, raw_ignore


@dataclass(frozen=True, eq=False)
class Stored:
    """Arrays with a row per example: images (N x 3 x H x W, uint8) and raw labels per task (N x ...), any strides.

    Tensors may be mapped from disk; rows are then read when they are asked for. DataError where shapes do not fit.
    """

    images: Tensor
    labels: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        n, channels, *size = self.images.shape
        if self.images.dtype != torch.uint8 or channels != 3 or len(size) != 2:
            raise DataError(
                f"expected images as N x 3 x H x W, uint8, found {tuple(self.images.shape)} {self.images.dtype}"
            )
        for task, raw in self.labels.items():
            if tuple(raw.shape) not in ((n, *size), (n, 3, *size)):
                raise DataError(
                    f"task {task!r}: expected labels of {n} images of {size[0]} x {size[1]}, found {tuple(raw.shape)}"
                )

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, eq=False)
class Files:
    """`count` examples that `reader` reads one by one, at any sizes."""

    reader: Reader
    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, eq=False)
class DenseExamples:
    """Dense examples as batches; fulfils `Examples`.

    `kinds` maps every task to its kind; several tasks may have one kind. In training (`batch` with a generator) images
    are augmented and cropped or padded to `crop` (default: `size`); without `augment` they are treated as in
    evaluation, which only normalises and pads to `size` (height, width). `size` must hold the largest image.

    `annotated` (task -> N, bool) says which examples have a label of a task; by default all have. `domain` (N, int64)
    says where an example comes from. `version` stands for the contents, whatever a resumed run must find unchanged, but
    for those of `files`. `batch` only reads, so several threads may call it.
    """

    source: Stored | Files
    kinds: Mapping[str, Kind]
    size: tuple[int, int]
    augment: Augment | None = None
    crop: tuple[int, int] | None = None
    annotated: Mapping[str, Array] = field(default_factory=dict)
    domain: Tensor | None = None
    version: str = ""
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.source, Stored):
            height, width = self.source.images.shape[2:]
            if height > self.size[0] or width > self.size[1]:
                raise DataError(f"size {self.size[0]} x {self.size[1]} is too small for images of {height} x {width}")
            if missing := sorted(set(self.kinds) - set(self.source.labels)):
                raise DataError(f"task {missing[0]!r} has no labels; found: {', '.join(self.source.labels)}")
        lengths = {f"annotated, task {task!r}": len(column) for task, column in self.annotated.items()}
        if self.domain is not None:
            lengths["domain"] = len(self.domain)
        for what, length in lengths.items():
            if length != len(self):
                raise DataError(f"{what}: expected {len(self)} values, one per example, found {length}")

    def __len__(self) -> int:
        return len(self.source)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input in evaluation."""
        return (3, *self.size)

    @property
    def prefetch(self) -> bool:
        """True: to read or augment a batch takes long enough to be done ahead."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of images and labels in memory or mapped; 0 where files are read one by one."""
        if isinstance(self.source, Files):
            return 0
        return self.source.images.nbytes + sum(self.source.labels[task].nbytes for task in self.kinds)

    def labels_of(self, task: str) -> Array:
        """0 where an example is annotated for `task`, else -1 (N, int64)."""
        if task not in self.annotated:
            return np.zeros(len(self), np.int64)
        return np.where(self.annotated[task], 0, -1)

    def fingerprint(self) -> bytes:
        """Bytes that change with the version, the tasks and what is annotated."""
        parts = [self.version, *(f"{task} {kind}" for task, kind in sorted(self.kinds.items()))]
        return "\n".join(parts).encode() + b"".join(self.labels_of(task).tobytes() for task in sorted(self.kinds))

    def contents(self) -> bytes:
        """Checksum of the files, if it is read from some."""
        return digest(self.files) if self.files else b""

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs (B x 3 x h x w, float32, normalised) and labels per task as `fedloom.data.transforms` states them.

        With `rng`, and where there is an `augment`, a training batch: it depends on `index` and `rng` only. DataError
        where a file does not keep the reader's contract or an image is larger than `size`.
        """
        wanted = tuple(self.kinds if tasks is None else tasks)
        if isinstance(self.source, Stored):
            images = self.source.images.index_select(0, index)
            labels = {task: self.source.labels[task].index_select(0, index) for task in wanted}
            return self._transformed(images, labels, device, rng)
        single = [self._read(i, device, rng, wanted) for i in index.tolist()]
        return torch.cat([x for x, _ in single]), {task: torch.cat([y[task] for _, y in single]) for task in wanted}

    def _transformed(
        self, images: Tensor, labels: Mapping[str, Tensor], device: torch.device, rng: Generator | None
    ) -> Batch:
        kinds = {task: self.kinds[task] for task in labels}
        if rng is not None and self.augment is not None:
            return augmented(images, labels, kinds, self.crop or self.size, self.augment, rng, device)
        return plain(images, labels, kinds, self.size, device)

    def _read(self, position: int, device: torch.device, rng: Generator | None, tasks: Collection[str]) -> Batch:
        """One example as a batch of one."""
        assert isinstance(self.source, Files)
        found = self.source.reader(position, tasks)
        image = found["image"]
        if image is None or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            shape = "none" if image is None else f"{image.dtype} of shape {image.shape}"
            raise DataError(f"example {position}: expected an image H x W x 3, uint8, found {shape}")
        size = image.shape[:2]
        labels = {task: raw_label(found.get(task), self.kinds[task], size, position, task) for task in tasks}
        images = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
        try:
            return self._transformed(images, labels, device, rng)
        except ValueError as error:
            raise DataError(f"example {position}: {error}") from None


def raw_label(label: Array | None, kind: Kind, size: tuple[int, ...], position: int, task: str) -> Tensor:
    """What a reader gave for one task, checked, as raw labels of a batch of one (1 x H x W or 1 x 3 x H x W)."""
    shape = (*size, 3) if kind == "normals" else size
    if label is None:
        label = np.full(shape, raw_ignore(kind), np.float32 if kind == "depth" else np.uint8)
    if label.shape != shape:
        raise DataError(f"example {position}, task {task!r}: expected shape {shape}, found {label.shape}")
    if kind == "normals":
        label = label.transpose(2, 0, 1)
    elif kind != "depth" and label.dtype != np.uint8:
        if label.dtype.kind not in "biu" or (label.size and (label.min() < 0 or label.max() > 255)):
            raise DataError(
                f"example {position}, task {task!r}: expected integers in 0..255, found {label.dtype} "
                f"{label.min()}..{label.max()}"
            )
        label = label.astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(label))[None]


def annotated_in(kind: Kind, raw: Array, rows: int = 256) -> Array:
    """Which examples (N, bool) of an array of raw labels have any: a value, or for human_parts a part."""
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
    """A short text that changes with the contents of any array; for `DenseExamples.version`."""
    sums = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in arrays.items()}
    return " ".join(f"{name}:{value:08x}" for name, value in sorted(sums.items()))
