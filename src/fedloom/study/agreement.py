"""Metrics of relatedness side by side: the agreement of their matrices (MaTU's Figures 2 and 3). Free of torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
DISTANCES = ("wte",)


def array(x: Any) -> Array:
    """Return a numpy array of an array or a tensor, on any device."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def symmetrised(R: Any) -> Array:
    """Return (R + R') / 2 of a matrix R[s, t] of directed scores: features of the model tuned on s, data of t."""
    M = array(R).astype(np.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"expected a square matrix, found shape {M.shape}")
    return np.asarray((M + M.T) / 2)


@dataclass(frozen=True, eq=False)
class Agreement:
    """Correlations of metrics over pairs of tasks."""

    names: tuple[str, ...]
    pearson: Array
    """K x K; nan where a metric is constant or fewer than two pairs are known."""
    spearman: Array
    """The same on ranks (ties get their mean rank)."""
    pairs: Array
    """K x K: over how many pairs of tasks."""


def agreement(matrices: Mapping[str, Any], distances: Collection[str] = DISTANCES) -> Agreement:
    """Compute Pearson's and Spearman's correlation of every two metrics (T x T each) over the pairs of tasks s < t.

    Matrices are symmetrised first, and those named in `distances` change their sign, so that 1 means that two metrics
    order tasks alike. A pair of tasks where one of the two metrics is nan is left out.
    """
    values = {}
    for name, R in matrices.items():
        M = symmetrised(R)
        upper = M[np.triu_indices(len(M), 1)]
        values[name] = -upper if name in distances else upper
    if len({len(v) for v in values.values()}) > 1:
        raise ValueError(f"agreement: matrices of different sizes: { {k: len(array(R)) for k, R in matrices.items()} }")
    K = len(values)
    pearson, spearman, pairs = np.full((K, K), np.nan), np.full((K, K), np.nan), np.zeros((K, K), dtype=np.int64)
    for i, a in enumerate(values.values()):
        for j, b in enumerate(values.values()):
            known = np.isfinite(a) & np.isfinite(b)
            x, y = a[known], b[known]
            pearson[i, j], spearman[i, j] = _correlation(x, y), _correlation(_ranks(x), _ranks(y))
            pairs[i, j] = known.sum()
    return Agreement(tuple(values), pearson, spearman, pairs)


def pair_ranks(R: Any) -> Array:
    """Return the ranks of pairs of tasks (T x T, symmetric), shifted and scaled to mean 0 and norm 1 over the pairs.

    The sum over pairs of the product of two such matrices is Spearman's correlation, for any order of the tasks too.
    A pair that is nan stays so, and is left out of the ranks; all are nan where all pairs are alike.
    """
    M = symmetrised(R)
    above = np.triu_indices(len(M), 1)
    pairs, ranked = M[above], np.full(M.shape, np.nan)
    known = ~np.isnan(pairs)
    if math.isnan(_correlation(pairs[known], pairs[known])):
        return ranked
    ranks = _ranks(pairs[known])
    ranks = ranks - ranks.mean()
    pairs[known] = ranks / np.linalg.norm(ranks)
    ranked[above] = ranked.T[above] = pairs
    return ranked


def _correlation(x: Array, y: Array) -> float:
    if len(x) < 2:
        return float("nan")
    if any(np.abs(v - v.mean()).max() <= 1e-12 * np.abs(v).max() for v in (x, y)):  # constant but for round-off
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(x: Array) -> Array:
    """Return ranks; equal values share the mean of theirs."""
    from pandas import Series  # it takes half a second to import

    return Series(x).rank().to_numpy()
