"""Task vectors as MaTU uses them: one vector with masks and scales for several tasks; aggregation over clients.

A task vector is what training on a task adds to the common starting point: tau (d). Everything here is a pure function
of such vectors and works on pieces of columns, so that temporaries stay small.

Equations are those of MaTU (Tsouvalas, Ozcelebi, Meratnia: Many-Task Federated Fine-Tuning via Unified Task Vectors).
sgn(0) = 0 throughout. Sums over tasks or clients are computed or decided in float64, so that their order does not
matter. Masks are bool (k x d) or packed (k x ceil(d / 8), uint8); see `pack_mask`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedloom.core.layout import pieces

Combine = Literal["normalized", "sum", "half", "average"]
Cross = Literal["similar", "uniform", "none"]
Source = Literal["masked", "unified", "reconstructed"]
Zeros = Literal["half", "out"]
Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 4096  # columns at a time of `unify`, a multiple of 8: 30 rows of them fit a cache
_LEAST, _MOST, _VALUES = 1 << 13, 1 << 15, 1 << 18  # columns at a time of `aggregate_tasks`, for so many values
_GRAM = 1 << 14  # columns at a time of products of signs; counts up to 2^24 are exact in float32


# Masks


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask (... x d, bool) into bits (... x ceil(d / 8), uint8): coordinate 8 i + j is bit 7 - j of byte i."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1)).to(mask.device)


def unpack_mask(packed: Tensor, d: int) -> Tensor:
    """Invert `pack_mask`: ... x d, bool."""
    if packed.dtype != torch.uint8 or packed.shape[-1] != -(-d // 8):
        raise ValueError(
            f"packed mask: expected {-(-d // 8)} bytes (uint8) for {d} coordinates, "
            f"found {tuple(packed.shape)} of {packed.dtype}"
        )
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy(), axis=-1, count=d)).bool().to(packed.device)


def _check_mask(mask: Tensor, d: int) -> None:
    right = d if mask.dtype == torch.bool else -(-d // 8)
    if mask.dtype not in (torch.bool, torch.uint8) or mask.shape[-1] != right:
        raise ValueError(
            f"mask: expected {d} coordinates (bool) or {-(-d // 8)} bytes (uint8), "
            f"found {tuple(mask.shape)} of {mask.dtype}"
        )


# One client


def unify(vectors: Tensor | Sequence[Tensor], packed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (unified vector (d), masks (T x d, bool or `packed`), scales (T)) of task vectors (T x d, or T of size d).

    Eq. 2: unified = sgn(sum_t tau_t) * max |tau_t| over the tasks whose sign is that of the sum; 0 where the sum is 0.
    mask_t = (tau_t * unified > 0), scale_t = sum |tau_t| / sum |mask_t * unified|, and 1 where a mask is empty. float64
    decides signs that float32 cannot, so the order of tasks changes nothing. A single task comes back as it is.
    """
    rows, d = _rows(vectors)
    T, kind = len(rows), _kind(rows[0])
    if T == 1:  # without the sums, which would say the same
        only = torch.from_numpy(_array(rows[0])).to(rows[0].device)
        mask = (only != 0)[None]
        return only + 0.0, pack_mask(mask) if packed else mask, torch.ones_like(only[:1])
    unified = np.empty(d, kind)
    masks = np.empty((T, -(-d // 8)), np.uint8) if packed else np.empty((T, d), np.bool_)
    arrays = [_array(row) for row in rows]
    parts = pieces(slice(0, d), _CHUNK)
    sums = np.empty((len(parts), 2, T))

    def work(numbers: range) -> None:
        size = (T, min(_CHUNK, d))
        x_, y_, mask_ = np.empty(size, kind), np.empty(size, kind), np.empty(size, np.bool_)
        for i in numbers:
            s = parts[i]
            n = s.stop - s.start
            x, y, mask = x_[:, :n], y_[:, :n], mask_[:, :n]
            for row, to in zip(arrays, x, strict=True):
                to[:] = row[s]
            sign, top = _elect(x, y)
            np.multiply(sign, top, out=unified[s])
            np.greater(y, 0, out=mask)
            if packed:
                masks[:, s.start // 8 : -(-s.stop // 8)] = np.packbits(mask, axis=1)
            else:
                masks[:, s] = mask
            # Both sums add in the same order, so that equal terms give equal sums and a scale of exactly 1.
            sums[i, 0] = _row_sums(np.abs(x, out=x))
            np.copyto(y, mask)
            sums[i, 1] = _row_sums(np.multiply(y, top, out=y))

    _spread(work, len(parts))
    sizes, kept = sums.sum(0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = np.where(kept > 0, np.minimum(sizes / kept, np.finfo(kind).max), 1.0).astype(kind)
    device = rows[0].device
    return tuple(torch.from_numpy(a).to(device) for a in (unified, masks, scales))  # type: ignore[return-value]


def modulate(vector: Tensor, mask: Tensor, scale: Tensor | float, out: Tensor | None = None) -> Tensor:
    """Return the task vector of a unified vector (d): scale * mask * vector, written to `out` if there is one.

    With one mask (d, or packed) and one scale: d. With k masks and k scales: k x d.
    """
    d = len(vector)
    _check_mask(mask, d)
    scale = torch.as_tensor(scale, dtype=vector.dtype, device=vector.device)
    out = vector.new_empty(*mask.shape[:-1], d) if out is None else out
    bits = vector.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[vector.itemsize])
    for s in pieces(slice(0, d), _MOST):
        packed = mask.dtype == torch.uint8
        here = unpack_mask(_bytes(mask, s), s.stop - s.start) if packed else mask[..., s]
        # by bits, for torch.where takes three times as long on masks without a pattern
        kept = (here.to(bits.dtype).neg_() & bits[s]).view(vector.dtype)
        torch.mul(kept, scale[..., None] if mask.ndim > 1 else scale, out=out[..., s])
    return out


def _elect(x: Array, y: Array) -> tuple[Array, Array]:
    """Return (sign of each column's sum, largest value of that sign in magnitude). y becomes x times the sign.

    The float32 sum of T values is wrong by at most (T - 1) u A. A, the sum of magnitudes, is at most 2 T times the
    largest magnitude of the elected sign, unless that is wrong. Columns that this does not settle are computed again.
    """
    T = len(x)
    total = np.add.reduce(x, axis=0)
    sign = _sgn(total)
    top = np.maximum.reduce(np.multiply(x, sign, out=y), axis=0)
    if T > 1:
        bound = top * x.dtype.type(2 * T * T * np.finfo(x.dtype).eps)
        certain = np.abs(total) > bound
        certain &= np.isfinite(total)
        again = np.flatnonzero(~certain)
        if len(again) and len(again := again[(x[:, again] != 0).any(0)]):
            # in float64, and in an order that does not depend on the order of the rows
            sign[again] = np.sign(np.add.reduce(np.sort(x[:, again], axis=0), axis=0, dtype=np.float64))
            y[:, again] = x[:, again] * sign[again]
            top[again] = y[:, again].max(0)
    return sign, np.maximum(top, 0, out=top)


def _row_sums(x: Array) -> Array:
    """Return sums of rows in float64, after float32 has summed groups of eight columns."""
    T, n = x.shape
    if n % 8:
        return np.asarray(x.sum(1, dtype=np.float64))
    return np.asarray(np.add.reduce(x.reshape(T, 8, n // 8), axis=1).sum(1, dtype=np.float64))


def _sgn(x: Array) -> Array:
    """Return -1, 0 or 1; several times as fast as np.sign."""
    return ((x > 0).view(np.int8) - (x < 0).view(np.int8)).astype(x.dtype)


# Work in pieces, on the CPU: numpy computes small pieces in as many threads as torch may use. The pieces are too small
# for torch's own threads, which wait for each other after every operation.


def _spread(work: Callable[[range], None], count: int) -> None:
    """Call work on ranges that together are range(count), in threads if there is enough to do."""
    threads = min(torch.get_num_threads(), count // 4)

    def quietly(numbers: range) -> None:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            work(numbers)

    if threads < 2:
        return quietly(range(count))
    with ThreadPoolExecutor(threads) as pool:
        size = -(-count // (4 * threads))
        list(pool.map(quietly, [range(a, min(a + size, count)) for a in range(0, count, size)]))
    return None


def _array(x: Tensor) -> Array:
    """Return values as float32 or float64 in numpy."""
    x = x.detach()
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).cpu().numpy()


def _kind(x: Tensor) -> np.dtype[Any]:
    return np.dtype(np.float64 if x.dtype == torch.float64 else np.float32)


def _rows(vectors: Tensor | Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
    """Return rows of a matrix, or vectors of one size, and that size."""
    if isinstance(vectors, Tensor) and vectors.ndim != 2:
        raise ValueError(f"task vectors: expected T x d, found shape {tuple(vectors.shape)}")
    rows = list(vectors)
    if not rows:
        raise ValueError("expected at least one task vector, found none")
    for row in rows:
        if row.shape != (rows[0].numel(),) or not row.is_floating_point() or row.dtype != rows[0].dtype:
            raise ValueError("task vectors: expected floating-point vectors (d) of one size and dtype")
    return rows, len(rows[0])


# Relatedness


def sign_similarity(vectors: Tensor, zeros: Zeros = "half") -> Tensor:
    """Return S (T x T, float64) of task vectors (T x d): S(t, t') = (mean_j sgn(tau_t) sgn(tau_t') + 1) / 2, eq. 5.

    A coordinate that is zero in either vector counts as half an agreement, also on the diagonal, so many zeros move S
    to 0.5. With zeros="out" a pair is compared on the coordinates where neither is zero; if there are none, S is 0.5.
    """
    choose("zeros", zeros, Zeros)
    T, d = vectors.shape
    agree = torch.zeros(T, T, dtype=torch.float64, device=vectors.device)
    both = torch.zeros_like(agree) if zeros == "out" else torch.full_like(agree, d)
    for s in pieces(slice(0, d), _GRAM):
        sign = vectors[:, s].sign().float()
        agree += sign @ sign.t()
        if zeros == "out":
            sign.abs_()
            both += sign @ sign.t()
    return (torch.where(both > 0, agree / both, 0.0) + 1) / 2


# All clients


@dataclass(frozen=True, eq=False)
class Upload:
    """The upload of one client: a unified vector (d), and a mask, a scale and a sample count for each of its k tasks.

    Without masks and scales the vector is the task vector of its one task; rows (client, task) of updates that are
    already reconstructed enter in this form. `client` is a name; it only fixes the order in which clients are summed.
    """

    vector: Tensor
    tasks: tuple[str, ...]
    counts: tuple[float, ...]
    masks: Tensor | None = None
    """k x d, bool, or k x ceil(d / 8), packed."""
    scales: Tensor | None = None
    client: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        object.__setattr__(self, "counts", tuple(float(n) for n in self.counts))
        who = f"upload of {self.client!r}" if self.client else "upload"
        k = len(self.tasks)
        if not k or len(set(self.tasks)) < k:
            raise ValueError(f"{who}: expected tasks that differ, found {list(self.tasks)}")
        if len(self.counts) != k or not all(n >= 0 for n in self.counts):
            raise ValueError(f"{who}: expected {k} sample counts that are not negative, found {list(self.counts)}")
        if (self.masks is None) != (self.scales is None) or (self.masks is None and k > 1):
            raise ValueError(f"{who}: expected both masks and scales; only a single task may have neither")
        if self.masks is not None and self.scales is not None:
            _check_mask(self.masks, len(self.vector))
            if self.masks.ndim != 2 or len(self.masks) != k or self.scales.shape != (k,):
                raise ValueError(f"{who}: expected {k} masks and {k} scales, one per task")


@dataclass(frozen=True, eq=False)
class TaskAggregate:
    """The next round's vectors of the tasks that some upload has; other tasks keep theirs."""

    tasks: tuple[str, ...]
    """Names, sorted; the order of all rows and columns below."""
    vectors: Tensor
    """New task vectors, eq. 7: T x d."""
    similarity: Tensor
    """S of eq. 5, on the vectors of eq. 4: T x T, float64."""
    partners: Tensor
    """Weights of other tasks' vectors before `combine` divides: S where eq. 6 chooses a partner, else 0; T x T."""


def aggregate_tasks(
    uploads: Sequence[Upload],
    *,
    rho: float = 0.4,
    kappa: int = 3,
    epsilon: float = 0.5,
    combine: Combine = "normalized",
    cross: Cross = "similar",
    source: Source = "masked",
    zeros: Zeros = "half",
    out: Tensor | None = None,
) -> TaskAggregate:
    """Compute MaTU's server step, eqs. 3 to 7: new task vectors from the clients' unified vectors, masks and scales.

    For a task t and the clients n that hold it: gamma_n is n's share of the task's samples (equal shares if there are
    none), lambda_n and m_n are its scale and mask at n, tau_n is n's unified vector.

    - Eq. 3: a_j = |mean_n sgn(m_n tau_n)_j|; mhat_j = 1 where a_j >= rho, else a_j.
    - Eq. 4: that = mhat * sum_n gamma_n lambda_n x_n. `source` is x_n: "masked" m_n tau_n (default), "unified" tau_n,
      "reconstructed" lambda_n m_n tau_n (so that the scale counts twice).
    - Eq. 5: S = `sign_similarity` of the vectors that, with `zeros`.
    - Eq. 6: partners of t: the `kappa` most similar other tasks with S > epsilon (the paper: 0.5; ties by name).
      ttil = sum over them of S mhat * that'. With cross="uniform" every other task is a partner, all with the same
      weight: 1 in "normalized", one over their number in the others. With cross="none" no task has partners.
    - Eq. 7: `combine` "sum": that + ttil, as printed, which grows from round to round where tasks are related;
      "half": half of that; "normalized": (that + ttil) / (1 + the partners' weights), an average; "average": half of
      that and half of the partners' own average, ttil / the partners' weights. A task without partners is that in all.

    Tasks that no upload holds are not in the result: they keep their vectors and contribute nothing to others. Memory:
    the result (T x d), written to `out` if given (columns of a larger matrix will do), and pieces of a few thousand
    columns; masks are unpacked piece by piece.
    """
    choose("combine", combine, Combine)
    choose("cross", cross, Cross)
    choose("source", source, Source)
    if kappa < 0:
        raise ValueError(f"kappa: expected a number of partners, found {kappa}")
    uploads = sorted(uploads, key=lambda u: (u.client, u.tasks))
    if not uploads:
        raise ValueError("aggregate_tasks: expected at least one upload")
    first = uploads[0].vector
    if any(u.vector.shape != first.shape or u.vector.dtype != first.dtype for u in uploads):
        raise ValueError("aggregate_tasks: the uploads' vectors differ in size or dtype")
    round_ = _RoundOfUploads(uploads, rho, source)
    T, d = len(round_.tasks), len(first)
    if out is not None and (out.shape != (T, d) or out.dtype != first.dtype):
        raise ValueError(f"out: expected {T} x {d} of {first.dtype}, found {tuple(out.shape)} of {out.dtype}")
    vectors = np.empty((T, d), _kind(first)) if out is None else out.numpy()
    parts = pieces(slice(0, d), min(max(_VALUES // T // 8 * 8, _LEAST), _MOST))

    def same_task(numbers: range) -> None:
        for i in numbers:
            total = np.zeros((T, parts[i].stop - parts[i].start))
            mhat = round_.mhat(parts[i], total)
            np.multiply(total, mhat, out=vectors[:, parts[i]], casting="same_kind")

    _spread(same_task, len(parts))
    S = sign_similarity(torch.from_numpy(vectors), zeros)
    partners = _partners(S, kappa, epsilon, cross)
    own, weights = (w.numpy() for w in _weights(partners, combine, cross))

    def cross_task(numbers: range) -> None:
        for i in numbers:
            hat = vectors[:, parts[i]].astype(np.float64)
            other = np.zeros_like(hat)
            for to, row in zip(other, weights, strict=True):
                for j in np.flatnonzero(row):
                    to += row[j] * hat[j]
            other *= round_.mhat(parts[i])
            hat *= own[:, None]
            np.add(hat, other, out=vectors[:, parts[i]], casting="same_kind")

    if weights.any():
        _spread(cross_task, len(parts))
    return TaskAggregate(round_.tasks, torch.from_numpy(vectors).to(first.device), S, partners)


class _RoundOfUploads:
    """The uploads of a round, task by task, in pieces of columns."""

    def __init__(self, uploads: Sequence[Upload], rho: float, source: Source) -> None:
        self.uploads, self.source = uploads, source
        self.vectors = [_array(u.vector) for u in uploads]
        self.tasks = tuple(sorted({t for u in uploads for t in u.tasks}))
        held = {t: [n for u in uploads for s, n in zip(u.tasks, u.counts, strict=True) if s == t] for t in self.tasks}
        self.holders = np.array([[len(n)] for n in held.values()], np.float32)
        # Eq. 3 in whole numbers: the smallest count that reaches rho
        reach = [next(c for c in itertools.count() if c / len(n) >= rho) for n in held.values()]
        self.enough = np.array(reach)[:, None]
        self.at: list[Any] = []
        self.weights: list[Array] = []
        all_of = {t: sum(n) for t, n in held.items()}
        for u in uploads:
            counts = zip(u.tasks, u.counts, strict=True)
            share = np.array([n / all_of[t] if all_of[t] > 0 else 1 / len(held[t]) for t, n in counts])
            if u.scales is not None:
                share = share * _array(u.scales).astype(np.float64) ** (2 if source == "reconstructed" else 1)
            self.at.append([self.tasks.index(t) for t in u.tasks] if u.tasks != self.tasks else slice(None))
            self.weights.append(share[:, None])

    def mhat(self, s: slice, total: Array | None = None) -> Array:
        """Return mhat of eq. 3 in some columns (T x columns); adds eq. 4's sum_n gamma_n lambda_n x_n to `total`."""
        few = len(self.uploads) < 128
        count = np.zeros((len(self.tasks), s.stop - s.start), np.int8 if few else np.int32)
        for u, vector, at, weight in zip(self.uploads, self.vectors, self.at, self.weights, strict=True):
            x = vector[s]
            sign = (x > 0).view(np.int8) - (x < 0).view(np.int8)
            mask = None if u.masks is None else _some(u.masks, s)
            count[at] += sign if mask is None else mask * sign
            if total is not None:
                total[at] += weight * (x if mask is None or self.source == "unified" else mask * x)
        np.abs(count, out=count)
        # a share is at most 1: the larger of both is faster than np.where
        return np.maximum(count.astype(np.float32) / self.holders, (count >= self.enough).view(np.int8))


def _some(masks: Tensor, s: slice) -> Array:
    """Return some columns of masks, packed or not, as 0 and 1 (int8). `s` starts at a multiple of 8."""
    if masks.dtype == torch.bool:
        return masks[:, s].cpu().numpy().view(np.int8)
    return np.unpackbits(_bytes(masks, s).cpu().numpy(), axis=1, count=s.stop - s.start).view(np.int8)


def _bytes(masks: Tensor, s: slice) -> Tensor:
    """Return some columns of packed masks. `s` starts at a multiple of 8."""
    return masks[..., s.start // 8 : -(-s.stop // 8)]


def _partners(S: Tensor, kappa: int, epsilon: float, cross: Cross) -> Tensor:
    """Return the choice of eq. 6: T x T, S (or 1, "uniform") where the column is a partner of the row, else 0."""
    T = len(S)
    chosen = torch.zeros_like(S)
    if cross == "uniform":
        return torch.ones_like(S).fill_diagonal_(0.0)
    if cross == "none" or T < 2:
        return chosen
    order = S.clone().fill_diagonal_(-torch.inf).argsort(dim=1, descending=True, stable=True)[:, : min(kappa, T - 1)]
    chosen.scatter_(1, order, S.gather(1, order))
    return torch.where(chosen > epsilon, chosen, 0.0).fill_diagonal_(0.0)


def _weights(partners: Tensor, combine: Combine, cross: Cross) -> tuple[Tensor, Tensor]:
    """Return (weights of the tasks' own vectors (T), of the others' (T x T)) in eq. 7."""
    total = partners.sum(1)
    some = total > 0
    if combine == "normalized":
        return 1 / (1 + total), partners / (1 + total)[:, None]
    shared = cross == "uniform" or combine == "average"
    weights = partners / torch.where(some, total, 1.0)[:, None] if shared else partners
    if combine == "sum":
        return torch.ones_like(total), weights
    return torch.where(some, 0.5, 1.0).to(total), weights / 2


def choose(name: str, value: str, among: object) -> None:
    """Raise ValueError for a value that is none of a Literal's."""
    if value not in get_args(among):
        raise ValueError(f"{name}: expected one of {', '.join(get_args(among))}, found {value!r}")
