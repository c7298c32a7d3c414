"""The parts that tests of pages share: run folders from plain values, a page and its charts, a hostile name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedloom.study.charts import rows_of
from fedloom.study.output import environment

NASTY = "</script><img src=x onerror=alert(1)>&\"'\u2028"
SHOWN = NASTY.replace("\u2028", " ")
"""The name in a chart."""


def write_files(
    folder: Path, info: Mapping[str, Any], lines: Iterable[Any], traffic: Iterable[Any] = (), **recipe: Any
) -> Path:
    """Write a run's folder: run.json, the lines of metrics.jsonl and bytes.jsonl, and a recipe with these keys."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"name": "t", "seed": 0, "data": {"name": "toy"}, "method": {"name": "m"}, "training": {"rounds": 9}}
    (folder / "recipe.yaml").write_text(json.dumps(whole | recipe))
    (folder / "run.json").write_text(json.dumps(info))
    for name, several in (("metrics.jsonl", lines), ("bytes.jsonl", traffic)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in several))
    return folder


def part(template: str, macro: str, *arguments: Any) -> str:
    """Return the HTML of one macro of a template."""
    return str(getattr(environment().get_template(template).module, macro)(*arguments))


class Page(HTMLParser):
    """Elements, their attributes, and the text of the visible part."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text, self.inside = "", ""
        self.feed(text)
        self.ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.inside = str(dict(attributes).get("id")) if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts["report-data"])


def view_of(figure: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The chart of a figure's view."""
    (found,) = [view["chart"] for view in figure if view["name"] == name]
    return found


def drawn(chart: dict[str, Any]) -> dict[str, dict[Any, float | None]]:
    """Name -> x -> y of the lines, bands and points that a chart draws; of a band the two ends."""
    found: dict[str, dict[Any, Any]] = {}
    for row in rows_of(chart):
        found.setdefault(row["name"], {})[row["x"]] = row["y"] if "y" in row else (row["low"], row["high"])
    return found


def cells(chart: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Row -> column -> number of a map."""
    found: dict[str, dict[str, float]] = {name: {} for name in chart["encoding"]["y"]["scale"]["domain"]}
    for row in rows_of(chart):
        found[row["row"]][row["column"]] = row["value"]
    return found


def panels(chart: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Title -> chart of a sheet."""
    return {" ".join(part.get("title", ())): part for part in chart["concat"]}


def check_figures(figures: dict[str, Any]) -> None:
    """Every chart can be drawn."""
    convert = pytest.importorskip("vl_convert")
    for figure in figures.values():
        for view in figure[:2]:
            assert convert.vegalite_to_svg(view["chart"]).startswith("<svg")
