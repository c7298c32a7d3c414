"""FedDEA's row transform: keep part of an update and rescale it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.context import Ctx
from fedloom.stages.stage import Stage, State
from fedloom.updates import Updates


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

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if self.rho == 1:
            return updates, state
        out = torch.zeros_like(updates.X)
        for k, row in enumerate(updates.rows):
            rng = ctx.rng("top-magnitude", *row) if self.keep == "random" else None
            for columns in self._pieces(updates, k):
                # several slices are one choice: the blocks that a row has need not be neighbours
                x = torch.cat([updates.X[k, s] for s in columns]) if len(columns) > 1 else updates.X[k, columns[0]]
                kept = torch.where(self._mask(x, rng), x, 0.0)
                at = 0
                for s in columns:
                    out[k, s] = kept[at : at + s.stop - s.start]
                    at += s.stop - s.start
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
        size = x.abs() if self.keep == "largest" else -x.abs()
        edge = size.kthvalue(d - k + 1).values
        mask = size > edge
        ties = (size == edge).nonzero().squeeze(1)
        mask[ties[: k - int(mask.sum())]] = True
        return mask
