"""The figures of grids: numbers over a parameter, and over rounds.

A figure is a registered function (grid, folder, split, *, parameters) -> matplotlib Figure; its keyword-only
parameters are the keys of a grid's `figure` section. Free of torch; matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import RecipeError, StateError, nearest, writing
from fedloom.core.extras import figure, save_figure
from fedloom.core.settings.names import value_at
from fedloom.core.settings.registry import Registry
from fedloom.federation.runs.reader import Run
from fedloom.study import palette
from fedloom.study.grid import Grid, cells, select, together
from fedloom.study.panels import STYLES, Panels, Point, dashes, legend_below, line, titled
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import (
    Column,
    Combination,
    Side,
    Values,
    about_model,
    columns_of,
    estimate,
    over_rounds,
    read,
)

FIGURES = Registry("figure")
"""Functions (grid, folder, split, *, parameters) -> matplotlib Figure."""


def draw(grid: Grid, folder: Path, out: Path, split: str = "test", named: str | None = None) -> None:
    """Draw a grid's figure, or one of its `figures`, to a file; its ending (.png, .svg, .pdf) says the format.

    Raises RecipeError for a grid without that figure, StateError where nothing has been run, UserError for a bad file.
    """
    section = grid.figure if named is None else grid.figures.get(named)
    if section is None and grid.figures:
        raise RecipeError(
            f"grid {grid.name} has no figure {named or 'without a name'!r}: name {', '.join(grid.figures)}"
        )
    if section is None:
        raise RecipeError(f"grid {grid.name} has no figure: 'figure' is one of {', '.join(sorted(FIGURES.entries))}")
    made = section.entry.function(grid, folder, split, **section.params)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(made, out, dpi=150)


@FIGURES.register("sweep", source="FedDEA, Figure 4; F2DC, Figures 6 to 8")
def sweep(
    grid: Grid,
    folder: Path,
    split: str,
    *,
    parameter: str,
    label: str = "",
    tasks: list[str] | None = None,
    log: bool = False,
) -> Any:
    """Delta and each task's metric over a key of the cells' recipes, one line per base.

    `parameter` is the key's path, such as method.add.feddea.rho, and `label` what the axis says; `log` makes the axis
    logarithmic. Cells without the key are horizontal lines. `tasks` are as in `convergence`.
    """
    results, _ = read(grid, folder, split)
    panels = Panels(grid, results, tasks, ("delta_m", "average", "spread", "bits"))
    for data, column, axes in panels:
        for number, (color, base) in enumerate(panels.colors(grid.bases)):
            points: list[Point] = []
            for addon in grid.addons:
                result = results.get((data, base, addon))
                found = panels.estimate((data, base, addon), column) if result else None
                if result is None or found is None:
                    continue
                x = value_at(next(iter(result.runs.values())).recipe, parameter)
                if isinstance(x, int | float):
                    points.append((float(x), found))
                else:
                    text = f"{base} alone" if addon == "-" else together(base, addon)
                    axes.axhline(found.mean, color=color, linestyle="--", linewidth=1, label=text)
            least = min((x for x, _ in points), default=1.0)
            if log and least <= 0:
                raise RecipeError(f"figure.log: {parameter} is {least:g} in a cell of {base}, expected above 0")
            line(axes, points, column.metric, base, color, as_bars=True, style=dashes(number))
        axes.set_xlabel(label or parameter)
        if log:
            axes.set_xscale("log")
    return panels.finished(f"{split} split; {about_model(grid, results)}; ± 95 % t-interval over seeds")


@FIGURES.register(
    "convergence", source="FedDEA, Figures 5 and 6; FedHCA2, Figure 4 and 1 of its supplement; F2DC, Figure 5"
)
def convergence(
    grid: Grid,
    folder: Path,
    split: str,
    *,
    only: list[str] | None = None,
    tasks: list[str] | None = None,
    clients: bool = False,
) -> Any:
    """Each task's metric over rounds, one line per cell: mean over seeds with its 95 % t-interval as a band.

    A grid that shows domains has them in the place of tasks, and their average. `tasks` chooses among all these, and
    may name 'average' and 'spread' too. `clients` draws a line for each client that holds the task in all runs, instead
    of the mean over them. `only` is as in `best-loss`.
    """
    drawn = {(cell.data, cell.base, cell.addon) for cell in select(grid, only or ())}
    if clients and grid.show == "domains":
        raise RecipeError(f"grid {grid.name}: figure.clients: true found, expected false where 'show' is 'domains'")
    results, _ = read(grid, folder, split)
    panels = Panels(grid, results, tasks, ("average", "spread"))

    @cache
    def histories(where: Combination, client: str | None) -> dict[int, dict[int, Mapping[str, float]]]:
        return {s: over_rounds(r, split, results[where].by_domain, client) for s, r in results[where].runs.items()}

    pairs = itertools.product(grid.bases, grid.addons)
    names = [pair for pair in pairs if any((data, *pair) in drawn for data in grid.data)]
    for data, column, axes in panels:
        holders = _holders(results, data, column.task) if clients else []
        if holders:
            axes.set_title(f"{axes.get_title()}\n{', '.join(holders)}", fontsize=8)
        for at, (color, (base, addon)) in enumerate(panels.colors(names)):
            result = results.get((data, base, addon))
            if result is None or (data, base, addon) not in drawn:
                continue
            label = together(base, addon)
            for number, client in enumerate(holders or [None]):
                text = f"{label}, client {number + 1} of {len(holders)}" if len(holders) > 1 else label
                points = _over_rounds(result, column, panels.columns[data], histories((data, base, addon), client))
                style = STYLES[number % len(STYLES)] if len(holders) > 1 else dashes(at)
                line(axes, points, column.metric, text, color, as_bars=False, style=style)
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    return panels.finished(f"{split} split; bands: 95 % t-interval over seeds")


@FIGURES.register("activated-dimensions", source="FedDEA, Figure 2")
def activated_dimensions(
    grid: Grid, folder: Path, split: str, *, scope: Literal["encoder", "all"] | None = None
) -> Any:
    """Which dimensions each update activates in the first and the last round, and the clients' overlap, cell by cell.

    The cells need the add-on activated-dimensions. Only the first seed of each cell is drawn; `split` plays no part.
    """
    from fedloom.study.papers.activated_dimensions import picture, table

    runs = _first_seeds(grid, folder, split)
    return picture([replace(table(run, scope), label=label) for label, run in runs])


@FIGURES.register("hyper-weights", source="FedHCA2, Figures 6 and 7; 2 and 3 of its supplement")
def hyper_weights(grid: Grid, folder: Path, split: str) -> Any:
    """How much each client takes of what the others learned, over the rounds, for each cell that has hyper weights.

    The cells need the method fedhca2. Only the first seed of each cell is drawn; `split` plays no part.
    """
    from fedloom.study.papers.hyper_weights import KIND, picture, table

    found = [
        replace(table(run), label=label) for label, run in _first_seeds(grid, folder, split) if any(run.records(KIND))
    ]
    if not found:
        raise StateError(f"no cell of grid {grid.name} recorded hyper weights: none has the method fedhca2")
    return picture(found)


@FIGURES.register("best-loss", source="DFMTL thesis, Figures 6.1, 6.2, 6.4, A.3 and A.4")
def best_loss(grid: Grid, folder: Path, split: str, *, only: list[str] | None = None) -> Any:
    """The best validation loss of each cell, the least on top, with a dot for each seed; `split` plays no part.

    `only` are labels of data sets, bases and add-ons, as of `fedloom grid --only`.
    """
    from fedloom.study.papers.losses import bars, losses_of

    return bars(losses_of(grid, folder, split, only or ()))


@FIGURES.register("losses", source="DFMTL thesis, Figures 6.2, 6.3, A.1 and A.5")
def losses(grid: Grid, folder: Path, split: str, *, only: list[str] | None = None, tasks: bool = False) -> Any:
    """The validation loss over rounds, a line for each seed, and with `tasks` that of each task; `split` plays no part.

    `only` is as in `best-loss`.
    """
    from fedloom.study.papers.losses import curves, losses_of, task_losses

    found, results = losses_of(grid, folder, split, only or ()), read(grid, folder, split)[0]
    cells = found.cells if tasks else ()
    return curves(found, {where: {s: task_losses(run) for s, run in results[where].runs.items()} for where in cells})


@FIGURES.register("early-stopping", source="DFMTL thesis, Table 6.9 and Figure A.2")
def early_stopping(grid: Grid, folder: Path, split: str, *, only: list[str] | None = None) -> Any:
    """Rounds configured, run and until the best loss, and what early stopping saved; `split` plays no part.

    `only` is as in `best-loss`.
    """
    from fedloom.study.papers.losses import losses_of, stopping

    return stopping(losses_of(grid, folder, split, only or ()))


def _first_seeds(grid: Grid, folder: Path, split: str) -> Iterator[tuple[str, Run]]:
    """(what it is called, the run of the first seed) of each combination of the grid that has finished runs."""
    for labels, result in read(grid, folder, split)[0].items():
        seed = min(result.runs)
        yield " / ".join(label for label in labels if label != "-") + f", seed {seed}", result.runs[seed]


def _holders(results: Mapping[Combination, Side], data: str, task: str) -> list[str]:
    """Clients that hold a task in all runs of a data set."""
    runs = [run for (name, *_), result in results.items() if name == data for run in result.runs.values()]
    held = [[client for client, info in run.info["clients"].items() if task in info["tasks"]] for run in runs]
    return [client for client in held[0] if all(client in others for others in held)] if held else []


def _over_rounds(
    result: Side,
    column: Column,
    columns: Sequence[Column],
    histories: Mapping[int, Mapping[int, Mapping[str, float]]],
) -> list[Point]:
    """A column's number in the rounds that every seed has measured; `histories` is seed -> round -> task -> value."""
    by_round: dict[int, dict[int, Mapping[str, float]]] = {}
    for seed, history in histories.items():
        for number, by_task in history.items():
            by_round.setdefault(number, {})[seed] = by_task
    found = {number: estimate(column, columns, result.runs, values) for number, values in sorted(by_round.items())}
    return [(float(number), e) for number, e in found.items() if e is not None and e.n == len(result.runs)]


@FIGURES.register("radar", source="MaTU, Figure 4")
def radar(grid: Grid, folder: Path, split: str, *, reference: str = "", tasks: list[str] | None = None) -> Any:
    """Each task's metric in percent of a reference cell's: one line per cell around a circle, for each data set.

    `reference` is a cell as BASE/ADDON, by default the one that the grid's Delta is against; its circle is at 100 %. A
    number is the mean over the seeds that both cells have; for metrics of which less is better it is the inverse.
    """
    results, _ = read(grid, folder, split)
    against = _reference(grid, reference)
    rows = [data for data in grid.data if (data, *against) in results]
    if not rows:
        raise StateError(f"grid {grid.name}: the reference {'/'.join(against)} of its figure has not finished")
    page = figure(6.4 * len(rows), 6.4)
    panels = page.subplots(1, len(rows), squeeze=False, subplot_kw={"projection": "polar"})[0]
    for data, axes in zip(rows, panels, strict=True):
        columns = _chosen(columns_of(grid, data, results), tasks)
        angles = [2 * math.pi * i / len(columns) for i in range(len(columns))]
        base = results[data, *against].values
        circle = [2 * math.pi * i / 180 for i in range(181)]
        axes.plot(circle, [100.0] * len(circle), color="black", linewidth=1, label=f"{together(*against)} = 100 %")
        cells = [(data, b, a) for b in grid.bases for a in grid.addons if (b, a) != against]
        for number, where in enumerate(cells):
            if where not in results:
                continue
            shares = [_share(results[where].values, base, column) for column in columns]
            known = [share for share in shares if not math.isnan(share)]
            if not known:
                continue
            label = f"{together(*where[1:])}, mean {math.fsum(known) / len(known):.1f} %"
            color = palette.color(number)
            axes.plot([*angles, angles[0]], [*shares, shares[0]], color=color, marker="o", markersize=3, label=label)
        axes.set_xticks(angles, [column.task for column in columns], fontsize=8)
        for name, angle in zip(axes.get_xticklabels(), angles, strict=True):  # names lie outside of the circle
            side = round(math.cos(angle), 1)
            name.set_horizontalalignment("left" if side > 0 else "right" if side < 0 else "center")
        axes.set_ylim(bottom=0)
        axes.set_title(data, fontsize=10)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    return titled(page, grid.title or grid.name, f"{split} split; percent of {together(*against)}")


@FIGURES.register("tasks-per-client", source="MaTU, Figure 5")
def tasks_per_client(
    grid: Grid, folder: Path, split: str, *, tasks: list[str] | None = None, reference: str = ""
) -> Any:
    """Megabits that a client sends a round for each of its tasks, and the mean over tasks, by tasks per client.

    There is one line per cell; its points are the data sets of the grid whose recipes set partition.tasks_per_client.
    The tasks must have one metric. With `reference`, a cell as DATA/BASE/ADDON, tasks are in percent of that cell's.
    """
    means = _Means(grid, folder, split, tasks, reference)
    page, panels = means.page(("bits", "share" if reference else "mean"))
    found = False
    for name, axes in panels.items():
        for number, (color, (base, addon)) in enumerate(Panels.colors(means.cells)):
            points: list[Point] = []
            for data in grid.data:
                result = means.results.get((data, base, addon))
                x = value_at(next(iter(result.runs.values())).recipe, "partition.tasks_per_client") if result else None
                known = means.of((data, base, addon), name)
                if isinstance(x, int | float) and known is not None:
                    points.append((float(x), known))
            found = found or bool(points)
            line(axes, points, "", together(base, addon), color, as_bars=True, style=dashes(number))
        axes.set_xlabel("tasks per client")
        axes.xaxis.get_major_locator().set_params(integer=True)
    if not found:
        raise RecipeError(f"grid {grid.name}: no finished cell sets partition.tasks_per_client")
    legend_below(page)
    return page


@FIGURES.register("data-sets", source="MaTU, Figure 6")
def data_sets(grid: Grid, folder: Path, split: str, *, tasks: list[str] | None = None, reference: str = "") -> Any:
    """The mean over tasks in each data set of the grid, as bars: one colour per cell.

    The tasks must have one metric. With `reference`, a cell as DATA/BASE/ADDON, a first panel has the tasks in percent
    of that cell's, and its data set has no bars.
    """
    means = _Means(grid, folder, split, tasks, reference)
    page, panels = means.page(("share", "mean") if reference else ("mean",))
    rows = [data for data in grid.data if data != reference.partition("/")[0]]
    width = 0.8 / len(means.cells)
    for name, axes in panels.items():
        for number, (color, (base, addon)) in enumerate(Panels.colors(means.cells)):
            bars = [(at, e) for at, data in enumerate(rows) if (e := means.of((data, base, addon), name)) is not None]
            if not bars:
                continue
            places = [at + (number - (len(means.cells) - 1) / 2) * width for at, _ in bars]
            halves = [0.0 if math.isnan(e.half) else e.half for _, e in bars]
            label = together(base, addon)
            axes.bar(places, [e.mean for _, e in bars], width, yerr=halves, color=color, label=label, capsize=2)
        axes.set_xticks(range(len(rows)), rows, fontsize=8)
    legend_below(page)
    return page


class _Means:
    """Means over the tasks of each cell's runs, which must have one metric."""

    def __init__(self, grid: Grid, folder: Path, split: str, tasks: Sequence[str] | None, reference: str) -> None:
        self.grid, self.split = grid, split
        self.results, _ = read(grid, folder, split)
        ran = {data for data, *_ in self.results}
        self.columns = {data: _chosen(columns_of(grid, data, self.results), tasks) for data in grid.data if data in ran}
        metrics = {(column.metric, column.direction) for columns in self.columns.values() for column in columns}
        if len(metrics) > 1:
            several = ", ".join(sorted(metric for metric, _ in metrics))
            raise RecipeError(f"grid {grid.name}: a mean over tasks needs one metric, found {several}")
        self.metric = Column("", "mean over tasks", *metrics.pop())
        names = {"/".join(where): where for cell in cells(grid) for where in [(cell.data, cell.base, cell.addon)]}
        if reference and reference not in names:
            raise RecipeError(
                f"grid {grid.name}: figure.reference: no cell {reference!r}, expected DATA/BASE/ADDON."
                f"{nearest(reference, names)}"
            )
        if reference and names[reference] not in self.results:
            raise StateError(f"grid {grid.name}: the reference {reference} of its figure has not finished")
        self.base = self.results[names[reference]].values if reference else None
        self.against = together(*names[reference][1:]) if reference else ""
        drawn = {where[1:] for where in self.results if not reference or where != names[reference]}
        self.cells = [(b, a) for b in grid.bases for a in grid.addons if (b, a) in drawn]

    def of(self, where: Combination, name: str) -> Estimate | None:
        """A cell's mean over tasks ("mean"), that in percent of the reference's ("share"), or megabits ("bits")."""
        result = self.results.get(where)
        if result is None:
            return None
        columns = self.columns[where[0]]
        values = result.values
        if name == "share":
            assert self.base is not None
            shares = [[_share({s: v}, self.base, c) for c in columns] for s, v in values.items() if s in self.base]
            numbers = [math.fsum(of_seed) / len(of_seed) for of_seed in shares]
            return Estimate.of(numbers) if numbers else None
        column = Column(where[0], "", "average" if name == "mean" else name, self.metric.direction)
        return estimate(column, columns, result.runs, values)

    def page(self, names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """(the figure, its panels by name)."""
        titles = {
            "bits": str(Column("", "", "bits", "min")),
            "mean": str(self.metric),
            "share": f"{self.metric}, % of {self.against}",
        }
        page = figure(4.5 * len(names), 4.2)
        panels = dict(zip(names, page.subplots(1, len(names), squeeze=False)[0], strict=True))
        for name, axes in panels.items():
            axes.set_title(titles[name], fontsize=10)
            axes.grid(alpha=0.3)
        about = f"{self.split} split; ± 95 % t-interval over seeds"
        return titled(page, self.grid.title or self.grid.name, about), panels


def _reference(grid: Grid, named: str) -> tuple[str, str]:
    """The cell that a figure's numbers are shares of."""
    if not named and grid.delta in ("base", "none"):
        raise RecipeError(f"grid {grid.name}: figure.reference: expected a cell as BASE/ADDON, for delta names none")
    base, _, addon = (named or grid.delta).partition("/")
    if base not in grid.bases or addon not in grid.addons:
        cells = [f"{b}/{a}" for b in grid.bases for a in grid.addons]
        raise RecipeError(f"grid {grid.name}: figure.reference: no cell {named!r}.{nearest(named, cells)}")
    return base, addon


def _chosen(columns: Sequence[Column], tasks: Sequence[str] | None) -> list[Column]:
    """The columns of tasks, or of those named. Raises RecipeError for one that is not there."""
    known = [column for column in columns if column.task]
    for task in tasks or ():
        if task not in [column.task for column in known]:
            names = [column.task for column in known]
            raise RecipeError(f"figure.tasks: no task {task!r}.{nearest(task, names)}")
    return [column for column in known if tasks is None or column.task in tasks]


def _share(values: Values, base: Values, column: Column) -> float:
    """A task's metric in percent of the base's, mean over the seeds of both; nan where it is not defined."""
    shares = []
    for seed in values.keys() & base.keys():
        mine, other = values[seed].get(column.task, math.nan), base[seed].get(column.task, math.nan)
        above, below = (mine, other) if column.direction == "max" else (other, mine)
        shares.append(100 * above / below if below else math.nan)
    return math.fsum(shares) / len(shares) if shares else math.nan
