"""A run compared with another one of the same tasks: the change of each task and client; and the runs to compare with.

A baseline is another run of the same grid, or one beside the run with the same clients and data.

The methods of a grid side by side: changes against a reference, worst tasks and clients, costs.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

from fedloom.core.errors import StateError, UserError
from fedloom.core.grouping import grouped, nested
from fedloom.core.settings.section import differs, value_at
from fedloom.federation.runs.reader import Final, Run, TaskMetric, mean_of
from fedloom.federation.runs.recorded import read_info
from fedloom.study import grid, statistics
from fedloom.study.comparison import QUIET
from fedloom.study.grid import Grid, together
from fedloom.study.report.records import small_clients, worst
from fedloom.study.report.words import without_folders
from fedloom.study.results import Combination, Results, Side, change, deltas

SPLITS = ("test", "val")
BASES = ("local", "constant")
"""Methods that are a baseline, the better one first."""
MOST = 6
"""Baselines that a page offers, at most."""
_LOOKED = 500  # folders beside the run that are looked at
_SAME = ("partition_hash", "data_hash")
_KEYS = 12  # keys in which the recipes differ that are named, at most


@dataclass(frozen=True)
class Change:
    """A number, the number of the baseline, and the change in percent; positive is better, nan is not defined."""

    value: float
    base: float
    percent: float


@dataclass(frozen=True)
class Each:
    """The clients of one task by its primary metric, as their kept models measured."""

    row: TaskMetric
    clients: Mapping[str, Change]
    """The clients that have the task in both runs."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Return the clients with a number in both runs."""
        return tuple(n for n, c in self.clients.items() if not math.isnan(c.value) and not math.isnan(c.base))

    @property
    def worse(self) -> tuple[str, ...]:
        """Return the clients with a worse model than in the baseline, the worst change first."""
        percent = {n: self.clients[n].percent for n in self.compared if self._gain(n) < 0}
        return tuple(sorted(percent, key=lambda name: (math.isnan(percent[name]), percent[name])))

    @property
    def better(self) -> tuple[str, ...]:
        """Return the clients with a better model than in the baseline, in the order of the run."""
        return tuple(n for n in self.compared if self._gain(n) > 0)

    def _gain(self, name: str) -> float:
        change = self.clients[name]
        return (1 if self.row.direction == "max" else -1) * (change.value - change.base)


@dataclass(frozen=True)
class Against:
    """A baseline of a run, and the comparison with it."""

    label: str
    """The method of the baseline."""
    facts: tuple[tuple[str, str], ...]
    """The facts about the baseline."""
    means: Mapping[tuple[str, str, str], Change]
    """(split, task, metric) -> the mean over clients."""
    deltas: Mapping[str, tuple[float, int]]
    """Split -> Delta_m in percent over the tasks' primary metrics, and the number of these tasks."""
    split: str
    """The split of the clients' numbers."""
    each: tuple[Each, ...]
    """Task by task; empty where the runs have no client in common."""
    over_rounds: Mapping[str, Mapping[int, float]]
    """Task -> the baseline's mean over clients in each measured round."""
    notes: tuple[str, ...] = ()

    @property
    def by_client(self) -> dict[str, Sequence[float]]:
        """Return client -> the changes of its own tasks in percent, for the clients where all are defined."""
        changes = grouped((name, e.clients[name].percent) for e in self.each for name in e.compared)
        return {name: of for name, of in changes.items() if not any(map(math.isnan, of))}

    @property
    def delta_of(self) -> dict[str, float]:
        """Return client -> Delta_m over its own tasks in percent, where it is defined."""
        return {name: mean_of(of) for name, of in self.by_client.items()}


def against(run: Run, base: Run) -> Against:
    """Compare the kept models of two runs. Raises StateError where they have no task or measured split in common."""
    if run.folder.resolve() == base.folder.resolve():
        raise StateError(f"{base.folder}: the base is the run itself: expected another run of the same tasks")
    refusal = f"{base.folder} cannot be the base of {run.folder}"
    rows = tuple(row for row in run.judged if row in base.judged)
    if not rows:
        wanted, there = (", ".join(map(str, one.judged)) for one in (run, base))
        raise StateError(f"{refusal}: they have no task in common: expected {wanted}, found {there}")
    mine, theirs = (_finals(one, rows) for one in (run, base))
    measured = {s: _means(run, mine[s], theirs[s], rows) for s in SPLITS if s in mine and s in theirs}
    splits = [s for s in measured if any((s, row.task, row.metric) in measured[s] for row in rows)]
    if not splits:
        wanted, there = (
            "; ".join(f"{split} of {', '.join(final.values)}" for split, final in finals.items()) or "none"
            for finals in (mine, theirs)
        )
        raise StateError(f"{refusal}: no split of a task was measured in both: expected {wanted}, found {there}")
    means: dict[tuple[str, str, str], Change] = {}
    deltas, notes = {}, _about_tasks(run, base, rows)
    directions = {row.task: row.direction for row in rows}
    for split in splits:
        means |= measured[split]
        values, others = (
            {row.task: of.values[row.task][row.metric] for row in rows if (split, row.task, row.metric) in means}
            for of in (mine[split], theirs[split])
        )
        out = statistics.without_base(values, others)
        deltas[split] = (statistics.delta_m(values, others, directions), len(values) - len(out))
        if out:
            notes.append(f"Δm on {split} leaves out {', '.join(out)}: 0 or undefined in the base.")
        here, there = (", ".join(of[split].data) or "none" for of in (mine, theirs))
        if here != there:
            notes.append(f"Not measured on the same data: {here} here, {there} in the base ({split}).")
    each = _each(rows, run, base, splits[0])
    if not each:
        notes.append("No client with a task of its own has numbers in both runs, so clients are not compared.")
    curves, facts = base.curves(splits[0]), _facts(run, base, theirs[splits[0]])
    over_rounds = {row.task: curves[row.task] for row in rows}
    return Against(base.label, facts, means, deltas, splits[0], each, over_rounds, tuple(notes))


def _finals(run: Run, rows: Sequence[TaskMetric]) -> dict[str, Final]:
    """Return split -> the kept model's numbers, of the splits that one of these tasks was measured on."""
    finals = {}
    for split in SPLITS:
        with suppress(StateError):
            final = run.final(split)
            if any(row.metric in final.values.get(row.task, {}) for row in rows):
                finals[split] = final
    return finals


def _means(run: Run, mine: Final, theirs: Final, rows: Sequence[TaskMetric]) -> dict[tuple[str, str, str], Change]:
    return {
        (mine.split, row.task, metric): _change(value, theirs.values[row.task][metric], run.direction(row.task, metric))
        for row in rows
        for metric, value in mine.values.get(row.task, {}).items()
        if metric in theirs.values.get(row.task, {})
    }


def _change(value: float, base: float, direction: str) -> Change:
    return Change(value, base, statistics.delta_terms({"": value}, {"": base}, {"": direction}).get("", math.nan))


def _each(rows: Sequence[TaskMetric], run: Run, base: Run, split: str) -> tuple[Each, ...]:
    mine, theirs, small = run.by_client(split), base.by_client(split), small_clients(run, split)
    both = [(name, mine[name].values, theirs[name].values) for name in mine if name in theirs and name not in small]
    changes = nested(
        (row, name, _change(one[row.task][row.metric], other[row.task][row.metric], row.direction))
        for row in rows
        for name, one, other in both
        if all(row.metric in of.get(row.task, {}) for of in (one, other))
    )
    return tuple(Each(row, clients) for row, clients in changes.items())


def _facts(run: Run, base: Run, final: Final) -> tuple[tuple[str, str], ...]:
    """Return what a reader has to know of the baseline before reading the changes."""
    asked = base.recipe.get("training", {}).get("rounds")
    state = "finished" if base.is_finished else "not finished"
    keys = sorted(set(differs("", run.recipe, base.recipe)) - QUIET)
    others = [key for key in keys if not key.startswith("method.")]
    told = {k: [without_folders(str(value_at(each.recipe, k))) for each in (base, run)] for k in others[:_KEYS]}
    named = [f"{key}: {there} (here {here})" for key, (there, here) in told.items()]
    more = [f"and {len(others) - _KEYS} more"] if len(others) > _KEYS else []
    here, there = run.folder.resolve(), base.folder.resolve()
    return (
        ("method", base.label),
        # without what both have in common: 'local', or 'Local/plain/s0' of a grid
        ("folder", str(there.relative_to(os.path.commonpath([here, there])))),
        ("seed", f"{base.seed}" if base.seed == run.seed else f"{base.seed} (here {run.seed})"),
        ("rounds", f"{base.last_round}" + (f" of {asked}" if asked else "") + f", {state}"),
        ("numbers of", f"the {final.model} model of round {final.round}"),
        ("data", _equal(run, base, "data_hash")),
        ("clients", _equal(run, base, "partition_hash")),
        ("differs beside the method in", "; ".join([*named, *more]) or "nothing"),
    )


def _equal(run: Run, base: Run, name: str) -> str:
    mine, theirs = run.info.get(name), base.info.get(name)
    if mine is None or theirs is None:
        return "not known: a run without a hash"
    return f"the same (hash {mine})" if mine == theirs else f"not the same: hash {theirs}, here {mine}"


def _about_tasks(run: Run, base: Run, rows: Sequence[TaskMetric]) -> list[str]:
    shared = {row.task for row in rows}
    notes = []
    if _equal(run, base, "data_hash").startswith("not the same"):
        notes.append("The base has other data, so a change is not due to the method alone.")
    for text, one in (("here", run), ("in the base", base)):
        if alone := [task for task in one.info["tasks"] if task not in shared]:
            notes.append(f"Only {text}, or judged by another metric there: {', '.join(alone)}.")
    if run.info.get("partition_hash") != base.info.get("partition_hash"):
        notes.append("Clients of the same name may have other examples in the base.")
    return notes


def bases_of(run: Run, named: Run | None = None) -> tuple[Against | None, tuple[Against, ...]]:
    """Return (the run compared with its baseline, the run compared with other runs); `MOST` comparisons in all.

    The baseline is the one that was named, or else the first of these: what the run's grid says, then Local and then
    the constant prediction with the same clients and data, in its grid or in the folder beside it. The others are the
    other methods of the grid and of the folder. Raises StateError where the run cannot be compared with the named one.
    """
    by_folder = {} if named is None else {named.folder.resolve(): ("", against(run, named))}
    bases, others = _candidates(run)
    first = len(by_folder)
    for name, folder in (*bases, *others):
        if folder not in by_folder and len(by_folder) < MOST:
            with suppress(UserError):  # a damaged run, or one of other tasks, is no baseline; the page goes on without
                by_folder[folder] = name, against(run, Run.read(folder))
                first += (name, folder) in bases
    times = Counter(one.label for _, one in by_folder.values())
    candidates = tuple(
        one if times[one.label] == 1 else replace(one, label=f"{one.label} ({name or folder.name})")
        for folder, (name, one) in by_folder.items()
    )
    return (candidates[0], candidates[1:]) if first else (None, candidates)


Named = list[tuple[str, Path]]
"""(What the grid calls it, folder)."""


def _candidates(run: Run) -> tuple[Named, Named]:
    """Return (baselines, the better ones first; all other runs)."""
    here = run.folder.resolve()
    home = next((home for home in here.parents if (home / grid.FILE).is_file()), None)
    bases, others = ([], []) if home is None else _of_grid(home, here)
    candidates: dict[str, Named] = {}
    for folder in islice(sorted(here.parent.iterdir()), _LOOKED):
        if folder != here and (folder / "run.json").is_file():
            with suppress(UserError):
                info = read_info(folder)
                if all(run.info.get(k) == info.get(k) is not None for k in _SAME):
                    candidates.setdefault(str(info.get("method")), []).append(("", folder))
    bases += [each for name in BASES for each in candidates.pop(name, ())]
    return bases, [*others, *(each for several in candidates.values() for each in several)]


def _of_grid(home: Path, here: Path) -> tuple[Named, Named]:
    """Return the baselines of a run in its grid, and all other runs of the same data and seed that have begun."""
    bases: Named = []
    others: Named = []
    with suppress(UserError):
        opened = grid.load_grid(home / grid.FILE)
        all_cells = {cell.folder(home).resolve(): cell for cell in grid.cells(opened)}
        if (mine := all_cells.pop(here, None)) is not None:
            wanted = [opened.reference(mine.base), ("constant", "-")]
            for folder, cell in all_cells.items():
                if (cell.data, cell.seed) == (mine.data, mine.seed) and (folder / "run.json").is_file():
                    sides = bases if (cell.base, cell.addon) in wanted else others
                    sides.append((grid.together(cell.base, cell.addon), folder))
    return bases, others


OFFERED = 12
"""Methods that a page offers as a baseline of the others, at most."""

Clients = Mapping[TaskMetric, tuple[statistics.Estimate, tuple[str, ...]]]
"""Task -> the worst client's number, and the clients that were the worst in a seed; for tasks with several clients.

In a seed in which all clients have the same number, no client is the worst.
"""


@dataclass(frozen=True)
class Method:
    """A base with its add-on on one data set."""

    data: str
    label: str
    reference: str
    """The method that changes are against; its own name for the reference, '' where the grid has none."""
    delta: statistics.Estimate | None
    """Delta_m in percent over seeds, without tasks on which no method is better than the constant prediction."""
    seeds: tuple[float, ...]
    """Delta_m of each seed."""
    changes: Mapping[TaskMetric, statistics.Estimate]
    """Task (or domain) -> its change in percent."""
    is_method: bool
    """False for `centralised` and `constant`, which are no federated methods."""
    worst_clients: Clients
    sent: float
    """Bytes from and to clients, mean over seeds."""
    seconds: float
    verdict: statistics.Verdict | None = None
    """The verdict on Delta_m, after Holm's correction over the methods of the data set; None for the reference."""

    @property
    def worst_task(self) -> tuple[TaskMetric, statistics.Estimate] | None:
        """Return the task with the lowest change in percent, which is positive where all got better."""
        return min(self.changes.items(), key=lambda item: item[1].mean, default=None)


def by_gain(methods: Sequence[Method]) -> list[Method]:
    """Return the methods that are compared with their reference, the largest gain first."""
    return sorted((m for m in methods if m.delta), key=lambda m: -m.delta.mean if m.delta else 0.0)


def methods_of(grid: Grid, results: Results) -> tuple[tuple[Method, ...], dict[str, tuple[Method, ...]]]:
    """Return all methods with finished runs, compared as the grid says; and baseline -> methods compared with it.

    Each seed is compared with the same seed of the baseline. The grid's own baseline comes first; '' stands for none.
    """
    runs = {key: list(side.runs.values()) for key, side in results.sides.items()}
    own = {
        key: (
            _worst_clients(results.sides[key], results.rows[key[0]]),
            fmean(sum(run.bytes_total().values()) for run in of),
            mean_of([run.seconds_total() for run in of]),
        )
        for key, of in runs.items()
    }
    plain = next(iter(grid.addons))
    special = {"": "none", "each base alone" if plain == "-" else f"each base with {plain}": "base"}
    named = special | {together(base, addon): f"{base}/{addon}" for _, base, addon in results.sides}
    first = [name for name, delta in named.items() if delta == grid.delta]
    deltas = {name: named[name] for name in [*first, *named] if name in first or name not in special}
    views = {
        name: _methods(grid.model_copy(update={"delta": delta}), results, own)
        for name, delta in islice(deltas.items(), OFFERED)
    }
    order = list(grid.data)
    by_data = sorted(_methods(grid, results, own), key=lambda method: order.index(method.data))
    return tuple(by_data), views


def _methods(
    grid: Grid, results: Results, own: Mapping[Combination, tuple[Clients, float, float]]
) -> tuple[Method, ...]:
    """Return the methods as the grid compares them, with a verdict on each that has two finite gains or more.

    `own` is what does not depend on the comparison: each method's worst clients, bytes and seconds.
    """
    methods: list[Method] = []
    reasons: dict[tuple[str, str], str] = {}
    for key, side in results.sides.items():
        data, base, _ = key
        named = grid.reference(base)
        other = None if named is None else results.sides.get((data, *named))
        directions = results.directions(data)
        delta, seeds, changes = None, list[float](), {}
        if other is not None and other is not side:
            counted = [row for row in results.rows[data] if row.task in directions]
            reasons[data, side.label] = results.unfit(data, side.label, other.label, counted)
            seeds = list(deltas(side.values, other.values, directions).values())
            delta = statistics.Estimate.of(seeds, side.ratio) if seeds else None
            each = {
                row: change(side.values, other.values, {row.task: row.direction}, side.ratio)
                for row in results.rows[data]
            }
            changes = {row: of for row, of in each.items() if of is not None and not math.isnan(of.mean)}
        known = delta if delta is not None and not math.isnan(delta.mean) else None
        over = data, side.label, "" if named is None else together(*named), known, tuple(seeds), changes
        methods.append(Method(*over, base not in grid.reference_rows, *own[key]))
    verdicts: dict[tuple[str, str], statistics.Verdict] = {}
    ratios = {(key[0], side.label): side.ratio for key, side in results.sides.items()}
    for data in {m.data for m in methods}:
        mine = [m for m in methods if m.data == data and m.is_method and len(m.seeds) > 1]
        gains = {(data, m.label): m.seeds for m in mine if all(map(math.isfinite, m.seeds))}
        tested = statistics.family(gains, ratios, grid.smallest, reasons)
        verdicts |= {key: of.verdict for key, of in tested.items()}
    return tuple(replace(m, verdict=verdicts.get((m.data, m.label))) for m in methods)


def _worst_clients(side: Side, rows: Sequence[TaskMetric]) -> Clients:
    """Return, for each task, the mean over seeds of the worst client's number in each."""
    by_method = {}
    for row in rows:
        numbers: list[float] = []
        names: list[str] = []
        for seed, finals in side.clients.items():
            values = {}
            for client, final in finals.items():
                task = row.task
                if side.by_domain:  # rows are domains, and the run has one task
                    if str(side.runs[seed].info["clients"][client].get("domain")) != row.task:
                        continue
                    task = next(iter(final.values), "")
                number = final.values.get(task, {}).get(row.metric)
                if number is not None:
                    values[client] = number
            lowest = worst(values, row.direction)
            if len(values) > 1 and lowest is not None:
                numbers.append(lowest[1])
                names += [lowest[0]] if len(set(values.values())) > 1 else []
        if numbers:
            by_method[row] = statistics.Estimate.of(numbers, side.ratio), tuple(dict.fromkeys(names))
    return by_method
