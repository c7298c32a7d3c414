"""Metrics of relatedness side by side: how far their matrices agree, and heat maps (MaTU's Figures 2 and 3)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.extras import figure, save_figure
from fedloom.study.relatedness.measures import Array, array

DISTANCES = ("wte",)
_MANY = 12  # tasks beyond which cells carry no numbers


def symmetrised(R: Any) -> Array:
    """(R + R') / 2 of a matrix R[s, t] of directed scores: features of the model tuned on s, data of t."""
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
    """Pearson's and Spearman's correlation of every two metrics (T x T each) over the pairs of tasks s < t.

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
    """T x T, symmetric: the ranks of the pairs of tasks, shifted and scaled to mean 0 and norm 1 over the pairs.

    The sum over pairs of the product of two such matrices is Spearman's correlation, for any order of the tasks too.
    A pair that is nan stays so, and is left out of the ranks; all are nan where all pairs are alike.
    """
    M = symmetrised(R)
    above = np.triu_indices(len(M), 1)
    pairs, found = M[above], np.full(M.shape, np.nan)
    known = ~np.isnan(pairs)
    if math.isnan(_correlation(pairs[known], pairs[known])):
        return found
    ranks = _ranks(pairs[known])
    ranks -= ranks.mean()
    pairs[known] = ranks / np.linalg.norm(ranks)
    found[above] = found.T[above] = pairs
    return found


def _correlation(x: Array, y: Array) -> float:
    if len(x) < 2:
        return float("nan")
    if any(np.abs(v - v.mean()).max() <= 1e-12 * np.abs(v).max() for v in (x, y)):  # constant but for round-off
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    a, b = np.linalg.norm(x), np.linalg.norm(y)
    return float(np.clip((x / a) @ (y / b), -1, 1))


def _ranks(x: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, index, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts + ends - 1) / 2)[index])


def draw(
    matrices: Mapping[str, Any],
    path: str | Path,
    tasks: Sequence[str] | None = None,
    distances: Collection[str] = DISTANCES,
) -> None:
    """Draw `picture` to a file; its ending (.png, .svg, .pdf) says the format."""
    save_figure(picture(matrices, tasks, distances), path)


def picture(
    matrices: Mapping[str, Any], tasks: Sequence[str] | None = None, distances: Collection[str] = DISTANCES
) -> Any:
    """A matplotlib Figure: one heat map per metric, darker for more related, and the metrics' correlations."""
    shown = {name: symmetrised(R) for name, R in matrices.items()}
    if not shown:
        raise ValueError("picture: expected at least one matrix")
    T = len(next(iter(shown.values())))
    names = [str(i) for i in range(T)] if tasks is None else list(tasks)
    if any(len(M) != len(names) for M in shown.values()):
        raise ValueError(f"picture: matrices of {[len(M) for M in shown.values()]} tasks, {len(names)} names")
    panels = len(shown) + (2 if len(shown) > 1 else 0)
    width = min(4, panels)
    height = -(-panels // width)
    side = 2.6 + 0.16 * min(T, 40)
    page = figure(side * width * 1.15, side * height, dpi=110)
    axes = list(page.subplots(height, width, squeeze=False).ravel())
    for name, M in shown.items():
        far = name in distances
        # The diagonal says nothing and may be far from the rest, so it does not set the colours.
        rest = M[~np.eye(len(M), dtype=bool) & np.isfinite(M)]
        low, high = (float(rest.min()), float(rest.max())) if rest.size else (0.0, 1.0)
        _map(
            page, axes.pop(0), M, names, f"{name} (distance)" if far else name, "Blues_r" if far else "Blues", low, high
        )
    if len(shown) > 1:
        found = agreement(shown, distances)
        for title, M in (("Pearson", found.pearson), ("Spearman", found.spearman)):
            _map(page, axes.pop(0), M, list(found.names), f"{title}'s correlation", "RdBu", -1.0, 1.0)
    for left in axes:
        left.set_axis_off()
    return page


def _map(page: Any, axes: Any, M: Array, names: Sequence[str], title: str, cmap: str, low: float, high: float) -> None:
    image = axes.imshow(M, cmap=cmap, vmin=low, vmax=high)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title(title, fontsize=10)
    page.colorbar(image, ax=axes, pad=0.02, shrink=0.8)
    if len(names) > _MANY:
        return
    for i, row in enumerate(M):
        for j, value in enumerate(row):
            if np.isfinite(value):
                red, green, blue, _ = image.to_rgba(value)
                color = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 0.5 else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
