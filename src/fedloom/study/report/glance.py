"""The first screen of a run: how it came out, for whom, who is in whose way, and whether it still gets better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedloom.federation.runs.reader import mean_of, total
from fedloom.study.charts import thinned
from fedloom.study.report import words
from fedloom.study.report.agreement import IN_CONFLICT, UpdateAgreement
from fedloom.study.report.collect import RunReport
from fedloom.study.report.records import Series
from fedloom.study.report.scores import Curves, Score
from fedloom.study.tables.estimate import Estimate

LATELY = 10
"""Rounds by which the trend of the training loss is told."""
_POINTS = 30  # of a small line


@dataclass(frozen=True)
class Tile:
    """One task: what came out."""

    task: str
    about: str
    value: str
    change: str
    interval: str
    told: bool | None
    best: tuple[str, str] | None
    """The best client with its number; None where all have the same."""
    worst: tuple[str, str] | None
    spark: tuple[str, str]
    """The paths of the run and of the base."""


@dataclass(frozen=True)
class Glance:
    """All that stands on the first screen; what is not known is empty or None."""

    sentences: tuple[str, ...]
    hint: str
    tiles: tuple[Tile, ...]
    about_tiles: str
    about_gains: str


def of_run(report: RunReport) -> Glance:
    """The first screen of a run."""
    held = report.against
    changes = held.delta_of if held is not None else {}
    ends = {name: (min(of), max(of)) for name, of in held.by_client.items()} if held is not None else {}
    each = {e.row.task: [e.clients[n].percent for n in e.compared] for e in held.each} if held is not None else {}
    by_task = {task: Estimate.of(of) for task, values in each.items() if (of := [v for v in values if v == v])}
    judged = primary(report.curves)
    base = {} if held is None else held.over_rounds
    rounds = max((max(c.mean, default=0) for c in report.curves), default=0)
    said = [
        words.ahead(rounds, held.label, changes)
        if held is not None and held.each
        else words.came_out(rounds, [(s.task, s.metric, words.number(s.mean)) for s in _first(report.scores)]),
        words.told_for(by_task, "" if held is None else held.label),
        words.losers(changes),
        words.trend(slope(report.curves)),
    ]
    return Glance(
        tuple(text for text in said if text),
        words.held_against("" if held is None else held.label, report.base_found, bool(report.others)),
        tuple(_tile(score, judged.get(score.task), base, by_task) for score in _first(report.scores)),
        "" if held is None or not by_task else words.about_changes(held.label),
        "" if held is None else _about_gains(held.label, changes, any(low < high for low, high in ends.values())),
    )


def conflict_of(report: RunReport) -> str:
    """Say whose updates pull against whose; '' where the files say nothing of it."""
    agreement = report.agreement or UpdateAgreement()
    found = cosines(agreement)
    furthest = min(((*pair, value) for pair, value in found.items()), key=lambda each: each[2], default=None)
    return words.conflict(_conflicts(agreement), furthest)


def primary(curves: Sequence[Curves]) -> dict[str, Curves]:
    """Task -> its own metric over the rounds, on test data where that was measured."""
    found: dict[str, Curves] = {}
    for c in curves:  # test data come first
        if c.is_primary:
            found.setdefault(c.task, c)
    return found


def slope(curves: Sequence[Curves]) -> float:
    """Percent by which the training loss changes a round, over the last `LATELY` ones: the mean over tasks.

    Least squares for each task's mean over clients; nan with fewer than three rounds.
    """
    found = []
    for c in curves:
        points = [(r, v) for r, v in c.mean.items() if not math.isnan(v)][-LATELY:] if c.split == "train" else []
        if len(points) > 2 and (level := mean_of([v for _, v in points])) > 0:
            at = fmean(r for r, _ in points)
            spread = math.fsum((r - at) ** 2 for r, _ in points)
            found.append(100 * total((r - at) * v for r, v in points) / spread / level)
    return mean_of(found) if found else math.nan


def _first(scores: Sequence[Score]) -> list[Score]:
    """Each task's own metric on the first split that has it."""
    found: dict[str, Score] = {}
    for score in scores:
        if score.primary:
            found.setdefault(score.task, score)
    return list(found.values())


def _tile(score: Score, curve: Curves | None, base: Mapping[str, Series], changes: Mapping[str, Estimate]) -> Tile:
    of = changes.get(score.task)
    best, worst = (None if c is None else (c[0], words.number(c[1])) for c in (score.best, score.worst))
    return Tile(
        score.task,
        words.axis(score.metric, score.direction),
        words.number(score.mean),
        "" if of is None else words.change(of.mean),
        "" if of is None else words.interval(of),
        words.told(of),
        best,
        worst,
        spark({} if curve is None else curve.mean, base.get(score.task, {})),
    )


def _about_gains(base: str, changes: Mapping[str, float], several: bool) -> str:
    """`several`: a client has several tasks, with other changes."""
    if not changes:
        return ""
    of = Estimate.of(list(changes.values()))
    ends = words.interval(of)
    return (
        f"A dot a client: its change against {base}"
        + (", the mean of its tasks; the line goes from its worst task to its best." if several else ".")
        + f" All clients: {words.change(of.mean)}"
        + (f" ({ends}, 95 % t-interval over clients)." if ends else ".")
    )


def _conflicts(agreement: UpdateAgreement) -> dict[str, float]:
    """Layer group -> share of pairs in conflict, mean over the rounds."""
    return {
        group: mean_of(known)
        for group, series in agreement.over_rounds.get(IN_CONFLICT, {}).items()
        if (known := [v for v in series.values() if not math.isnan(v)])
    }


def cosines(agreement: UpdateAgreement) -> dict[tuple[str, str], float]:
    """Pair of updates -> mean cosine over layer groups and rounds."""
    each: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cells in agreement.cosine.values():
        for rows in cells.values():
            for a, row in rows.items():
                for b, value in row.items():
                    if a < b and value is not None:
                        each[a, b].append(value)
    return {pair: mean_of(values) for pair, values in each.items()}


def spark(series: Series, base: Series) -> tuple[str, str]:
    """Return the SVG paths of a run's line and of its base's in a box of 100 x 30."""
    known = [{r: v for r, v in of.items() if not math.isnan(v)} for of in (series, base)]
    rounds, values = ([each for of in known for each in side(of)] for side in (dict.keys, dict.values))
    if not values:
        return "", ""
    (left, wide), (low, high) = ((min(of), (max(of) - min(of)) or 1) for of in (rounds, values))
    paths = [
        [f"{2 + 96 * (r - left) / wide:.1f} {27 - 24 * (of[r] - low) / high:.1f}" for r in thinned(sorted(of), _POINTS)]
        for of in known
    ]
    first, second = (f"M{'L'.join(path)}" if path else "" for path in paths)
    return first, second
