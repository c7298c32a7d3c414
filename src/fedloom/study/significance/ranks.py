"""Ranks of methods over tasks and seeds: what `--ranks` shows. Free of torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import TaskMetric
from fedloom.study.grid import Grid
from fedloom.study.significance.statistics import LEVEL, Ranking, p_text, ranking
from fedloom.study.tables.compare import Comparison
from fedloom.study.tables.markup import Records
from fedloom.study.tables.sheet import Sheet, Sheeted
from fedloom.study.tables.sides import Side, of_comparison, of_grid

Blocks = Literal["seeds", "tasks"]
"""What methods are ranked on: each task at each seed, or each task's mean over seeds."""

CSV = ("method", "mean_rank", "groups", "methods", "blocks", "chi2", "df", "p", "critical_difference", "split")


@dataclass(frozen=True)
class Ranks(Sheeted):
    """What `ranked` found."""

    title: str
    ranking: Ranking
    split: str
    block: str
    """What a block is."""
    notes: tuple[str, ...] = ()

    def sheet(self) -> Sheet:
        """One line per method, best first, with the groups of methods that it belongs to."""
        r = self.ranking
        lines = tuple((name, f"{rank:.3f}", " ".join(map(str, self._groups(name)))) for name, rank in r.ranks.items())
        friedman = (
            "no Friedman test"
            if math.isnan(r.p)
            else f"Friedman's test chi2 = {r.chi2:.3f}, {len(r.ranks) - 1} degrees of freedom, p = {p_text(r.p)}"
        )
        about = (
            f"{self.split} split; mean rank over blocks ({self.block}), 1 is best, equal numbers share "
            f"their mean rank; {friedman}; Nemenyi's critical difference at 5 %: q sqrt(k (k + 1) / (6 N)) = "
            f"{r.critical:.3f} for methods k = {len(r.ranks)} and blocks N = {r.blocks}, q from the studentised range. "
            "Methods that share a group are not told apart."
        )
        return Sheet(self.title, ("method", "mean rank", "groups"), lines, (about, *self.notes))

    def records(self) -> Records:
        """One line per method, in full precision."""
        r = self.ranking
        test = (r.chi2, len(r.ranks) - 1, r.p, r.critical)
        return Records(
            CSV,
            [
                (name, rank, self._groups(name), len(r.ranks), r.blocks, *test, self.split)
                for name, rank in r.ranks.items()
            ],
        )

    def _groups(self, name: str) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.ranking.groups, 1) if name in group)


def ranked(comparison: Comparison, blocks: Blocks = "seeds") -> Ranks:
    """The ranks of a comparison's columns."""
    sides = {("", side.label): side for side in of_comparison(comparison)}
    return _ranks("Mean ranks", sides, {"": comparison.rows}, comparison.split, blocks, comparison.notes)


def grid_ranked(grid: Grid, folder: Path, split: str = "test", blocks: Blocks = "seeds") -> Ranks:
    """The ranks of a grid's cells, over all its data sets."""
    sides, rows, notes = of_grid(grid, folder, split)
    by_label = {(data, side.label): side for (data, *_), side in sides.items()}
    return _ranks(f"{grid.title or grid.name}: mean ranks", by_label, rows, split, blocks, notes)


def _blocks(
    sides: Mapping[tuple[str, str], Side], rows: Mapping[str, Sequence[TaskMetric]], blocks: Blocks
) -> dict[tuple[str, str, int | None], dict[str, float]]:
    """(data set, task, seed or None) -> method -> its number there, of which larger is better."""
    found: dict[tuple[str, str, int | None], dict[str, float]] = defaultdict(dict)
    for (data, label), side in sides.items():
        for row in rows[data]:
            sign = -1 if row.direction == "min" else 1
            numbers = {seed: sign * by_task.get(row.task, math.nan) for seed, by_task in side.values.items()}
            if blocks == "tasks":
                found[data, row.task, None][label] = fmean(numbers.values())
            else:
                for seed, number in numbers.items():
                    found[data, row.task, seed][label] = number
    return found


def _ranks(
    title: str,
    sides: Mapping[tuple[str, str], Side],
    rows: Mapping[str, Sequence[TaskMetric]],
    split: str,
    blocks: Blocks,
    notes: Iterable[str],
) -> Ranks:
    """Ranks over the blocks that every method has."""
    found = _blocks(sides, rows, blocks)
    names = list(dict.fromkeys(label for _, label in sides))
    complete = [b for b in found.values() if len(b) == len(names) and all(map(math.isfinite, b.values()))]
    if len(names) < 2:
        raise StateError(f"ranks need two methods, found {', '.join(names)}")
    if not complete:
        raise StateError(
            f"ranks need a block of which all methods have a number, found none among {len(found)}: {', '.join(names)}"
        )
    made = ranking(complete)
    more = []
    if len(complete) < len(found):
        more.append(f"Blocks left out, for not every method has a number there: {len(found) - len(complete)}.")
    if blocks == "tasks":
        counts = {data: {frozenset(s.values) for (d, _), s in sides.items() if d == data} for data in rows}
        if any(len(seeds) > 1 for seeds in counts.values()):
            more.append("The means are not over the same seeds for all methods.")
        more.append(
            "Tasks of one data set share its examples, and a run's tasks its model: blocks are not independent."
        )
    else:
        more.append(
            "Blocks are not independent: seeds of a task share its data set, and a run's tasks its model. So p and the "
            "critical difference are smaller than they should be; blocks of tasks (means over seeds) are stricter."
        )
    if len(names) > 2 and (len(complete) <= 10 or len(names) <= 5):
        more.append(
            f"Blocks {len(complete)}, methods {len(names)}: Friedman's chi2 is an approximation for more than 10 "
            "blocks and 5 methods, and few blocks tell only large differences."
        )
    if len(names) > 2 and not made.p < LEVEL:
        more.append("Friedman's test finds no difference at 5 %, so no methods are told apart.")
    block = "a task's mean over seeds" if blocks == "tasks" else "a task at a seed"
    block += " of a data set" if len({data for data, *_ in found}) > 1 else ""
    return Ranks(title, made, split, block, (*notes, *more))
