"""What all pages are made of: one HTML file with plotly's script, its style and its data in it, and its tables.

Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fedloom.extras import need
from fedloom.study.report.plots import Figure
from fedloom.study.report.predictions import ConfusionViews

MOST_ROWS = 1000
"""Lines of a table, at most."""
MOST_OPEN = 40
"""Lines of a table that stands in the page as it is; a longer one scrolls in a box of its own."""
_SHORT = 20  # letters of a text that is not broken
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class PageSection:
    """A part of the page; without a body it is left out."""

    name: str
    title: str
    body: str


def frame(
    kind: str,
    title: str,
    sections: Sequence[PageSection],
    data: Mapping[str, Any],
    figures: Mapping[str, Figure],
    lead: str = "",
) -> str:
    """A page of these sections, with `data` for programs and the figures in it; `lead` is a line below the title.

    Raises UserError where plotly is absent.
    """
    plotly = need("plotly.offline", "report").get_plotlyjs()
    sections = [section for section in sections if section.body]
    here = files("fedloom.study.report")
    embedded = in_script({"kind": kind, "title": title, **data, "figures": figures})
    links = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{(here / 'page.css').read_text('utf-8')}</style>",
            "</head>",
            f'<body class="{kind}">',
            f"<h1>{escape(title)}</h1>",
            *([f'<p class="lead">{escape(lead)}</p>'] if lead else []),
            f"<nav><ul>{links}</ul></nav>",
            "<noscript><p>The figures of this page need JavaScript; the tables do not.</p></noscript>",
            *(f'<section id="{s.name}">\n<h2>{escape(s.title)}</h2>\n{s.body}\n</section>' for s in sections),
            f'<script type="application/json" id="report-data">{embedded}</script>',
            f'<script id="plotly">{plotly}</script>',
            f'<script id="page">\n{(here / "page.js").read_text("utf-8")}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def in_script(value: Any) -> str:
    """JSON that is safe inside a script element, whatever texts are in it: no '<', '>' or '&' is left."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def fact_sheet(facts: Sequence[tuple[str, str]]) -> str:
    """A table of facts; texts are escaped."""
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(text)}</td></tr>' for name, text in facts
    )
    return f'<table id="facts">\n{rows}\n</table>\n'


def plot(name: str, figure: Figure, headed: bool = False) -> str:
    """The place of a figure, with the controls for its view and for the smoothing of its lines.

    A single view is named above it, except where a heading does that (`headed`) or a slider names the round.
    """
    views, controls = figure["views"], []
    sets = list(dict.fromkeys(view["set"] for view in views if "set" in view))
    if sets:
        options = "".join(f'<option value="{escape(s)}">{escape(s)}</option>' for s in sets)
        controls.append(f'<label>Layers <select class="view">{options}</select></label>')
    slider = figure["control"] == "slider"
    if slider and (sets or len(views) > 1):
        if sets:
            views = [view for view in views if view["set"] == sets[0]]
        last = len(views) - 1
        controls.append(
            f'<label>Round <input class="view" type="range" min="0" max="{last}" value="{last}">'
            f"<output>{escape(views[last]['name'])}</output></label>"
        )
    elif len(views) > 1:
        options = "".join(f'<option value="{i}">{escape(view["name"])}</option>' for i, view in enumerate(views))
        controls.append(f'<label>Show <select class="view">{options}</select></label>')
    if figure["smooth"]:
        controls.append(
            '<label>Smoothing <input class="smooth" type="range" min="0" max="0.95" step="0.05" value="0"></label>'
        )
    shown = "" if headed or sets or len(views) > 1 else f"{'Round ' if slider else ''}{views[0]['name']}"
    caption = f"<figcaption>{escape(shown)}</figcaption>" if shown else ""
    return (
        f'<figure class="plot" id="plot-{name}" data-figure="{name}">{caption}'
        f'<div class="controls">{"".join(controls)}</div><div class="canvas"></div></figure>'
    )


def sheet(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table; its first column is its label, columns in `text` are set as text, others as numbers.

    A long one scrolls, a very long one is cut.
    """
    top = "".join(
        f'<th scope="col"{"" if i == 0 or i in text else " class=number"}>{escape(cell)}</th>'
        for i, cell in enumerate(head)
    )
    body = []
    for label, *cells in rows[:MOST_ROWS]:
        each = "".join(
            f'<td class="text{_short(cell)}">{escape(cell)}</td>' if i in text else f"<td>{escape(cell)}</td>"
            for i, cell in enumerate(cells, 1)
        )
        body.append(f'<tr><th scope="row" class="label{_short(label)}">{escape(label)}</th>{each}</tr>')
    more = remark(f"{len(rows) - MOST_ROWS} more are not shown.") if len(rows) > MOST_ROWS else ""
    lines = "\n".join(["<tbody>", *body, "</tbody>"])
    wide = "wide long" if len(rows) > MOST_OPEN else "wide"
    return f'<div class="{wide}"><table id="{name}">\n<thead><tr>{top}</tr></thead>\n{lines}\n</table></div>\n{more}'


def _short(text: str) -> str:
    """The CSS class of a cell whose text stays on one line."""
    return " short" if len(text) <= _SHORT else ""


def number(value: float) -> str:
    """As comparisons write it; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"  # noqa: RUF001


def percent(value: float) -> str:
    """A change with its sign; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:+.2f}\u00a0%"  # noqa: RUF001


def folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n<pre>{escape(text)}</pre></details>\n"


def remark(text: str) -> str:
    """A paragraph in small print; the text is escaped."""
    return f'<p class="note">{escape(text)}</p>\n' if text else ""


def confusion(several: Sequence[ConfusionViews], plots: Callable[[str], str]) -> str:
    """One matrix per task, and on how many examples it was counted."""
    found = [
        f"<div><h3>{escape(c.title)}</h3>\n{plots(f'confusion-{number}')}\n{remark(c.note)}</div>"
        for number, c in enumerate(several)
    ]
    about = "Test data, final models. A row is a true class; colours are shares of it."
    return f'{remark(about)}<div class="pair">{"".join(found)}</div>' if found else ""
