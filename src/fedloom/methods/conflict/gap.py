"""Losses that a client measures before and after its training (FedGA).

Weights learned from the losses that clients measure: FedGA, FAMO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.core.context import Ctx, State, row_key
from fedloom.core.stage import Stage, Traits
from fedloom.core.untrusted import Number
from fedloom.core.updates import Updates
from fedloom.methods.conflict import GapWeightsSettings, LossWeightsSettings
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class ValidationLosses(LocalRule):
    """Provides the validation loss of the model as received and as trained, summed over the client's tasks."""

    validation = True
    provides = frozenset({"extra:loss_received", "extra:loss_trained"})

    def begin(self, view: View, state: State) -> State:
        """Return the received model's loss."""
        return {"received": self._loss(view)}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Both losses; nothing is kept."""
        return {}, {"loss_received": state["received"], "loss_trained": self._loss(view)}

    @staticmethod
    def _loss(view: View) -> float:
        assert view.validate is not None
        return math.fsum(view.validate().values())


def adjusted(
    weights: Mapping[str, float], gaps: Mapping[str, float], step: float, floor: float = 0.0
) -> dict[str, float]:
    """Weights after one adjustment: a_k + step gap_k / max_j |gap_j|, cut to [floor, 1], made to sum to 1 (FedGA).

    `gaps` may cover only some of the clients; a positive gap means that aggregation hurts the client. So a client that
    suffers gains weight.
    """
    largest = max((abs(g) for g in gaps.values()), default=0.0)
    if not largest > 0:
        return dict(weights)
    moved = {k: min(1.0, max(floor, w + step * gaps.get(k, 0.0) / largest)) for k, w in weights.items()}
    total = math.fsum(moved.values())
    return {k: w / total for k, w in moved.items()} if total > 0 else dict(weights)


@dataclass(frozen=True)
class GapWeights(GapWeightsSettings, Stage):
    """Writes weights that follow the generalisation gap; the method `fedga` has the equations.

    The client measures the aggregated model's loss when it receives the next one, so the weights of a round stem from
    the gaps of the round before; only clients that took part in both rounds have one.
    """

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
        weights = {**dict.fromkeys(clients, 1 / n), **state.get("weights", {})}
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
        weights = adjusted(weights, gaps, self.step * left / n, self.floor)
        memory = {client: {"round": ctx.round, "loss": trained[client]} for client in clients}
        now = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        new = {"weights": weights, "trained": {**state.get("trained", {}), **memory}}
        return updates.replace(weight=now), new


@dataclass(frozen=True)
class LossWeights(LossWeightsSettings, Stage):
    """Writes weights under which the logarithms of all clients' losses fall alike; see the add-on `famo`.

    Sums run over the clients that were also there in the round before. A loss below 1e-8 counts as 1e-8; one that is
    not finite gives no weight and moves nothing.
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
    """One step of Adam with its usual constants (0.9, 0.999, 1e-8) on xi."""
    mean, square = 0.9 * state["mean"] + 0.1 * slope, 0.999 * state["square"] + 0.001 * slope * slope
    steps = state["steps"] + 1
    size = math.sqrt(square / (1 - 0.999**steps)) + 1e-8
    return {"xi": state["xi"] - step * mean / (1 - 0.9**steps) / size, "mean": mean, "square": square, "steps": steps}
