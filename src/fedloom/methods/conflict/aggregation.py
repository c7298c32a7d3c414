"""Rules for updates that pull against each other: PCGrad, GradVac, CAGrad, ConFIG, the minimum-norm direction.

Weightings of TorchJD (extra `methods`): one combination of the rows, found in their Gram matrix.

TorchJD solves for the coefficients. What belongs to rounds is here: rows that are zero, blocks that only some rows
have, the method's weights, and a scale at which its constants mean the same for updates of any length.

Rows weighed by how well they agree with the updates of past rounds (FedBone)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.combine import Aggregation
from fedloom.core.context import Ctx, Row, State, derive_seed, row_key
from fedloom.core.errors import UserError
from fedloom.core.extras import need
from fedloom.core.gram import conflict_averse, conflict_free, gram, min_norm, nonzero, normalised
from fedloom.core.layout import Layout
from fedloom.core.mean import Mean, column_groups, problems, weighted_mean
from fedloom.core.outline import Box
from fedloom.core.spread import cut, join, total
from fedloom.core.stage import Stage, Traits, inner
from fedloom.core.updates import Updates
from fedloom.methods.conflict.averse import Rescale, rescaling

_COLUMNS = 1 << 16  # at a time in float64


def pcgrad_coefficients(G: Tensor, orders: Sequence[Sequence[int]]) -> Tensor:
    """PCGrad in Gram space: W (K x K), such that row i of W X is row i projected against the rows in `orders[i]`.

    v starts as X_i; for each j in the order, j not i: if <v, X_j> < 0 then v -= <v, X_j> / |X_j|^2 X_j, with the
    original X_j and the current v. Zero rows are skipped.
    """
    W = torch.eye(len(G), dtype=torch.float64)
    some = nonzero(G).tolist()
    for i, order in enumerate(orders):
        for j in order:
            if j != i and some[j] and (inner := float(W[i] @ G[:, j])) < 0:
                W[i, j] -= inner / float(G[j, j])
    return W


@dataclass(frozen=True)
class PCGrad(Stage):
    """Project each row against the rows it conflicts with, in a random order (Yu et al., NeurIPS 2020). Rows stay K.

    Conflict is a negative inner product over all columns. The mean that follows is the method's own. `reduction` "sum"
    multiplies every block by the number of rows that have it, so that a mean with equal weights becomes the paper's
    sum. Each row's order is drawn anew every round, the same whoever else takes part. Rows without conflict come back
    bit for bit (for "mean").
    """

    reduction: Literal["mean", "sum"] = "mean"
    traits = Traits("mix", separable=True, presence="row")

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"PCGrad: reduction must be 'mean' or 'sum', found {self.reduction!r}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        k = len(updates)
        if k < 2:
            return updates, state
        G = gram(updates)
        W = torch.eye(k, dtype=torch.float64)
        if bool((G < 0).any()):
            W = pcgrad_coefficients(G, _orders(updates.rows, ctx))
        if self.reduction == "sum" and updates.present is None:
            W = W * k
        out = updates if torch.equal(W, torch.eye(k, dtype=torch.float64)) else updates.mixed(W)
        if self.reduction == "sum" and updates.present is not None:
            X = out.X.clone()
            for columns, members in column_groups(out.layout, out.present, None):
                X[:, columns] *= k if members is None else int(members.sum())
            out = out.replace(X=X)
        return out, state


def _orders(rows: Sequence[Row], ctx: Ctx) -> list[list[int]]:
    """For each row the order in which it meets the rows: drawn anew every round, the same whoever else takes part."""
    draws = [[derive_seed(ctx.seed, ctx.round, "pcgrad", *row, *other) for other in rows] for row in rows]
    return [sorted(range(len(rows)), key=draw.__getitem__) for draw in draws]


@dataclass(frozen=True)
class GradVac(Stage):
    """Turn each row towards the rows with which it is less aligned than usual (Wang et al., ICLR 2021). Rows stay K.

    For each row i, v starts as X_i, and meets the other rows j in a random order: c = cos(v, X_j); if c is below the
    target t_ij, v += |v| (t sqrt(1 - c^2) - c sqrt(1 - t^2)) / (|X_j| sqrt(1 - t^2)) X_j, so that their cosine is the
    target. Then t_ij <- (1 - beta) t_ij + beta c, from 0, for pairs that are both there. All t = 0 is PCGrad. A target
    counts as at most 0.99, because v grows without bound as it nears 1.
    """

    beta: float = 0.5
    traits = Traits("mix", separable=True, presence="row")

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"GradVac: expected beta from 0 to 1, found {self.beta}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        keys, k = [row_key(row) for row in updates.rows], len(updates)
        G, W = gram(updates), torch.eye(k, dtype=torch.float64)
        some, norms, known = nonzero(G).tolist(), G.diagonal().clamp(min=0).sqrt(), state.get("cosines", {})
        usual = {key: dict(known.get(key, {})) for key in {*known, *keys}}
        for i, order in enumerate(_orders(updates.rows, ctx)):
            for j in order if some[i] else ():
                length = float(W[i] @ G @ W[i]) ** 0.5
                if j == i or not some[j] or not length:
                    continue
                c = min(max(float(W[i] @ G[:, j]) / (length * float(norms[j])), -1.0), 1.0)
                before = usual[keys[i]].get(keys[j], 0.0)
                if c < (t := min(before, _ALIGNED)):
                    W[i, j] += length * (t * (1 - c * c) ** 0.5 / (1 - t * t) ** 0.5 - c) / float(norms[j])
                usual[keys[i]][keys[j]] = (1 - self.beta) * before + self.beta * c
        out = updates if torch.equal(W, torch.eye(k, dtype=torch.float64)) else updates.mixed(W)
        return out, {"cosines": usual}


_ALIGNED = 0.99
"""The largest cosine that GradVac aims at: there, a row orthogonal to its partner becomes 7 times as long."""


@dataclass(frozen=True)
class CAGrad(Stage):
    """The direction near the mean that is best for the worst-off row (Liu et al., NeurIPS 2021).

    u = g_0 + c |g_0| g_w / |g_w|, divided by 1, 1+c^2 or 1+c (`rescale`); g_0 is the mean by `weight`, g_w the convex
    combination of the rows that minimises <g_w, g_0> + c |g_0| |g_w|. c = 0 is the mean, bit for bit.

    If g_w vanishes (within a millionth of its parts), u is g_0. Zero rows count in g_0 but not in g_w. If some clients
    lack blocks, columns that the same rows have form a problem of their own, solved among those rows: so nothing is
    diluted, and |u - g_0| <= c |g_0| holds in each problem.
    """

    c: float = 0.4
    rescale: Rescale = "none"
    traits = Traits("mix", reads={"X", "weight"}, reduces=True, separable=True, presence="row")

    def __post_init__(self) -> None:
        if not 0 <= self.c < 1:
            raise ValueError(f"CAGrad: expected 0 <= c < 1, found {self.c}")
        if self.rescale not in ("none", "1+c^2", "1+c"):
            raise ValueError(f"CAGrad: rescale must be 'none', '1+c^2' or '1+c', found {self.rescale!r}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if self.c == 0:
            return updates.reduced(weighted_mean(updates.replace(coef=None))), state

        def coefficients(G: Tensor, members: Tensor) -> Tensor:
            p = shares(updates.weight.cpu()[members])
            w, lam = conflict_averse(G, p, self.c)
            return (p + lam * w) / rescaling(self.rescale, self.c)

        return updates.reduced(combined(updates, coefficients)), state


@dataclass(frozen=True)
class ConFIG(Stage):
    """The direction with the same cosine to all rows, as long as the mean reaches along it (Liu et al., ICLR 2025).

    v = pinv(R) 1 with the unit rows R, and u = <g_0, v> v / |v|^2 with the mean g_0 by `weight`. If such a direction
    does not exist, v is the nearest in the sense of least squares; if it vanishes, or the mean points away from it,
    there is no step. Zero rows count in g_0 only. If some clients lack blocks, columns that the same rows have form a
    problem of their own, solved among those rows.
    """

    traits = Traits("mix", reads={"X", "weight"}, reduces=True, separable=True, presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        def coefficients(G: Tensor, members: Tensor) -> Tensor:
            return conflict_free(G, shares(updates.weight.cpu()[members]))

        return updates.reduced(combined(updates, coefficients, wide=True)), state


def shares(weight: Tensor) -> Tensor:
    """Weights (K) divided by their sum; zeros if that is 0."""
    return weight / whole if (whole := float(weight.sum())) > 0 else torch.zeros_like(weight)


@dataclass(frozen=True)
class MinNorm(Stage):
    """The shortest convex combination of the rows (MGDA: Désidéri 2012; on unit rows: FDSE, CVPR 2025).

    With `unit` the rows are first made unit vectors and the result is multiplied by their mean norm. Zero rows are left
    out; a combination that vanishes (within a millionth of its parts) is exactly zero. Weights play no part. If some
    clients lack blocks, columns that the same rows have form a problem of their own, solved among those rows.
    """

    unit: bool = True
    traits = Traits("mix", reduces=True, separable=True, presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.reduced(combined(updates, lambda G, members: min_norm(G, self.unit))), state


def combined(updates: Updates, coefficients: Callable[[Tensor, Tensor], Tensor], wide: bool = False) -> Tensor:
    """One vector (d), a combination of the rows. `coefficients` maps (Gram matrix of some rows, their positions) to its
    coefficients; if these may be large and cancel, `wide` adds up in float64.
    """
    X = updates.data
    out = X.new_zeros(updates.layout.d)
    k = len(updates)
    for columns, members in problems(updates.layout, updates.present, k):
        if not len(members):
            continue
        G = gram(updates, columns)[members][:, members]
        q = torch.zeros(k, dtype=torch.float64)
        q[members] = coefficients(G, members)
        if updates.mixing is not None:
            q = q @ updates.mixing.cpu()
        for s in columns:
            if not wide:
                torch.mv(X[:, s].t(), q.to(X), out=out[s])
                continue
            for a in range(s.start, s.stop, _COLUMNS):
                part = X[:, a : min(a + _COLUMNS, s.stop)].double()
                out[a : a + part.shape[1]] = q.to(part) @ part
    return out


Scale = Literal["min", "median", "rmse"]


@dataclass(frozen=True)
class Weighting(Stage):
    """sum_k w_k X_k, with w from a weighting of TorchJD.

    It sees the Gram matrix of the rows that are not zero, in float64, divided by its mean diagonal. If some clients
    lack blocks, columns that the same rows have form a problem of their own, solved among those rows. A subclass says
    in `made` which weighting it is; `p` are the rows' shares of `weight`, which sum to 1 with those of zero rows.
    """

    traits = Traits("mix", reads={"X", "weight"}, reduces=True, separable=True, presence="row")

    def made(self, p: Tensor) -> Any:
        """TorchJD's weighting for rows with shares p (K). Raises UserError that names the extra if a package lacks."""
        raise NotImplementedError

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        """Packages that are not installed."""
        try:
            self.made(torch.ones(1, dtype=torch.float64))
        except UserError as error:
            yield f"{self!r} cannot work: {error}"

    def weights(self, G: Tensor, p: Tensor) -> Tensor:
        """The rows' coefficients (K, float64)."""
        found: Tensor = self.made(p)(G)
        return found

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        def coefficients(G: Tensor, members: Tensor) -> Tensor:
            q, some = torch.zeros(len(G), dtype=torch.float64), nonzero(G)
            if bool(some.any()):
                q[some] = self.weights(normalised(G[some][:, some])[0], shares(updates.weight.cpu()[members])[some])
            return q

        return updates.reduced(combined(updates, coefficients, wide=True)), state


_EQUAL = Traits("mix", reduces=True, separable=True, presence="row")


def _library(*packages: str) -> Any:
    for package in packages:
        need(package, "methods")
    return need("torchjd.aggregation", "methods")


def _projector() -> Any:
    # Its default adds 1e-4 of the trace to the diagonal; in float64 much less keeps the program solvable.
    _library("quadprog", "qpsolvers")
    return need("torchjd.linalg", "methods").QuadprogProjector(reg_eps=1e-12)


@dataclass(frozen=True)
class UPGrad(Weighting):
    """The mean of the rows, each projected onto the cone of what conflicts with no row (Quinton and Rey, 2024)."""

    def made(self, p: Tensor) -> Any:
        return _library().UPGradWeighting(p, _projector())


@dataclass(frozen=True)
class DualProj(Weighting):
    """The mean, projected onto the cone of what conflicts with no row (GEM: Lopez-Paz and Ranzato, NeurIPS 2017)."""

    def made(self, p: Tensor) -> Any:
        return _library().DualProjWeighting(p, _projector())


@dataclass(frozen=True)
class AlignedMTL(Weighting):
    """The mean, once the matrix of the rows was given equal singular values (Senushkin et al., CVPR 2023)."""

    scale: Scale = "min"

    def made(self, p: Tensor) -> Any:
        return _library().AlignedMTLWeighting(p, scale_mode=self.scale)


@dataclass(frozen=True)
class IMTLG(Weighting):
    """The combination with sum of coefficients 1 whose projections on all rows are equal (Liu et al., ICLR 2021)."""

    traits = _EQUAL

    def made(self, p: Tensor) -> Any:
        return _library().IMTLGWeighting()


@dataclass(frozen=True)
class FairGrad(Weighting):
    """The alpha-fair combination, its coefficients divided by their sum (Ban and Ji, ICML 2024)."""

    alpha: float = 1.0
    traits = _EQUAL

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"FairGrad: expected alpha above 0, found {self.alpha}")

    def made(self, p: Tensor) -> Any:
        return _library("scipy").FairGradWeighting(self.alpha)

    def weights(self, G: Tensor, p: Tensor) -> Tensor:
        """The solution of G w = w^(-1/alpha), divided by its sum."""
        w = super().weights(G, p)
        return w / w.sum()


_CHUNK = 1 << 20


def agreement(updates: Updates, direction: Tensor) -> Tensor:
    """Cosine of each row with a vector (d), as K numbers in float64; 0 where either is zero."""
    X, inner = updates.data, torch.zeros(len(updates), dtype=torch.float64)
    square = torch.zeros(1, dtype=torch.float64)
    for a in range(0, updates.layout.d, _CHUNK):
        part = direction[a : a + _CHUNK].double()
        inner += (X[:, a : a + _CHUNK].double() @ part).cpu()
        square += (part @ part).cpu()
    inner, square = total(inner), total(square)
    if updates.mixing is not None:
        inner = updates.mixing.cpu() @ inner
    G = gram(updates)
    norms = G.diagonal().clamp(min=0).sqrt() * square.sqrt()
    return torch.where(nonzero(G) & (norms > 0), inner / norms, 0.0).clamp(-1.0, 1.0)


@dataclass(frozen=True)
class HistoryAttention(Aggregation):
    """Multiplies row k by K a_k, a = softmax(cos(X_k, H) / temperature), before `stage`; H is the mean of past results.

    H <- beta H + (1 - beta) u, an exponential mean of `stage`'s results u. In the first round rows pass bit for bit.
    """

    beta: float = 0.9
    temperature: float = 1.0
    stage: Stage = PCGrad() >> Mean()

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta: expected a number of at least 0 and below 1, found {self.beta}")
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, found {self.temperature}")
        if not self.stage.traits.reduces:
            raise ValueError(f"HistoryAttention: {self.stage!r} leaves a row for each client, the history is of one")
        self._close("HistoryAttention")

    @cached_property
    def traits(self) -> Traits:
        return replace(Traits.around(inner(self), reduces=True), presence="coupled")

    def init(self, layout: Layout) -> State:
        """H = 0."""
        return {"history": torch.zeros(layout.d), "stage": self.stage.init(layout)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        k = len(updates)
        history = cut(updates.layout, state["history"]).to(updates.data)
        if k and bool(state["history"].any()):
            share = torch.softmax(agreement(updates, history) / self.temperature, dim=0)
            updates = updates.mixed(torch.diag(k * share))
        out, inner = self.stage(updates, state["stage"], ctx)
        history = self.beta * history + (1 - self.beta) * out.X[0]
        return out, {"history": join(updates.layout, history), "stage": inner}

    @property
    def boxes(self) -> tuple[Box, ...]:
        how = f"attention on past updates, beta {self.beta}, temperature {self.temperature}"
        return (Box(f"rows weighed by {how}", inside=self.stage.boxes),)
