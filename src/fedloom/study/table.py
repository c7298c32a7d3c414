"""The table of a grid: bases with add-ons as lines, the tasks of each data set and Delta as columns. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import first_of
from fedloom.core.grouping import grouped, nested
from fedloom.federation.runs.reader import TaskMetric, frame
from fedloom.study.grid import Cell, Grid, cells, open_folder, refused_in, together
from fedloom.study.output import Absent, Best, HasTable, Made, Records, Table
from fedloom.study.results import (
    DELTA,
    MOVING,
    SPOKEN,
    Column,
    Results,
    Side,
    Values,
    about_model,
    change,
    estimate,
    finished,
    made_by,
    note,
    of_grid,
    troubles,
)
from fedloom.study.statistics import CUT, FRACTIONS, Estimate, clear_best, without_base

WIDEST = 10
"""Columns that fit beside each other."""
PERCENT = "%"
_NAMED = 6  # runs that have not finished and are named, at most
CSV = (
    *("data", "base", "addon", "owner", "task", "metric", "direction", "mean", "ci95_half", "n"),
    *("seeds", "split", "model", "at", "rounds", "state"),
)


@dataclass(frozen=True)
class Entry:
    """One number of the table, or the reason why there is none."""

    column: Column
    base: str
    addon: str
    owner: str
    """The client where the model is that client's own, else ''."""
    side: Side | None
    values: Values
    """The numbers of the line's models at each seed, which may be none."""
    kind: Literal["value", "base", "missing", "refused", "cannot"]
    estimate: Estimate | None = None
    partial: bool = False
    """True if some seeds have not been run."""
    best: bool = False

    @property
    def text(self) -> str:
        """Return the text of the cell."""
        if self.kind != "value" or self.estimate is None:
            return Absent({"base": "base", "missing": "…", "refused": "refused"}.get(self.kind, "\\"))
        metric = self.column.metric
        number = (
            self.estimate.signed
            if metric == "delta_m"
            else self.estimate.of_metric(metric, self.column.unit == PERCENT)
        )
        if metric == "training_loss" and self.side is not None and self.side.is_moving:
            number += " ‡"
        return (Best if self.best else str)(number + "*" * self.partial)


@dataclass(frozen=True)
class GridTable(HasTable):
    """The result of `tabulate`; `notes` say what to know before reading the numbers."""

    grid: Grid
    columns: tuple[Column, ...]
    lines: tuple[tuple[Entry, ...], ...]
    """An entry for each column: of a base with an add-on, and of the client whose own model it is."""
    split: str
    caption: str
    notes: tuple[str, ...] = ()

    def label(self, entry: Entry) -> str:
        """Return the base for the add-on '-'; others follow it, indented: 'FedAvg', '  +DEA', 'FedAMP (semseg)'."""
        owner = f" ({entry.owner})" if entry.owner else ""
        first = entry.addon == next(iter(self.grid.addons))
        return (together(entry.base, entry.addon) if first or entry.addon == "-" else f"  {entry.addon}") + owner

    def as_table(self) -> Table:
        """Return the data sets beside each other; or below each other, if they have the same tasks and are too many."""
        by_data = grouped((column.data, at) for at, column in enumerate(self.columns))
        heads = {name: tuple("\n".join(self.columns[i].parts) for i in at) for name, at in by_data.items()}
        plain = {tuple(replace(self.columns[i], data="", excluded=False) for i in at) for at in by_data.values()}
        title, about = self.grid.title or self.grid.name, (self.caption, *self.notes)
        if len(self.columns) <= WIDEST or len(by_data) < 2 or len(plain) != 1:
            lines = tuple((self.label(line[0]), *(entry.text for entry in line)) for line in self.lines)
            over = {name: len(at) for name, at in by_data.items()} if len(by_data) > 1 else None
            return Table(title, ("", *(head for each in heads.values() for head in each)), lines, about, over)
        below = (
            line
            for name, at in by_data.items()
            for line in ((name,), *((self.label(line[0]), *(line[i].text for i in at)) for line in self.lines))
        )
        return Table(title, ("", *next(iter(heads.values()))), tuple(below), about)

    def records(self) -> Records:
        """Return one line per data set, base, add-on and task, and one with metric delta_m."""
        rows = []
        for entry in (entry for line in self.lines for entry in line):
            c, e, side, seeds = entry.column, entry.estimate, entry.side, tuple(entry.values)
            head = (c.data, entry.base, entry.addon, entry.owner, c.task, c.metric, c.direction)
            numbers = (None, None, None) if e is None else (e.mean, e.half, e.n)
            rounds = () if side is None else tuple(side.finals[seed].round for seed in seeds)
            model = "" if side is None else side.model
            rows.append((*head, *numbers, seeds, self.split, model, self.grid.at, rounds, entry.kind))
        return Records(CSV, rows)


def tabulate(
    grid: Grid, folder: Path, split: str = "test", percent: bool = False, results: Results | None = None
) -> GridTable:
    """Read the finished runs of a grid, unless `results` has them. A data set without one is mentioned in a note.

    With `percent`, the text has metrics that are fractions, and their averages, in percent; records stay as they are.
    Raises StateError where no run has finished, or where runs of one data set have different tasks.
    """
    results = of_grid(grid, folder, split) if results is None else results
    if percent:
        results = replace(results, columns={data: _in_percent(of) for data, of in results.columns.items()})
    maker = _Maker(grid, results, refused_in(folder))
    columns = tuple(column for data in grid.data for column in results.columns[data])
    lines = [line for base, addon in grid.combinations for line in maker.lines(base, addon)]
    if grid.show != "clients":
        lines = _with_best(lines, columns)
    return GridTable(grid, columns, tuple(lines), split, _caption(grid, results), tuple(maker.notes()))


def _in_percent(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns of a data set, with percent as the unit of fractions and of what is over fractions only."""
    fractions = all(c.metric in FRACTIONS for c in columns if c.task)
    return tuple(
        replace(c, unit=PERCENT) if c.metric in FRACTIONS or (fractions and c.metric in ("average", "spread")) else c
        for c in columns
    )


def _caption(grid: Grid, results: Results) -> str:
    finals = [final for side in results.sides.values() for final in side.finals.values()]
    seeds = f"seed {grid.seeds[0]}"
    if len(grid.seeds) > 1:
        seeds = f"mean ± 95 % t-interval over seeds {', '.join(map(str, grid.seeds))}, {CUT}"
    percent = any(c.unit == PERCENT for columns in results.columns.values() for c in columns)
    known = {c for columns in results.columns.values() for c in columns if c.unit not in ("", PERCENT)}
    units = sorted({f"{SPOKEN[c.metric]} in {c.unit}" for c in known})
    parts = [
        f"{results.split} split ({', '.join(sorted({d for f in finals for d in f.data})) or 'data not stated'})",
        _models(results),
        {
            "unified": "mean over the clients with the task",
            "clients": "a line for each client's personal model",
            "domains": "mean over the clients of a domain",
        }[grid.show],
        seeds,
        about_model(grid, results.sides),
        ", ".join(["fractions in percent" if percent else "in the units recorded: fractions, not percent", *units]),
    ]
    if grid.delta != "none":
        against = f"the same base with {next(iter(grid.addons))!r}" if grid.delta == "base" else grid.delta
        over = "domains" if grid.show == "domains" else "tasks"
        parts.append(f"{DELTA}: mean change over the line's {over}, each seed against the same seed of {against}")
    if ratios := {side.ratio for side in results.sides.values()} - {0}:
        parts.append(f"intervals are corrected for seeds that redraw one pool (ratio {max(ratios):.3g})")
    return "; ".join([*parts, made_by(grid, results.sides)]) + "."


def _models(results: Results) -> str:
    """Say which kind of model the numbers belong to: for all, or for each base or cell where kinds differ."""
    kinds = nested((base, together(base, addon), side.model) for (_, base, addon), side in results.sides.items())
    cells = [(kind, cell, base) for base, by_cell in kinds.items() for cell, kind in by_cell.items()]
    alike = {base for base, by_cell in kinds.items() if len(set(by_cell.values())) == 1}
    named = dict.fromkeys((kind, base if base in alike else cell) for kind, cell, base in cells)
    labels = grouped(named)
    if len(labels) == 1:
        return f"{next(iter(labels))} model"
    return ", ".join(f"{kind} model of {' / '.join(cells)}" for kind, cells in labels.items())


class _Maker:
    """The maker of a table's lines; it collects notes about them."""

    def __init__(self, grid: Grid, results: Results, refused: Mapping[str, str]) -> None:
        self.grid, self.results, self.refused = grid, results, refused
        self.left_out: dict[str, set[str]] = {}
        """Cell -> the tasks that its Delta leaves out, because the reference is 0 or undefined there."""

    def notes(self) -> Iterator[str]:
        """Yield the notes about the lines made so far."""
        for name, out in self.left_out.items():
            yield f"{DELTA} of {name} leaves out {', '.join(sorted(out))}: 0 or undefined in the base."
        for data, tasks in self.results.excluded.items():
            yield note(tasks) if len(self.results.columns) == 1 else f"{data}: {note(tasks)}"
        yield from self.results.about_0()
        if any(side.is_moving for side in self.results.sides.values()):
            yield MOVING
        yield from troubles(self.results.sides)
        for name, reason in self.refused.items():
            yield f"refused: {name}: {reason}."
        if any(0 < len(side.runs) < len(self.grid.seeds) for side in self.results.sides.values()):
            yield "*: not all seeds."
        begun = {data for data, *_ in self.results.sides}
        if idle := ", ".join(data for data in self.grid.data if data not in begun):
            yield f"No run has finished of {idle}."
        if missing := [cell for cell in self.results.missing if cell.data in begun]:
            total = sum(c.data in begun and c.combination not in self.refused for c in cells(self.grid))
            yield f"…: {len(missing)} of {total} runs have not finished: {first_of(missing, _NAMED)}."

    def lines(self, base: str, addon: str) -> list[tuple[Entry, ...]]:
        """Return one line, or one per client with a model of its own where the grid shows clients."""
        known = ((data, self.results.sides.get((data, base, addon))) for data in self.grid.data)
        sides = {data: side for data, side in known if side}
        owned = {d: side.owned(self.results.split) if self.grid.show == "clients" else {} for d, side in sides.items()}
        owners = nested((owner, data, values) for data, of in owned.items() for owner, values in of.items())
        unified = {data: sides[data].values for data, of in owned.items() if not of}
        # owners in the order of the tasks that give them their names; others last
        order = {column.task: at for columns in self.results.columns.values() for at, column in enumerate(columns)}
        names = sorted(owners, key=lambda owner: order.get(owner.partition("+")[0], len(order)))
        by_owner = {name: owners[name] for name in names}
        return [
            tuple(
                self._entry(column, base, addon, owner, values.get(data, {}))
                for data in self.grid.data
                for column in self.results.columns[data]
            )
            for owner, values in (by_owner if owners and not unified else {"": unified, **by_owner}).items()
        ]

    def _entry(self, column: Column, base: str, addon: str, owner: str, values: Values) -> Entry:
        side = self.results.sides.get((column.data, base, addon))
        entry = Entry(column, base, addon, owner, side, values, "cannot")
        if side is None:
            return self._none(entry, base, addon)
        partial = len(values) < len(self.grid.seeds)
        if column.metric != "delta_m":
            number = estimate(column, self.results.columns[column.data], side, values)
            return replace(entry, kind="value", estimate=number, partial=partial) if number else entry
        reference = self.grid.reference(base)
        if not values or reference is None:  # without a reference there is no such column
            return entry
        if reference == (base, addon):
            return replace(entry, kind="base")
        other = self.results.sides.get((column.data, *reference))
        if other is None:
            return self._none(entry, *reference)
        against = (other.owned(self.results.split).get(owner) if owner else None) or other.values
        directions = self.results.directions(column.data)
        for seed in values.keys() & against.keys():
            if out := without_base(values[seed].keys() & directions.keys() & against[seed].keys(), against[seed]):
                name = Cell(column.data, base, addon, 0).combination + (f", {owner}" if owner else "")
                self.left_out.setdefault(name, set()).update(out)
        changed = change(values, against, directions, side.ratio)
        if changed is None:
            return replace(entry, kind="missing")
        return replace(entry, kind="value", estimate=changed, partial=partial or changed.n < len(values))

    def _none(self, entry: Entry, base: str, addon: str) -> Entry:
        """Return the entry where the cell, or the one that it is compared with, has not been run."""
        data = entry.column.data
        if (data, base) not in {(cell.data, cell.base) for cell in cells(self.grid)}:
            return entry
        return replace(entry, kind="refused" if Cell(data, base, addon, 0).combination in self.refused else "missing")


def _with_best(lines: Sequence[tuple[Entry, ...]], columns: Sequence[Column]) -> list[tuple[Entry, ...]]:
    """Return the lines with the best value of each column marked, see `clear_best`."""
    best: list[set[int]] = []
    for at, c in enumerate(columns):
        known = {row: of for row, line in enumerate(lines) if (of := line[at].estimate) is not None}
        best.append(set() if c.metric == "training_loss" else clear_best(known, c.direction))
    return [tuple(replace(e, best=row in best[at]) for at, e in enumerate(line)) for row, line in enumerate(lines)]


def all_metrics(grid: Grid, folder: Path, split: str = "test") -> Made:
    """Return every metric of every task, not only the primary ones (DFMTL thesis, Table 6.16).

    One line per metric, one column per cell, with the cell's rank among those that have the metric.
    Means over the clients that hold a task, then over seeds. Raises StateError where no run has finished.
    """
    sides = of_grid(grid, folder, split).sides
    numbers: dict[tuple[str, TaskMetric], dict[str, Estimate]] = {}
    for (data, *_), side in sides.items():
        values = grouped(
            (TaskMetric(task, metric, side.runs[seed].direction(task, metric)), value)
            for seed, final in side.finals.items()
            for task, by_metric in final.values.items()
            for metric, value in by_metric.items()
        )
        for key, each in values.items():
            numbers.setdefault((data, key), {})[side.label] = Estimate.of(each, side.ratio)
    labels = list(dict.fromkeys(cell for of_cell in numbers.values() for cell in of_cell))
    about = f"{split} split; mean over the clients with the task; {about_model(grid, sides)}."
    lines = tuple(
        (f"{data}: {metric}", *(_ranked(of_cell, cell, metric.direction) for cell in labels))
        for (data, metric), of_cell in numbers.items()
    )
    records = [
        (data, cell, metric.task, metric.metric, metric.direction, e.mean, e.half, e.n)
        for (data, metric), of_cell in numbers.items()
        for cell, e in of_cell.items()
    ]
    return Made(
        Table(grid.title or grid.name, ("mean ± 95 % t-interval (rank)", *labels), lines, (about,)),
        Records(("data", "cell", "task", "metric", "direction", "mean", "ci95_half", "seeds"), records),
    )


def _ranked(estimates: Mapping[str, Estimate], cell: str, direction: str) -> str:
    """Return a cell's number with its rank, equal ones alike; '' where the cell lacks the metric."""
    if cell not in estimates:
        return ""
    sign = 1 if direction == "min" else -1
    mine = sign * estimates[cell].mean
    if mine != mine:
        return str(estimates[cell])
    return f"{estimates[cell]} ({1 + sum(sign * other.mean < mine for other in estimates.values())})"


@dataclass(frozen=True)
class OpenedGrid:
    """A grid, and the folder in which it ran."""

    grid: Grid
    folder: Path

    def table(self, split: Literal["test", "val"] = "test") -> str:
        """Return the text that `fedloom compare` prints. Raises StateError where no run has finished."""
        return tabulate(self.grid, self.folder, split).to_text()

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame of all finished runs, a row per number. Raises StateError without any.

        Its columns are data, base and addon, the labels of a cell, then those of `Result.to_pandas`.
        """
        runs = finished(self.grid, self.folder).items()
        return frame(({"data": cell.data, "base": cell.base, "addon": cell.addon}, run) for cell, run in runs)

    def _repr_markdown_(self) -> str:
        """Return the table as Markdown, for notebooks."""
        return tabulate(self.grid, self.folder).to_markdown()


def grid(source: str | Path) -> OpenedGrid:
    """Open a grid that `fedloom grid` ran, finished or not: its folder, or a grid that ran in its default folder.

    Raises StateError if there is no such folder, RecipeError for a grid that cannot be read.
    """
    return OpenedGrid(*open_folder(source))
