"""Input of the metrics as numpy arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def array(x: Any) -> Array:
    """A numpy array of what may be a tensor, on any device."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def features_of(x: Any) -> Array:
    """n x D, float64; inputs with more dimensions are flattened."""
    F = array(x).astype(np.float64)
    if F.ndim < 2:
        raise ValueError(f"features: expected n x D, found shape {F.shape}")
    F = F.reshape(len(F), math.prod(F.shape[1:]))
    if not np.isfinite(F).all():
        raise ValueError("features: found nan or inf")
    return F


def standardised(F: Array) -> Array:
    """Every column with mean 0 and standard deviation 1; constant columns become 0."""
    F = F - F.mean(0)
    spread = F.std(0)
    return F / np.where(spread > 1e-12 * max(1.0, float(spread.max(initial=0.0))), spread, np.inf)


def classes_of(y: Any, n: int) -> tuple[Array, Array]:
    """(classes that occur, index into them of each sample) of integer labels (n)."""
    labels = array(y)
    if labels.shape != (n,) or labels.dtype.kind not in "iub":
        raise ValueError(f"labels: expected {n} integers, found shape {labels.shape} of {labels.dtype}")
    found, index = np.unique(labels, return_inverse=True)
    return found, index


def is_classes(y: Any) -> bool:
    """Whether labels are classes (integers), not targets of a regression (floats)."""
    return array(y).dtype.kind in "iub"


def targets_of(y: Any, n: int) -> Array:
    """n x C, float64, of regression targets (n, or n x C)."""
    targets = array(y).astype(np.float64)
    if len(targets) != n or not np.isfinite(targets).all():
        raise ValueError(f"targets: expected {n} finite values or rows, found shape {targets.shape}")
    return targets.reshape(n, math.prod(targets.shape[1:]))
