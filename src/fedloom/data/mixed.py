"""Examples of several sets, brought to one shape, so that one batch may hold examples of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.data.dataset import Batch, label_bytes, tensor_digest
from fedloom.data.prepare import Array


class Inputs(Protocol):
    """Where inputs come from: called with positions (B), it returns the raw inputs (B x ...)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        ...

    @property
    def prefetch(self) -> bool:
        """Whether reading takes long enough that training should load ahead."""
        ...

    @property
    def version(self) -> str:
        """A short text that changes when the inputs are exchanged, if that can be told without reading them."""
        ...

    def contents(self) -> bytes:
        """Checksum of all inputs."""
        ...

    def __call__(self, index: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TensorInputs:
    """Inputs in memory (N x ...)."""

    inputs: Tensor
    prefetch: bool = False
    version: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.inputs.nbytes

    def contents(self) -> bytes:
        """Checksum of all inputs."""
        return tensor_digest(self.inputs)

    def __call__(self, index: Tensor) -> Tensor:
        return self.inputs.index_select(0, index)


@dataclass(frozen=True, eq=False)
class MixedExamples:
    """Inputs of one shape, each with labels of some of the tasks; fulfils `Examples`.

    source      raw inputs: uint8 (scaled to 0..1 per batch) or float32
    labels      task -> N classes (any signed integers, -1 = no label) or N real numbers (NaN = no label)
    domain      N: the set that each example comes from
    mean, std   sets x C: an example is normalised by its own set's statistics, whatever else is in the batch
    """

    source: Inputs
    labels: Mapping[str, Tensor]
    domain: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None

    def __len__(self) -> int:
        return len(self.domain)

    @property
    def prefetch(self) -> bool:
        """Whether the source is slow."""
        return self.source.prefetch

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.source.shape

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and labels."""
        return self.source.nbytes + sum(labels.nbytes for labels in self.labels.values())

    def fingerprint(self) -> bytes:
        """The source's version and all labels, task by task."""
        return self.source.version.encode() + label_bytes(self.labels)

    def contents(self) -> bytes:
        """Checksum of all inputs."""
        return self.source.contents()

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs (B x ...) and labels (B: int64 or float32) at `index`; nothing is augmented."""
        x = self.source(index).to(device, non_blocking=True)
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        if self.mean is not None and self.std is not None:
            origin = self.domain.index_select(0, index)
            shape = (len(index), self.mean.shape[1]) + (1,) * (x.ndim - 2)
            mean, std = (v.index_select(0, origin).view(shape).to(x.device) for v in (self.mean, self.std))
            x = (x - mean).div_(std)
        y = {}
        for task in self.labels if tasks is None else tasks:
            chosen = self.labels[task].index_select(0, index)
            y[task] = (chosen if chosen.is_floating_point() else chosen.long()).to(device, non_blocking=True)
        return x, y

    def labels_of(self, task: str) -> Array:
        """Classes (N, -1 = no label); for real numbers 0, or -1 where there is none."""
        labels = self.labels[task]
        if labels.is_floating_point():
            return np.where(labels.isnan().numpy(), -1, 0)
        column: Array = labels.numpy()
        return column


def blocks(sets: Sequence[Mapping[str, Array]]) -> tuple[dict[str, Tensor], Tensor]:
    """Labels and domain for sets that lie one after another; each set gives {task: labels of its examples}.

    Returns {task: labels (N, int16), -1 outside the task's set} and the set's position (N).
    """
    lengths = [len(next(iter(tasks.values()))) for tasks in sets]
    labels: dict[str, Tensor] = {}
    start = 0
    for tasks, length in zip(sets, lengths, strict=True):
        for task, values in tasks.items():
            labels[task] = torch.full((sum(lengths),), -1, dtype=torch.int16)
            labels[task][start : start + length] = torch.from_numpy(values)
        start += length
    return labels, torch.repeat_interleave(torch.arange(len(sets)), torch.tensor(lengths))
