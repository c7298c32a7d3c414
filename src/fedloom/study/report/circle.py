"""Who takes from whom, drawn: peers on a circle, an arrow from each sender to the one that takes its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedloom.study.palette import COLORS, color
from fedloom.study.report.looks import thinned
from fedloom.study.report.records import Matrices

PEERS = 60
"""Peers of a graph, at most; with more there is no graph, for nothing could be seen in it."""
NUMBERS = 150_000
"""Coordinates of all rounds together, about."""
WIDTHS = (0.7, 1.5, 2.6, 4.0)
"""Widths of arrows; weights are sorted into as many equal steps up to the largest weight."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_LABELLED = 24  # peers up to which each has its name beside it
_LABEL = 10  # characters of such a name
_NAMED = 10  # neighbours that a peer's text names
_RIM = 0.07  # of the radius, between a peer and its arrows' ends
_HEADS = (7, 8, 10, 12)  # sizes of arrows' heads
_GREY = "#8a8f98"  # shows on white and on black
_ASIDE = 0.012  # how far an arrow is moved to its right, so that the one in the other direction shows

Weights = Mapping[str, Mapping[str, float | None]]
"""Receiver -> sender -> weight."""


def circle(m: Matrices, tasks: Mapping[str, Mapping[str, float]], most: int = NUMBERS) -> dict[str, Any] | None:
    """A figure with a slider over the rounds; None for more than `PEERS`, or where nobody takes from another.

    Args:
        m: Weights by receiver (rows) and sender, of each round.
        tasks: Peer -> its tasks with their weights.
        most: Coordinates in all rounds together, about; with more of them rounds are left out.
    """
    groups = _groups(m.names, tasks)
    names = [name for members in groups.values() for name in members]
    edges = {round: _edges(of) for round, of in m.rounds.items()}
    largest = max((weight for several in edges.values() for *_, weight in several), default=0.0)
    if len(names) > PEERS or largest <= 0:
        return None
    turn = 2 * math.pi / len(names)
    at = {name: (math.sin(i * turn), math.cos(i * turn)) for i, name in enumerate(names)}
    dearest = max(9 * len(several) + len(names) for several in edges.values())
    views = []
    for round in thinned(list(m.rounds), max(2, most // dearest)):
        data = _arrows(edges[round], at, largest)
        of = m.rounds[round]
        data += [{"hovertext": [_text(name, tasks, of) for name in members]} for members in groups.values()]
        views.append({"name": str(round), "data": data})
    shared = [_arrow(number, largest) for number in range(len(WIDTHS))]
    shared += [_peers(number, *group, at, len(names) <= _LABELLED) for number, group in enumerate(groups.items())]
    room = 1.25 if len(names) <= _LABELLED else 1.1
    axis = {"visible": False, "range": [-room, room], "title": {"text": ""}}
    layout = {"xaxis": {**axis, "constrain": "domain"}, "yaxis": {**axis, "scaleanchor": "x", "constrain": "domain"}}
    return {"views": views, "shared": shared, "control": "slider", "smooth": False, "layout": layout | {"height": 560}}


def _groups(names: Sequence[str], tasks: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Set of tasks -> the peers with it; the largest sets first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(", ".join(sorted(tasks[name])), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _edges(of: Weights) -> list[tuple[str, str, float]]:
    """(sender, receiver, weight) where a peer takes from another."""
    return [
        (sender, receiver, weight)
        for receiver, row in of.items()
        for sender, weight in row.items()
        if sender != receiver and weight is not None and weight > 0
    ]


def _arrows(
    edges: Sequence[tuple[str, str, float]], at: Mapping[str, tuple[float, float]], largest: float
) -> list[dict[str, Any]]:
    """One trace per width; gaps part its arrows."""
    near = 2 * math.pi / len(at)  # between two peers on the circle
    aside = min(_ASIDE, near / 10)
    made: list[dict[str, Any]] = [{"x": [], "y": [], "marker": _heads()} for _ in WIDTHS]
    for sender, receiver, weight in edges:
        if sender not in at or receiver not in at:
            continue
        (x0, y0), (x1, y1) = at[sender], at[receiver]
        dx, dy = x1 - x0, y1 - y0
        long = math.hypot(dx, dy)
        ux, uy = dx / long, dy / long
        rim, right = min(_RIM, near / 3, long / 4), (uy * aside, -ux * aside)
        number = min(len(WIDTHS) - 1, int(len(WIDTHS) * weight / largest))
        trace = made[number]
        trace["x"] += [round(x0 + ux * rim + right[0], 3), round(x1 - ux * rim + right[0], 3), None]
        trace["y"] += [round(y0 + uy * rim + right[1], 3), round(y1 - uy * rim + right[1], 3), None]
        trace["marker"]["size"] += [0, _HEADS[number], 0]
    return made


def _heads() -> dict[str, Any]:
    """Markers that are the heads of arrows; those at the beginnings of arrows get the size 0."""
    look: dict[str, Any] = {"color": _GREY, "opacity": 1, "line": {"width": 0}}
    return {"symbol": "arrow", "angleref": "previous", "size": [], **look}


def _arrow(number: int, largest: float) -> dict[str, Any]:
    low, high = (largest * (number + i) / len(WIDTHS) for i in (0, 1))
    name = f"weight {low:.3g} to {high:.3g}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "line": {"width": WIDTHS[number], "color": _GREY},
        "hoverinfo": "skip",
        "meta": {"kind": "arrows", "name": name},
    }


def _peers(
    number: int, group: str, names: Sequence[str], at: Mapping[str, tuple[float, float]], labelled: bool
) -> dict[str, Any]:
    look = {"size": 13, "color": color(number), "symbol": SYMBOLS[number // len(COLORS) % len(SYMBOLS)]}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers+text" if labelled else "markers",
        "name": escape(group, quote=False),
        "x": [round(at[name][0], 3) for name in names],
        "y": [round(at[name][1], 3) for name in names],
        "marker": look,
        "hovertemplate": "%{hovertext}<extra></extra>",
        "meta": {"kind": "peers", "name": group, "names": list(names)},
    }
    if labelled:
        trace["text"] = [escape(_cut(name), quote=False) for name in names]
        trace["textposition"] = [_side(*at[name]) for name in names]
        trace["cliponaxis"] = False
    return trace


def _cut(name: str) -> str:
    return name if len(name) <= _LABEL else name[: _LABEL - 1] + "…"


def _side(x: float, y: float) -> str:
    """Where a label stands: away from the middle."""
    if abs(x) < 0.4:
        return "top center" if y > 0 else "bottom center"
    return "middle right" if x > 0 else "middle left"


def _text(name: str, tasks: Mapping[str, Mapping[str, float]], of: Weights) -> str:
    """What a peer does in a round, in the little HTML that plotly reads."""
    lines = [f"{name}: {', '.join(tasks[name])}"]
    row = {sender: weight for sender, weight in of.get(name, {}).items() if weight is not None}
    own = row.pop(name, None)
    taken = sorted((item for item in row.items() if item[1] > 0), key=lambda item: -item[1])
    if name not in of:
        lines.append("mixed nothing in this round")
    if own is not None:
        lines.append(f"own weight {own:.3g}")
    lines += [f"takes {weight:.3g} from {sender} ({', '.join(tasks[sender])})" for sender, weight in taken[:_NAMED]]
    if len(taken) > _NAMED:
        lines.append(f"and from {len(taken) - _NAMED} more")
    return "<br>".join(escape(line, quote=False) for line in lines)
