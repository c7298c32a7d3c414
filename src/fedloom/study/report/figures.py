"""The figures of the pages of runs and grids: charts of what `collect` found, not too large, and the same as files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.disclosure import hidden
from fedloom.core.errors import UserError, writing
from fedloom.core.grouping import grouped, nested
from fedloom.federation.runs.reader import ARROWS, TaskMetric
from fedloom.federation.runs.recorded import plainly
from fedloom.study import charts
from fedloom.study.charts import Chart, tenths, thinned
from fedloom.study.figures import of_ranks
from fedloom.study.output import Records
from fedloom.study.papers import HYPER, HyperWeights, used, weights_of
from fedloom.study.report import records, words
from fedloom.study.report.against import Against, Method, by_gain
from fedloom.study.report.collect import GridReport, RunReport
from fedloom.study.report.predictions import ConfusionViews
from fedloom.study.report.records import IN_CONFLICT, Cells, Curves, Matrices, Series, UpdateAgreement, cosines, primary

POINTS = 100
"""Points of a curve, at most."""
BUDGET = 40_000
"""Points of all curves of a page, about."""
LINES = 8
"""Lines of clients in a figure, at most; of more, the best and the worst are drawn, and a band for the others."""
CELLS = 8_000
"""Numbers of all matrices of a figure, about."""
SIDE = 100
"""Clients in a matrix, at most."""
NAMES = 20
"""Names in a figure of bytes, at most; the others are added up."""
SMALL = 24
"""Clients in the small map of conflict, at most."""
DOTS = 250
"""Dots at most, evenly spaced in their order."""
PEERS = 60
"""Peers of a graph, at most; with more nothing could be seen in it."""
CAPTIONS = "captions.txt"
"""The file of captions beside the figures."""

_NEARLY = 0.005  # a share below which there is no number
Lines = Mapping[str, Series]
"""Name -> its line over the rounds."""


@dataclass(frozen=True)
class View:
    """One chart of a figure with its name; views of one `group` are its rounds."""

    name: str
    chart: Chart
    group: str = ""


@dataclass(frozen=True)
class Figure:
    """Charts of which a page shows one at a time."""

    title: str
    views: Sequence[View]
    is_slider: bool = False
    """True if a slider moves in the views of a group, and groups are selected; otherwise views are."""

    @property
    def groups(self) -> list[str]:
        """Return the groups of the views."""
        return list(dict.fromkeys(view.group for view in self.views if view.group))

    @property
    def first(self) -> list[View]:
        """Return the views of the group that is shown first."""
        return [view for view in self.views if view.group == self.views[0].group]


def figures_of(report: RunReport | GridReport) -> dict[str, Figure]:
    """Return all that a report can draw, by name."""
    return dict(_of_run(report) if isinstance(report, RunReport) else _of_grid(report))


def _of_run(report: RunReport) -> Iterator[tuple[str, Figure]]:
    labels = [about["labels"] for about in report.clients.values() if "labels" in about]
    if any(len(of) > 1 for of in labels):
        yield "examples", _examples(report)
    if any(len(counts) > 1 for of in labels for counts in of.values()):
        yield "labels", _labels(report)
    yield from against_of(report)
    # with many views, each gets fewer points
    points = max(20, min(POINTS, BUDGET // (2 * LINES * max(1, len(report.curves)))))
    for number, task in enumerate(dict.fromkeys(c.task for c in report.curves)):
        yield f"curves-{number}", curves(task, [c for c in report.curves if c.task == task], points)
    run = report.run
    if traffic := records.traffic(run):
        ways = {
            f"sent {'by' if way == 'up' else 'to'} clients, by {kind}": _largest(names)
            for (way, kind), names in traffic.items()
        }
        yield "bytes", over_rounds("Bytes", ways, "bytes per round", zero=True)
    times: dict[str, Lines] = {
        "seconds by phase": records.timed(run),
        "local training by client": _largest(records.timed(run, "seconds_of")),
        "simulated seconds": records.clock(run),
    }
    if any(times.values()):
        yield "seconds", over_rounds("", times, "seconds", zero=True)
    with suppress(UserError):  # without scikit-learn the page leaves this out
        if quality := records.quality(run):
            yield "task-groups", over_rounds("", {"peers and task groups": quality}, "share or index")
    if any(run.records(HYPER)):
        yield from _hyper_weights(weights_of(run))
    tasks = {name: about["tasks"] for name, about in report.clients.items()}
    for m in records.matrices(run):
        if m.rounds:
            yield m.name, matrices(m)
        if m.graph and (graph := circle(m, tasks)):
            yield f"{m.name}-graph", graph
    yield from _confusions(report.predictions.confusions)
    if report.agreement is not None:
        yield from _agreement(report.agreement)


def _of_grid(report: GridReport) -> Iterator[tuple[str, Figure]]:
    if report.ranks is not None:
        yield "ranks", Figure("Ranks", [View("mean ranks", of_ranks(report.ranks)["concat"][0])])
    for methods in list(report.methods.values())[:1]:
        yield from compared(methods, report.palette)
    for number, ((data, row), several) in enumerate(report.curves.items()):
        last = max((max(of, default=0) for of in several.values()), default=0)
        # without those that train for no round, as `constant`, where there are others
        trained = {name: of for name, of in several.items() if last <= 1 or max(of, default=0) > 1}
        name = f"{data}: {row}" if len(report.data) > 1 else str(row)
        yield f"curves-{number}", over_rounds("", {name: trained}, axis(row), palette=report.palette)
    yield from _confusions(report.predictions.confusions)


def compared(methods: Sequence[Method], palette: Sequence[str], at: int = 0) -> Iterator[tuple[str, Figure]]:
    """Draw the methods of each data set compared with the page's `at`-th base: gains, by tasks, and costs."""
    for place, (data, mine) in enumerate(grouped((m.data, m) for m in methods).items()):
        name, ranked = f"{at}-{place}", by_gain(mine)
        # the constant prediction is so far from all methods that nothing else could be seen
        deltas = {m.label: m.delta for m in ranked if m.delta is not None and m.label != "constant"}
        if not deltas:
            continue
        ends = {n: (of.mean, of.mean - of.half, of.mean + of.half) for n, of in deltas.items()}
        small = {m.label: m.seeds for m in ranked if len(m.seeds) > 1}
        texts = {n: words.change(of.mean) for n, of in deltas.items()}
        chart = charts.intervals(ends, "Δ %", small=small, texts=texts, palette=palette)
        yield f"{name}-gains", Figure(f"Gains on {data}", [View("Δ %", chart)])
        tasks = list(dict.fromkeys(column for m in ranked for column in m.changes))
        rows = {m.label: {c.task: of.mean for c, of in m.changes.items()} for m in ranked if m.label in deltas}
        most = max((abs(v) for m in ranked if m.is_method for v in rows.get(m.label, {}).values()), default=1.0) or 1.0
        chart = charts.heat(
            rows, [c.task for c in tasks], value="change, %", low=-most, high=most, middle=0.0,
            spoken="+.3~g", numbers="+.2g",
        )  # fmt: skip
        yield f"{name}-tasks", Figure(f"Changes on {data}", [View("methods by tasks", chart)])
        gains = {
            m.label: deltas[m.label].mean if m.label in deltas else 0.0
            for m in mine
            if m.label in deltas or (m.delta is None and m.label == m.reference)
        }
        for cost, x, spoken in (("sent", "bytes from and to clients", ".2~s"), ("seconds", "seconds per run", "~s")):
            if any(getattr(m, cost) for m in mine if m.label in gains):
                points = [
                    {"name": m.label, "x": getattr(m, cost), "y": gains[m.label]} for m in mine if m.label in gains
                ]
                chart = charts.scatter(points, x, "Δ %", labels=True, zero=True, spoken=spoken, palette=palette)
                kind = "bytes" if cost == "sent" else "seconds"
                yield f"{name}-{kind}", Figure(f"Gains on {data}", [View(f"Δ % by {kind}", chart)])


def over_rounds(
    title: str, views: Mapping[str, Lines], y: str | Sequence[str], zero: bool = False, palette: Sequence[str] = ()
) -> Figure:
    """Draw lines over the rounds, view by view; `y` is what they show, in all views or in each."""
    axes = [y] * len(views) if isinstance(y, str) else y
    panels = []
    for (name, lines), axis in zip(views.items(), axes, strict=True):
        thin = {n: _thin(of) for n, of in lines.items()}
        panels += [View(name, charts.lines(thin, "round", axis, zero=zero, palette=palette))] if lines else []
    return Figure(title, panels)


def _thin(series: Series, most: int = POINTS) -> Series:
    return {r: series[r] for r in thinned(sorted(series), most)}


def axis(of: Curves | TaskMetric) -> str:
    """Return 'mErr in degrees ↓': short, because it stands upright."""
    unit = of.unit if isinstance(of, Curves) else ""
    return f"{words.metric(of.metric, unit)} {ARROWS[of.direction]}"


def curves(task: str, several: Sequence[Curves], points: int = POINTS) -> Figure:
    """Draw the metrics of one task: clients, their mean, and the best round."""
    return Figure(
        task,
        [View(f"{c.metric}, {c.split}" + (f", {c.model}" if c.model else ""), curve(c, most=points)) for c in several],
    )


def curve(c: Curves, base: Mapping[str, Series] = {}, most: int = POINTS) -> Chart:
    """Draw one metric of one task: clients, their mean, the best round, and dashed lines of baselines."""
    rounds = thinned(list(c.mean), most, () if c.best is None else (c.best,))
    bands, middle = dict[str, Any](), "mean over clients"
    shown = {name: series for name, series in c.clients.items() if name not in c.small}
    first = next(iter(shown.values()), {})
    if len(shown) > 1 and all(plainly(of) == plainly(first) for of in shown.values()):
        middle, shown = f"the same for all {len(shown)} clients", {}
    if len(shown) > LINES:
        ends = extremes(shown, c.direction)
        rest = [of for name, of in shown.items() if name not in ends]
        bands = {f"10 % to 90 % of {len(rest)} more clients": tenths(rest, rounds)}
        shown = {name: shown[name] for name in ends}
    lines: dict[str, Series] = {name: {r: of[r] for r in rounds if r in of} for name, of in shown.items()}
    if len(c.clients) > 1:
        lines[middle] = {r: c.mean[r] for r in rounds}
    lines |= {name: _thin(of, most) for name, of in base.items()}
    stars = {} if c.best is None else {f"best round by validation: {c.best}": {c.best: c.mean[c.best]}}
    return charts.lines(lines, "round", axis(c), bands=bands, strong=[middle], dashed=list(base), stars=stars)


def extremes(lines: Lines, direction: str) -> list[str]:
    """Return the names of the lines with the best and the worst last number."""
    last = {name: known[-1] for name, of in lines.items() if (known := [of[r] for r in sorted(of) if of[r] == of[r]])}
    ranked = sorted(last, key=lambda name: last[name], reverse=direction == "max")
    return list(dict.fromkeys([*ranked[:1], *ranked[-1:]]))


def _largest(lines: Lines) -> dict[str, Series]:
    """Return the lines with the largest sums; the others are added up to one line."""
    ranked = sorted(lines, key=lambda name: -sum(lines[name].values()))
    if len(ranked) <= NAMES:
        return dict(lines)
    rest: dict[int, float] = {}
    for name in ranked[NAMES:]:
        for round, value in lines[name].items():
            rest[round] = rest.get(round, 0) + value
    return {name: lines[name] for name in ranked[:NAMES]} | {f"{len(ranked) - NAMES} more together": rest}


def _rounds(
    title: str, several: Mapping[str, Cells], names: Sequence[str], down: str, along: str, **look: Any
) -> Figure:
    """Draw heat maps with a slider over the rounds, group by group, with the same colours in all of them."""
    names = thinned(list(names), SIDE)
    most = max(2, CELLS // max(1, len(names) ** 2 * len(several)))
    numbers = [
        v for by in several.values() for rows in by.values() for of in rows.values() for v in of.values()
        if v is not None and math.isfinite(v)
    ]  # fmt: skip
    marked = look.pop("marked", {})
    low, high = min([*numbers, *look.pop("least", ())], default=0.0), max([*numbers, 1e-9])
    views = []
    for group, rounds in several.items():
        for round in thinned(sorted(rounds), most):
            cells = {a: {b: rounds[round].get(a, {}).get(b) for b in names} for a in names}
            look["texts"] = dict.fromkeys(marked.get(round, ()), "●") if marked else None
            chart = charts.heat(cells, names, down=down, along=along, low=low, high=high, **look)
            views.append(View(str(round), chart, group))
    return Figure(title, views, is_slider=True)


def matrices(m: Matrices) -> Figure:
    """Draw the heat map of each round; what was chosen is marked."""
    return _rounds(m.title, {"": m.rounds}, m.names, m.rows, m.columns, least=(0.0,), marked=m.marked)


def _agreement(a: UpdateAgreement) -> Iterator[tuple[str, Figure]]:
    """Draw heat maps of each layer group, and lines over the rounds."""
    lines = a.over_rounds.get(IN_CONFLICT, {})
    if any(share > 0 for series in lines.values() for share in series.values()):
        rounds = thinned(sorted({r for series in lines.values() for r in series}), POINTS)
        colors = (charts.PAPER, charts.COLORS[1])
        value = "share of pairs in conflict"
        chart = charts.heat(lines, rounds, along="round", value=value, low=0, high=1, colors=colors)
        yield "layers", Figure("", [View("Layers over the rounds", chart)])
    by_layer = cosines(a)
    names = thinned(sorted({name for pair in by_layer for name in pair}), SMALL)
    if len(names) > 1:
        cells = {x: {y: by_layer.get((x, y), by_layer.get((y, x))) for y in names} for x in names}
        chart = charts.heat(cells, names, value="mean cosine of updates", middle=0.0)
        yield "clients", Figure("", [View("Clients by clients", chart)])
    if a.cosine:
        yield "cosine", _rounds("Cosine of two updates", a.cosine, a.rows, "update", "update", middle=0.0)
    if a.sign:
        yield "sign", _rounds("Share of equal signs", a.sign, a.rows, "update", "update", middle=0.5)
    if a.over_rounds:
        axes = ["cosine" if name.endswith("updates") else "share" for name in a.over_rounds]
        yield "agreement", over_rounds("", a.over_rounds, axes)
    for name, title, groups, y in (
        ("weights", "Weights", a.weights, "weight"),
        ("kept", "Share of each update that is not zero", a.kept, "share that is not zero"),
    ):
        if groups:
            most = {group: {n: rows[n] for n in thinned(list(rows), LINES)} for group, rows in groups.items()}
            yield name, over_rounds(title, most, y, zero=True)
    if a.given:
        yield "given", _rounds("Weights of senders", a.given, a.receivers, "receiver", "sender", middle=0.0)


def _examples(report: RunReport) -> Figure:
    """Draw clients by tasks: the examples for training and validation with a label of each task."""
    cells: dict[str, dict[str, float | None]] = {}
    for name in thinned([c for c, about in report.clients.items() if "labels" in about], SIDE):
        counts = {task: (sum(of), _unlabelled(report, name, of)) for task, of in report.clients[name]["labels"].items()}
        cells[name] = {task: None if any(hidden(both, report.minimum)) else both[0] for task, both in counts.items()}
    value = "examples with a label"
    chart = charts.heat(cells, list(report.run.info["tasks"]), down="client", along="task", value=value, low=0)
    return Figure("", [View(f"{value}, training and validation", chart)])


def _unlabelled(report: RunReport, client: str, counts: Sequence[int]) -> int:
    """Return how many of a client's examples for training and validation have none of the labels that were counted."""
    about = report.clients[client]
    return max(0, about.get("train", 0) + about.get("val", 0) - sum(counts))


def _labels(report: RunReport) -> Figure:
    """Draw clients by classes, one view per task that has classes; of a table without counts of few rows."""
    counted = [c for c, about in report.clients.items() if any(len(of) > 1 for of in about.get("labels", {}).values())]
    names = thinned(counted, SIDE)
    views = []
    for task in report.run.info["tasks"]:
        rows = {name: report.clients[name]["labels"].get(task) or () for name in names}
        if (width := max(map(len, rows.values()), default=0)) > 1:
            cells = {n: dict(enumerate([*of, *[0] * (width - len(of))] if of else ())) for n, of in rows.items()}
            for n, of in cells.items():
                hide = hidden([*of.values(), _unlabelled(report, n, rows[n])], report.minimum)
                of.update({label: None for label, hid in zip(of, hide, strict=False) if hid})
            chart = charts.heat(cells, range(width), down="client", along="class", value="examples", low=0)
            views.append(View(task, chart))
    return Figure("Labels", views)


def against_of(report: RunReport, end: str = "") -> Iterator[tuple[str, Figure]]:
    """Draw the change of each client and each task over the rounds against the base; names have this end."""
    base = report.against
    changes = {} if base is None else base.delta_of
    if base is not None and changes:
        ranked = sorted(changes, key=lambda name: (-changes[name], name))
        several = {n: (changes[n], min(base.by_client[n]), max(base.by_client[n])) for n in thinned(ranked, DOTS)}
        texts = {name: words.change(of) for name, (of, *_) in several.items()}
        chart = charts.intervals(several, "change, %", texts=texts)
        yield f"gains{end}", Figure("Gains", [View(f"change of each client against {base.label}", chart)])
    judged = primary(report.curves)
    for number, task in enumerate(dict.fromkeys(c.task for c in report.curves)):
        if task in judged:
            label, known = ("constant", report.constant_lines) if base is None else (base.label, base.over_rounds)
            lines = {label: known[task]} if known.get(task) else {}
            name = f"{task}: {words.axis(judged[task].metric, judged[task].direction, judged[task].unit)}"
            yield f"panel-{number}{end}", Figure("", [View(name, curve(judged[task], lines))])
    if base is not None and (changed := _worse(base)) is not None:
        yield f"worse{end}", changed


def _worse(base: Against) -> Figure | None:
    """Draw clients by tasks: the change against the base; None where the dots of the first screen show it all."""
    rows = nested((client, e.row.task, of.percent) for e in base.each for client, of in e.clients.items())
    if sum(map(len, rows.values())) == len(rows) <= 40:
        return None
    lowest = {client: min((v for v in of.values() if v == v), default=math.inf) for client, of in rows.items()}
    names = thinned(sorted(lowest, key=lambda client: lowest[client]), SIDE) if len(lowest) > SIDE else list(lowest)
    cells = {name: rows[name] for name in names}
    far = min(100.0, max((abs(v) for of in cells.values() for v in of.values() if math.isfinite(v)), default=1.0))
    chart = charts.heat(
        cells, [e.row.task for e in base.each], down="client", along="task", value="change, %",
        low=-far, high=far, middle=0.0, spoken="+.4~g", numbers="+.1f",
    )  # fmt: skip
    about = f"change in percent against {base.label}, {base.split}; positive is better"
    return Figure("", [View(about, chart)])


def _confusions(several: Sequence[ConfusionViews]) -> Iterator[tuple[str, Figure]]:
    """Draw one heat map per task: the shares of each true class, the best recognised first."""
    for number, c in enumerate(several):
        names = [c.name(i) for i in c.order]
        views = []
        for place, (name, counts) in enumerate(c.views.items()):
            cells: dict[str, dict[str, float | None]] = {}
            texts: dict[tuple[str, str], str] = {}
            notes: dict[tuple[str, str], str] = {}
            for i in c.order:
                total, hide = sum(counts[i]), hidden(counts[i], c.minimum)
                few = total < max(c.minimum, 1) or (place > 0 and i in c.summed)
                shares = {c.name(j): None if few or hide[j] else counts[i][j] / total for j in c.order}
                cells[c.name(i)] = shares
                notes |= {(c.name(i), c.name(j)): f"{counts[i][j]} of {total} {c.unit}" for j in c.order}
                texts |= {(c.name(i), j): f"{v:.0%}" for j, v in shares.items() if v is not None and v >= _NEARLY}
            chart = charts.heat(
                cells, names, down="truth", along="prediction", value="share of the true class", low=0, high=1,
                spoken=".1%", notes=notes, texts=texts if len(names) <= 14 else None,
            )  # fmt: skip
            views.append(View(name, chart))
        yield f"confusion-{number}", Figure(f"Confusion of {c.title}", views)


def _hyper_weights(weights: HyperWeights) -> Iterator[tuple[str, Figure]]:
    """Draw the weights as they were used: alpha of each client, beta of each decoder and layer."""
    beta = {
        " ".join((*decoder, layer)).strip(): points
        for decoder, layers in weights.beta.items()
        for layer, points in layers.items()
    }
    for name, title, several in (
        ("alpha", "alpha of the encoders", weights.alpha),
        ("beta", "beta of the decoders", beta),
    ):
        if several:
            lines = {n: {r: used(v) for r, v in several[n].items()} for n in thinned(list(several), LINES)}
            yield name, over_rounds("", {title: lines}, "weight as used")


def circle(m: Matrices, tasks: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """Draw peers on a circle, with lines from senders to receivers; None for more than `PEERS` or without a line."""
    sets = {name: ", ".join(sorted(tasks[name])) for name in m.names}
    names = sorted(m.names, key=lambda name: (-list(sets.values()).count(sets[name]), sets[name]))
    edges = {
        round: [(a, b, w) for b, row in of.items() for a, w in row.items() if a != b and w and w > 0 and a in sets]
        for round, of in m.rounds.items()
    }
    largest = max((w for several in edges.values() for *_, w in several), default=0.0)
    if len(names) > PEERS or largest <= 0:
        return None
    turn = 2 * math.pi / len(names)
    at = {name: (math.sin(i * turn), math.cos(i * turn)) for i, name in enumerate(names)}
    peers = [{"name": name, "x": x, "y": y, "tasks": sets[name]} for name, (x, y) in at.items()]
    most = max(2, CELLS // max(1, *map(len, edges.values())))
    views = []
    for round in thinned(list(m.rounds), most):
        drawn = charts.scatter(peers, "", "", labels=len(names) <= 24, color_by="tasks", axes=False, size=90)
        rows = []
        for a, b, weight in edges[round]:
            (x0, y0), (x1, y1) = at[a], at[b]
            near = (x1 - 0.12 * (x1 - x0), y1 - 0.12 * (y1 - y0))
            about = {"name": f"{b} takes from {a}", "weight": weight}
            middle = (x0 + 0.75 * (x1 - x0), y0 + 0.75 * (y1 - y0))
            rows += [
                about | {"x": x0, "y": y0, "x2": near[0], "y2": near[1], "share": 0.35},
                about | {"x": middle[0], "y": middle[1], "x2": near[0], "y2": near[1], "share": 1.0},
            ]
        width = {"scale": {"domain": [0, largest], "range": [0.4, 4]}, "legend": None}
        arrows = {
            "data": {"values": rows},
            "mark": {"type": "rule", "color": charts.SOFT},
            "encoding": {
                "x2": {"field": "x2"},
                "y2": {"field": "y2"},
                "strokeWidth": {"field": "weight", "type": "quantitative", **width},
                "opacity": {"field": "share", "type": "quantitative", "scale": None, "legend": None},
                "tooltip": [{"field": "name"}, {"field": "weight"}],
            },
        }
        for axis, far in (("x", 1.6), ("y", 1.1)):  # names stand at the right
            drawn["encoding"][axis]["scale"] = {"domain": [-1.1, far]}
        views.append(
            View(str(round), {**drawn, "layer": [arrows, *drawn["layer"]], "height": 380, "usermeta": {"widest": 520}})
        )
    return Figure(f"{m.title}, as a graph", views, is_slider=True)


def save(figures: Mapping[str, Figure], folders: Mapping[str, Path], about: str = "") -> list[Path]:
    """Write every figure; `folders` is "png", "svg", "pdf" or "csv" (the numbers behind it) -> folder.

    A figure whose views are selected gives a file per view, one with a slider its last round. In each folder is a file
    of captions too, which end with `about`. Returns the files. Raises UserError.
    """
    images = dict(_images(figures))
    written = []
    for kind, folder in folders.items():
        file = folder / CAPTIONS
        with writing(file):
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{stem}: {title}; {chart['description']}. {about}\n" for stem, (title, chart) in images.items()]
            file.write_text("".join(lines), encoding="utf-8", errors="replace")
        written.append(file)
        for stem, (title, chart) in images.items():
            file = folder / f"{stem}.{kind}"
            if kind == "csv":
                rows = charts.rows_of(chart)
                head = tuple(dict.fromkeys(key for row in rows for key in row if key not in ("light", "text")))
                with writing(file, kind):
                    file.write_text(
                        Records(head, [tuple(row.get(key) for key in head) for row in rows]).to_csv(), encoding="utf-8"
                    )
            else:
                charts.save(chart | {"title": charts.wrapped(title)}, file)
            written.append(file)
    return written


def _images(figures: Mapping[str, Figure]) -> Iterator[tuple[str, tuple[str, Chart]]]:
    """Yield (file name without its ending, (title, chart)) of what is drawn; no two names are alike."""
    taken: set[str] = set()
    for name, figure in figures.items():
        last = {view.group: view for view in figure.views} if figure.is_slider else None
        for view in figure.views if last is None else last.values():
            parts = (view.name,) if last is None else (view.group, f"round {view.name}")
            title = ", ".join(part for part in (figure.title or (name if last else ""), *parts) if part)
            stem = once = "-".join(re.findall(r"\w+", title)).encode()[:120].decode(errors="ignore") or name
            number = 1
            while stem.casefold() in taken:  # some file systems ignore capital letters
                number += 1
                stem = f"{once}-{number}"
            taken.add(stem.casefold())
            yield stem, (title, view.chart)
