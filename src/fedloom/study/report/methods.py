"""The methods of a grid side by side: what each changes against its reference, task by task, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from fedloom.federation.runs.reader import Run, mean_of, total
from fedloom.study.delta import delta_m
from fedloom.study.grid import Grid, together
from fedloom.study.report import records
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import Column, Combination, Side, change
from fedloom.study.tables.table import GridTable


@dataclass(frozen=True)
class Method:
    """A base with its add-on on one data set."""

    data: str
    label: str
    reference: str
    """The method that changes are against; its own name for the reference, '' where the grid has none."""
    delta: Estimate | None
    """Delta_m in percent over seeds, without tasks that are not told from the constant prediction."""
    seeds: tuple[float, ...]
    """Delta_m of each seed."""
    changes: Mapping[Column, Estimate]
    """Task -> its change in percent."""
    is_method: bool
    """False for `centralised` and `constant`, which are no federated methods."""
    sent: float
    """Bytes from and to clients, mean over seeds."""
    seconds: float


BASES = 12
"""Methods that a page offers to hold the others against, at most."""


def methods_of(grid: Grid, table: GridTable, sides: Mapping[Combination, Side]) -> dict[str, tuple[Method, ...]]:
    """All methods with finished runs, held against what the grid says, which comes first, and against each of them.

    Each seed is held against the same seed of the base. The names are those of the bases; '' where the grid has none.
    """
    costs = {key: _costs(list(side.runs.values())) for key, side in sides.items()}
    plain = next(iter(grid.addons))
    special = {"": "none", "each base alone" if plain == "-" else f"each base with {plain}": "base"}
    named = special | {together(base, addon): f"{base}/{addon}" for _, base, addon in sides}
    own = [name for name, delta in named.items() if delta == grid.delta]
    deltas = {name: named[name] for name in [*own, *named] if name in own or name not in special}
    return {
        name: tuple(_methods(grid.model_copy(update={"delta": delta}), table, sides, costs))
        for name, delta in islice(deltas.items(), BASES)
    }


def _costs(runs: Sequence[Run]) -> tuple[float, float]:
    """(bytes, seconds) of a run, mean over seeds."""
    seconds = [total(s for of in records.timed(run).values() for s in of.values()) for run in runs]
    return fmean(sum(run.bytes_total().values()) for run in runs), mean_of(seconds)


def _methods(
    grid: Grid,
    table: GridTable,
    sides: Mapping[Combination, Side],
    costs: Mapping[Combination, tuple[float, float]],
) -> Iterator[Method]:
    for key, side in sides.items():
        data, base, _ = key
        named = grid.reference(base)
        other = None if named is None else sides.get((data, *named))
        columns = [c for c in table.columns if c.data == data and c.task]
        directions = {c.task: c.direction for c in columns if not c.untold}
        delta, seeds, changes = None, [], {}
        if other is not None and other is not side:
            delta = change(side.values, other.values, directions)
            for seed in side.values.keys() & other.values.keys():
                shared = directions.keys() & side.values[seed].keys() & other.values[seed].keys()
                mine, theirs = ({t: of[seed][t] for t in shared} for of in (side.values, other.values))
                seeds.append(delta_m(mine, theirs, directions))
            each = {c: change(side.values, other.values, {c.task: c.direction}) for c in columns}
            changes = {c: of for c, of in each.items() if of is not None and not math.isnan(of.mean)}
        yield Method(
            data,
            side.label,
            "" if named is None else together(*named),
            delta if delta is not None and not math.isnan(delta.mean) else None,
            tuple(seeds),
            changes,
            base not in grid.reference_rows,
            *costs[key],
        )
