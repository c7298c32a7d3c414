"""How dense labels are laid out and which pixels count. Losses and metrics read labels only through this file.

255 (`IGNORE`) means "no label" everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.models.tasks.task import IGNORE


def _flat(labels: Tensor, pred: Tensor) -> Tensor:
    """Labels as B x H x W, from that or from B x 1 x H x W; DataError where they are not of the prediction's size."""
    if labels.ndim == 4 and labels.shape[1] == 1:
        labels = labels[:, 0]
    _same(labels, (pred.shape[0], *pred.shape[2:]))
    return labels


def _same(labels: Tensor, expected: Sequence[int]) -> None:
    if labels.shape != tuple(expected):
        raise DataError(
            f"the prediction asks for labels of shape {' x '.join(map(str, expected))}, "
            f"found {' x '.join(map(str, labels.shape))}"
        )


def classes(labels: Tensor, pred: Tensor, ignore: int = IGNORE) -> Tensor:
    """Class numbers, B x H x W int64, with `ignore` (also for -1) where there is no label."""
    found = _flat(labels, pred).long()
    return torch.where(found == -1, ignore, found)


def binary(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """(y in [0, 1], valid), both B x H x W. What is outside 0..1, so 255 and -1, is not valid; y is 0 there."""
    found = real(_flat(labels, pred))
    valid = (found >= 0) & (found <= 1)
    return torch.where(valid, found, 0.0), valid


def depth(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """(metres, valid), both B x H x W. Valid: finite, above 0 and not 255; the depth is 1 elsewhere."""
    found = real(_flat(labels, pred))
    valid = found.isfinite() & (found > 0) & (found != IGNORE)
    return torch.where(valid, found, 1.0), valid


def normals(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """(vectors B x 3 x H x W as given, valid B x H x W). Valid: finite, no channel 255, not the zero vector; the
    vector is 0 elsewhere."""
    _same(labels, pred.shape)
    found = real(labels)
    valid = (found.isfinite() & (found != IGNORE)).all(1) & (found != 0).any(1)
    return torch.where(valid.unsqueeze(1), found, 0.0), valid


def real(x: Tensor) -> Tensor:
    """As float32, or float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()
