"""The methods of a grid side by side: changes against a reference, worst tasks and clients, costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean

from fedloom.federation.runs.reader import Run, TaskMetric, mean_of, total
from fedloom.study.grid import Grid, together
from fedloom.study.report.records import timed, worst
from fedloom.study.significance.statistics import NOISE, Verdict, against_zero, holm, judge
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import Combination, Results, Side, change, deltas

BASES = 12
"""Methods that a page offers as a baseline of the others, at most."""

Clients = Mapping[TaskMetric, tuple[Estimate, tuple[str, ...]]]
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
    delta: Estimate | None
    """Delta_m in percent over seeds, without tasks on which no method is better than the constant prediction."""
    seeds: tuple[float, ...]
    """Delta_m of each seed."""
    changes: Mapping[TaskMetric, Estimate]
    """Task (or domain) -> its change in percent."""
    is_method: bool
    """False for `centralised` and `constant`, which are no federated methods."""
    worst_clients: Clients
    sent: float
    """Bytes from and to clients, mean over seeds."""
    seconds: float
    ratio: float
    """That of its runs (`Side`)."""
    reason: str
    """Why no verdict is possible; '' where one is."""
    verdict: Verdict | None = None
    """The verdict on Delta_m, after Holm's correction over the methods of the data set; None for the reference."""

    @property
    def worst_task(self) -> tuple[TaskMetric, Estimate] | None:
        """Return the task with the lowest change in percent, which is positive where all got better."""
        return min(self.changes.items(), key=lambda item: item[1].mean, default=None)


def methods_of(grid: Grid, results: Results) -> tuple[tuple[Method, ...], dict[str, tuple[Method, ...]]]:
    """Return all methods with finished runs, compared as the grid says; and baseline -> methods compared with it.

    Each seed is compared with the same seed of the baseline. The grid's own baseline comes first; '' stands for none.
    """
    costs = {key: _costs(list(side.runs.values())) for key, side in results.sides.items()}
    lowest = {key: _worst_clients(side, results.rows[key[0]]) for key, side in results.sides.items()}
    plain = next(iter(grid.addons))
    special = {"": "none", "each base alone" if plain == "-" else f"each base with {plain}": "base"}
    named = special | {together(base, addon): f"{base}/{addon}" for _, base, addon in results.sides}
    own = [name for name, delta in named.items() if delta == grid.delta]
    deltas = {name: named[name] for name in [*own, *named] if name in own or name not in special}
    views = {
        name: _judged(_methods(grid.model_copy(update={"delta": delta}), results, lowest, costs), grid.smallest)
        for name, delta in islice(deltas.items(), BASES)
    }
    order = list(grid.data)
    by_data = sorted(_methods(grid, results, lowest, costs), key=lambda method: order.index(method.data))
    return tuple(by_data), views


def _costs(runs: Sequence[Run]) -> tuple[float, float]:
    """Return (bytes, seconds) of a run, mean over seeds."""
    seconds = [total(s for of in timed(run).values() for s in of.values()) for run in runs]
    return fmean(sum(run.bytes_total().values()) for run in runs), mean_of(seconds)


def _methods(
    grid: Grid,
    results: Results,
    lowest: Mapping[Combination, Clients],
    costs: Mapping[Combination, tuple[float, float]],
) -> Iterator[Method]:
    for key, side in results.sides.items():
        data, base, _ = key
        named = grid.reference(base)
        other = None if named is None else results.sides.get((data, *named))
        directions = results.directions(data)
        delta, seeds, changes = None, list[float](), {}
        moving = [of.label for of in (side, other) if of is not None and of.is_moving]
        if other is not None and other is not side:
            seeds = list(deltas(side.values, other.values, directions).values())
            delta = Estimate.of(seeds, side.ratio) if seeds else None
            each = {
                row: change(side.values, other.values, {row.task: row.direction}, side.ratio)
                for row in results.rows[data]
            }
            changes = {row: of for row, of in each.items() if of is not None and not math.isnan(of.mean)}
        yield Method(
            data,
            side.label,
            "" if named is None else together(*named),
            delta if delta is not None and not math.isnan(delta.mean) else None,
            tuple(seeds),
            changes,
            base not in grid.reference_rows,
            lowest[key],
            *costs[key],
            side.ratio,
            f"not converged: {', '.join(moving)}" if moving else "",
        )


def _judged(methods: Iterable[Method], smallest: float) -> tuple[Method, ...]:
    """Return the methods with their verdicts."""
    every = tuple(methods)
    found = {
        (m.data, m.label): against_zero(m.seeds, NOISE * 100, m.ratio)
        for m in every
        if m.is_method and len(m.seeds) > 1 and all(map(math.isfinite, m.seeds))
    }
    ps: dict[tuple[str, str], float] = {}
    for data in {m.data for m in every}:
        mine = [key for key in found if key[0] == data]
        ps |= zip(mine, holm([found[key].p for key in mine]), strict=True)
    return tuple(
        replace(m, verdict=judge(found[key], smallest, ps[key], m.reason)) if (key := (m.data, m.label)) in found else m
        for m in every
    )


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
            by_method[row] = Estimate.of(numbers), tuple(dict.fromkeys(names))
    return by_method
