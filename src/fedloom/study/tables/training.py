"""The recorded training losses of a run: the last one, and whether they still fall. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from fedloom.federation.runs.reader import Run

STILL = 5.0
"""Percent by which the training loss may still fall per tenth of the rounds."""
LAST = 0.2
"""The share of the rounds, at the end, over which that is measured."""


def losses(run: Run) -> dict[str, list[float]]:
    """Return task -> its training loss in each round that trained it, mean over clients; empty where unknown."""
    found: dict[str, list[float]] = {}
    for line in run.rounds:
        each: dict[str, list[float]] = {}
        for record in line.get("train", ()):
            if record["loss"] is not None:
                each.setdefault(record["task"], []).append(record["loss"])
        for task, of_round in each.items():
            found.setdefault(task, []).append(fmean(of_round))
    return found


def falling(by_round: Sequence[float]) -> float:
    """Return the percent by which a training loss fell per tenth of the rounds, at the end; nan for a single round.

    From the mean losses of the first and the second half of the last rounds.
    """
    last = by_round[-max(2, round(LAST * len(by_round))) :]
    if len(last) < 2:
        return math.nan
    half = len(last) // 2
    before, after = fmean(last[:half]), fmean(last[-half:])
    apart = (len(last) - half) or 1
    return 100 * (1 - (max(after, 1e-12) / before) ** (len(by_round) / 10 / apart)) if before > 0 else 0.0


def fall_of(runs: Mapping[int, Run]) -> float:
    """Return the percent by which a method's training loss falls per tenth of the rounds: mean of seeds and tasks.

    nan where no run has the losses of two rounds, as of a method that trains nothing.
    """
    each = [falling(by_round) for run in runs.values() for by_round in losses(run).values()]
    known = [fall for fall in each if not math.isnan(fall)]
    return fmean(known) if known else math.nan


def last_loss(run: Run) -> float | None:
    """Return the training loss of the last round, mean over tasks; None where none is recorded."""
    found = [by_round[-1] for by_round in losses(run).values()]
    return fmean(found) if found else None
