"""The figures of grids: numbers over a parameter, and over rounds.

A figure is a registered function (grid, folder, split, *, parameters) -> a chart (see `study.charts`); its keyword-only
parameters are the keys of a grid's `figure` section. Free of torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fedloom.core.errors import RecipeError, StateError, nearest
from fedloom.core.grouping import nested
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import value_at
from fedloom.federation.runs.reader import Run
from fedloom.study import charts, papers
from fedloom.study.charts import Chart
from fedloom.study.grid import Cell, Grid, cell_of, cells, select, together
from fedloom.study.results import (
    OVERALL,
    Column,
    Combination,
    Side,
    Values,
    about_model,
    change,
    columns_of,
    estimate,
    one_metric,
    over_rounds,
    read,
)
from fedloom.study.significance import Ranks
from fedloom.study.statistics import LEVEL, Estimate, p_is

FIGURES = Registry("figure")
"""Functions (grid, folder, split, *, parameters) -> chart."""
Point = tuple[float, Estimate]
Names = list[str] | None
ALSO = tuple(name for name in OVERALL if name != "delta_m")
WIDEST = 6
"""Panels in a row, at most."""
WIDE = 30
"""Losses that differ by a larger factor are drawn on a logarithmic scale."""


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


class Panels:
    """One panel per data set (in rows of its own) and column; iterates over (data set, column, title).

    Delta comes first, then the other columns over all tasks, then tasks (or domains). `overall` names the columns over
    all tasks that the figure can draw. Without a choice of `tasks` it draws those that the grid has in its table, and
    the average over domains.
    """

    def __init__(
        self, grid: Grid, results: Mapping[Combination, Side], tasks: Sequence[str] | None, overall: Sequence[str]
    ) -> None:
        asked = [*(["average"] if grid.show == "domains" else []), *(t for t in tasks or () if t in ALSO)]
        wider = grid.model_copy(update={"also": tuple(dict.fromkeys([*asked, *grid.also]))})
        self.grid, self.results = grid, results
        self.columns = {data: columns_of(wider, data, results) for data in grid.data}
        drawn = {data: [c for c in of if c.task or c.metric in overall] for data, of in self.columns.items()}
        _refuse_absent(tasks, [c.task or c.metric for columns in drawn.values() for c in columns])
        self.panels: list[tuple[str, Column]] = []
        for data, columns in drawn.items():
            chosen = [c for c in columns if tasks is None or (c.task or c.metric) in tasks or c.metric == "delta_m"]
            self.panels += [(data, c) for c in sorted(chosen, key=lambda c: (c.metric != "delta_m", bool(c.task)))]

    def __iter__(self) -> Iterator[tuple[str, Column, str]]:
        several = len({data for data, _ in self.panels}) > 1
        for data, column in self.panels:
            yield data, column, f"{data}: {column}" if several else str(column)

    def estimate(self, where: Combination, column: Column) -> Estimate | None:
        """Return a cell's number in a column, if it has runs; the reference of Delta is at 0."""
        data, base, addon = where
        if (result := self.results.get(where)) is None:
            return None
        if column.metric != "delta_m":
            return estimate(column, self.columns[data], result)
        reference = self.grid.reference(base)
        other = self.results.get((data, *reference)) if reference else None
        if other is None:
            return None
        if reference == (base, addon):
            return Estimate(0.0, math.nan, len(result.values))
        directions = {c.task: c.direction for c in self.columns[data] if c.task}
        return change(result.values, other.values, directions, result.ratio)

    def finished(self, drawn: Sequence[Chart], about: str) -> Chart:
        """Put all panels on one sheet, each data set in rows of its own where that fits."""
        each = max(sum(data == one for data, _ in self.panels) for one in self.columns)
        width = math.ceil(each / math.ceil(each / WIDEST))
        return charts.concat(drawn, width, self.grid.title or self.grid.name, about)


def draw(grid: Grid, folder: Path, out: Path, split: str = "test", named: str | None = None) -> None:
    """Draw a grid's figure, or one of its `figures`, to a file; its ending (see `charts.KINDS`) says the format.

    Raises RecipeError for a grid without that figure, StateError where nothing has been run, UserError for a bad file.
    """
    section = grid.figure if named is None else grid.figures.get(named)
    if section is None and grid.figures:
        raise RecipeError(
            f"grid {grid.name} has no figure {named or 'without a name'!r}: name {', '.join(grid.figures)}"
        )
    if section is None:
        raise RecipeError(f"grid {grid.name} has no figure: 'figure' is one of {', '.join(sorted(FIGURES.entries))}")
    charts.save(section.entry.function(grid, folder, split, **section.params), out)


def of_ranks(ranks: Ranks) -> Chart:
    """Draw mean ranks, the best on top, each with a line as long as the critical difference.

    Methods whose lines overlap do not differ significantly (Demsar, Statistical comparisons of classifiers over
    multiple data sets, 2006).
    """
    r = ranks.ranking
    half = r.critical / 2
    several = {name: (rank, rank - half, rank + half) for name, rank in r.ranks.items()}
    texts = {name: f"{rank:.2f}" for name, rank in r.ranks.items()}
    chart = charts.intervals(several, "mean rank, 1 is best", texts=texts, signed=False)
    friedman = "" if math.isnan(r.p) else f" Friedman's test {p_is(r.p)}."
    about = (
        f"{ranks.split} split; mean ranks over N = {r.blocks} blocks ({ranks.block}). Methods whose lines overlap "
        f"do not differ significantly: by less than the critical difference of Nemenyi at {LEVEL:.0%}, "
        f"{r.critical:.2f}.{friedman}{' So no methods differ significantly.' if r.p > LEVEL else ''}"
    )
    return charts.concat([chart], title=ranks.title, about=about)


@FIGURES.register("sweep", source="FedDEA, Figure 4; F2DC, Figures 6 to 8")
def sweep(
    grid: Grid, folder: Path, split: str, *, parameter: str, label: str = "", tasks: Names = None, log: bool = False
) -> Chart:
    """Draw Delta and each task's metric over a key of the cells' recipes, one line per base.

    `parameter` is the key's path, such as method.add.feddea.rho, and `label` what the axis says; `log` makes the axis
    logarithmic. Cells without the key are horizontal lines. `tasks` are as in `convergence`.
    """
    results = read(grid, folder, split)
    panels = Panels(grid, results, tasks, ("delta_m", "average", "spread", "bits"))
    drawn = []
    for data, column, title in panels:
        several: dict[str, list[Point]] = {}
        alone: dict[str, float] = {}
        for base in grid.bases:
            points = several.setdefault(base, [])
            for addon in grid.addons:
                if (estimate := panels.estimate((data, base, addon), column)) is None:
                    continue
                x = value_at(next(iter(results[data, base, addon].runs.values())).recipe, parameter)
                if isinstance(x, int | float):
                    points.append((float(x), estimate))
                else:
                    text = f"{base} alone" if addon == "-" else together(base, addon)
                    alone[text] = estimate.mean
            least = min((x for x, _ in points), default=1.0)
            if log and least <= 0:
                raise RecipeError(f"figure.log: {parameter} is {least:g} in a cell of {base}, expected above 0")
        xs = [x for points in several.values() for x, _ in points] or [1.0]
        level = {text: [(x, Estimate(v, math.nan, 1)) for x in {min(xs), max(xs)}] for text, v in alone.items()}
        look: dict[str, Any] = {"title": title, "bars": True, "dashed": list(alone), "log": "x" if log else ""}
        drawn.append(lines(several | level, column.metric, label or parameter, "", **look))
    return panels.finished(drawn, f"{split} split; {about_model(grid, results)}; {_spread(results)}")


@FIGURES.register(
    "convergence", source="FedDEA, Figures 5 and 6; FedHCA2, Figure 4 and 1 of its supplement; F2DC, Figure 5"
)
def convergence(
    grid: Grid, folder: Path, split: str, *, only: Names = None, tasks: Names = None, clients: bool = False
) -> Chart:
    """Draw each task's metric over rounds, one line per cell: mean over seeds with its 95 % t-interval as a band.

    A grid that shows domains has them in the place of tasks, and their average. `tasks` chooses among all these, and
    may name 'average' and 'spread' too. `clients` draws a line for each client that holds the task in all runs, instead
    of the mean over them. `only` is as in `best-loss`.
    """
    drawn = {(cell.data, cell.base, cell.addon) for cell in select(grid, only or ())}
    if clients and grid.show == "domains":
        raise RecipeError(f"grid {grid.name}: figure.clients: true found, expected false where 'show' is 'domains'")
    results = read(grid, folder, split)
    panels = Panels(grid, results, tasks, ("average", "spread"))

    @cache
    def histories(where: Combination, client: str | None) -> dict[int, dict[int, Mapping[str, float]]]:
        return {s: over_rounds(r, split, results[where].by_domain, client) for s, r in results[where].runs.items()}

    pairs = itertools.product(grid.bases, grid.addons)
    names = [pair for pair in pairs if any((data, *pair) in drawn for data in grid.data)]
    pictures = []
    for data, column, title in panels:
        holders = _holders(results, data, column.task) if clients else []
        title = f"{title}, {', '.join(holders)}" if holders else title
        several: dict[str, list[Point]] = {}
        groups: dict[str, str] = {}
        for base, addon in names:
            result = results.get((data, base, addon))
            if result is None or (data, base, addon) not in drawn:
                continue
            label = together(base, addon)
            for number, client in enumerate(holders or [None]):
                text = f"{label}, client {number + 1} of {len(holders)}" if len(holders) > 1 else label
                curves = histories((data, base, addon), client)
                several[text] = _over_rounds(result, column, panels.columns[data], curves)
                groups[text] = label
        pictures.append(lines(several, column.metric, "round", "", title=title, groups=groups))
    return panels.finished(pictures, f"{split} split; {_spread(results, 'bands, or bars behind the last round:')}")


@FIGURES.register("activated-dimensions", source="FedDEA, Figure 2")
def activated_dimensions(
    grid: Grid, folder: Path, split: str, *, scope: Literal["encoder", "all"] | None = None
) -> Chart:
    """Draw the dimensions that each update activates in the first and the last round, and the clients' overlap.

    The cells need the add-on activated-dimensions. Only the first seed of each cell is drawn; `split` plays no part.
    """
    runs = _first_seeds(grid, folder, split)
    return papers.draw_overlaps([replace(papers.overlaps_of(run, scope), label=label) for label, run in runs])


@FIGURES.register("hyper-weights", source="FedHCA2, Figures 6 and 7; 2 and 3 of its supplement")
def hyper_weights(grid: Grid, folder: Path, split: str) -> Chart:
    """Draw the weight of the others' updates at each client over the rounds, for each cell that has hyper weights.

    The cells need the method fedhca2. Only the first seed of each cell is drawn; `split` plays no part.
    """
    runs = _first_seeds(grid, folder, split)
    panels = [replace(papers.weights_of(run), label=label) for label, run in runs if any(run.records(papers.HYPER))]
    if not panels:
        raise StateError(f"no cell of grid {grid.name} recorded hyper weights: none has the method fedhca2")
    return papers.draw_weights(panels)


@FIGURES.register("best-loss", source="DFMTL thesis, Figures 6.1, 6.2, 6.4, A.3 and A.4")
def best_loss(grid: Grid, folder: Path, split: str, *, only: Names = None) -> Chart:
    """Draw the best validation loss of each cell, the least on top, with a dot for each seed; `split` plays no part.

    `only` are labels of data sets, bases and add-ons, as of `fedloom grid --only`.
    """
    losses = papers.losses_of(grid, folder, split, only or ())
    drawn = []
    for data, by_cell in losses.by_data.items():
        bests = {name: [run.best for run in runs.values()] for name, runs in by_cell.items()}
        means = {name: fmean(of) for name, of in bests.items()}
        texts = {name: "no finite loss" if math.isnan(mean) else papers.loss_text(mean) for name, mean in means.items()}
        several = {name: {"mean": mean} for name, mean in means.items()}
        drawn.append(charts.bars(several, "best validation loss", title=data, dots=bests, texts=texts))
    return charts.concat(drawn, title=losses.title, about="bars: mean over seeds; dots: seeds")


@FIGURES.register("losses", source="DFMTL thesis, Figures 6.2, 6.3, A.1 and A.5")
def losses(grid: Grid, folder: Path, split: str, *, only: Names = None, tasks: bool = False) -> Chart:
    """Draw the validation loss over rounds, one line per seed, and with `tasks` that of each task; without `split`.

    `only` is as in `best-loss`.
    """
    return loss_curves(papers.losses_of(grid, folder, split, only or ()), tasks)


@FIGURES.register("early-stopping", source="DFMTL thesis, Table 6.9 and Figure A.2")
def early_stopping(grid: Grid, folder: Path, split: str, *, only: Names = None) -> Chart:
    """Draw the rounds configured, run and until the best loss, and the savings of early stopping; without `split`.

    `only` is as in `best-loss`.
    """
    losses = papers.losses_of(grid, folder, split, only or ())
    drawn = []
    for data, by_cell in losses.by_data.items():
        rounds, saved = {}, {}
        for name, runs in by_cell.items():
            configured, ran = (fmean(getattr(run, of) for run in runs.values()) for of in ("configured", "rounds"))
            best = fmean(run.best_round or math.nan for run in runs.values())
            rounds[name] = {"configured": configured, "run": ran, "until the best": best}
            saved[name] = {"saved": 100 * (1 - ran / configured)}
        drawn.append(charts.bars(rounds, "rounds", title=data))
        if any(of["saved"] for of in saved.values()):
            drawn.append(charts.bars(saved, "rounds saved in %", title=data))
    return charts.concat(drawn, 2, losses.title, "means over seeds")


def loss_curves(losses: papers.GridLosses, tasks: bool) -> Chart:
    """Draw losses over rounds, with one colour per cell and one dash per seed; logarithmic where they span much.

    A number that is not finite is a gap. The first panel of a data set is all tasks together; `tasks` adds one for each
    of its tasks. More than `charts.CROWD` cells have panels of their own, on one scale.
    """
    drawn, wide, is_crowd = [], 1, False
    for data in losses.by_data:
        cells = {where: runs for where, runs in losses.cells.items() if where[0] == data}
        is_crowd = len(cells) > charts.CROWD
        every = [run for runs in cells.values() for run in runs.values()]
        names = ["", *dict.fromkeys(task for run in every for task in run.by_task if tasks)]
        wide = max(wide, len(names))
        for task, shown in itertools.product(names, [[where] for where in cells] if is_crowd else [[*cells]]):
            several: dict[str, Mapping[int, float]] = {}
            groups: dict[str, str] = {}
            for where in shown:
                for seed, run in cells[where].items():
                    name = together(*where[1:]) + (f", seed {seed}" if len(cells[where]) > 1 else "")
                    several[name] = run.by_task.get(task, {}) if task else run.by_round
                    groups[name] = together(*where[1:])
            known = [y for by_round in several.values() for y in by_round.values() if math.isfinite(y)]
            log = "y" if known and 0 < WIDE * min(known) < max(known) else ""
            title = f"{data}: {task or 'all tasks'}" + f", {together(*shown[0][1:])}" * is_crowd
            drawn.append(charts.lines(several, "round", "", title=title, groups=groups, log=log))
    about = "validation loss; one line per seed"
    return charts.concat(drawn, 4 if is_crowd else wide, losses.title, about, ["y"] if is_crowd else ())


def _first_seeds(grid: Grid, folder: Path, split: str) -> Iterator[tuple[str, Run]]:
    """Return (label, the run of the first seed) of each combination of the grid that has finished runs."""
    for labels, result in read(grid, folder, split).items():
        seed = min(result.runs)
        yield f"{Cell(*labels, seed).combination}, seed {seed}", result.runs[seed]


def _holders(results: Mapping[Combination, Side], data: str, task: str) -> list[str]:
    """Return the clients that have a task in all runs of a data set."""
    runs = [run for (name, *_), result in results.items() if name == data for run in result.runs.values()]
    clients = [[client for client, info in run.info["clients"].items() if task in info["tasks"]] for run in runs]
    return [client for client in clients[0] if all(client in others for others in clients)] if clients else []


def _over_rounds(
    result: Side, column: Column, columns: Sequence[Column], histories: Mapping[int, Mapping[int, Mapping[str, float]]]
) -> list[Point]:
    """Return a number in the rounds that every seed measured; `histories` is seed -> round -> task -> value."""
    by_round = nested((number, seed, of) for seed, history in histories.items() for number, of in history.items())
    estimates = {number: estimate(column, columns, result, values) for number, values in sorted(by_round.items())}
    return [(float(number), e) for number, e in estimates.items() if e is not None and e.n == len(result.runs)]


@FIGURES.register("radar", source="MaTU, Figure 4")
def radar(grid: Grid, folder: Path, split: str, *, reference: str = "", tasks: Names = None) -> Chart:
    """Draw each task's metric in percent of a reference cell's: a bar per task and cell, for each data set.

    `reference` is a cell as BASE/ADDON, by default the one that the grid's Delta is against; its bars are at 100 %. A
    number is the mean over the seeds that both cells have; for metrics of which less is better it is the inverse.
    """
    results = read(grid, folder, split)
    against = _reference(grid, reference)
    rows = [data for data in grid.data if (data, *against) in results]
    if not rows:
        raise StateError(f"grid {grid.name}: the reference {'/'.join(against)} of its figure has not finished")
    drawn = []
    for data in rows:
        columns = _chosen(columns_of(grid, data, results), tasks)
        base = results[data, *against].values
        shown = {}
        for where in ((data, b, a) for b in grid.bases for a in grid.addons if (b, a) != against):
            if where in results:
                shares = {column.task: _share(results[where].values, base, column) for column in columns}
                if known := [share for share in shares.values() if not math.isnan(share)]:
                    shown[f"{together(*where[1:])}, mean {math.fsum(known) / len(known):.1f} %"] = shares
        named = f"{together(*against)} = 100 %"
        by_task = {c.task: {named: 100.0} | {name: of[c.task] for name, of in shown.items()} for c in columns}
        drawn.append(charts.bars(by_task, f"% of {together(*against)}", title=data))
    return charts.concat(drawn, 3, grid.title or grid.name, f"{split} split; percent of {together(*against)}")


KEY = "partition.tasks_per_client"


@FIGURES.register("tasks-per-client", source="MaTU, Figure 5")
def tasks_per_client(
    grid: Grid, folder: Path, split: str, *, tasks: Names = None, reference: str = "", only: Names = None
) -> Chart:
    """Draw megabytes that a client sends per round, and the mean over tasks, by tasks per client.

    The paper has the megabytes of ten clients; here a grid may have more where ten would leave tasks out. There is one
    line per cell; its points are the data sets of the grid whose recipes set partition.tasks_per_client. The tasks must
    have one metric. `only` is as in `best-loss`. With `reference`, a cell as DATA/BASE/ADDON, tasks are in percent of
    that cell's.
    """
    means = _Means(grid, folder, split, tasks, reference, only)
    drawn = []
    for name in ("sent", "share" if reference else "mean"):
        several: dict[str, list[Point]] = {}
        for base, addon in means.cells:
            points = several.setdefault(together(base, addon), [])
            for data in grid.data:
                result = means.results.get((data, base, addon))
                x = value_at(next(iter(result.runs.values())).recipe, KEY) if result else None
                known = means.of((data, base, addon), name)
                if isinstance(x, int | float) and known is not None:
                    points.append((float(x), known))
        if not any(several.values()):
            raise RecipeError(f"grid {grid.name}: no finished cell sets {KEY}")
        drawn.append(lines(several, "", "tasks per client", "", title=means.titles[name], bars=True))
    return means.finished(drawn)


@FIGURES.register("data-sets", source="MaTU, Figure 6")
def data_sets(
    grid: Grid, folder: Path, split: str, *, tasks: Names = None, reference: str = "", only: Names = None
) -> Chart:
    """Draw the mean over tasks in each data set of the grid, as bars: one colour per cell.

    The tasks must have one metric. `only` is as in `best-loss`. With `reference`, a cell as DATA/BASE/ADDON, a first
    panel has the tasks in percent of that cell's, and its data set has no bars.
    """
    means = _Means(grid, folder, split, tasks, reference, only)
    rows = [data for data in grid.data if data != reference.partition("/")[0]]
    drawn = []
    for name in ("share", "mean") if reference else ("mean",):
        bars: dict[str, dict[str, float]] = {data: {} for data in rows}
        ends: dict[tuple[str, str], charts.Ends] = {}
        for base, addon in means.cells:
            label = together(base, addon)
            for data in rows:
                if (e := means.of((data, base, addon), name)) is not None:
                    bars[data][label] = e.mean
                    if not math.isnan(e.half):
                        ends[data, label] = (e.mean - e.half, e.mean + e.half)
        some = {data: each for data, each in bars.items() if each}
        drawn.append(charts.bars(some, means.titles[name], title=means.titles[name], ends=ends))
    return means.finished(drawn)


class _Means:
    """Means over the tasks of each cell's runs, which must have one metric."""

    def __init__(self, grid: Grid, folder: Path, split: str, tasks: Names, reference: str, only: Names) -> None:
        self.grid, self.split = grid, split
        self.results = read(grid, folder, split)
        ran = {data for data, *_ in self.results}
        self.columns = {data: _chosen(columns_of(grid, data, self.results), tasks) for data in grid.data if data in ran}
        metrics = {(column.metric, column.direction) for columns in self.columns.values() for column in columns}
        one_metric(grid, "figure", "a mean", metrics)
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
        against = f", % of {together(*names[reference][1:])}" if reference else ""
        self.titles = {
            "sent": "MB sent by a client per round",
            "mean": f"{self.metric}",
            "share": f"{self.metric}{against}",
        }
        """The titles of the panels, by the names of `of`."""
        wanted = {(cell.data, cell.base, cell.addon) for cell in select(grid, only or ())}
        drawn = {
            where[1:] for where in self.results if where in wanted and (not reference or where != names[reference])
        }
        self.cells = [(b, a) for b in grid.bases for a in grid.addons if (b, a) in drawn]

    def of(self, where: Combination, name: str) -> Estimate | None:
        """Return a mean over tasks ("mean"), that in percent of the reference's ("share"), or megabytes ("sent")."""
        result = self.results.get(where)
        if result is None:
            return None
        columns = self.columns[where[0]]
        values = result.values
        if name == "share":
            assert self.base is not None
            shares = [[_share({s: v}, self.base, c) for c in columns] for s, v in values.items() if s in self.base]
            numbers = [math.fsum(of_seed) / len(of_seed) for of_seed in shares]
            return Estimate.of(numbers, result.ratio) if numbers else None
        if name == "sent":
            each = [(run.bits_per_task() / 8e6, value_at(run.recipe, KEY)) for run in result.runs.values()]
            known = [sent * k for sent, k in each if isinstance(k, int) and not math.isnan(sent)]
            return Estimate.of(known) if known else None
        column = Column(where[0], "", "average", self.metric.direction)
        return estimate(column, columns, result)

    def finished(self, drawn: Sequence[Chart]) -> Chart:
        """Put the panels on one sheet."""
        title = self.grid.title or self.grid.name
        return charts.concat(drawn, title=title, about=f"{self.split} split; {_spread(self.results)}")


def _spread(results: Mapping[Combination, Side], sign: str = "±") -> str:
    """Return what the intervals of a figure are; where each cell has run with one seed there are none."""
    several = any(len(result.runs) > 1 for result in results.values())
    return f"{sign} 95 % t-interval over seeds" if several else "one seed, so no interval"


def _reference(grid: Grid, named: str) -> tuple[str, str]:
    """Return the reference cell of a figure's percentages."""
    if not named and grid.delta in ("base", "none"):
        raise RecipeError(f"grid {grid.name}: figure.reference: expected BASE/ADDON, because delta names no cell")
    base, addon = cell_of(named or grid.delta)
    if base not in grid.bases or addon not in grid.addons:
        cells = [f"{b}/{a}" for b in grid.bases for a in grid.addons]
        raise RecipeError(f"grid {grid.name}: figure.reference: no cell {named!r}.{nearest(named, cells)}")
    return base, addon


def _chosen(columns: Sequence[Column], tasks: Sequence[str] | None) -> list[Column]:
    """Return the columns of tasks, or of those named. Raises RecipeError for one that is not there."""
    known = [column for column in columns if column.task]
    _refuse_absent(tasks, [column.task for column in known])
    return [column for column in known if tasks is None or column.task in tasks]


def _refuse_absent(tasks: Sequence[str] | None, names: Sequence[str]) -> None:
    for task in tasks or ():
        if task not in names:
            raise RecipeError(f"figure.tasks: no task {task!r}.{nearest(task, names)}")


def _share(values: Values, base: Values, column: Column) -> float:
    """Return a task's metric in percent of the base's, mean over the seeds of both; nan where it is not defined."""
    shares = []
    for seed in values.keys() & base.keys():
        mine, other = values[seed].get(column.task, math.nan), base[seed].get(column.task, math.nan)
        above, below = (mine, other) if column.direction == "max" else (other, mine)
        shares.append(100 * above / below if below else math.nan)
    return math.fsum(shares) / len(shares) if shares else math.nan
