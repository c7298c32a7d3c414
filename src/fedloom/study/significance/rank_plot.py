"""The critical-difference plot of mean ranks (Demsar, Statistical comparisons of classifiers over multiple data sets,
2006): methods on an axis of mean ranks, a bar over each group that is not told apart. Free of torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import writing
from fedloom.core.extras import figure, save_figure
from fedloom.study.significance.ranks import Ranks
from fedloom.study.significance.statistics import LEVEL, p_text

SPAN = 5.0
"""Inches of the axis, from rank 1 to the last."""
LETTERS = 32
"""Letters of a line of a name, which has two lines at most."""

_LINE = 0.17  # inches of a line of letters of 9 points
_GAP = 0.06  # between two names
_FIRST = 0.16  # from the axis to the first bar
_BAR = 0.11  # between two bars
_END = 0.04  # of a bar beyond its methods
_ARM = 0.12  # of a method's line beyond the axis, before its name


def save(ranks: Ranks, out: Path) -> None:
    """Draw ranks to a file; its ending (.svg, .png, .pdf) says the format. Raises UserError for a bad file."""
    made = plot(ranks)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(made, out, dpi=200, bbox_inches="tight")


def plot(ranks: Ranks) -> Any:
    """The picture as a matplotlib Figure; its axes measure inches.

    The better half of the methods has its names at the left, the best on top, the others at the right, the worst on
    top, so that no two lines cross. Artists have the gids axis, method, name, group and critical-difference.
    """
    r = ranks.ranking
    k = len(r.ranks)

    def at(rank: float) -> float:
        return SPAN * (rank - 1) / (k - 1)

    spans = [(at(r.ranks[group[0]]), at(r.ranks[group[-1]])) for group in r.groups if len(group) > 1]
    bars = _levels([(start - _END, end + _END) for start, end in spans])
    best = list(r.ranks.items())
    left, right = best[: (k + 1) // 2], best[(k + 1) // 2 :][::-1]
    first = _FIRST + _BAR * (1 + max((level for *_, level in bars), default=-1)) + 0.1  # from the axis to the names
    low = first + max(sum(_height(name) for name, _ in side) for side in (left, right))

    page = figure(SPAN + 3, low + 1, layout=None)
    axes = page.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-1.5, SPAN + 1.5)
    axes.set_ylim(-low - 0.3, 0.7)

    def line(x: Sequence[float], y: Sequence[float], gid: str, **look: Any) -> None:
        axes.plot(x, y, gid=gid, **{"color": "black", "linewidth": 0.8, "clip_on": False, **look})

    def text(x: float, y: float, words: str, gid: str, **look: Any) -> None:
        # a name is not mathematics, whatever signs it has
        axes.text(x, y, words, gid=gid, **{"fontsize": 9, "va": "center", "parse_math": False, **look})

    line((0, SPAN), (0, 0), "axis", linewidth=1)
    step = math.ceil((k - 1) / 12)
    for tick in range(1, k + 1):
        marked = (tick - 1) % step == 0
        line((at(tick),) * 2, (0, 0.08 if marked else 0.05), "axis")
        if marked:
            text(at(tick), 0.17, str(tick), "axis", ha="center")
    long = at(1 + r.critical)
    line((0, long), (0.42, 0.42), "critical-difference", linewidth=1.5)
    for tip in (0, long):
        line((tip, tip), (0.38, 0.46), "critical-difference", linewidth=1.5)
    text(long / 2, 0.57, f"critical difference {r.critical:.2f}", "critical-difference", ha="center", fontsize=8)
    for methods, x, beside in ((left, -_ARM, "right"), (right, SPAN + _ARM, "left")):
        y = -first
        for name, rank in methods:
            lines = _lines(name)
            y -= _height(name) / 2
            line((at(rank), at(rank), x), (0, y, y), "method", solid_joinstyle="miter")
            number = f"{rank:.2f}"
            words = "\n".join([*lines[:-1], f"{lines[-1]}  {number}" if beside == "right" else lines[-1]])
            words = words if beside == "right" else f"{number}  {words}"
            text(x + (0.06 if beside == "left" else -0.06), y, words, "name", ha=beside, multialignment=beside)
            y -= _height(name) / 2
    for start, end, level in bars:
        y = -_FIRST - _BAR * level
        line((start, end), (y, y), "group", linewidth=3, solid_capstyle="butt")
    text(SPAN / 2, -low - 0.2, _about(ranks), "about", ha="center", va="top", fontsize=8)
    return page


def _about(ranks: Ranks) -> str:
    r = ranks.ranking
    p = p_text(r.p)
    friedman = "" if math.isnan(r.p) else f"; Friedman's test p {p if p.startswith('<') else f'= {p}'}"
    told = "" if any(len(group) > 1 for group in r.groups) else "; all are told apart"
    level = f"critical difference of Nemenyi at {LEVEL:.0%}"
    blocks = f"{ranks.split} split; mean ranks over N = {r.blocks} blocks ({ranks.block}), 1 is best"
    return f"{blocks}\n{level}{friedman}; bars join methods that are not told apart{told}"


def _levels(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """Spans in their order with a level each, so that those that share one do not touch."""
    ends: list[float] = []
    placed = []
    for start, end in spans:
        level = next((i for i, last in enumerate(ends) if last < start), len(ends))
        ends[level : level + 1] = [end]
        placed.append((start, end, level))
    return placed


def _lines(name: str) -> list[str]:
    """A name in one or two lines, without what cannot be printed."""
    shown = "".join(c if c.isprintable() else " " for c in name)
    return textwrap.wrap(shown, LETTERS, max_lines=2, placeholder="…") or ["?"]


def _height(name: str) -> float:
    return _LINE * len(_lines(name)) + _GAP
