"""Local rules of clients that keep a model of their own: an anchor (FedAMP, Ditto), coupled tasks (MOCHA), an envelope
(pFedMe)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedloom.core.context import State
from fedloom.methods.personal import EnvelopeSettings, TaskCouplingSettings
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class Anchor(LocalRule):
    """Adds (mu/2) |y - u_k|^2 to the loss, u_k being the anchor: the broadcast mix of models (FedAMP), or the received
    model, for a model beside it (Ditto).

    `start` "mix" begins the round at u_k instead of the client's own model.
    """

    mu: float
    start: Literal["own", "mix"] = "own"
    needs = frozenset({"broadcast:anchor"})

    def begin(self, view: View, state: State) -> State:
        """Move to the mix, with `start` "mix"."""
        if self.start == "mix" and "anchor" in view.broadcast:
            for s in view.shared:
                view.params[s] = view.broadcast["anchor"][s]
        return state

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0 or "anchor" not in view.broadcast:
            return
        for s in view.shared:
            view.grad[s].add_(view.params[s] - view.broadcast["anchor"][s], alpha=self.mu)


@dataclass(frozen=True)
class TaskCoupling(TaskCouplingSettings, LocalRule):
    """Adds the gradient 2 lam (Omega_kk y + v_k) of lam tr(W Omega W'), the other models being frozen (MOCHA)."""

    needs = frozenset({"broadcast:relation", "broadcast:peers"})

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or "peers" not in view.broadcast:
            return
        relation = float(view.broadcast["relation"])
        for s in view.shared:
            view.grad[s].add_(relation * view.params[s] + view.broadcast["peers"][s], alpha=2 * self.lam)


@dataclass(frozen=True)
class Envelope(EnvelopeSettings, LocalRule):
    """Trains theta, the minimiser of F(theta) + (lam/2) |theta - w|^2, and moves w towards it (pFedMe).

    Each batch takes `inner` optimiser steps on theta, then w <- w - outer lam (w - theta). The update sent is that of
    w; theta is the client's personal model and is where the next round's inner steps begin.
    """

    @property
    def repeat(self) -> int:
        return self.inner

    def begin(self, view: View, state: State) -> State:
        """Return w as received and theta as it was. Raises ValueError if the steps cannot be stable."""
        rate = view.optimizer.lr * self.lam
        if view.optimizer.name == "sgd" and rate >= 2:
            raise ValueError(
                f"pFedMe needs learning rate x lam below 2, found {view.optimizer.lr} x {self.lam} = {rate}"
            )
        if "personal" in state:
            view.params.copy_(state["personal"])
        return {"w": view.base.clone()}

    def grad(self, view: View, state: State) -> None:
        if view.step and view.step % self.inner == 0:
            self._move(view, state)
        for s in view.trained:
            view.grad[s].add_(view.params[s] - state["w"][s], alpha=self.lam)

    def _move(self, view: View, state: State) -> None:
        for s in view.trained:
            state["w"][s].lerp_(view.params[s], self.outer * self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state with theta; w is the client's model."""
        if view.step:
            self._move(view, state)
        theta = view.params.clone()
        view.params.copy_(state["w"])
        return {"personal": theta}, {}

    def personal(self, state: State) -> Tensor | None:
        """Return theta."""
        theta: Tensor = state["personal"]
        return theta
