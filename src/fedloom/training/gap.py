"""Losses that a client measures before and after its training (FedGA)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedloom.core.context import State
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class ValidationLosses(LocalRule):
    """Provides the validation loss of the model as received and as trained, summed over the client's tasks."""

    validation = True
    provides = frozenset({"extra:loss_received", "extra:loss_trained"})

    def begin(self, view: View, state: State) -> State:
        """The received model's loss."""
        return {"received": self._loss(view)}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Both losses; nothing is kept."""
        return {}, {"loss_received": state["received"], "loss_trained": self._loss(view)}

    @staticmethod
    def _loss(view: View) -> float:
        assert view.validate is not None
        return math.fsum(view.validate().values())
