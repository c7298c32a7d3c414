"""The page of a grid: its tables, and their numbers for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedloom.federation.runs.reader import human_bytes
from fedloom.study.charts import COLORS, color, plain
from fedloom.study.report import page, words
from fedloom.study.report.collect import GridReport
from fedloom.study.report.figures import compared, figures_of
from fedloom.study.report.methods import Method
from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.output import Table


def render(report: GridReport) -> str:
    """Return the HTML of a grid's report. Raises UserError where vl-convert or Jinja2 is absent."""
    facts = dict(report.facts)
    head = ("run", "status", "rounds", "sent by clients", "sent to clients", "seconds")
    figures = figures_of(report)
    for at, methods in enumerate(report.methods.values()):
        figures |= dict(compared(methods, report.palette, at))
    seeds = f"seeds {facts['seeds']}" if "," in facts["seeds"] else f"seed {facts['seeds']}"
    ranks = None if report.ranks is None else report.ranks.as_table()
    return page.render(
        "grid",
        report.title,
        _data(report),
        figures,
        report=report,
        lead=f"runs: {facts['runs']} · {seeds}",
        table=report.table.as_table().fragment() if report.table else "",
        key=_key(report),
        worst=[part for at, data in enumerate(_by_data(report.worst)) if (part := _worst(report.worst, data, at))],
        cells=Table("", head, report.cells, name="cells-table") if report.cells else None,
        bases=[name or "nothing" for name in report.methods],
        views=[
            [_compared(f"{at}-{place}", *of) for place, of in enumerate(_by_data(methods).items())]
            for at, methods in enumerate(report.methods.values())
        ],
        ranks=ranks and (replace(ranks, title="", notes=(), name="ranks-table", text=(2,)), ranks.notes),
    )


def _key(report: GridReport) -> list[tuple[str, str]]:
    """Return (method, colour) of all curves of the page; empty where colours begin anew, so that dashes count, too."""
    drawn = [name for name in report.palette if any(name in lines for lines in report.curves.values())]
    places = {name: at for at, name in enumerate(report.palette)}
    return [] if len(places) > len(COLORS) else [(name, color(places[name])) for name in drawn if name != "constant"]


def _data(report: GridReport) -> dict[str, Any]:
    table = report.table
    lines = [
        {
            "base": entry.base,
            "addon": entry.addon,
            "owner": entry.owner,
            "data": entry.column.data,
            "task": entry.column.task,
            "metric": entry.column.metric,
            "kind": entry.kind,
            **({} if entry.estimate is None else _estimate(entry.estimate)),
        }
        for line in (table.lines if table else ())
        for entry in line
    ]
    worst = [
        {
            "data": m.data,
            "method": m.label,
            "reference": m.reference,
            "task": m.worst_task and {"task": m.worst_task[0].task, **_estimate(m.worst_task[1])},
            "clients": {
                row.task: {"clients": list(names), **_estimate(of)} for row, (of, names) in m.worst_clients.items()
            },
        }
        for m in report.worst
    ]
    return {"about": dict(report.facts), "table": lines, "worst": worst}


def _estimate(of: Estimate) -> dict[str, float | int | None]:
    return {"mean": plain(of.mean), "half": plain(of.half), "n": of.n}


def _by_data(methods: Sequence[Method]) -> dict[str, list[Method]]:
    by_data: dict[str, list[Method]] = {}
    for method in methods:
        by_data.setdefault(method.data, []).append(method)
    return by_data


def _compared(name: str, data: str, methods: Sequence[Method]) -> dict[str, Any]:
    """Return the methods of a data set at a glance; the names of their figures begin with `name`."""
    ranked = sorted((m for m in methods if m.delta is not None), key=lambda m: -m.delta.mean if m.delta else 0.0)
    head = ("method", "Δ %", "interval excludes 0", "bytes", "seconds")
    lines = []
    for m in [*ranked, *(m for m in methods if m.delta is None)]:
        delta = m.delta.signed if m.delta else "base" if m.label == m.reference else ""
        significant = {True: "yes", False: "no", None: ""}[words.excludes_zero(m.delta)]
        lines.append((m.label, delta, significant, human_bytes(m.sent), f"{m.seconds:.1f}"))
    deltas = {m.label: m.delta for m in ranked if m.is_method and m.delta}
    sentence = words.of_methods(deltas, {m.reference for m in ranked})
    costs = Table("", head, tuple(lines), name=f"costs-{name}", text=(2,))
    return {"name": name, "data": data, "sentence": sentence, "costs": costs}


def _worst(methods: Sequence[Method], data: str, at: int) -> tuple[str, Table] | None:
    """Return the table of a data set with its heading: the task with the lowest change, and the worst clients."""
    mine = [m for m in methods if m.data == data]
    changed = any(m.worst_task for m in mine)
    rows = list(dict.fromkeys(row for m in mine for row in m.worst_clients))
    if not changed and not rows:
        return None
    head = ["method", *(("worst task", "change", "against") if changed else ()), *(f"worst client: {r}" for r in rows)]
    lines = []
    for m in mine:
        cells = [_with_names(*m.worst_clients[row]) if row in m.worst_clients else "" for row in rows]
        if changed:
            cells = [*_lowest(m), *cells]
        lines.append((m.label, *cells))
    text = [i for i in range(len(head)) if i != 2 or not changed]  # names of clients need to break
    heading = data if len(_by_data(methods)) > 1 else ""
    return heading, Table("", tuple(head), tuple(lines), name=f"worst-{at}", text=text)


def _lowest(m: Method) -> tuple[str, str, str]:
    if m.worst_task is None:
        return ("", "base", "") if m.label == m.reference else ("", "", m.reference)
    row, change = m.worst_task
    return str(row), f"{change.signed}\u00a0%", m.reference


def _with_names(estimate: Estimate, names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{estimate} ({', '.join(names[:most]) or 'all the same'}{more})"
