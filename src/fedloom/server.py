"""What a server does with an aggregated update: ServerRule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.stages.stage import State


class ServerRule:
    """Works on one model vector (d) at a time, so alike for one global model and for personal ones."""

    def init(self, model: Tensor) -> State:
        """State of one recipient's model before its first update."""
        return {}

    def dispatch(self, model: Tensor, state: State) -> Tensor:
        """The vector to send, given the model."""
        return model

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        """The model after an update (new minus old), and the new state."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(ServerRule):
    """model + step * update (step 1 is FedAvg)."""

    step: float = 1.0

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        return model + (update if self.step == 1 else self.step * update), state
