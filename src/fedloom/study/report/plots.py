"""Figures of a report as plain plotly figures, in full precision and not too large.

A figure is {"views": [{"name", "data"}], "shared": [traces], "control": "select" or "slider", "smooth", "layout"}. One
view is drawn at a time: `shared[i]`, where there is one, updated by the view's `data[i]`, under `layout`. A view may
have an "axis", the title of its y axis, and "across", that of its x axis; {"x": 0} in its "columns" says that the
figure's column 0 is its traces' x. It may be of a "set": then a set is selected, and a slider moves in it. A figure has
a "title" where its views' names alone do not say what it shows. A trace's "meta" says what it is: {"kind": "client",
"name": ...}, or kind mean, best, band, matrix, pairs, arrows or peers. Texts that plotly draws are escaped, for it
reads some HTML; titles, names of views and those in "meta" are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedloom.federation.runs.reader import ARROWS, TaskMetric
from fedloom.study.palette import COLORS, ONE_SIDED, TWO_SIDED, color
from fedloom.study.papers.hyper_weights import HyperWeights, used
from fedloom.study.report import words
from fedloom.study.report.against import Against
from fedloom.study.report.agreement import Cells, UpdateAgreement
from fedloom.study.report.circle import circle
from fedloom.study.report.collect import GridReport, RunReport
from fedloom.study.report.looks import DASHES, LINES, NAMED, extremes, plain, tenths, thinned, thinned_names
from fedloom.study.report.predictions import ConfusionViews
from fedloom.study.report.records import Matrices, Series
from fedloom.study.report.scores import Curves

POINTS = 100
"""Points of a curve, at most."""
BUDGET = 40_000
"""Points of all curves of a page, about."""
CELLS = 20_000
"""Numbers of all matrices of a figure, about."""
SIDE = 100
"""Clients in a matrix, at most."""
NAMES = 20
"""Names in a figure of bytes, at most; the others are added up."""

_MARKERS = 30  # points up to which each is marked
_TICKS = 8  # rounds up to which each has its tick
_NUMBERS = 10  # columns up to which numbers stand in the cells of a matrix
_SHARES = 14  # the same for shares, which are short
_NEARLY = 0.005  # a share below which there is no number

Figure = dict[str, Any]
Trace = dict[str, Any]


def figures_of(report: RunReport | GridReport) -> dict[str, Figure]:
    """Name -> figure, of all that a report can draw."""
    return _of_run(report) if isinstance(report, RunReport) else _of_grid(report)


def _of_run(report: RunReport) -> dict[str, Figure]:
    made: dict[str, Figure] = {}
    if any("train" in about and len(about["tasks"]) > 1 for about in report.clients.values()):
        made["examples"] = examples(report)
    if any("labels" in about for about in report.clients.values()):
        made["labels"] = labels(report) | {"title": "Labels"}
    if report.against is not None:
        made |= hurt_of(report.against)
    tasks = list(dict.fromkeys(c.task for c in report.curves))
    # with many views, each gets fewer points
    points = max(20, min(POINTS, BUDGET // (2 * LINES * max(1, len(report.curves)))))
    for number, task in enumerate(tasks):
        of_task = curves([c for c in report.curves if c.task == task], points)
        made[f"curves-{number}"] = of_task | {"title": task}
    if report.traffic:
        ways = [
            (f"sent {'by' if way == 'up' else 'to'} clients, by {kind}", _several(_largest(names)))
            for (way, kind), names in report.traffic.items()
        ]
        made["bytes"] = _views(ways, "bytes in a round", zero=True) | {"title": "Bytes"}
    times = [
        ("seconds by phase", report.seconds),
        ("local training by client", _largest(report.trained)),
        ("simulated seconds", report.clock),
    ]
    if any(lines for _, lines in times):
        made["seconds"] = _views([(name, _several(lines)) for name, lines in times if lines], "seconds", zero=True)
    if report.quality:
        made["task-groups"] = _views([("peers and task groups", _several(report.quality))], "share or index")
    if report.weights is not None:
        made |= hyper_weights(report.weights)
    made |= {m.name: matrices(m) | {"title": m.title} for m in report.matrices if m.rounds}
    tasks_of = {name: about["tasks"] for name, about in report.clients.items()}
    for m in report.matrices:
        if m.graph and (graph := circle(m, tasks_of)):
            made[f"{m.name}-graph"] = graph | {"title": f"{m.title}, as a graph"}
    made |= confusions(report.predictions.confusions)
    return made | (agreement(report.agreement) if report.agreement is not None else {})


def agreement(a: UpdateAgreement) -> dict[str, Figure]:
    """Heat maps of each layer group, and lines over the rounds."""
    made: dict[str, Figure] = {}
    for name, title, sets, middle in (
        ("cosine", "Cosine of two updates", a.cosine, 0.0),
        ("sign", "Share of equal signs", a.sign, 0.5),
    ):
        if sets:
            made[name] = _heat_sets(sets, a.rows, "update", "update", middle) | {"title": title}
    if a.over_rounds:
        views = [(name, _several(lines)) for name, lines in a.over_rounds.items()]
        axes = ["cosine" if name.endswith("updates") else "share" for name in a.over_rounds]
        made["agreement"] = _views(views, axes, smooth=True)
    for name, title, groups, axis in (
        ("weights", "Weights", a.weights, "weight"),
        ("kept", "Share of each update that is not zero", a.kept, "share that is not zero"),
    ):
        if groups:
            most = {group: {n: rows[n] for n in thinned_names(list(rows), LINES)} for group, rows in groups.items()}
            views = [(group, _several(rows)) for group, rows in most.items()]
            made[name] = _views(views, axis, zero=True) | {"title": title}
    if a.given:
        made["given"] = _heat_sets(a.given, a.receivers, "receiver", "sender", 0.0) | {"title": "Weights of senders"}
    return made


def _heat_sets(sets: Mapping[str, Cells], names: Sequence[str], down: str, along: str, middle: float) -> Figure:
    """Heat maps with a slider over the rounds, one set at a time; colours say which side of `middle` a number is."""
    most = max(2, CELLS // max(1, len(names) ** 2 * len(sets)))
    views: list[tuple[str, Trace]] = []
    belongs: list[str] = []
    for name, rounds in sets.items():
        for round in thinned(sorted(rounds), most):
            cells = rounds[round]
            views.append((str(round), {"z": [[plain(cells.get(a, {}).get(b)) for b in names] for a in names]}))
            belongs.append(name)
    figure = heat(views, names, names, down, along, "slider")
    _two_sided(figure, middle)
    for view, name in zip(figure["views"], belongs, strict=True):
        view["set"] = name
    return figure


def _of_grid(report: GridReport) -> dict[str, Figure]:
    return {
        f"curves-{number}": _views([(f"{data}: {row}", _several(lines))], _axis(row), smooth=True)
        for number, ((data, row), lines) in enumerate(report.curves.items())
    } | confusions(report.predictions.confusions)


def curves(several: Sequence[Curves], points: int = POINTS) -> Figure:
    """The metrics of one task: clients, their mean, and the best round."""
    views = [(f"{c.metric}, {c.split}" + (f", {c.model}" if c.model else ""), _curves(c, points)) for c in several]
    return _views(views, [_axis(c) for c in several], smooth=True)


def _axis(of: Curves | TaskMetric) -> str:
    """'mErr in degrees ↓': short, for it stands upright."""
    return f"{words.metric(of.metric)} {ARROWS[of.direction]}"


def _curves(c: Curves, points: int) -> list[Trace]:
    mean = c.mean
    keep = () if c.best is None else (c.best,)
    rounds = thinned(list(mean), points, keep)
    names, traces = list(c.clients), []
    middle = "mean over clients"
    if len(names) > 1 and _equal(list(c.clients.values())):
        middle, names = f"the same for all {len(names)} clients", []
    if len(names) > LINES:
        names = extremes(c.clients, c.direction)
        traces += _band([series for name, series in c.clients.items() if name not in names], rounds)
    for number, name in enumerate(names):
        shown = [r for r in rounds if r in c.clients[name]]
        look = {"color": color(number), "dash": DASHES[number // len(COLORS) % len(DASHES)], "width": 1}
        traces.append(_line(name, shown, c.clients[name], "client", line=look, opacity=0.75))
    if len(c.clients) > 1:
        traces.append(_line(middle, rounds, mean, "mean", line={"width": 3}))
    if c.best is not None:
        marker = {"size": 11, "symbol": "star", "color": color(1)}
        best = _line(f"best round by validation: {c.best}", [c.best], mean, "best", mode="markers", marker=marker)
        traces.append(best)
    return traces


def _band(rest: Sequence[Series], rounds: Sequence[int]) -> list[Trace]:
    """The band from the 10 % to the 90 % quantile of the clients that have no line of their own."""
    low, high = tenths(rest, rounds)
    edge = {"width": 0}
    upper = _line("", list(high), high, "band", line=edge, showlegend=False, mode="lines")
    name = f"10 % to 90 % of {len(rest)} more clients"
    look = {"line": edge, "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.3)", "mode": "lines"}
    return [upper, _line(name, list(low), low, "band", **look)]


def _line(name: str, rounds: Sequence[int], series: Series, kind: str, **look: Any) -> Trace:
    mode = "lines+markers" if len(rounds) <= _MARKERS else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(name, quote=False),
        "x": list(rounds),
        "y": [plain(series[r]) for r in rounds],
        "meta": {"kind": kind, "name": name},
        **look,
    }


def _several(lines: Mapping[str, Series]) -> list[Trace]:
    """One line per name."""
    traces = []
    for number, (name, series) in enumerate(lines.items()):
        look = {"color": color(number), "dash": DASHES[number // len(COLORS) % len(DASHES)]}
        traces.append(_line(name, thinned(sorted(series), POINTS), series, "line", line=look))
    return traces


def _largest(lines: Mapping[str, Series]) -> dict[str, Series]:
    """The lines with the largest sums; the others are added up to one line."""
    ranked = sorted(lines, key=lambda name: -sum(lines[name].values()))
    if len(ranked) <= NAMES:
        return dict(lines)
    rest: dict[int, float] = {}
    for name in ranked[NAMES:]:
        for round, value in lines[name].items():
            rest[round] = rest.get(round, 0) + value
    return {name: lines[name] for name in ranked[:NAMES]} | {f"{len(ranked) - NAMES} more together": rest}


def examples(report: RunReport) -> Figure:
    """Clients by tasks: train examples of the clients that hold the task."""
    names, tasks = thinned_names(list(report.clients), SIDE), list(report.tasks)
    held = [[t in report.clients[c]["tasks"] for t in tasks] for c in names]
    counts = [report.clients[c].get("train") for c in names]
    z = [[n if there else None for there in row] for n, row in zip(counts, held, strict=True)]
    return _from_zero(heat([("train examples", {"z": z})], names, tasks, "client", "task", "select"))


def _two_sided(figure: Figure, middle: float, most: float = math.inf) -> None:
    """Give a heat map colours that say which side of `middle` a number is; they end at a distance of `most`."""
    shown = [v for view in figure["views"] for row in view["data"][0]["z"] for v in row if v is not None]
    far = min(most, max([abs(v - middle) for v in shown] + [1e-9]))
    # as in pictures of conflict: orange is against, blue is with
    figure["shared"][0] |= {"colorscale": TWO_SIDED, "zmin": middle - far, "zmax": middle + far}


def hurt_of(held: Against, name: str = "hurt") -> dict[str, Figure]:
    """The figure of who was hurt, under this name; none where the dots of the first screen show it all."""
    clients = [client for e in held.each for client in e.clients]
    return {name: hurt(held)} if len(set(clients)) < len(clients) or len(clients) > NAMED else {}


def hurt(held: Against) -> Figure:
    """Clients by tasks: the change against the base; colours say which side of 0 it is, and end at 100 %."""
    names = list(dict.fromkeys(name for e in held.each for name in e.clients))
    if len(names) > SIDE:
        lowest = {n: min((e.clients[n].percent for e in held.each if n in e.clients), key=_last_nan) for n in names}
        names = thinned_names(sorted(names, key=lambda name: _last_nan(lowest[name])), SIDE)
    z = [[plain(e.clients[n].percent) if n in e.clients else None for e in held.each] for n in names]
    name = f"change in percent against {held.label}, {held.split}; positive is better"
    figure = heat([(name, {"z": z})], names, [e.row.task for e in held.each], "client", "task", "select")
    _two_sided(figure, 0.0, 100.0)
    figure["shared"][0] |= {"hovertemplate": "client %{y}, task %{x}: %{z:+.4g} %<extra></extra>"}
    if len(held.each) <= _NUMBERS and len(names) <= 2 * _NUMBERS:
        figure["shared"][0] |= {"texttemplate": "%{z:+.1f}", "textfont": {"size": 10}}
    return figure


def _last_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def labels(report: RunReport) -> Figure:
    """Clients by classes, one view per task that has classes."""
    names = thinned_names([c for c, about in report.clients.items() if "labels" in about], SIDE)
    views = []
    for task in report.tasks:
        rows = [report.clients[c]["labels"].get(task) for c in names]
        width = max((len(row) for row in rows if row), default=0)
        if width:
            z = [[*row, *[0] * (width - len(row))] if row else [None] * width for row in rows]
            views.append((task, {"z": z, "x": [str(i) for i in range(width)]}))
    return _from_zero(heat(views, names, [], "client", "class", "select"))


def _from_zero(counts: Figure) -> Figure:
    """Colours that begin at 0."""
    for view in counts["views"]:
        known = [v for row in view["data"][0]["z"] for v in row if v is not None]
        view["data"][0] |= {"zmin": 0, "zmax": max(known, default=1) or 1}
    return counts


def matrices(m: Matrices) -> Figure:
    """A heat map with a slider over the rounds."""
    names = thinned_names(m.names, SIDE) if len(m.names) > SIDE else list(m.names)
    rounds = thinned(list(m.rounds), max(2, CELLS // max(1, len(names) ** 2)))
    views = []
    for round in rounds:
        of = m.rounds[round]
        data: Trace = {"z": [[plain(of.get(a, {}).get(b)) for b in names] for a in names]}
        if m.marked:
            marked = set(m.marked.get(round, ()))
            data["text"] = [["●" if (a, b) in marked else "" for b in names] for a in names]
        views.append((str(round), data))
    known = [v for _, data in views for row in data["z"] for v in row if v is not None]
    figure = heat(views, names, names, m.rows, m.columns, "slider")
    figure["shared"][0] |= {"zmin": min([0.0, *known]), "zmax": max([*known, 1e-9])}
    if m.marked:
        figure["shared"][0]["texttemplate"] = "%{text}"
    return figure


def confusions(several: Sequence[ConfusionViews]) -> dict[str, Figure]:
    """One heat map per task: the shares of each true class, the best told first, and the counts under the pointer."""
    made = {}
    for number, c in enumerate(several):
        views = []
        order = c.order
        for name, unsorted in c.views.items():
            counts = [[unsorted[i][j] for j in order] for i in order]
            z = [[plain(n / total) for n in row] if (total := sum(row)) else [None] * len(row) for row in counts]
            view: Trace = {"z": z, "customdata": counts}
            if len(order) <= _SHARES:  # a share that is nearly nothing needs no number
                view["text"] = [["" if v is None or v < _NEARLY else f"{v:.0%}" for v in row] for row in z]
            views.append((name, view))
        names = [c.name(i) for i in order]
        figure = heat(views, names, names, "truth", "prediction", "select")
        about = f"truth %{{y}}, prediction %{{x}}: %{{customdata}} {c.unit}, %{{z:.1%}} of this truth<extra></extra>"
        bar = {"tickformat": ".0%"}
        figure["shared"][0] |= {"zmin": 0, "zmax": 1, "hovertemplate": about, "colorbar": bar}
        if len(names) <= _SHARES:
            figure["shared"][0] |= {"texttemplate": "%{text}", "textfont": {"size": 10}}
        made[f"confusion-{number}"] = figure | {"title": f"Confusion of {c.title}"}
    return made


def heat(
    views: Sequence[tuple[str, Trace]], rows: Sequence[str], columns: Sequence[str], down: str, along: str, control: str
) -> Figure:
    """Heat maps of rows by columns. A view is a name and what its trace has beside the shared one.

    `down` and `along` say what a row and a column stand for.
    """
    trace: Trace = {
        "type": "heatmap",
        "x": [escape(name, quote=False) for name in columns],
        "y": [escape(name, quote=False) for name in rows],
        "colorscale": ONE_SIDED,
        "hoverongaps": False,
        "hovertemplate": f"{down} %{{y}}, {along} %{{x}}: %{{z}}<extra></extra>",
        "meta": {"kind": "matrix", "rows": list(rows), "columns": list(columns)},
    }
    # category: names may look like numbers; reversed: the first row on top
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "title": {"text": along}, "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "title": {"text": down}, "showgrid": False},
        "height": min(1200, 220 + 18 * max(8, len(rows))),
    }
    if rows and list(rows) == list(columns):
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
        layout["xaxis"] |= {"constrain": "domain"}
    found = [{"name": name, "data": [data]} for name, data in views]
    return {"views": found, "shared": [trace], "control": control, "smooth": False, "layout": layout}


def hyper_weights(weights: HyperWeights) -> dict[str, Figure]:
    """The weights as they were used: alpha of each client, beta of each decoder and layer."""
    alpha = {client: {r: used(v) for r, v in points} for client, points in weights.alpha.items()}
    beta = {
        " ".join((*decoder, layer)).strip(): {r: used(v) for r, v in points}
        for decoder, layers in weights.beta.items()
        for layer, points in layers.items()
    }
    made = {}
    for name, title, lines in (("alpha", "alpha of the encoders", alpha), ("beta", "beta of the decoders", beta)):
        if lines:
            kept = thinned_names(list(lines), LINES)
            made[name] = _views([(title, _several({name: lines[name] for name in kept}))], "weight as used")
    return made


def _equal(several: Sequence[Series]) -> bool:
    """Whether all have the same numbers, in the same rounds."""
    first, *others = ({round: plain(value) for round, value in series.items()} for series in several)
    return all(other == first for other in others)


def _views(
    views: Sequence[tuple[str, list[Trace]]], axis: str | Sequence[str], smooth: bool = False, zero: bool = False
) -> Figure:
    """Lines over the rounds; `axis` names what they show, in all views or in each. With `zero` the axis begins at 0."""
    axes = [axis] * len(views) if isinstance(axis, str) else axis
    rounds = [round for _, data in views for trace in data for round in trace["x"]]
    few = rounds and max(rounds) - min(rounds) <= _TICKS
    layout = {
        # one tick per round, for there is nothing between two rounds
        "xaxis": {"title": {"text": "round"}, "tickformat": "d", **({"dtick": 1} if few else {})},
        "yaxis": {
            "title": {"text": escape(axes[0] if axes else "", quote=False)},
            **({"rangemode": "tozero"} if zero else {}),
        },
        "height": 360,
    }
    found = [
        {"name": name, "data": data, "axis": escape(of, quote=False)}
        for (name, data), of in zip(views, axes, strict=True)
    ]
    return {"views": found, "shared": [], "control": "select", "smooth": smooth, "layout": layout}
