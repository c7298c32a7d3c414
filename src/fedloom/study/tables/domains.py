"""Accuracy per domain of a run, its average and its spread over domains (F2DC, tables 1 and 2). Free of torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from fedloom.core.errors import StateError, nearest
from fedloom.federation.runs.reader import Run, best_round
from fedloom.study.tables.output import HasTable, Records, Table


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
        return stdev(values) if len(values) > 1 and not any(map(math.isnan, values)) else math.nan


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
    rounds = _scores(run, task, metric, split)
    if not rounds:
        raise StateError(f"{run.folder}: no {split} {metric} was measured")
    validated = {r: s.average for r, s in _scores(run, task, metric, "val").items() if r in rounds}
    best = best_round(validated, tasks[task]["metrics"][metric])
    return DomainHistory(run.label, task, metric, tuple(rounds.values()), None if best is None else rounds[best])


def _scores(run: Run, task: str, metric: str, split: str) -> dict[int, DomainScores]:
    """Return round -> the scores on a split, in order."""
    domains = {client: about.get("domain") for client, about in run.info["clients"].items()}
    for client, domain in domains.items():
        if domain is None:
            raise StateError(f"{run.folder}: client {client!r} has no domain")
    each: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, by_client in run.scores(task, metric, split).items():
        for client, value in by_client.items():
            each[number][domains[client]].append(value)
    order = _order(run)
    return {
        number: DomainScores(number, {d: fmean(each[number][d]) for d in sorted(each[number], key=order.index)})
        for number in sorted(each)
    }


def _order(run: Run) -> list[str]:
    """Return all domains: as the partition names them, then those it does not name."""
    stated = run.recipe.get("partition", {}).get("clients", {})
    named = list(stated) if isinstance(stated, Mapping) else []
    return [*named, *sorted({about["domain"] for about in run.info["clients"].values()} - {*named})]
