"""Whose row can be computed from mixes of all rows, by who sees the mixes and knows the weights."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 1e-4
"""Singular values below this share of the largest one, and differences below this share, are rounding."""


def leaked(W: Tensor) -> list[int]:
    """The rows of X (K x d) that follow from the mixes W X; W is M x K.

    Row i does where its unit vector lies in the row space of W, so that some combination of the mixes is row i alone:
    (W^+ W)_ii = 1. With as many independent mixes as rows that is every row.
    """
    W = W.double()
    return [i for i, own in enumerate((torch.linalg.pinv(W, rtol=_SMALL) @ W).diagonal().tolist()) if own > 1 - _SMALL]


def mixing_of(X: Tensor, Y: Tensor) -> Tensor | None:
    """W (M x K) with Y = W X, from rows that are independent; None where Y is no such mix."""
    X, Y = X.double(), Y.double()
    W = Y @ torch.linalg.pinv(X)
    return W if (W @ X - Y).norm() <= _SMALL * Y.norm() else None
