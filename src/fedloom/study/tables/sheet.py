"""A small table of texts, for what commands print."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from html import escape

from fedloom.study.tables.markup import Recorded, fragment, html, latex, md, tex


@dataclass(frozen=True)
class Sheet:
    """A small table of texts; the first column is its label."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    """What stands below the table, a paragraph each."""

    def to_text(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.lines, strict=True)]
        rows = [
            "  ".join(t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True)))
            for line in (self.head, *self.lines)
        ]
        rows.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([self.title, *(row.rstrip() for row in rows), *self.notes]) + "\n"

    def to_markdown(self) -> str:
        """A Markdown table."""
        rows = ["| " + " | ".join(t.replace("|", "\\|") for t in line) + " |" for line in (self.head, *self.lines)]
        rows.insert(1, "|---|" + "---:|" * (len(self.head) - 1))
        return "\n".join([f"**{self.title}**", "", *rows, *(f"\n{md(note)}" for note in self.notes)]) + "\n"

    def to_latex(self) -> str:
        """A table environment; needs the package booktabs."""
        head, *rows = (" & ".join(map(tex, line)) + r" \\" for line in (self.head, *self.lines))
        return latex((f"{self.title}.", *self.notes), len(self.head), [head, r"\midrule", *rows])

    def to_html(self) -> str:
        """A page of its own."""
        head = "".join(f'<th scope="col">{escape(text)}</th>' for text in self.head)
        rows = (
            f'<tr><th scope="row" class="label">{escape(label)}</th>'
            + "".join(f"<td>{escape(text)}</td>" for text in texts)
            + "</tr>"
            for label, *texts in self.lines
        )
        return html(self.title, fragment(self.title, [f"<tr>{head}</tr>"], list(rows), self.notes))


class Sheeted(Recorded):
    """What is written as one sheet, but for CSV and JSON, which have more digits."""

    @abstractmethod
    def sheet(self) -> Sheet:
        """The sheet that people read."""

    def to_text(self) -> str:
        """The sheet as aligned columns."""
        return self.sheet().to_text()

    def to_markdown(self) -> str:
        """The sheet in Markdown."""
        return self.sheet().to_markdown()

    def to_latex(self) -> str:
        """The sheet as a LaTeX table; needs the package booktabs."""
        return self.sheet().to_latex()

    def to_html(self) -> str:
        """The sheet as a page of its own."""
        return self.sheet().to_html()
