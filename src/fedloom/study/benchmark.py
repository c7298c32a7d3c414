"""Decide on validation data, before any method runs, whether a benchmark is sensitive (docs/benchmarks.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fedloom.core.errors import StateError
from fedloom.study.grid import Grid
from fedloom.study.tables.estimate import Estimate, delta_terms
from fedloom.study.tables.results import STILL
from fedloom.study.tables.seeds import Seeds, of_seeds

ALONE = "Local"
"""The base of a benchmark's grid in which every client trains alone."""
OVER_CONSTANT = 5.0
"""Percent by which training alone must be better than the constant prediction, on every task."""
OVER_ALONE = 5.0
"""Percent (mean over tasks) by which training on all data in one place must be better than training alone."""
LEAST = 3
"""Seeds that an interval needs."""


@dataclass(frozen=True)
class Sensitivity:
    """The result of a benchmark's three rules on validation data: estimates over seeds, in percent."""

    data: str
    tasks: tuple[str, ...]
    over_constant: Mapping[str, Estimate]
    """Task -> how much better training alone is than the constant prediction."""
    over_alone: Mapping[str, Estimate]
    """Task -> how much better the better of the two centralised trainings is than training alone."""
    gain: Estimate
    """The mean of that over tasks."""
    falling: Mapping[str, Estimate]
    """Task -> how much the training loss of clients that train alone falls in the last tenth of the rounds."""
    seeds: tuple[int, ...]

    @property
    def reasons(self) -> list[str]:
        """Return why the benchmark is not sensitive enough; empty if it is."""
        if len(self.seeds) < LEAST:
            return [f"{len(self.seeds)} validation seeds found, expected {LEAST} or more: the rule is about intervals"]
        unmeasured = [t for t in self.tasks if math.isnan(self.over_constant[t].half + self.over_alone[t].half)]
        if unmeasured:
            return [
                f"no change in percent on validation data of {', '.join(unmeasured)}, in some seed: are there clients, "
                "and validation data, of these tasks in each?"
            ]
        end = "at the lower end of the interval"
        failed = [
            f"{task}: training alone is {gain.signed} % better than the constant prediction, expected "
            f"{OVER_CONSTANT:g} % or more {end}"
            for task, gain in self.over_constant.items()
            if gain.mean - gain.half < OVER_CONSTANT
        ]
        if self.gain.mean - self.gain.half < OVER_ALONE:
            failed.append(
                f"all data in one place is {self.gain.signed} % better than training alone (mean over tasks), expected "
                f"{OVER_ALONE:g} % or more {end}"
            )
        failed += [
            f"{task}: the training loss still falls by {fall.signed} % per tenth of the rounds, expected {STILL:g} % "
            "or less at the upper end of the interval"
            for task, fall in self.falling.items()
            if not fall.mean + fall.half <= STILL
        ]
        return failed

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return one line per task: (task, and the three numbers in percent)."""
        first, second, third = self.over_constant, self.over_alone, self.falling
        return [(t, first[t].signed, second[t].signed, third[t].signed) for t in self.tasks]


def judge(grid: Grid, folder: Path) -> tuple[list[Sensitivity], list[str]]:
    """Return the results for each data set of a grid with the base `Local` and references, and why others have none.

    Raises StateError where all have none.
    """
    seeds = of_seeds(grid, folder, "val")
    judged: list[Sensitivity] = []
    unjudged: list[str] = []
    for data in grid.data:
        try:
            judged.append(sensitivity(seeds, data))
        except StateError as error:
            unjudged.append(str(error))
    if not judged:
        raise StateError(unjudged[0])
    return judged, unjudged


def sensitivity(lines: Seeds, data: str) -> Sensitivity:
    """Return the result for one data set, from the validation numbers of every seed.

    Raises StateError where a row of the rule is absent.
    """
    names = lines.methods(data)
    for base in (ALONE, "constant", "centralised"):
        if base not in names:
            raise StateError(f"{data}: {base} has not been run; a benchmark needs {ALONE}, centralised and constant")
    directions = lines.directions(data)
    of = {name: lines.values(data, name) for name in names if name in (ALONE, "constant") or name.startswith("central")}
    seeds = tuple(sorted(set.intersection(*map(set, of.values()))))

    def changes(name: str, base: str) -> dict[str, list[float]]:
        # Each seed's difference, in percent of the base's mean: a base that varies, such as the accuracy of a constant
        # prediction, does not make the interval wide.
        usual = {task: fmean(of[base][seed].get(task, math.nan) for seed in seeds) for task in directions}
        pairs = [(of[name][seed], of[base][seed]) for seed in seeds]
        moved = [{t: usual[t] + v - theirs[t] for t, v in mine.items() if t in theirs} for mine, theirs in pairs]
        terms = [delta_terms(mine, usual, directions) for mine in moved]
        return {task: [by_task.get(task, math.nan) for by_task in terms] for task in directions}

    # A grid of one task has centralised training once.
    each = [changes(name, ALONE) for name in of if name.startswith("central")]
    better = {task: max((one[task] for one in each), key=fmean) for task in directions}
    fall = lines.falling(data, ALONE)
    return Sensitivity(
        data,
        tuple(directions),
        {task: Estimate.of(gains) for task, gains in changes(ALONE, "constant").items()},
        {task: Estimate.of(gains) for task, gains in better.items()},
        Estimate.of([fmean(gains[at] for gains in better.values()) for at in range(len(seeds))]),
        {task: Estimate.of([fall[seed].get(task, math.nan) for seed in seeds]) for task in directions},
        seeds,
    )


def sentences(found: Sequence[Sensitivity]) -> list[str]:
    """Return the lines to print below the tables."""
    lines = []
    for one in found:
        lines += [f"{one.data}: {reason}" for reason in one.reasons]
        if not one.reasons:
            seeds = ", ".join(map(str, one.seeds))
            lines.append(f"{one.data}: this benchmark is sensitive (validation data, seeds {seeds})")
    return lines
