"""The table of a grid: bases with their add-ons as lines, the tasks of each data set and Delta as columns.

`tabulate` reads a grid's folder into one structure, which formats.py writes. Free of torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedloom.core.errors import RecipeError, StateError, nearest
from fedloom.federation.runs.reader import ARROWS, Run
from fedloom.study.delta import without_base
from fedloom.study.grid import Cell, Grid, cells, refused_in, together
from fedloom.study.references import at_trivial, note
from fedloom.study.tables.compare import CUT, Estimate, clear_best
from fedloom.study.tables.domains import domain_history
from fedloom.study.tables.results import Combination, CombinationRuns, Values, about_model, change, made_by, read

DELTA = "Δ %"
SPOKEN = {
    "miou": ("mIoU", ""),
    "maxf": ("maxF", ""),
    "odsf": ("odsF", ""),
    "merr": ("mErr", "degrees"),
    "rmse": ("RMSE", "metres"),
    "edge_f_plain": ("F", ""),
    "auc": ("AUC", ""),
}
"""Metric -> (how papers write it, unit where it is no fraction)."""

OVERALL = {
    "delta_m": ("", DELTA),
    "average": ("", "average"),
    "spread": ("standard", "deviation"),
    "bits": ("Mbit up", "a task"),
}
"""Metric over all tasks -> the two lines of its heading."""

WIDEST = 10
"""Columns that fit beside each other."""


@dataclass(frozen=True)
class Column:
    """A column: a task of a data set with its metric, or (task '') the data set's Delta, average or bits."""

    data: str
    task: str = ""
    metric: str = "delta_m"
    direction: str = "max"
    untold: bool = False
    """Whether no method is better than the trivial answer, so that Delta leaves the task out."""

    def __str__(self) -> str:
        return " ".join(part for part in self.parts if part)

    @property
    def parts(self) -> tuple[str, str]:
        """The task, and how it is measured; either may be empty."""
        if not self.task:
            above, name = OVERALL[self.metric]
            return above, f"{name} {ARROWS[self.direction]}"
        return self.task + " †" * self.untold, f"{SPOKEN.get(self.metric, (self.metric,))[0]} {ARROWS[self.direction]}"


@dataclass(frozen=True)
class TableEntry:
    """One number of the table, or why there is none."""

    kind: Literal["value", "base", "missing", "refused", "cannot"]
    estimate: Estimate | None = None
    best: bool = False
    partial: bool = False
    """Whether some seeds have not been run."""
    is_change: bool = False
    metric: str = ""

    @property
    def text(self) -> str:
        """What a reader sees."""
        if self.kind != "value" or self.estimate is None:
            return {"base": "base", "missing": "…", "refused": "refused"}.get(self.kind, "\\")
        number = self.estimate.signed if self.is_change else self.estimate.of_metric(self.metric)
        return number + ("*" if self.partial else "")


@dataclass(frozen=True)
class TableLine:
    """A line of the table: a base with an add-on, and the client where the model is that client's own."""

    base: str
    addon: str
    first: bool
    """Whether the add-on is the grid's first."""
    owner: str = ""
    entries: tuple[TableEntry, ...] = ()
    seeds: Mapping[str, tuple[int, ...]] | None = None
    """Data set -> the seeds that have been run."""
    rounds: Mapping[str, tuple[int, ...]] | None = None
    """Data set -> the round of the model, for each of these seeds."""
    models: Mapping[str, str] | None = None
    """Data set -> 'global', 'personal' or both."""

    @property
    def label(self) -> str:
        """The base alone for the add-on '-'; others follow it, indented: 'FedAvg', '  +DEA', 'FedAMP (semseg)'."""
        owner = f" ({self.owner})" if self.owner else ""
        if self.addon == "-":
            return self.base + owner
        return (f"{self.base} {self.addon}" if self.first else f"  {self.addon}") + owner


@dataclass(frozen=True)
class GridTable:
    """What `tabulate` found. `notes` say what to know before the numbers are believed."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[TableLine, ...]
    split: str
    at: str
    """Which model of a run counts, as the grid says."""
    caption: str
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, int]:
        """Data set -> how many columns it has, in their order."""
        data = [column.data for column in self.columns]
        return {name: data.count(name) for name in dict.fromkeys(data)}

    @property
    def layout(self) -> tuple[tuple[Column, ...], tuple[tuple[str, tuple[TableLine, ...]], ...]]:
        """(columns, lines in groups): one group '' with the data sets beside each other, or one group per data set.

        The latter where the data sets have the same tasks and would be too wide beside each other.
        """
        by_data = {name: [i for i, c in enumerate(self.columns) if c.data == name] for name in self.groups}
        heads = {tuple(replace(self.columns[i], data="", untold=False) for i in at) for at in by_data.values()}
        if len(self.columns) <= WIDEST or len(by_data) < 2 or len(heads) != 1:
            return self.columns, (("", self.lines),)
        groups = tuple(
            (name, tuple(replace(line, entries=tuple(line.entries[i] for i in at)) for line in self.lines))
            for name, at in by_data.items()
        )
        return tuple(self.columns[i] for i in next(iter(by_data.values()))), groups


def tabulate(grid: Grid, folder: Path, split: str = "test") -> GridTable:
    """Read what has been run of a grid. A data set of which no run has finished is no part of it but for a note.

    Raises StateError where no run has finished, or where runs of one data set have different tasks.
    """
    results, missing = read(grid, folder, split)
    refused = refused_in(folder)
    maker = _Maker(grid, split, results, refused, {data: columns_of(grid, data, results) for data in grid.data})
    columns = tuple(column for data in grid.data for column in maker.columns[data])
    lines = [line for base, addon in grid.combinations for line in maker.lines(base, addon)]
    if grid.show != "clients":
        lines = _with_best(lines, columns)
    finals = [final for result in results.values() for final in result.finals.values()]
    units = {unit for c in columns if c.task and (unit := _unit(c.metric))}
    seeds = ""
    if len(grid.seeds) > 1:
        seeds = f"mean ± 95 % t-interval over seeds {', '.join(map(str, grid.seeds))}, {CUT}"
    parts = [
        f"{split} split ({', '.join(sorted({d for f in finals for d in f.data})) or 'data not stated'})",
        maker.models(),
        {
            "unified": "mean over the clients with the task",
            "clients": "a line for each client's personal model",
            "domains": "mean over the clients of a domain",
        }[grid.show],
        seeds or f"seed {grid.seeds[0]}",
        about_model(grid, results),
        ", ".join(["in the units recorded: fractions, not percent", *sorted(units)]),
    ]
    if grid.delta != "none":
        against = f"the same base with {next(iter(grid.addons))!r}" if grid.delta == "base" else grid.delta
        over = "domains" if grid.show == "domains" else "tasks"
        parts.append(f"{DELTA}: mean change over the line's {over}, each seed against the same seed of {against}")
    parts.append(made_by(grid, results))
    return GridTable(
        grid.title or grid.name,
        columns,
        tuple(lines),
        split,
        grid.at,
        "; ".join(parts) + ".",
        (*maker.notes, *_missing(missing, grid, {data for data, *_ in results})),
    )


def estimate(column: Column, columns: Sequence[Column], runs: Mapping[int, Run], values: Values) -> Estimate | None:
    """The number over seeds in a column other than Delta; None where no seed has one.

    An average or a spread is over the tasks (or domains) among `columns`, which are the data set's.
    """
    found = [_number(column, columns, runs[seed], by_task) for seed, by_task in values.items()]
    known = [number for number in found if number is not None]
    return Estimate.of(known) if known else None


def _number(column: Column, columns: Sequence[Column], run: Run, by_task: Mapping[str, float]) -> float | None:
    if column.task:
        return by_task.get(column.task)
    if column.metric == "bits":
        return run.bits_per_task() / 1e6
    shown = [by_task[c.task] for c in columns if c.task in by_task]
    if column.metric == "spread":
        return statistics.stdev(shown) if len(shown) > 1 else math.nan
    return sum(shown) / len(shown) if shown else math.nan


@dataclass
class _Maker:
    """Makes the lines of a table, and collects what has to be said about them."""

    grid: Grid
    split: str
    results: Mapping[Combination, CombinationRuns]
    refused: Mapping[str, str]
    columns: Mapping[str, tuple[Column, ...]]

    def __post_init__(self) -> None:
        self.left_out: dict[str, set[str]] = {}
        """Whose Delta leaves out tasks -> which, because the reference is 0 or undefined there."""
        self.untold = {data: self._untold(data) for data in self.columns}
        """Data set -> the tasks on which no method is better than the trivial answer."""
        self.columns = {
            data: tuple(replace(c, untold=c.task in self.untold[data]) for c in columns)
            for data, columns in self.columns.items()
        }

    @property
    def notes(self) -> list[str]:
        """What has to be said about the lines made so far."""
        notes = [
            f"{DELTA} of {name} leaves out {', '.join(sorted(out))}: 0 or undefined in the base."
            for name, out in self.left_out.items()
        ]
        notes += [
            note(tasks) if len(self.columns) == 1 else f"{data}: {note(tasks)}"
            for data, tasks in self.untold.items()
            if tasks
        ]
        notes += [f"refused: {name}: {reason}." for name, reason in self.refused.items()]
        if any(0 < len(result.runs) < len(self.grid.seeds) for result in self.results.values()):
            notes.append("*: not all seeds.")
        return notes

    def models(self) -> str:
        """Which kind of model the numbers are of: for all, or for each base or cell where kinds differ."""
        kinds: dict[str, dict[str, str]] = {}
        for (_, base, addon), result in self.results.items():
            found = " / ".join(dict.fromkeys(final.model for final in result.finals.values()))
            kinds.setdefault(base, {})[together(base, addon)] = found
        labels: dict[str, list[str]] = {}
        for base, by_cell in kinds.items():
            alike = len(set(by_cell.values())) == 1
            for cell, kind in ({base: next(iter(by_cell.values()))} if alike else by_cell).items():
                labels.setdefault(kind, []).append(cell)
        if len(labels) == 1:
            return f"{next(iter(labels))} model"
        return ", ".join(f"{kind} model of {' / '.join(cells)}" for kind, cells in labels.items())

    def lines(self, base: str, addon: str) -> list[TableLine]:
        """One line, or one for each client with a model of its own where the grid shows clients."""
        owners: dict[str, dict[str, Values]] = {}
        unified: dict[str, Values] = {}
        for data in self.grid.data:
            result = self.results.get((data, base, addon))
            owned = result.owned(self.split) if result and self.grid.show == "clients" else {}
            for owner, values in owned.items():
                owners.setdefault(owner, {})[data] = values
            if result and not owned:
                unified[data] = result.values()
        # owners in the order of the tasks that give them their names; others last
        order = {column.task: at for columns in self.columns.values() for at, column in enumerate(columns)}
        names = sorted(owners, key=lambda owner: order.get(owner.partition("+")[0], len(order)))
        lines = [self._line(base, addon, owner, owners[owner]) for owner in names]
        return lines if owners and not unified else [self._line(base, addon, "", unified), *lines]

    def _line(self, base: str, addon: str, owner: str, by_data: Mapping[str, Values]) -> TableLine:
        entries: list[TableEntry] = []
        seeds, rounds, models = {}, {}, {}
        for data in self.grid.data:
            result = self.results.get((data, base, addon))
            if result is None:
                entries += [self._none(data, base, addon) for _ in self.columns[data]]
                continue
            values = by_data.get(data, {})
            seeds[data] = tuple(values)
            rounds[data] = tuple(result.finals[seed].round for seed in values)
            models[data] = " / ".join(dict.fromkeys(final.model for final in result.finals.values()))
            entries += [self._entry(column, values, base, addon, owner) for column in self.columns[data]]
        return TableLine(
            base, addon, addon == next(iter(self.grid.addons)), owner, tuple(entries), seeds, rounds, models
        )

    def _entry(self, column: Column, values: Values, base: str, addon: str, owner: str) -> TableEntry:
        partial = len(values) < len(self.grid.seeds)
        if column.metric != "delta_m":
            runs = self.results[column.data, base, addon].runs
            found = estimate(column, self.columns[column.data], runs, values)
            return TableEntry("value", found, partial=partial, metric=column.metric) if found else TableEntry("cannot")
        reference = self.grid.reference(base)
        assert reference is not None  # else there is no such column
        if not values:
            return TableEntry("cannot")
        if reference == (base, addon):
            return TableEntry("base")
        result = self.results.get((column.data, *reference))
        if result is None:
            return self._none(column.data, *reference)
        against = (result.owned(self.split).get(owner) if owner else None) or result.values()
        directions = self._directions(column.data)
        for seed in values.keys() & against.keys():
            if out := without_base(values[seed].keys() & directions.keys() & against[seed].keys(), against[seed]):
                name = Cell(column.data, base, addon, 0).combination + (f", {owner}" if owner else "")
                self.left_out.setdefault(name, set()).update(out)
        changed = change(values, against, directions)
        if changed is None:
            return TableEntry("missing")
        return TableEntry("value", changed, partial=partial or changed.n < len(values), is_change=True)

    def _none(self, data: str, base: str, addon: str) -> TableEntry:
        """What stands where nothing has been run."""
        if (data, base) not in {(cell.data, cell.base) for cell in cells(self.grid)}:
            return TableEntry("cannot")
        return TableEntry("refused" if Cell(data, base, addon, 0).combination in self.refused else "missing")

    def _directions(self, data: str) -> dict[str, str]:
        """The tasks that Delta counts."""
        return {c.task: c.direction for c in self.columns[data] if c.task and not c.untold}

    def _untold(self, data: str) -> list[str]:
        columns = [column for column in self.columns[data] if column.task]
        found = [
            (base if base in self.grid.reference_rows else "", means(columns, result))
            for (name, base, _), result in self.results.items()
            if name == data
        ]
        return at_trivial(found, {column.task: column.direction for column in columns})


def means(columns: Sequence[Column], result: CombinationRuns) -> dict[str, float]:
    """Task -> mean over seeds."""
    found = {column.task: estimate(column, columns, result.runs, result.values()) for column in columns}
    return {task: number.mean for task, number in found.items() if number is not None}


def columns_of(grid: Grid, data: str, results: Mapping[Combination, CombinationRuns]) -> tuple[Column, ...]:
    """The columns of a data set, from its runs; none where it has no runs."""
    runs = [run for (name, *_), result in results.items() if name == data for run in result.runs.values()]
    if not runs:
        return ()
    found = {run.folder: _of_domains(data, run) if grid.show == "domains" else _of_tasks(data, run) for run in runs}
    first = found[runs[0].folder]
    for folder, columns in found.items():
        if columns != first:
            raise StateError(f"not comparable, for the tasks differ: {runs[0].folder} and {folder}")
    if grid.columns is not None:
        by_task = {column.task: column for column in first}
        for task in grid.columns:
            if task not in by_task:
                raise RecipeError(f"grid {grid.name}: columns: no task {task!r}.{nearest(task, by_task)}")
        first = tuple(by_task[task] for task in grid.columns)
    metrics = sorted({(column.metric, column.direction) for column in first})
    if {"average", "spread"} & {*grid.also} and len(metrics) > 1:
        names = ", ".join(name for name, _ in metrics)
        raise RecipeError(f"grid {grid.name}: also: an average over tasks needs one metric, found {names}")
    more = {name: Column(data, "", name, "min") for name in ("spread", "bits")}
    more["average"] = Column(data, "", "average", metrics[0][1])
    overall = tuple(more[name] for name in grid.also)
    return (*first, *overall) if grid.delta == "none" else (*first, *overall, Column(data))


def _of_tasks(data: str, run: Run) -> tuple[Column, ...]:
    """A column for each task of a run."""
    return tuple(Column(data, row.task, row.metric, row.direction) for row in run.judged)


def _of_domains(data: str, run: Run) -> tuple[Column, ...]:
    """A column for each domain of a run, with the metric of its only task."""
    history = domain_history(run)
    direction = run.info["tasks"][history.task]["metrics"][history.metric]
    return tuple(Column(data, domain, history.metric, direction) for domain in history.last.values)


def _with_best(lines: Sequence[TableLine], columns: Sequence[Column]) -> list[TableLine]:
    """The lines with the best value of each column marked where it stands clear, see `clear_best`."""
    marked = [list(line.entries) for line in lines]
    for at, column in enumerate(columns):
        found = {row: of for row, entries in enumerate(marked) if (of := entries[at].estimate) is not None}
        for row in clear_best(found, column.direction):
            marked[row][at] = replace(marked[row][at], best=True)
    return [replace(line, entries=tuple(entries)) for line, entries in zip(lines, marked, strict=True)]


def _missing(missing: Sequence[Cell], grid: Grid, begun: Collection[str], shown: int = 6) -> list[str]:
    """What has not finished: data sets of which nothing has, and the other cells."""
    idle = ", ".join(data for data in grid.data if data not in begun)
    notes = [f"No run has finished of {idle}."] if idle else []
    missing = [cell for cell in missing if cell.data in begun]
    if missing:
        total = sum(cell.data in begun for cell in cells(grid))
        names = ", ".join(map(str, missing[:shown]))
        more = f" and {len(missing) - shown} more" if len(missing) > shown else ""
        notes.append(f"…: {len(missing)} of {total} runs have not finished: {names}{more}.")
    return notes


def _unit(metric: str) -> str:
    name, unit = SPOKEN.get(metric, (metric, ""))
    return f"{name} in {unit}" if unit else ""
