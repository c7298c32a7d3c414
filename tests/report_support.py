"""What tests of the report's pages share: a page taken apart, figures that plotly takes, a hostile name."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

NASTY = "</script><img src=x onerror=alert(1)>&\"'\u2028"


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


def check_figures(figures: dict[str, Any]) -> None:
    """Every view is a valid figure of plotly."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in figures.values():
        for view in figure["views"]:
            shared = figure["shared"]
            traces = [{**(shared[i] if i < len(shared) else {}), **own} for i, own in enumerate(view["data"])]
            graph_objects.Figure(traces, figure["layout"])
