"""Methods with their runs by seed, from a comparison of run folders or from a grid: the input of tests and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from fedloom.federation.runs.reader import Final, Run, TaskMetric
from fedloom.study.grid import Grid, together
from fedloom.study.tables.compare import Comparison
from fedloom.study.tables.results import Combination, about_model, made_by, read
from fedloom.study.tables.table import columns_of


@dataclass(frozen=True)
class Side:
    """The runs of a method by seed, what was measured of the models that count, and each row's number."""

    label: str
    runs: Mapping[int, Run]
    finals: Mapping[int, Final]
    values: Mapping[int, Mapping[str, float]]
    """Seed -> task -> number."""

    @property
    def means(self) -> dict[str, float]:
        """Task -> mean over seeds, of tasks that every seed has."""
        tasks = set[str].intersection(*(set(values) for values in self.values.values()))
        return {task: fmean(values[task] for values in self.values.values()) for task in sorted(tasks)}

    @cached_property
    def clients(self) -> dict[int, dict[str, Final]]:
        """Seed -> client -> the client's own numbers."""
        return {seed: self.runs[seed].by_client(final.split, final.round) for seed, final in self.finals.items()}


def of_comparison(comparison: Comparison) -> list[Side]:
    """A side for each column, the base first."""
    sides = []
    for column in comparison.columns:
        seeds = [run.seed for run in column.runs]
        values = [
            {row.task: final.values.get(row.task, {}).get(row.metric, math.nan) for row in comparison.rows}
            for final in column.finals
        ]
        runs, finals = dict(zip(seeds, column.runs, strict=True)), dict(zip(seeds, column.finals, strict=True))
        sides.append(Side(column.label, runs, finals, dict(zip(seeds, values, strict=True))))
    return sorted(sides, key=lambda side: side.label != comparison.base)


def of_grid(
    grid: Grid, folder: Path, split: str
) -> tuple[dict[Combination, Side], dict[str, tuple[TaskMetric, ...]], tuple[str, ...]]:
    """((data, base, add-on) -> its side, data -> its tasks, what there is to say)."""
    results, missing = read(grid, folder, split)
    notes: tuple[str, ...] = (about_model(grid, results).capitalize() + ".", made_by(grid, results) + ".")
    sides = {}
    for (data, base, addon), result in results.items():
        label = together(base, addon)
        sides[data, base, addon] = Side(label, result.runs, result.finals, result.values())
    rows = {
        data: tuple(TaskMetric(c.task, c.metric, c.direction) for c in columns_of(grid, data, results) if c.task)
        for data in grid.data
    }
    if missing:
        notes += (f"Runs of the grid that have not finished: {len(missing)}.",)
    return sides, rows, notes
