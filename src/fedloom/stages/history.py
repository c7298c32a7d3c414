"""Rows weighed by how well they agree with the updates of past rounds (FedBone)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.spread import cut, join, total
from fedloom.core.updates import Updates
from fedloom.maths.gram import gram, nonzero
from fedloom.stages.combine import Aggregation
from fedloom.stages.conflict import PCGrad
from fedloom.stages.mean import Mean
from fedloom.stages.stage import Stage, Traits

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
        return replace(Traits.around(self.inner, reduces=True), presence="coupled")

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
