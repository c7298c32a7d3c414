"""What the figures of a report share: dashes, and how they are thinned where they would be too large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import quantiles

DASHES = ("solid", "dash", "dot", "dashdot")
LINES = 8
"""Lines of clients in a figure, at most; of more, the best and the worst are drawn, and a band for the others."""

NAMED = 40
"""Dots up to which each has its name beside it; beyond that, only the first and the last few."""


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


def extremes(lines: Mapping[str, Mapping[int, float]], direction: str) -> list[str]:
    """The names of the lines with the best and the worst last number."""
    last = {name: known[-1] for name, of in lines.items() if (known := [of[r] for r in sorted(of) if of[r] == of[r]])}
    ranked = sorted(last, key=lambda name: last[name], reverse=direction == "max")
    return list(dict.fromkeys([*ranked[:1], *ranked[-1:]]))


def tenths(lines: Sequence[Mapping[int, float]], rounds: Iterable[int]) -> tuple[dict[int, float], dict[int, float]]:
    """The 10 % and the 90 % quantile of several lines in each of these rounds in which one has a number."""
    low, high = {}, {}
    for round in rounds:
        values = [of[round] for of in lines if round in of and not math.isnan(of[round])]
        if values:
            ends = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
            low[round], high[round] = ends[0], ends[-1]
    return low, high


def plain(value: float | None) -> float | None:
    """The number, or None for nan and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
