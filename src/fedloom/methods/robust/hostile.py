"""Attacks of clients that know only themselves, by what they send or train on, or all honest updates of the round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.data.dataset import Behind, Examples
from fedloom.models.tasks.task import Task
from fedloom.training.rules import Attack, within


@dataclass(frozen=True)
class Scaled(Attack):
    """Factor times the update."""

    factor: float

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return updates.replace(X=self.factor * updates.X), memory


@dataclass(frozen=True)
class Noise(Attack):
    """Gaussian noise of about `factor` times the update's norm, from a generator of the client and the round."""

    factor: float

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        X, rng = updates.X, ctx.rng("attack", updates.rows[0][0])
        noise = torch.randn(X.shape, generator=rng).to(X)
        scale = X.norm(dim=1, keepdim=True) / X.shape[1] ** 0.5
        return within(updates.replace(X=self.factor * scale * noise)), memory


@dataclass(frozen=True)
class Constant(Attack):
    """One value everywhere."""

    value: float

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return within(updates.replace(X=torch.full_like(updates.X, self.value))), memory


@dataclass(frozen=True)
class Replay(Attack):
    """The first rows that it made, again; rows of tasks that it had not then are honest."""

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        first = dict(memory.get("first", {}))
        for (_, task), x in zip(updates.rows, updates.X, strict=True):
            first.setdefault(task or "", x.to("cpu", copy=True))
        X = torch.stack([first[task or ""] for _, task in updates.rows]).to(updates.X)
        return updates.replace(X=X), {"first": first}


@dataclass(frozen=True)
class Fake(Attack):
    """The update turned round, as that of `n` examples; numbers beside it times `factor`."""

    n: int
    factor: float

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        def more(value: Any) -> Any:
            number = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
            return value * self.factor if number else value

        extra = {name: [more(value) for value in values] for name, values in updates.extra.items()}
        return updates.replace(X=-updates.X, n=torch.full_like(updates.n, float(self.n)), extra=extra), memory


@dataclass(frozen=True)
class Silent(Attack):
    """Nothing."""

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return None, memory


@dataclass(frozen=True)
class FlippedLabels(Attack):
    """Class C - 1 - y in the place of y, in tasks with one class an example."""

    def unfit(self, tasks: Mapping[str, Task]) -> str | None:
        if any(task.kind == "classification" for task in tasks.values()):
            return None
        return f"expected a task with one class an example, found {', '.join(tasks)}"

    def examples(self, examples: Examples, tasks: Mapping[str, Task]) -> Examples:
        return Flipped(examples, {n: task.channels for n, task in tasks.items() if task.kind == "classification"})


@dataclass(frozen=True, eq=False)
class Flipped(Behind):
    """Examples with other labels: task -> number of classes of those whose labels are turned round."""

    classes: Mapping[str, int]

    def changed(self, task: str, labels: Tensor, index: Tensor) -> Tensor:
        """Return wrong labels; those that are missing stay so."""
        return torch.where(labels >= 0, self.classes[task] - 1 - labels, labels) if task in self.classes else labels

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """Return wrong labels."""
        labels = self.examples.labels_of(task)
        return np.where(labels >= 0, self.classes[task] - 1 - labels, labels) if task in self.classes else labels


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Against the honest mean: -factor times it."""

    factor: float
    knows_all = True

    def together(self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State) -> tuple[Tensor, State]:
        return -self.factor * honest.mean(0), memory


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """mean - z std. The paper's z: s = floor(K / 2 + 1) - m more rows make m hostile ones of K a majority, and
    z = Phi^-1((K - m - s) / (K - m)) is where that many honest rows lie further away. Below 0 it is 0: the honest mean.
    """

    factor: float | None
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


@dataclass(frozen=True)
class Mimic(Attack):
    """A copy of one honest client's row, in all rounds: c* = argmax_c |z^T X_c|, with z the direction of the largest
    variance among the honest rows. The paper learns z in a warm-up phase, here the first round, and then keeps c*.
    """

    knows_all = True

    def together(
        self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State
    ) -> tuple[Tensor | None, State]:
        copied = memory.get("copied") or clients[_outstanding(honest)]
        return honest[clients.index(copied)] if copied in clients else None, {"copied": copied}


def _outstanding(rows: Tensor) -> int:
    """Return the position of the row that reaches furthest along the direction in which the rows differ most."""
    apart = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh((apart @ apart.t()).double())
    direction = vectors[:, -1].to(apart) @ apart
    return int((rows @ direction).abs().argmax())
