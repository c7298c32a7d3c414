"""The local rule of peers that lower their learning rates by their own validation losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.core.context import State
from fedloom.methods.peers import PlateauSettings
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class Plateau(PlateauSettings, LocalRule):
    """Multiplies a client's learning rate by `factor` after `patience` rounds without a lower validation loss."""

    validation = True

    def init(self, base: Tensor) -> State:
        """Return the state of a client that has not measured any model."""
        return {"best": math.inf, "waited": 0, "scale": 1.0}

    def begin(self, view: View, state: State) -> State:
        """Measure the received model, and set the learning rate of the round."""
        assert view.validate is not None
        loss, best = math.fsum(view.validate().values()), float(state["best"])
        better = loss < best * (1 - self.min_delta)
        waited, scale = 0 if better else int(state["waited"]) + 1, float(state["scale"])
        if waited == self.patience:
            waited, scale = 0, scale * self.factor
        view.scale *= scale
        return {"best": loss if better else best, "waited": waited, "scale": scale}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Keep the state for the next round."""
        return state, {}
