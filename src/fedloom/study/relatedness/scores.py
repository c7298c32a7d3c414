"""ETran: is the data familiar to a model, and do its features tell the labels? (Gholami et al., ICCV 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.study.relatedness._arrays import Array, array, classes_of, features_of, is_classes, targets_of


@dataclass(frozen=True)
class EtranScore:
    """The two parts of ETran; they have different scales, see `etran_totals`."""

    energy: float
    """Mean over samples of the logsumexp over features: higher means more like what the model was trained on."""
    labels: float
    """Classes: mean log probability of the true class under LDA. Regression: minus the mean squared error of a fit."""


def etran(features: Any, labels: Any, shrinkage: float = 1e-2, energy_kept: float = 0.8) -> EtranScore:
    """ETran's scores of features (n x D) for labels (n), in float64; higher is better.

    Classes (integer labels): linear discriminant analysis with class means, class shares as priors, and the pooled
    covariance within classes, shrunk by `shrinkage` towards a multiple of the identity; the score is the mean log
    probability of the true class on the same data. Labels of a single class give nan.
    Regression (float labels, n or n x C): targets, centred, are projected on the leading left singular vectors of the
    centred features, as many as hold `energy_kept` of their squared singular values; the score is minus the mean
    squared error. The choices of shrinkage and truncation are ours.
    """
    if not 0 < shrinkage <= 1 or not 0 < energy_kept <= 1:
        raise ValueError(f"expected 0 < shrinkage, energy_kept <= 1, found {shrinkage} and {energy_kept}")
    F = features_of(features)
    n = len(F)
    if not n:
        return EtranScore(math.nan, math.nan)
    top = F.max(1, keepdims=True)
    energy = float((top[:, 0] + np.log(np.exp(F - top).sum(1))).mean())
    if not is_classes(labels):
        return EtranScore(energy, _regression(F, targets_of(labels, n), energy_kept))
    found, index = classes_of(labels, n)
    return EtranScore(energy, _discriminant(F, index, len(found), shrinkage) if len(found) > 1 else math.nan)


def _discriminant(F: Array, index: Array, classes: int, shrinkage: float) -> float:
    n, D = F.shape
    counts = np.bincount(index, minlength=classes)
    means = np.stack([F[index == c].mean(0) for c in range(classes)])
    # Of the centred features only the span of the samples matters, which keeps this small for D > n.
    F, means = F - F.mean(0), means - F.mean(0)
    _, s, Vt = np.linalg.svd(F, full_matrices=False)
    basis = Vt[s > 1e-12 * s.max(initial=0.0)]
    if not len(basis):
        return float((np.log(counts / n) * counts).sum() / n)
    F, means = F @ basis.T, means @ basis.T
    inside = F - means[index]
    S = inside.T @ inside / n
    level = np.trace(S) / D or np.trace(F.T @ F) / (n * D)
    S = (1 - shrinkage) * S + shrinkage * level * np.eye(len(S))
    W = np.linalg.solve(S, means.T)
    score = F @ W - (means * W.T).sum(1) / 2 + np.log(counts / n)
    score -= score.max(1, keepdims=True)
    log_p = score - np.log(np.exp(score).sum(1, keepdims=True))
    return float(log_p[np.arange(n), index].mean())


def _regression(F: Array, Y: Array, energy_kept: float) -> float:
    F, Y = F - F.mean(0), Y - Y.mean(0)
    U, s, _ = np.linalg.svd(F, full_matrices=False)
    share = np.cumsum(s * s)
    k = int(np.searchsorted(share, energy_kept * share[-1] * (1 - 1e-12)) + 1) if len(s) and s[0] > 0 else 0
    U = U[:, :k][:, s[:k] > 1e-12 * s[0]] if k else U[:, :0]
    return -float(((Y - U @ (U.T @ Y)) ** 2).mean())


def etran_totals(energy: Any, labels: Any) -> Array:
    """ETran's total (S candidates x T tasks) of its two parts: each scaled to [0, 1] over the candidates, then added.

    The candidates of a task are the rows of its column. A part that is the same for all of them counts as 0.
    """
    return _scaled(array(energy)) + _scaled(array(labels))


def _scaled(R: Array) -> Array:
    low, high = R.min(0, keepdims=True), R.max(0, keepdims=True)
    spread = high - low
    return np.asarray((R - low) / np.where(spread > 0, spread, 1.0))
