"""The coordinates of a row that count: FedDEA's selection, its record of dimensions (Figure 2), and FedHEAL's masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State, row_key
from fedloom.core.layout import Columns, Layout, pieces
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.feddea import ActivatedDimensionsSettings, HealSettings, TopMagnitudeSettings

_CHUNK = 1 << 20  # values at a time, where a row of intermediate values would otherwise be made
_SMALL = 1 << 13  # fewer values than this are sorted
_BINS = 1 << 16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def top_mask(x: Tensor, k: int, largest: bool = True) -> Tensor:
    """Return True for the k values of x (d) with the largest (or smallest) magnitude; ties go to the lowest index.

    Exactly k values (none for k < 1, all for k > d). A radix search over the bits of |x|, 16 at a time: it needs no
    memory of size d beside the result, and reads x three times (five times for 64 bits), whatever its values.
    """
    d = x.numel()
    if k <= 0 or k >= d:
        return torch.full_like(x, k > 0, dtype=torch.bool)
    if d < _SMALL:
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[x.abs().sort(descending=largest, stable=True).indices[:k]] = True
        return mask
    edge, ties = _edge(x, k, largest)
    mask = torch.empty_like(x, dtype=torch.bool)
    for part, out in zip(x.split(_CHUNK), mask.split(_CHUNK), strict=True):
        keys = _keys(part, largest)
        torch.gt(keys, edge, out=out)
        if ties:
            here = (keys == edge).nonzero().squeeze(1)[:ties]
            out[here] = True
            ties -= len(here)
    return mask


def _keys(x: Tensor, largest: bool) -> Tensor:
    """Return integers in the order of |x|: without its sign bit, a float has the order of its bits."""
    integer = _INTEGERS[x.element_size()]
    low = torch.iinfo(integer).max
    bits = x.view(integer) & low
    return bits if largest else bits ^ low


def _edge(x: Tensor, k: int, largest: bool) -> tuple[int, int]:
    """Return the k-th largest key, and how many values with this key are among the k largest."""
    bits = 8 * x.element_size()
    edge, left = 0, k
    for shift in reversed(range(0, bits, 16)):
        count = torch.zeros(_BINS, dtype=torch.int64, device=x.device)
        for part in x.split(_CHUNK):
            keys = _keys(part, largest)
            if shift + 16 < bits:
                keys = keys[(keys >> (shift + 16)) == edge] & ((1 << (shift + 16)) - 1)
            count += torch.bincount(keys >> shift if shift else keys, minlength=_BINS)
        above = count.flip(0).cumsum(0)
        i = int(torch.searchsorted(above, left))  # bins from the top
        left -= int(above[i - 1]) if i else 0
        edge = edge << 16 | (_BINS - 1 - i)
    return edge, left


@dataclass(frozen=True)
class TopMagnitude(TopMagnitudeSettings, Stage):
    """Keep each update's floor(rho d) largest coordinates and rescale them by 1/rho (FedDEA, eq. 2-6).

    d counts the coordinates that the row has. See the add-on `feddea`.
    """

    @property
    def traits(self) -> Traits:
        return Traits(presence="block" if self.per_block or self.keep == "random" else "row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if self.rho == 1:
            return updates, state
        X = updates.X
        out = torch.empty_like(X) if updates.present is None else torch.zeros_like(X)
        zero = X.new_zeros(())
        for k, row in enumerate(updates.rows):
            rng = ctx.rng("top-magnitude", *row) if self.keep == "random" else None
            for columns in self._pieces(updates, k):
                # one choice over several slices: the blocks that a row has need not be neighbours
                x = torch.cat([X[k, s] for s in columns]) if len(columns) > 1 else X[k, columns[0]]
                mask, at = self._mask(x, rng), 0
                for s in columns:
                    size = s.stop - s.start
                    torch.where(mask[at : at + size], X[k, s], zero, out=out[k, s])
                    at += size
        if self.rescale:
            out.mul_(1 / self.rho)
        return updates.replace(X=out), state

    def _pieces(self, updates: Updates, k: int) -> list[tuple[Columns, ...]]:
        """Return groups of columns among which one choice is made."""
        layout, here = updates.layout, updates.part(k)
        groups = [(layout.slice(name),) for name in here.names] if self.per_block else [layout.spans(here)]
        return [spans for spans in groups if any(s.stop > s.start for s in spans)]

    def _mask(self, x: Tensor, rng: torch.Generator | None) -> Tensor:
        """Return True for the coordinates to keep: exactly max(1, floor(rho d)) of them."""
        d = x.numel()
        k = max(1, int(self.rho * d + 1e-9))  # 0.29 * 100 is 28.999... in floating point
        if rng is not None:
            mask = torch.zeros(d, dtype=torch.bool)
            mask[torch.randperm(d, generator=rng)[:k]] = True
            return mask.to(x.device)
        return top_mask(x, k, self.keep == "largest")


KIND = "activated-dimensions"
_COLUMNS = 1 << 18
"""So many columns at a time: counts up to 2^24 are exact in float32, and no K x d intermediate stands beside a mask."""


@dataclass(frozen=True)
class ActivatedDimensions(ActivatedDimensionsSettings, Stage):
    """Record which dimensions each row activates: its floor(rho d) largest in magnitude. Every row passes as it is.

    Two records a round, for two choices of the d columns: "encoder", all blocks of the encoder, and "all", what FedDEA
    selects from; without an encoder only the second, and only the first if the encoder is everything. A coordinate that
    is exactly zero or that a row lacks is never activated.

    Fields of a record: scope, rho, columns (d), rows (names); for blocks, in order: blocks (names), parts, sizes
    (columns), active (rows x blocks: how many activated dimensions lie in the block); for pairs of rows, in order
    (0,1), (0,2), ..: shared (pairs x blocks: how many are activated by both); bins (rows x `bins`: activated dimensions
    along the flat vector, in equal pieces). For each group of blocks (the whole scope first, then its parts) three
    values follow from these counts: overlap = 2 |A & B| / (|A| + |B|), which is |A & B| / k if both have k; expected,
    its expectation if both sets were drawn independently (about rho for the whole scope); jaccard = |A & B| / |A or B|.
    """

    traits = Traits("matrix", writes=frozenset(), presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates):
            encoder = updates.layout.select("encoder")
            if encoder.blocks:
                ctx.record(KIND, self._look(updates, "encoder", encoder))
            if len(encoder.blocks) < len(updates.layout.blocks):
                ctx.record(KIND, self._look(updates, "all", updates.layout))
        return updates, state

    def _look(self, updates: Updates, scope: str, part: Layout) -> dict[str, Any]:
        active = self._activated(updates, part)
        both = torch.stack([_gram(active[:, s]) for s in part.slices], 2).cpu()  # rows x rows x blocks
        one, other = torch.triu_indices(len(both), len(both), 1)
        counts, shared = both.diagonal().t(), both[one, other]
        parts = [b.part or b.role for b in part.blocks]
        sizes = [b.size for b in part.blocks]
        groups = {scope: [*range(len(sizes))]} | {
            p: [i for i, q in enumerate(parts) if q == p] for p in dict.fromkeys(parts) if p != scope
        }

        def of(members: Sequence[int]) -> dict[str, list[float]]:
            own = counts[:, members].sum(1)
            each = torch.stack([own[one], own[other], shared[:, members].sum(1)], 1).tolist()
            return agreement(sum(sizes[i] for i in members), each)

        edges = [i * part.d // self.bins for i in range(self.bins + 1)]
        return {
            "scope": scope,
            "rho": self.rho,
            "columns": part.d,
            "rows": [client if task is None else f"{client}/{task}" for client, task in updates.rows],
            "blocks": list(part.names),
            "parts": parts,
            "sizes": sizes,
            "active": counts.tolist(),
            "shared": shared.tolist(),
            "bins": torch.stack([active[:, a:b].sum(1) for a, b in pairwise(edges)], 1).tolist(),
            "groups": {name: of(members) for name, members in groups.items()},
        }

    def _activated(self, updates: Updates, part: Layout) -> Tensor:
        """Return K x d, bool: the choice that FedDEA would make among the columns of `part`, without zeros."""
        X, top = updates.X, TopMagnitude(self.rho)
        active = torch.zeros(len(X), part.d, dtype=torch.bool, device=X.device)
        positions = updates.layout.positions(part)
        for i, x in enumerate(X):
            here = part if updates.present is None else part.having(updates.present[i, positions].tolist())
            if not here.blocks:
                continue
            x = updates.layout.take(x, here)
            part.put(active[i], here, top._mask(x, None).logical_and_(x != 0))
        return active


def agreement(size: int, counts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Return overlap, expected overlap and Jaccard of pairs of sets among `size` things, from (|A|, |B|, |A & B|)."""
    return {
        "overlap": [2 * both / (a + b) if a + b else 0.0 for a, b, both in counts],
        "expected": [2 * a * b / (size * (a + b)) if a + b else 0.0 for a, b, _ in counts],
        "jaccard": [both / (a + b - both) if a + b else 0.0 for a, b, both in counts],
    }


def _gram(active: Tensor) -> Tensor:
    """Return |A & B| of all pairs of rows."""
    both = torch.zeros(len(active), len(active), dtype=torch.int64, device=active.device)
    for piece in active.split(_COLUMNS, dim=1):
        piece = piece.float()
        both += (piece @ piece.t()).long()
    return both


_MOST = torch.iinfo(torch.int16).max


@dataclass(frozen=True)
class Heal(HealSettings, Stage):
    """Masks by consistency and weights by distance, for the following mean; the add-on `heal` has the equations.

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
            columns = [piece for s in updates.layout.spans(updates.part(i)) for piece in pieces(s, _COLUMNS)]
            new[key], distance = self._vote(X[i], columns, state.get(key, fresh), mask[i])
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
