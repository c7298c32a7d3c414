"""A small table of texts, for what commands print."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """A small table of texts; the first column is its label."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def to_text(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.lines, strict=True)]
        rows = [
            "  ".join(t.ljust(w) if i == 0 else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True)))
            for line in (self.head, *self.lines)
        ]
        rows.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([self.title, *(row.rstrip() for row in rows)]) + "\n"

    def to_markdown(self) -> str:
        """A Markdown table."""
        rows = ["| " + " | ".join(t.replace("|", "\\|") for t in line) + " |" for line in (self.head, *self.lines)]
        rows.insert(1, "|---|" + "---:|" * (len(self.head) - 1))
        return "\n".join([f"**{self.title}**", "", *rows]) + "\n"
