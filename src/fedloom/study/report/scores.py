"""The metrics of a run for its report: curves over the rounds, and the numbers of the model that is kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run, best_round, mean_of, number_of
from fedloom.study.report.methods import worst
from fedloom.study.report.records import Series

EVERYBODY = "all clients"
"""The name of the client where the files state none."""


@dataclass(frozen=True)
class Curves:
    """One metric of one task over the rounds, one series per client; nan where nothing could be measured."""

    task: str
    metric: str
    direction: str
    split: str
    model: str
    """'personal', 'global' or both: the models that count; 'trained' straight after local training."""
    clients: Mapping[str, Series]
    best: int | None = None
    """The round with the best mean over clients on validation data; None without these: test data choose nothing."""
    is_primary: bool = False
    """Whether the task is judged by this metric."""

    @cached_property
    def mean(self) -> dict[int, float]:
        """Return round -> mean over the clients that were measured; nan where one of them is."""
        each: dict[int, list[float]] = defaultdict(list)
        for series in self.clients.values():
            for round, value in series.items():
                each[round].append(value)
        return {round: mean_of(each[round]) for round in sorted(each)}


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
    """Whether the task is judged by this metric."""
    best: tuple[str, float] | None
    """As `worst`, the client with the best value."""


def curves(run: Run) -> tuple[Curves, ...]:
    """Return the curves task by task: the primary metric on test data, its other splits, other metrics, losses."""
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
    tasks, splits = list(run.info["tasks"]), ["test", "val", "train"]
    models = ["personal", "personal and global", "global", "trained"]
    primary = {task: info["primary"] for task, info in run.info["tasks"].items()}

    def order(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
        task, metric, split, model = key
        rank = 0 if metric == primary[task] else 1 if metric != "training loss" else 2
        at = splits.index(split) if split in splits else len(splits)
        return tasks.index(task), rank, metric, at, models.index(model)

    found = []
    for key in sorted((k for k in measured if k[0] in tasks), key=order):
        task, metric, split, model = key
        made = Curves(*(task, metric, run.direction(task, metric), split, model), measured[key])
        judge = replace(made, clients=measured.get((task, metric, "val", model), {})).mean
        known = {round: mean for round, mean in judge.items() if not math.isnan(mean) and round in made.mean}
        best = best_round(known, made.direction) if len(known) > 1 else None
        found.append(replace(made, best=best, is_primary=metric == primary[task]))
    return tuple(found)


def scores(run: Run) -> tuple[Score, ...]:
    """Return the primary metrics first, on test data before validation data; then the others."""
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
                direction = run.direction(task, metric)
                mine = {c: value for (c, t, m), value in each.items() if (t, m) == (task, metric)}
                several = len(set(mine.values())) > 1  # one model on shared data serves no client worse than another
                ends = [
                    worst(mine, of) if several else None for of in (direction, {"max": "min", "min": "max"}[direction])
                ]
                score = Score(
                    *(task, metric, direction, split, final.round, final.model, ", ".join(final.data), mean),
                    len(mine),
                    ends[0],
                    metric == run.info["tasks"][task]["primary"],
                    ends[1],
                )
                scores.append(score)
    return tuple(sorted(scores, key=lambda score: not score.primary))


def _counted(run: Run, line: Mapping[str, Any], split: str) -> dict[tuple[str, str, str], float]:
    """Return (client, task, metric) -> one round's value, of a client's personal model before the global one."""
    found: dict[tuple[str, str, str], float] = {}
    for model in ("global", "personal"):
        for e in line["metrics"]:
            client = e["client"] or EVERYBODY
            has_task = e["client"] is None or e["task"] in run.info["clients"][client]["tasks"]
            if e["split"] == split and e["model"] == model and has_task:
                found[client, e["task"], e["metric"]] = number_of(e["value"])
    return found


def worst_tasks(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return the score of the worst task for each split and metric that judges several tasks."""
    groups: dict[tuple[str, str, str], list[Score]] = defaultdict(list)
    for score in scores:
        if score.primary and not math.isnan(score.mean):
            groups[score.split, score.metric, score.direction].append(score)
    pick = {"max": min, "min": max}
    return tuple(
        pick[direction](group, key=lambda s: s.mean) for (_, _, direction), group in groups.items() if len(group) > 1
    )
