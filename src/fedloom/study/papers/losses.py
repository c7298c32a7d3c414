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

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run, best_round
from fedloom.study import charts
from fedloom.study.charts import Chart
from fedloom.study.grid import Cell, Grid, select, together
from fedloom.study.tables.output import HasTable, Made, Records, Table
from fedloom.study.tables.results import Combination, read

WIDE = 30
"""Losses that differ by a larger factor are drawn on a logarithmic scale."""
CSV = ("data", "cell", "seed", "best", "best_round", "last", "rounds", "configured", "first_not_finite")


@dataclass(frozen=True)
class RunLosses:
    """One run's validation losses by round, from round 1 on."""

    by_round: Mapping[int, float]
    configured: int
    best_round: int | None
    """The round with the least loss; None where no loss is finite."""
    best: float
    """The least loss; nan where no loss is finite."""
    rounds: int
    """The number of rounds."""
    last: float
    """The loss after the last round."""
    first_not_finite: int | None
    """The first round whose loss is nan or infinite."""

    @staticmethod
    def of(run: Run) -> RunLosses:
        """Read the losses of a run. Raises StateError where it has none."""
        losses = run.validation_losses()
        if not losses:
            raise StateError(f"{run.folder}: no validation loss was measured: evaluation.splits needs val")
        finite = {number: loss for number, loss in losses.items() if math.isfinite(loss)}
        best, last = best_round(finite, "min"), max(losses)
        return RunLosses(
            losses,
            int(run.recipe["training"]["rounds"]),
            best,
            math.nan if best is None else losses[best],
            last,
            losses[last],
            min(losses.keys() - finite.keys(), default=None),
        )


@dataclass(frozen=True)
class GridLosses(HasTable):
    """The losses of all finished runs of a grid, by data set and cell, the least mean first."""

    title: str
    cells: Mapping[Combination, Mapping[int, RunLosses]]
    """(data set, base, add-on) -> seed -> losses."""
    seeds: tuple[int, ...]

    def as_table(self) -> Table:
        """Return one line per cell: the best loss of each seed, mean, deviation and variation of these, and when."""
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
        return Table(self.title, head, tuple(lines), (about,))

    def records(self) -> Records:
        """Return one line per run, in full precision."""
        lines = [
            (data, together(*cell), seed, run.best, run.best_round or None, run.last, run.rounds, run.configured,
             run.first_not_finite or None)
            for (data, *cell), runs in self.cells.items()
            for seed, run in runs.items()
        ]  # fmt: skip
        return Records(CSV, lines)


def _number(value: float, digits: int = 4) -> str:
    """Format a loss as people read it: large ones with a power of ten, '' for none."""
    return "nan" if math.isnan(value) else f"{value:.3e}" if abs(value) >= 1e4 else f"{value:.{digits}f}"


def losses_of(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> GridLosses:
    """Read the finished runs of cells with these labels (see `select`); in each data set the least loss first.

    Raises StateError where nothing has finished or no validation loss was measured.
    """
    wanted = {(cell.data, cell.base, cell.addon) for cell in select(grid, only)}
    runs = {where: result.runs for where, result in read(grid, folder, split)[0].items() if where in wanted}
    if not runs:
        raise StateError(f"grid {grid.name}: no cell of {', '.join(only)} has finished in {folder}")
    cells = {where: {seed: RunLosses.of(run) for seed, run in result.items()} for where, result in runs.items()}

    def place(where: Combination) -> tuple[int, bool, float]:
        mean = fmean(run.best for run in cells[where].values())
        return list(grid.data).index(where[0]), math.isnan(mean), mean

    ordered = {where: cells[where] for where in sorted(cells, key=place)}
    return GridLosses(grid.title or grid.name, ordered, grid.seeds)


def over_rounds(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> Made:
    """Return the losses of one run of each cell round by round: of all tasks together, then of each.

    These are Tables 6.10 and 6.14. The run is the one of the first seed; `only` and errors are as in `losses_of`.
    """
    measured, results = losses_of(grid, folder, split, only), read(grid, folder, split)[0]
    first = {where: min(runs) for where, runs in measured.cells.items()}
    single = {where: task_losses(results[where].runs[seed]) for where, seed in first.items()}
    tasks = tuple(dict.fromkeys(task for by_task in single.values() for task in by_task))
    lines, records = [], []
    for where, seed in first.items():
        for number, loss in measured.cells[where][seed].by_round.items():
            losses = (loss, *(single[where].get(task, {}).get(number) for task in tasks))  # None where nobody has it
            numbers = ("" if value is None else _number(value) for value in losses)
            lines.append((f"{Cell(*where, seed)}, round {number}", *numbers))
            records.append((where[0], together(*where[1:]), seed, number, *losses))
    title, head = f"{measured.title}: validation losses by round", ("", "all tasks", *tasks)
    return Made(Table(title, head, tuple(lines)), Records(("data", "cell", "seed", "round", "all", *tasks), records))


def task_losses(run: Run) -> dict[str, dict[int, float]]:
    """Return task -> round (from 1) -> mean over the clients with the task of its validation loss."""
    losses: dict[str, dict[int, float]] = {}
    for final in run.history("val"):
        for task, values in final.values.items():
            if final.round and "loss" in values:
                losses.setdefault(task, {})[final.round] = values["loss"]
    return losses


def bars(losses: GridLosses) -> Chart:
    """Draw the best loss of each cell, the least on top: the mean over seeds as a bar, each seed as a dot."""
    drawn = []
    for data, cells in _by_data(losses).items():
        bests = {name: [run.best for run in runs.values()] for name, runs in cells.items()}
        means = {name: fmean(of) for name, of in bests.items()}
        texts = {name: "no finite loss" if math.isnan(mean) else _number(mean) for name, mean in means.items()}
        several = {name: {"mean": mean} for name, mean in means.items()}
        drawn.append(charts.bars(several, "best validation loss", title=data, dots=bests, texts=texts))
    return charts.concat(drawn, title=losses.title, about="bars: mean over seeds; dots: seeds")


def curves(losses: GridLosses, tasks: Mapping[Combination, Mapping[int, Mapping[str, Mapping[int, float]]]]) -> Chart:
    """Draw losses over rounds, with one colour per cell and one dash per seed; logarithmic where they span much.

    A number that is not finite is a gap. There is one row per data set. The first column is all tasks together; `tasks`
    (cell -> seed -> task -> round -> loss) adds one column per task.
    """
    names = ["all tasks", *dict.fromkeys(task for runs in tasks.values() for one in runs.values() for task in one)]
    drawn = []
    for data in _by_data(losses):
        for task in names:
            several: dict[str, Mapping[int, float]] = {}
            groups: dict[str, str] = {}
            for where in (where for where in losses.cells if where[0] == data):
                for seed, run in losses.cells[where].items():
                    name = together(*where[1:]) + (f", seed {seed}" if len(losses.cells[where]) > 1 else "")
                    several[name] = run.by_round if task == "all tasks" else tasks[where][seed].get(task, {})
                    groups[name] = together(*where[1:])
            known = [y for by_round in several.values() for y in by_round.values() if math.isfinite(y)]
            log = "y" if known and 0 < WIDE * min(known) < max(known) else ""
            drawn.append(charts.lines(several, "round", "", title=f"{data}: {task}", groups=groups, log=log))
    return charts.concat(drawn, len(names), losses.title, "validation loss; one line per seed")


def stopping(losses: GridLosses) -> Chart:
    """Draw rounds configured, run, and until the best one, of each cell, and the share that stopping saved."""
    drawn = []
    for data, cells in _by_data(losses).items():
        rounds, saved = {}, {}
        for name, runs in cells.items():
            configured, ran = (fmean(getattr(run, of) for run in runs.values()) for of in ("configured", "rounds"))
            best = fmean(run.best_round or math.nan for run in runs.values())
            rounds[name] = {"configured": configured, "run": ran, "until the best": best}
            saved[name] = {"saved": 100 * (1 - ran / configured)}
        drawn += [charts.bars(rounds, "rounds", title=data), charts.bars(saved, "rounds saved in %", title=data)]
    return charts.concat(drawn, 2, losses.title, "means over seeds")


def _by_data(losses: GridLosses) -> dict[str, dict[str, Mapping[int, RunLosses]]]:
    """Return data set -> cell -> its runs."""
    by_data: dict[str, dict[str, Mapping[int, RunLosses]]] = {}
    for (data, base, addon), runs in losses.cells.items():
        by_data.setdefault(data, {})[together(base, addon)] = runs
    return by_data
