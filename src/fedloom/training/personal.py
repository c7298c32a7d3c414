"""Local rules of clients that keep a model of their own: an anchor (FedAMP), coupled tasks (MOCHA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedloom.stages.stage import State
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class Anchor(LocalRule):
    """Adds (mu/2) |y - u_k|^2 to the loss, u_k being the mix of models that the server tells (FedAMP).

    `start` "mix" begins the round at u_k instead of the client's own model.
    """

    mu: float
    start: Literal["own", "mix"] = "own"
    needs = frozenset({"told:anchor"})

    def begin(self, view: View, state: State) -> State:
        """Move to the mix, where that is wanted."""
        if self.start == "mix" and "anchor" in view.told:
            for s in view.shared:
                view.params[s] = view.told["anchor"][s]
        return state

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0 or "anchor" not in view.told:
            return
        for s in view.shared:
            view.grad[s].add_(view.params[s] - view.told["anchor"][s], alpha=self.mu)


@dataclass(frozen=True)
class TaskCoupling(LocalRule):
    """Adds the gradient 2 lam (Omega_kk y + v_k) of lam tr(W Omega W'), the other models being frozen (MOCHA)."""

    lam: float
    needs = frozenset({"told:relation", "told:peers"})

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or "peers" not in view.told:
            return
        relation = float(view.told["relation"])
        for s in view.shared:
            view.grad[s].add_(relation * view.params[s] + view.told["peers"][s], alpha=2 * self.lam)
