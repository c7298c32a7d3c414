"""Rows weighed by how old they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class Staleness(Stage):
    """Multiplies each weight by (1 + s)^-a (the polynomial discount of FedAsync: Xie, Koyejo, Gupta, 2019).

    s is the row's extra "staleness": the receiver's local rounds that have ended since the row was made. a = 0 changes
    nothing.
    """

    a: float = 0.5
    traits = Traits(reads={"weight", "extra:staleness"}, writes={"weight"}, presence="block")

    def __post_init__(self) -> None:
        if not self.a >= 0:
            raise ValueError(f"Staleness: expected a >= 0, found {self.a}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        s = torch.tensor([float(rounds) for rounds in updates.extra["staleness"]], dtype=torch.float64)
        return updates.replace(weight=updates.weight * (1 + s).pow(-self.a)), state
