"""Labelled examples in memory, and a data set as a train and a test part. Knows nothing of federation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError
from fedloom.core.signal import Signal, told
from fedloom.models.tasks.task import IGNORE, Task

Batch = tuple[Tensor, dict[str, Tensor]]
"""Inputs (B x ...) and {task: labels (B x ...)}."""


class Examples(Protocol):
    """Anything that can hand out batches by index. `batch` may be called from another thread."""

    def __len__(self) -> int: ...

    @property
    def prefetch(self) -> bool:
        """Whether making a batch takes long enough that training should load ahead."""
        ...

    @property
    def domain(self) -> Tensor | None:
        """Where each example comes from (N integers), if that is known."""
        ...

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input in evaluation, without the batch dimension (C x H x W for images)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that inputs and labels occupy in memory (or in a mapped file)."""
        ...

    def fingerprint(self) -> bytes:
        """Bytes by which a resumed run tells whether it sees the same labels."""
        ...

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and labels at the given positions, of the given tasks (all if None).

        `rng` is given in training: what augments draws from it and from nothing else. Without it nothing is random.
        """
        ...

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """One integer per example for partitioners and tables: the class, or 0 where the label is an image; -1 where
        the example has no label of this task."""
        ...


@dataclass(frozen=True, eq=False)
class InMemoryExamples:
    """Examples that are tensors: inputs (N x ...) and labels per task (N x ..., -1 = none).

    DataError where the number of a task's labels is not that of the inputs.
    """

    images: Tensor
    labels: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for task, labels in self.labels.items():
            if len(labels) != len(self.images):
                raise DataError(f"task {task!r}: expected {len(self.images)} labels, found {len(labels)}")

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, index: Tensor, device: torch.device, tasks: Collection[str] | None) -> Batch:
        """Inputs and labels at `index` as they are stored, on `device`, of the given tasks (all if None)."""
        wanted = self.labels if tasks is None else tasks
        y = {task: self.labels[task].index_select(0, index).to(device, non_blocking=True) for task in wanted}
        return self.images.index_select(0, index).to(device, non_blocking=True), y

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """Labels of one task as a numpy array."""
        return self.labels[task].numpy()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.images.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Type of an input as it is stored."""
        return self.images.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and labels."""
        return self.images.nbytes + sum(labels.nbytes for labels in self.labels.values())

    def fingerprint(self) -> bytes:
        """All labels, task by task."""
        return label_bytes(self.labels)

    def contents(self) -> bytes:
        """Checksum of all inputs."""
        return tensor_digest(self.images)


def tensor_digest(tensor: Tensor) -> bytes:
    """Checksum of a tensor's values."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def label_bytes(labels: Mapping[str, Tensor]) -> bytes:
    """All labels, task by task."""
    return b"".join(labels[task].numpy().tobytes() for task in sorted(labels))


@dataclass(frozen=True, eq=False)
class TensorExamples(InMemoryExamples):
    """Images (N x C x H x W, float32, or uint8 which is scaled to 0..1 per batch) and labels per task (N x ...).

    `mean` and `std` (per channel) normalise each batch. `domain` (N, integers) says where an example comes from.
    """

    domain: Tensor | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    prefetch: bool = False

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and labels at `index`, on `device`, normalised; nothing is augmented."""
        x, y = self.rows(index, device, tasks)
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        if self._normal is not None:
            mean, std = (v.to(x.device) for v in self._normal)
            x = (x - mean) / std
        return x, y

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation in a shape that fits a batch."""
        if self.mean is None or self.std is None:
            return None
        shape = (1, -1) + (1,) * (self.images.ndim - 2)
        return torch.tensor(self.mean).view(shape), torch.tensor(self.std).view(shape)


@dataclass(frozen=True, eq=False)
class Behind:
    """Examples whose labels are not to be seen as they are; all else is the examples' own."""

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def prefetch(self) -> bool:
        """As the examples do."""
        return self.examples.prefetch

    @property
    def domain(self) -> Tensor | None:
        """As the examples'."""
        return self.examples.domain

    @property
    def input_shape(self) -> tuple[int, ...]:
        """As the examples'."""
        return self.examples.input_shape

    @property
    def nbytes(self) -> int:
        """As the examples', which they are."""
        return self.examples.nbytes

    def fingerprint(self) -> bytes:
        """As the examples'."""
        return self.examples.fingerprint()

    def apart(self, index: Tensor) -> list[Tensor]:
        """As the examples'."""
        return apart(self.examples, index)


@dataclass(frozen=True, eq=False)
class Withheld(Behind):
    """Examples of which only some labels are to be seen: task -> which examples (N, bool) keep their label of it."""

    kept: Mapping[str, Tensor]

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and labels; what is withheld is as if it had never been there."""
        x, y = self.examples.batch(index, device, rng, tasks)
        return x, {task: without_label(labels, ~self.kept[task][index]) for task, labels in y.items()}

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """-1 where the label is withheld, and otherwise as the examples' (0 where that is no whole number)."""
        labels = self.examples.labels_of(task)
        whole = labels if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) else np.zeros(len(labels), int)
        return np.where(self.kept[task].numpy(), whole, -1)


def contents(examples: Examples) -> bytes:
    """Checksum of the inputs of examples; nothing for those whose fingerprint has it, or that lie elsewhere."""
    found: bytes = examples.contents() if hasattr(examples, "contents") else b""
    return found


def apart(examples: Examples, index: Tensor) -> list[Tensor]:
    """Positions in groups, so that a batch may hold examples of one group only: several for joined data sets alone."""
    groups: list[Tensor] = examples.apart(index) if hasattr(examples, "apart") else [index]
    return groups


def without_label(labels: Tensor, where: Tensor) -> Tensor:
    """A batch of labels (B x ...) without those of some examples (B, bool): NaN, or IGNORE where there is one a pixel.

    One class an example is -1 then.
    """
    absent = IGNORE if labels.ndim > 1 else math.nan if labels.is_floating_point() else -1
    return labels.masked_fill(where.to(labels.device).view(-1, *(1,) * (labels.ndim - 1)), absent)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set: its tasks, its train and test examples, the names of its domains (may be empty).

    `deal` says who holds what, (pool, seed) -> Partition, where that belongs to the data. `signal` says what an input
    is; by default what its shape and type tell, and None where they do not. `classes` is the name of a task -> the
    names of its classes, of those that have names.
    """

    name: str
    tasks: tuple[Task, ...]
    train: Examples
    test: Examples
    domains: tuple[str, ...] = ()
    deal: Callable[[Any, int], Any] | None = None
    signal: Signal | None = None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.signal is None:
            whole = getattr(self.train, "dtype", None) == torch.int64
            object.__setattr__(self, "signal", told(self.input_shape, whole))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dimension (C x H x W for images)."""
        return self.train.input_shape
