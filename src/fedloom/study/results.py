"""The results of methods on data sets, read from run folders once, and every seed as a line per task. Free of torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cached_property
from math import isfinite, isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import get_args

from fedloom.core.errors import RecipeError, StateError, at, nearest
from fedloom.core.grouping import grouped, nested
from fedloom.federation.runs.reader import ARROWS, IN_VAIN, NOTHING, POOLED, Final, Run, TaskMetric, best_round, mean_of
from fedloom.study.grid import NO_VALIDATION, SMALLEST, Cell, Grid, Reference, cells, is_over, refused_in, together
from fedloom.study.output import HasTable, Records, Table, span, without_mark
from fedloom.study.statistics import Estimate, delta_m, delta_terms, mean_of_known

Values = Mapping[int, Mapping[str, float]]
"""Seed -> task -> the task's own metric."""
Combination = tuple[str, str, str]
"""Labels of data set, base and add-on."""

STILL = 5.0
"""Percent by which the loss may still fall per tenth of the rounds."""
LAST = 0.2
"""The share of the rounds, at the end, over which that is measured."""
FIRST = 0.1
"""The share of the first round's training loss that a fall is measured by where the loss is smaller."""
SIGNED = frozenset({"r2", "kappa"})
"""Metrics that are 0 for a constant prediction and below 0 for a worse one."""
ABOUT_0 = 0.05
"""A baseline nearer to 0 by one of these is no baseline for a change in percent."""

DELTA = "Δ %"
MOVING = f"‡: the loss still falls by over {STILL:g} % per tenth of the rounds, which allows no verdict."
SPOKEN = {
    "miou": "mIoU", "maxf": "maxF", "odsf": "odsF", "merr": "mErr", "rmse": "RMSE", "edge_f_plain": "F",
    "auc": "AUC", "pr-auc": "PR-AUC", "balanced-accuracy": "balanced accuracy", "brier": "Brier score",
    "calibration": "calibration error", "r2": "R²",
}  # fmt: skip
"""Metric -> how papers write it."""
OVERALL = {
    "delta_m": ("", DELTA),
    "average": ("", "average"),
    "spread": ("standard", "deviation"),
    "bits": ("Mbit up", "per task"),
    "training_loss": ("last training", "loss"),
}
"""Metric over all tasks -> the two lines of its heading."""


@dataclass(frozen=True)
class Column:
    """A task of a data set with its metric, or (task '') the data set's Delta, average or bits."""

    data: str
    task: str = ""
    metric: str = "delta_m"
    direction: str = "max"
    excluded: bool = False
    """True if no method is better than the constant prediction, so that Delta leaves the task out."""
    unit: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in self.parts if part)

    @property
    def parts(self) -> tuple[str, str]:
        """The task, and how it is measured; either may be empty."""
        if not self.task:
            above, name = OVERALL[self.metric]
            return above, f"{name} {ARROWS[self.direction]}"
        return (self.task + " †" * self.excluded, f"{SPOKEN.get(self.metric, self.metric)} {ARROWS[self.direction]}")


@dataclass(frozen=True)
class Side:
    """A method's runs on a data set by seed, the numbers of the models that count, and each task's number."""

    label: str
    runs: Mapping[int, Run]
    finals: Mapping[int, Final]
    values: Values
    """Seed -> task (or domain of the only task) -> number."""
    by_domain: bool = False

    @cached_property
    def clients(self) -> dict[int, dict[str, Final]]:
        """Seed -> client -> the client's own numbers."""
        return {seed: self.runs[seed].by_client(final.split, final.round) for seed, final in self.finals.items()}

    @property
    def ratio(self) -> float:
        """Where the seeds redraw the measured part from one pool, the ratio of `against_zero`; else 0."""
        on_val = any(final.split == "val" for final in self.finals.values())
        drawn, ratio = ("partition_hash", "validated") if on_val else ("data_hash", "redrawn")
        if len({run.info.get(drawn) for run in self.runs.values()}) < 2:
            return 0.0
        return max(run.info.get(ratio, 0.0) for run in self.runs.values())

    @cached_property
    def fall(self) -> float:
        """The mean of `falls` over tasks and seeds; nan where that is unknown."""
        return mean_of_known(fall for run in self.runs.values() for fall in falls(run).values())

    @property
    def is_moving(self) -> bool:
        """Return whether the loss still falls, so that no verdict on the method is possible."""
        return self.fall > STILL

    @property
    def unsettled(self) -> str:
        """Return what forbids a verdict on the method; '' where nothing does."""
        if self.is_in_vain:
            return NOTHING
        return unsettled(self.fall, isnan(self.fall) and any(losses(run) for run in self.runs.values()))

    @property
    def last_loss(self) -> str:
        """Return the training loss of the last round as text, marked where it still falls; '' where it is unknown."""
        known = [loss for run in self.runs.values() if (loss := last_loss(run)) is not None]
        return f"{Estimate.of(known)}{' ‡' * self.is_moving}" if known else ""

    @property
    def is_in_vain(self) -> bool:
        """Return whether a run learned nothing or gave up, so that no verdict on the method is possible."""
        return any(run.info["status"] in IN_VAIN for run in self.runs.values())

    @property
    def model(self) -> str:
        """'global', 'personal' or both."""
        return " / ".join(dict.fromkeys(final.model for final in self.finals.values()))

    def owned(self, split: str) -> dict[str, Values]:
        """Return client (its tasks, or its name where these occur twice) -> the values of its personal model."""
        by_client: dict[str, dict[int, Mapping[str, float]]] = {}
        for seed, run in self.runs.items():
            names = {client: "+".join(info["tasks"]) for client, info in run.info["clients"].items()}
            for client, final in run.personal(split, self.finals[seed].round).items():
                if final.values:  # empty where none of the client's tasks is shown
                    name = names[client] if list(names.values()).count(names[client]) == 1 else client
                    by_client.setdefault(name, {})[seed] = _values(run, final, self.by_domain)
        return {**by_client}


@dataclass(frozen=True)
class Results:
    """Methods with their runs, from a comparison of run folders (a grid of one data set '') or from a grid."""

    title: str
    split: str
    sides: Mapping[Combination, Side]
    columns: Mapping[str, tuple[Column, ...]]
    """Data set -> its columns: tasks (or domains), then those over all tasks."""
    pairs: Sequence[tuple[Combination, Combination]]
    """(A method, the one that it is compared with, whether that has runs or not)."""
    notes: tuple[str, ...]
    about_delta: tuple[str, ...] = ()
    """Notes on Delta alone."""
    missing: tuple[Cell, ...] = ()
    """The cells that have not finished."""
    by_domain: bool = False
    smallest: float = SMALLEST
    """The smallest change in percent that counts."""

    @property
    def rows(self) -> dict[str, tuple[TaskMetric, ...]]:
        """Data set -> its tasks."""
        return {
            data: tuple(TaskMetric(c.task, c.metric, c.direction) for c in columns if c.task)
            for data, columns in self.columns.items()
        }

    @property
    def excluded(self) -> dict[str, list[str]]:
        """Data set -> the tasks on which no method is better than the constant prediction, where there are such."""
        by_data = {data: sorted(c.task for c in columns if c.excluded) for data, columns in self.columns.items()}
        return {data: tasks for data, tasks in by_data.items() if tasks}

    def unfit(self, data: str, method: str, base: str, rows: Iterable[TaskMetric]) -> str:
        """Return why no verdict on a method over its baseline is possible, of these tasks; '' where it is."""
        sides = {side.label: side for (name, *_), side in self.sides.items() if name == data}
        pair = {name: sides[name] for name in (method, base)}
        return unfit(
            {name: side.values for name, side in pair.items()},
            {name: side.unsettled for name, side in pair.items()},
            {seed for side in sides.values() for seed in side.values},
            {row.task: row.metric for row in rows},
        )

    def about_0(self) -> Iterator[str]:
        """Yield a note on each baseline that is about 0 on a task, so that a change in percent of it says little."""
        for key in dict.fromkeys(base for _, base in self.pairs if base in self.sides):
            data, side, counted = key[0], self.sides[key], self.directions(key[0])
            metrics = {row.task: row.metric for row in self.rows[data] if row.task in counted}
            if tasks := near_0(side.values, metrics):
                who = f"{data}: {side.label}" if data else side.label
                yield f"{who} is about 0 on {', '.join(tasks)}, so a change in percent of it says little."

    def directions(self, data: str) -> dict[str, str]:
        """Return the tasks that Delta counts, each with its direction."""
        return {c.task: c.direction for c in self.columns[data] if c.task and not c.excluded}


def of_grid(grid: Grid, folder: Path, split: str = "test", known: Mapping[Cell, Run] = {}) -> Results:
    """Read the finished runs of a grid, but for those `known`. Raises StateError without any, or where tasks differ."""
    sides, refused = read(grid, folder, split, known), refused_in(folder)
    ran = {Cell(*labels, seed) for labels, side in sides.items() for seed in side.runs}
    missing = [cell for cell in cells(grid) if cell not in ran and cell.combination not in refused]
    columns: dict[str, tuple[Column, ...]] = {}
    about_delta, idle = [], []
    for data in grid.data:
        columns_by_data = columns_of(grid, data, sides)
        by_method = [
            (base if base in grid.reference_rows else "", means(columns_by_data, side))
            for (name, base, _), side in sides.items()
            if name == data
        ]
        out = at_constant(by_method, {c.task: c.direction for c in columns_by_data if c.task})
        columns[data] = tuple(replace(c, excluded=c.task in out) for c in columns_by_data)
        about_delta += [f"{data}: {note(out)}"] if out else []
        directions = {c.task: c.direction for c in columns_by_data if c.task and c.task not in out}
        values = {side.label: side.values for (name, *_), side in sides.items() if name == data}
        idle += [f"{data}: {of}" for of in uneven(values, directions)]
    pairs = [(key, (key[0], *named)) for key in sides for named in grid.compared(*key[1:])]
    notes = [about_model(grid, sides).capitalize() + ".", made_by(grid, sides) + "."]
    notes += [f"Runs of the grid that have not finished: {len(missing)}."] if missing else []
    notes += troubles(sides)
    notes += ["The grid's key family named these comparisons before it ran."] if grid.family else []
    vague = "on no task better than the constant prediction, so its mean and its interval say little"
    notes += [f"{of}: {vague}." for of in idle]
    more = tuple(notes), tuple(about_delta), tuple(missing), grid.show == "domains", grid.smallest
    return Results(grid.title or grid.name, split, sides, columns, pairs, *more)


def same_data(one: Run, other: Run) -> bool:
    """Return whether two runs have the same data set."""
    return bool(one.info.get("data_hash") == other.info.get("data_hash"))


def troubles(sides: Mapping[Combination, Side]) -> Iterator[str]:
    """Yield a note on each method that lost updates or rounds, or whose code changed from seed to seed, and on clients
    without a number."""
    for (data, *_), side in sides.items():
        who = " / ".join(filter(None, (data, side.label)))
        if len({run.code for run in side.runs.values()}) > 1:
            yield f"{who}: its code changed between the seeds, so its mean is over different methods."
        lost = {seed: run.trouble for seed, run in side.runs.items() if run.trouble}
        if lost:
            first, why = next(iter(lost.items()))
            seeds = f"seeds {', '.join(map(str, lost))}; at " if len(lost) > 1 else ""
            yield f"{who} lost updates or rounds at {seeds}seed {first}: {why}."
    for data in dict.fromkeys(data for data, *_ in sides):
        for gap in _gaps([side for (name, *_), side in sides.items() if name == data]):
            yield f"{data}: {gap}" if data else gap


def _gaps(sides: Iterable[Side]) -> Iterator[str]:
    """Yield a note on each number that some clients lack, with the seeds unless these are all."""
    finals = [(seed, final) for side in sides for seed, final in side.finals.items()]
    judged = {row.metric for side in sides for run in side.runs.values() for row in run.judged}
    metrics = {*judged, *(POOLED + metric for metric in judged)}
    for gap, several in sorted(grouped((gap, seed) for seed, final in finals for gap in final.gaps(metrics)).items()):
        seeds = {*several}
        some = f", at seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
        yield f"{gap}{some * (seeds != {seed for seed, _ in finals})}."


def finished(grid: Grid, folder: Path, known: Mapping[Cell, Run] = {}) -> dict[Cell, Run]:
    """Return the finished runs of a grid, read unless they are `known`. Raises StateError where there is none."""
    over = [(cell, path) for cell in cells(grid) if is_over(path := cell.folder(folder))]
    found = {cell: known[cell] if cell in known else Run.read(path) for cell, path in over}
    if not found:
        raise StateError(f"no cell of grid {grid.name} has finished in {folder}")
    return found


def read(grid: Grid, folder: Path, split: str, known: Mapping[Cell, Run] = {}) -> dict[Combination, Side]:
    """Return the finished runs by combination. Raises StateError where none has finished."""
    found = finished(grid, folder, known)
    runs = nested(((cell.data, cell.base, cell.addon), cell.seed, run) for cell, run in found.items())
    by_domain = grid.show == "domains"
    results = {}
    for (data, base, addon), by_seed in runs.items():
        judged = {seed: run.judged_by(grid.metric) for seed, run in by_seed.items()}
        # the round is chosen by the tasks' own metrics, whichever is shown
        finals = {seed: run.final(split, _round(grid, by_seed[seed], split)) for seed, run in judged.items()}
        values = {seed: _values(judged[seed], final, by_domain) for seed, final in finals.items()}
        results[data, base, addon] = Side(together(base, addon), judged, finals, values, by_domain)
    return results


def _values(run: Run, final: Final, by_domain: bool) -> Mapping[str, float]:
    """Return each task's own metric, or each domain's of the only task."""
    if by_domain:
        return over_rounds(run, final.split, True)[final.round]
    return {task: v.get(run.info["tasks"][task]["primary"], nan) for task, v in final.values.items()}


def over_rounds(run: Run, split: str, by_domain: bool, client: str | None = None) -> dict[int, Mapping[str, float]]:
    """Return round -> each task's own metric, where measured (of a client, or the mean), or each domain's."""
    if by_domain:
        return {scores.round: scores.values for scores in domain_history(run, split=split).rounds}
    curves = run.curves(split, client).items()
    each = nested((round, task, value) for task, curve in curves for round, value in curve.items())
    return {round: each[round] for round in sorted(each)}


def about_model(grid: Grid, sides: Mapping[Combination, Side]) -> str:
    """Say which model of each run counts, and the rounds at which it was chosen."""
    rounds = span(final.round for side in sides.values() for final in side.finals.values())
    if grid.at == "last":
        return f"model kept at the end (round {rounds})"
    over = "domains" if grid.show == "domains" else "tasks"
    return f"model of each run's best round by its mean over {over} on validation data (round {rounds})"


def made_by(grid: Grid, sides: Mapping[Combination, Side]) -> str:
    """Say how many runs of which grid the numbers come from, and the version of fedloom."""
    runs = [run for side in sides.values() for run in side.runs.values()]
    versions = ", ".join(sorted({run.info.get("fedloom", "of unknown version") for run in runs}))
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of the grid {grid.name} by fedloom {versions}"


def one_metric(grid: Grid, key: str, what: str, metrics: set[tuple[str, str]]) -> str:
    """Return the direction of the only metric. Raises RecipeError for several."""
    if len(metrics) > 1:
        names = ", ".join(name for name, _ in sorted(metrics))
        raise RecipeError(f"grid {grid.name}: {key}: {what} over tasks needs one metric, found {names}")
    ((_, direction),) = metrics
    return direction


def is_validated(run: Run) -> bool:
    """Return whether something was measured on validation data."""
    return any(entry["split"] == "val" for line in run.rounds for entry in line["metrics"])


def _round(grid: Grid, run: Run, split: str) -> int | None:
    """Return the round whose model counts; None for the one that the run keeps. Test data never choose it."""
    if grid.at == "last":
        return None
    direction = one_metric(grid, "at", "a mean", {(row.metric, row.direction) for row in run.judged})
    if not is_validated(run):
        raise StateError(f"{run.folder}: {NO_VALIDATION}: nothing was measured on val")
    measured, validated = (over_rounds(run, name, grid.show == "domains") for name in (split, "val"))
    means = {number: fmean(scores.values()) for number, scores in validated.items() if number in measured}
    best = best_round(means, direction)
    if best is None:
        raise StateError(
            f"{run.folder}: {NO_VALIDATION}: expected a round with a number of every client on val and on {split}, "
            "found none"
        )
    return best


def deltas(values: Values, base: Values, directions: Mapping[str, str]) -> dict[int, float]:
    """Return seed -> Delta over the tasks of `directions`, for the seeds and tasks that both have."""
    return {
        seed: delta_m({t: v for t, v in mine.items() if t in base[seed] and t in directions}, base[seed], directions)
        for seed, mine in values.items()
        if seed in base
    }


def change(values: Values, base: Values, directions: Mapping[str, str], ratio: float) -> Estimate | None:
    """Return the mean of `deltas` over seeds; None without a common seed. `ratio` is that of the runs (`Side`)."""
    each = deltas(values, base, directions)
    return Estimate.of(list(each.values()), ratio) if each else None


def estimate(column: Column, columns: Sequence[Column], side: Side, values: Values | None = None) -> Estimate | None:
    """Return the number over seeds in a column other than Delta, an average over `columns`; None without a seed.

    `values` are those of another round than `side.values`.
    """
    by_seed = side.values if values is None else values
    each = [_number(column, columns, side.runs[seed], by_task) for seed, by_task in by_seed.items()]
    known = [number for number in each if number is not None]
    ratio = 0.0 if column.metric in ("bits", "training_loss") else side.ratio  # these two are not measured on test data
    return Estimate.of(known, ratio) if known else None


def _number(column: Column, columns: Sequence[Column], run: Run, by_task: Mapping[str, float]) -> float | None:
    if column.task:
        return by_task.get(column.task)
    if column.metric == "bits":
        return run.bits_per_task() / 1e6
    if column.metric == "training_loss":
        return last_loss(run)
    shown = [by_task[c.task] for c in columns if c.task in by_task]
    if column.metric == "spread":
        return stdev(shown) if len(shown) > 1 else nan
    return sum(shown) / len(shown) if shown else nan


def means(columns: Sequence[Column], side: Side) -> dict[str, float]:
    """Return task -> mean over seeds."""
    estimates = {column.task: estimate(column, columns, side) for column in columns if column.task}
    return {task: number.mean for task, number in estimates.items() if number is not None}


def columns_of(grid: Grid, data: str, sides: Mapping[Combination, Side]) -> tuple[Column, ...]:
    """Return the columns of a data set, from its runs; none where it has no runs."""
    of_data = [side for (name, *_), side in sides.items() if name == data]
    each = [(run, side.finals[seed].split) for side in of_data for seed, run in side.runs.items()]
    if not each:
        return ()
    runs, columns = [run for run, _ in each], [_columns(data, *one, grid.show == "domains") for one in each]
    first = columns[0]
    if other := next((run for run, of in zip(runs, columns, strict=True) if of != first), None):
        raise StateError(f"not comparable, because the tasks differ: {runs[0].folder} and {other.folder}")
    shown = _shown(grid, data, first)
    if any(last_loss(run) is not None for run in runs):
        shown += (Column(data, "", "training_loss", "min"),)
    return shown if grid.delta == "none" else (*shown, Column(data))


def _shown(grid: Grid, data: str, first: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return the columns of tasks that the grid shows, of all, and those over them. Raises RecipeError without them."""
    if grid.columns is not None:
        by_task = {column.task: column for column in first}
        for task in grid.columns:
            if task not in by_task:
                raise RecipeError(f"grid {grid.name}: columns: no task {task!r}.{nearest(task, by_task)}")
        first = tuple(by_task[task] for task in grid.columns)
    more = {name: Column(data, "", name, "min") for name in ("spread", "bits")}
    if {"average", "spread"} & {*grid.also}:
        direction = one_metric(grid, "also", "an average", {(column.metric, column.direction) for column in first})
        more["average"] = Column(data, "", "average", direction)
    return *first, *(more[name] for name in grid.also)


def check_shown(grid: Grid, run: Run) -> None:
    """Raise UserError where a grid cannot show a run's tasks as its keys say; the run need not have begun."""
    run = run.judged_by(grid.metric)
    if grid.at != "last":
        one_metric(grid, "at", "a mean", {(row.metric, row.direction) for row in run.judged})
    columns = tuple(Column("", row.task, row.metric, row.direction) for row in run.judged)
    if grid.show == "domains":
        with at("show: domains"):
            task, metric = _in_domains(run)
            domains = dict.fromkeys(_domains(run).values())
        columns = tuple(Column("", domain, metric, run.direction(task, metric)) for domain in domains)
    _shown(grid, "", columns)


def _columns(data: str, run: Run, split: str, by_domain: bool) -> tuple[Column, ...]:
    """Return a column for each task of a run, or for each domain with the metric of the only task."""
    if not by_domain:
        return tuple(
            Column(data, row.task, row.metric, row.direction, unit=run.unit(row.task, row.metric)) for row in run.judged
        )
    history = domain_history(run, split=split)
    direction = run.direction(history.task, history.metric)
    unit = run.unit(history.task, history.metric)
    return tuple(Column(data, domain, history.metric, direction, unit=unit) for domain in history.last.values)


def at_constant(metrics: Iterable[tuple[str, Mapping[str, float]]], directions: Mapping[str, str]) -> list[str]:
    """Return the tasks, sorted, on which no method is better than `constant`, from (method, task -> mean).

    A change there is one between predictions that do not depend on the input yet, so it counts in no Delta_m.
    `centralised` is no federated method and does not count. Without `constant` the result is empty.
    """
    rows = list(metrics)
    constant = next((values for method, values in rows if method == "constant"), None)
    others = [values for method, values in rows if method not in get_args(Reference)]
    if constant is None or not others:
        return []
    judged = [t for t in directions if t in constant and constant[t] and not isnan(constant[t])]
    better = set[str]().union(*(ahead(values, constant, directions) for values in others))
    return sorted(task for task in judged if task not in better)


def ahead(values: Mapping[str, float], constant: Mapping[str, float], directions: Mapping[str, str]) -> set[str]:
    """Return the tasks of `directions` on which these numbers are better than the constant prediction's."""
    both = {task: values[task] for task in directions if task in values and task in constant}
    return {task for task, gain in delta_terms(both, constant, directions).items() if gain > 0}


def uneven(of: Mapping[str, Values], directions: Mapping[str, str]) -> list[str]:
    """Say which methods learned something at some seeds only, from label -> seed -> task -> number.

    A run that is better than the constant prediction on no task has learned nothing.
    """
    constant = of.get("constant", {})
    found = []
    for label, values in of.items():
        seeds = [seed for seed in values if constant.get(seed)]
        idle = [str(seed) for seed in seeds if not ahead(values[seed], constant[seed], directions)]
        if 0 < len(idle) < len(seeds):
            found.append(f"{label} learned nothing at {'seeds' if idle[1:] else 'seed'} {', '.join(idle)}")
    return found


def note(tasks: Iterable[str]) -> str:
    """Return the note of a table on these tasks."""
    return f"†: no method is better than the constant prediction on {', '.join(tasks)}, which Δm therefore leaves out."


@dataclass(frozen=True)
class DomainScores:
    """The scores of one round on each domain: a mean over the domain's clients, who share its test part."""

    round: int
    values: Mapping[str, float]

    @property
    def average(self) -> float:
        """Return the mean over the domains, which all count the same."""
        return fmean(self.values.values())

    @property
    def deviation(self) -> float:
        """Return the sample standard deviation over the domains (n - 1); nan for one domain."""
        values = list(self.values.values())
        return stdev(values) if len(values) > 1 and not any(map(isnan, values)) else nan


@dataclass(frozen=True)
class DomainHistory(HasTable):
    """The measured rounds of one run, in order. `metric` is the metric's name, `best` says which model a user keeps."""

    label: str
    task: str
    metric: str
    rounds: tuple[DomainScores, ...]
    best: DomainScores | None
    """The round whose average over domains was best on validation data; None where there is no validation data."""

    @property
    def last(self) -> DomainScores:
        """Return the last measured round."""
        return self.rounds[-1]

    def as_table(self) -> Table:
        """Return rounds by domains, with average and standard deviation; the last and the best round are marked."""
        names = {self.last.round: "last"}
        if self.best is not None:
            names[self.best.round] = "last, best" if self.best.round == self.last.round else "best on validation"
        lines = []
        for scores in self.rounds:
            numbers = [*scores.values.values(), scores.average, scores.deviation]
            lines.append((str(scores.round), *(f"{v:.4f}" for v in numbers), names.get(scores.round, "")))
        head = ("round", *self.last.values, "average", "deviation", "")
        return Table(f"{self.label}: {self.task} {self.metric} by domain", head, tuple(lines))

    def records(self) -> Records:
        """Return one line per round and domain, in full precision."""
        lines = [(s.round, domain, v) for s in self.rounds for domain, v in s.values.items()]
        return Records(("round", "domain", self.metric), lines)


def domain_history(run: Run, task: str | None = None, metric: str | None = None, split: str = "test") -> DomainHistory:
    """Return a metric per domain over the rounds; by default the primary metric of the run's only task.

    A client's personal model counts where it was measured, else the global one. Of equally good rounds on validation
    data the first is the best. Raises StateError where clients have no domains, nothing was measured, or the task or
    the metric is not the run's.
    """
    task, metric = _in_domains(run, task, metric)
    rounds = _domain_scores(run, task, metric, split)
    if not rounds:
        raise StateError(f"{run.folder}: no {split} {metric} was measured")
    validated = {r: s.average for r, s in _domain_scores(run, task, metric, "val").items() if r in rounds}
    best = best_round(validated, run.direction(task, metric))
    return DomainHistory(run.label, task, metric, tuple(rounds.values()), None if best is None else rounds[best])


def _in_domains(run: Run, task: str | None = None, metric: str | None = None) -> tuple[str, str]:
    """Return the task and the metric, by default the only task and its own. Raises StateError for others."""
    tasks = run.info["tasks"]
    if task is None:
        if len(tasks) > 1:
            raise StateError(f"{run.folder}: expected the name of a task, found several: {', '.join(tasks)}")
        (task,) = tasks
    if task not in tasks:
        raise StateError(f"{run.folder}: no task {task!r}.{nearest(task, tasks)}")
    metric = metric or str(tasks[task]["primary"])
    if metric not in tasks[task]["metrics"]:
        raise StateError(f"{run.folder}: task {task!r} has no metric {metric!r}; {', '.join(tasks[task]['metrics'])}")
    return task, metric


def _domains(run: Run) -> dict[str, str]:
    """Return client -> its domain. Raises StateError for a client without one."""
    for client, about in run.info["clients"].items():
        if about.get("domain") is None:
            raise StateError(f"{run.folder}: client {client!r} has no domain")
    return {client: about["domain"] for client, about in run.info["clients"].items()}


def _domain_scores(run: Run, task: str, metric: str, split: str) -> dict[int, DomainScores]:
    """Return round -> the scores on a split, in order."""
    domains = _domains(run)
    each = {
        number: grouped((domains[client], value) for client, value in by_client.items())
        for number, by_client in run.scores(task, metric, split).items()
    }
    stated = run.recipe.get("partition", {}).get("clients", {})
    named = list(stated) if isinstance(stated, Mapping) else []  # as the partition names them, then the others
    order = [*named, *sorted({*domains.values()} - {*named})]
    return {
        number: DomainScores(number, {d: fmean(each[number][d]) for d in sorted(each[number], key=order.index)})
        for number in sorted(each)
    }


def losses(run: Run) -> dict[str, list[float]]:
    """Return task -> its training loss in each round that trained it, mean over clients; empty where unknown."""
    by_round = (
        grouped((record["task"], record["loss"]) for record in line.get("train", ()) if record["loss"] is not None)
        for line in run.rounds
    )
    return grouped((task, mean_of(of)) for known in by_round for task, of in known.items())


def falls(run: Run) -> dict[str, float]:
    """Return task -> `falling` of its training loss; of its validation loss, if the mean over tasks falls less by that.

    What no longer learns anything that holds for other examples has converged, though it learns its own by heart. The
    validation loss (mean over clients) counts where it was measured in more than one round.
    """
    learned = {task: falling(by_round) for task, by_round in losses(run).items()}
    held = {**learned}
    for task in learned:
        measured = {
            number: mean_of(of.values()) for number, of in run.scores(task, "loss", "val").items() if number > 0
        }
        if not isnan(fall := falling([*measured.values()], [*measured])):
            held[task] = fall
    return min(held, learned, key=lambda of: mean_of_known(of.values()))


def falling(by_round: Sequence[float], rounds: Sequence[int] = ()) -> float:
    """Return the percent by which a loss fell per tenth of the rounds, at the end; nan for a single round.

    From the mean losses of the first and the second half of the last rounds; `rounds` are those that were measured,
    where these are not all. Percent of the loss, or of a tenth of the first round's where the loss is smaller: a model
    that knows its examples by heart has converged, though its loss shrinks on and on. 0 where it rises, so that one
    seed's rise does not hide the fall at others.
    """
    if len(by_round) < 2:
        return nan
    at = rounds or range(1, len(by_round) + 1)
    earlier = at[-1] - round(LAST * at[-1])
    kept = max(2, sum(number > earlier for number in at))
    half = kept // 2
    (before, after), (start, end) = ((mean_of(of[-kept:][:half]), mean_of(of[-half:])) for of in (by_round, at))
    if before <= 0:
        return 0.0
    fall = 1 - (max(after, 1e-12) / before) ** (at[-1] / 10 / (end - start))
    return max(0.0, 100 * fall * before / max(before, FIRST * by_round[0]))


UNKNOWN = "convergence not known"


def unsettled(fall: float, has_loss: bool) -> str:
    """Return what forbids a verdict on a method whose loss falls by `fall`; '' where nothing does.

    A method without a loss trains nothing; one with a loss over too few rounds may have converged or not.
    """
    return "not converged" if fall > STILL else UNKNOWN if isnan(fall) and has_loss else ""


def unsettled_among(methods: Mapping[str, str]) -> str:
    """Return 'not converged: A, B' of methods' `unsettled`; '' where all have converged."""
    first = NOTHING if NOTHING in methods.values() else next(filter(None, methods.values()), "")
    return f"{first}: {', '.join(name for name, of in methods.items() if of == first)}" if first else ""


def near_0(values: Values, metrics: Mapping[str, str]) -> list[str]:
    """Return the tasks on which a method is about 0 by a metric that may be below 0: no percent of that."""
    each = {t: [of[t] for of in values.values() if t in of] for t, metric in metrics.items() if metric in SIGNED}
    found = {task: Estimate.of(numbers) for task, numbers in each.items() if numbers}
    return [task for task, of in found.items() if abs(of.mean) < ABOUT_0 or abs(of.mean) <= of.half]


def unfit(
    values: Mapping[str, Values], unsettled: Mapping[str, str], seeds: Iterable[int], metrics: Mapping[str, str]
) -> str:
    """Return why a method's `values` and those of the last one, its baseline, allow no verdict; '' where they do.

    `unsettled` is that of both, `seeds` are those that some method has, `metrics` are those of the tasks that count.
    """
    if reason := unsettled_among(unsettled):
        return reason
    if gap := next(gaps_of(values, seeds, metrics), ""):
        return gap
    *_, (base, by_seed) = values.items()
    vague = near_0(by_seed, metrics)
    return f"about 0 with {base}, so no percent: {', '.join(vague)}" if vague else ""


def gaps_of(values: Mapping[str, Values], seeds: Iterable[int], tasks: Iterable[str]) -> Iterator[str]:
    """Yield the first thing that each method lacks, of these seeds and tasks."""
    for name, by_seed in values.items():
        each = {task: [of.get(task, nan) for of in by_seed.values()] for task in tasks}
        if absent := sorted({*seeds} - by_seed.keys()):
            yield f"no seed {', '.join(map(str, absent))}: {name}"
        elif unknown := [task for task, numbers in each.items() if not all(map(isfinite, numbers))]:
            yield f"no number of {', '.join(unknown)} at some seed: {name}"


def last_loss(run: Run) -> float | None:
    """Return the training loss of the last round, mean over tasks; None where none is recorded."""
    found = [by_round[-1] for by_round in losses(run).values()]
    return fmean(found) if found else None


@dataclass(frozen=True)
class SeedLine:
    """The number of one task, or domain, of one run."""

    data: str
    method: str
    seed: int
    task: str
    metric: str
    value: float
    direction: str
    """'max' where larger is better, else 'min'."""
    training_loss: float
    """The training loss of the task in the last round; nan where it is unknown."""
    falling: float
    """The number of `falls`; nan where that is unknown."""
    ratio: float
    """Where the seeds redraw the measured part from one pool, the ratio of `against_zero`; else 0."""


@dataclass(frozen=True)
class Seeds(HasTable):
    """All lines of a grid; `title` heads the table."""

    title: str
    lines: tuple[SeedLine, ...]

    def as_table(self) -> Table:
        """Return the first six columns as text."""
        shown = [astuple(line)[:6] for line in self.lines]
        return Table(self.title, HEAD[:6], tuple((*map(str, line[:-1]), f"{line[-1]:.4f}") for line in shown))

    def records(self) -> Records:
        """Return all columns in full precision."""
        return Records(HEAD, [astuple(line) for line in self.lines])

    def values(self, data: str, method: str, column: str = "value") -> Values:
        """Return seed -> task -> number, by default the task's own metric; empty where the method has no run."""
        return nested((line.seed, line.task, getattr(line, column)) for line in self.of(data, method))

    def unsettled(self, data: str, method: str) -> str:
        """Return `unsettled` of a method."""
        lines = self.of(data, method)
        fall = mean_of_known(line.falling for line in lines)
        return unsettled(fall, not all(isnan(line.training_loss) for line in lines))

    def metrics(self, data: str) -> dict[str, str]:
        """Return task -> metric."""
        return {line.task: line.metric for line in self.lines if line.data == data}

    def directions(self, data: str) -> dict[str, str]:
        """Return task -> direction."""
        return {line.task: line.direction for line in self.lines if line.data == data}

    def methods(self, data: str) -> list[str]:
        """Return the methods of a data set, in their order."""
        return list(dict.fromkeys(line.method for line in self.lines if line.data == data))

    def ratio(self, data: str) -> float:
        """Return the ratio of a data set's lines."""
        return max((line.ratio for line in self.lines if line.data == data), default=0.0)

    def of(self, data: str, method: str) -> list[SeedLine]:
        """Return the lines of a method."""
        return [line for line in self.lines if (line.data, line.method) == (data, method)]


HEAD = tuple(field.name for field in fields(SeedLine))


def of_seeds(grid: Grid, folder: Path, split: str = "test") -> Seeds:
    """Return the number of every task of every finished run. Raises StateError where no run has finished."""
    return seeds_of(grid, read(grid, folder, split))


def seeds_of(grid: Grid, sides: Mapping[Combination, Side]) -> Seeds:
    """Return the number of every task of every run."""
    by_data = {data: {c.task: c for c in columns_of(grid, data, sides) if c.task} for data, *_ in sides}
    lines = []
    for seed in grid.seeds:
        for (data, *_), side in sides.items():
            columns = by_data[data]
            if seed not in side.values:
                continue
            by_task, still = losses(side.runs[seed]), falls(side.runs[seed])
            for task, value in side.values[seed].items():
                if task not in columns:
                    continue
                trained = next(iter(by_task), "") if side.by_domain else task  # a domain is a part of the only task
                last = by_task[trained][-1] if trained in by_task else nan
                c, fall = columns[task], still.get(trained, nan)
                lines.append(
                    SeedLine(data, side.label, seed, task, c.metric, value, c.direction, last, fall, side.ratio)
                )
    return Seeds(f"{grid.title or grid.name}: every seed", tuple(lines))


def read_seeds(file: Path) -> Seeds:
    """Return the lines of a CSV file that `of_seeds` made. Raises StateError where it is none."""
    try:
        rows = csv.DictReader(io.StringIO(file.read_text("utf-8")), strict=True)
        table = [*enumerate(rows, 2)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise StateError(f"{file}: no CSV file in UTF-8: {error}") from None
    if absent := [name for name in HEAD if name not in (rows.fieldnames or ())]:
        raise StateError(
            f"{file}: the column {absent[0]} is absent; make the file with `fedloom compare GRID --seeds --format csv`"
        )
    lines: dict[tuple[str, str, int, str], SeedLine] = {}
    first: dict[tuple[str, str], tuple[str, str]] = {}  # (data, task) -> (metric, direction), one for all lines
    for number, row in table:
        try:
            value, *more = (float(row[key] or math.nan) for key in ("value", *HEAD[-3:]))
            if row["direction"] not in ("max", "min"):
                raise ValueError(f"direction: expected max or min, found {row['direction']!r}")
            for key, found in zip(HEAD[-2:], more[-2:], strict=True):
                if found < 0:
                    raise ValueError(f"{key}: expected a number of 0 or more, found {found:g}")
            data, method, task, metric = (without_mark(row[key]) for key in ("data", "method", "task", "metric"))
            names = data, method, int(row["seed"]), task, metric
            if names[:4] in lines:
                raise ValueError(f"a second number of {', '.join(map(str, names[:4]))}")
            measured = names[4], row["direction"]
            if (other := first.setdefault((names[0], names[3]), measured)) != measured:
                raise ValueError(f"{' '.join(measured)} of {names[3]} found, the lines above have {' '.join(other)}")
            lines[names[:4]] = SeedLine(*names, value, row["direction"], *more)
        except (TypeError, ValueError) as error:
            raise StateError(f"{file}, line {number}: {error}") from None
    return Seeds(file.stem, tuple(lines.values()))
