"""Methods against client drift, at the server and in local training: SCAFFOLD, FedDyn, FedNova."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.core.combine import Aggregation
from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.layout import Columns, Layout
from fedloom.core.mean import column_groups
from fedloom.core.stage import Stage, Traits, inner
from fedloom.core.untrusted import Number
from fedloom.core.updates import Updates, columns_here
from fedloom.methods.drift import DualSettings, NormaliseStepsSettings
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class ControlVariates(Stage):
    """Keeps c, the mean control variate of all clients that train a block, and broadcasts it; see `scaffold`."""

    traits = Traits(reads={"X", "auxiliary:control"}, writes={"broadcast:control"}, presence="block", separable=True)

    def init(self, layout: Layout) -> State:
        return {"control": torch.zeros(layout.d)}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        return {client: {"control": state["control"]} for client in clients}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        layout, change = updates.layout, updates.auxiliary["control"].sum(dim=0)
        for block, s, here in zip(layout.blocks, layout.slices, updates.has.sum(dim=0).tolist(), strict=True):
            change[s] /= ctx.trainers(block.task, here)
        return updates, {"control": state["control"] + columns_here().join(layout, change)}


@dataclass(frozen=True)
class DualShift(Aggregation):
    """Adds to a stage's result the mean over all N clients of the sum of their updates so far; see `feddyn`.

    Stages added to the method go inside, so that the sum is made of the rows as they arrive.
    """

    heading = "plus the mean of all clients' updates so far"
    stage: Stage

    @cached_property
    def traits(self) -> Traits:
        return Traits.around(inner(self), reduces=True)

    def init(self, layout: Layout) -> State:
        return {"dual": torch.zeros(layout.d), "stage": self.stage.init(layout)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        k = len(updates)
        if not k:
            return self.stage(updates, state["stage"], ctx)[0], state
        layout = updates.layout
        dual = columns_here().cut(layout, state["dual"]).to(updates.data, copy=True)
        if updates.present is None:
            dual += updates.X.mean(dim=0) * (k / (ctx.population or k))
        else:
            for block, s, here in zip(layout.blocks, layout.slices, updates.present.sum(dim=0).tolist(), strict=True):
                dual[s] += updates.X[:, s].sum(dim=0) / ctx.trainers(block.task, here)
        out, inner = self.stage(updates, state["stage"], ctx)
        return out.replace(X=out.X + dual), {"dual": columns_here().join(updates.layout, dual), "stage": inner}


@dataclass(frozen=True)
class NormaliseSteps(NormaliseStepsSettings, Stage):
    """Divides each row by a_k and multiplies it by tau_eff; see `fednova`. A client that took no step is dropped."""

    @cached_property
    def traits(self) -> Traits:
        counts = {"extra:steps"} if self.tau_eff == "steps" else set()
        reads = {"X", "weight", "extra:a", *counts}
        return Traits("mix", reads, presence="block", separable=True, extras={"a": Number(0)})

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        moved = [i for i, a in enumerate(updates.extra["a"]) if float(a) > 0]
        updates = updates.keep(moved)
        a = torch.tensor([float(v) for v in updates.extra["a"]], dtype=torch.float64)
        counts = a
        if self.tau_eff == "steps":
            counts = torch.tensor([float(v) for v in updates.extra["steps"]], dtype=torch.float64)
        factors = [
            (columns, self._factors(a, counts, updates.weight if members is None else updates.weight * members))
            for columns, members in column_groups(updates.layout, updates.present, None)
        ]
        if len(factors) == 1:
            ((_, only),) = factors
            return (updates if bool((only == 1).all()) else updates.mixed(torch.diag(only))), state
        X = updates.X.clone()
        for columns, factor in factors:
            X[:, columns] *= factor.to(X)[:, None]
        return updates.replace(X=X), state

    @staticmethod
    def _factors(a: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
        """Return tau_eff / a_k of each row (K), from the weights of the rows that count."""
        total, here = weight.sum(), weight > 0
        if not total > 0 or bool((a[here] == counts[here][0]).all() and (counts[here] == counts[here][0]).all()):
            return torch.ones_like(a)
        return (weight * counts).sum() / total / a


def common(a: tuple[Columns, ...], b: tuple[Columns, ...]) -> tuple[Columns, ...]:
    """Return columns that are in both."""
    both = (Columns(max(s.start, t.start), min(s.stop, t.stop)) for s in a for t in b)
    return tuple(s for s in both if s.start < s.stop)


@dataclass(frozen=True)
class ControlVariate(LocalRule):
    """Adds c - c_k to every gradient; afterwards c_k is the mean of the round's raw gradients; see `scaffold`.

    Only parameters that the client trains and shares are corrected.
    """

    provides = frozenset({"auxiliary:control"})
    needs = frozenset({"broadcast:control"})

    def init(self, base: Tensor) -> State:
        return {"control": torch.zeros_like(base)}

    def begin(self, view: View, state: State) -> State:
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
        new = state["sum"] / view.step if view.step else state["control"]
        return {"control": new}, {"control": new - state["control"]}


@dataclass(frozen=True)
class Dual(DualSettings, LocalRule):
    """Adds alpha <y, h_k> + (alpha/2) |y - base|^2 to the loss; afterwards h_k grows by y - base; see `feddyn`."""

    def init(self, base: Tensor) -> State:
        return {"dual": torch.zeros_like(base)}

    def grad(self, view: View, state: State) -> None:
        for s in view.shared:
            view.grad[s].add_(view.params[s] - view.base[s] + state["dual"][s], alpha=self.alpha)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        dual = state["dual"].clone()
        for s in view.shared:
            dual[s] += view.params[s] - view.base[s]
        return {"dual": dual}, {}


@dataclass(frozen=True)
class CountedSteps(LocalRule):
    """Provides a_k: the factors with which local gradients count in the update, summed over the round; see `fednova`.

    Computed by running the optimiser on unit gradients, in units of the round's first learning rate.
    """

    mu: float = 0.0
    provides = frozenset({"extra:a"})

    def begin(self, view: View, state: State) -> State:
        return {"a": 0.0, "velocity": 0.0, "lr": None}

    def grad(self, view: View, state: State) -> None:
        if state["lr"] is None:
            state["lr"] = float(view.lr) or 1.0
        optimizer = view.optimizer
        unit = 1.0 - self.mu * state["lr"] * state["a"]  # of the proximal term, at displacement -lr a
        step = unit
        if optimizer.momentum:
            state["velocity"] = optimizer.momentum * state["velocity"] + unit
            step = unit + optimizer.momentum * state["velocity"] if optimizer.nesterov else state["velocity"]
        state["a"] += float(view.lr) / state["lr"] * (step if optimizer.name == "sgd" else 1.0)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return {}, {"a": state["a"]}
