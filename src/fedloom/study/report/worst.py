"""Whom a method serves worst: in a grid, the worst task and the worst clients of each method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.federation.runs.reader import TaskMetric
from fedloom.study.grid import Grid, together
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import Combination, Side, change


@dataclass(frozen=True)
class Worst:
    """The worst of one method on one data set."""

    data: str
    method: str
    """The base with its add-on."""
    reference: str
    """The method that changes are against, '' where the grid has none; the method itself where it is the reference."""
    task: tuple[TaskMetric, Estimate] | None
    """The task (or domain) with the lowest change in percent, which is positive where all got better."""
    clients: Mapping[TaskMetric, tuple[Estimate, tuple[str, ...]]]
    """Task -> the worst client's number, and the clients that were the worst in a seed; for tasks with several clients.

    In a seed in which all clients have the same number, nobody is the worst.
    """


def worst(values: Mapping[str, float], direction: str) -> tuple[str, float] | None:
    """(name, value) of the worst value, the first of equal ones; nan does not count. None where all are nan."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if not known:
        return None
    return (min if direction == "max" else max)(known.items(), key=lambda item: item[1])


def worst_of(
    grid: Grid, sides: Mapping[Combination, Side], rows: Mapping[str, tuple[TaskMetric, ...]]
) -> tuple[Worst, ...]:
    """The worst task and clients of each method that has finished runs, data set by data set.

    Changes compare a seed with the same seed of the reference, as Delta does.
    """
    by_domain = grid.show == "domains"
    found = []
    for data in grid.data:
        for (where, base, _), side in sides.items():
            if where == data:
                named = grid.reference(base)
                label = "" if named is None else together(*named)
                other = None if named is None or label == side.label else sides.get((data, *named))
                lost = None if other is None else _task(side, other, rows[data])
                clients = {row: of for row in rows[data] if (of := _client(side, row, by_domain)) is not None}
                found.append(Worst(data, side.label, label, lost, clients))
    return tuple(found)


def _task(side: Side, other: Side, rows: tuple[TaskMetric, ...]) -> tuple[TaskMetric, Estimate] | None:
    changes = [(row, change(side.values, other.values, {row.task: row.direction})) for row in rows]
    known = [(row, of) for row, of in changes if of is not None and not math.isnan(of.mean)]
    return min(known, key=lambda item: item[1].mean, default=None)


def _client(side: Side, row: TaskMetric, by_domain: bool) -> tuple[Estimate, tuple[str, ...]] | None:
    """The mean over seeds of the worst client's number in each."""
    each = []
    for seed, finals in side.clients.items():
        values = {}
        for name, final in finals.items():
            if by_domain and str(side.runs[seed].info["clients"][name].get("domain")) != row.task:
                continue
            # a grid of domains has one task
            task = next(iter(final.values), "") if by_domain else row.task
            number = final.values.get(task, {}).get(row.metric)
            if number is not None:
                values[name] = number
        found = worst(values, row.direction)
        if len(values) > 1 and found is not None:
            name, value = found
            each.append((value, [name] if len(set(values.values())) > 1 else []))
    if not each:
        return None
    return Estimate.of([value for value, _ in each]), tuple(dict.fromkeys(name for _, names in each for name in names))
