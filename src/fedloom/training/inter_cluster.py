"""The regulariser between groups of peers, as a local rule."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.core.context import State
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class InterCluster(LocalRule):
    """Adds mu/2 |y - o|^2 to the loss, o being the mean of models of other groups (`peers.inter_cluster_penalty`).

    The broadcast has `others` = o and `pull`, which is mu if there are such models and 0 otherwise. Without a broadcast
    the rule does nothing.
    """

    mu: float
    needs = frozenset({"broadcast:others", "broadcast:pull"})

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"mu: expected a number of at least 0, found {self.mu}")

    def grad(self, view: View, state: State) -> None:
        if "pull" not in view.broadcast:
            return
        for s in view.shared:
            view.grad[s].addcmul_(view.broadcast["pull"][s], view.params[s] - view.broadcast["others"][s])
