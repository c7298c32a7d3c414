"""Several models at the server; each client uses one of them (IFCA) or a mix (FedSoft)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.foreign import Number
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.updates import Updates
from fedloom.maths.gram import gram
from fedloom.stages.clusters import agglomerate, cosines, for_members
from fedloom.stages.combine import Aggregation
from fedloom.stages.mean import Mean, weighted_mean
from fedloom.stages.stage import Identity, Stage, Traits

First = Literal["groups", "noise"]


def first_models(updates: Updates, update: Tensor, count: int, first: First, noise: float, ctx: Ctx) -> list[Tensor]:
    """`count` different models (d) after a round in which all rows started from the same one.

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
        draw = torch.randn(len(update), generator=ctx.rng("cluster", j), dtype=update.dtype)
        models.append(start + update + size * draw.to(update.device))
    return models


def _check(count: int, first: str, noise: float) -> None:
    if count < 1:
        raise ValueError(f"count: expected at least 1, found {count}")
    if first not in ("groups", "noise"):
        raise ValueError(f"first: expected 'groups' or 'noise', found {first!r}")
    if not noise >= 0:
        raise ValueError(f"noise: expected a number of at least 0, found {noise}")


def _names(count: int) -> set[str]:
    return {f"broadcast:cluster{j}" for j in range(count)}


def _to_all(models: Sequence[Tensor], clients: Sequence[str]) -> dict[str, Broadcast]:
    every = {f"cluster{j}": model for j, model in enumerate(models)}
    return {client: dict(every) for client in clients}


@dataclass(frozen=True)
class ChosenClusters(Aggregation):
    """Keeps `count` models, broadcasts all, and moves each with the rows of the clients that chose it (IFCA).

    The choice is the extra "cluster". The first round has one model for all, with `stage`; then the models part (see
    `first_models`). From then on `stage` gets each row relative to its chosen model. All members of a cluster get its
    model, absent ones too; a model that no client chose stays as it is.
    """

    count: int = 2
    first: First = "groups"
    noise: float = 1.0
    stage: Stage = Mean()

    def __post_init__(self) -> None:
        _check(self.count, self.first, self.noise)
        if not self.stage.traits.reduces:
            raise ValueError(f"ChosenClusters: {self.stage!r} leaves a row for each client, a cluster has one model")
        self._close("ChosenClusters")

    @cached_property
    def traits(self) -> Traits:
        inner = Traits.around(self.inner)
        reads = inner.reads | {"base", "extra:cluster"}
        extras = {**inner.extras, "cluster": Number(-1, self.count - 1, whole=True)}
        broadcasts = _names(self.count)
        return Traits("matrix", reads, wants=inner.wants, broadcasts=broadcasts, presence="coupled", extras=extras)

    def init(self, layout: Layout) -> State:
        """No models yet."""
        return {"models": [], "members": {}, "stages": [self.stage.init(layout)] * self.count}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """All models; nothing before there are any."""
        return _to_all(state["models"], clients)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates.reduced(updates.X.new_zeros(updates.layout.d)), state
        if not state["models"]:
            out, inner = self.stage(updates, state["stages"][0], ctx)
            models = first_models(updates, out.X[0], self.count, self.first, self.noise, ctx)
            return out, {"models": models, "members": {}, "stages": [inner] * self.count}
        base = torch.zeros_like(updates.X) if updates.base is None else updates.base
        clients = [client for client, _ in updates.rows]
        # one that says that it had no models, -1, counts to the first
        chosen = [max(int(j), 0) for j in updates.extra["cluster"]]
        members = dict(sorted({**state["members"], **dict(zip(clients, chosen, strict=True))}.items()))
        models, stages = list(state["models"]), list(state["stages"])
        moves: dict[str, Tensor] = {}
        for j in range(self.count):
            here = [i for i, mine in enumerate(chosen) if mine == j]
            if not here:
                continue
            rows = updates.keep(here)
            out, stages[j] = self.stage(rows.replace(X=rows.X + (base[here] - models[j])), stages[j], ctx)
            models[j] = models[j] + out.X[0]
            moves |= {client: out.X[0] for client, mine in members.items() if mine == j}
            moves |= {clients[i]: models[j] - base[i] for i in here}
        return for_members(updates, moves), {"models": models, "members": members, "stages": stages}

    @property
    def boxes(self) -> tuple[Box, ...]:
        first = f"{self.count} clusters, first from {self.first}"
        return (Box(f"in each cluster that clients choose ({first})", inside=self.stage.boxes),)


@dataclass(frozen=True)
class SoftClusters(Identity):
    """Keeps `count` models c_s, each a mean of the clients' own models, and broadcasts all of them (FedSoft).

    c_s = sum_k v_ks w_k over the participants, v_ks proportional to u_ks `weight`_k, with the client's share u_ks of
    model s in the extra "shareS". A model whose shares are all at most `floor` stays as it is. The models part after
    the first round (see `first_models`).
    """

    count: int = 2
    first: First = "groups"
    noise: float = 1.0
    floor: float = 1e-4

    def __post_init__(self) -> None:
        _check(self.count, self.first, self.noise)

    @cached_property
    def traits(self) -> Traits:
        extras = {f"share{j}": Number(0, 1) for j in range(self.count)}
        reads = {"X", "base", "weight"}.union(f"extra:{name}" for name in extras)
        broadcasts = _names(self.count)
        return Traits("matrix", reads, writes=set(), broadcasts=broadcasts, presence="coupled", extras=extras)

    def init(self, layout: Layout) -> State:
        """No models yet."""
        return {"models": []}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """All models; nothing before there are any."""
        return _to_all(state["models"], clients)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates, state
        if not state["models"]:
            mean = weighted_mean(updates.replace(coef=None))
            return updates, {"models": first_models(updates, mean, self.count, self.first, self.noise, ctx)}
        X, base = updates.X, torch.zeros_like(updates.X) if updates.base is None else updates.base
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
