"""Relatedness of task vectors themselves: agreement of signs, cosine."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.taskvectors import Zeros, sign_similarity

_VALUES = 1 << 21  # float64 values at a time


def sign(vectors: Tensor, zeros: Zeros = "half") -> Tensor:
    """MaTU's similarity (eq. 5) of task vectors (T x d): T x T in [0, 1]. See `taskvectors.sign_similarity`."""
    return sign_similarity(vectors, zeros)


def cosine(vectors: Tensor) -> Tensor:
    """Cosines of task vectors (T x d): T x T, float64; 0 for a vector that is zero.

    Take differences to the common starting point. Whole weights have cosines near 1 whatever the tasks are.
    """
    T, d = vectors.shape
    G = torch.zeros(T, T, dtype=torch.float64, device=vectors.device)
    step = max(1, _VALUES // max(T, 1))
    for a in range(0, d, step):
        part = vectors[:, a : a + step].double()
        G.addmm_(part, part.t())
    G = (G + G.t()) / 2
    norms = G.diagonal().sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    C = (G * scale * scale[:, None]).clamp_(-1, 1)
    C.diagonal().copy_((norms > 0).double())
    return C
