"""Write a table as text, Markdown, CSV, LaTeX or HTML; each takes the same structure."""

from __future__ import annotations

import io
from collections.abc import Callable
from html import escape

from fedloom.study.tables import markup
from fedloom.study.tables.markup import Cell, Records, html, json_text, latex, md, tex
from fedloom.study.tables.table import Column, GridTable, TableEntry, TableLine

CSV = (
    *("data", "base", "addon", "owner", "task", "metric", "direction", "mean", "ci95_half", "n"),
    *("seeds", "split", "model", "at", "rounds", "state"),
)


def to_text(table: GridTable, color: bool = False) -> str:
    """For a terminal; the best values in bold where `color`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Rich
    from rich.text import Text

    made = Rich(box=SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    columns, groups = table.layout
    for column in columns:
        head = f"{column.data}\n{column}" if _beside(table) else "\n".join(column.parts)
        # Text, for labels may hold brackets, which are rich's markup.
        made.add_column(Text(head), justify="right", no_wrap=True)
    for data, lines in groups:
        if data:
            made.add_section()
            made.add_row(Text(f"{data}:", "italic"))
        for line in lines:
            made.add_row(Text(line.label), *(Text(e.text, "bold" if e.best else "") for e in line.entries))
    # wide enough for any table: numbers must not be cut
    console = Console(file=io.StringIO(), width=10_000, force_terminal=color, no_color=not color, highlight=False)
    console.print(Text(table.title))
    console.print(made)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    body = "\n".join(text.rstrip() for text in output.splitlines())
    return "\n".join([body, table.caption, *table.notes]) + "\n"


def to_markdown(table: GridTable) -> str:
    """A table with the best values in bold, the caption and the notes below it."""
    columns, groups = table.layout
    heads = [md(f"{c.data}: {c}" if _beside(table) else str(c)) for c in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for data, members in groups:
        if data:
            lines.append(f"| *{md(data)}* |" + " |" * len(heads))
        for line in members:
            label = md(line.label.strip())
            texts = [f"**{md(e.text)}**" if e.best else md(e.text) for e in line.entries]
            lines.append(f"| {_indent(line) * '&emsp;'}{label} | " + " | ".join(texts) + " |")
    about = [md(text) for text in (table.caption, *table.notes)]
    return "\n".join([f"**{md(table.title)}**", "", *lines, *(f"\n{text}" for text in about)]) + "\n"


def to_csv(table: GridTable) -> str:
    """The numbers in full precision, as a CSV file."""
    return records(table).to_csv()


def to_json(table: GridTable) -> str:
    """The same as JSON, a mapping for each line of the CSV file."""
    return json_text(records(table).rows())


def records(table: GridTable) -> Records:
    """A line for each data set, base, add-on and task, and one with metric delta_m; numbers in full precision."""
    found: list[list[Cell]] = []
    for line in table.lines:
        for column, entry in zip(table.columns, line.entries, strict=True):
            e = entry.estimate
            numbers = (None, None, None) if e is None else (e.mean, e.half, e.n)
            seeds = tuple((line.seeds or {}).get(column.data, ()))
            rounds = tuple((line.rounds or {}).get(column.data, ()))
            model = (line.models or {}).get(column.data, "")
            head = (column.data, line.base, line.addon, line.owner, column.task, column.metric, column.direction)
            found.append([*head, *numbers, seeds, table.split, model, table.at, rounds, entry.kind])
    return Records(CSV, found)


def to_latex(table: GridTable) -> str:
    """A table environment; needs the package booktabs."""
    columns, groups = table.layout
    rows, start = [], 2
    if _beside(table):
        heads = [rf"\multicolumn{{{n}}}{{c}}{{{tex(data)}}}" for data, n in table.groups.items()]
        rules = []
        for count in table.groups.values():
            rules.append(rf"\cmidrule(lr){{{start}-{start + count - 1}}}")
            start += count
        rows += [" & " + " & ".join(heads) + r" \\", " ".join(rules)]
    rows.append(" & " + " & ".join(tex(str(column)) for column in columns) + r" \\")
    for data, lines in groups:
        if data:
            rows += [r"\midrule", rf"\multicolumn{{{len(columns) + 1}}}{{l}}{{\emph{{{tex(data)}}}}} \\"]
        for number, line in enumerate(lines):
            if number == 0 or (not _indent(line) and line.base != lines[number - 1].base):
                rows.append(r"\midrule")
            texts = [rf"\textbf{{{tex(e.text)}}}" if e.best else tex(e.text) for e in line.entries]
            rows.append(_indent(line) * r"\quad " + tex(line.label.strip()) + " & " + " & ".join(texts) + r" \\")
    return latex((f"{table.title}.", table.caption, *table.notes), len(columns) + 1, rows)


def to_html(table: GridTable) -> str:
    """A page of its own, without scripts and without anything to load."""
    return html(table.title, fragment(table))


def fragment(table: GridTable) -> str:
    """The table with its caption and notes as HTML that can stand in another page."""
    columns, groups = table.layout
    head = []
    if _beside(table):
        cells = "".join(f'<th scope="colgroup" colspan="{n}">{escape(d)}</th>' for d, n in table.groups.items())
        head.append(f'<tr class="data"><td></td>{cells}</tr>')
    cells = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in columns)
    head.append(f"<tr><td></td>{cells}</tr>")
    body = []
    for data, lines in groups:
        if data:
            body.append(f'<tr class="base"><th colspan="{len(columns) + 1}" class="group">{escape(data)}</th></tr>')
        for line in lines:
            kind, row = ("label addon", "<tr>") if _indent(line) else ("label", '<tr class="base">')
            label = f'<th scope="row" class="{kind}">{escape(line.label.strip())}</th>'
            texts = "".join(_html(entry, column) for entry, column in zip(line.entries, columns, strict=True))
            body.append(f"{row}{label}{texts}</tr>")
    return markup.fragment(table.title, head, body, (table.caption, *table.notes))


FORMATS: dict[str, Callable[[GridTable], str]] = {
    "text": to_text,
    "markdown": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "latex": to_latex,
    "html": to_html,
}


def _beside(table: GridTable) -> bool:
    """Whether data sets stand beside each other."""
    return len(table.groups) > 1 and not table.layout[1][0][0]


def _indent(line: TableLine) -> bool:
    return line.label.startswith(" ")


def _html(entry: TableEntry, column: Column) -> str:
    text = f"<b>{escape(entry.text)}</b>" if entry.best else escape(entry.text)
    return f'<td class="none">{text}</td>' if entry.kind != "value" else f"<td>{text}</td>"
