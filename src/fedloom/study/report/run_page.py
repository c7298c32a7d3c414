"""The page of a run: its sections, and what they show as data for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fedloom.runs.reader import human_bytes
from fedloom.study.report import predictions
from fedloom.study.report.against import Against, Change
from fedloom.study.report.collect import RunReport
from fedloom.study.report.flow import diagram
from fedloom.study.report.looks import plain
from fedloom.study.report.page import (
    PageSection,
    confusion,
    fact_sheet,
    folded,
    frame,
    number,
    percent,
    plot,
    remark,
    sheet,
)
from fedloom.study.report.plots import Figure, figures_of
from fedloom.study.report.records import Matrices
from fedloom.study.report.scores import Score, row, worst_tasks

WORST = 5
"""Clients that are worse off of whom a name is given, at most."""
_NOTHING = 1e-9  # percent by which rounding alone moves a mean change away from 0


def render(report: RunReport) -> str:
    """The HTML of a run's report. Raises UserError where plotly is absent."""
    figures = figures_of(report)
    return frame("run", report.title, _sections(report, figures), _data(report), figures, _lead(report))


def _data(report: RunReport) -> dict[str, Any]:
    """What the page's tables show, for programs."""
    names = ("task", "metric", "split", "primary", "round", "model", "data", "mean", "clients", "worst")
    scores = [
        {name: getattr(s, name) for name in names}
        | {"mean": plain(s.mean), "worst": s.worst and dict(zip(("client", "value"), s.worst, strict=True))}
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


def _sections(report: RunReport, figures: Mapping[str, Figure]) -> list[PageSection]:
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
        PageSection("confusion", "Confusion", confusion(report.predictions.confusions, plots)),
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


def _lead(report: RunReport) -> str:
    """How far the run has come, and what it took."""
    facts = dict(report.facts)
    up, down = report.sent
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
    return fact_sheet(report.facts) + _method(report) + folded("Recipe", report.recipe)


def _method(report: RunReport) -> str:
    """The method's stages as boxes and its text below, folded; only the text where a run has no outline."""
    if not report.method:
        return ""
    drawn = diagram(report.outline, report.peers) if report.outline else ""
    text = folded("The same as text", report.method) if drawn else f"<pre>{escape(report.method)}</pre>\n"
    return f"<h3>Method</h3>\n{drawn}{text}"


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
    """Cosines and signs of updates, their weights, and the share that masks left of them."""
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


def _labels(figure: str) -> str:
    return f"<h3>Labels</h3>\n{figure}" if figure else ""


def _bytes(report: RunReport) -> str:
    if not report.totals:
        return ""
    rows = [(role, task, human_bytes(up), human_bytes(down)) for role, task, up, down in report.totals]
    up, down = report.sent
    rows.append(("all", "", human_bytes(up), human_bytes(down)))
    return sheet("bytes-table", ("role", "task", "sent by clients", "sent to clients"), rows, text=(1,))


def _events(report: RunReport) -> str:
    rows = [
        (h.what, h.who, str(h.times), str(h.first) if h.first == h.last else f"{h.first} to {h.last}")
        for h in report.happened
    ]
    return sheet("events-table", ("what", "client", "times", "rounds"), rows, text=(1,)) if rows else ""
