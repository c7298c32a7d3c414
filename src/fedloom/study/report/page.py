"""The parts of all pages: one HTML file from the templates beside this, with its script, style and data in it.

Nothing is loaded from elsewhere, and every text is escaped where it enters a template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fedloom.core.lazy import need
from fedloom.core.outline import Box
from fedloom.study.charts import CONFIG, finished, script, style
from fedloom.study.report.figures import Figure

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


def render(kind: str, title: str, data: Mapping[str, Any], figures: Mapping[str, Figure], **shown: Any) -> str:
    """Fill the template of a kind of page, with `data` for programs and the figures in it.

    Raises UserError where Jinja2 or vl-convert is absent.
    """
    views = {
        name: [{"name": view.name, "group": view.group, "chart": finished(view.chart)} for view in figure.views]
        for name, figure in figures.items()
    }
    return filled(
        kind,
        script=text_of("page.js"),
        pictures=text_of("pictures.js"),
        title=title,
        vega=script(),
        data=in_script({"kind": kind, "title": title, **data, "config": CONFIG, "figures": views}),
        figures=figures,
        **shown,
    )


def filled(kind: str, **shown: Any) -> str:
    """Fill the template of a kind of page, with the style and the palette that all pages have.

    Characters that cannot be written as UTF-8, as in a folder's name of other bytes, become question marks.
    """
    template = _environment().get_template(f"{kind}.html")
    text = str(template.render(kind=kind, policy=_POLICY, style=style(), **shown))
    return text.encode("utf-8", "replace").decode("utf-8")


def text_of(name: str) -> str:
    """Return a file that lies beside the templates."""
    return (files("fedloom.study.report") / "templates" / name).read_text("utf-8")


def part(template: str, macro: str, *arguments: Any) -> str:
    """Return the HTML of one macro of a template."""
    return str(getattr(_environment().get_template(template).module, macro)(*arguments))


@cache
def _environment() -> Any:
    jinja2 = need("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedloom.study.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"beside": beside}
    return environment


def beside(several: Iterable[Box]) -> list[list[Box]]:
    """Group stages: those that work on different parts, or in different rounds, stand side by side."""
    groups: list[list[Box]] = []
    for box in several:
        if groups and box.beside:
            groups[-1].append(box)
        else:
            groups.append([box])
    return groups


def in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever texts are in it: no '<', '>' or '&' is left."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
