"""The page of a grid: its sections, and its table as data for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedloom.runs.reader import human_bytes
from fedloom.study.report import predictions
from fedloom.study.report.collect import GridReport
from fedloom.study.report.looks import plain
from fedloom.study.report.page import PageSection, confusion, fact_sheet, folded, frame, plot, remark, sheet
from fedloom.study.report.plots import Figure, figures_of
from fedloom.study.report.worst import Worst
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.formats import fragment


def render(report: GridReport) -> str:
    """The HTML of a grid's report. Raises UserError where plotly is absent."""
    figures = figures_of(report)
    return frame("grid", report.title, _sections(report, figures), _data(report), figures)


def _data(report: GridReport) -> dict[str, Any]:
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


def _sections(report: GridReport, figures: Mapping[str, Figure]) -> list[PageSection]:
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
        PageSection("about", "The grid", fact_sheet(report.facts) + folded("Grid file", report.grid)),
        PageSection("table", "Table", table or remark(report.problem)),
        PageSection("worst", "Worst tasks and clients", _worst(report.worst)),
        PageSection("curves", "Over the rounds", curves and remark(note) + curves),
        PageSection("predictions", "Predictions", predictions.body(report.predictions)),
        PageSection(
            "confusion", "Confusion", confusion(report.predictions.confusions, lambda name: plot(name, figures[name]))
        ),
        PageSection("cells", "Runs", sheet("cells-table", head, cells) if cells else ""),
    ]


def _worst(lines: Sequence[Worst]) -> str:
    """One table per data set: the task that lost most, and the worst client of each task."""
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
