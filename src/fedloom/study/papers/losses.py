"""The validation losses of a grid's runs, by which the DFMTL thesis ranks its experiments (Tables 6.4 to 6.14).

A loss is the one by which early stopping judges: the mean over clients of their tasks' losses, weighted as the clients
weigh them. So losses of cells whose clients hold other tasks, or weigh them otherwise, are not comparable, although the
thesis compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedloom.core.errors import StateError
from fedloom.core.extras import figure
from fedloom.federation.runs.reader import Run, best_round
from fedloom.study.grid import Cell, Grid, select, together
from fedloom.study.palette import color
from fedloom.study.panels import LEAST, STYLES, titled
from fedloom.study.tables.results import Combination, read
from fedloom.study.tables.sheet import Records, Sheet, Sheeted

WIDE = 30
"""Losses that differ by a larger factor are drawn on a logarithmic scale."""
CSV = ("data", "cell", "seed", "best", "best_round", "last", "rounds", "configured", "first_not_finite")


@dataclass(frozen=True)
class RunLosses:
    """One run's validation losses by round, from round 1 on."""

    by_round: Mapping[int, float]
    configured: int

    @staticmethod
    def of(run: Run) -> RunLosses:
        """Raises StateError where a run has none."""
        found = run.validation_losses()
        if not found:
            raise StateError(f"{run.folder}: no validation loss was measured: evaluation.splits needs val")
        return RunLosses(found, int(run.recipe["training"]["rounds"]))

    @property
    def finite(self) -> dict[int, float]:
        """The rounds whose loss is a finite number."""
        return {number: loss for number, loss in self.by_round.items() if math.isfinite(loss)}

    @property
    def best_round(self) -> int | None:
        """The round with the least loss; None where no loss is finite."""
        return best_round(self.finite, "min")

    @property
    def best(self) -> float:
        """The least loss; nan where no loss is finite."""
        return math.nan if self.best_round is None else self.by_round[self.best_round]

    @property
    def rounds(self) -> int:
        """How many rounds the run had."""
        return max(self.by_round)

    @property
    def last(self) -> float:
        """The loss after the last round."""
        return self.by_round[self.rounds]

    @property
    def first_not_finite(self) -> int | None:
        """The first round whose loss is nan or infinite."""
        return min((number for number, loss in self.by_round.items() if not math.isfinite(loss)), default=None)


@dataclass(frozen=True)
class GridLosses(Sheeted):
    """The losses of all finished runs of a grid, by data set and cell, the least mean first."""

    title: str
    cells: Mapping[Combination, Mapping[int, RunLosses]]
    """(data set, base, add-on) -> seed -> losses."""
    seeds: tuple[int, ...]

    def sheet(self) -> Sheet:
        """One line a cell: the best loss of each seed, mean, standard deviation and variation of these, and when."""
        several = len(self.seeds) > 1
        head = ("best validation loss", *(f"seed {seed}" for seed in self.seeds))
        head += ("mean", "SD", "CV %") if several else ()
        head += ("in round", "at the end", "rounds", "configured", "not finite from")
        lines = []
        for (data, base, addon), runs in self.cells.items():
            bests = [runs[seed].best if seed in runs else None for seed in self.seeds]
            known = [run.best for run in runs.values()]
            mean = fmean(known)
            spread = stdev(known) if len(known) > 1 and math.isfinite(mean) else math.nan
            over = [_number(mean), _number(spread), _number(100 * spread / (mean or math.nan), 1)] if several else []
            rounds = [run.best_round for run in runs.values() if run.best_round is not None]
            failed = [run.first_not_finite for run in runs.values() if run.first_not_finite is not None]
            lines.append(
                (
                    f"{data}: {together(base, addon)}",
                    *("…" if best is None else _number(best) for best in bests),
                    *over,
                    _number(fmean(rounds), 1) if rounds else "",
                    _number(fmean(run.last for run in runs.values())),
                    _number(fmean(run.rounds for run in runs.values()), 1),
                    ", ".join(sorted({str(run.configured) for run in runs.values()})),
                    str(min(failed)) if failed else "",
                )
            )
        about = (
            "Mean over clients of the task-weighted validation loss, as early stopping judges. Not comparable between "
            "cells whose clients hold other tasks or weigh them otherwise. SD: standard deviation over seeds (n - 1); "
            "CV: SD / mean; rounds: means over seeds."
        )
        return Sheet(self.title, head, tuple(lines), (about,))

    def records(self) -> Records:
        """One line a run, in full precision."""
        lines = [
            (*_cell(where, seed), run.best, run.best_round or None, run.last, run.rounds, run.configured,
             run.first_not_finite or None)
            for where, runs in self.cells.items()
            for seed, run in runs.items()
        ]  # fmt: skip
        return Records(CSV, lines)


@dataclass(frozen=True)
class RoundLosses(Sheeted):
    """The losses of one run of each cell round by round: of all tasks together, then of each (Tables 6.10 and 6.14)."""

    title: str
    tasks: tuple[str, ...]
    lines: tuple[tuple[Cell, int, tuple[float | None, ...]], ...]
    """(cell, round, losses); None where nobody has the task."""

    def sheet(self) -> Sheet:
        """One line a cell and round."""
        lines = tuple(
            (f"{cell}, round {number}", *("" if loss is None else _number(loss) for loss in losses))
            for cell, number, losses in self.lines
        )
        return Sheet(f"{self.title}: validation losses by round", ("", "all tasks", *self.tasks), lines)

    def records(self) -> Records:
        """One line a cell and round, in full precision."""
        lines = [
            (*_cell((cell.data, cell.base, cell.addon), cell.seed), number, *losses)
            for cell, number, losses in self.lines
        ]
        return Records(("data", "cell", "seed", "round", "all", *self.tasks), lines)


def _cell(where: Combination, seed: int) -> tuple[str, str, int]:
    return where[0], together(*where[1:]), seed


def _number(value: float, digits: int = 4) -> str:
    """A loss as people read it: large ones with a power of ten, '' for none."""
    return "nan" if math.isnan(value) else f"{value:.3e}" if abs(value) >= 1e4 else f"{value:.{digits}f}"


def losses_of(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> GridLosses:
    """What has been run of a grid, of cells with these labels (see `select`); of each data set the least loss first.

    Raises StateError where nothing has finished or no validation loss was measured.
    """
    wanted = {(cell.data, cell.base, cell.addon) for cell in select(grid, only)}
    runs = {where: found.runs for where, found in read(grid, folder, split)[0].items() if where in wanted}
    if not runs:
        raise StateError(f"grid {grid.name}: no cell of {', '.join(only)} has finished in {folder}")
    cells = {where: {seed: RunLosses.of(run) for seed, run in found.items()} for where, found in runs.items()}

    def place(where: Combination) -> tuple[int, bool, float]:
        mean = fmean(run.best for run in cells[where].values())
        return list(grid.data).index(where[0]), math.isnan(mean), mean

    ordered = {where: cells[where] for where in sorted(cells, key=place)}
    return GridLosses(grid.title or grid.name, ordered, grid.seeds)


def over_rounds(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> RoundLosses:
    """The losses of the first seed of each cell; `only` and what is raised are as in `losses_of`."""
    found, results = losses_of(grid, folder, split, only), read(grid, folder, split)[0]
    first = {where: min(runs) for where, runs in found.cells.items()}
    single = {where: task_losses(results[where].runs[seed]) for where, seed in first.items()}
    tasks = tuple(dict.fromkeys(task for by_task in single.values() for task in by_task))
    lines = tuple(
        (Cell(*where, seed), number, (loss, *(single[where].get(task, {}).get(number) for task in tasks)))
        for where, seed in first.items()
        for number, loss in found.cells[where][seed].by_round.items()
    )
    return RoundLosses(found.title, tasks, lines)


def task_losses(run: Run) -> dict[str, dict[int, float]]:
    """Task -> round (from 1) -> mean over the clients with the task of its validation loss."""
    found: dict[str, dict[int, float]] = {}
    for final in run.history("val"):
        for task, values in final.values.items():
            if final.round and "loss" in values:
                found.setdefault(task, {})[final.round] = values["loss"]
    return found


def bars(found: GridLosses) -> Any:
    """The best loss of each cell, the least on top: the mean over seeds as a bar, each seed as a dot."""
    by_data = _by_data(found)
    most = max(len(cells) for cells in by_data.values())
    page = figure(5.6 * len(by_data), 0.4 * most + 1.6)
    for axes, (data, cells) in zip(page.subplots(1, len(by_data), squeeze=False)[0], by_data.items(), strict=True):
        for at, runs in enumerate(cells.values()):
            bests = [run.best for run in runs.values()]
            mean = fmean(bests)
            if math.isnan(mean):
                axes.text(0, at, " no finite loss", va="center", fontsize=8)
                continue
            axes.barh(at, mean, color=color(0), alpha=0.5)
            axes.plot(bests, [at] * len(bests), "o", color=color(0), markersize=3)
            axes.text(max(bests), at, f"  {_number(mean)}", va="center", fontsize=8)
        axes.set_yticks(range(len(cells)), list(cells), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_title(data, fontsize=10)
        axes.set_xlabel("best validation loss")
    return titled(page, found.title, "bars: mean over seeds; dots: seeds")


def curves(found: GridLosses, tasks: Mapping[Combination, Mapping[int, Mapping[str, Mapping[int, float]]]]) -> Any:
    """Losses over rounds, logarithmic where they span much: a colour a cell, a style a seed; not finite is a gap.

    A row a data set. The first column is all tasks together; `tasks` (cell -> seed -> task -> round -> loss) adds one
    each.
    """
    by_data = _by_data(found)
    names = list(dict.fromkeys(task for runs in tasks.values() for one in runs.values() for task in one))
    page = figure(max(4.2 * (1 + len(names)), LEAST), 3 * len(by_data) + 0.6)
    rows = page.subplots(len(by_data), 1 + len(names), squeeze=False)
    for row, data in zip(rows, by_data, strict=True):
        cells = [where for where in found.cells if where[0] == data]
        for axes, task in zip(row, ("all tasks", *names), strict=True):
            for number, where in enumerate(cells):
                for style, (seed, run) in enumerate(found.cells[where].items()):
                    by_round = tasks[where][seed].get(task, {}) if axes is not row[0] else run.by_round
                    y = [loss if math.isfinite(loss) else math.nan for loss in by_round.values()]
                    label = together(*where[1:]) if style == 0 else None
                    look = {"color": color(number), "linestyle": STYLES[style % len(STYLES)]}
                    axes.plot(list(by_round), y, label=label, linewidth=1, marker=".", markersize=3, **look)
            drawn = [y for one in axes.lines for y in one.get_ydata() if math.isfinite(y)]
            if drawn and 0 < WIDE * min(drawn) < max(drawn):
                axes.set_yscale("log")
            axes.set_title(f"{data}: {task}", fontsize=10)
            axes.set_xlabel("round")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        row[0].legend(fontsize=8)
    return titled(page, found.title, "validation loss; a line a seed")


def stopping(found: GridLosses) -> Any:
    """Rounds configured, run, and until the best one, of each cell, and the share of rounds that stopping saved."""
    by_data = _by_data(found)
    most = max(len(cells) for cells in by_data.values())
    page = figure(11, (0.5 * most + 1.4) * len(by_data))
    for (left, right), (data, cells) in zip(
        page.subplots(len(by_data), 2, squeeze=False), by_data.items(), strict=True
    ):
        for at, runs in enumerate(cells.values()):
            configured = fmean(run.configured for run in runs.values())
            ran = fmean(run.rounds for run in runs.values())
            best = fmean(run.best_round or math.nan for run in runs.values())
            for shift, (value, what) in enumerate(((configured, "configured"), (ran, "run"), (best, "until the best"))):
                left.barh(at + 0.25 * (shift - 1), value, 0.25, color=color(shift), label=what if at == 0 else None)
            right.barh(at, 100 * (1 - ran / configured), 0.5, color=color(2))
        for axes, text in ((left, "rounds"), (right, "rounds saved in %")):
            axes.set_yticks(range(len(cells)), list(cells), fontsize=8)
            axes.invert_yaxis()
            axes.set_title(data, fontsize=10)
            axes.set_xlabel(text)
        left.xaxis.get_major_locator().set_params(integer=True)
        right.set_xlim(0, 100)
    page.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return titled(page, found.title, "means over seeds")


def _by_data(found: GridLosses) -> dict[str, dict[str, Mapping[int, RunLosses]]]:
    """Data set -> cell -> its runs."""
    by_data: dict[str, dict[str, Mapping[int, RunLosses]]] = {}
    for (data, base, addon), runs in found.cells.items():
        by_data.setdefault(data, {})[together(base, addon)] = runs
    return by_data
