"""Similarities to other peers, computed at one peer from what it received (DFMTL thesis, section 4.2).

Signals are rows. A similarity of a peer's own signal (m) and others' (n x m) is a vector (n); of a matrix alone
(N x m), a matrix (N x N) with 1 on the diagonal, the thesis' s_ii. Results are float64 on the CPU. A signal that is not
finite cannot be judged: its similarity is nan, which passes through every function here and is never chosen.

Sketches are short vectors whose inner products are those of the long ones on average. Their random map is drawn anew
from the seed, chunk by chunk, whenever it is used: it is never sent and never stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import derive_seed
from fedloom.core.layout import Layout
from fedloom.core.settings.section import Checked, Count
from fedloom.methods.peers.config import LossRule, Normalise, Scale

_CHUNK = 1 << 18  # float64 values at a time, which fit into the cache


def shared_columns(layout: Layout) -> Layout:
    """Return the encoder's parameters with norm layers; not buffers, which would decide every cosine."""
    return layout.select("encoder").parameters


def gradient(own: Tensor, others: Tensor | None = None, scale: Scale = "unit") -> Tensor:
    """Return cosines of two peers' updates or gradients of the encoder (eq. 4.3).

    "unit" maps it to (cos + 1) / 2 in [0, 1], as the release does; "cosine" is the equation, in [-1, 1]. An update
    that is zero is orthogonal to all. Give rows over `shared_columns`, or sketches of them.

    The rows are updates, as in the release, or gradients of the loss (eq. 4.2); the key `similarity.gradient` chooses.
    """
    if scale not in ("unit", "cosine"):
        raise ValueError(f"scale: expected 'unit' or 'cosine', found {scale!r}")
    C = _cosines(own, others)
    return _own_is_one((C + 1) / 2 if scale == "unit" else C, others)


def parameters(own: Tensor, others: Tensor | None = None) -> Tensor:
    """Return (cos + 1) / 2 of two peers' models, of differences to their common start; of two zeros 1/2."""
    return gradient(own, others)


def features(own: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the similarity of encoder features (C1): the mean of the similarities of channel means and deviations."""
    each = [parameters(own[..., i, :], None if others is None else others[..., i, :]) for i in (0, 1)]
    return (each[0] + each[1]) / 2


def feature_statistics(pooled: Tensor) -> Tensor:
    """Return channel means and standard deviations (2 x C, float64) of globally pooled features (samples x C)."""
    if pooled.ndim != 2 or not len(pooled):
        raise ValueError(f"pooled: expected samples x channels, at least one sample, found shape {tuple(pooled.shape)}")
    values = pooled.double()
    return torch.stack([values.mean(0), values.std(0, correction=0)])


def overlap(own: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the overlap of tasks, sum over t of min(w_it, w_jt) (eq. 4.4), for weights (T) of `task_weights`."""
    rows, columns = _pair(own, others)
    S = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    for a, b in zip(rows.double().t().cpu(), columns.double().t().cpu(), strict=True):
        S += torch.minimum(a[:, None], b[None])
    return _own_is_one(S if others is None else S[0], others)


def task_weights(weights: Mapping[str, Mapping[str, float]]) -> Tensor:
    """Return task weights of peers, peer -> task -> weight, as a matrix (peers x tasks, float64) in sorted order.

    Each row is divided by its sum, so that overlaps are in [0, 1]. Raises ValueError for a peer without a positive
    weight or with a negative one.
    """
    tasks = sorted({task for each in weights.values() for task in each})
    for peer, each in weights.items():
        if not each or min(each.values()) < 0 or not sum(each.values()) > 0:
            raise ValueError(f"tasks of {peer!r}: expected weights >= 0 with a positive sum, found {dict(each)}")
    W = torch.tensor([[float(weights[p].get(t, 0.0)) for t in tasks] for p in sorted(weights)], dtype=torch.float64)
    return W / W.sum(1, keepdim=True) if len(W) else W.reshape(0, len(tasks))


def cross_loss(losses: Tensor, rule: LossRule = "exp") -> Tensor:
    """Return the performance of others' models on this peer's data: similarities from losses (n).

    "exp": exp(-loss). "negative": -loss (eq. 4.6). "inverse": 1 / (loss + 0.01), as in the release. For the same losses
    the order of the candidates is the same; "exp" and "inverse" also serve as weights. An infinite loss gives 0, or
    -inf. Peers give "exp" losses relative to the median candidate's, the others the losses as they are (`per_task`).

    The release compares the peer's own model on the others' data instead, which says for whom the peer is good, not who
    is good for it. Losses of different tasks: see `per_task`.
    """
    if rule not in ("exp", "negative", "inverse"):
        raise ValueError(f"rule: expected 'exp', 'negative' or 'inverse', found {rule!r}")
    L = losses.double().cpu()
    return torch.exp(-L) if rule == "exp" else -L if rule == "negative" else 1 / (L + 0.01)


def disparity(losses: Tensor) -> Tensor:
    """Return the disparities 1 - exp(-loss) of others' models, from losses here (n); nan (never chosen) if infinite.

    The loss score of PFedDST (Fan et al., 2025) asks how the peer's own model does on the others' data.
    """
    return 1 - cross_loss(losses.where(losses.isfinite(), math.nan))


def per_task(losses: Tensor, weights: Tensor, relative: bool = True) -> Tensor:
    """Return one loss per candidate (n, float64) from its losses per task (n x T) and the peer's task weights (T).

    With `relative` each task's losses are first divided by the median of their sizes over the candidates, and weights
    by their sum. Thus the task with the largest unit does not decide. A median of 0 divides by 1. Without, it is the
    weighted sum that the peer trains on (L_i in eq. 4.5). Tasks of weight 0 do not count, whatever their losses.
    """
    L, w = losses.double().cpu(), weights.double().cpu()
    if L.ndim != 2 or w.shape != (L.shape[1],) or bool((w < 0).any()) or not float(w.sum()) > 0:
        raise ValueError(
            f"expected losses n x T and weights (T) >= 0 with a positive sum, found {tuple(L.shape)} and {w.tolist()}"
        )
    L, w = L[:, w > 0], w[w > 0]
    if not len(L):
        return L.new_zeros(0)
    if not relative:
        return L @ w
    unit = L.abs().nanmedian(0).values
    unit = torch.where((unit > 0) & torch.isfinite(unit), unit, 1.0)
    return (L / unit) @ (w / w.sum())


def normalised(similarity: Tensor, how: Normalise) -> Tensor:
    """Return similarities on one scale over a peer's candidates: a vector (n), or rows of a matrix but its diagonal.

    "min-max": to [0, 1]. "z-score": mean 0, deviation 1. Where all are alike: 1/2, or 0. What is not finite stays.
    """
    if how not in ("none", "min-max", "z-score"):
        raise ValueError(f"normalise: expected 'none', 'min-max' or 'z-score', found {how!r}")
    if how == "none":
        return similarity
    S = similarity.double()
    counts = torch.isfinite(S)
    if S.ndim == 2:
        counts = counts & ~torch.eye(len(S), dtype=torch.bool)
    n = counts.sum(-1, keepdim=True).clamp(min=1)
    if how == "min-max":
        low = torch.where(counts, S, torch.inf).amin(-1, keepdim=True) if S.numel() else S
        spread = torch.where(counts, S, -torch.inf).amax(-1, keepdim=True) - low if S.numel() else S
        flat = 0.5
    else:
        low = torch.where(counts, S, 0.0).sum(-1, keepdim=True) / n
        spread = (torch.where(counts, S - low, 0.0).square().sum(-1, keepdim=True) / n).sqrt()
        flat = 0.0
    # Round-off of equal values is no difference.
    size = torch.where(counts, S, 0.0).abs().amax(-1, keepdim=True) if S.numel() else S
    scaled = torch.where(spread > 1e-12 * size, (S - low) / spread, flat)
    return torch.where(counts, scaled, S)


def combined(
    similarities: Mapping[str, Tensor],
    weights: Mapping[str, float],
    normalise: Normalise | Mapping[str, Normalise] = "none",
) -> Tensor:
    """Return the convex combination of named similarities, each normalised first (eq. 4.7, with overlap's alpha).

    Weights are divided by their sum; a similarity of weight 0 need not be there, and does not count where it is nan.
    The release has "none": overlap and (cos + 1) / 2 are in [0, 1] already. The thesis has one of the others. A peer's
    similarity to itself is 1 whatever the scale: the most that a cosine, an overlap and "min-max" can be.
    """
    used = {name: w for name, w in weights.items() if w != 0}
    total = sum(used.values())
    if not used or min(used.values()) < 0 or not total > 0:
        raise ValueError(f"weights: expected numbers >= 0 with a positive sum, found {dict(weights)}")
    if missing := [name for name in used if name not in similarities]:
        raise ValueError(f"similarity {missing[0]!r} has a weight but no value; values: {', '.join(similarities)}")
    parts = []
    for name, w in used.items():
        how = normalise if isinstance(normalise, str) else normalise.get(name, "none")
        parts.append(w / total * normalised(similarities[name].double().cpu(), how))
    if len({tuple(part.shape) for part in parts}) > 1:
        shapes = {name: tuple(similarities[name].shape) for name in used}
        raise ValueError(f"similarities: expected one shape, found {shapes}")
    return torch.stack(parts).sum(0)


def _pair(own: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor]:
    if others is None:
        if own.ndim != 2:
            raise ValueError(f"signals: expected a matrix (N x m), found shape {tuple(own.shape)}")
        return own, own
    if own.ndim != 1 or others.ndim != 2 or others.shape[1] != len(own):
        raise ValueError(f"signals: expected m and n x m, found shapes {tuple(own.shape)} and {tuple(others.shape)}")
    return own[None], others


def _own_is_one(S: Tensor, others: Tensor | None) -> Tensor:
    return S.clone().fill_diagonal_(1.0) if others is None else S


def _cosines(own: Tensor, others: Tensor | None) -> Tensor:
    """Return cosines: n, or N x N."""
    rows, columns = _pair(own, others)
    inner = torch.zeros(len(rows), len(columns), dtype=torch.float64, device=rows.device)
    left = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    right = torch.zeros(len(columns), dtype=torch.float64, device=rows.device)
    step = max(1, _CHUNK // max(len(rows) + len(columns), 1))
    for a in range(0, rows.shape[1], step):
        x = rows[:, a : a + step].double()
        y = x if others is None else columns[:, a : a + step].double()
        inner.addmm_(x, y.t())
        left += x.square().sum(1)
        right += y.square().sum(1)
    inner, left, right = inner.cpu(), left.sqrt().cpu(), right.sqrt().cpu()
    size = left[:, None] * right
    # nan and inf leave nan here, for neither is a size of 0
    C = torch.where(size == 0, inner.abs() * 0.0, inner / size)
    C = torch.where(torch.isfinite(size), C.clamp(-1, 1), torch.nan)
    return C if others is None else C[0]


Kind = Literal["count", "rademacher", "gaussian"]

_COLUMNS = 1 << 16  # values of the vector at a time
_MAP_CHUNK = 1 << 20  # entries of a dense map at a time


@dataclass(frozen=True)
class Sketch(Checked):
    """A random linear map S from d to m numbers with E <Sx, Sy> = <x, y>, the same wherever the seed is the same.

    "count": every coordinate is added to one random bucket with a random sign (Charikar, Chen and Farach-Colton,
    ICALP 2002; Weinberger et al., ICML 2009). "rademacher" and "gaussian": a dense matrix of +-1 or normal numbers
    over sqrt(m) (Achlioptas, JCSS 2003), which takes m d random numbers and is slower by hundreds of times.

    The first two take the raw bits of PCG64, which are the same for all versions of numpy; its normal numbers need not
    be. Memory is O(m) beside the vector and a chunk of constant size. d need not be known.
    """

    m: Count = 2048
    seed: int = 0
    kind: Kind = "count"

    def __call__(self, x: Tensor) -> Tensor:
        """Sketch a vector (d to m), or each row (float32, on the CPU); a value that is not finite spreads."""
        if x.ndim not in (1, 2):
            raise ValueError(f"expected a vector (d) or rows (n x d), found shape {tuple(x.shape)}")
        X = x.detach() if x.ndim == 2 else x.detach()[None]
        sums = self._count(X) if self.kind == "count" else self._dense(X)
        return sums.float().reshape(*x.shape[:-1], self.m)

    def _count(self, X: Tensor) -> Tensor:
        stream = self._stream()
        sums = np.zeros((len(X), 2 * self.m))
        for part in _chunks(X, _COLUMNS):
            # A bucket and a sign in one draw of 32 bits: the second half of the buckets is subtracted.
            d = part.shape[1]
            draws = _raw(stream, 4 * d).view("<u4").astype(np.uint64)
            buckets = ((draws * np.uint64(2 * self.m)) >> np.uint64(32)).astype(np.int64)
            for row, values in zip(sums, part, strict=True):
                row += np.bincount(buckets, weights=values, minlength=2 * self.m)
        return torch.from_numpy(sums[:, : self.m] - sums[:, self.m :])

    def _dense(self, X: Tensor) -> Tensor:
        stream = self._stream()
        normal = np.random.Generator(stream)
        sums = torch.zeros(len(X), self.m, dtype=torch.float64)
        for part in _chunks(X, max(1, _MAP_CHUNK // self.m)):
            shape = (part.shape[1], self.m)
            if self.kind == "gaussian":
                entries = normal.standard_normal(shape, dtype=np.float32)
            else:
                size = shape[0] * shape[1]
                bits = np.unpackbits(_raw(stream, -(-size // 8)), count=size).reshape(shape)
                entries = 2 * bits.astype(np.float32) - 1
            sums += torch.from_numpy(part) @ torch.from_numpy(entries)
        return sums / math.sqrt(self.m)

    def _stream(self) -> np.random.PCG64:
        return np.random.PCG64(derive_seed(self.seed, "sketch", self.kind))

    def error(self, delta: float) -> float:
        """Return epsilon with P(|<Sx, Sy> - <x, y>| >= epsilon |x| |y|) <= delta for any vectors: sqrt(2 / (m delta)).

        Chebyshev's inequality, for each pair, not for all at once. Over seeds the variance of <Sx, Sy> is
        (|x|^2 |y|^2 + <x, y>^2 - 2 sum_i x_i^2 y_i^2) / m, at most 2 |x|^2 |y|^2 / m (Weinberger et al., Lemma 2). For
        "gaussian" it has no third term (Li, Hastie and Church, KDD 2006, Lemma 1).
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta: expected a number between 0 and 1, found {delta}")
        return math.sqrt(2 / (self.m * delta))


def _raw(stream: np.random.PCG64, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return random bytes, the same on all machines."""
    return stream.random_raw(-(-size // 8)).astype("<u8", copy=False).view(np.uint8)[:size]


def _chunks(X: Tensor, size: int) -> Iterator[np.ndarray[Any, Any]]:
    for a in range(0, X.shape[1], size):
        yield X[:, a : a + size].float().cpu().numpy()
