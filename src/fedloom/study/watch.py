"""How far a run has come, from its files alone: running, finished or cut off. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fedloom.federation.runs.reader import Run, TaskMetric, best_round, described, mean_of, number_of, total
from fedloom.study.report import words

_RECENT = 10  # rounds that tell how long one takes
_EVENTS = 5  # the last ones that are shown


@dataclass(frozen=True)
class TaskNow:
    """One task after the last round in which it was measured."""

    name: str
    """As comparisons write it: 'task (metric) ↑'."""
    task: str
    about: str
    """Its metric as pages write it: 'RMSE in metres, lower is better'."""
    loss: float | None
    """Mean training loss over the clients that took part in the last round."""
    value: float | None
    """Mean primary metric over clients; nan where one of them has none."""
    best: float | None
    """The best value on validation data; None where there are none."""
    best_round: int | None
    split: str
    series: Mapping[int, float]
    """Round -> value, of all rounds in which it was measured."""


@dataclass(frozen=True)
class Now:
    """What there is to say about a run."""

    title: str
    status: str
    round: int
    rounds: int | None
    """How many rounds it will have, where the recipe says so."""
    clients: int
    cohort: int
    """How many clients took part in the last round."""
    tasks: tuple[TaskNow, ...]
    up: int
    down: int
    """Bytes from and to clients so far."""
    seconds: float | None
    """Seconds of a recent round."""
    left: float | None
    """Seconds that are left, about; None where that cannot be said."""
    quiet: float | None
    """Seconds since the last line was written; None of a run that is over."""
    events: tuple[str, ...]
    slow: tuple[str, float] | None
    """The client whose local training took longest in the last round, and its seconds."""


def now(folder: str | Path) -> Now:
    """Read a run's folder. Raises StateError where it is none."""
    run = Run.read(folder)
    done = [line for line in run.rounds if line["round"] > 0]
    asked = run.recipe.get("training", {}).get("rounds")
    times = [_seconds(line) for line in done[-_RECENT:]]
    each = median(times) if times else None
    open_ = not run.is_finished and asked is not None and each is not None
    total = run.bytes_total()
    return Now(
        f"{run.recipe['name']}: {run.label}, seed {run.seed}",
        str(run.info["status"]),
        run.last_round,
        None if asked is None else int(asked),
        len(run.info["clients"]),
        len(done[-1]["cohort"]) if done else 0,
        tuple(_task(run, name, about) for name, about in run.info["tasks"].items()),
        total["up"],
        total["down"],
        each,
        each * max(0, int(asked) - run.last_round) if open_ and each is not None and asked is not None else None,
        None if run.is_finished else age(run.folder),
        tuple(f"round {line['round']}: {_event(e)}" for line in done for e in line.get("events", ()))[-_EVENTS:],
        _slowest(done[-1].get("seconds_of") or {}) if done else None,
    )


def _slowest(seconds: Mapping[str, Any]) -> tuple[str, float] | None:
    found = {name: number_of(value) for name, value in seconds.items()}
    return max(found.items(), key=lambda item: item[1]) if len(found) > 1 else None


def _seconds(line: Mapping[str, Any]) -> float:
    """Seconds of a round: the sum of its phases, without sums over clients and without parts of other phases."""
    phases = (line.get("seconds") or {}).items()
    return total(number_of(s) for phase, s in phases if "sum over" not in phase and phase != "diagnostics")


def age(folder: Path) -> float:
    """Seconds since a run last wrote a line."""
    files = [folder / name for name in ("metrics.jsonl", "run.json")]
    return max(0.0, time.time() - max(file.stat().st_mtime for file in files if file.is_file()))


def _task(run: Run, name: str, about: Mapping[str, Any]) -> TaskNow:
    metric = about["primary"]
    direction = run.direction(name, metric)
    trained = [line["train"] for line in run.rounds if line.get("train")]
    losses = [e["loss"] for e in trained[-1] if e["task"] == name] if trained else []
    split = next((s for s in ("val", "test") if run.history(s)), "test")
    series = {
        final.round: final.values[name][metric] for final in run.history(split) if metric in final.values.get(name, {})
    }
    best = best_round(series, direction) if split == "val" else None  # test data choose nothing
    return TaskNow(
        str(TaskMetric(name, metric, direction)),
        name,
        words.axis(metric, direction),
        mean_of([number_of(loss) for loss in losses]) if losses else None,
        list(series.values())[-1] if series else None,
        None if best is None else series[best],
        best,
        split,
        series,
    )


def _event(event: Mapping[str, Any]) -> str:
    return f"{event['event']}{described({key: value for key, value in event.items() if key != 'event'})}"
