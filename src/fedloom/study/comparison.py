"""Runs side by side: one row per task, one column per method, intervals over seeds, changes against a baseline."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from fedloom.core.errors import StateError, choices
from fedloom.core.grouping import grouped
from fedloom.core.settings.section import differs, value_at
from fedloom.federation.recipes import schema
from fedloom.federation.recipes.runtime import FlowerSettings
from fedloom.federation.runs.reader import POOLED, Final, Run, TaskMetric, frame, human_bytes
from fedloom.federation.runs.recorded import check, json_of
from fedloom.study.grid import write
from fedloom.study.output import Best, HasTable, Records, Table, Value, json_text, span
from fedloom.study.results import MOVING, Column, Results, Side, at_constant, note, same_data, troubles
from fedloom.study.statistics import CUT, Estimate, clear_best, delta_m, without_base

QUIET = {"name", "seed", *(f"runtime.{key}" for key in schema.QUIET)}
QUIET |= {f"runtime.flower.{key}" for key in FlowerSettings.model_fields}
"""Keys of recipes that no comparison mentions, because they do not change results."""
CSV = (
    *("run", "task", "metric", "direction", "mean", "ci95_half", "seeds"),
    *("split", "model", "bytes_up", "bytes_down"),
)
FILE = "comparison.json"
"""The table of a comparison in the folder of its runs, from which `fedloom report` makes a page."""
ACROSS, LETTERS = 7, 120
"""Runs that stand side by side at most, and letters across; more stand below each other."""
ONE_SEED = "One seed: no interval, so this decides nothing."
_LONG = 60  # letters of a label's keys beyond which those of the data set are left out
_RULE = 2  # letters between two columns


@dataclass(frozen=True)
class RunSet(Side):
    """Runs that differ only in the seed, in the order of their seeds."""

    cells: Mapping[TaskMetric, Estimate] = field(default_factory=dict)
    """The means over clients, and, of metrics that runs also have of all clients' examples together, those."""
    delta: Estimate | None = None
    pairing: str = ""
    """The matching of the seeds with those of the baseline."""

    def total(self, way: str) -> float:
        """Return the bytes 'up' or 'down' of a run, mean over seeds."""
        return mean(run.bytes_total()[way] for run in self.runs.values())


@dataclass(frozen=True)
class Comparison(HasTable):
    """The result of `compare`: that of a grid of one data set, and `notes` to read before its numbers."""

    columns: tuple[RunSet, ...]
    results: Results
    base: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[TaskMetric, ...]:
        """Return the tasks with the metric that they are judged by."""
        return self.results.rows[""]

    @property
    def lines(self) -> tuple[TaskMetric, ...]:
        """Return the rows, each followed by its metric over the examples of all clients, where all runs have it."""
        return tuple(self.columns[0].cells)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Return the tasks that Delta_m leaves out: no method is better than the constant prediction there."""
        return tuple(self.results.excluded.get("", ()))

    @property
    def caption(self) -> str:
        """Return the split, the data and what is averaged."""
        pooled = "; pooled: over the examples of all these clients" if len(self.lines) > len(self.rows) else ""
        data = sorted({d for c in self.columns for f in c.finals.values() for d in f.data})
        seeds = f"; ± 95 % t-interval over seeds, {CUT}" if any(len(c.runs) > 1 for c in self.columns) else ""
        seeds += ", corrected for the examples that seeds share" if seeds and any(c.ratio for c in self.columns) else ""
        where = f"{self.results.split} split ({', '.join(data) or 'data not stated'})"
        return f"{where}, mean over the clients with the task{pooled}{seeds}."

    def as_table(self, width: int = LETTERS) -> Table:
        """Return one column per run, or one line per run where columns would be too many or too wide."""
        upright = [("", *(c.label for c in self.columns)), *self._lines()]
        turned = list(zip(*upright, strict=True))
        fits = _width(upright) <= max(width, _width(turned))
        head, *lines = upright if fits and len(self.columns) <= ACROSS else turned
        return Table("Runs side by side", head, tuple(lines), (self.caption, *self.notes))

    def records(self) -> Records:
        """Return one line per run set and task, and one with the metric `delta_m`, in full precision."""
        rows: list[list[Value]] = []
        for c in self.columns:
            lines = [(r.task, r.metric, r.direction, c.cells[r]) for r in self.lines]
            if c.delta is not None:
                lines.append(("", "delta_m", "max", c.delta))
            tail = (tuple(c.runs), self.results.split, c.model, c.total("up"), c.total("down"))
            for task, metric, direction, e in lines:
                rows.append([c.label, task, metric, direction, e.mean, e.half, *tail])
        return Records(CSV, rows)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame: method, as the table calls its columns, then the columns of `Result.to_pandas`."""
        return frame(({"method": c.label}, run) for c in self.columns for run in c.runs.values())

    __str__ = _repr_markdown_ = HasTable.to_markdown

    def _lines(self) -> list[tuple[str, ...]]:
        """Return one line per task, then the facts of each column."""
        lines = []
        for row in self.lines:
            best = clear_best({c.label: c.cells[row] for c in self.columns}, row.direction)
            texts = ((Best if c.label in best else str)(c.cells[row].of_metric(row.metric)) for c in self.columns)
            lines.append((f"{row}{' †' if row.task in self.excluded else ''}", *texts))
        if self.base is not None:
            deltas = ("base" if c.label == self.base else c.delta.signed if c.delta else "" for c in self.columns)
            lines.append((f"Δm % against {self.base}", *deltas))
        if any(known := [c.last_loss for c in self.columns]):
            lines.append(("last training loss", *known))
        return [
            *lines,
            ("model", *(c.model for c in self.columns)),
            ("seeds", *(", ".join(map(str, c.runs)) for c in self.columns)),
            ("round of the model", *(span(f.round for f in c.finals.values()) for c in self.columns)),
            ("rounds run", *(span(run.last_round for run in c.runs.values()) for c in self.columns)),
            ("sent by clients", *(human_bytes(c.total("up")) for c in self.columns)),
            ("sent to clients", *(human_bytes(c.total("down")) for c in self.columns)),
        ]


def compare(
    runs: Sequence[Run | str | Path], base: str | Path | None = None, split: str = "test", metric: str | None = None
) -> Comparison:
    """Compare runs task by task; runs that differ only in the seed become one column.

    `base` is a label as the table shows it, or the folder of one of the runs; by default the first run.
    Delta_m is computed per seed, against the base run of the same seed where there is one and against the mean over
    the base's seeds elsewhere.
    `metric` names the metric to judge by; without it each task is judged by its primary one.
    """
    read = [run if isinstance(run, Run) else Run.read(run) for run in runs]
    if not read:
        raise StateError("no runs to compare")
    groups = grouped((run.group, run) for run in read).values()
    ordered = [sorted(group, key=lambda run: run.seed) for group in groups]
    for one, two in (pair for group in ordered for pair in pairwise(group)):
        if one.seed == two.seed:
            raise StateError(f"{one.folder} and {two.folder} are the same recipe and seed: compare only one of them")
    notes = _comparable(ordered)
    rows = read[0].judged_by(metric).judged
    if left := [task for task in read[0].info["tasks"] if task not in {row.task for row in rows}]:
        notes.append(f"Left out, without {metric}: {', '.join(left)}.")
    finals = [{run.seed: run.final(split) for run in group} for group in ordered]
    lines = _lines(rows, [final for by_seed in finals for final in by_seed.values()])

    def number(final: Final, row: TaskMetric) -> float:
        return final.values.get(row.task, {}).get(row.metric, math.nan)

    columns = []
    for label, group, by_seed in zip(labels_of(ordered), ordered, finals, strict=True):
        values = {seed: {row.task: number(final, row) for row in rows} for seed, final in by_seed.items()}
        column = RunSet(label, {run.seed: run for run in group}, by_seed, values)
        each = {line: [number(final, line) for final in by_seed.values()] for line in lines}
        columns.append(replace(column, cells={line: Estimate.of(of, column.ratio) for line, of in each.items()}))
    both = [final for c in columns for final in c.finals.values()]
    notes += ["Not the same kind of model in all columns: see 'model'."] * (len({final.model for final in both}) > 1)
    notes += ["Not the same kind of data in all columns."] * (len({final.data for final in both}) > 1)
    notes += troubles({("", c.label, ""): c for c in columns})
    reference = columns[0] if base is None else _find(columns, base)
    about_delta: list[str] = []
    pairings: list[str] = []
    directions = {row.task: row.direction for row in rows}
    excluded: list[str] = []
    alone = len(columns) == 1 and base is None
    if not alone:
        means = [(next(iter(c.runs.values())).info["method"], {r.task: c.cells[r].mean for r in rows}) for c in columns]
        excluded = at_constant(means, directions)
        about_delta = [note(excluded)] if excluded else []
        counted = {task: direction for task, direction in directions.items() if task not in excluded}
        columns = [c if c is reference else _with_delta(c, reference, counted, about_delta) for c in columns]
        several = sorted({c.pairing for c in columns if c.pairing})
        for pairing in several:
            of = f" of {', '.join(c.label for c in columns if c.pairing == pairing)}" if len(several) > 1 else ""
            pairings.append(f"Δm{of}: {pairing}.")
    where = {c.label: ("", c.label, "-") for c in columns}
    results = Results(
        "",
        split,
        {where[c.label]: c for c in sorted(columns, key=lambda c: c is not reference)},
        {"": tuple(Column("", r.task, r.metric, r.direction, r.task in excluded) for r in rows)},
        [(where[c.label], where[reference.label]) for c in columns if c is not reference],
        tuple(notes),
        tuple(about_delta),
    )
    moving = [MOVING] if any(c.is_moving for c in columns) else []
    single = not alone and all(len(c.runs) == 1 for c in columns)
    more = (*notes, *about_delta, *results.about_0(), *pairings, *moving, *([ONE_SEED] if single else []))
    return Comparison(tuple(columns), results, None if alone else reference.label, more)


def save(made: Comparison, folder: Path) -> None:
    """Write the table for its page."""
    table = made.as_table()
    lines = [[[cell] if isinstance(cell, Best) else cell for cell in line] for line in table.lines]
    shown = {"title": f"{folder.resolve().name}: runs side by side", "head": table.heads, "lines": lines}
    write(folder, {FILE: json_text({**shown, "notes": table.notes})})


def saved(folder: Path) -> Table:
    """Return the table that `save` wrote. Raises StateError where the file is damaged."""
    check(FILE, shown := json_of(folder / FILE), str(folder / FILE))
    lines = tuple(tuple(Best("".join(c)) if isinstance(c, list) else c for c in line) for line in shown["lines"])
    return Table(shown["title"], tuple(shown["head"]), lines, tuple(shown["notes"]))


def _lines(rows: Sequence[TaskMetric], finals: Sequence[Final]) -> list[TaskMetric]:
    """Return each row, followed by its metric over the examples of all clients together, where every run has it."""
    lines = []
    for row in rows:
        pooled = TaskMetric(row.task, POOLED + row.metric, row.direction)
        lines.append(row)
        lines += [pooled] if all(pooled.metric in final.values.get(row.task, {}) for final in finals) else []
    return lines


def _with_delta(column: RunSet, base: RunSet, directions: Mapping[str, str], notes: list[str]) -> RunSet:
    """Return the column with Delta_m per seed, unless data differ; tasks that have no change go to the notes."""
    if any(seed in base.runs and not same_data(run, base.runs[seed]) for seed, run in column.runs.items()):
        notes.append(f"No Δm of {column.label}: its data are not those of {base.label}.")
        return column
    average = {row.task: of.mean for row, of in base.cells.items()}
    paired, left_out = base.values.keys() & column.values.keys(), set[str]()
    deltas = []
    for seed, by_task in column.values.items():
        against = {task: base.values.get(seed, average)[task] for task in directions}
        values = {task: by_task[task] for task in directions}
        left_out |= {*without_base(values, against)}
        deltas.append(delta_m(values, against, directions))
    pairing = "each seed against the base's same seed"
    if len(paired) < len(deltas):
        pairing = f"{len(paired)} of {len(deltas)} seeds against the base's same seed, the others against its mean"
    if left_out:
        notes.append(
            f"Δm of {column.label} leaves out {', '.join(sorted(left_out))}: the base is 0 or undefined there."
        )
    return replace(column, delta=Estimate.of(deltas, column.ratio), pairing=pairing)


def _find(columns: Sequence[RunSet], base: str | Path) -> RunSet:
    for column in columns:
        folders = [run.folder.resolve() for run in column.runs.values()]
        if column.label == str(base) or Path(base).resolve() in folders:
            return column
    labels = [column.label for column in columns]
    raise StateError(f"no run called {str(base)!r}.{choices('Here are', str(base), labels)}")


def _comparable(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Refuse runs with other tasks; return notes on what else makes numbers hard to compare."""
    runs = [run for group in groups for run in group]
    first, notes = runs[0], []
    kinds, *others = ({t: (of["kind"], of["primary"]) for t, of in run.info["tasks"].items()} for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        if other != kinds:
            raise StateError(
                f"not comparable, because the tasks differ: {first.folder} has {', '.join(kinds)}; "
                f"{run.folder} has {', '.join(other)}"
            )
    hashes = ((run.seed, (run.info.get("partition_hash"), run.info.get("data_hash")), run) for run in runs)
    for seed, names in sorted(_unlike(hashes)):
        notes.append(f"Not the same clients or examples at seed {seed}: {names}.")
    other_keys = {key for run in runs for key in differs("", first.recipe, run.recipe)} - QUIET
    if keys := sorted(key for key in other_keys if not key.startswith("method.")):
        notes.append(f"Beside the method, the runs differ in {', '.join(keys)}.")
    for _, names in _unlike((run.group.removesuffix(run.code), run.code, run) for run in runs):
        notes.append(f"The same recipe with different code, and so not one column: {names}.")
    seeds = {tuple(run.seed for run in group) for group in groups}
    if len(seeds) > 1:
        notes.append("The runs do not cover the same seeds.")
    notes += [f"Not finished: {run.folder.name}, round {run.last_round}." for run in runs if not run.is_finished]
    return notes


def _unlike(runs: Iterable[tuple[Any, Any, Run]]) -> Iterator[tuple[Any, str]]:
    """Yield each key with several values, of (key, value, run), and the first run of each value by its folder."""
    for key, several in grouped((key, (value, run.folder.name)) for key, value, run in runs).items():
        if len(by_value := grouped(several)) > 1:
            yield key, ", ".join(names[0] for names in by_value.values())


def _width(lines: Sequence[Sequence[str]]) -> int:
    """Return the number of letters across that a table takes."""
    return sum(_RULE + max(map(len, column)) for column in zip(*lines, strict=True))


def labels_of(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return method labels; equal ones get the recipe keys in which their runs differ.

    Keys of methods are always among these. Others are left out where a run has the value of most runs. Methods written
    in Python may differ although their names and recipes agree: then the label has the numbers in which their texts
    differ, and where there are none, the folder of a run.
    """
    firsts = [group[0] for group in groups]
    shown = []
    for run in firsts:
        alike = [other for other in firsts if other.label == run.label]
        keys = sorted({key for other in alike for key in differs("", run.recipe, other.recipe)} - QUIET)
        usual = {key: sum(value_at(o.recipe, key) == value_at(run.recipe, key) for o in firsts) for key in keys}
        shown.append([key for key in keys if key.startswith("method.") or 2 * usual[key] <= len(firsts)])
    short = shortened({key for keys in shown for key in keys})
    labels = []
    for run, keys in zip(firsts, shown, strict=True):
        said = {key: f"{short[key]}={value_at(run.recipe, key)}" for key in keys}
        if len(", ".join(said.values())) > _LONG:
            said = {key: text for key, text in said.items() if not key.startswith("data.")}
        detail = ", ".join(said.values())
        labels.append(f"{run.label} [{detail}]" if detail else run.label)
    texts = [re.findall(r"\w+=[^\s,;()]+", run.info.get("recipe_text", "")) for run in firsts]
    among = {label: [of for of, other in zip(texts, labels, strict=True) if other == label] for label in labels}
    own = [
        ", ".join(part for part in text if any(part not in other for other in among[label]))
        for text, label in zip(texts, labels, strict=True)
    ]
    labels = [f"{label} [{part}]" if part else label for label, part in zip(labels, own, strict=True)]
    return [
        f"{label} [{run.folder}]" if labels.count(label) > 1 else label
        for label, run in zip(labels, firsts, strict=True)
    ]


def shortened(keys: Collection[str]) -> dict[str, str]:
    """Return each key with the shortest end of its own: 'training.rounds' -> 'rounds'. A name keeps its section."""
    short = {}
    for key in keys:
        ends = accumulate(reversed(key.split(".")), lambda end, part: f"{part}.{end}")
        short[key] = next(
            end for end in ends if end != "name" and sum(f".{other}".endswith(f".{end}") for other in keys) == 1
        )
    return short
