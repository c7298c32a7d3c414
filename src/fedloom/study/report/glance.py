"""The first screen of a run: its results, for each client, its conflicts, and whether it still improves."""

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
from fedloom.study.report.records import Curves, Score, Series
from fedloom.study.tables.estimate import Estimate

LATELY = 10
"""Rounds over which the trend of the training loss is computed."""
_POINTS = 30  # of a small line


@dataclass(frozen=True)
class Tile:
    """The result of one task."""

    task: str
    about: str
    value: str
    constant: str
    """The score of the constant prediction; '' where the page compares with a run."""
    change: str
    interval: str
    excludes_zero: bool | None
    """True if the interval excludes 0; None without an interval."""
    best: tuple[str, str] | None
    """The best client with its number; None where all have the same."""
    worst: tuple[str, str] | None
    spark: tuple[str, str]
    """The paths of the run and of the baseline."""


@dataclass(frozen=True)
class Glance:
    """The contents of the first screen; unknown parts are empty or None."""

    sentences: tuple[str, ...]
    hint: str
    tiles: tuple[Tile, ...]
    about_tiles: str
    about_gains: str


def of_run(report: RunReport) -> Glance:
    """Return the first screen of a run."""
    base = report.against
    label = "" if base is None else base.label
    changes = {} if base is None else base.delta_of
    each = {} if base is None else {e.row.task: [e.clients[n].percent for n in e.compared] for e in base.each}
    by_task = {task: Estimate.of(of) for task, values in each.items() if (of := [v for v in values if v == v])}
    rounds = max((max(c.mean, default=0) for c in report.curves), default=0)
    first: dict[str, Score] = {}
    for score in report.scores:  # each task's own metric, on the first split that has it
        if score.primary:
            first.setdefault(score.task, score)
    results = words.came_out(rounds, [(s.task, s.metric, words.number(s.mean)) for s in first.values()])
    judged = primary(report.curves)
    constant = report.constant if base is None else {}
    if base is not None and base.each:
        results = words.ahead(rounds, label, changes)
    elif constant:
        results = words.beats(rounds, {t: is_better(s, constant[t]) for t, s in first.items() if t in constant})
    sentences = [results, words.trend(slope(report.curves))]
    lines = report.constant_lines if base is None else base.over_rounds
    return Glance(
        tuple(text for text in sentences if text),
        words.about_base(label, report.base_found, bool(report.others), bool(constant)),
        tuple(_tile(s, judged.get(s.task), lines, by_task, constant.get(s.task)) for s in first.values()),
        words.about_changes(label) if by_task else "",
        "" if base is None else _about_gains(label, changes, any(len(set(of)) > 1 for of in base.by_client.values())),
    )


def conflict_of(report: RunReport) -> str:
    """Say which updates conflict; '' where the files do not say."""
    agreement = report.agreement or UpdateAgreement()
    furthest = min(((*pair, value) for pair, value in cosines(agreement).items()), key=lambda e: e[2], default=None)
    shares = {
        group: mean_of(known)
        for group, series in agreement.over_rounds.get(IN_CONFLICT, {}).items()
        if (known := [v for v in series.values() if not math.isnan(v)])
    }
    return words.conflict(shares, furthest)


def primary(curves: Sequence[Curves]) -> dict[str, Curves]:
    """Return task -> its own metric over the rounds, on test data where that was measured."""
    by_task: dict[str, Curves] = {}
    for c in curves:  # test data come first
        if c.is_primary:
            by_task.setdefault(c.task, c)
    return by_task


def slope(curves: Sequence[Curves]) -> float:
    """Return the change of the training loss in percent per round, over the last `LATELY` ones: the mean over tasks.

    Least squares for each task's mean over clients; nan with fewer than three rounds.
    """
    slopes = []
    for c in curves:
        points = [(r, v) for r, v in c.mean.items() if not math.isnan(v)][-LATELY:] if c.split == "train" else []
        if len(points) > 2 and (level := mean_of([v for _, v in points])) > 0:
            at = fmean(r for r, _ in points)
            spread = math.fsum((r - at) ** 2 for r, _ in points)
            slopes.append(100 * total((r - at) * v for r, v in points) / spread / level)
    return mean_of(slopes) if slopes else math.nan


def is_better(score: Score, constant: float) -> bool:
    """Return whether a task's number is better than the constant prediction's."""
    return score.mean > constant if score.direction == "max" else score.mean < constant


def _tile(
    score: Score,
    curve: Curves | None,
    base: Mapping[str, Series],
    changes: Mapping[str, Estimate],
    constant: float | None,
) -> Tile:
    of = changes.get(score.task)
    best, worst = (None if c is None else (c[0], words.number(c[1])) for c in (score.best, score.worst))
    return Tile(
        score.task,
        words.axis(score.metric, score.direction, score.unit),
        words.number(score.mean),
        "" if constant is None else words.number(constant),
        "" if of is None else words.change(of.mean),
        "" if of is None else words.interval(of),
        words.excludes_zero(of),
        best,
        worst,
        spark({} if curve is None else curve.mean, base.get(score.task, {})),
    )


def _about_gains(base: str, changes: Mapping[str, float], several: bool) -> str:
    """Explain the dots; `several`: a client has several tasks, with other changes."""
    if not changes:
        return ""
    of = Estimate.of(list(changes.values()))
    ends = words.interval(of)
    return (
        f"One dot per client: its change against {base}"
        + (", the mean of its tasks; the line goes from its worst task to its best." if several else ".")
        + f" All clients: {words.change(of.mean)}"
        + (f" ({ends}, 95 % t-interval over clients)." if ends else ".")
    )


def cosines(agreement: UpdateAgreement) -> dict[tuple[str, str], float]:
    """Return pair of updates -> mean cosine over layer groups and rounds."""
    each: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cells in agreement.cosine.values():
        for rows in cells.values():
            for a, row in rows.items():
                for b, value in row.items():
                    if a < b and value is not None:
                        each[a, b].append(value)
    return {pair: mean_of(values) for pair, values in each.items()}


def spark(series: Series, base: Series) -> tuple[str, str]:
    """Return the SVG paths of a run's line and of its baseline's in a box of 100 x 30."""
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
