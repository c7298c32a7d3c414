"""Rules for updates that conflict, and weights learned from losses before and after training (FedGA, FAMO).

TorchJD (extra `methods`) solves for the coefficients of its weightings. What belongs to rounds is here: rows that are
zero, blocks that only some rows have, the method's weights, and a scale at which its constants mean the same for
updates of any length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State, derive_seed, row_key
from fedloom.core.errors import UserError
from fedloom.core.gram import conflict_averse, conflict_free, gram, min_norm, nonzero, normalised
from fedloom.core.layout import pieces
from fedloom.core.lazy import need
from fedloom.core.mean import column_groups, problems, shares, weighted_mean
from fedloom.core.stage import Stage, Traits
from fedloom.core.untrusted import Number
from fedloom.core.updates import EVERYONE, Updates
from fedloom.methods import conflict as settings
from fedloom.training.rules import LocalRule, View

_COLUMNS = 1 << 16  # at a time in float64

Rescale = Literal["none", "1+c^2", "1+c", "1.5+c^2"]


def rescaling(rescale: Rescale, c: float) -> float:
    """Return what CAGrad's direction is divided by."""
    return {"none": 1.0, "1+c^2": 1.0 + c * c, "1+c": 1.0 + c, "1.5+c^2": 1.5 + c * c}[rescale]


def conflict_averse_weights(gram: Tensor, c: float) -> Tensor:
    """Return w = argmin over the simplex of <g_w, g_0> + c |g_0| |g_w|, from a Gram matrix: N x N to N, float64.

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
    """Return (w, lam): the direction is the mean plus lam sum_i w_i X_i."""
    n = len(G)
    uniform = torch.full((n,), 1 / max(n, 1), dtype=torch.float64)
    w, lam = conflict_averse(G, uniform, c)
    if n and (not bool(w.any()) or float(G.max() - G.min()) <= 1e-14 * float(G.max())):
        w = uniform
    return w, lam


def pcgrad_coefficients(G: Tensor, orders: Sequence[Sequence[int]]) -> Tensor:
    """Compute PCGrad in Gram space: W (K x K); row i of W X is row i projected against the rows in `orders[i]`."""
    W = torch.eye(len(G), dtype=torch.float64)
    some = nonzero(G).tolist()
    for i, order in enumerate(orders):
        for j in order:
            if j != i and some[j] and (inner := float(W[i] @ G[:, j])) < 0:
                W[i, j] -= inner / float(G[j, j])
    return W


@dataclass(frozen=True)
class PCGrad(settings.PCGradSettings, Stage):
    """Project each row against the rows it conflicts with, in a random order; see the add-on `pcgrad`. Rows stay K.

    `reduction` "sum" multiplies every block by the number of rows that have it.
    """

    traits = Traits("mix", separable=True, presence="row")

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
    """Return the order in which each row meets the rows: drawn anew every round, the same whoever else takes part."""
    draws = [[derive_seed(ctx.seed, ctx.round, "pcgrad", *row, *other) for other in rows] for row in rows]
    return [sorted(range(len(rows)), key=draw.__getitem__) for draw in draws]


@dataclass(frozen=True)
class GradVac(settings.GradVacSettings, Stage):
    """Turn each row towards the rows with which it is less aligned than usual; see the add-on `gradvac`."""

    traits = Traits("mix", separable=True, presence="row")

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


class Combination(Stage):
    """Base of rules that return one combination of the rows, with coefficients from their Gram matrix.

    Columns that the same rows have form a problem of their own, solved among those rows.
    """

    traits = Traits("mix", reads={"X", "weight"}, reduces=True, separable=True, presence="row")
    wide: ClassVar[bool] = False
    """True if coefficients may be large and cancel, so that rows are added up in float64."""

    def coefficients(self, G: Tensor, p: Tensor) -> Tensor:
        """Return the coefficients of some rows (K, float64) from their Gram matrix and their shares of `weight`."""
        raise NotImplementedError

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        X, k = updates.data, len(updates)
        out = X.new_zeros(updates.layout.d)
        for columns, members in problems(updates.layout, updates.present, k):
            if not len(members):
                continue
            G = gram(updates, columns)[members][:, members]
            q = torch.zeros(k, dtype=torch.float64)
            q[members] = self.coefficients(G, shares(updates.weight.cpu()[members]))
            if updates.mixing is not None:
                q = q @ updates.mixing.cpu()
            for s in columns:
                if not self.wide:
                    torch.mv(X[:, s].t(), q.to(X), out=out[s])
                    continue
                for piece in pieces(s, _COLUMNS):
                    part = X[:, piece].double()
                    out[piece] = q.to(part) @ part
        return updates.reduced(out), state


_EQUAL = Traits("mix", reduces=True, separable=True, presence="row")


@dataclass(frozen=True)
class CAGrad(settings.CAGradSettings, Combination):
    """The direction near the mean that is best for the worst-off row; see the add-on `cagrad`."""

    def coefficients(self, G: Tensor, p: Tensor) -> Tensor:
        w, lam = conflict_averse(G, p, self.c)
        return (p + lam * w) / rescaling(self.rescale, self.c)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if self.c == 0:
            return updates.reduced(weighted_mean(updates.replace(coef=None))), state
        return super().__call__(updates, state, ctx)


@dataclass(frozen=True)
class ConFIG(Combination):
    """The direction with the same cosine to all rows, as long as the mean reaches along it; see the add-on `config`."""

    wide = True

    def coefficients(self, G: Tensor, p: Tensor) -> Tensor:
        return conflict_free(G, p)


@dataclass(frozen=True)
class MinNorm(settings.MinNormSettings, Combination):
    """The shortest convex combination of the rows; see the add-on `min-norm`.

    A combination that vanishes (within a millionth of its parts) is exactly zero.
    """

    traits = _EQUAL

    def coefficients(self, G: Tensor, p: Tensor) -> Tensor:
        return min_norm(G, self.unit)


@dataclass(frozen=True)
class Weighting(Combination):
    """sum_k w_k X_k, with w from a weighting of TorchJD.

    It sees the Gram matrix of the rows that are not zero, in float64, divided by its mean diagonal. A subclass says in
    `weighting` which one it is; `p` are the rows' shares of `weight`, which sum to 1 with those of zero rows.
    """

    wide = True

    def weighting(self, p: Tensor) -> Any:
        """Return TorchJD's weighting of G (K x K) for rows with shares p (K). Raises UserError without its packages."""
        raise NotImplementedError

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        try:
            self.weighting(torch.ones(1, dtype=torch.float64))
        except UserError as error:
            yield f"{self!r} cannot work: {error}"

    def coefficients(self, G: Tensor, p: Tensor) -> Tensor:
        q, some = torch.zeros(len(G), dtype=torch.float64), nonzero(G)
        if bool(some.any()):
            q[some] = self.weighting(p[some])(normalised(G[some][:, some])[0])
        return q


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
    """The mean of the rows, each projected onto the cone of directions without conflict (Quinton and Rey, 2024)."""

    def weighting(self, p: Tensor) -> Any:
        return _library().UPGradWeighting(p, _projector())


@dataclass(frozen=True)
class DualProj(Weighting):
    """The mean, projected onto the cone of directions without conflict (GEM: Lopez-Paz and Ranzato, NeurIPS 2017)."""

    def weighting(self, p: Tensor) -> Any:
        return _library().DualProjWeighting(p, _projector())


@dataclass(frozen=True)
class AlignedMTL(settings.AlignedMTLSettings, Weighting):
    """The mean, once the matrix of the rows was given equal singular values (Senushkin et al., CVPR 2023)."""

    def weighting(self, p: Tensor) -> Any:
        return _library().AlignedMTLWeighting(p, scale_mode=self.scale)


@dataclass(frozen=True)
class IMTLG(Weighting):
    """The combination with sum of coefficients 1 whose projections on all rows are equal (Liu et al., ICLR 2021)."""

    traits = _EQUAL

    def weighting(self, p: Tensor) -> Any:
        return _library().IMTLGWeighting()


@dataclass(frozen=True)
class FairGrad(settings.FairGradSettings, Weighting):
    """The alpha-fair combination, its coefficients divided by their sum (Ban and Ji, ICML 2024)."""

    traits = _EQUAL

    def weighting(self, p: Tensor) -> Any:
        weighting = _library().FairGradWeighting(self.alpha)
        return lambda G: (w := weighting(G)) / w.sum()


@dataclass(frozen=True)
class ValidationLosses(LocalRule):
    """Provides the validation loss of the model as received and as trained (see `View.validate`)."""

    validation = True
    provides = frozenset({"extra:loss_received", "extra:loss_trained"})

    def begin(self, view: View, state: State) -> State:
        return {"received": view.validate()}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return {}, {"loss_received": state["received"], "loss_trained": view.validate()}


def adjusted(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float, floor: float = 0.0, unseen: int = 0
) -> dict[str, float]:
    """Return weights after one adjustment: a_k + step gap_k / max_j |gap_j|, cut to [floor, 1], of sum 1 (FedGA).

    `gaps` may cover only some of the clients; a positive gap means that aggregation hurts the client: it gains weight.
    The weight of "*" is that of each of the `unseen` clients, which never took part.
    """
    largest = max((abs(g) for g in gaps.values()), default=0.0)
    if not largest > 0:
        return dict(weights)
    moved = {k: min(1.0, max(floor, w + step * gaps.get(k, 0.0) / largest)) for k, w in weights.items()}
    total = math.fsum(w * (unseen if k == EVERYONE[0] else 1) for k, w in moved.items())
    return {k: w / total for k, w in moved.items()} if total > 0 else dict(weights)


@dataclass(frozen=True)
class GapWeights(settings.GapWeightsSettings, Stage):
    """Writes weights that follow the generalisation gaps of the round before; see the method `fedga`."""

    traits = Traits(
        "mix",
        reads={"extra:loss_received", "extra:loss_trained", "rounds"},
        writes={"weight"},
        separable=True,
        presence="coupled",
        extras={"loss_received": Number(), "loss_trained": Number()},
    )

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        clients = [row_key(row) for row in updates.rows]
        n = ctx.population or len(clients) or 1
        weights = {EVERYONE[0]: 1 / n, **state.get("weights", {})}
        weights = {**dict.fromkeys(clients, weights[EVERYONE[0]]), **weights}
        trained = dict(zip(clients, map(float, updates.extra["loss_trained"]), strict=True))
        received = dict(zip(clients, map(float, updates.extra["loss_received"]), strict=True))
        gaps = {}
        for client in clients:
            before = state.get("trained", {}).get(client)
            if before is None or before["round"] != ctx.round - 1:
                continue
            gap = received[client] - before["loss"]
            if self.relative:
                gap = gap / abs(before["loss"]) if before["loss"] else math.nan
            if math.isfinite(gap):
                gaps[client] = gap
        if self.centre and gaps:
            mean = math.fsum(gaps.values()) / len(gaps)
            gaps = {client: gap - mean for client, gap in gaps.items()}
        left = max(0.0, 1 - (ctx.round - 2) / ctx.rounds) if ctx.rounds else 1.0  # the gaps are those of round - 1
        weights = adjusted(weights, gaps, self.step * left / n, self.floor, max(n + 1 - len(weights), 0))
        memory = {client: {"round": ctx.round, "loss": trained[client]} for client in clients}
        now = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        new = {"weights": weights, "trained": {**state.get("trained", {}), **memory}}
        return updates.replace(weight=now), new


@dataclass(frozen=True)
class LossWeights(settings.LossWeightsSettings, Stage):
    """Writes weights under which the logarithms of all clients' losses fall alike; see the add-on `famo`.

    A loss that is not finite gives no weight and moves nothing.
    """

    traits = Traits(
        "mix",
        reads={"extra:loss_received"},
        writes={"weight"},
        separable=True,
        presence="coupled",
        extras={"loss_received": Number()},
    )

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        losses = zip(map(row_key, updates.rows), map(float, updates.extra["loss_received"]), strict=True)
        now = {key: math.log(max(loss, 1e-8)) for key, loss in losses if math.isfinite(loss)}
        kept = dict(state.get("clients", {}))
        both = [key for key in now if key in kept and kept[key]["round"] == ctx.round - 1]
        z = dict(zip(both, _softmax([kept[key]["xi"] for key in both]), strict=True))
        fell = {key: kept[key]["loss"] - now[key] for key in both}
        usual = math.fsum(z[key] * fell[key] for key in both)
        for key in now:
            mine = kept.get(key, {"xi": 0.0, "mean": 0.0, "square": 0.0, "steps": 0})
            if key in both:
                mine = _adam(mine, z[key] * (fell[key] - usual) + self.decay * mine["xi"], self.step)
            kept[key] = {**mine, "loss": now[key], "round": ctx.round}
        share = dict(zip(now, _softmax([kept[key]["xi"] - loss for key, loss in now.items()]), strict=True))
        weight = [share.get(row_key(row), 0.0) for row in updates.rows]
        return updates.replace(weight=torch.tensor(weight, dtype=torch.float64)), {"clients": kept}


def _softmax(values: Sequence[float]) -> list[float]:
    raised = [math.exp(value - max(values)) for value in values]
    return [value / math.fsum(raised) for value in raised]


def _adam(state: Mapping[str, float], slope: float, step: float) -> dict[str, float]:
    """Apply one step of Adam with its usual constants (0.9, 0.999, 1e-8) on xi."""
    mean, square = 0.9 * state["mean"] + 0.1 * slope, 0.999 * state["square"] + 0.001 * slope * slope
    steps = state["steps"] + 1
    size = math.sqrt(square / (1 - 0.999**steps)) + 1e-8
    return {"xi": state["xi"] - step * mean / (1 - 0.9**steps) / size, "mean": mean, "square": square, "steps": steps}
