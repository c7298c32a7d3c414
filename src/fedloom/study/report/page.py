"""The page: one HTML file with plotly's script, its style and its data in it. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fedloom.extras import need
from fedloom.runs.reader import human_bytes
from fedloom.study.report import predictions
from fedloom.study.report.against import Against, Change
from fedloom.study.report.collect import GridReport, Matrices, RunReport, Score, row, worst_tasks
from fedloom.study.report.flow import diagram
from fedloom.study.report.looks import plain
from fedloom.study.report.plots import Figure, figures_of
from fedloom.study.report.worst import Worst
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.formats import fragment

MOST_ROWS = 1000
"""Lines of a table, at most."""
MOST_OPEN = 40
"""Lines of a table that stands in the page as it is; a longer one scrolls in a box of its own."""
WORST = 5
"""Clients named of those that are worse off, at most."""
_NOTHING = 1e-9  # percent that a mean change is off 0 by rounding alone
_SHORT = 20  # letters of a text that is not broken
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class PageSection:
    """A part of the page; without a body it is left out."""

    name: str
    title: str
    body: str


def render(report: RunReport | GridReport) -> str:
    """The HTML of a report. Raises UserError where plotly is absent."""
    figures = figures_of(report)
    if isinstance(report, RunReport):
        return frame("run", report.title, _run(report, figures), _run_data(report), figures, _lead(report))
    return frame("grid", report.title, _grid(report, figures), _grid_data(report), figures)


def frame(
    kind: str,
    title: str,
    sections: Sequence[PageSection],
    data: Mapping[str, Any],
    figures: Mapping[str, Figure],
    lead: str = "",
) -> str:
    """A page of these sections, with `data` for programs and the figures in it; `lead` is a line below the title.

    Raises UserError where plotly is absent.
    """
    plotly = need("plotly.offline", "report").get_plotlyjs()
    sections = [section for section in sections if section.body]
    here = files("fedloom.study.report")
    embedded = in_script({"kind": kind, "title": title, **data, "figures": figures})
    links = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(here / 'page.css').read_text('utf-8')}</style>",
            "</head>",
            f'<body class="{kind}">',
            f"<h1>{escape(title)}</h1>",
            *([f'<p class="lead">{escape(lead)}</p>'] if lead else []),
            f"<nav><ul>{links}</ul></nav>",
            "<noscript><p>The figures of this page need JavaScript; the tables do not.</p></noscript>",
            *(f'<section id="{s.name}">\n<h2>{escape(s.title)}</h2>\n{s.body}\n</section>' for s in sections),
            f'<script type="application/json" id="report-data">{embedded}</script>',
            f'<script id="plotly">{plotly}</script>',
            f'<script id="page">\n{(here / "page.js").read_text("utf-8")}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def in_script(value: Any) -> str:
    """JSON that is safe inside a script element, whatever texts are in it: no '<', '>' or '&' is left."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run_data(report: RunReport) -> dict[str, Any]:
    """What the page's tables show, for programs."""
    scores = [
        {
            "task": s.task,
            "metric": s.metric,
            "split": s.split,
            "primary": s.primary,
            "round": s.round,
            "model": s.model,
            "data": s.data,
            "mean": plain(s.mean),
            "clients": s.clients,
            "worst": None if s.worst is None else {"client": s.worst[0], "value": s.worst[1]},
        }
        for s in report.scores
    ]
    best = [
        {"task": c.task, "metric": c.metric, "split": c.split, "model": c.model, "round": c.best, "judged": c.judged}
        for c in report.curves
        if c.best is not None
    ]
    totals = [{"role": role, "task": task, "up": up, "down": down} for role, task, up, down in report.totals]
    held = {} if report.against is None else {"base": _base_data(report.against)}
    return {"about": dict(report.facts), "scores": scores, "best": best, "bytes": totals, **held}


def _base_data(held: Against) -> dict[str, Any]:
    def plainly(change: Change) -> dict[str, Any]:
        return {"value": plain(change.value), "base": plain(change.base), "percent": plain(change.percent)}

    means = [{"split": s, "task": t, "metric": m, **plainly(change)} for (s, t, m), change in held.means.items()]
    each = [
        {"task": e.row.task, "metric": e.row.metric, "split": held.split, "client": name, **plainly(change)}
        for e in held.each
        for name, change in e.clients.items()
    ]
    deltas = {split: plain(delta) for split, (delta, _) in held.deltas.items()}
    return {"about": dict(held.facts), "delta_m": deltas, "tasks": means, "clients": each}


def _grid_data(report: GridReport) -> dict[str, Any]:
    table = report.table
    lines = [
        {
            "base": line.base,
            "addon": line.addon,
            "owner": line.owner,
            "data": column.data,
            "task": column.task,
            "metric": column.metric,
            "kind": entry.kind,
            **({} if entry.estimate is None else _estimate(entry.estimate)),
        }
        for line in (table.lines if table else ())
        for column, entry in zip(table.columns if table else (), line.entries, strict=True)
    ]
    return {"about": dict(report.facts), "table": lines, "worst": [_worst_data(line) for line in report.worst]}


def _worst_data(line: Worst) -> dict[str, Any]:
    task = None if line.task is None else {"task": line.task[0].task, **_estimate(line.task[1])}
    clients = {row.task: {"clients": list(names), **_estimate(of)} for row, (of, names) in line.clients.items()}
    about = {"data": line.data, "method": line.method, "reference": line.reference}
    return {**about, "task": task, "clients": clients}


def _estimate(of: Estimate) -> dict[str, float | int | None]:
    return {"mean": plain(of.mean), "half": plain(of.half), "n": of.n}


def _run(report: RunReport, figures: Mapping[str, Figure]) -> list[PageSection]:
    def plots(*names: str) -> str:
        return "\n".join(plot(name, figures[name]) for name in names if name in figures)

    tasks = list(dict.fromkeys(c.task for c in report.curves))
    curves = "\n".join(f"<h3>{escape(task)}</h3>\n{plots(f'curves-{i}')}" for i, task in enumerate(tasks))
    matrices = {m.name: PageSection(m.name, m.title, _matrix(m, plots) + remark(m.legend)) for m in report.matrices}
    return [
        PageSection("final", "Final numbers", _final(report)),
        PageSection("base", "Against the base", _base(report.against, plots)),
        PageSection("about", "The run", _about(report)),
        PageSection("curves", "Over the rounds", curves),
        PageSection("others", "Other metrics", _others(report)),
        PageSection("federation", "Federation", _federation(report) + plots("examples") + _labels(plots("labels"))),
        PageSection("bytes", "Bytes", _bytes(report) + plots("bytes")),
        PageSection("seconds", "Time", plots("seconds")),
        PageSection("hyper-weights", "Hyper weights", plots("alpha", "beta")),
        *matrices.values(),
        PageSection("task-groups", "Do peers find those with their own tasks?", _task_groups(plots("task-groups"))),
        PageSection("diagnostics", "How updates agree", _diagnostics(report, plots)),
        PageSection("predictions", "Predictions", predictions.body(report.predictions)),
        PageSection("confusion", "Confusion", _confusion(report, plots)),
        PageSection("events", "Events and safeguards", _events(report)),
    ]


def _matrix(m: Matrices, plots: Callable[..., str]) -> str:
    """The heat map, and the graph beside it where there is one."""
    heat, graph = plots(m.name), plots(f"{m.name}-graph")
    return f'<div class="pair">{heat}{graph}</div>\n' if graph else heat


def _task_groups(plot: str) -> str:
    about = (
        "Task groups: peers with the same tasks. Clusters: average linkage on similarities as peers found them, as "
        "many as there are task groups. ARI and NMI are 1 where clusters are the task groups."
    )
    return plot and plot + remark(about)


def _grid(report: GridReport, figures: Mapping[str, Figure]) -> list[PageSection]:
    table = fragment(report.table) if report.table else ""
    drawn = (figures[f"curves-{i}"] for i in range(len(report.curves)))
    curves = "\n".join(
        f"<h3>{escape(of['views'][0]['name'])}</h3>\n{plot(f'curves-{i}', of, headed=True)}"
        for i, of in enumerate(drawn)
    )
    note = "Test data; mean over the clients with the task and over seeds, in rounds that all begun seeds measured."
    head = ("run", "status", "rounds", "sent by clients", "sent to clients", "seconds")
    cells = [
        (c.name, c.status, str(c.rounds), human_bytes(c.up), human_bytes(c.down), f"{c.seconds:.1f}")
        for c in report.cells
    ]
    return [
        PageSection("about", "The grid", fact_sheet(report.facts) + _folded("Grid file", report.grid)),
        PageSection("table", "Table", table or remark(report.problem)),
        PageSection("worst", "Worst tasks and clients", _worst(report.worst)),
        PageSection("curves", "Over the rounds", curves and remark(note) + curves),
        PageSection("predictions", "Predictions", predictions.body(report.predictions)),
        PageSection("confusion", "Confusion", _confusion(report, lambda name: plot(name, figures[name]))),
        PageSection("cells", "Runs", sheet("cells-table", head, cells) if cells else ""),
    ]


def _worst(lines: Sequence[Worst]) -> str:
    """A table a data set: the task that lost most, and the worst client of each task."""
    parts = []
    for at, data in enumerate(dict.fromkeys(line.data for line in lines)):
        mine = [line for line in lines if line.data == data]
        changed = any(line.task for line in mine)
        rows = list(dict.fromkeys(row for line in mine for row in line.clients))
        if changed or rows:
            head = [
                "method",
                *(("worst task", "change", "against") if changed else ()),
                *(f"worst client: {r}" for r in rows),
            ]
            body = []
            for line in mine:
                cells = [_with_names(*line.clients[r]) if r in line.clients else "" for r in rows]
                body.append([line.method, *(_lost(line) if changed else ()), *cells])
            title = f"<h3>{escape(data)}</h3>\n" if len({line.data for line in lines}) > 1 else ""
            texts = [i for i in range(len(head)) if i != 2 or not changed]  # names of clients need to break
            parts.append(title + sheet(f"worst-{at}", head, body, text=texts))
    about = (
        "Test data. Worst task: the one with the lowest change, each seed against the same seed; positive is better. "
        "Tasks without a number in some seed do not count. Worst client: the mean over seeds of each seed's worst "
        "client among those with the task, and who that was. "
        "± is the 95 % t-interval over seeds."
    )
    return "".join(parts) + remark(about) if parts else ""


def _lost(line: Worst) -> tuple[str, str, str]:
    if line.task is None:
        return ("", "base", "") if line.method == line.reference else ("", "", line.reference)
    row, change = line.task
    return str(row), f"{change.signed}\u00a0%", line.reference


def _with_names(estimate: Estimate, names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{estimate} ({', '.join(names[:most]) or 'all the same'}{more})"


def _lead(report: RunReport) -> str:
    """How far the run has come, and what it took."""
    facts = dict(report.facts)
    up, down = (sum(line[i] for line in report.totals) for i in (2, 3))  # type: ignore[misc]
    state = (
        facts["status"] if "round" in facts["status"] else f"{facts['status']}, {_count(int(facts['rounds']), 'round')}"
    )
    parts = [
        state,
        f"{_count(len(report.clients), 'client')}, {_count(len(report.tasks), 'task')}",
        f"seed {facts['seed']}",
        f"{human_bytes(up)} sent by clients, {human_bytes(down)} to them",
    ]
    return " · ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _about(report: RunReport) -> str:
    return fact_sheet(report.facts) + _method(report) + _folded("Recipe", report.recipe)


def _method(report: RunReport) -> str:
    """The method's stages as boxes with its text folded below, or the text alone where a run has no outline."""
    if not report.method:
        return ""
    drawn = diagram(report.outline, report.peers) if report.outline else ""
    text = _folded("The same as text", report.method) if drawn else f"<pre>{escape(report.method)}</pre>\n"
    return f"<h3>Method</h3>\n{drawn}{text}"


def fact_sheet(facts: Sequence[tuple[str, str]]) -> str:
    """A table of facts; texts are escaped."""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(text)}</td></tr>' for name, text in facts
    )
    return f'<table id="facts">\n{rows}\n</table>\n'


def _final(report: RunReport) -> str:
    """The metric that judges each task, and what else there is to say about these numbers."""
    scores = [score for score in report.scores if score.primary]
    if not scores:
        return remark("No numbers of a model that is kept were recorded yet.")
    held = report.against
    notes = "".join(map(remark, held.notes)) if held is not None else ""
    return _scores("final-table", scores, held) + _deltas(held) + notes + remark(_lowest(report.scores, held))


def _others(report: RunReport) -> str:
    scores = [score for score in report.scores if not score.primary]
    return _scores("others-table", scores, report.against) if scores else ""


def _scores(name: str, scores: Sequence[Score], held: Against | None) -> str:
    against = () if held is None else (f"base: {held.label}", "change")
    several = any(s.clients > 1 for s in scores)
    worst = any(s.worst is not None for s in scores)
    value = "mean over clients" if several else "value"
    who = ("worst client", "its number") if worst else ()
    head = ("task", "split", value, *against, "clients", *who, "model", "data", "round")
    rows = []
    for s in scores:
        change = None if held is None else held.means.get((s.split, s.task, s.metric))
        compared = (number(change.base), percent(change.percent)) if change else ("",) * len(against)
        cells: tuple[str, ...] = ()
        if worst:
            same = "all the same" if s.clients > 1 and not math.isnan(s.mean) else ""
            cells = (same, "") if s.worst is None else (s.worst[0], number(s.worst[1]))
        where = (s.model, s.data, str(s.round))
        rows.append((row(s), s.split, number(s.mean), *compared, str(s.clients), *cells, *where))
    texts = [i for i, title in enumerate(head) if title in ("worst client", "model", "data", "split")]
    equal = several and not worst
    about = "Each task's clients all have the same number: one model, measured on the same data." if equal else ""
    return sheet(name, head, rows, text=texts) + remark(about)


def _lowest(scores: Sequence[Score], held: Against | None) -> str:
    """The task that gained least on the base; without a base the worst one of each metric that judges several."""
    if held is None:
        tasks = [f"{s.metric} on {s.split}: {s.task} ({number(s.mean)})" for s in worst_tasks(scores)]
        return f"Worst task by {'; by '.join(tasks)}." if tasks else ""
    changes = {(s.task, s.metric): held.means.get((held.split, s.task, s.metric)) for s in scores if s.primary}
    known = {key: of.percent for key, of in changes.items() if of is not None and not math.isnan(of.percent)}
    if len(known) < 2:
        return ""
    task, metric = min(known, key=lambda key: known[key])
    return f"Lowest change on {held.split}: {task} ({metric}), {percent(known[task, metric])}."


def _deltas(held: Against | None) -> str:
    if held is None:
        return ""
    each = [
        f"{percent(delta)} on {split} (mean change of {_count(count, 'task')})"
        for split, (delta, count) in held.deltas.items()
    ]
    return f'<p id="delta-m">Δm against {escape(held.label)}: {escape("; ".join(each))}. Positive is better.</p>\n'


def _base(held: Against | None, plots: Callable[..., str]) -> str:
    """What the base is, and which clients are worse off than with it."""
    if held is None:
        return ""
    rows = []
    for e in held.each:
        named = [f"{name} {percent(e.clients[name].percent)}" for name in e.worse[:WORST]]
        counts = [len(e.worse), len(e.better), len(e.clients) - len(e.compared)]
        rows.append((str(e.row), str(len(e.clients)), *map(str, counts), ", ".join(named)))
    head = ("task", "clients", "worse", "better", "not defined", "worst changes")
    hurt = {name for e in held.each for name in e.worse}
    of = {name for e in held.each for name in e.clients}
    found = ""
    if held.each:
        lost = (
            f"{len(hurt)} of {len(of)} clients have a worse model than the base's for a task of theirs ({held.split})."
        )
        means = held.by_client
        if means and len(held.each) > 1:
            worse = sum(mean < -_NOTHING for mean in means.values())
            lost += f" Over all tasks of a client, {worse} of {len(means)} lost: their mean change is below 0."
        table = sheet("hurt-table", head, rows, text=(5,))
        found = f"<h3>Who was hurt</h3>\n<p>{escape(lost)}</p>\n{table}{plots('hurt')}"
    return sheet("base-table", ("the base", ""), held.facts, text=(1,)) + found


def _federation(report: RunReport) -> str:
    rows = []
    domains = any(about.get("domain") for about in report.clients.values())
    for name, about in report.clients.items():
        tasks = ", ".join(t if w == 1 else f"{t} (weight {w:g})" for t, w in about["tasks"].items())
        sizes = [str(about.get(part, "")) for part in ("train", "val")]
        rows.append((name, tasks, *((str(about.get("domain") or ""),) if domains else ()), *sizes))
    head = ("client", "tasks", *(("domain",) if domains else ()), "train examples", "validation")
    return sheet("clients-table", head, rows, text=(1, 2) if domains else (1,))


def _diagnostics(report: RunReport, plots: Callable[..., str]) -> str:
    """Cosines and signs of updates, the weights that they got, and what masks left of them."""
    parts = (
        ("Over the rounds", ("agreement",)),
        ("Cosine of two updates", ("cosine",)),
        ("Share of equal signs", ("sign",)),
        ("Weights", ("weights", "given")),
        ("Share of each update that is not zero", ("kept",)),
    )
    found = [(title, plots(*names)) for title, names in parts]
    text = "\n".join(f"<h3>{escape(title)}</h3>\n{body}" for title, body in found if body)
    return text and text + remark(report.agreement.note if report.agreement is not None else "")


def _confusion(report: RunReport | GridReport, plots: Callable[..., str]) -> str:
    """A matrix a task, and on how much it was counted."""
    found = [
        f"<div><h3>{escape(c.title)}</h3>\n{plots(f'confusion-{number}')}\n{remark(c.note)}</div>"
        for number, c in enumerate(report.predictions.confusions)
    ]
    about = "Test data, final models. A row is a true class; colours are shares of it."
    return f'{remark(about)}<div class="pair">{"".join(found)}</div>' if found else ""


def _labels(figure: str) -> str:
    return f"<h3>Labels</h3>\n{figure}" if figure else ""


def _bytes(report: RunReport) -> str:
    if not report.totals:
        return ""
    rows = [(role, task, human_bytes(up), human_bytes(down)) for role, task, up, down in report.totals]
    up, down = (sum(line[i] for line in report.totals) for i in (2, 3))  # type: ignore[misc]
    rows.append(("all", "", human_bytes(up), human_bytes(down)))
    return sheet("bytes-table", ("role", "task", "sent by clients", "sent to clients"), rows, text=(1,))


def _events(report: RunReport) -> str:
    rows = [
        (h.what, h.who, str(h.times), str(h.first) if h.first == h.last else f"{h.first} to {h.last}")
        for h in report.happened
    ]
    return sheet("events-table", ("what", "client", "times", "rounds"), rows, text=(1,)) if rows else ""


def plot(name: str, figure: Figure, headed: bool = False) -> str:
    """The place of a figure, with what chooses its view and how smooth its lines are.

    A view alone is named above it, but where a heading does that (`headed`) or a slider says which round it is.
    """
    views, controls = figure["views"], []
    sets = list(dict.fromkeys(view["set"] for view in views if "set" in view))
    if sets:
        options = "".join(f'<option value="{escape(s)}">{escape(s)}</option>' for s in sets)
        controls.append(f'<label>Layers <select class="view">{options}</select></label>')
    slider = figure["control"] == "slider"
    if slider and (sets or len(views) > 1):
        if sets:
            views = [view for view in views if view["set"] == sets[0]]
        last = len(views) - 1
        controls.append(
            f'<label>Round <input class="view" type="range" min="0" max="{last}" value="{last}">'
            f"<output>{escape(views[last]['name'])}</output></label>"
        )
    elif len(views) > 1:
        options = "".join(f'<option value="{i}">{escape(view["name"])}</option>' for i, view in enumerate(views))
        controls.append(f'<label>Show <select class="view">{options}</select></label>')
    if figure["smooth"]:
        controls.append(
            '<label>Smoothing <input class="smooth" type="range" min="0" max="0.95" step="0.05" value="0"></label>'
        )
    shown = "" if headed or sets or len(views) > 1 else f"{'Round ' if slider else ''}{views[0]['name']}"
    caption = f"<figcaption>{escape(shown)}</figcaption>" if shown else ""
    return (
        f'<figure class="plot" id="plot-{name}" data-figure="{name}">{caption}'
        f'<div class="controls">{"".join(controls)}</div><div class="canvas"></div></figure>'
    )


def sheet(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table; its first column is its label, columns in `text` are set as text, others as numbers.

    A long one scrolls, a very long one is cut.
    """
    top = "".join(
        f'<th scope="col"{"" if i == 0 or i in text else " class=number"}>{escape(cell)}</th>'
        for i, cell in enumerate(head)
    )
    body = []
    for label, *cells in rows[:MOST_ROWS]:
        each = "".join(
            f'<td class="text{_short(cell)}">{escape(cell)}</td>' if i in text else f"<td>{escape(cell)}</td>"
            for i, cell in enumerate(cells, 1)
        )
        body.append(f'<tr><th scope="row" class="label{_short(label)}">{escape(label)}</th>{each}</tr>')
    more = remark(f"{len(rows) - MOST_ROWS} more are not shown.") if len(rows) > MOST_ROWS else ""
    lines = "\n".join(["<tbody>", *body, "</tbody>"])
    wide = "wide long" if len(rows) > MOST_OPEN else "wide"
    return f'<div class="{wide}"><table id="{name}">\n<thead><tr>{top}</tr></thead>\n{lines}\n</table></div>\n{more}'


def _short(text: str) -> str:
    """The class of a cell whose text stays on one line."""
    return " short" if len(text) <= _SHORT else ""


def number(value: float) -> str:
    """As comparisons write it; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"  # noqa: RUF001


def percent(value: float) -> str:
    """A change with its sign; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:+.2f}\u00a0%"  # noqa: RUF001


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n<pre>{escape(text)}</pre></details>\n"


def remark(text: str) -> str:
    """A paragraph in small print; the text is escaped."""
    return f'<p class="note">{escape(text)}</p>\n' if text else ""
