"""Small figures as geometry, which templates write as SVG: sparklines, small multiples, dots with intervals, maps.

Units are those of the figure's own box; templates let it grow with the page. Colours are numbers of the palette.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedloom.study.report import words
from fedloom.study.report.looks import LINES, extremes, tenths, thinned
from fedloom.study.report.records import Series
from fedloom.study.report.scores import Curves

POINTS = 30
"""Points of a line, at most."""
NAMED = 40
"""Dots up to which each has its name beside it; beyond that, only the first and the last few."""
DOTS = 400
"""Dots at most, evenly spaced in their order."""
WIDE, HIGH = 330, 190
Scale = Callable[[float], float]
"""From a number to a place."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 92, 8, 22
_LETTERS = 14  # of a name beside a line
_STEP = 12  # between two of them
_MARKED = 6  # columns of a map up to which each has its name


@dataclass(frozen=True)
class Stroke:
    """A line with its name, and where that stands."""

    name: str
    kind: str
    """'client', 'mean' or 'base'."""
    color: int
    path: str
    label: tuple[float, float]
    short: str


@dataclass(frozen=True)
class Panel:
    """One of several figures with the same axes."""

    title: str
    about: str
    lines: tuple[Stroke, ...]
    band: str
    note: str
    x: tuple[tuple[float, str], ...]
    """Ticks: where, and what they say."""
    y: tuple[tuple[float, str], ...]
    width: int = WIDE
    height: int = HIGH


@dataclass(frozen=True)
class Dot:
    """One row: its place, the ends of its line, and whether its name is written."""

    name: str
    text: str
    at: float
    low: float
    high: float
    y: float
    is_worse: bool
    is_named: bool
    small: tuple[float, ...] = ()
    """Where the numbers behind it are, as of seeds."""


@dataclass(frozen=True)
class Dots:
    """Rows in order, the best on top."""

    rows: tuple[Dot, ...]
    ticks: tuple[tuple[float, str], ...]
    zero: float
    height: float
    left: float
    width: int = 440


@dataclass(frozen=True)
class Heat:
    """A map of numbers around 0, or from 0: (x, y, share of the strongest colour with its sign, what hovering says)."""

    cells: tuple[tuple[float, float, float, str], ...]
    rows: tuple[tuple[float, str], ...]
    columns: tuple[tuple[float, str], ...]
    cell: tuple[float, float]
    left: float
    height: float
    legend: str
    width: int = 420


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next((step * by for by in (1, 2, 5) if (high - low) / (step * by) <= about), step * 10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def path(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path; a point that is not a number leaves a gap."""
    made, pen = [], "M"
    for x, y in points:
        if math.isnan(y):
            pen = "M"
        else:
            made.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
    return "".join(made)


def spark(series: Series, base: Series) -> tuple[str, str]:
    """The paths of a run's line and of its base's in a box of 100 x 30."""
    values = [v for of in (series, base) for v in of.values() if not math.isnan(v)]
    rounds = [*series, *base]
    if not values:
        return "", ""
    x = _scale(min(rounds), max(rounds), 2, 98)
    y = _scale(min(values), max(values), 27, 3)
    first, second = ([(x(r), y(of[r])) for r in thinned(sorted(of), POINTS)] for of in (series, base))
    return path(first), path(second)


def panels(curves: Iterable[Curves], base: Mapping[str, Series], label: str) -> tuple[Panel, ...]:
    """A panel a task: its clients, their mean, and the base's mean; panels of one metric share their y axis."""
    found = []
    for c in curves:
        lines: dict[str, tuple[str, Series]] = {"mean": ("mean", c.mean)} if len(c.clients) > 1 else {}
        if base.get(c.task):
            lines |= {label: ("base", base[c.task])}
        same = len(c.clients) > 1 and len({tuple(sorted(of.items())) for of in c.clients.values()}) == 1
        found.append((c.task, c.metric, c.direction, {} if same else dict(c.clients), lines))
    return multiples(found)


def multiples(
    several: Sequence[tuple[str, str, str, Mapping[str, Series], Mapping[str, tuple[str, Series]]]],
) -> tuple[Panel, ...]:
    """Panels from (title, metric, direction, lines, further lines with their kind), which share their axes."""
    rounds = [r for *_, lines, more in several for of in _all(lines, more) for r in of]
    if not rounds:
        return ()
    x = _scale(min(rounds), max(rounds), _LEFT, WIDE - _RIGHT)
    across = [(x(t), f"{t:g}") for t in ticks(min(rounds), max(rounds)) if t == int(t)]
    reach: dict[tuple[str, str], list[float]] = {}
    for _, metric, direction, lines, more in several:
        values = [v for of in _all(lines, more) for v in of.values() if math.isfinite(v)]
        reach.setdefault((metric, direction), []).extend(values)
    made = []
    for title, metric, direction, lines, more in several:
        known = reach[metric, direction] or [0.0, 1.0]
        y = _scale(min(known), max(known), HIGH - _BOTTOM, _TOP)
        up = tuple((y(t), f"{t:.4g}") for t in ticks(min(known), max(known)))
        band, note = "", ""
        if len(lines) > LINES:
            shown = extremes(lines, direction)
            band = _band([of for name, of in lines.items() if name not in shown], x, y)
            note = f"band: 10 % to 90 % of {len(lines) - len(shown)} more"
            lines = {name: lines[name] for name in shown}
        each = [("client", name, of) for name, of in lines.items()] + [(k, name, of) for name, (k, of) in more.items()]
        made.append(Panel(title, words.axis(metric, direction), _strokes(each, x, y), band, note, tuple(across), up))
    return tuple(made)


def dots(
    rows: Mapping[str, tuple[float, float, float]],
    small: Mapping[str, Sequence[float]] = {},
) -> Dots:
    """Dots with lines from name -> (number, low, high), in percent, the largest number on top; ends may be nan."""
    ranked = sorted((name for name in rows if not math.isnan(rows[name][0])), key=lambda name: (-rows[name][0], name))
    ranked = [ranked[i] for i in thinned(range(len(ranked)), DOTS)]
    if not ranked:
        return Dots((), (), 0, 0, 0)
    ends = [0.0, *(v for name in ranked for v in (*rows[name], *small.get(name, ())) if math.isfinite(v))]
    step = 18.0 if len(ranked) <= NAMED else max(1.5, 560 / len(ranked))
    left = 8 + 6.2 * min(28, max(map(len, ranked)))
    x = _scale(min(ends), max(ends), left + 8, 440 - 30)
    made = []
    for at, name in enumerate(ranked):
        value, low, high = (rows[name][0] if math.isnan(v) else v for v in rows[name])
        edge = at < 3 or at >= len(ranked) - 3
        named = len(ranked) <= NAMED or (edge and (step >= 12 or at in (0, len(ranked) - 1)))
        text = words.change(value)
        behind = tuple(x(v) for v in small.get(name, ()) if math.isfinite(v))
        made.append(Dot(name, text, x(value), x(low), x(high), 12 + at * step, value < -words.NOTHING, named, behind))
    marks = tuple((x(t), words.change(t) if t else "0") for t in ticks(min(ends), max(ends)))
    return Dots(tuple(made), marks, x(0.0), 12 + len(ranked) * step + 20, left)


def heat(
    rows: Mapping[str, Mapping[Any, float]],
    columns: Sequence[Any],
    legend: str,
    most: float,
    said: Mapping[tuple[str, Any], str] = {},
) -> Heat:
    """A map of rows by columns; a colour is strongest at `most`, which is below 0 where larger numbers are worse.

    Columns are thinned to POINTS. `said` is (row, column) -> what hovering says beside the number.
    """
    chosen = [columns[i] for i in thinned(range(len(columns)), POINTS)]
    left = 8 + 6.2 * min(24, max(map(len, rows)))
    width, height = (420 - left - 4) / len(chosen), 18.0 if len(rows) <= 16 else 12.0
    cells = []
    for i, (name, row) in enumerate(rows.items()):
        for j, column in enumerate(chosen):
            value = row.get(column, math.nan)
            if not math.isnan(value):
                text = f"{name}, {column}: {said.get((name, column), f'{value:.3g}')}"
                cells.append((left + j * width, i * height, max(-1.0, min(1.0, value / most)), text))
    names = tuple((i * height + height / 2, name) for i, name in enumerate(rows))
    marks = range(len(chosen)) if len(chosen) <= _MARKED else [0, len(chosen) - 1]
    below = tuple((left + (j + 0.5) * width, str(chosen[j])) for j in marks)
    return Heat(tuple(cells), names, below, (width, height), left, len(rows) * height + 18, legend)


def _all(lines: Mapping[str, Series], more: Mapping[str, tuple[str, Series]]) -> list[Series]:
    return [*lines.values(), *(of for _, of in more.values())]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """A single number stands in the middle."""
    if not high > low:
        return lambda v: math.nan if math.isnan(v) else (start + end) / 2
    return lambda v: start + (v - low) / (high - low) * (end - start)


def _band(rest: Sequence[Series], x: Scale, y: Scale) -> str:
    """The outline of the band from the 10 % to the 90 % quantile."""
    low, high = tenths(rest, thinned(sorted({r for of in rest for r in of}), POINTS))
    outline = [(x(r), y(high[r])) for r in high] + [(x(r), y(low[r])) for r in reversed(low)]
    return path(outline) + "Z" if outline else ""


def _strokes(each: Sequence[tuple[str, str, Series]], x: Scale, y: Scale) -> tuple[Stroke, ...]:
    """The lines, with their names beside their ends, which are moved apart where they would overlap."""
    made, ends = [], {}
    for kind, name, series in each:
        points = [(x(r), y(series[r])) for r in thinned(sorted(series), POINTS)]
        known = [point for point in points if not math.isnan(point[1])]
        if known:
            ends[kind, name] = known[-1][1]
            made.append(
                (kind, name, path(points) if len(known) > 1 else path([known[0], (known[0][0] + 3, known[0][1])]))
            )
    order = sorted(ends, key=lambda key: ends[key])
    places = dict(zip(order, _apart([ends[key] for key in order]), strict=True))
    color = {name: i for i, name in enumerate(name for kind, name, _ in made if kind == "client")}
    return tuple(
        Stroke(
            name,
            kind,
            color.get(name, 0) % LINES if kind == "client" else 0,
            drawn,
            (WIDE - _RIGHT + 5, places[kind, name] + 4),
            name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…",
        )
        for kind, name, drawn in made
    )


def _apart(places: Sequence[float]) -> list[float]:
    """Sorted places with at least a line between two of them, within the panel."""
    moved = list(places)
    for before, here in pairwise(range(len(moved))):
        moved[here] = max(moved[here], moved[before] + _STEP)
    if moved:
        moved[-1] = min(moved[-1], HIGH - _BOTTOM)
    for here, after in pairwise(reversed(range(len(moved)))):
        moved[after] = min(moved[after], moved[here] - _STEP)
    return moved
