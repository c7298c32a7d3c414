"""Attacks of clients that know only themselves, by what they send or train on, or all honest updates of the round.

A recipe names them; their fields are its keys. Free of torch at import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import Count, Positive
from fedloom.training.attack import Attack

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.core.context import Ctx, State
    from fedloom.core.updates import Updates
    from fedloom.data.dataset import Examples
    from fedloom.models.tasks.task import Task

ATTACKS = Registry("attack", "fedloom.attacks", ("fedloom.training.attack:Attack",))
"""Classes of attacks, and functions (*, parameters) -> Attack."""


@ATTACKS.register("sign-flip")
def sign_flip(*, factor: Positive = 1.0) -> Attack:
    """Send -factor times the update."""
    return Scaled(-factor)


@ATTACKS.register("scaled")
@dataclass(frozen=True)
class Scaled(Attack):
    """Send factor times the update, as in model replacement (Bagdasaryan et al., AISTATS 2020)."""

    factor: Positive = 100.0

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return updates.replace(X=self.factor * updates.X), memory


@ATTACKS.register("gaussian")
@dataclass(frozen=True)
class Noise(Attack):
    """Send noise instead of the update, with factor times its norm."""

    factor: Positive = 10.0

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        import torch

        from fedloom.training.rules import within

        X, rng = updates.X, ctx.rng("attack", updates.rows[0][0])
        noise = torch.randn(X.shape, generator=rng).to(X)
        scale = X.norm(dim=1, keepdim=True) / X.shape[1] ** 0.5
        return within(updates.replace(X=self.factor * scale * noise)), memory


@ATTACKS.register("huge")
@dataclass(frozen=True)
class Constant(Attack):
    """Send this finite value in every coordinate."""

    value: Annotated[float, Field(gt=0, le=3e38)] = 1e30

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        from fedloom.training.rules import within

        return within(updates.replace(X=updates.X.new_full(updates.X.shape, self.value))), memory


@ATTACKS.register("replay")
@dataclass(frozen=True)
class Replay(Attack):
    """Send the update of the first round in every round."""

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        import torch

        first = dict(memory.get("first", {}))
        for (_, task), x in zip(updates.rows, updates.X, strict=True):
            first.setdefault(task or "", x.to("cpu", copy=True))  # rows of tasks that it had not then are honest
        X = torch.stack([first[task or ""] for _, task in updates.rows]).to(updates.X)
        return updates.replace(X=X), {"first": first}


@ATTACKS.register("fake")
@dataclass(frozen=True)
class Fake(Attack):
    """Send -1 times the update, claim n examples, and multiply all extra values by factor."""

    n: Count = 1_000_000
    factor: Positive = 1000.0

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        import torch

        def more(value: Any) -> Any:
            number = isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())
            return value * self.factor if number else value

        extra = {name: [more(value) for value in values] for name, values in updates.extra.items()}
        return updates.replace(X=-updates.X, n=torch.full_like(updates.n, float(self.n)), extra=extra), memory


@ATTACKS.register("drop-out")
@dataclass(frozen=True)
class Silent(Attack):
    """Take part in rounds, but send nothing."""

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return None, memory


@ATTACKS.register("label-flip")
@dataclass(frozen=True)
class FlippedLabels(Attack):
    """Train on wrong labels: class C - 1 - y instead of y."""

    def unfit(self, tasks: Mapping[str, Task]) -> str | None:
        if any(task.kind == "classification" for task in tasks.values()):
            return None
        return f"expected a task with one class an example, found {', '.join(tasks)}"

    def examples(self, examples: Examples, tasks: Mapping[str, Task]) -> Examples:
        from fedloom.data.dataset import Flipped

        return Flipped(examples, {n: task.channels for n, task in tasks.items() if task.kind == "classification"})


@ATTACKS.register("ipm", source="Xie, Koyejo, Gupta, UAI 2019")
@dataclass(frozen=True)
class InnerProduct(Attack):
    """Send -factor times the mean of the honest updates (inner-product manipulation). Knows the honest updates."""

    factor: Positive = 2.0
    knows_all = True

    def together(self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State) -> tuple[Tensor, State]:
        return -self.factor * honest.mean(0), memory


@ATTACKS.register("alie", source="Baruch, Baruch, Goldberg, NeurIPS 2019")
@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """Send mean - factor * standard deviation of the honest updates, per coordinate ("a little is enough").

    Without a factor the paper's z: the largest at which more honest updates lie further away than a majority needs. It
    follows from the size of a group; 0 is refused. Knows the honest updates.

    s = floor(K / 2 + 1) - m more rows make m hostile ones of K a majority, and z = Phi^-1((K - m - s) / (K - m)) is
    where that many honest rows lie further away. Below 0 it is 0: the honest mean.
    """

    factor: Positive | None = None
    knows_all = True

    def together(self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State) -> tuple[Tensor, State]:
        count = len(honest) + hostile
        z = self.factor_among(count, hostile)
        row = honest.mean(0) - z * honest.std(0, correction=0)
        return row, {"clients": count, "hostile": hostile, "z": float(f"{z:.4g}")}

    def factor_among(self, clients: int, hostile: int) -> float:
        """Return the factor, or the paper's; at most 3, where the hostile rows are a majority already."""
        if self.factor is not None:
            return self.factor
        needed = math.floor(clients / 2 + 1) - hostile
        share = (clients - hostile - needed) / (clients - hostile)
        return NormalDist().inv_cdf(min(max(share, 0.5), 0.9987))


@ATTACKS.register("mimic", source="Karimireddy, He, Jaggi, ICLR 2022")
@dataclass(frozen=True)
class Mimic(Attack):
    """Copy one honest client in all rounds, so that its update counts too much. Knows the honest updates.

    All attackers copy the client whose first update reaches furthest along the direction of the largest variance. In
    rounds without that client each sends its own update.

    c* = argmax_c |z^T X_c|, with z the direction of the largest variance among the honest rows. The paper learns z in a
    warm-up phase, here the first round, and then keeps c*.
    """

    knows_all = True

    def together(
        self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State
    ) -> tuple[Tensor | None, State]:
        copied = memory.get("copied") or clients[_outstanding(honest)]
        return honest[clients.index(copied)] if copied in clients else None, {"copied": copied}


def _outstanding(rows: Tensor) -> int:
    """Return the position of the row that reaches furthest along the direction in which the rows differ most."""
    import torch

    apart = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh((apart @ apart.t()).double())
    direction = vectors[:, -1].to(apart) @ apart
    return int((rows @ direction).abs().argmax())
