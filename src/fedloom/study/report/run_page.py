"""The page of a run: the tables below its first screen, and what it shows as data for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.federation.runs.reader import human_bytes
from fedloom.study.charts import plain
from fedloom.study.report import glance, page, words
from fedloom.study.report.against import Against, Change
from fedloom.study.report.collect import RunReport
from fedloom.study.report.figures import against_of, figures_of
from fedloom.study.report.glance import Glance
from fedloom.study.report.page import Table
from fedloom.study.report.scores import Score, row, worst_tasks
from fedloom.study.report.words import number, percent

WORST = 5
"""Clients that are worse off of whom a name is given, at most."""


@dataclass(frozen=True)
class View:
    """What a page says of a run held against one base, or against nothing."""

    base: Against | None
    name: str
    glance: Glance
    final: Table | None
    others: Table | None
    deltas: str
    lowest: str
    about: Table | None
    hurt: Table | None
    lost: Sequence[str]
    end: str
    """The end of the names of its figures and tables; a page may have none of a name."""


def render(report: RunReport) -> str:
    """The HTML of a run's report. Raises UserError where Jinja2 or vl-convert is absent."""
    views = [_view(report, 0)]
    figures = figures_of(report)
    for at, other in enumerate(report.others, 1):
        against = replace(report, against=other, base_found=False)
        views.append(_view(against, at))
        figures |= dict(against_of(against, views[at].end))
    return page.render(
        "run",
        report.title,
        _data(report),
        figures,
        report=report,
        lead=_lead(report),
        views=views,
        conflict=glance.conflict_of(report),
        equal=_is_equal([s for s in report.scores if s.primary]),
        federation=_federation(report),
        sent=_bytes(report),
        events=_events(report),
    )


def _view(report: RunReport, at: int) -> View:
    """The run as it is held against the report's base, the page's `at`-th."""
    held = report.against
    own, others = ([s for s in report.scores if s.primary is judging] for judging in (True, False))
    end = f"-{at}" if at else ""  # names of tables are the page's own
    return View(
        held,
        "nothing" if held is None else held.label,
        glance.of_run(report),
        _scores(f"final-table{end}", own, held) if own else None,
        _scores(f"others-table{end}", others, held) if others else None,
        "" if held is None else _deltas(held),
        _lowest(report.scores, held),
        None if held is None else Table(f"base-table{end}", ("the base", ""), held.facts, (1,)),
        None if held is None or not held.each else _hurt(f"hurt-table{end}", held),
        () if held is None else _lost(held),
        end,
    )


def _data(report: RunReport) -> dict[str, Any]:
    """What the page's tables show, for programs."""
    names = ("task", "metric", "split", "primary", "round", "model", "data", "mean", "clients", "worst")
    scores = [
        {name: getattr(s, name) for name in names}
        | {"mean": plain(s.mean), "worst": s.worst and {"client": s.worst[0], "value": plain(s.worst[1])}}
        for s in report.scores
    ]
    best = [
        {"task": c.task, "metric": c.metric, "split": c.split, "model": c.model, "round": c.best}
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


def _lead(report: RunReport) -> str:
    """How far the run has come, and what it took."""
    facts = dict(report.facts)
    up, down = report.sent
    state = facts["status"]
    parts = [
        state if "round" in state else f"{state}, {words.count(int(facts['rounds']), 'round')}",
        f"{words.count(len(report.clients), 'client')}, {words.count(len(report.tasks), 'task')}",
        f"seed {facts['seed']}",
        f"{human_bytes(up)} sent by clients, {human_bytes(down)} to them",
    ]
    return " · ".join(parts)


def _is_equal(scores: Sequence[Score]) -> bool:
    """Whether the clients of each task have the same number."""
    return any(s.clients > 1 for s in scores) and all(s.worst is None for s in scores)


def _scores(name: str, scores: Sequence[Score], held: Against | None) -> Table:
    against = () if held is None else (f"base: {held.label}", "change")
    worst = any(s.worst is not None for s in scores)
    value = "mean over clients" if any(s.clients > 1 for s in scores) else "value"
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
    return Table(name, head, rows, texts)


def _lowest(scores: Sequence[Score], held: Against | None) -> str:
    """The task that gained least on the base; without a base the worst one of each metric that judges several."""
    if held is None:
        return words.worst_tasks([(s.metric, s.split, s.task, number(s.mean)) for s in worst_tasks(scores)])
    changes = {(s.task, s.metric): held.means.get((held.split, s.task, s.metric)) for s in scores if s.primary}
    return words.lowest(
        {key: of.percent for key, of in changes.items() if of is not None and not math.isnan(of.percent)}, held.split
    )


def _deltas(held: Against) -> str:
    each = [(percent(delta), split, words.count(count, "task")) for split, (delta, count) in held.deltas.items()]
    return words.deltas(held.label, each)


def _hurt(name: str, held: Against) -> Table:
    """Which clients are worse off than with the base."""
    rows = []
    for e in held.each:
        named = [f"{name} {percent(e.clients[name].percent)}" for name in e.worse[:WORST]]
        counts = [len(e.worse), len(e.better), len(e.clients) - len(e.compared)]
        rows.append((str(e.row), str(len(e.clients)), *map(str, counts), ", ".join(named)))
    return Table(name, ("task", "clients", "worse", "better", "not defined", "worst changes"), rows, (5,))


def _lost(held: Against) -> tuple[str, ...]:
    worse, of = ({name for e in held.each for name in names(e)} for names in (lambda e: e.worse, lambda e: e.clients))
    over_all = words.hurt_over_all(held.delta_of) if len(held.each) > 1 else ""
    return (words.hurt(len(worse), len(of), held.split), over_all) if of else ()


def _federation(report: RunReport) -> Table:
    rows = []
    domains = any(about.get("domain") for about in report.clients.values())
    for name, about in report.clients.items():
        tasks = ", ".join(t if w == 1 else f"{t} (weight {w:g})" for t, w in about["tasks"].items())
        sizes = [str(about.get(part, "")) for part in ("train", "val")]
        rows.append((name, tasks, *((str(about.get("domain") or ""),) if domains else ()), *sizes))
    head = ("client", "tasks", *(("domain",) if domains else ()), "train examples", "validation")
    return Table("clients-table", head, rows, (1, 2) if domains else (1,))


def _bytes(report: RunReport) -> Table | None:
    rows = [(role, task, human_bytes(up), human_bytes(down)) for role, task, up, down in report.totals]
    total = ("all", "", *map(human_bytes, report.sent))
    head = ("role", "task", "sent by clients", "sent to clients")
    return Table("bytes-table", head, [*rows, total], (1,)) if rows else None


def _events(report: RunReport) -> Table | None:
    rows = [
        (h.what, h.who, str(h.times), str(h.first) if h.first == h.last else f"{h.first} to {h.last}")
        for h in report.happened
    ]
    return Table("events-table", ("what", "client", "times", "rounds"), rows, (1,)) if rows else None
