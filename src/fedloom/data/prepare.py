"""What several data sets need: types of keys, a folder for caches, a stratified split, a subset, statistics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import RecipeError

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]
SPLITS = ("train", "test")
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
TestFraction = Annotated[float, Field(gt=0, lt=1)]


def cache_folder() -> Path:
    """Where scenes and checksums are kept: FEDLOOM_CACHE, or `fedloom` in XDG_CACHE_HOME, or ~/.cache/fedloom."""
    named = os.environ.get("FEDLOOM_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def no_repeats(where: str, what: str, names: Sequence[str]) -> None:
    """RecipeError where a task, a domain or the like (`what`) is named twice."""
    for name in names:
        if list(names).count(name) > 1:
            raise RecipeError(f"{where}: {what} {name!r} is named twice")


def stratified(strata: Array, fraction: float, seed: int) -> Array:
    """Which examples (N, bool) go to the test part: `fraction` of each stratum.

    The number is rounded; a stratum of two or more examples has at least one on either side, a single example trains.
    `strata` (N integers) may be any labelling, such as class x domain.
    """
    test = np.zeros(len(strata), bool)
    rng = np.random.default_rng(derive_seed(seed, "data", "test"))
    for value in np.unique(strata):
        members = rng.permutation(np.flatnonzero(strata == value))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[members[:count]] = True
    return test


def subset(total: int, limit: int | None, seed: int, split: str) -> Array | None:
    """Sorted positions of `limit` random examples out of `total`, or None where all are kept."""
    if limit is None or limit >= total:
        return None
    rng = np.random.default_rng(derive_seed(seed, "data", "limit", split))
    return np.sort(rng.choice(total, limit, replace=False))


def channel_statistics(images: Tensor, rows: int = 256) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel (axis 1) in the units of a batch: uint8 counts as 0..1.

    Reads `rows` examples at a time, for images that lie on disk. A constant channel has standard deviation 1, so that
    it can be divided by. NaN or infinity in a channel makes its mean or standard deviation NaN or infinite.
    """
    import torch

    axes = [0, *range(2, images.ndim)]
    total = squares = torch.zeros(images.shape[1], dtype=torch.float64)
    for part in images.split(rows):
        x = part.double()
        total = total + x.sum(axes)
        squares = squares + x.square().sum(axes)
    count = images.numel() / images.shape[1]
    scale = 255 if images.dtype == torch.uint8 else 1
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std <= 1e-6 * mean.abs(), torch.ones_like(std) * scale, std)
    return tuple((mean / scale).tolist()), tuple((std / scale).tolist())
