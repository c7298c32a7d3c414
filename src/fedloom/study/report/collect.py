"""The contents of a report, read from the files of a run or a grid. Plain values; an absent part is empty or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedloom.core.errors import StateError
from fedloom.core.grouping import grouped
from fedloom.core.outline import Outline
from fedloom.federation.runs.reader import Run, TaskMetric, human_bytes, mean_of
from fedloom.federation.runs.recorded import json_of
from fedloom.study.grid import FILE, SMALLEST, Grid, cells, refused_in, together
from fedloom.study.report import predictions, records, words
from fedloom.study.report.against import Against, Method, bases_of, methods_of
from fedloom.study.report.predictions import Predictions
from fedloom.study.report.records import Curves, Score, Series, UpdateAgreement, curves, scores
from fedloom.study.results import of_grid as results_of
from fedloom.study.significance import Ranks, ranked
from fedloom.study.table import GridTable, tabulate

Facts = tuple[tuple[str, str], ...]
"""Pairs of a label and a text."""


@dataclass(frozen=True)
class RunReport:
    """The contents of the page of a run."""

    run: Run
    folder: Path
    title: str
    facts: Facts
    outline: Outline | None
    clients: Mapping[str, Mapping[str, Any]]
    """Client -> tasks (with weights) and, where stated, domain, train and val (examples), labels (class counts)."""
    curves: tuple[Curves, ...]
    scores: tuple[Score, ...]
    agreement: UpdateAgreement | None
    predictions: Predictions
    against: Against | None
    """The run compared with its baseline, where one was named or detected."""
    others: tuple[Against, ...]
    """The run compared with other runs."""
    base_found: bool
    """True if the baseline was not named, but detected beside the run."""

    @property
    def minimum(self) -> int:
        """The least count of a table's rows that is shown; 0 for other data."""
        return records.minimum_of(self.run)

    @property
    def constant_lines(self) -> dict[str, Series]:
        """Return task -> the constant prediction's score in each round that measured the task."""
        rounds = {c.task: c.mean for c in self.curves if c.is_primary}
        return {task: dict.fromkeys(rounds[task], v) for task, v in self.run.constant.items() if task in rounds}


@dataclass(frozen=True)
class GridReport:
    """The contents of the page of a grid. Without a table, `table` is None and `problem` says why."""

    folder: Path
    title: str
    facts: Facts
    grid: str
    table: GridTable | None
    problem: str
    cells: tuple[tuple[str, ...], ...]
    """The progress and the costs of each run: name, status, rounds, bytes from and to clients, seconds."""
    curves: Mapping[tuple[str, TaskMetric], Mapping[str, Series]]
    """(data, task and metric) -> base with add-on -> mean over clients and seeds, in rounds that all its seeds have."""
    worst: tuple[Method, ...] = ()
    """The methods as the grid compares them."""
    predictions: Predictions = Predictions()
    methods: Mapping[str, tuple[Method, ...]] = field(default_factory=dict)
    """Baseline -> the methods compared with it, the grid's own baseline first."""
    ranks: Ranks | None = None
    smallest: float = SMALLEST
    """The smallest change in percent that counts."""

    @property
    def data(self) -> list[str]:
        """Return the data sets whose tasks were measured."""
        return list(dict.fromkeys(data for data, _ in self.curves))

    @property
    def palette(self) -> list[str]:
        """Return the methods in the order of their colours, which are the same in all figures of the page."""
        several = [m.label for methods in self.methods.values() for m in methods]
        return list(dict.fromkeys([*several, *(name for lines in self.curves.values() for name in lines)]))


def of_run(run: Run, base: Run | None = None) -> RunReport:
    """Read a run, its baseline (by default detected beside it) and others beside it. Raises StateError."""
    compared, others = bases_of(run, base)
    labels = _labels(run.folder)
    clients = {
        name: {**about, **({"labels": labels[name]} if name in labels else {})}
        for name, about in run.info["clients"].items()
    }
    about = run, run.folder, f"{run.recipe['name']}: {run.label}", _facts(run), _outline(run), clients
    shown = curves(run), scores(run), records.agreement_of(run), predictions.of_run(run)
    return RunReport(*about, *shown, compared, others, base is None and compared is not None)


def of_grid(grid: Grid, folder: Path) -> GridReport:
    """Read the files of a grid and of its runs, finished or not."""
    runs = {cell: Run.read(cell.folder(folder)) for cell in cells(grid) if (cell.folder(folder) / "run.json").is_file()}
    table, problem = None, ""
    own: tuple[Method, ...] = ()
    methods: dict[str, tuple[Method, ...]] = {}
    ranks: Ranks | None = None
    try:
        results = results_of(grid, folder, known={cell: run for cell, run in runs.items() if run.is_finished})
        table = tabulate(grid, folder, results=results)
        own, methods = methods_of(grid, results)
        with suppress(StateError):  # one method
            ranks = ranked(results)
    except StateError as error:
        problem = str(error)
    about = tuple(
        (str(cell), _status(run), str(run.last_round), *sent, f"{run.seconds_total():.1f}")
        for cell, run in runs.items()
        for sent in [map(human_bytes, run.bytes_total().values())]
    )
    each = grouped(
        ((cell.data, row), (together(cell.base, cell.addon), series))
        for cell, run in runs.items()
        for row, series in zip(run.judged, run.curves().values(), strict=True)
        if series
    )
    refused = refused_in(folder)
    wanted = sum(cell.combination not in refused for cell in cells(grid))
    gone = f", {words.count(len(refused), 'combination')} refused" if refused else ""
    facts = (
        ("name", grid.name),
        ("runs", f"{len(runs)} of {wanted} begun, {sum(run.is_finished for run in runs.values())} finished{gone}"),
        ("data sets", ", ".join(grid.data)),
        ("bases", ", ".join(grid.bases)),
        ("add-ons", ", ".join(grid.addons)),
        ("seeds", ", ".join(map(str, grid.seeds))),
    )
    lines = {key: {label: _shared(of) for label, of in grouped(pairs).items()} for key, pairs in each.items()}
    text = (folder / FILE).read_text("utf-8")
    shown = predictions.of_grid(runs)
    head = folder, grid.title or grid.name, facts, text, table, problem, about
    return GridReport(*head, lines, own, shown, methods, ranks, grid.smallest)


def _shared(several: Sequence[Series]) -> Series:
    """Return the mean of several series in the rounds that all have."""
    rounds = sorted(set.intersection(*(set(series) for series in several)))
    return {round: mean_of([series[round] for series in several]) for round in rounds}


def _status(run: Run) -> str:
    if run.is_finished:
        return str(run.info["status"])
    asked = run.recipe.get("training", {}).get("rounds")
    return f"not finished: round {run.last_round}" + (f" of {asked}" if asked else "")


def _outline(run: Run) -> Outline | None:
    """Return the method in words; None where run.json has none, as in older runs, or something else."""
    try:
        return TypeAdapter(Outline).validate_python(run.info.get("outline"))
    except (ValidationError, RecursionError):
        return None


def _segments(info: Mapping[str, Any]) -> str | None:
    """Say which keys changed after which round; None where none did."""
    changes = [
        f"after round {change['after_round']}: "
        + ", ".join(f"{key} was {was}, is {now}" for key, (was, now) in change["keys"].items())
        for change in info.get("changes", ())
    ]
    return "; ".join(changes) or None


def _facts(run: Run) -> Facts:
    info = run.info
    domains = sorted({str(c["domain"]) for c in info["clients"].values() if c.get("domain") is not None})
    sent = run.bits_per_task()
    facts = {
        "status": _status(run),
        "rounds": run.last_round,
        "kept model": f"of round {info['final_round']}" if run.is_finished and "final_round" in info else None,
        "segments": _segments(info),
        "seed": run.seed,
        "method": run.label,
        "data": run.recipe["data"]["name"],
        "clients": len(info["clients"]),
        "tasks": ", ".join(info["tasks"]),
        "domains": ", ".join(domains) or None,
        "parameters": f"{info['parameters']:,}" if "parameters" in info else None,
        "sent per client, round and task": f"{sent / 1e6:.4g} Mbit" if sent > 0 else None,
        "fedloom": info.get("fedloom"),
        "hash of the recipe": info.get("recipe_hash"),
        "hash of the partition": info.get("partition_hash"),
        "hash of the data": info.get("data_hash"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def _labels(folder: Path) -> Mapping[str, Mapping[str, list[int]]]:
    """Return client -> task -> examples per class, or [their number] without classes, where partition.json says so."""
    try:
        stated = dict(json_of(folder / "partition.json").get("labels", {}))
    except (StateError, OSError, ValueError, TypeError, AttributeError):
        return {}
    return {
        client: {
            task: counts
            for task, of in by_task.items()
            for counts in [of if isinstance(of, list) else [of]]
            if all(type(count) is int for count in counts)
        }
        for client, by_task in stated.items()
        if isinstance(by_task, dict)
    }
