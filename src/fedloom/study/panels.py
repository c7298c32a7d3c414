"""Panels of a figure of a grid: a chart for each column of its table, with lines that have intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedloom.core.errors import RecipeError, nearest
from fedloom.study import charts
from fedloom.study.charts import Chart
from fedloom.study.grid import Grid
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import OVERALL, Column, Combination, Side, change, columns_of, estimate

Point = tuple[float, Estimate]
ALSO = tuple(name for name in OVERALL if name != "delta_m")
WIDEST = 6
"""Panels in a row, at most."""


def lines(several: Mapping[str, Sequence[Point]], metric: str, x: str, y: str, **look: Any) -> Chart:
    """Draw a metric over x with its intervals; points whose number is nan are left out."""
    known = {
        name: sorted((p for p in of if not math.isnan(p[1].mean)), key=lambda p: p[0]) for name, of in several.items()
    }
    means = {name: {at: e.mean for at, e in of} for name, of in known.items() if of}
    bands = {
        name: ends
        for name, of in known.items()
        if (ends := {at: e.ends(metric) for at, e in of if not math.isnan(e.half)})
    }
    return charts.lines(means, x, y, bands=bands, **look)


def _name(column: Column) -> str:
    """What `tasks` calls a column."""
    return column.task or column.metric


class Panels:
    """One panel per data set (in rows of its own) and column; iterates over (data set, column, title).

    Delta comes first, then the other columns over all tasks, then tasks (or domains). `overall` names the columns over
    all tasks that the figure can draw. Without a choice of `tasks` it draws those that the grid has in its table, and
    the average over domains.
    """

    def __init__(
        self,
        grid: Grid,
        results: Mapping[Combination, Side],
        tasks: Sequence[str] | None,
        overall: Sequence[str],
    ) -> None:
        asked = [*(["average"] if grid.show == "domains" else []), *(t for t in tasks or () if t in ALSO)]
        wider = grid.model_copy(update={"also": tuple(dict.fromkeys([*asked, *grid.also]))})
        self.grid, self.results = grid, results
        self.values = {where: result.values for where, result in results.items()}
        self.columns = {data: columns_of(wider, data, results) for data in grid.data}
        names = [_name(c) for columns in self.columns.values() for c in columns if c.task or c.metric in overall]
        for task in tasks or ():
            if task not in names:
                raise RecipeError(f"figure.tasks: no task {task!r}.{nearest(task, names)}")
        self.panels: list[tuple[str, Column]] = []
        for data, columns in self.columns.items():
            drawn = [c for c in columns if c.task or c.metric in overall]
            chosen = [c for c in drawn if tasks is None or _name(c) in tasks or c.metric == "delta_m"]
            self.panels += [(data, c) for c in sorted(chosen, key=lambda c: (c.metric != "delta_m", bool(c.task)))]

    def __iter__(self) -> Iterator[tuple[str, Column, str]]:
        several = len({data for data, _ in self.panels}) > 1
        for data, column in self.panels:
            yield data, column, f"{data}: {column}" if several else str(column)

    def estimate(self, where: Combination, column: Column) -> Estimate | None:
        """A cell's number in a column; a cell that Delta is against is at 0."""
        data, base, addon = where
        values = self.values[where]
        if column.metric != "delta_m":
            return estimate(column, self.columns[data], self.results[where].runs, values)
        reference = self.grid.reference(base)
        other = self.values.get((data, *reference)) if reference else None
        if other is None:
            return None
        if reference == (base, addon):
            return Estimate(0.0, math.nan, len(values))
        return change(values, other, {c.task: c.direction for c in self.columns[data] if c.task})

    def finished(self, drawn: Sequence[Chart], about: str) -> Chart:
        """The sheet of all panels, a data set in rows of its own where that fits."""
        each = max(sum(data == one for data, _ in self.panels) for one in self.columns)
        width = math.ceil(each / math.ceil(each / WIDEST))
        return charts.concat(drawn, width, self.grid.title or self.grid.name, about)
