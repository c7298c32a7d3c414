"""A table of texts, and the numbers behind it: written as text, Markdown, LaTeX, HTML, CSV or JSON. Every command that
prints a table makes one of these."""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fedloom.study.charts import style

Cell = str | int | float | tuple[int, ...] | None

_TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    "±": r"$\pm$",
    "…": r"\ldots{}",
    "Δ": r"$\Delta$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "ρ": r"$\rho$",  # noqa: RUF001
    "μ": r"$\mu$",
}


class Best(str):
    """A cell's text that is the best of its kind: it is bold."""


class Absent(str):
    """A cell's text that stands where there is no number."""


def md(text: str) -> str:
    """A text with Markdown's own signs escaped; the best is bold."""
    escaped = "".join(f"\\{c}" if c in "\\|*_<" else c for c in text)
    return f"**{escaped}**" if isinstance(text, Best) else escaped


def tex(text: str) -> str:
    """A text with LaTeX's own signs escaped, and those that LaTeX writes in mathematics; the best is bold."""
    escaped = "".join(_TEX.get(c, c) for c in text)
    return rf"\textbf{{{escaped}}}" if isinstance(text, Best) else escaped


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column is its label.

    A label that begins with a blank is indented, for it belongs to the line above. A line of a label alone is a heading
    of the lines that follow. A heading of a column may have two lines.
    """

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """What stands below the table, a paragraph each."""
    over: Mapping[str, int] | None = None
    """Headings over several columns each, from the second column on."""

    @property
    def _heads(self) -> list[str]:
        """The headings in one line each."""
        return [head.replace("\n", " ").strip() for head in self.head]

    @property
    def _above(self) -> list[str]:
        """What stands over each column, '' over the first."""
        return ["", *(name for name, count in (self.over or {}).items() for _ in range(count))]

    def to_text(self, color: bool = False) -> str:
        """Aligned columns; the best in bold where `color`."""
        heads = [head.split("\n") for head in self.head]
        if self.over:
            heads = [[above, *head] for above, head in zip(self._above, heads, strict=True)]
        deep = max(map(len, heads))
        top = [*zip(*([""] * (deep - len(head)) + head for head in heads), strict=True)]
        full = [line for line in self.lines if len(line) > 1]
        widths = [max(map(len, column)) for column in zip(*top, *full, strict=True)]

        def aligned(line: Sequence[str]) -> str:
            padded = [t.rjust(w) if at else t.ljust(w) for at, (t, w) in enumerate(zip(line, widths, strict=True))]
            if color:
                padded = [f"\x1b[1m{p}\x1b[0m" if isinstance(t, Best) else p for t, p in zip(line, padded, strict=True)]
            return "  ".join(padded).rstrip()

        body = (aligned(line) if len(line) > 1 else f"\n{line[0]}:" for line in self.lines)
        rule = aligned(["-" * width for width in widths])
        return "\n".join([self.title, *map(aligned, top), rule, *body, *self.notes]) + "\n"

    def to_markdown(self) -> str:
        """A Markdown table."""
        heads = [md(head) for head in self._heads]
        if self.over:
            heads[1:] = [f"{md(above)}: {head}" for above, head in zip(self._above[1:], heads[1:], strict=True)]
        rows = ["|" + "".join(f" {head} |" if head else " |" for head in heads), f"|---|{'---:|' * (len(heads) - 1)}"]
        for label, *texts in self.lines:
            if texts:
                indent = "&emsp;" * label.startswith(" ")
                rows.append(f"| {' | '.join([indent + md(label.strip()), *map(md, texts)])} |")
            else:
                rows.append(f"| *{md(label)}* |{' |' * (len(heads) - 1)}")
        return "\n".join([f"**{md(self.title)}**", "", *rows, *(f"\n{md(note)}" for note in self.notes)]) + "\n"

    def to_latex(self) -> str:
        """A table environment; needs the package booktabs."""
        rows, rule, indented = [], r"\midrule", False
        if self.over:
            ends = [*accumulate(self.over.values(), initial=1)]
            rows.append(
                "".join(rf" & \multicolumn{{{n}}}{{c}}{{{tex(name)}}}" for name, n in self.over.items()) + r" \\"
            )
            rows.append(" ".join(rf"\cmidrule(lr){{{start + 1}-{end}}}" for start, end in pairwise(ends)))
        rows += [" & ".join(map(tex, self._heads)) + r" \\", rule]
        for label, *texts in self.lines:
            belongs = label.startswith(" ")
            if rows[-1] != rule and (not texts or (indented and not belongs)):
                rows.append(rule)
            if texts:
                rows.append(" & ".join([r"\quad " * belongs + tex(label.strip()), *map(tex, texts)]) + r" \\")
            else:
                rows += [rf"\multicolumn{{{len(self.head)}}}{{l}}{{\emph{{{tex(label)}}}}} \\", rule]
            indented = belongs
        about = " ".join(map(tex, (f"{self.title}.", *self.notes)))
        tabular = rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"
        top = [r"\begin{table}", rf"\caption{{{about}}}", r"\centering", tabular, r"\toprule"]
        return "\n".join([*top, *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def to_html(self) -> str:
        """A page of its own, which looks as reports do, without scripts and without anything to load."""
        return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(self.title)}</title>
<style>
{style()}</style></head>
<body>{self.fragment()}
</body></html>
"""

    def fragment(self) -> str:
        """The table with its notes as HTML that can stand in another page."""
        over = [f'<th scope="colgroup" colspan="{n}">{escape(name)}</th>' for name, n in (self.over or {}).items()]
        first, *heads = (f'<th scope="col">{escape(head)}</th>' if head else "<td></td>" for head in self._heads)
        head = [f'<tr class="data"><td></td>{"".join(over)}</tr>'] if over else []
        head.append(f"<tr>{first}{''.join(heads)}</tr>")
        body = []
        for label, *texts in self.lines:
            kind = "label addon" if label.startswith(" ") else "label"
            name = f'<th scope="row" class="{kind}">{escape(label.strip())}</th>'
            if not texts:
                name = f'<th colspan="{len(self.head)}" class="group">{escape(label)}</th>'
            body.append(f"<tr>{name}{''.join(map(_cell, texts))}</tr>")
        table = ['<div class="wide"><table class="numbers">', f"<caption>{escape(self.title)}</caption>"]
        table += ["<thead>", *head, "</thead>", "<tbody>", *body, "</tbody>", "</table></div>"]
        return "\n".join([*table, *(f"<p>{escape(text).replace(' %', '&nbsp;%')}</p>" for text in self.notes)])


def _cell(text: str) -> str:
    """A cell in HTML."""
    kind = ' class="none"' if isinstance(text, Absent) else ""
    return f"<td{kind}><b>{escape(text)}</b></td>" if isinstance(text, Best) else f"<td{kind}>{escape(text)}</td>"


def span(numbers: Iterable[int]) -> str:
    """'4', or '3 to 5': the least and the largest of some numbers; '' for none."""
    low, high = min(numbers := list(numbers), default=0), max(numbers, default=0)
    return "" if not numbers else str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Records:
    """The numbers behind a table in full precision, as lines below a head; nan where there is none."""

    head: tuple[str, ...]
    lines: Sequence[Sequence[Cell]]

    def to_csv(self) -> str:
        """A CSV file; '' where there is no number, blanks between those of a list."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows([_csv(cell) for cell in line] for line in self.lines)
        return out.getvalue()

    def rows(self) -> list[dict[str, Cell]]:
        """A mapping for each line."""
        return [dict(zip(self.head, line, strict=True)) for line in self.lines]


class HasRecords(ABC):
    """What has numbers in full precision behind the tables that people read."""

    @abstractmethod
    def records(self) -> Records:
        """The numbers in full precision."""

    def to_csv(self) -> str:
        """The numbers in full precision, as a CSV file."""
        return self.records().to_csv()

    def to_json(self) -> str:
        """The same as JSON, a mapping for each line of the CSV file."""
        return json_text(self.records().rows())


class HasTable(HasRecords):
    """What is written as one sheet, but for CSV and JSON, which have more digits."""

    @abstractmethod
    def as_table(self) -> Table:
        """The sheet that people read."""

    def to_text(self) -> str:
        """The sheet as aligned columns."""
        return self.as_table().to_text()

    def to_markdown(self) -> str:
        """The sheet in Markdown."""
        return self.as_table().to_markdown()

    def to_latex(self) -> str:
        """The sheet as a LaTeX table; needs the package booktabs."""
        return self.as_table().to_latex()

    def to_html(self) -> str:
        """The sheet as a page of its own."""
        return self.as_table().to_html()


@dataclass(frozen=True)
class Made(HasTable):
    """A sheet with the numbers behind it."""

    shown: Table
    numbers: Records

    def as_table(self) -> Table:
        return self.shown

    def records(self) -> Records:
        return self.numbers


def json_text(found: Any) -> str:
    """Mappings, sequences, dataclasses, texts and numbers as JSON; nan and infinities become null."""
    return json.dumps(_plain(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def _csv(cell: Cell) -> object:
    if isinstance(cell, tuple):
        return " ".join(map(str, cell))
    return "" if isinstance(cell, float) and math.isnan(cell) else cell
