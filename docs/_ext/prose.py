"""Docstrings, which are plain text with formulas in letters, as HTML: paragraphs, formulas, rows of sources."""

from __future__ import annotations

import re
from html import escape

import formulas

_SOURCES = re.compile(r"^(paper|release|here) {2,}(.*)$")


def html(docstring: str) -> str:
    """The paragraphs of a docstring as HTML."""
    return "\n".join(_paragraph(part.split("\n")) for part in re.split(r"\n{2,}", docstring.strip()))


def _paragraph(lines: list[str]) -> str:
    if _SOURCES.match(lines[0]):
        return _sources(lines)
    formulas = sum(" = " in line or "  " in line.strip() for line in lines)
    if formulas > len(lines) / 2 or any(line.startswith(" ") for line in lines):
        return f'<div class="equations">{inline(chr(10).join(lines))}</div>'
    return f"<p>{inline(' '.join(lines))}</p>"


def _sources(lines: list[str]) -> str:
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        if found := _SOURCES.match(line):
            rows.append((found[1], [found[2]]))
        else:
            rows[-1][1].append(line.strip())
    items = "".join(f"<dt>{name}</dt><dd>{inline(' '.join(text))}</dd>" for name, text in rows)
    return f'<dl class="sources">{items}</dl>'


def inline(text: str) -> str:
    """One piece of text as HTML; what stands in backticks stays as it is."""
    parts = text.split("`")
    return "".join(f"<code>{escape(p)}</code>" if i % 2 else formulas.html(p) for i, p in enumerate(parts))


def literal(lines: list[str]) -> list[str]:
    """A docstring as reStructuredText: the first paragraph as text, the rest as it stands."""
    text = "\n".join(lines).strip()
    if not text:
        return []
    first, _, rest = text.partition("\n\n")
    parts = " ".join(first.split("\n")).split("`")
    escaped = (f"\\ ``{p}``\\ " if i % 2 else re.sub(r"([\\*_|])", r"\\\1", p) for i, p in enumerate(parts))
    shown = "".join(escaped)
    block = ["", ".. code-block:: text", "", *(f"   {line}" for line in rest.strip("\n").split("\n"))] if rest else []
    return [shown, *block, ""]
