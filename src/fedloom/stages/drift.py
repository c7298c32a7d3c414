"""The server's part of methods against client drift: SCAFFOLD, FedDyn, FedNova."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.spread import cut, join
from fedloom.core.updates import Updates
from fedloom.stages.combine import Aggregation
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class ControlVariates(Stage):
    """Keeps c, the mean of all N clients' control variates, and broadcasts it to them (SCAFFOLD).

    c grows by sum_k (change of c_k) / N over the participants; N counts absent clients too.
    """

    traits = Traits(
        reads={"X", "auxiliary:control"}, writes=frozenset(), broadcasts={"broadcast:control"}, separable=True
    )

    def init(self, layout: Layout) -> State:
        """c = 0."""
        return {"control": torch.zeros(layout.d)}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """c."""
        return {client: {"control": state["control"]} for client in clients}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        change = updates.auxiliary["control"].sum(dim=0) / max(ctx.population or len(updates), 1)
        return updates, {"control": state["control"] + join(updates.layout, change)}


@dataclass(frozen=True)
class DualShift(Aggregation):
    """Adds to a stage's result the mean over all N clients of the sum of their updates so far (FedDyn).

    h grows by sum_k X_k / N over the participants, as the rows come in, then theta+ = theta + stage(X) + h. Stages
    added to the method go inside, so that h is made of the rows as they arrive. For a block that only a share of the
    participants has, N is multiplied by this share.
    """

    stage: Stage

    def __post_init__(self) -> None:
        if not self.stage.traits.reduces:
            raise ValueError(f"DualShift: {self.stage!r} leaves a row for each client, but the shift is for one model")
        self._close("DualShift")

    @cached_property
    def traits(self) -> Traits:
        return Traits.around(self.inner, reduces=True)

    def init(self, layout: Layout) -> State:
        """h = 0."""
        return {"dual": torch.zeros(layout.d), "stage": self.stage.init(layout)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        k = len(updates)
        if not k:
            return self.stage(updates, state["stage"], ctx)[0], state
        share = k / (ctx.population or k)
        dual = cut(updates.layout, state["dual"]).to(updates.data, copy=True)
        if updates.present is None:
            dual += updates.X.mean(dim=0) * share
        else:
            holders = updates.present.sum(dim=0).clamp(min=1).tolist()
            for s, count in zip(updates.layout.slices, holders, strict=True):
                dual[s] += updates.X[:, s].sum(dim=0) * (share / count)
        out, inner = self.stage(updates, state["stage"], ctx)
        return out.replace(X=out.X + dual), {"dual": join(updates.layout, dual), "stage": inner}

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (Box("plus the mean of all clients' updates so far", inside=self.stage.boxes),)


@dataclass(frozen=True)
class NormaliseSteps(Stage):
    """Divides each row by a_k and multiplies it by tau_eff (FedNova, eq. 6 and section 4).

    tau_eff is the weighted mean of the a_k ("weights") or, as in the release with a proximal term, of the step counts
    ("steps"). Equal a_k change nothing. A client that took no step is dropped.
    """

    tau_eff: Literal["weights", "steps"] = "weights"

    @cached_property
    def traits(self) -> Traits:
        counts = {"extra:steps"} if self.tau_eff == "steps" else set()
        return Traits("mix", {"X", "weight", "extra:a", *counts}, separable=True)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        moved = [i for i, a in enumerate(updates.extra["a"]) if float(a) > 0]
        updates = updates.keep(moved)
        a = torch.tensor([float(v) for v in updates.extra["a"]], dtype=torch.float64)
        counts = a
        if self.tau_eff == "steps":
            counts = torch.tensor([float(v) for v in updates.extra["steps"]], dtype=torch.float64)
        total = updates.weight.sum()
        if not len(updates) or not total > 0 or bool((a == counts[0]).all() and (counts == counts[0]).all()):
            return updates, state
        tau = (updates.weight * counts).sum() / total
        return updates.mixed(torch.diag(tau / a)), state
