"""Weights learned from what aggregation costs each client (FedGA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.core.context import Ctx, State, row_key
from fedloom.core.foreign import Number
from fedloom.core.updates import Updates
from fedloom.stages.stage import Stage, Traits


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
class GapWeights(Stage):
    """Writes weights that follow the generalisation gap (FedGA, Zhang et al., CVPR 2023).

    The gap of a round is a client's loss under the aggregated model minus its loss under its own trained model, both on
    its validation data. The client measures the first when it receives the next model, so the weights of a round stem
    from the gaps of the round before; only clients that took part in both rounds have one. The step falls linearly to 0
    over the run's rounds, if their number is known.

    relative  divide the gap by the trained model's loss, because losses of different tasks have different scales
    centre    subtract the mean gap first
    floor     smallest weight before normalising; 0 can silence a client for good
    """

    step: float = 0.2
    relative: bool = True
    centre: bool = False
    floor: float = 0.0
    traits = Traits(
        "mix",
        reads={"extra:loss_received", "extra:loss_trained"},
        writes={"weight"},
        paced=True,
        separable=True,
        presence="coupled",
        extras={"loss_received": Number(), "loss_trained": Number()},
    )

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        clients = [row_key(row) for row in updates.rows]
        n = ctx.population or len(clients)
        weights = {**dict.fromkeys(clients, 1 / max(n, 1)), **state.get("weights", {})}
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
        weights = adjusted(weights, gaps, self.step * left / max(n, 1), self.floor)
        memory = {client: {"round": ctx.round, "loss": trained[client]} for client in clients}
        now = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        new = {"weights": weights, "trained": {**state.get("trained", {}), **memory}}
        return updates.replace(weight=now), new
