"""Peers in one matrix: each row is one peer, whose model becomes a mix of its own and its neighbours' models.

This does in one place what peers do among themselves, for comparison with methods that have a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.peers.graph import candidates, metropolis, resolved
from fedloom.peers.neighbours import soft_weights, top_k
from fedloom.peers.similarity import combined, gradient, overlap, task_weights
from fedloom.stages.clusters import mixed_models
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class Gossip(Stage):
    """Every trained model becomes a mean of itself and its neighbours (gossip; D-PSGD, Lian et al., NeurIPS 2017).

    w_k <- sum_j W_kj w_j with Metropolis weights on an undirected graph over the present rows, drawn from the run's
    seed; for `topology`, `params` and `every` see `fedloom.peers.candidates`. W is doubly stochastic, so the mean of
    the models stays. The original D-PSGD takes the gradient at the model before mixing; here peers train, then mix. On
    the complete graph all get the plain mean.

    Raises RecipeError for an unknown topology and, when called, for one that is impossible with so many rows;
    ValueError for a directed graph.
    """

    topology: str = "ring"
    params: Mapping[str, Any] = field(default_factory=dict)
    every: int = 0
    traits = Traits("matrix", reads={"X", "base"}, separable=True, presence="coupled")

    def __post_init__(self) -> None:
        if resolved(self.topology, self.params).get("directed"):
            raise ValueError(f"{self!r}: gossip needs an undirected graph; with 'directed': False it would be one")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) < 2:
            return updates, state
        names = [client for client, _ in updates.rows]
        graph = candidates(self.topology, names, seed=ctx.seed, round=ctx.round, every=self.every, **self.params)
        return updates.replace(X=mixed_models(updates, torch.from_numpy(metropolis(graph)))), state


@dataclass(frozen=True)
class SimilarityMix(Stage):
    """Every trained model becomes a mean of itself and the `top` most similar, by similarity (DFMTL thesis, 4.2-4.3).

    Similarity is `alpha` times the overlap of tasks (with equal weights, from the extra "tasks") plus 1 - `alpha` times
    (cos + 1) / 2 of the updates over the columns that the stage sees; weights are those of
    `fedloom.peers.soft_weights`. Without the extra only updates count. All peers mix the models of the same instant.
    """

    top: int = 3
    alpha: float = 0.5
    step: float = 1.0
    include_self: bool = True
    traits = Traits("matrix", reads={"X", "base"}, wants={"extra:tasks"}, presence="coupled")

    def __post_init__(self) -> None:
        if self.top < 0 or not 0 <= self.alpha <= 1 or not 0 < self.step <= 1:
            raise ValueError(f"{self!r}: expected top >= 0, 0 <= alpha <= 1 and 0 < step <= 1")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) < 2:
            return updates, state
        W = self.matrix(updates)
        names = [client for client, _ in updates.rows]
        weights = {
            name: {other: w for other, w in zip(names, row, strict=True) if w > 0}
            for name, row in zip(names, W.tolist(), strict=True)
        }
        ctx.record("mixing", {"weights": weights})
        return updates.replace(X=mixed_models(updates, W)), state

    def matrix(self, updates: Updates) -> Tensor:
        """W (K x K, float64, rows sum to 1)."""
        names = [client for client, _ in updates.rows]
        parts = {"gradient": gradient(updates.X)}
        alpha = self.alpha if "tasks" in updates.extra else 0.0
        if alpha > 0:
            held = {n: str(t).split(",") for n, t in zip(names, updates.extra["tasks"], strict=True)}
            parts["overlap"] = overlap(task_weights({n: dict.fromkeys(tasks, 1.0) for n, tasks in held.items()}))
        S = combined(parts, {"overlap": alpha, "gradient": 1 - alpha})
        W = torch.zeros(len(names), len(names), dtype=torch.float64)
        for i, own in enumerate(names):
            similarity = {other: float(S[i, j]) for j, other in enumerate(names) if j != i}
            weights = soft_weights(
                own, similarity, top_k(similarity, self.top), include_self=self.include_self, step=self.step
            )
            for j, other in enumerate(names):
                W[i, j] = weights.get(other, 0.0)
        return W
