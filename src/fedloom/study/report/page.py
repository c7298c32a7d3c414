"""What all pages are made of: one HTML file from the templates beside this, with its script, style and data in it.

Nothing is loaded from elsewhere, and every text is escaped where it enters a template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fedloom.core.lazy import need
from fedloom.core.outline import Box
from fedloom.study.charts import CONFIG, finished, script, style
from fedloom.study.report.figures import Figure

MOST_ROWS = 1000
"""Lines of a table, at most."""
MOST_OPEN = 40
"""Lines of a table that stands in the page as it is; a longer one scrolls in a box of its own."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


@dataclass(frozen=True)
class Table:
    """A table; its first column is its label, columns in `text` are set as text, others as numbers."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[int] = ()

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        return self.rows[:MOST_ROWS]

    @property
    def left_out(self) -> int:
        """Lines of a very long table that the page does not have."""
        return max(0, len(self.rows) - MOST_ROWS)

    @property
    def is_long(self) -> bool:
        return len(self.rows) > MOST_OPEN


def render(kind: str, title: str, data: Mapping[str, Any], figures: Mapping[str, Figure], **shown: Any) -> str:
    """The page that the template of a kind makes of what it is shown, with `data` for programs and the figures in it.

    Raises UserError where Jinja2 or vl-convert is absent.
    """
    views = {
        name: [{"name": view.name, "group": view.group, "chart": finished(view.chart)} for view in figure.views]
        for name, figure in figures.items()
    }
    return filled(
        kind,
        script=_beside("page.js"),
        pictures=_beside("pictures.js"),
        title=title,
        vega=script(),
        data=in_script({"kind": kind, "title": title, **data, "config": CONFIG, "figures": views}),
        figures=figures,
        **shown,
    )


def filled(kind: str, **shown: Any) -> str:
    """What the template of a kind makes of what it is shown, with the style and the palette that all pages have.

    What cannot be written as UTF-8, as in a folder's name of other bytes, becomes a question mark.
    """
    made = _environment().get_template(f"{kind}.html")
    text = str(made.render(kind=kind, policy=_POLICY, style=style(), **shown))
    return text.encode("utf-8", "replace").decode("utf-8")


def _beside(name: str) -> str:
    return (files("fedloom.study.report") / "templates" / name).read_text("utf-8")


def part(template: str, macro: str, *given: Any) -> str:
    """What one macro of a template makes of what it is given."""
    return str(getattr(_environment().get_template(template).module, macro)(*given))


@cache
def _environment() -> Any:
    jinja2 = need("jinja2", "report")
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.study.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"beside": beside}
    return made


def beside(several: Iterable[Box]) -> list[list[Box]]:
    """Groups of stages: what works on different parts, or in different rounds, stands side by side."""
    groups: list[list[Box]] = []
    for box in several:
        if groups and box.beside:
            groups[-1].append(box)
        else:
            groups.append([box])
    return groups


def in_script(value: Any) -> str:
    """JSON that is safe inside a script element, whatever texts are in it: no '<', '>' or '&' is left."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
