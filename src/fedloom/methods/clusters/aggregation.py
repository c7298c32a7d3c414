"""Clients grouped by their models or updates (MaT-FL, CFL, FDSE's erasers) or by tasks (ColNet, FedPMT); FedBone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.combine import Aggregation
from fedloom.core.context import Ctx, State
from fedloom.core.gram import gram, inner_products, nonzero
from fedloom.core.grouping import grouped
from fedloom.core.layout import Layout
from fedloom.core.mean import Mean, ModelMix
from fedloom.core.outline import Box
from fedloom.core.stage import Stage, Traits, inner
from fedloom.core.updates import Updates, columns_here
from fedloom.methods import clusters as settings
from fedloom.methods.conflict.aggregation import PCGrad
from fedloom.methods.peers.config import Safeguards
from fedloom.methods.peers.safeguards import conflict_averse_mix
from fedloom.training.rules import within

Linkage = Literal["average", "complete", "single"]


def cosines(G: Tensor) -> Tensor:
    """Return cosines of rows (K x K) from their Gram matrix; a row that is zero has cosine 0 with all others."""
    some = nonzero(G)
    norms = torch.where(some, G.diagonal().clamp(min=0).sqrt(), math.inf)
    C = (G / norms[:, None] / norms).clamp(-1.0, 1.0)
    return C.fill_diagonal_(1.0) if len(C) else C


def agglomerate(D: Tensor, groups: int, linkage: Linkage) -> list[list[int]]:
    """Return positions in groups: the two groups with the smallest distance are merged until `groups` are left.

    The distance of groups is the mean, the largest ("complete") or the smallest ("single") over their pairs; of equal
    ones the first counts. Groups are in the order of their first members.
    """
    parts = [[i] for i in range(len(D))]
    D = D.double().clone()
    while len(parts) > max(groups, 1):
        k = len(parts)
        upper = torch.where(torch.ones(k, k, dtype=torch.bool).triu(1), D, math.inf)
        a, b = divmod(int(upper.argmin()), k)
        m, n = len(parts[a]), len(parts[b])
        if linkage == "average":
            D[a] = (m * D[a] + n * D[b]) / (m + n)
        else:
            D[a] = (torch.maximum if linkage == "complete" else torch.minimum)(D[a], D[b])
        D[:, a] = D[a]
        rest = [i for i in range(k) if i != b]
        D = D[rest][:, rest]
        parts[a] = sorted(parts[a] + parts[b])
        del parts[b]
    return parts


def models(updates: Updates) -> Tensor:
    """Return the trained models base + X (K x d); zero in blocks that a row lacks, of which the base says nothing."""
    return updates.X if updates.base is None else within(updates.replace(X=updates.X + updates.base)).X


def for_members(updates: Updates, moves: Mapping[str, Tensor]) -> Updates:
    """Return a result with one row (d) for each of these clients, absent ones too."""
    n = dict(zip((client for client, _ in updates.rows), updates.n.tolist(), strict=True))
    sizes = torch.tensor([n.get(client, 0.0) for client in sorted(moves)], dtype=torch.float64)
    rows = tuple((client, None) for client in sorted(moves))
    X = torch.stack([moves[client] for client in sorted(moves)]) if moves else updates.X[:0]
    return Updates(updates.layout, rows, X, sizes, sizes)


@dataclass(frozen=True)
class SimilarGroups(settings.SimilarGroupsSettings, ModelMix):
    """Means of groups: each row gets the weighted mean of its group's trained models, anew each round; see `matfl`."""

    traits = Traits("matrix", reads={"X", "base", "weight"}, separable=True, presence="coupled")

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        k = len(updates)
        if self.soft:
            M = (self._cosines(updates) + self.threshold).clamp(min=0)
        else:
            M = torch.zeros(k, k, dtype=torch.float64)
            few = 1 < self.groups < k
            D = 1 - self._cosines(updates) if few else torch.zeros(k, k, dtype=torch.float64)
            for part in agglomerate(D, self.groups, "average"):
                index = torch.tensor(part)
                M[index[:, None], index] = 1.0
        M = M * updates.weight.cpu()
        total = M.sum(dim=1, keepdim=True)
        return torch.where(total > 0, M / total, torch.eye(k, dtype=torch.float64))

    def _cosines(self, updates: Updates) -> Tensor:
        if self.source == "update":
            return cosines(gram(updates))
        W = models(updates)
        return cosines(gram(updates.replace(X=W - W.mean(dim=0))))


@dataclass(frozen=True)
class SplittingClusters(Aggregation):
    """One model for all, then one per cluster: a cluster whose members' updates conflict is split in two (CFL).

    The method `cfl` says when; the parts are those of `bipartition`. Then `stage` runs in each cluster, and all members
    get its result, absent ones too. Before the first split there is one row for everyone.
    """

    eps1: float = 0.2
    eps2: float = 0.4
    start: int = 20
    relative: bool = True
    linkage: Literal["single", "complete"] = "single"
    stage: Stage = Mean()

    @cached_property
    def traits(self) -> Traits:
        traits = Traits.around(inner(self))
        return replace(traits, kind="matrix", reads=traits.reads | {"weight"}, presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"clusters": {"0": []}, "reference": 0.0, "stages": {"0": self.stage.init(layout)}}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates.reduced(updates.X.new_zeros(updates.layout.d)), state
        clients = [client for client, _ in updates.rows]
        known = {client for members in state["clusters"].values() for client in members}
        clusters = {name: list(members) for name, members in state["clusters"].items()}
        first = min(clusters)
        clusters[first] = sorted({*clusters[first], *(c for c in clients if c not in known)})
        stages = dict(state["stages"])
        G = gram(updates)
        reference = state["reference"] or float(G.diagonal().clamp(min=0).sqrt().mean())
        if ctx.round > self.start:
            everybody = len(clusters) > 1 or len(clusters[first]) >= (ctx.population or 0)
            for name, members in sorted(clusters.items()):
                here = [clients.index(c) for c in members if c in clients]
                if not everybody or len(here) < len(members) or len(here) < 3:
                    continue
                if self._pull_apart(G[here][:, here], updates.weight[here].cpu(), reference):
                    parts = bipartition(members, cosines(G[here][:, here]), self.linkage)
                    del clusters[name]
                    inner = stages.pop(name)
                    for digit, part in zip("01", parts, strict=True):
                        clusters[name + digit], stages[name + digit] = part, inner
                    ctx.log("cluster split", {"cluster": name, "parts": parts})
        moves: dict[str, Tensor] = {}
        for name, members in sorted(clusters.items()):
            here = [i for i, c in enumerate(clients) if c in members]
            if not here:
                continue
            out, stages[name] = self.stage(updates.keep(here), stages[name], ctx)
            moves |= dict.fromkeys(members, out.X[0])
        new = {"clusters": dict(sorted(clusters.items())), "reference": reference, "stages": stages}
        return (out if len(clusters) == 1 else for_members(updates, moves)), new

    def _pull_apart(self, G: Tensor, weight: Tensor, reference: float) -> bool:
        """Return whether the mean is short although some row is long."""
        unit = reference if self.relative else 1.0
        p = weight / weight.sum()
        mean = math.sqrt(max(float(p @ G @ p), 0.0))
        longest = math.sqrt(max(float(G.diagonal().max()), 0.0))
        return mean < self.eps1 * unit and longest > self.eps2 * unit

    @property
    def boxes(self) -> tuple[Box, ...]:
        unit = " of the first round's mean norm" if self.relative else ""
        when = f"from round {self.start + 1} split if |mean| < {self.eps1} and max norm > {self.eps2}{unit}, "
        when += f"by {self.linkage} linkage"
        return (Box(f"in each cluster ({when})", inside=self.stage.boxes),)


def bipartition(
    members: Sequence[str], C: Tensor, linkage: Literal["single", "complete"] = "single"
) -> tuple[list[str], list[str]]:
    """Return clients (at least two) in two groups by their cosines C, in the order of `members` (CFL).

    Single linkage makes the largest cosine across the groups the smallest of all bipartitions; complete does not.
    """
    a, b = agglomerate(-C, 2, linkage)
    return [members[i] for i in a], [members[i] for i in b]


def cosine_mixing(G: Tensor, tau: float) -> Tensor:
    """Return W (K x K, rows sum to 1): row k is the softmax over j of cos(k, j) / tau, from the rows' Gram matrix."""
    return torch.softmax(cosines(G) / tau, 1)


@dataclass(frozen=True)
class CosineMix(settings.CosineMixSettings, ModelMix):
    """Every trained model w = base + X becomes sum_j W_kj w_j, W_k = softmax over j of cos(w_k, w_j) / tau.

    Models are compared in the blocks that they have. A zero model has cosine 0 with all others. Only participants are
    mixed, and weights play no part. See `fdse`.
    """

    traits = Traits("matrix", reads={"X", "base"}, separable=True, presence="row")

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        return cosine_mixing(gram(updates.replace(X=models(updates))), self.tau)


@dataclass(frozen=True)
class TaskLeaders(settings.TaskLeadersSettings, Stage):
    """One model per group of clients with equal tasks; group leaders exchange updates; see `colnet`.

    U is that of `conflict_averse_mix`; it is left out if there is only one group. `safeguards`: see `fedloom.peers`.
    """

    safeguards: Safeguards = Safeguards(clip=None, ridge=None, ema=None)
    traits = Traits("matrix", reads={"X", "base", "extra:tasks"}, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) < 2:
            return updates, state
        members = dict(sorted(grouped((str(tasks), i) for i, tasks in enumerate(updates.extra["tasks"])).items()))
        moves = {task: updates.X[rows].mean(0) for task, rows in members.items()}
        ends = dict(moves)
        if len(members) > 1 and self.alpha > 0:
            for task in members:
                mixed = conflict_averse_mix(task, moves, c=self.c, safeguards=self.safeguards)
                ends[task] = moves[task] + self.alpha * mixed.update
        out = torch.empty_like(updates.X)
        for task, rows in members.items():
            for i in rows:
                # from the row's own start to the group's start, and then along the group's update
                apart = 0.0 if updates.base is None else updates.base[rows].sub(updates.base[i]).mean(0)
                out[i] = ends[task] + apart
        return updates.replace(X=out), state


@dataclass(frozen=True)
class SingleTaskModels(settings.SingleTaskModelsSettings, ModelMix):
    """Each row gets the mean of its tasks' models; that of a task is a mean of all trained models; see `fedpmt`."""

    traits = Traits("mix", reads={"X", "base", "weight", "extra:tasks"}, presence="row")

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        held = [str(tasks).split(",") for tasks in updates.extra["tasks"]]
        names = sorted({task for tasks in held for task in tasks})
        holds = torch.tensor([[task in tasks for task in names] for tasks in held], dtype=torch.float64)
        parts = (holds + self.attenuation * (1 - holds)) * updates.weight.cpu()[:, None]
        of_task = parts / parts.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        return holds / holds.sum(1, keepdim=True) @ of_task.t()


def agreement(updates: Updates, direction: Tensor) -> Tensor:
    """Return cosine of each row with a vector (d), as K numbers in float64; 0 where either is zero."""
    G, inner = inner_products(updates, direction)
    square = torch.linalg.vector_norm(direction, dtype=torch.float64).square().cpu()
    norms = G.diagonal().clamp(min=0).sqrt() * columns_here().total(square.reshape(1)).sqrt()
    return torch.where(nonzero(G) & (norms > 0), inner / norms, 0.0).clamp(-1.0, 1.0)


@dataclass(frozen=True)
class HistoryAttention(settings.HistoryAttentionSettings, Aggregation):
    """Multiplies row k by K a_k, a = softmax(cos(X_k, H) / temperature), before `stage`, whose past results H averages.

    See `fedbone`. In the first round rows pass bit for bit.
    """

    heading = "rows weighed by attention on past updates, beta {beta}, temperature {temperature}"
    stage: Stage = PCGrad() >> Mean()

    @cached_property
    def traits(self) -> Traits:
        return replace(Traits.around(inner(self), reduces=True), presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"history": torch.zeros(layout.d), "stage": self.stage.init(layout)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        k = len(updates)
        history = columns_here().cut(updates.layout, state["history"]).to(updates.data)
        if k and bool(state["history"].any()):
            share = torch.softmax(agreement(updates, history) / self.temperature, dim=0)
            updates = updates.mixed(torch.diag(k * share))
        out, inner = self.stage(updates, state["stage"], ctx)
        history = self.beta * history + (1 - self.beta) * out.X[0]
        return out, {"history": columns_here().join(updates.layout, history), "stage": inner}
