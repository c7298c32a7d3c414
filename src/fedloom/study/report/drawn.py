"""Small figures as geometry, which templates write as SVG: sparklines, small multiples, dots with intervals, maps.

Units of sparklines and of multiples are those of the figure's own box, which grows with the page. Dots and maps are as
wide as the page lets them be: places across are percent of their width, all else is in pixels, so that letters keep
their size. Colours are numbers of the palette.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedloom.study.report import words
from fedloom.study.report.looks import LINES, NAMED, extremes, tenths, thinned
from fedloom.study.report.records import Series
from fedloom.study.report.scores import Curves

POINTS = 30
"""Points of a line, at most."""
DOTS = 250
"""Dots at most, evenly spaced in their order."""
WIDE, HIGH = 330, 190
Scale = Callable[[float], float]
"""From a number to a place."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 104, 8, 22
_LETTERS = 13  # of a name beside a line
_STEP = 13  # between two of them
_MARKED = 6  # columns of a map up to which each has its name
_LETTER = 7.4  # pixels of a letter, about
_WORD = 1.3  # percent of a plane's width that a letter takes, about
_BEHIND = 0.65  # of a colour at most behind a number, so that it can be read by day and by night


@dataclass(frozen=True)
class Stroke:
    """A line with its name, and where that stands."""

    name: str
    kind: str
    """'client', 'mean' or 'base'."""
    color: int
    path: str
    lead: str
    """From the end of the line to its name."""
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
    """Whether its name and its number are written."""
    small: tuple[float, ...] = ()
    """Where the numbers behind it are, as of seeds."""


@dataclass(frozen=True)
class Dots:
    """Rows in order, the best on top."""

    rows: tuple[Dot, ...]
    ticks: tuple[tuple[float, str], ...]
    zero: float | None
    height: float
    left: float
    """Pixels that the names take."""
    right: float
    """Pixels that the numbers take."""


@dataclass(frozen=True)
class Point:
    """One method in the plane: where it is, at what height its name is, and whether that stands left of it."""

    name: str
    text: str
    x: float
    y: float
    label: float
    is_worse: bool
    is_left: bool


@dataclass(frozen=True)
class Scatter:
    """Points with their names beside them."""

    title: str
    about: str
    points: tuple[Point, ...]
    x: tuple[tuple[float, str], ...]
    y: tuple[tuple[float, str], ...]
    zero: float
    """Where 0 is on the axis upwards."""
    height: float = 230


@dataclass(frozen=True)
class Cell:
    """One number of a map: where it begins, its share of the strongest colour with its sign, and what hovering says."""

    x: float
    y: float
    strength: float
    text: str
    number: str
    """What is written in it; '' where there is no room."""


@dataclass(frozen=True)
class Heat:
    """A map of numbers around 0, or from 0."""

    cells: tuple[Cell, ...]
    rows: tuple[tuple[float, str], ...]
    columns: tuple[tuple[float, str, str], ...]
    """Where a name stands, the name, and its anchor."""
    cell: tuple[float, float]
    """Its width in percent and its height in pixels."""
    left: float
    """Pixels that the names take."""
    height: float
    legend: str
    ends: tuple[str, str]
    """What the strongest colours stand for."""
    one_sided: bool


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    if not 0 < high - low < math.inf:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next((step * by for by in (1, 2, 5) if (high - low) / (step * by) <= about), step * 10)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _signed(tick: float) -> str:
    """A tick of an axis in percent: '+5 %', '0', with a true minus."""
    return f"{tick:+g}\u00a0%".replace("-", "\u2212") if tick else "0"


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
        first = next(iter(c.clients.values()), {})
        same = len(c.clients) > 1 and all(of == first for of in c.clients.values())
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
    ranks: bool = False,
) -> Dots:
    """Dots with lines from name -> (number, low, high), in percent, the largest number on top; ends may be nan.

    With `ranks` they are ranks: the smallest is on top, and 0 is nowhere.
    """
    sign = 1 if ranks else -1
    ranked = sorted(
        (name for name in rows if not math.isnan(rows[name][0])), key=lambda name: (sign * rows[name][0], name)
    )
    spoken = (lambda rank: f"{rank:.3g}") if ranks else words.change
    ranked = [ranked[i] for i in thinned(range(len(ranked)), DOTS)]
    if not ranked:
        return Dots((), (), None, 0, 0, 0)
    ends = [
        *(() if ranks else (0.0,)),
        *(v for name in ranked for v in (*rows[name], *small.get(name, ())) if math.isfinite(v)),
    ]
    step = 20.0 if len(ranked) <= NAMED else max(1.5, 560 / len(ranked))
    left = 10 + _LETTER * min(28, max(map(len, ranked)))
    x = _scale(min(ends), max(ends), 3, 97)
    made = []
    for at, name in enumerate(ranked):
        value, low, high = (rows[name][0] if math.isnan(v) else v for v in rows[name])
        edge = at < 3 or at >= len(ranked) - 3
        named = len(ranked) <= NAMED or (edge and (step >= 12 or at in (0, len(ranked) - 1)))
        text = spoken(value)
        behind = tuple(x(v) for v in small.get(name, ()) if math.isfinite(v))
        worse = not ranks and value < -words.NOTHING
        made.append(Dot(name, text, x(value), x(low), x(high), 12 + at * step, worse, named, behind))
    marks = tuple((x(t), _signed(t) if not ranks else f"{t:g}") for t in ticks(min(ends), max(ends), 4))
    right = 10 + _LETTER * max(len(row.text) for row in made)
    return Dots(tuple(made), marks, None if ranks else x(0.0), 12 + len(ranked) * step + 20, left, right)


def scatter(
    title: str, about: str, points: Mapping[str, tuple[float, float]], spoken: Callable[[float], str]
) -> Scatter | None:
    """Points from name -> (cost, change in percent); None where nothing is known. `spoken` says a cost in words."""
    known = {name: at for name, at in points.items() if all(map(math.isfinite, at))}
    if not known:
        return None
    costs, gains = ([at[i] for at in known.values()] for i in (0, 1))
    low, high = min(0.0, *gains), max(0.0, *gains)
    x = _scale(0, max(costs) or 1.0, 3, 96)
    y = _scale(low, high, 230 - _BOTTOM - 12, _TOP + 6)
    order = sorted(known, key=lambda name: y(known[name][1]))
    heights = dict(zip(order, _apart([y(known[name][1]) for name in order], 230 - _BOTTOM), strict=True))
    made = []
    for name, (cost, gain) in known.items():
        text = f"{name}: {words.change(gain)}, {spoken(cost)}"
        beside = [x(at) for other, (at, up) in known.items() if other != name and abs(y(up) - heights[name]) < _STEP]
        left = _left(x(cost), _WORD * min(len(name), 26), beside)
        made.append(Point(name, text, x(cost), y(gain), heights[name] + 4, gain < -words.NOTHING, left))
    across = tuple((x(t), spoken(t)) for t in ticks(0, max(costs), 4))
    up = tuple((y(t), _signed(t)) for t in ticks(low, high))
    return Scatter(title, about, tuple(made), across, up, y(0.0))


def heat(
    rows: Mapping[str, Mapping[Any, float]],
    columns: Sequence[Any],
    legend: str,
    most: float,
    ends: tuple[str, str],
    said: Mapping[tuple[str, Any], str] = {},
    numbers: bool = False,
) -> Heat:
    """A map of rows by columns; a colour is strongest at `most`, which is below 0 where all numbers are against.

    `ends` says what the two ends of the colours stand for. Columns are thinned to POINTS. `said` is (row, column) ->
    what hovering says; with `numbers` each cell has its change in percent written in it.
    """
    chosen = [columns[i] for i in thinned(range(len(columns)), POINTS)]
    left = 10 + _LETTER * min(24, max(map(len, rows)))
    width, height = 100 / len(chosen), 26.0 if numbers else 18.0 if len(rows) <= 16 else 13.0
    cells = []
    for i, (name, row) in enumerate(rows.items()):
        for j, column in enumerate(chosen):
            value = row.get(column, math.nan)
            if not math.isnan(value):
                text = f"{name}, {column}: {said.get((name, column), f'{value:.3g}')}"
                strength = max(-1.0, min(1.0, value / most)) * (_BEHIND if numbers else 1)
                cells.append(Cell(j * width, i * height, strength, text, words.change(value) if numbers else ""))
    names = tuple((i * height + height / 2, name) for i, name in enumerate(rows))
    marks = range(len(chosen)) if len(chosen) <= _MARKED else [0, len(chosen) - 1]
    middle = len(marks) == len(chosen)
    below = tuple(
        ((j + 0.5) * width, str(chosen[j]), "middle")
        if middle
        else (100.0 * (j > 0), str(chosen[j]), "end" if j else "start")
        for j in marks
    )
    return Heat(tuple(cells), names, below, (width, height), left, len(rows) * height + 18, legend, ends, most < 0)


def _left(at: float, wide: float, others: Sequence[float]) -> bool:
    """Whether a name that is so wide stands left of its point, to cover none of the others; all in percent."""

    def covered(low: float, high: float) -> tuple[bool, int]:
        return low < 0 or high > 100, sum(low < other < high for other in others)

    sides = {True: covered(at - wide, at), False: covered(at, at + wide)}
    return sides[True] < sides[False] if sides[True] != sides[False] else at > 50


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
    places = dict(zip(order, _apart([ends[key] for key in order], HIGH - _BOTTOM), strict=True))
    color = {name: i for i, name in enumerate(name for kind, name, _ in made if kind == "client")}
    return tuple(
        Stroke(
            name,
            kind,
            color.get(name, 0) % LINES if kind == "client" else 0,
            drawn,
            path([(WIDE - _RIGHT + 1, ends[kind, name]), (WIDE - _RIGHT + 9, places[kind, name])]),
            (WIDE - _RIGHT + 12, places[kind, name] + 4),
            name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…",
        )
        for kind, name, drawn in made
    )


def _apart(places: Sequence[float], lowest: float) -> list[float]:
    """Sorted places with at least a line between two of them, none below `lowest`."""
    moved = list(places)
    for before, here in pairwise(range(len(moved))):
        moved[here] = max(moved[here], moved[before] + _STEP)
    if moved:
        moved[-1] = min(moved[-1], lowest)
    for here, after in pairwise(reversed(range(len(moved)))):
        moved[after] = min(moved[after], moved[here] - _STEP)
    return moved
