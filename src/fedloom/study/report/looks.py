"""What the figures of a report share: colours, and how they are thinned where they would be too large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b6d31", "#7f5fc7")
DASHES = ("solid", "dash", "dot", "dashdot")


def thinned(rounds: Sequence[int], most: int, keep: Iterable[int] = ()) -> list[int]:
    """At most about `most` rounds, evenly spaced, with the first, the last and those to keep."""
    if len(rounds) <= most:
        return list(rounds)
    last = len(rounds) - 1
    chosen = {rounds[round(i * last / (most - 1))] for i in range(most)}
    return sorted(chosen | (set(keep) & set(rounds)))


def thinned_names(ranked: Sequence[str], most: int) -> list[str]:
    """At most `most` names, evenly spaced, the first and the last among them where there is room for two."""
    chosen = thinned(range(len(ranked)), most) if most > 1 else []
    return [ranked[i] for i in chosen]


def plain(value: float | None) -> float | None:
    """The number, or None for nan and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
