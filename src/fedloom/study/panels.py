"""Panels of a figure of a grid: one for each column of its table, with lines that have intervals over seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.extras import figure
from fedloom.study.grid import Grid
from fedloom.study.palette import COLORS, color
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import OVERALL, Column, Combination, Side, change, columns_of, estimate

Point = tuple[float, Estimate]
ALSO = tuple(name for name in OVERALL if name != "delta_m")
WIDEST = 6
"""Panels in a row, at most."""
LETTERS = 13
"""Letters of a title per inch."""
LEAST = 5.5
"""Inches of a figure's width, at least, so that its legend has room."""
STYLES = ("-", "--", ":", "-.")
"""Lines of one colour: clients that hold the same task, seeds of a cell, or cells beyond the last colour."""


def dashes(number: int) -> str:
    """The style of the line of this number: another one where the colours begin anew."""
    return STYLES[number // len(COLORS) % len(STYLES)]


def line(
    axes: Any, points: Sequence[Point], metric: str, label: str, color: str, as_bars: bool, style: str = "-"
) -> None:
    """Draw a metric over x with its intervals, as bars or as a band; points whose number is nan are left out."""
    points = sorted((point for point in points if not math.isnan(point[1].mean)), key=lambda point: point[0])
    if not points:
        return
    x = [point[0] for point in points]
    means = [e.mean for _, e in points]
    low, high = zip(*((e.mean, e.mean) if math.isnan(e.half) else e.ends(metric) for _, e in points), strict=True)
    marker = "o" if as_bars or len(x) == 1 else ""
    axes.plot(x, means, color=color, label=label, linestyle=style, marker=marker, markersize=3)
    if low == high:
        return
    if as_bars:
        sides = [[m - a for m, a in zip(means, low, strict=True)], [b - m for m, b in zip(means, high, strict=True)]]
        axes.errorbar(x, means, yerr=sides, color=color, fmt="none", capsize=2, linewidth=1)
    else:
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _name(column: Column) -> str:
    """What `tasks` calls a column."""
    return column.task or column.metric


class Panels:
    """One panel per data set (in rows of its own) and column; iterates over (data set, column, axes).

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
        rows: list[tuple[str, list[Column]]] = []
        for data, columns in self.columns.items():
            drawn = [c for c in columns if c.task or c.metric in overall]
            chosen = [c for c in drawn if tasks is None or _name(c) in tasks or c.metric == "delta_m"]
            panels = sorted(chosen, key=lambda c: (c.metric != "delta_m", bool(c.task)))
            if panels:
                width = math.ceil(len(panels) / math.ceil(len(panels) / WIDEST))
                rows += [(data, panels[at : at + width]) for at in range(0, len(panels), width)]
        self.rows = rows
        width = max(len(columns) for _, columns in rows)
        self.figure = figure(max(3.4 * width, LEAST), 2.8 * len(rows) + 0.6)
        self.axes = self.figure.subplots(len(rows), width, squeeze=False)
        self.several = len({data for data, _ in rows}) > 1
        self.title = grid.title or grid.name

    def __iter__(self) -> Iterator[tuple[str, Column, Any]]:
        for row, (data, columns) in zip(self.axes, self.rows, strict=True):
            for axes in row[len(columns) :]:
                axes.set_visible(False)
            for axes, column in zip(row, columns, strict=False):
                axes.set_title(f"{data}: {column}" if self.several else str(column), fontsize=10)
                axes.grid(alpha=0.3)
                yield data, column, axes

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

    @staticmethod
    def colors(names: Any) -> list[tuple[str, Any]]:
        """Names with the colours of the palette."""
        return [(color(number), name) for number, name in enumerate(names)]

    def finished(self, about: str) -> Any:
        """The figure with its title and one legend for all panels."""
        legend_below(self.figure)
        return titled(self.figure, self.title, about)


def titled(page: Any, *lines: str) -> Any:
    """A figure under its title, in lines that fit its width."""
    fits = int(LETTERS * page.get_figwidth())
    page.suptitle("\n".join(textwrap.fill(text, fits) for text in lines), fontsize=10)
    return page


def legend_below(page: Any) -> None:
    """One legend for all panels of a figure, below them."""
    by_label: dict[str, Any] = {}
    for axes in page.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    if by_label:
        column = max(map(len, by_label)) / LETTERS + 0.6  # inches
        ncols = max(1, min(4, int(page.get_figwidth() / column)))
        page.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=ncols, fontsize=8)
