"""FedDEA's row transform: keep part of an update and rescale it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.stages.stage import Stage, Traits

_CHUNK = 1 << 20  # values at a time, where a row of intermediate values would otherwise be made
_SMALL = 1 << 13  # fewer values than this are sorted
_BINS = 1 << 16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def top_mask(x: Tensor, k: int, largest: bool = True) -> Tensor:
    """True for the k values of x (d) with the largest (or smallest) magnitude; ties go to the lowest index.

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
    """Integers in the order of |x|: without its sign bit, a float has the order of its bits."""
    integer = _INTEGERS[x.element_size()]
    low = torch.iinfo(integer).max
    bits = x.view(integer) & low
    return bits if largest else bits ^ low


def _edge(x: Tensor, k: int, largest: bool) -> tuple[int, int]:
    """The k-th largest key, and how many values with this key are among the k largest."""
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
class TopMagnitude(Stage):
    """Keep each update's floor(rho d) largest coordinates and rescale them by 1/rho (FedDEA, eq. 2-6).

    d counts the coordinates that the row has. Ties go to the lowest index; at least one coordinate is kept; rho = 1
    is the identity, bit for bit. `keep` "smallest" and "random" and `rescale=False` are the paper's ablations;
    `per_block` chooses within each tensor instead of over the whole vector.
    """

    rho: float
    keep: Literal["largest", "smallest", "random"] = "largest"
    rescale: bool = True
    per_block: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho: expected 0 < rho <= 1, found {self.rho}")
        if self.keep not in ("largest", "smallest", "random"):
            raise ValueError(f"keep: expected largest, smallest or random, found {self.keep!r}")

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

    def _pieces(self, updates: Updates, k: int) -> list[list[slice]]:
        """Groups of column slices among which one choice is made."""
        layout = updates.layout
        if updates.present is None:
            slices = list(layout.slices) if self.per_block else [slice(0, layout.d)]
        else:
            slices = [s for s, here in zip(layout.slices, updates.present[k].tolist(), strict=True) if here]
        slices = [s for s in slices if s.stop > s.start]
        if self.per_block:
            return [[s] for s in slices]
        return [slices] if slices else []

    def _mask(self, x: Tensor, rng: torch.Generator | None) -> Tensor:
        """True for the coordinates to keep: exactly max(1, floor(rho d)) of them."""
        d = x.numel()
        k = max(1, int(self.rho * d + 1e-9))  # 0.29 * 100 is 28.999... in floating point
        if rng is not None:
            mask = torch.zeros(d, dtype=torch.bool)
            mask[torch.randperm(d, generator=rng)[:k]] = True
            return mask.to(x.device)
        return top_mask(x, k, self.keep == "largest")
