"""The conflict-averse update in Gram space."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedloom.core.gram import conflict_averse

Rescale = Literal["none", "1+c^2", "1+c", "1.5+c^2"]


def rescaling(rescale: Rescale, c: float) -> float:
    """What CAGrad's direction is divided by."""
    return {"none": 1.0, "1+c^2": 1.0 + c * c, "1+c": 1.0 + c, "1.5+c^2": 1.5 + c * c}[rescale]


def conflict_averse_weights(gram: Tensor, c: float) -> Tensor:
    """w = argmin over the simplex of <g_w, g_0> + c |g_0| |g_w|, from a Gram matrix: N x N to N, float64.

    g_w = sum_i w_i X_i and g_0 is the plain mean of the rows. Exact but for round-off at any scale of the rows, where
    the release's solver stops at uniform weights once updates are shorter than about 0.01. Zero rows get w = 0 but
    count in g_0. Where every choice is equally good, w is uniform: over all rows if they are all equal or all zero, and
    over the rows that are not zero if their mean vanishes or c = 0.

    Raises ValueError unless gram is square and 0 <= c < 1.
    """
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"conflict_averse_weights: expected a square matrix, found shape {tuple(gram.shape)}")
    if not 0 <= c < 1:
        raise ValueError(f"conflict_averse_weights: expected 0 <= c < 1, found {c}")
    return solved(gram.detach().cpu().double(), c)[0]


def solved(G: Tensor, c: float) -> tuple[Tensor, float]:
    """(w, lam): the direction is the mean plus lam sum_i w_i X_i."""
    n = len(G)
    uniform = torch.full((n,), 1 / max(n, 1), dtype=torch.float64)
    w, lam = conflict_averse(G, uniform, c)
    if n and (not bool(w.any()) or float(G.max() - G.min()) <= 1e-14 * float(G.max())):
        w = uniform
    return w, lam
