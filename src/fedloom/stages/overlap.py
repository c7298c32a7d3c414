"""FedDEA's Figure 2: which dimensions each update activates, and how far the rows agree on them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.updates import Updates
from fedloom.stages.magnitude import TopMagnitude
from fedloom.stages.stage import Stage, Traits

KIND = "activated-dimensions"
_CHUNK = 1 << 18  # columns at a time; counts up to 2^24 are exact in float32


@dataclass(frozen=True)
class ActivatedDimensions(Stage):
    """Record which dimensions each row activates: its floor(rho d) largest in magnitude. Every row passes as it is.

    Two records a round, for two choices of the d columns: "encoder", all blocks of the encoder, and "all". The second
    is what FedDEA selects from, but every row is exactly zero on other tasks' decoders and heads, so those parts are
    disjoint whatever the tasks have in common; the encoder is the fair comparison. A coordinate that is exactly zero or
    that a row lacks is never activated. Without an encoder (for example with one unnamed block) there is only "all"; if
    the encoder is everything, there is only "encoder".

    Fields of a record: scope, rho, columns (d), rows (names); for blocks, in order: blocks (names), parts, sizes
    (columns), active (rows x blocks: how many activated dimensions lie in the block); for pairs of rows, in order
    (0,1), (0,2), ..: shared (pairs x blocks: how many are activated by both); bins (rows x `bins`: activated dimensions
    along the flat vector, in equal pieces). For each group of blocks (the whole scope first, then its parts) three
    values follow from these counts: overlap = 2 |A & B| / (|A| + |B|), which is |A & B| / k if both have k; expected,
    its expectation if the two sets were drawn independently (about rho for the whole scope); jaccard = |A & B| / |A or
    B|.
    """

    rho: float = 0.1
    bins: int = 64
    traits = Traits("matrix", writes=frozenset(), presence="block")

    def __post_init__(self) -> None:
        if not 0 < self.rho < 1:
            raise ValueError(f"rho: expected 0 < rho < 1, found {self.rho}")
        if self.bins < 1:
            raise ValueError(f"bins: expected at least 1, found {self.bins}")

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
        k = len(active)
        pairs = [(a, b) for a in range(k) for b in range(a + 1, k)]
        counts, shared = [], []
        for s in part.slices:
            both = _gram(active[:, s]).tolist()
            counts.append([both[i][i] for i in range(k)])
            shared.append([both[a][b] for a, b in pairs])
        parts = [b.part or b.role for b in part.blocks]
        sizes = [b.size for b in part.blocks]
        groups = {scope: range(len(sizes))} | {
            p: [i for i, q in enumerate(parts) if q == p] for p in dict.fromkeys(parts) if p != scope
        }
        edges = [i * part.d // self.bins for i in range(self.bins + 1)]
        bins = [active[:, a:b].sum(1).tolist() for a, b in pairwise(edges)]
        return {
            "scope": scope,
            "rho": self.rho,
            "columns": part.d,
            "rows": [client if task is None else f"{client}/{task}" for client, task in updates.rows],
            "blocks": list(part.names),
            "parts": parts,
            "sizes": sizes,
            "active": _turned(counts, k),
            "shared": _turned(shared, len(pairs)),
            "bins": _turned(bins, k),
            "groups": {
                name: agreement(
                    sum(sizes[i] for i in members),
                    [
                        (
                            sum(counts[i][a] for i in members),
                            sum(counts[i][b] for i in members),
                            sum(shared[i][j] for i in members),
                        )
                        for j, (a, b) in enumerate(pairs)
                    ],
                )
                for name, members in groups.items()
            },
        }

    def _activated(self, updates: Updates, part: Layout) -> Tensor:
        """K x d, bool: the choice that FedDEA would make among the columns of `part`, without zeros."""
        X, top = updates.X, TopMagnitude(self.rho)
        active = torch.zeros(len(X), part.d, dtype=torch.bool, device=X.device)
        positions = updates.layout.positions(part)
        for i, x in enumerate(X):
            here = part
            if updates.present is not None:
                have = updates.present[i, positions].tolist()
                here = Layout(tuple(b for b, p in zip(part.blocks, have, strict=True) if p))
            if not here.blocks:
                continue
            x = updates.layout.take(x, here)
            part.put(active[i], here, top._mask(x, None).logical_and_(x != 0))
        return active


def agreement(size: int, counts: list[tuple[int, int, int]]) -> dict[str, list[float]]:
    """Overlap, expected overlap and Jaccard of pairs of sets among `size` things, from (|A|, |B|, |A & B|)."""
    overlap, expected, jaccard = [], [], []
    for a, b, both in counts:
        overlap.append(2 * both / (a + b) if a + b else 0.0)
        expected.append(2 * a * b / (size * (a + b)) if a + b else 0.0)
        jaccard.append(both / (a + b - both) if a + b else 0.0)
    return {"overlap": overlap, "expected": expected, "jaccard": jaccard}


def _gram(active: Tensor) -> Tensor:
    """|A & B| of all pairs of rows."""
    both = torch.zeros(len(active), len(active), dtype=torch.int64, device=active.device)
    for piece in active.split(_CHUNK, dim=1):
        piece = piece.float()
        both += (piece @ piece.t()).long()
    return both


def _turned(columns: list[list[int]], rows: int) -> list[list[int]]:
    return [[column[i] for column in columns] for i in range(rows)]
