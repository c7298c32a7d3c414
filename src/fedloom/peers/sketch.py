"""Short sketches of long updates, whose inner products are those of the updates on average.

Peers that only want to know who is alike send m numbers instead of d. The random map is drawn anew from the seed,
chunk by chunk, whenever it is used: it is never sent and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import derive_seed

Kind = Literal["count", "rademacher", "gaussian"]

_CHUNK = 1 << 16  # values of the vector at a time
_MAP_CHUNK = 1 << 20  # entries of a dense map at a time


@dataclass(frozen=True)
class Sketch:
    """A random linear map S from d to m numbers with E <Sx, Sy> = <x, y>, the same wherever the seed is the same.

    "count": every coordinate is added to one random bucket with a random sign (Charikar, Chen and Farach-Colton,
    ICALP 2002; Weinberger et al., ICML 2009). "rademacher" and "gaussian": a dense matrix of +-1 or normal numbers
    over sqrt(m) (Achlioptas, JCSS 2003), which takes m d random numbers and is slower by hundreds of times.

    The first two take the raw bits of PCG64, which are the same for all versions of numpy; its normal numbers need not
    be. Memory is O(m) beside the vector and a chunk of constant size. d need not be known.
    """

    m: int = 2048
    seed: int = 0
    kind: Kind = "count"

    def __post_init__(self) -> None:
        if self.m < 1:
            raise ValueError(f"m: expected at least 1, found {self.m}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(Kind))}, found {self.kind!r}")

    def __call__(self, x: Tensor) -> Tensor:
        """Sketch of a vector (d to m), or of each row (n x d to n x m). float32, on the CPU.

        A value that is not finite makes its bucket, or the whole sketch, not finite.
        """
        if x.ndim not in (1, 2):
            raise ValueError(f"expected a vector (d) or rows (n x d), found shape {tuple(x.shape)}")
        X = x.detach() if x.ndim == 2 else x.detach()[None]
        sums = self._count(X) if self.kind == "count" else self._dense(X)
        return sums.float().reshape(*x.shape[:-1], self.m)

    def _count(self, X: Tensor) -> Tensor:
        stream = self._stream()
        sums = np.zeros((len(X), 2 * self.m))
        for part in _chunks(X, _CHUNK):
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

    def variance(self, x: Tensor, y: Tensor) -> float:
        """Variance of <Sx, Sy> over seeds: (|x|^2 |y|^2 + <x, y>^2 - 2 sum_i x_i^2 y_i^2) / m.

        Without the last term for "gaussian" (Weinberger et al., Lemma 2; Li, Hastie and Church, KDD 2006, Lemma 1).
        It is at most 2 |x|^2 |y|^2 / m, and 0 where both vectors have one and the same entry.
        """
        x, y = x.double(), y.double()
        same = 0.0 if self.kind == "gaussian" else 2 * float((x.square() * y.square()).sum())
        return (float(x.square().sum() * y.square().sum() + (x @ y).square()) - same) / self.m

    def error(self, delta: float) -> float:
        """epsilon with P(|<Sx, Sy> - <x, y>| >= epsilon |x| |y|) <= delta for any two vectors: sqrt(2 / (m delta)).

        Chebyshev's inequality on `variance`. It holds for each pair, not for all pairs at once.
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta: expected a number between 0 and 1, found {delta}")
        return math.sqrt(2 / (self.m * delta))


def _raw(stream: np.random.PCG64, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes, the same on all machines."""
    return stream.random_raw(-(-size // 8)).astype("<u8", copy=False).view(np.uint8)[:size]


def _chunks(X: Tensor, size: int) -> Iterator[np.ndarray[Any, Any]]:
    for a in range(0, X.shape[1], size):
        yield X[:, a : a + size].float().cpu().numpy()
