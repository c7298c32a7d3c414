"""The page of a grid: its tables, and what they show as data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.federation.runs.reader import human_bytes
from fedloom.study.charts import plain
from fedloom.study.report import page, words
from fedloom.study.report.collect import GridReport
from fedloom.study.report.figures import compared, figures_of
from fedloom.study.report.methods import Method
from fedloom.study.report.page import Table
from fedloom.study.report.worst import Worst
from fedloom.study.significance.ranks import Ranks
from fedloom.study.tables.estimate import Estimate


def render(report: GridReport) -> str:
    """The HTML of a grid's report. Raises UserError where Jinja2 or vl-convert is absent."""
    facts = dict(report.facts)
    cells = [
        (c.name, c.status, str(c.rounds), human_bytes(c.up), human_bytes(c.down), f"{c.seconds:.1f}")
        for c in report.cells
    ]
    head = ("run", "status", "rounds", "sent by clients", "sent to clients", "seconds")
    figures = figures_of(report)
    for at, methods in enumerate(report.methods.values()):
        figures |= dict(compared(methods, at))
    return page.render(
        "grid",
        report.title,
        _data(report),
        figures,
        report=report,
        lead=" · ".join((f"runs: {facts['runs']}", _seeds(facts["seeds"]))),
        table=report.table.as_table().fragment() if report.table else "",
        worst=_worst(report.worst),
        cells=Table("cells-table", head, cells) if cells else None,
        bases=[name or "nothing" for name in report.methods],
        views=[
            [_compared(f"{at}-{place}", *of) for place, of in enumerate(_by_data(methods).items())]
            for at, methods in enumerate(report.methods.values())
        ],
        ranks=None if report.ranks is None else _ranks(report.ranks),
    )


def _seeds(listed: str) -> str:
    return f"seeds {listed}" if "," in listed else f"seed {listed}"


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
    return {"about": dict(report.facts), "table": lines, "worst": [_worst_data(line) for line in report.worst]}


def _worst_data(line: Worst) -> dict[str, Any]:
    task = None if line.task is None else {"task": line.task[0].task, **_estimate(line.task[1])}
    clients = {row.task: {"clients": list(names), **_estimate(of)} for row, (of, names) in line.clients.items()}
    about = {"data": line.data, "method": line.method, "reference": line.reference}
    return {**about, "task": task, "clients": clients}


def _estimate(of: Estimate) -> dict[str, float | int | None]:
    return {"mean": plain(of.mean), "half": plain(of.half), "n": of.n}


def _by_data(methods: Sequence[Method]) -> dict[str, list[Method]]:
    found: dict[str, list[Method]] = {}
    for method in methods:
        found.setdefault(method.data, []).append(method)
    return found


@dataclass(frozen=True)
class Compared:
    """The methods of a data set at a glance."""

    name: str
    """What the names of its figures begin with."""
    data: str
    said: str
    costs: Table


def _compared(name: str, data: str, methods: Sequence[Method]) -> Compared:
    ranked = sorted((m for m in methods if m.delta is not None), key=lambda m: -m.delta.mean if m.delta else 0.0)
    head = ("method", "Δ %", "told apart", "bytes", "seconds")
    costs = [
        (m.label, "base" if m.delta is None and m.label == m.reference else m.delta.signed if m.delta else "",
         {True: "yes", False: "no", None: ""}[words.told(m.delta)], human_bytes(m.sent), f"{m.seconds:.1f}")
        for m in [*ranked, *(m for m in methods if m.delta is None)]
    ]  # fmt: skip
    return Compared(
        name,
        data,
        words.grid_told({m.label: m.delta for m in ranked if m.is_method and m.delta}, {m.reference for m in ranked}),
        Table(f"costs-{name}", head, costs, (2,)),
    )


def _ranks(ranks: Ranks) -> tuple[Table, tuple[str, ...]]:
    made = ranks.as_table()
    return Table("ranks-table", made.head, made.lines, (2,)), made.notes


def _worst(lines: Sequence[Worst]) -> list[tuple[str, Table]]:
    """One table per data set, with its heading: the task that lost most, and the worst client of each task."""
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
            texts = [i for i in range(len(head)) if i != 2 or not changed]  # names of clients need to break
            parts.append(
                (data if len({line.data for line in lines}) > 1 else "", Table(f"worst-{at}", head, body, texts))
            )
    return parts


def _lost(line: Worst) -> tuple[str, str, str]:
    if line.task is None:
        return ("", "base", "") if line.method == line.reference else ("", "", line.reference)
    row, change = line.task
    return str(row), f"{change.signed}\u00a0%", line.reference


def _with_names(estimate: Estimate, names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{estimate} ({', '.join(names[:most]) or 'all the same'}{more})"
