"""The one extension point of local training: LocalRule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom.stages.stage import Fields, State
from fedloom.updates import Columns


@dataclass
class View:
    """What a rule sees at a local step. Vectors run over the model's parameters (p), or are K x p when clients
    are trained stacked: write rules for the last dimension.

    params   parameters now (writing to it changes the model)
    grad     gradient of the loss at `params`; rules edit it in place
    base     parameters at the start of the round
    shared   columns that are aggregated, as slices of the last dimension
    lr       learning rate of this step
    step     local steps taken before this one
    outputs, targets   of the batch, by task; empty when stacked
    """

    params: Tensor
    grad: Tensor
    base: Tensor
    shared: tuple[Columns, ...]
    lr: float = 0.0
    step: int = 0
    outputs: Mapping[str, Tensor] | None = None
    targets: Mapping[str, Tensor] | None = None


class LocalRule:
    """Something a method adds to local training. Rules add up; none may assume that it is alone.

    `provides` names the extras ("extra:NAME") that `finish` returns. `stackable` says that the rule consists of
    `grad` alone, without state, so that it also works on stacked clients.
    """

    provides: Fields = frozenset()
    stackable: bool = False

    def init(self, base: Tensor) -> State:
        """The client's state before its first round."""
        return {}

    def penalty(self, view: View, state: State) -> Tensor | None:
        """A scalar to add to the loss, or None."""
        return None

    def grad(self, view: View, state: State) -> None:
        """Edit `view.grad` in place, after the backward pass and before clipping."""

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """The client's state after the round, and extras to send (name -> value of this client)."""
        return state, {}


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds (mu/2) |y - base|^2 over the shared parameters to the loss (FedProx, Li et al., MLSys 2020, eq. 2).

    Its gradient mu (y - base) is added directly, so an adaptive optimiser preconditions it as any other loss.
    """

    mu: float
    stackable = True

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu: expected a number of at least 0, found {self.mu}")

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0:  # adding zeros would still turn -0.0 into 0.0
            return
        for s in view.shared:
            view.grad[..., s].add_(view.params[..., s] - view.base[..., s], alpha=self.mu)
