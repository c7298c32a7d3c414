"""Each model becomes a mean of all models, weighted by cosine similarity (FDSE's erasers)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.maths.gram import gram
from fedloom.stages.clusters import cosines, mixed_models, models
from fedloom.stages.stage import Stage, Traits


def cosine_mixing(G: Tensor, tau: float) -> Tensor:
    """W (K x K, rows sum to 1): row k is the softmax over j of cos(k, j) / tau, from the rows' Gram matrix."""
    return torch.softmax(cosines(G) / tau, 1)


@dataclass(frozen=True)
class CosineMix(Stage):
    """Every trained model w = base + X becomes sum_j W_kj w_j, W_k = softmax over j of cos(w_k, w_j) / tau.

    Similarity compares the models, not the updates (FDSE, CVPR 2025, tensor by tensor), in the blocks that they have. A
    small tau mixes only similar models; a large one makes all equal. A zero model has cosine 0 with all others. Only
    participants are mixed, and weights play no part.
    """

    tau: float = 0.5
    traits = Traits("matrix", reads={"X", "base"}, separable=True, presence="row")

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau: expected a number above 0, found {self.tau}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) < 2:
            return updates, state
        W = cosine_mixing(gram(updates.replace(X=models(updates))), self.tau)
        return updates.replace(X=mixed_models(updates, W)), state
