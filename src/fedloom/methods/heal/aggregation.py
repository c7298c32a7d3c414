"""FedHEAL: average a parameter over the clients with consistent updates of it, and weigh clients by distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State, row_key
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.heal import HealSettings

_CHUNK = 1 << 18  # columns at a time, so that no K x d intermediate is made beside the mask
_MOST = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class Heal(HealSettings, Stage):
    """Masks by consistency and weights by distance, for the mean that follows; the add-on `heal` has the equations.

    X passes as it is; M is written as `coef` (bool) and w as `weight`, in place of the weights so far or multiplied
    with them. Where no round of a client moved a coordinate, `zeros` "none" counts q as 1. State: per client one or two
    int16 vectors (d) and three numbers.
    """

    @property
    def traits(self) -> Traits:
        reads = {"X", "weight"} if self.weights == "multiply" else {"X"}
        return Traits("matrix", reads, {"weight", "coef"}, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not len(updates):
            return updates, state
        X = updates.X
        mask = torch.zeros(X.shape, dtype=torch.bool, device=X.device)
        fresh = {"rounds": 0, "weight": 1 / (ctx.population or len(updates)), "change": 0.0}
        new: State = {}
        distances = []
        for i, row in enumerate(updates.rows):
            key = row_key(row)
            new[key], distance = self._vote(X[i], _columns(updates, i), state.get(key, fresh), mask[i])
            distances.append(distance)
        total = sum(distances)
        if total > 0:
            for memory, distance in zip(new.values(), distances, strict=True):
                memory["change"] = (1 - self.beta) * memory["change"] + self.beta * distance / total
                memory["weight"] += memory["change"]
        weight = torch.tensor([memory["weight"] for memory in new.values()], dtype=torch.float64)
        weight = weight.to(updates.weight)
        out = updates.replace(weight=weight * updates.weight if self.weights == "multiply" else weight, coef=mask)
        return out, {**state, **new} if total > 0 or bool(X.any()) else state

    def _vote(self, x: Tensor, columns: list[slice], before: State, out: Tensor) -> tuple[State, float]:
        """Write one row's mask into `out`; return the client's new memory, without weights, and its distance."""
        rounds: int = before["rounds"]
        kind = torch.int16 if rounds < _MOST else torch.int32
        after: dict[str, Any] = {**before, "rounds": rounds + 1}
        for name in ("up",) if self.zeros == "paper" else ("up", "down"):
            after[name] = before[name].to(kind, copy=True) if rounds else torch.zeros_like(x, dtype=kind)
        needed = _needed(rounds, self.tau)
        by_count = torch.zeros(1)
        if self.zeros == "none":
            by_count = torch.tensor([_needed(n, self.tau) for n in range(rounds + 1)], dtype=kind, device=x.device)
        distance = 0.0
        for s in columns:
            up = x[s] > 0
            was_up = after["up"][s]
            if self.zeros == "paper":
                torch.ge(torch.where(up, was_up, rounds - was_up), needed, out=out[s])
            else:
                down = x[s] < 0
                was_down = after["down"][s]
                least = by_count[(was_up + was_down).long()]
                torch.ge(torch.where(up, was_up, was_down), least, out=out[s])
                out[s] &= up | down
                was_down += down
            was_up += up
            kept = torch.where(out[s], x[s], 0.0)
            distance = math.hypot(distance, float(torch.linalg.vector_norm(kept, dtype=torch.float64)))
        return after, distance


def _needed(rounds: int, tau: float) -> int:
    """Return the smallest count whose share of the rounds is above tau (strictly); 0 for no rounds."""
    if not rounds:
        return 0
    count = max(0, int(tau * rounds) - 1)
    while not count / rounds > tau:
        count += 1
    return count


def _columns(updates: Updates, i: int) -> list[slice]:
    """Return the columns that row i has, in pieces of at most _CHUNK."""
    layout = updates.layout
    if updates.present is None:
        spans = [slice(0, layout.d)]
    else:
        here = [s for s, p in zip(layout.slices, updates.present[i].tolist(), strict=True) if p]
        spans = []
        for s in here:
            start = spans.pop().start if spans and spans[-1].stop == s.start else s.start
            spans.append(slice(start, s.stop))
    return [slice(a, b) for s in spans for a, b in pairwise([*range(s.start, s.stop, _CHUNK), s.stop])]
