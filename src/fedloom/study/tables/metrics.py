"""Every metric of every task, not only the one that a task is judged by (DFMTL thesis, Table 6.16)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedloom.federation.runs.reader import TaskMetric
from fedloom.study.grid import Grid, together
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.markup import Records
from fedloom.study.tables.results import about_model, read
from fedloom.study.tables.sheet import Sheet, Sheeted


@dataclass(frozen=True)
class AllMetrics(Sheeted):
    """What `all_metrics` found."""

    title: str
    about: str
    numbers: Mapping[tuple[str, TaskMetric], Mapping[str, Estimate]]
    """(data set, metric of a task) -> cell -> number."""

    def sheet(self) -> Sheet:
        """One line a metric, one column a cell, with the cell's rank among those that have the metric."""
        cells = list(dict.fromkeys(cell for found in self.numbers.values() for cell in found))
        lines = tuple(
            (f"{data}: {metric}", *(_ranked(found, cell, metric.direction) for cell in cells))
            for (data, metric), found in self.numbers.items()
        )
        return Sheet(self.title, ("mean ± 95 % t-interval (rank)", *cells), lines, (self.about,))

    def records(self) -> Records:
        """One line a metric and cell, in full precision."""
        lines = [
            (data, cell, metric.task, metric.metric, metric.direction, e.mean, e.half, e.n)
            for (data, metric), found in self.numbers.items()
            for cell, e in found.items()
        ]
        return Records(("data", "cell", "task", "metric", "direction", "mean", "ci95_half", "seeds"), lines)


def all_metrics(grid: Grid, folder: Path, split: str = "test") -> AllMetrics:
    """Means over the clients that hold a task, then over seeds. Raises StateError where no run has finished."""
    results, _ = read(grid, folder, split)
    numbers: dict[tuple[str, TaskMetric], dict[str, Estimate]] = {}
    for (data, base, addon), result in results.items():
        values: dict[TaskMetric, list[float]] = {}
        for seed, final in result.finals.items():
            for task, by_metric in final.values.items():
                for metric, value in by_metric.items():
                    key = TaskMetric(task, metric, result.runs[seed].direction(task, metric))
                    values.setdefault(key, []).append(value)
        for key, found in values.items():
            numbers.setdefault((data, key), {})[together(base, addon)] = Estimate.of(found)
    about = f"{split} split; mean over the clients with the task; {about_model(grid, results)}."
    return AllMetrics(grid.title or grid.name, about, numbers)


def _ranked(found: Mapping[str, Estimate], cell: str, direction: str) -> str:
    """A cell's number with its rank, equal ones alike; '' where the cell lacks the metric."""
    if cell not in found:
        return ""
    sign = 1 if direction == "min" else -1
    mine = sign * found[cell].mean
    if math.isnan(mine):
        return str(found[cell])
    return f"{found[cell]} ({1 + sum(sign * other.mean < mine for other in found.values())})"
