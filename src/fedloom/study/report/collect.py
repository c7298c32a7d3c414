"""What a report shows, read from the files of a run or a grid. Plain values; an absent part is empty or None."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedloom.core.outline import Outline
from fedloom.errors import StateError, UserError
from fedloom.runs.reader import Run, TaskMetric, described, number_of
from fedloom.study.grid import FILE, Grid, cells, together
from fedloom.study.papers import hyper_weights
from fedloom.study.papers.neighbours import quality
from fedloom.study.report import agreement, predictions
from fedloom.study.report.against import Against, against
from fedloom.study.report.agreement import UpdateAgreement
from fedloom.study.report.predictions import Predictions
from fedloom.study.report.worst import Worst, worst, worst_of
from fedloom.study.tables.table import Table, tabulate

EVERYBODY = "all clients"
"""Whose number it is where the files name no client."""

Series = Mapping[int, float]
"""Round -> value."""
Facts = tuple[tuple[str, str], ...]
"""What a number or a name is, and the number or the name."""


@dataclass(frozen=True)
class Curves:
    """One metric of one task over the rounds, a series a client; nan where nothing could be measured."""

    task: str
    metric: str
    direction: str
    split: str
    model: str
    """'personal', 'global' or both: the models that count; 'trained' straight after local training."""
    clients: Mapping[str, Series]
    best: int | None = None
    """The round with the best mean over clients."""
    judged: str = ""
    """The split that the best round was chosen on."""

    @property
    def mean(self) -> dict[int, float]:
        """Round -> mean over the clients that were measured; nan where one of them is."""
        each: dict[int, list[float]] = defaultdict(list)
        for series in self.clients.values():
            for round, value in series.items():
                each[round].append(value)
        return {round: math.fsum(each[round]) / len(each[round]) for round in sorted(each)}


@dataclass(frozen=True)
class Score:
    """One line of the final table: the kept model's metric."""

    task: str
    metric: str
    direction: str
    split: str
    round: int
    model: str
    data: str
    mean: float
    clients: int
    worst: tuple[str, float] | None
    """The client with the worst value, and the value; None for one client alone, and where all have the same."""
    primary: bool
    """Whether it is the metric that judges its task."""


@dataclass(frozen=True)
class Matrices:
    """A matrix a round; what it has no entry for is not known. Sparse, for there may be many clients."""

    name: str
    title: str
    rows: str
    """What a row is."""
    columns: str
    names: tuple[str, ...]
    rounds: Mapping[int, Mapping[str, Mapping[str, float | None]]]
    """Round -> row -> column -> number."""
    marked: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Round -> (row, column) of the pairs that were chosen."""
    legend: str = ""
    """What a mark means."""
    graph: bool = False
    """Whether rows are peers that choose whose model they take."""


@dataclass(frozen=True)
class Happening:
    """Equal events of a run, counted."""

    what: str
    who: str
    times: int
    first: int
    last: int


@dataclass(frozen=True)
class RunReport:
    """All that the page of a run shows."""

    folder: Path
    title: str
    facts: Facts
    method: str
    outline: Outline | None
    recipe: str
    clients: Mapping[str, Mapping[str, Any]]
    """Client -> tasks (with weights) and, where stated, domain, train and val (examples), labels (class counts)."""
    tasks: Mapping[str, Mapping[str, Any]]
    curves: tuple[Curves, ...]
    scores: tuple[Score, ...]
    traffic: Mapping[tuple[str, str], Mapping[str, Series]]
    """('up' or 'down', 'role', 'task' or 'client') -> name -> bytes of each round."""
    totals: tuple[tuple[str, str, int, int], ...]
    """(role, task, bytes from clients, bytes to clients) over all rounds."""
    seconds: Mapping[str, Series]
    """Phase -> seconds of each round."""
    weights: hyper_weights.HyperWeights | None
    matrices: tuple[Matrices, ...]
    happened: tuple[Happening, ...]
    clock: Mapping[str, Series] = field(default_factory=dict)
    """What a scenario simulates -> seconds of each round; empty where time was not simulated."""
    agreement: UpdateAgreement | None = None
    quality: Mapping[str, Series] = field(default_factory=dict)
    """How well peers found those with their own tasks -> share or index of each round."""
    peers: bool = False
    """Whether peers mix the updates, not a server."""
    against: Against | None = None
    """The run held against a base, where one was named."""
    predictions: Predictions = Predictions()
    trained: Mapping[str, Series] = field(default_factory=dict)
    """Client -> seconds of its local training in each round."""


@dataclass(frozen=True)
class CellFacts:
    """How far one run of a grid has come, and what it cost."""

    name: str
    status: str
    rounds: int
    up: int
    down: int
    seconds: float


@dataclass(frozen=True)
class GridReport:
    """All that the page of a grid shows. `table` is None, and `problem` says why, where nothing can be tabulated."""

    folder: Path
    title: str
    facts: Facts
    grid: str
    table: Table | None
    problem: str
    cells: tuple[CellFacts, ...]
    curves: Mapping[tuple[str, TaskMetric], Mapping[str, Series]]
    """(data, task and metric) -> base with add-on -> mean over clients and seeds, in rounds that all its seeds have."""
    worst: tuple[Worst, ...] = ()
    predictions: Predictions = Predictions()


def of_run(run: Run, base: Run | None = None) -> RunReport:
    """What one run's files hold, and how it compares with a base.

    Raises StateError for a base that it cannot be compared with.
    """
    compared = None if base is None else against(run, base)
    labels = _labels(run.folder)
    clients = {
        name: {**about, **({"labels": labels[name]} if name in labels else {})}
        for name, about in run.info["clients"].items()
    }
    kinds = {record["kind"] for line in run.rounds for record in line.get("records", ())}
    return RunReport(
        run.folder,
        f"{run.recipe['name']}: {run.label}",
        _facts(run),
        str(run.info.get("recipe_text", "")),
        _outline(run),
        (run.folder / "recipe.yaml").read_text("utf-8"),
        clients,
        run.info["tasks"],
        _curves(run),
        _scores(run),
        _traffic(run),
        _totals(run),
        _timed(run),
        hyper_weights.table(run) if hyper_weights.KIND in kinds else None,
        _matrices(run),
        _happened(run),
        _clock(run),
        agreement.collect(run),
        _quality(run),
        run.recipe.get("peers") is not None,
        compared,
        predictions=predictions.of_run(run),
        trained=_timed(run, "seconds_of"),
    )


def of_grid(grid: Grid, folder: Path) -> GridReport:
    """What a grid's files and those of its runs hold, finished or not."""
    runs = {cell: Run.read(cell.folder(folder)) for cell in cells(grid) if (cell.folder(folder) / "run.json").is_file()}
    table, problem = None, ""
    lowest: tuple[Worst, ...] = ()
    try:
        table = tabulate(grid, folder)
        lowest = worst_of(grid, folder)
    except StateError as error:
        problem = str(error)
    about = tuple(
        CellFacts(
            str(cell),
            _status(run),
            run.last_round,
            run.bytes_total()["up"],
            run.bytes_total()["down"],
            math.fsum(s for series in _timed(run).values() for s in series.values()),
        )
        for cell, run in runs.items()
    )
    each: dict[tuple[str, TaskMetric], dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
    for cell, run in runs.items():
        label = together(cell.base, cell.addon)
        found: dict[tuple[str, TaskMetric], dict[int, float]] = defaultdict(dict)
        for final in run.history():
            for task, metrics in final.values.items():
                judged = run.info["tasks"][task]
                row = TaskMetric(task, judged["primary"], judged["metrics"][judged["primary"]])
                if row.metric in metrics:
                    found[cell.data, row][final.round] = metrics[row.metric]
        for key, series in found.items():
            each[key][label].append(series)
    total = sum(1 for _ in cells(grid))
    facts = (
        ("name", grid.name),
        ("runs", f"{len(runs)} of {total} begun, {sum(run.is_finished for run in runs.values())} finished"),
        ("data sets", ", ".join(grid.data)),
        ("bases", ", ".join(grid.bases)),
        ("add-ons", ", ".join(grid.addons)),
        ("seeds", ", ".join(map(str, grid.seeds))),
    )
    curves = {key: {label: _shared(several) for label, several in lines.items()} for key, lines in each.items()}
    text = (folder / FILE).read_text("utf-8")
    shown = predictions.of_grid(runs)
    return GridReport(folder, grid.title or grid.name, facts, text, table, problem, about, curves, lowest, shown)


def _shared(several: Sequence[Series]) -> Series:
    """The mean of several series in the rounds that all have."""
    rounds = sorted(set.intersection(*(set(series) for series in several)))
    return {round: fmean(series[round] for series in several) for round in rounds}


def _status(run: Run) -> str:
    if run.is_finished:
        return str(run.info["status"])
    asked = run.recipe.get("training", {}).get("rounds")
    return f"not finished: round {run.last_round}" + (f" of {asked}" if asked else "")


def _outline(run: Run) -> Outline | None:
    """The method in words; None where run.json has none, as in runs of version 0.1, or something else."""
    try:
        return TypeAdapter(Outline).validate_python(run.info.get("outline"))
    except (ValidationError, RecursionError):
        return None


def _facts(run: Run) -> Facts:
    info = run.info
    domains = sorted({str(c["domain"]) for c in info["clients"].values() if c.get("domain") is not None})
    sent = run.bits_per_task()
    facts = {
        "status": _status(run),
        "rounds": run.last_round,
        "kept model": f"of round {info['final_round']}" if run.is_finished and "final_round" in info else None,
        "seed": run.seed,
        "method": run.label,
        "data": run.recipe["data"]["name"],
        "clients": len(info["clients"]),
        "tasks": ", ".join(info["tasks"]),
        "domains": ", ".join(domains) or None,
        "parameters": f"{info['parameters']:,}" if "parameters" in info else None,
        "sent by a client, a round and task": f"{sent / 1e6:.4g} Mbit" if sent > 0 else None,
        "fedloom": info.get("fedloom"),
        "hash of the recipe": info.get("recipe_hash"),
        "hash of the partition": info.get("partition_hash"),
        "hash of the data": info.get("data_hash"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def _labels(folder: Path) -> Mapping[str, Any]:
    """Client -> task -> examples per class, where partition.json says so and there are classes to tell apart."""
    try:
        stated = dict(json.loads((folder / "partition.json").read_text("utf-8")).get("labels", {}))
    except (OSError, ValueError, TypeError):
        return {}
    several = {
        client: {task: counts for task, counts in by_task.items() if isinstance(counts, list) and len(counts) > 1}
        for client, by_task in stated.items()
    }
    return {client: by_task for client, by_task in several.items() if by_task}


def _curves(run: Run) -> tuple[Curves, ...]:
    """Task by task: the primary metric on test data first, then its other splits, other metrics, training losses."""
    measured: dict[tuple[str, str, str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in run.rounds:
        for e in line["metrics"]:
            client = e["client"] or EVERYBODY
            if e["client"] is None or e["task"] in run.info["clients"][client]["tasks"]:
                series = measured[e["task"], e["metric"], e["split"], e["model"]][client]
                series[int(line["round"])] = number_of(e["value"])
        for e in line.get("train", ()):
            series = measured[e["task"], "training loss", "train", "trained"][e["client"]]
            series[int(line["round"])] = number_of(e["loss"])
    for task, metric, split, model in list(measured):
        # a client's personal model counts, else the global one, as in the final numbers
        if model == "personal" and (both := measured.get((task, metric, split, "global"))):
            personal = measured.pop((task, metric, split, "personal"))
            names = both.keys() | personal.keys()
            used = "personal" if personal.keys() >= both.keys() else "personal and global"
            measured[task, metric, split, used] = {
                name: {**both.get(name, {}), **personal.get(name, {})} for name in sorted(names)
            }
    tasks = list(run.info["tasks"])
    splits = ["test", "val", "train"]

    def order(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
        task, metric, split, model = key
        rank = 0 if metric == run.info["tasks"][task]["primary"] else 1 if metric != "training loss" else 2
        return (
            tasks.index(task),
            rank,
            metric,
            splits.index(split) if split in splits else len(splits),
            ["personal", "personal and global", "global", "trained"].index(model),
        )

    return tuple(_judged(run, key, measured) for key in sorted((k for k in measured if k[0] in tasks), key=order))


def _judged(
    run: Run, key: tuple[str, str, str, str], measured: Mapping[tuple[str, str, str, str], Mapping[str, Series]]
) -> Curves:
    """The curves with their best round: by validation data where that was measured, else by the split itself."""
    task, metric, split, model = key
    direction = run.info["tasks"][task]["metrics"].get(metric, "min")
    made = Curves(task, metric, direction, split, model, measured[key])
    on = "val" if (task, metric, "val", model) in measured else split
    judge = Curves(task, metric, direction, on, model, measured[task, metric, on, model])
    sign = 1 if direction == "max" else -1
    known = {round: sign * v for round, v in judge.mean.items() if not math.isnan(v) and round in made.mean}
    best = max(known, key=lambda round: (known[round], -round)) if len(known) > 1 else None
    return Curves(task, metric, direction, split, model, measured[key], best, on)


def _scores(run: Run) -> tuple[Score, ...]:
    """The metrics that judge the tasks first, on test data before validation data; then the others."""
    scores = []
    for split in ("test", "val"):
        try:
            final = run.final(split)
        except StateError:
            continue
        at = next(line for line in run.rounds if line["round"] == final.round)
        each = _counted(run, at, split)
        for task, metrics in final.values.items():
            for metric, mean in metrics.items():
                direction = run.info["tasks"][task]["metrics"].get(metric, "min")
                mine = {c: value for (c, t, m), value in each.items() if (t, m) == (task, metric)}
                score = Score(
                    *(task, metric, direction, split, final.round, final.model, ", ".join(final.data), mean),
                    len(mine),
                    # one model on shared data serves no client worse than another
                    worst(mine, direction) if len(set(mine.values())) > 1 else None,
                    metric == run.info["tasks"][task]["primary"],
                )
                scores.append(score)
    return tuple(sorted(scores, key=lambda score: not score.primary))


def _counted(run: Run, line: Mapping[str, Any], split: str) -> dict[tuple[str, str, str], float]:
    """(client, task, metric) -> one round's value, of a client's personal model before the global one."""
    found: dict[tuple[str, str, str], float] = {}
    for model in ("global", "personal"):
        for e in line["metrics"]:
            client = e["client"] or EVERYBODY
            held = e["client"] is None or e["task"] in run.info["clients"][client]["tasks"]
            if e["split"] == split and e["model"] == model and held:
                found[client, e["task"], e["metric"]] = number_of(e["value"])
    return found


def _traffic(run: Run) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    of: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "role": lambda e: str(e["role"]),
        "task": lambda e: "no task" if e["task"] is None else str(e["task"]),
        "client": lambda e: str(e["client"]),
    }
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {(way, by): {} for way in ("up", "down") for by in of}
    for line in run.traffic:
        for way in ("up", "down"):
            for entry in line[way]:
                for by, name in of.items():
                    series = found[way, by].setdefault(name(entry), {})
                    round = int(line["round"])
                    series[round] = series.get(round, 0) + int(entry["bytes"])
    return {key: names for key, names in found.items() if names}


def _totals(run: Run) -> tuple[tuple[str, str, int, int], ...]:
    total: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"up": 0, "down": 0})
    for line in run.traffic:
        for way in ("up", "down"):
            for entry in line[way]:
                total[str(entry["role"]), str(entry["task"] or "")][way] += int(entry["bytes"])
    return tuple((role, task, counts["up"], counts["down"]) for (role, task), counts in sorted(total.items()))


def _timed(run: Run, key: str = "seconds") -> dict[str, dict[int, float]]:
    """Phase, or client where the key is seconds_of -> seconds of each round."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in run.rounds:
        for name, seconds in (line.get(key) or {}).items():
            found[name][int(line["round"])] = number_of(seconds)
    return dict(found)


def _clock(run: Run) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for round, record in _records(run, "clock"):
        found["a round"][round] = float(record["end"]) - float(record["start"])
        found["since the start"][round] = float(record["end"])
    for round, record in _records(run, "staleness"):
        found["age of mixed models, mean"][round] = float(record["seconds"]["mean"])
    return dict(found)


def _quality(run: Run) -> dict[str, dict[int, float]]:
    with suppress(UserError):  # without scikit-learn the page has all but this
        return quality(run)
    return {}


def _records(run: Run, kind: str) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """(round, record) of a kind."""
    for line in run.rounds:
        for record in line.get("records", ()):
            if record["kind"] == kind:
                yield int(line["round"]), record


def _matrices(run: Run) -> tuple[Matrices, ...]:
    """Similarity of tasks; who takes how much from whom, and how alike peers found each other."""
    made = []
    similar = dict(_records(run, "task-vectors"))
    if similar:
        tasks = tuple(t for t in run.info["tasks"] if any(t in record["tasks"] for record in similar.values()))
        rounds, chosen = {}, {}
        for round, record in similar.items():
            rounds[round] = {
                a: dict(zip(record["tasks"], row, strict=True))
                for a, row in zip(record["tasks"], record["similarity"], strict=True)
            }
            partners = zip(record["tasks"], record.get("partners", ()), strict=False)
            chosen[round] = [(a, b) for a, several in partners for b in several]
        legend = "A dot: the column's task is a partner of the row's."
        title = "Similarity of task vectors"
        made.append(Matrices("task-similarity", title, "task", "task", tasks, rounds, chosen, legend))
    weights: dict[int, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for round, record in _records(run, "mixing"):
        weights[round].update(record["weights"])
    by_peer: dict[str, dict[int, dict[str, Mapping[str, float]]]] = {"peer": {}, "similarity": {}, "conflict": {}}
    for key, kind, part in (
        ("peer", "peer", "weights"),
        ("similarity", "peer", "similarity"),
        ("conflict", "conflict-averse", "weights"),
    ):
        for round, record in _records(run, kind):
            by_peer[key].setdefault(round, {})[record["peer"]] = record.get(part) or {}
    for name, title, found in (
        ("mixing", "Mixing weights", weights),
        ("neighbours", "Neighbours and their weights", by_peer["peer"]),
        ("conflict-weights", "Conflict-averse weights", by_peer["conflict"]),
        ("peer-similarity", "Similarity as peers found it", by_peer["similarity"]),
    ):
        if any(row for rows in found.values() for row in rows.values()):
            made.append(
                Matrices(
                    name, title, "receiver", "sender", tuple(run.info["clients"]), found, graph=name == "neighbours"
                )
            )
    return tuple(made)


def _happened(run: Run) -> tuple[Happening, ...]:
    """Events, and safeguards that acted, by what they say and whom they are about; in the order of their beginning."""
    rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in run.rounds:
        at = int(line["round"])
        for event in line.get("events", ()):
            about = described({k: event.get(k) for k in ("why", "what", "kind", "task")})
            who = event.get("client", event.get("peer", event.get("cluster", "")))
            sender = f" from {event['sender']}" if "sender" in event else ""
            rounds[f"{event['event']}{about}", f"{who}{sender}"].append(at)
    for at, record in _records(run, "conflict-averse"):
        for safeguard in record.get("acted") or ():
            rounds[f"safeguard: {safeguard}", str(record["peer"])].append(at)
    found = [Happening(what, who, len(at), min(at), max(at)) for (what, who), at in rounds.items()]
    return tuple(sorted(found, key=lambda h: (h.first, h.what, h.who)))


def worst_tasks(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Of each split and metric that judges several tasks, the score of the worst of them."""
    groups: dict[tuple[str, str, str], list[Score]] = defaultdict(list)
    for score in scores:
        if score.primary and not math.isnan(score.mean):
            groups[score.split, score.metric, score.direction].append(score)
    pick = {"max": min, "min": max}
    return tuple(
        pick[direction](group, key=lambda s: s.mean) for (_, _, direction), group in groups.items() if len(group) > 1
    )


def row(score: Score | Curves) -> str:
    """'task (metric) ↑', as comparisons write it."""
    return str(TaskMetric(score.task, score.metric, score.direction))
