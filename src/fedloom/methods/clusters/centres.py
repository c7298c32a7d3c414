"""Several models at the server; a client uses one of them (IFCA, RR-Cluster) or a mix (FedSPD, FedSoft, FedMerge).

The clients' local rules take the best (IFCA), one at random (FedSPD), or are drawn to all of them (FedSoft).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.combine import Aggregation
from fedloom.core.context import Broadcast, Ctx, Fields, State, generator
from fedloom.core.gram import gram
from fedloom.core.layout import Layout
from fedloom.core.mean import Mean, weighted_mean
from fedloom.core.outline import Box
from fedloom.core.settings.section import Count, NonNegative
from fedloom.core.stage import Identity, Stage, Traits, inner
from fedloom.core.untrusted import Number, Untrusted
from fedloom.core.updates import EVERYONE, Updates
from fedloom.methods.clusters.aggregation import agglomerate, cosines, for_members
from fedloom.training.rules import LocalRule, View

First = Literal["groups", "noise"]
Uses = int | list[float]
"""The choice of a client among several models: the number of one, or its shares of all."""


def first_models(updates: Updates, update: Tensor, count: int, first: First, noise: float, ctx: Ctx) -> list[Tensor]:
    """Return `count` different models (d) after a round in which all rows started from the same one.

    `update` is the round's aggregate. "groups": the means of groups of rows (average linkage on cosine distance).
    "noise", and models for which no rows are left: the start + update + noise rms(update) N(0, 1). Without this the
    models would stay identical.
    """
    start = torch.zeros_like(update) if updates.base is None else updates.base[0]
    models = []
    if first == "groups":
        for part in agglomerate(1 - cosines(gram(updates)), count, "average"):
            rows = updates.keep(part)
            # a block that no row of the group has moves as it does for everybody
            rest = weighted_mean(rows.replace(X=rows.X - update, coef=None))
            models.append(start + update + rest)
    size = noise * update.square().mean().sqrt() if len(update) else 0.0
    for j in range(len(models), count):
        # a peer that joins later, or was alone, must draw what the others drew in the first round
        draw = torch.randn(len(update), generator=generator(ctx.seed, 1, "cluster", j), dtype=update.dtype)
        models.append(start + update + size * draw.to(update.device))
    return models


def _names(count: int, first: First) -> set[str]:
    """Return what stages with so many models write beside rows."""
    return {f"broadcast:cluster{j}" for j in range(count)} | ({"groups"} if first == "groups" else set())


def _shares(count: int) -> dict[str, Untrusted]:
    return {f"share{j}": Number(0, 1) for j in range(count)}


def _used(models: Sequence[Tensor], uses: Uses) -> Tensor | None:
    """Return the model that a client uses (d); None where it names none of them."""
    if isinstance(uses, int):
        return models[uses] if uses < len(models) else None
    mix = torch.zeros_like(models[0])
    for share, model in zip(uses, models, strict=True):
        mix.add_(model, alpha=share)
    return mix


def _moved(
    updates: Updates, base: Tensor, before: Sequence[Tensor], now: Sequence[Tensor], uses: Mapping[str, Uses]
) -> Updates:
    """Return how far the model that each client uses moves: from its own start, of an absent one from before."""
    starts = {client: start for (client, _), start in zip(updates.rows, base, strict=True)}
    moves: dict[str, Tensor] = {}
    for client, mine in uses.items():
        end, start = _used(now, mine), starts[client] if client in starts else _used(before, mine)
        if end is not None and start is not None and end is not start:
            moves[client] = end - start
    return for_members(updates, moves)


def _to_all(models: Sequence[Tensor], clients: Sequence[str]) -> dict[str, Broadcast]:
    every = {f"cluster{j}": model for j, model in enumerate(models)}
    return {client: dict(every) for client in clients}


def rebalanced(chosen: Sequence[int], count: int, least: int, rng: torch.Generator) -> list[int]:
    """Return choices among `count` clusters after clients moved to those of fewer than `least` (RR-Cluster).

    Clients are visited in random order. One whose cluster has more than `least` goes to the smallest cluster, the first
    of equals, if that has fewer. So nobody moves twice, and with count x least clients or more no cluster stays short.
    A choice of no cluster stays what it is.
    """
    moved = list(chosen)
    sizes = [moved.count(j) for j in range(count)]
    for i in torch.randperm(len(moved), generator=rng).tolist():
        short = sizes.index(min(sizes))
        if moved[i] < count and sizes[moved[i]] > least > sizes[short]:
            sizes[moved[i]] -= 1
            sizes[short] += 1
            moved[i] = short
    return moved


@dataclass(frozen=True)
class ChosenClusters(Aggregation):
    """Keeps `count` models, broadcasts all, and moves each with the rows of the clients that chose it (IFCA).

    The choice is the extra "cluster". The first round has one model for all, with `stage`; then the models part (see
    `first_models`), and `stage` gets each row relative to its chosen model. With `least`, see `rebalanced`. With
    `mixed` a client gets the mix of all models by its shares, the extras "shareS", in place of the one that it chose.
    """

    count: Count = 2
    first: First = "groups"
    noise: NonNegative = 1.0
    stage: Stage = Mean()
    least: int = 0
    mixed: bool = False

    @cached_property
    def traits(self) -> Traits:
        traits = Traits.around(inner(self))
        own: dict[str, Untrusted] = {"cluster": Number(-1, self.count - 1, whole=True)}
        if self.mixed:
            own |= _shares(self.count)
        return Traits(
            "matrix",
            reads=traits.reads | {"base"} | {f"extra:{name}" for name in own},
            writes={"X", *_names(self.count, self.first)},
            wants=traits.wants,
            hides=self.stage.traits.hides,
            presence="coupled",
            extras={**traits.extras, **own},
        )

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        if most < self.count * self.least:
            needed = self.count * self.least
            yield f"{self.count} clusters of at least {self.least} clients each need {needed} clients, found {most}"

    def init(self, layout: Layout) -> State:
        return {"models": [], "members": {}, "stages": [self.stage.init(layout)] * self.count}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        return _to_all(state["models"], clients)

    def movers(self, clients: Sequence[str], chosen: Sequence[int], ctx: Ctx) -> tuple[Sequence[int], Sequence[Stage]]:
        """Return, for each row, the number of the model that it moves, and for each model the stage that combines."""
        counted = rebalanced(chosen, self.count, self.least, ctx.rng("rebalanced")) if self.least else chosen
        return counted, [self.stage] * self.count

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates) and not self.stage.traits.hides:
            return updates.reduced(updates.X.new_zeros(updates.layout.d)), state
        if not state["models"]:
            out, inner = self.stage(updates, state["stages"][0], ctx)
            some = len(updates) > 0  # else nobody says where all start from
            models = first_models(updates, out.X[0], self.count, self.first, self.noise, ctx) if some else []
            return out, {"models": models, "members": {}, "stages": [inner] * self.count}
        base = updates.start
        clients = [client for client, _ in updates.rows]
        # one that says that it had no models, -1, counts to the first; one that names no cluster counts to none
        chosen = [max(int(j), 0) for j in updates.extra["cluster"]] if clients else []
        uses: list[Uses] = list(chosen)
        if self.mixed:
            uses = [[float(updates.extra[f"share{j}"][i]) for j in range(self.count)] for i in range(len(clients))]
        members = dict(sorted({**state["members"], **dict(zip(clients, uses, strict=True))}.items()))
        before, models, stages = state["models"], list(state["models"]), list(state["stages"])
        counted, combining = self.movers(clients, chosen, ctx)
        for j, stage in enumerate(combining):
            here = [i for i, moves in enumerate(counted) if moves == j]
            if not here and not stage.traits.hides:
                continue
            rows = updates.keep(here)
            if here:
                apart = torch.stack([base[i] - before[chosen[i]] for i in here])
                rows = rows.replace(X=rows.X + apart)
            out, stages[j] = stage(rows, stages[j], ctx)
            models[j] = models[j] + out.X[0]
        out = _moved(updates, base, before, models, members)
        return out, {"models": models, "members": members, "stages": stages}

    @property
    def boxes(self) -> tuple[Box, ...]:
        least = f", moved by at least {self.least} clients each" if self.least else ""
        first = f"{self.count} clusters, first from {self.first}{least}"
        return (Box(f"in each cluster that clients choose ({first})", inside=self.stage.boxes),)


@dataclass(frozen=True)
class MergedModels(Aggregation):
    """Keeps `count` models, and for each client weights of their mix, its model, which it learns; see `fedmerge`.

    A model moves by `stage`, with the weights of the mixes times `weight`.
    """

    heading = "in each of {count} models, by the share that a client's mix has of it (learned, step {step}; first from "
    heading += "{first})"
    count: Count = 5
    first: First = "groups"
    noise: NonNegative = 1.0
    step: NonNegative = 0.1
    stage: Stage = Mean()

    @cached_property
    def traits(self) -> Traits:
        traits = Traits.around(inner(self))
        reads = traits.reads | {"base", "weight"}
        return replace(traits, kind="matrix", reads=reads, separable=False, presence="coupled")

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        if rows is None:
            yield f"{self} learns how each client mixes a server's models, which no peer has"

    def init(self, layout: Layout) -> State:
        return {"models": [], "logits": {}, "stages": [self.stage.init(layout)] * self.count}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates.reduced(updates.X.new_zeros(updates.layout.d)), state
        base = updates.start
        if not state["models"]:
            out, inner = self.stage(updates, state["stages"][0], ctx)
            first = first_models(updates, out.X[0], self.count, self.first, self.noise, ctx)
            shift = base[0] + out.X[0] - torch.stack(first).mean(0)
            return out, {"models": [m + shift for m in first], "logits": {}, "stages": [inner] * self.count}
        before, known, stages = state["models"], state["logits"], list(state["stages"])
        clients = [client for client, _ in updates.rows]
        logits = torch.tensor([known.get(client, [0.0] * self.count) for client in clients], dtype=torch.float64)
        mix, p = logits.softmax(1), (updates.weight / updates.weight.sum().clamp(min=1e-300)).cpu()
        uphill = -torch.stack([updates.X @ (model - before[0]) for model in before], 1).double().cpu()
        slope = p[:, None] * mix * (uphill - (mix * uphill).sum(1, keepdim=True))
        if largest := float(slope.abs().max()):
            logits = logits - self.step * slope / largest
        mix, models = logits.softmax(1), []
        for j, model in enumerate(before):
            weight = updates.weight * mix[:, j].to(updates.weight)
            out, stages[j] = self.stage(updates.replace(weight=weight), stages[j], ctx)
            models.append(model + out.X[0])
        now = dict(sorted({**known, **dict(zip(clients, logits.tolist(), strict=True))}.items()))
        every = {EVERYONE[0]: [0.0] * self.count, **now}  # one that joins later begins with equal shares
        uses = {client: torch.tensor(mine, dtype=torch.float64).softmax(0).tolist() for client, mine in every.items()}
        return _moved(updates, base, before, models, uses), {"models": models, "logits": now, "stages": stages}


@dataclass(frozen=True)
class SoftClusters(Identity):
    """Keeps `count` models, each a mean of the clients' own models, and broadcasts all of them; see `fedsoft`.

    A client's share of model s is the extra "shareS". A model whose shares are all at most `floor` stays as it is.
    """

    count: Count = 2
    first: First = "groups"
    noise: NonNegative = 1.0
    floor: float = 1e-4

    @cached_property
    def traits(self) -> Traits:
        extras = _shares(self.count)
        reads = {"X", "base", "weight"}.union(f"extra:{name}" for name in extras)
        return Traits("matrix", reads, writes=_names(self.count, self.first), presence="coupled", extras=extras)

    def init(self, layout: Layout) -> State:
        return {"models": []}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        return _to_all(state["models"], clients)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates, state
        if not state["models"]:
            mean = weighted_mean(updates.replace(coef=None))
            return updates, {"models": first_models(updates, mean, self.count, self.first, self.noise, ctx)}
        X, base = updates.X, updates.start
        models = []
        for j, model in enumerate(state["models"]):
            share = torch.tensor([float(u) for u in updates.extra[f"share{j}"]], dtype=torch.float64)
            if float(share.max()) > self.floor:
                seen = updates.replace(
                    X=X + (base - model), weight=share.to(updates.weight) * updates.weight, coef=None
                )
                model = model + weighted_mean(seen)
            models.append(model)
        return updates, {"models": models}


def cluster_losses(view: View, count: int) -> Tensor:
    """Return loss of each training example under each broadcast model (count x n); `view.params` stays as it was."""
    own = view.params.clone()
    losses = []
    for j in range(count):
        take(view, j)
        losses.append(view.losses())
    view.params.copy_(own)
    return torch.stack(losses).nan_to_num(nan=float("inf"))


def take(view: View, j: int) -> None:
    """Put broadcast model `j` in the place of the shared parameters."""
    for s in view.shared:
        view.params[s] = view.broadcast[f"cluster{j}"][s]


@dataclass(frozen=True)
class _OfModels(LocalRule):
    """A rule that needs `count` broadcast models."""

    count: int = 2

    @property
    def needs(self) -> Fields:
        return frozenset(f"broadcast:cluster{j}" for j in range(self.count))


@dataclass(frozen=True)
class BestCluster(_OfModels):
    """Starts from the broadcast model with the smallest loss on the client's training data; sends its number (IFCA).

    The first of equal losses counts. Blocks that are not shared stay at the client. Sends -1 without models.
    """

    provides = frozenset({"extra:cluster"})

    def begin(self, view: View, state: State) -> State:
        if "cluster0" not in view.broadcast:
            return {"cluster": -1}
        j = int(cluster_losses(view, self.count).mean(dim=1).argmin())
        take(view, j)
        return {"cluster": j}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return {}, {"cluster": float(state["cluster"])}


@dataclass(frozen=True)
class DrawnCluster(_OfModels):
    """Trains one broadcast model, drawn anew in each round, on the examples that it fits best of all; see `fedspd`.

    Sends its number, and the share of the examples that each model fits best. Without models it trains on all examples
    and sends -1, with equal shares.
    """

    least: int = 10

    @property
    def provides(self) -> Fields:
        return frozenset({"extra:cluster"}.union(f"extra:share{j}" for j in range(self.count)))

    def begin(self, view: View, state: State) -> State:
        if "cluster0" not in view.broadcast:
            return {"cluster": -1, "shares": [1 / self.count] * self.count}
        best = cluster_losses(view, self.count).argmin(dim=0)
        won = torch.bincount(best, minlength=self.count)
        fit = (won >= self.least).nonzero().flatten().tolist() or [int(won.argmax())]
        j = fit[int(torch.randint(len(fit), ()))]  # local training has its own stream of random numbers
        take(view, j)
        view.chosen = (best == j).nonzero().flatten()
        return {"cluster": j, "shares": (won.double() / max(len(best), 1)).tolist()}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        shares = {f"share{j}": share for j, share in enumerate(state["shares"])}
        return {}, {"cluster": float(state["cluster"]), **shares}


@dataclass(frozen=True)
class SoftAnchors(_OfModels):
    """Adds (lam/2) sum_s u_s |y - c_s|^2 to the loss, c_s the broadcast models; sends the shares u_s; see `fedsoft`.

    Only rounds in which the client receives models count for `every`.
    """

    lam: float = 0.1
    every: int = 2
    floor: float = 1e-4

    @property
    def provides(self) -> Fields:
        return frozenset(f"extra:share{j}" for j in range(self.count))

    def init(self, base: Tensor) -> State:
        return {"shares": [1 / self.count] * self.count, "rounds": 0}

    def begin(self, view: View, state: State) -> State:
        if "cluster0" not in view.broadcast:
            return state
        shares = state["shares"]
        if state["rounds"] % self.every == 0:
            best = cluster_losses(view, self.count).argmin(dim=0)
            won = torch.bincount(best, minlength=self.count).double() / max(len(best), 1)
            shares = won.clamp(min=self.floor).tolist()
        pull = torch.zeros_like(view.params)
        for j, share in enumerate(shares):
            pull += share * view.broadcast[f"cluster{j}"]
        return {"shares": shares, "rounds": state["rounds"] + 1, "pull": pull}

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or "pull" not in state:
            return
        total = sum(state["shares"])
        for s in view.shared:
            view.grad[s].add_(total * view.params[s] - state["pull"][s], alpha=self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        kept = {"shares": state["shares"], "rounds": state["rounds"]}
        return kept, {f"share{j}": share for j, share in enumerate(state["shares"])}
