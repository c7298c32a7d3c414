"""A run held against another one of the same tasks: what each task gained or lost, and which clients it hurt."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedloom.core.errors import StateError
from fedloom.core.settings.section import differs, value_at
from fedloom.federation.runs.reader import Final, Run, TaskMetric, mean_of
from fedloom.study.delta import delta_m, delta_terms, without_base
from fedloom.study.tables.compare import QUIET

SPLITS = ("test", "val")
_KEYS = 12  # keys in which the recipes differ that are named, at most


@dataclass(frozen=True)
class Change:
    """A number, the base's number, and the change in percent; positive is better, nan is not defined."""

    value: float
    base: float
    percent: float


@dataclass(frozen=True)
class Each:
    """The clients of one task by its primary metric, as their kept models measured."""

    row: TaskMetric
    clients: Mapping[str, Change]
    """Of the clients that have the task in both runs."""

    @property
    def compared(self) -> tuple[str, ...]:
        """Clients with a number in both runs."""
        return tuple(n for n, c in self.clients.items() if not math.isnan(c.value) and not math.isnan(c.base))

    @property
    def worse(self) -> tuple[str, ...]:
        """Those that the run's model serves worse than the base's, the worst change first."""
        found = [n for n in self.compared if self._gain(n) < 0]
        return tuple(sorted(found, key=lambda name: (math.isnan(self._percent(name)), self._percent(name))))

    @property
    def better(self) -> tuple[str, ...]:
        """Those that it serves better, in the run's order."""
        return tuple(n for n in self.compared if self._gain(n) > 0)

    def _percent(self, name: str) -> float:
        return self.clients[name].percent

    def _gain(self, name: str) -> float:
        change = self.clients[name]
        return (1 if self.row.direction == "max" else -1) * (change.value - change.base)


@dataclass(frozen=True)
class Against:
    """What a run is compared with, and the result."""

    label: str
    """The base's method."""
    facts: tuple[tuple[str, str], ...]
    """What the base is."""
    means: Mapping[tuple[str, str, str], Change]
    """(split, task, metric) -> the mean over clients."""
    deltas: Mapping[str, tuple[float, int]]
    """Split -> Delta_m in percent over the tasks' primary metrics, and the number of these tasks."""
    split: str
    """The split of the clients' numbers."""
    each: tuple[Each, ...]
    """Task by task; empty where the runs have no client in common."""
    over_rounds: Mapping[str, Mapping[int, float]]
    """Task -> the base's mean over clients in each measured round."""
    notes: tuple[str, ...] = ()

    @property
    def by_client(self) -> dict[str, Sequence[float]]:
        """Client -> the changes of its own tasks in percent, for the clients where all are defined."""
        changes: dict[str, list[float]] = {}
        for each in self.each:
            for name in each.compared:
                changes.setdefault(name, []).append(each.clients[name].percent)
        return {name: of for name, of in changes.items() if not any(map(math.isnan, of))}

    @property
    def delta_of(self) -> dict[str, float]:
        """Client -> Delta_m over its own tasks in percent, where it is defined."""
        return {name: mean_of(of) for name, of in self.by_client.items()}


def against(run: Run, base: Run) -> Against:
    """Compare the kept models of two runs.

    Raises StateError where the base is the run itself, or has no task or no measured split in common with it.
    """
    if run.folder.resolve() == base.folder.resolve():
        raise StateError(f"{base.folder}: the base is the run itself: expected another run of the same tasks")
    rows = _common(run, base)
    mine, theirs = (_finals(one, rows) for one in (run, base))
    measured = {s: _means(rows, run, mine[s], theirs[s]) for s in SPLITS if s in mine and s in theirs}
    splits = [s for s in measured if any((s, row.task, row.metric) in measured[s] for row in rows)]
    if not splits:
        raise StateError(
            f"{base.folder} cannot be the base of {run.folder}, for no split of a task was measured in both: "
            f"expected {_splits(mine)}, found {_splits(theirs)}"
        )
    means: dict[tuple[str, str, str], Change] = {}
    deltas, notes = {}, _about_tasks(run, base, rows)
    for split in splits:
        means |= measured[split]
        directions = {row.task: row.direction for row in rows}
        values, others = (
            {row.task: of.values[row.task][row.metric] for row in rows if (split, row.task, row.metric) in means}
            for of in (mine[split], theirs[split])
        )
        out = without_base(values, others)
        deltas[split] = (delta_m(values, others, directions), len(values) - len(out))
        if out:
            notes.append(f"Δm on {split} leaves out {', '.join(out)}: 0 or undefined in the base.")
        if mine[split].data != theirs[split].data:
            notes.append(
                f"Not measured on the same data: {_list(mine[split].data)} here, {_list(theirs[split].data)} in the "
                f"base ({split})."
            )
    each = _each(rows, run, base, splits[0])
    measured_then = base.history(splits[0])
    if not each:
        notes.append("No client with a task of its own has numbers in both runs, so clients are not compared.")
    history = {
        row.task: {
            f.round: f.values[row.task][row.metric] for f in measured_then if row.metric in f.values.get(row.task, {})
        }
        for row in rows
    }
    return Against(
        base.label, _facts(run, base, theirs[splits[0]]), means, deltas, splits[0], each, history, tuple(notes)
    )


def _common(run: Run, base: Run) -> tuple[TaskMetric, ...]:
    """The tasks that both have, judged by the same metric."""
    mine, theirs = run.judged, base.judged
    rows = tuple(row for row in mine if row in theirs)
    if not rows:
        raise StateError(
            f"{base.folder} cannot be the base of {run.folder}, for they have no task in common: expected "
            f"{_list(map(str, mine))}, found {_list(map(str, theirs))}"
        )
    return rows


def _finals(run: Run, rows: Sequence[TaskMetric]) -> dict[str, Final]:
    """Split -> the kept model's numbers, of the splits that one of these tasks was measured on."""
    found = {}
    for split in SPLITS:
        with suppress(StateError):
            final = run.final(split)
            if any(row.metric in final.values.get(row.task, {}) for row in rows):
                found[split] = final
    return found


def _splits(finals: Mapping[str, Final]) -> str:
    return "; ".join(f"{split} of {_list(final.values)}" for split, final in finals.items()) or "none"


def _means(rows: Sequence[TaskMetric], run: Run, mine: Final, theirs: Final) -> dict[tuple[str, str, str], Change]:
    found = {}
    for row in rows:
        others = theirs.values.get(row.task, {})
        for metric, value in mine.values.get(row.task, {}).items():
            if metric in others:
                direction = run.direction(row.task, metric)
                found[mine.split, row.task, metric] = _change(value, others[metric], direction)
    return found


def _change(value: float, base: float, direction: str) -> Change:
    return Change(value, base, delta_terms({"": value}, {"": base}, {"": direction}).get("", math.nan))


def _each(rows: Sequence[TaskMetric], run: Run, base: Run, split: str) -> tuple[Each, ...]:
    mine, theirs = run.by_client(split), base.by_client(split)
    made = []
    for row in rows:
        clients = {}
        for name, final in mine.items():
            if name in theirs:
                value, other = (of.values.get(row.task, {}).get(row.metric) for of in (final, theirs[name]))
                if value is not None and other is not None:
                    clients[name] = _change(value, other, row.direction)
        if clients:
            made.append(Each(row, clients))
    return tuple(made)


def _facts(run: Run, base: Run, final: Final) -> tuple[tuple[str, str], ...]:
    """What a reader has to know of the base before the changes are believed."""
    asked = base.recipe.get("training", {}).get("rounds")
    state = "finished" if base.is_finished else "not finished"
    keys = sorted(set(differs("", run.recipe, base.recipe)) - QUIET)
    others = [key for key in keys if not key.startswith("method.")]
    named = [f"{key}: {value_at(base.recipe, key)} (here {value_at(run.recipe, key)})" for key in others[:_KEYS]]
    more = [f"and {len(others) - _KEYS} more"] if len(others) > _KEYS else []
    return (
        ("method", base.label),
        ("folder", _seen_from(run.folder.resolve(), base.folder.resolve())),
        ("seed", f"{base.seed}" if base.seed == run.seed else f"{base.seed} (here {run.seed})"),
        ("rounds", f"{base.last_round}" + (f" of {asked}" if asked else "") + f", {state}"),
        ("numbers of", f"the {final.model} model of round {final.round}"),
        ("data", _equal(run, base, "data_hash")),
        ("clients", _equal(run, base, "partition_hash")),
        ("differs beside the method in", "; ".join([*named, *more]) or "nothing"),
    )


def _seen_from(here: Path, there: Path) -> str:
    """A folder without what it has in common with another one: 'local', or 'Local/plain/s0' of a grid."""
    return str(there.relative_to(os.path.commonpath([here, there])))


def _equal(run: Run, base: Run, name: str) -> str:
    mine, theirs = run.info.get(name), base.info.get(name)
    if mine is None or theirs is None:
        return "not known: a run without a hash"
    return f"the same (hash {mine})" if mine == theirs else f"not the same: hash {theirs}, here {mine}"


def _about_tasks(run: Run, base: Run, rows: Sequence[TaskMetric]) -> list[str]:
    shared = {row.task for row in rows}
    notes = []
    for text, one in (("here", run), ("in the base", base)):
        if alone := [task for task in one.info["tasks"] if task not in shared]:
            notes.append(f"Only {text}, or judged by another metric there: {_list(alone)}.")
    mine, theirs = run.info.get("partition_hash"), base.info.get("partition_hash")
    if mine != theirs:
        notes.append("Clients of the same name may have other examples in the base.")
    if _equal(run, base, "data_hash").startswith("not the same"):
        notes.insert(0, "The base has other data, so a change is not the method's alone.")
    return notes


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
