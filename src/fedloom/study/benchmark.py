"""Decide on validation data, before any method runs, whether a benchmark is sensitive (docs/benchmarks.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import Grid
from fedloom.study.tables.estimate import delta_terms
from fedloom.study.tables.results import Combination, Side, columns_of, means, read

ALONE = "Local"
"""The base of a benchmark's grid in which every client trains alone."""
OVER_CONSTANT = 5.0
"""Percent by which training alone must be better than the constant prediction, on every task."""
OVER_ALONE = 5.0
"""Percent (mean over tasks) by which training on all data in one place must be better than training alone."""
STILL = 1.0
"""Percent by which the training loss may still fall per round."""
LAST = 0.2
"""The share of the rounds, at the end, over which that is measured."""


@dataclass(frozen=True)
class Verdict:
    """The result of a benchmark's three rules on validation data."""

    data: str
    tasks: tuple[str, ...]
    over_constant: Mapping[str, float]
    """Task -> percent by which training alone is better than the constant prediction."""
    over_alone: Mapping[str, float]
    """Task -> percent by which the better of the two centralised trainings is better than training alone."""
    falling: Mapping[str, float]
    """Task -> percent by which the training loss of clients that train alone falls in one of the last rounds."""
    seeds: tuple[int, ...]

    @property
    def reasons(self) -> list[str]:
        """Return why the benchmark is not sensitive enough; empty if it is."""
        unmeasured = [t for t in self.tasks if math.isnan(self.over_constant[t]) or math.isnan(self.over_alone[t])]
        if unmeasured:
            return [
                f"no change in percent on validation data of {', '.join(unmeasured)}, in all seeds: are there clients, "
                "and validation data, of these tasks in each?"
            ]
        failed = [
            f"{task}: training alone is {gain:+.1f} % better than the constant prediction, expected "
            f"{OVER_CONSTANT:g} % or more"
            for task, gain in self.over_constant.items()
            if gain < OVER_CONSTANT
        ]
        gain = fmean(self.over_alone.values())
        if gain < OVER_ALONE:
            failed.append(
                f"all data in one place is {gain:+.1f} % better than training alone (mean over tasks), expected "
                f"{OVER_ALONE:g} % or more"
            )
        failed += [
            f"{task}: the training loss still falls by {fall:.1f} % per round, expected {STILL:g} % or less"
            for task, fall in self.falling.items()
            if not fall <= STILL
        ]
        return failed

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return one line per task: (task, and the three numbers in percent)."""
        return [
            (t, f"{self.over_constant[t]:+.1f}", f"{self.over_alone[t]:+.1f}", f"{self.falling[t]:.2f}")
            for t in self.tasks
        ]


def judge(grid: Grid, folder: Path) -> tuple[list[Verdict], list[str]]:
    """Return a verdict for each data set of a grid with the base `Local` and references, and why others have none.

    Raises StateError where all do.
    """
    results, _ = read(grid, folder, "val")
    verdicts, unjudged = [], []
    for data in grid.data:
        try:
            verdicts.append(_verdict(grid, data, results))
        except StateError as error:
            unjudged.append(str(error))
    if not verdicts:
        raise StateError(unjudged[0])
    return verdicts, unjudged


def _verdict(grid: Grid, data: str, results: Mapping[Combination, Side]) -> Verdict:
    columns = [column for column in columns_of(grid, data, results) if column.task]
    directions = {column.task: column.direction for column in columns}
    alone = _runs(results, data, ALONE)
    one, constant = means(columns, alone), means(columns, _runs(results, data, "constant"))
    # A grid of one task has centralised training once.
    names = [name for name in grid.reference_rows if name.startswith("centralised")] or ["centralised"]
    centralised = [means(columns, _runs(results, data, name)) for name in names]
    terms, each = (
        delta_terms(one, constant, directions),
        [delta_terms(values, one, directions) for values in centralised],
    )
    return Verdict(
        data,
        tuple(directions),
        {task: terms.get(task, math.nan) for task in directions},
        {task: max(terms.get(task, math.nan) for terms in each) for task in directions},
        {task: fmean(falling(run, task) for run in alone.runs.values()) for task in directions},
        tuple(alone.runs),
    )


def _runs(results: Mapping[Combination, Side], data: str, base: str) -> Side:
    for (name, label, _), runs in results.items():
        if (name, label) == (data, base):
            return runs
    raise StateError(f"{data}: {base} has not been run; a benchmark needs {ALONE}, centralised and constant")


def falling(run: Run, task: str) -> float:
    """Return the percent by which the mean training loss of a task fell per round, at the end of a run.

    From the mean losses of the first and the second half of the last rounds.
    """
    by_round = [
        fmean(losses)
        for line in run.rounds
        if (losses := [record["loss"] for record in line.get("train", ()) if record["task"] == task])
    ]
    last = by_round[-max(2, round(LAST * len(by_round))) :]
    if len(last) < 2:
        raise StateError(f"{run.folder}: expected several rounds of training, found {len(by_round)}")
    half = len(last) // 2
    before, after = fmean(last[:half]), fmean(last[-half:])
    apart = (len(last) - half) or 1
    return 100 * (1 - (max(after, 1e-12) / before) ** (1 / apart)) if before > 0 else 0.0


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines to print below the tables."""
    lines = []
    for v in verdicts:
        lines += [f"{v.data}: {reason}" for reason in v.reasons]
        lines += [] if v.reasons else [f"{v.data}: this benchmark can judge (validation data, seeds {v.seeds})"]
    return lines
