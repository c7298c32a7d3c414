"""Differential privacy of clients: rows of bounded norm, and noise that hides any one of them.

The Gaussian mechanism of DP-FedAvg (McMahan, Ramage, Talwar, Zhang, ICLR 2018) with a fixed denominator. What it costs
is counted in `fedloom.rounds.privacy`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.stages.mean import block_groups
from fedloom.stages.stage import Stage, Traits


def bounded(updates: Updates, clip: float) -> Tensor:
    """Factors (K, float64) by which no row is longer than `clip`."""
    return clip / updates.norms.clamp(min=clip)


@dataclass(frozen=True)
class Bounded(Stage):
    """Scale each row down to a norm of at most `clip`."""

    clip: float
    traits = Traits(presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=updates.X * bounded(updates, self.clip)[:, None].to(updates.X)), state


@dataclass(frozen=True)
class RowNoise(Stage):
    """Add Gaussian noise of standard deviation noise x clip to what each row has; `Bounded` comes before it."""

    clip: float
    noise: float
    traits = Traits(presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        out = updates.X.clone()
        for k, row in enumerate(updates.rows):
            drawn = torch.randn(updates.layout.d, generator=ctx.hidden("row noise", *row)).to(out)
            for i, s in enumerate(updates.layout.slices):
                if updates.present is None or bool(updates.present[k, i]):
                    out[k, s] += self.noise * self.clip * drawn[s]
        return updates.replace(X=out), state


@dataclass(frozen=True)
class PrivateMean(Stage):
    """The mean of the rows, each of a norm of at most `clip`, with Gaussian noise that hides any one of them.

    u_i = (sum_k min(1, w_k / cap) min(1, clip / |X_k|) X_ki + noise clip g_i) / (share N_i), g_i standard normal.

    N_i is the number of all clients that may have coordinate i, `share` the part of them that is expected in a round:
    the divisor does not depend on who came, or it would tell. One client moves the sum by at most `clip`, whatever it
    sends. `cap` is the weight from which a row counts fully. Acts in rounds without any row too.
    """

    clip: float
    noise: float
    share: float = 1.0
    cap: float = 1.0
    traits = Traits("mix", reads={"X", "weight"}, reduces=True, hides=True, presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        layout = updates.layout
        w = bounded(updates, self.clip) * (updates.weight / self.cap).clamp(max=1)
        groups = block_groups(layout, updates.present, None)
        out = updates.summed([(a, b, w if members is None else w * members) for a, b, members in groups])
        out += self.noise * self.clip * torch.randn(layout.d, generator=ctx.hidden("noise")).to(out)
        for block, s in zip(layout.blocks, layout.slices, strict=True):
            task = None if updates.present is None else block.task
            out[s] /= self.share * ctx.trainers(task, max(len(updates), 1))
        return updates.reduced(out), state
