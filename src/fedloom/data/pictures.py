"""Pictures of several domains in memory, cropped and mirrored at random for training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch, Dataset, InMemoryExamples
from fedloom.data.prepare import Array
from fedloom.data.transforms import normalise
from fedloom.models.tasks.classification import Classification

TASK = "label"
Piece = tuple[Tensor, Array, Array]
"""Some images (n x 3 x H x W, uint8), their labels (n) and the numbers of their domains (n)."""


@dataclass(frozen=True, eq=False)
class Pictures(InMemoryExamples):
    """Images (N x 3 x H x W, uint8) with class labels per task (N, -1 = unlabelled); fulfils `Examples`.

    In training, an image gets `pad` black pixels on every side, is cropped to its size at a random place, and is
    mirrored with probability 1/2 where `flip` is set. Always normalised by ImageNet's mean and standard deviation.
    """

    domain: Tensor
    pad: int = 0
    flip: bool = False

    @property
    def prefetch(self) -> bool:
        """Whether batches are augmented."""
        return self.pad > 0 or self.flip

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs (B x 3 x H x W) and labels at `index`, on `device`; with `rng` as for training."""
        x, y = self.rows(index, device, tasks)
        if rng is not None and self.prefetch:
            places = torch.randint(2 * self.pad + 1, (2, len(index)), generator=rng)
            mirrored = torch.rand(len(index), generator=rng) < 0.5 if self.flip else torch.zeros(len(index)).bool()
            x = crop(x, self.pad, places[0].to(device), places[1].to(device), mirrored.to(device))
        return normalise(x.float().div_(255)), y

    def fingerprint(self) -> bytes:
        """All labels, task by task, and the domains."""
        return super().fingerprint() + self.domain.numpy().tobytes()


def crop(x: Tensor, pad: int, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """Windows of the size of `x` (B x C x H x W) out of `x` with `pad` zeros on every side.

    `top` and `left` (B, 0..2 pad) are the corners, `mirrored` (B, bool) says which windows are exchanged left and
    right. In memory the channels of the result are innermost, as convolutions like them.
    """
    batch, _, height, width = x.shape
    rows = top[:, None] + torch.arange(height, device=x.device)
    cols = left[:, None] + torch.arange(width, device=x.device)
    cols = torch.where(mirrored[:, None], cols.flip(1), cols)
    which = torch.arange(batch, device=x.device)[:, None, None]
    padded = torch.nn.functional.pad(x, (pad, pad, pad, pad))
    return padded[which, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def dataset(
    name: str,
    parts: Mapping[str, Sequence[Piece]],
    domains: tuple[str, ...],
    classes: int,
    pad: int,
    flip: bool,
) -> Dataset:
    """A data set of one task, `label`, from the pieces of the parts "train" and "test".

    DataError where a domain has no example in a part.
    """
    ready = {}
    for split, pieces in parts.items():
        images, labels, numbers = zip(*pieces, strict=True)
        domain = np.concatenate(numbers).astype(np.int64)
        for number, missing in enumerate(np.bincount(domain, minlength=len(domains)) == 0):
            if missing:
                raise DataError(f"{name}: domain {domains[number]!r} has no {split} example")
        label = torch.from_numpy(np.concatenate(labels).astype(np.int64))
        train = split == "train"
        ready[split] = Pictures(
            torch.cat(images), {TASK: label}, torch.from_numpy(domain), pad if train else 0, flip and train
        )
    return Dataset(name, (Classification(TASK, classes),), ready["train"], ready["test"], domains)
