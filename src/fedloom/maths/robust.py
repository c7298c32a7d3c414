"""Rules that a few hostile rows cannot own, as coefficients of the rows: all from their Gram matrix (K x K, float64).

Nothing depends on the scale of the rows, and no row of any finite size turns another's coefficient into nan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def squared_distances(G: Tensor) -> Tensor:
    """|X_i - X_j|^2 (K x K)."""
    size = G.diagonal()
    return (size[:, None] + size[None, :] - 2 * G).clamp(min=0)


def krum_order(G: Tensor, f: int) -> Tensor:
    """Positions of the rows (K), the one with the least sum of squared distances to its K - f nearest rows, itself
    among them, first; ties by position."""
    scores = squared_distances(G).sort(dim=1).values[:, : len(G) - f].sum(1)
    return scores.argsort(stable=True)


def nearest(G: Tensor, count: int) -> Tensor:
    """Positions of the `count` rows that are nearest to each row (K x count), itself first; ties by position."""
    D = squared_distances(G)
    D.fill_diagonal_(-1.0)
    return D.argsort(dim=1, stable=True)[:, :count]


def distances_to(G: Tensor, c: Tensor) -> Tensor:
    """|X_i - sum_j c_j X_j| (K)."""
    inner = G @ c
    return (G.diagonal() - 2 * inner + c @ inner).clamp(min=0).sqrt()


def geometric_median(G: Tensor, iterations: int = 100) -> Tensor:
    """c (K, sums to 1) such that sum_i |X_i - sum_j c_j X_j| is least, by the smoothed Weiszfeld algorithm.

    c_i <- (1 / max(nu, |X_i - v|)) / sum with nu a millionth of the smallest distance between two different rows. It
    begins with the rows weighted by the inverse of their median distance to all, for from the mean it would need a step
    for every power of two by which some rows are too large; and ends where no coefficient moves by more than 1e-12.
    """
    D = squared_distances(G).sqrt()
    if not bool((D > 0).any()):
        return torch.full((len(G),), 1 / len(G), dtype=G.dtype)
    nu = 1e-6 * float(D[D > 0].min())
    c = 1 / D.median(dim=1).values.clamp(min=nu)
    c = c / c.sum()
    for _ in range(iterations):
        before, c = c, 1 / distances_to(G, c).clamp(min=nu)
        c = c / c.sum()
        if float((c - before).abs().max()) <= 1e-12:
            break
    return c


def clipping(sizes: Tensor, limit: float | None) -> Tensor:
    """Factors (K) that bring sizes above `limit`, None for their lower median, down to it."""
    bound = sizes.median() if limit is None else torch.tensor(limit, dtype=sizes.dtype)
    return torch.where(sizes > bound, bound / sizes, 1.0)


def centred_clip(G: Tensor, limit: float | None, iterations: int, start: int | None) -> Tensor:
    """c (K) of v after v <- v + mean_i (X_i - v) min(1, limit / |X_i - v|), from row `start`, None for v = 0.

    Without a limit each step uses the lower median of the distances |X_i - v|.
    """
    c = torch.zeros(len(G), dtype=G.dtype)
    if start is not None:
        c[start] = 1.0
    for _ in range(iterations):
        factors = clipping(distances_to(G, c), limit)
        c = c * (1 - factors.mean()) + factors / len(G)
    return c


def in_order(X: Tensor) -> Tensor:
    """Each column's values in ascending order (K x columns), nan as if it were inf.

    Rows are compared two at a time, as Batcher's odd-even merge sort says (AFIPS 1968): for some thousand columns,
    which stay in a cache, this is several times as fast as sorting column by column.
    """
    rows = list(torch.where(X.isnan(), torch.inf, X).unbind(0))
    spare = torch.empty_like(X[0])
    for low, high in _comparisons(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return torch.stack(rows)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """The pairs of positions that are put in order, one after another, to sort any `count` values."""
    merged = 1
    while merged < count:
        apart = merged
        while apart:
            for first in range(apart % merged, count - apart, 2 * apart):
                for i in range(first, first + min(apart, count - first - apart)):
                    if i // (2 * merged) == (i + apart) // (2 * merged):
                        yield i, i + apart
            apart //= 2
        merged *= 2
