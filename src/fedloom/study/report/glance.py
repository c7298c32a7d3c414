"""The first screen of a run: how it came out, for whom, who is in whose way, and whether it still gets better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from fedloom.federation.runs.reader import mean_of, total
from fedloom.study.report import words
from fedloom.study.report.agreement import IN_CONFLICT, UpdateAgreement
from fedloom.study.report.collect import RunReport
from fedloom.study.report.drawn import Dots, Heat, Panel, dots, heat, panels, spark
from fedloom.study.report.looks import thinned_names
from fedloom.study.report.records import Series
from fedloom.study.report.scores import Curves, Score
from fedloom.study.tables.estimate import Estimate

LATELY = 10
"""Rounds by which the trend of the training loss is told."""
MOST = 24
"""Clients in the small map of conflict, at most."""


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
    gains: Dots | None
    about_gains: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Conflict:
    """Whose updates pull against whose, in two small maps."""

    layers: Heat | None
    clients: Heat | None
    about: str


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
        dots({name: (changes[name], *ends[name]) for name in changes}) if changes else None,
        "" if held is None else _about_gains(held.label, changes, any(low < high for low, high in ends.values())),
        panels(judged.values(), base, "" if held is None else held.label),
    )


def conflict_of(report: RunReport) -> Conflict | None:
    """The maps of a run; None where its files say nothing of it."""
    agreement = report.agreement or UpdateAgreement()
    cosines = _cosines(agreement)
    furthest = min(((*pair, value) for pair, value in cosines.items()), key=lambda found: found[2], default=None)
    made = Conflict(_layers(agreement), _pairs(cosines), words.conflict(_conflicts(agreement), furthest))
    return made if made.layers or made.clients else None


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


def _layers(agreement: UpdateAgreement) -> Heat | None:
    lines = agreement.over_rounds.get(IN_CONFLICT, {})
    rounds = sorted({r for series in lines.values() for r in series})
    return heat(lines, rounds, "share of pairs in conflict", -1.0, ("none", "all")) if rounds else None


def _cosines(agreement: UpdateAgreement) -> dict[tuple[str, str], float]:
    """Pair of updates -> mean cosine over layer groups and rounds."""
    each: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cells in agreement.cosine.values():
        for rows in cells.values():
            for a, row in rows.items():
                for b, value in row.items():
                    if a < b and value is not None:
                        each[a, b].append(value)
    return {pair: mean_of(values) for pair, values in each.items()}


def _pairs(cosines: Mapping[tuple[str, str], float]) -> Heat | None:
    names = thinned_names(sorted({name for pair in cosines for name in pair}), MOST)
    if len(names) < 2:
        return None
    rows: dict[str, dict[str, float]] = {name: {} for name in names}
    for a, b in combinations(names, 2):
        rows[a][b] = rows[b][a] = cosines.get((a, b), cosines.get((b, a), math.nan))
    most = max((abs(v) for row in rows.values() for v in row.values() if v == v), default=1.0)
    ends = (f"against (\u2212{most:.2g})", f"with (+{most:.2g})")
    return heat(rows, names, "mean cosine of updates", most or 1.0, ends)
