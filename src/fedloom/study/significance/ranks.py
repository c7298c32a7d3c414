"""Ranks of methods over tasks and seeds, as `--ranks` shows them. Free of torch."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fedloom.core.errors import StateError
from fedloom.study.significance.statistics import LEVEL, Ranking, p_text, ranking
from fedloom.study.tables.output import HasTable, Records, Table
from fedloom.study.tables.results import Results

Blocks = Literal["seeds", "tasks"]
"""The blocks of a ranking: each task at each seed, or each task's mean over seeds."""

CSV = ("method", "mean_rank", "groups", "methods", "blocks", "chi2", "df", "p", "critical_difference", "split")


@dataclass(frozen=True)
class Ranks(HasTable):
    """The result of `ranked`."""

    title: str
    ranking: Ranking
    split: str
    block: str
    """The meaning of a block."""
    notes: tuple[str, ...] = ()

    def as_table(self) -> Table:
        """Return one line per method, best first, with the groups that it belongs to."""
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
            "Methods that share a group do not differ significantly."
        )
        return Table(self.title, ("method", "mean rank", "groups"), lines, (about, *self.notes))

    def records(self) -> Records:
        """Return one line per method, in full precision."""
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


def ranked(results: Results, blocks: Blocks = "seeds") -> Ranks:
    """Rank the methods over the blocks that every one has, of all data sets. Raises StateError for one method."""
    # (data set, task, seed or None) -> method -> its number there, of which larger is better
    by_block: dict[tuple[str, str, int | None], dict[str, float]] = defaultdict(dict)
    for (data, *_), side in results.sides.items():
        for row in results.rows[data]:
            sign = -1 if row.direction == "min" else 1
            each: dict[int | None, float] = {s: sign * by.get(row.task, math.nan) for s, by in side.values.items()}
            if blocks == "tasks":
                each = {None: fmean(each.values())}
            for seed, number in each.items():
                by_block[data, row.task, seed][side.label] = number
    names = list(dict.fromkeys(side.label for side in results.sides.values()))
    complete = [b for b in by_block.values() if len(b) == len(names) and all(map(math.isfinite, b.values()))]
    if len(names) < 2:
        raise StateError(f"ranks need two methods, found {', '.join(names)}")
    if not complete:
        raise StateError(
            f"ranks need a block of which all methods have a number, found none among {len(by_block)}: "
            f"{', '.join(names)}"
        )
    result = ranking(complete)
    more = []
    if len(complete) < len(by_block):
        more.append(f"Blocks left out, because not every method has a number there: {len(by_block) - len(complete)}.")
    if blocks == "tasks":
        if len({(data, frozenset(s.values)) for (data, *_), s in results.sides.items()}) > len(
            {data for data, *_ in results.sides}
        ):
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
            "blocks and 5 methods, and few blocks show only large differences."
        )
    if len(names) > 2 and not result.p < LEVEL:
        more.append("Friedman's test finds no difference at 5 %, so no methods differ significantly.")
    block = "a task's mean over seeds" if blocks == "tasks" else "a task at a seed"
    block += " of a data set" if len({data for data, *_ in by_block}) > 1 else ""
    title = f"{results.title}: mean ranks" if results.title else "Mean ranks"
    return Ranks(title, result, results.split, block, (*results.notes, *more))
