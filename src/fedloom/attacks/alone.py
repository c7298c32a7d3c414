"""Attacks of one client that knows only itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.attacks.attack import Attack, within
from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates


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
        return within(updates, self.factor * scale * noise), memory


@dataclass(frozen=True)
class Constant(Attack):
    """One value everywhere."""

    value: float

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        return within(updates, torch.full_like(updates.X, self.value)), memory


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
