"""A table of texts with the numbers behind it, for commands and pages, in text, Markdown, LaTeX, HTML, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

from fedloom.core.outline import Box
from fedloom.federation.runs.recorded import plainly
from fedloom.study.charts import COLORS

Value = str | int | float | tuple[int, ...] | None
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)

_TEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    "…": r"\ldots{}", "±": r"$\pm$", "Δ": r"$\Delta$", "ρ": r"$\rho$", "μ": r"$\mu$",  # noqa: RUF001
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"$\dagger$", "‡": r"$\ddagger$",
}  # fmt: skip


class Best(str):
    """The text of a cell that is the best of its kind: it is bold."""


class Absent(str):
    """The text of a cell without a number."""


def md(text: str) -> str:
    """Return a text with Markdown's own signs escaped; the best is bold."""
    escaped = "".join(f"\\{c}" if c in "\\|*_<" else c for c in text)
    return f"**{escaped}**" if isinstance(text, Best) else escaped


def tex(text: str) -> str:
    """Return a text with LaTeX's own signs escaped, and with its signs of mathematics; the best is bold."""
    escaped = "".join(_TEX.get(c, c) for c in text)
    return rf"\textbf{{{escaped}}}" if isinstance(text, Best) else escaped


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column is the label of its line.

    A label that begins with a blank is indented, because it belongs to the line above. A line of a label alone is a
    heading of the lines that follow. A heading of a column may have two lines.
    """

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """Paragraphs below the table."""
    over: Mapping[str, int] | None = None
    """Headings over several columns each, from the second column on."""
    name: str = ""
    """The table's name in a page."""
    text: Sequence[int] = ()
    """The columns that a page sets as text, not as numbers."""

    @property
    def heads(self) -> list[str]:
        """Return the headings in one line each."""
        return [head.replace("\n", " ").strip() for head in self.head]

    @property
    def _above(self) -> list[str]:
        """Return the heading over each column, '' over the first."""
        return ["", *(name for name, count in (self.over or {}).items() for _ in range(count))]

    def to_text(self, color: bool = False) -> str:
        """Return aligned columns; with `color` the best is bold."""
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
        """Return a Markdown table."""
        heads = [md(head) for head in self.heads]
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
        """Return a table environment, which needs the package booktabs."""
        rows, rule, indented = [], r"\midrule", False
        if self.over:
            ends = [*accumulate(self.over.values(), initial=1)]
            rows.append(
                "".join(rf" & \multicolumn{{{n}}}{{c}}{{{tex(name)}}}" for name, n in self.over.items()) + r" \\"
            )
            rows.append(" ".join(rf"\cmidrule(lr){{{start + 1}-{end}}}" for start, end in pairwise(ends)))
        rows += [" & ".join(map(tex, self.heads)) + r" \\", rule]
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
        """Return a page of its own that looks like a report, without scripts and without anything to load."""
        return filled("table", title=self.title, table=self) + "\n"


def span(numbers: Iterable[int]) -> str:
    """Return '4', or '3 to 5': the least and the largest of some numbers; '' for none."""
    return " to ".join(str(n) for n in dict.fromkeys((min(known), max(known)))) if (known := list(numbers)) else ""


@dataclass(frozen=True)
class Records:
    """The numbers behind a table in full precision, as lines below a head; nan where there is none."""

    head: tuple[str, ...]
    lines: Sequence[Sequence[Value]]

    def to_csv(self) -> str:
        """Return a CSV file; '' where there is no number, blanks between those of a list."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.head)
        writer.writerows([_csv(cell) for cell in line] for line in self.lines)
        return out.getvalue()

    def rows(self) -> list[dict[str, Value]]:
        """Return a mapping for each line."""
        return [dict(zip(self.head, line, strict=True)) for line in self.lines]


def filled(kind: str, **shown: Any) -> str:
    """Fill the template of a kind of page, with style and palette; what is no UTF-8 becomes question marks."""
    palette = "".join(f"--c{at}: {color}; " for at, color in enumerate(COLORS))
    style = f":root {{ {palette}}}\n{text_of('page.css')}"
    template = environment().get_template(f"{kind}.html")
    text = str(template.render(kind=kind, policy=_POLICY, style=style, **shown))
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(name: str) -> str:
    """Return a file that lies beside the templates."""
    return (files("fedloom.study") / "report" / "templates" / name).read_text("utf-8")


@cache
def environment() -> Any:
    """Return the templates of all pages; they escape every text that is put into them."""
    import jinja2

    look: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True}
    made = jinja2.Environment(loader=jinja2.FunctionLoader(text_of), lstrip_blocks=True, **look)
    made.filters["beside"] = beside
    made.tests |= {"best": lambda text: isinstance(text, Best), "absent": lambda text: isinstance(text, Absent)}
    return made


def beside(several: Iterable[Box]) -> list[list[Box]]:
    """Group stages: those that work on different parts, or in different rounds, stand side by side."""
    groups: list[list[Box]] = []
    for box in several:
        if groups and box.beside:
            groups[-1].append(box)
        else:
            groups.append([box])
    return groups


class HasTables(ABC):
    """The base class of results that are tables for people; CSV and JSON have more digits."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Return the tables that people read."""

    @abstractmethod
    def records(self) -> Records:
        """Return the numbers in full precision."""

    def to_csv(self) -> str:
        """Return the numbers in full precision as a CSV file."""
        return self.records().to_csv()

    def to_json(self) -> str:
        """Return the numbers in full precision as JSON, a mapping for each line of the CSV file."""
        return json_text(self.records().rows())

    def to_text(self) -> str:
        """Return the tables as aligned columns."""
        return "\n".join(table.to_text() for table in self.tables())

    def to_markdown(self) -> str:
        """Return the tables in Markdown."""
        return "\n".join(table.to_markdown() for table in self.tables())


class HasTable(HasTables):
    """The base class of results that are one table."""

    @abstractmethod
    def as_table(self) -> Table:
        """Return the table that people read."""

    def tables(self) -> Sequence[Table]:
        """Return the one table."""
        return (self.as_table(),)

    def to_latex(self) -> str:
        """Return the table as a LaTeX table, which needs the package booktabs."""
        return self.as_table().to_latex()

    def to_html(self) -> str:
        """Return the table as a page of its own."""
        return self.as_table().to_html()


@dataclass(frozen=True)
class Made(HasTable):
    """A table with the numbers behind it."""

    shown: Table
    numbers: Records

    def as_table(self) -> Table:
        """Return the table."""
        return self.shown

    def records(self) -> Records:
        """Return the numbers."""
        return self.numbers


def json_text(value: Any) -> str:
    """Return mappings, sequences, dataclasses, texts and numbers as JSON; nan and infinities become null."""
    return json.dumps(plainly(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


_FORMULA = re.compile(r"'*([=@]|[+-].*[(|!])")
"""With quotation marks in front, so that `without_mark` gives back each text."""


def no_formula(cell: Any) -> Any:
    """Return a cell, behind a quotation mark where it is a text that a spreadsheet would compute: the name of a class
    or of a method is chosen by whoever made the model or the run."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def without_mark(cell: str) -> str:
    """Return the text that `no_formula` made into a cell."""
    return cell[1:] if _FORMULA.match(cell) and cell[0] == "'" else cell


def _csv(cell: Value) -> object:
    if isinstance(cell, tuple):
        return " ".join(map(str, cell))
    return "" if isinstance(cell, float) and math.isnan(cell) else no_formula(cell)
