"""Local rules against client drift: control variates (SCAFFOLD), dual variables (FedDyn), counted steps (FedNova)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.layout import Columns
from fedloom.methods.drift import DualSettings
from fedloom.training.rules import LocalRule, View


def common(a: tuple[Columns, ...], b: tuple[Columns, ...]) -> tuple[Columns, ...]:
    """Return columns that are in both."""
    both = (Columns(max(s.start, t.start), min(s.stop, t.stop)) for s in a for t in b)
    return tuple(s for s in both if s.start < s.stop)


@dataclass(frozen=True)
class ControlVariate(LocalRule):
    """Adds c - c_k to every gradient; afterwards c_k is the mean of the round's raw gradients (SCAFFOLD).

    For plain SGD that mean is option II of the paper, c_k - c + (theta - theta_k) / (tau lr); unlike option II it also
    holds under momentum, Adam, clipping and schedules. Only parameters that the client trains and shares are corrected:
    for another task's head c is not zero, but this client has no gradient there.
    """

    provides = frozenset({"auxiliary:control"})
    needs = frozenset({"broadcast:control"})

    def init(self, base: Tensor) -> State:
        """Return c_k = 0."""
        return {"control": torch.zeros_like(base)}

    def begin(self, view: View, state: State) -> State:
        """Return the correction of this round, and an empty sum of gradients."""
        correction = torch.zeros_like(view.base)
        if "control" in view.broadcast:
            for s in common(view.trained, view.shared):
                correction[s] = view.broadcast["control"][s] - state["control"][s]
        return {**state, "correction": correction, "sum": torch.zeros_like(view.base)}

    def grad(self, view: View, state: State) -> None:
        for s in common(view.trained, view.shared):
            state["sum"][s] += view.grad[s]
            view.grad[s] += state["correction"][s]

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state with the new c_k, and its change for the server."""
        new = state["sum"] / view.step if view.step else state["control"]
        return {"control": new}, {"control": new - state["control"]}


@dataclass(frozen=True)
class Dual(DualSettings, LocalRule):
    """Adds alpha <y, h_k> + (alpha/2) |y - base|^2 to the loss; afterwards h_k grows by y - base (FedDyn).

    h_k is the sum of the client's own raw updates, so -alpha h_k is the paper's gradient memory.
    """

    def init(self, base: Tensor) -> State:
        """Return h_k = 0."""
        return {"dual": torch.zeros_like(base)}

    def grad(self, view: View, state: State) -> None:
        for s in view.shared:
            view.grad[s].add_(view.params[s] - view.base[s] + state["dual"][s], alpha=self.alpha)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the state h_k with this round's update."""
        dual = state["dual"].clone()
        for s in view.shared:
            dual[s] += view.params[s] - view.base[s]
        return {"dual": dual}, {}


@dataclass(frozen=True)
class CountedSteps(LocalRule):
    """Provides a_k: the factors with which local gradients count in the update, summed over the round (FedNova).

    Computed by running the optimiser on unit gradients, in units of the round's first learning rate: tau for plain SGD,
    the accumulated momentum series with momentum, sum of (1 - lr mu)^t with a proximal term, and all of these together
    with both or with a schedule. Adam's steps have bounded size, so each counts as one, scaled by the schedule.
    Momentum kept from the round before is not counted.
    """

    mu: float = 0.0
    provides = frozenset({"extra:a"})

    def begin(self, view: View, state: State) -> State:
        """Return a state with nothing counted yet."""
        return {"a": 0.0, "velocity": 0.0, "lr": None}

    def grad(self, view: View, state: State) -> None:
        if state["lr"] is None:
            state["lr"] = view.lr or 1.0
        optimizer = view.optimizer
        unit = 1.0 - self.mu * state["lr"] * state["a"]  # of the proximal term, at displacement -lr a
        step = unit
        if optimizer.momentum:
            state["velocity"] = optimizer.momentum * state["velocity"] + unit
            step = unit + optimizer.momentum * state["velocity"] if optimizer.nesterov else state["velocity"]
        state["a"] += view.lr / state["lr"] * (step if optimizer.name == "sgd" else 1.0)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return no state, and a_k."""
        return {}, {"a": state["a"]}
