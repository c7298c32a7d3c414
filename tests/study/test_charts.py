"""Charts: what they draw, and as what they are written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import UserError
from fedloom.study import charts
from fedloom.study.charts import COLORS, Chart
from fedloom.study.figures import of_ranks
from fedloom.study.report.figures import CAPTIONS, Figure, View, save
from fedloom.study.significance import Ranks
from fedloom.study.statistics import Ranking
from report_support import NASTY, cells, drawn

GAPS = {1: 0.5, 2: math.nan, 3: math.inf}


def every() -> dict[str, Chart]:
    """A chart of each kind, with hostile names and numbers."""
    many = {f"c{i}": {1: float(i), 2: i + 1.0} for i in range(10)}
    look: dict[str, Any] = {"bands": {NASTY: {1: (0.1, 0.9)}}, "strong": [NASTY], "stars": {"best": {1: 0.5}}}
    points = [{"name": f"{i}{NASTY}", "x": i, "y": -i, "kind": NASTY, "form": str(i % 2)} for i in range(3)]
    return {
        "lines": charts.lines({NASTY: GAPS} | many, "round", NASTY, title=NASTY, **look),
        "bars of lines": charts.lines({"a": {1: 2}}, "x", "y", bands={"a": {1: (1, 3)}}, bars=True, log="xy"),
        "nothing": charts.lines({}, "round", "y"),
        "heat": charts.heat({NASTY: {NASTY: 1, "b": math.nan}}, [NASTY, "b"], value=NASTY, numbers=".2f"),
        "no heat": charts.heat({"a": {}}, ["b"], middle=0.0),
        "intervals": charts.intervals({NASTY: (-1, -2, 3), "b": (1, math.nan, math.nan)}, "%", texts={"b": NASTY}),
        "ranks": charts.intervals({"a": (1.5, 1, 2)}, "rank", small={"a": [1, 2]}, signed=False),
        "scatter": charts.scatter(points, NASTY, "y", labels=True, color_by="kind", shape_by="form", zero=True),
        "bars": charts.bars({NASTY: {"a": 1, NASTY: 2}}, "x", ends={(NASTY, "a"): (0, 2)}, dots={NASTY: [1]}),
    }


@pytest.mark.parametrize("kind", every())
def test_every_kind_of_chart_is_drawn_whatever_the_names_are(tmp_path: Path, kind: str) -> None:
    charts.save(every()[kind], tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text("utf-8")
    assert text.startswith("<svg")
    assert "<img" not in text
    assert "var(--" not in text, "a file has the colours of the day"


def test_what_a_chart_is_written_as(tmp_path: Path) -> None:
    sheet = charts.concat([every()["lines"], every()["heat"]], title="t " * 90, about="about")
    begins = {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF", "html": b"<!DOCTYPE html>", "json": b"{"}
    for kind, first in begins.items():
        charts.save(sheet, tmp_path / f"sheet.{kind}")
        assert (tmp_path / f"sheet.{kind}").read_bytes().lstrip().startswith(first), kind
    assert json.loads((tmp_path / "sheet.json").read_text("utf-8"))["title"]["subtitle"] == ["about"]
    assert 'src="http' not in (tmp_path / "sheet.html").read_text("utf-8")
    with pytest.raises(UserError, match=r"sheet\.nothing: a chart is written as one of \.svg, \.png"):
        charts.save(sheet, tmp_path / "sheet.nothing")
    with pytest.raises(UserError, match="nowhere"):
        charts.save(sheet, tmp_path / "sheet.svg" / "nowhere.png")


def test_ticks_of_few_rounds_are_rounds() -> None:
    def ticks(rounds: int) -> Any:
        return charts.lines({"a": dict.fromkeys(range(rounds), 0.5)}, "round", "y")["encoding"]["x"]["axis"].get(
            "values"
        )

    assert (ticks(3), ticks(7), ticks(8)) == ([0, 1, 2], [0, 1, 2, 3, 4, 5, 6], None)


def test_a_number_that_is_none_leaves_a_gap_and_the_numbers_come_back() -> None:
    chart = charts.lines({"a": GAPS}, "round", "y", bands={"a": {1: (0.25, 0.75)}})
    assert charts.rows_of(chart) == [
        {"name": "a", "x": 1, "low": 0.25, "high": 0.75},
        {"name": "a", "x": 1, "y": 0.5},
        {"name": "a", "x": 2, "y": None},
        {"name": "a", "x": 3, "y": None},
    ]
    assert cells(charts.heat({"a": {"x": 1.0, "y": None}}, ["x", "y"])) == {"a": {"x": 1.0}}


def test_lines_beyond_the_last_colour_are_dashed_and_groups_share_a_colour() -> None:
    def looks(chart: Chart) -> list[tuple[str, list[int]]]:
        (line,) = (layer for layer in chart["layer"] if layer["mark"]["type"] == "line")
        colors = chart["encoding"]["color"]["scale"]["range"]
        return list(zip(colors, line["encoding"]["strokeDash"]["scale"]["range"], strict=True))

    names = [f"c{i}" for i in range(10)]
    several = {name: {1: 1.0} for name in names}
    of = looks(charts.lines(several, "x", "y"))
    assert [color for color, _ in of[:8]] == list(COLORS)
    assert (of[8][0], of[8][1]) == (COLORS[0], charts.DASHES[1])
    grouped = looks(charts.lines(several, "x", "y", groups={name: str(i // 5) for i, name in enumerate(names)}))
    assert {color for color, _ in grouped} == set(COLORS[:2])
    assert grouped[1][1] == charts.DASHES[1]


def test_many_intervals_stand_side_by_side() -> None:
    def marks(chart: Chart, kind: str) -> list[dict[str, Any]]:
        return [layer for layer in chart["layer"] if layer["mark"]["type"] == kind]

    several = {f"c{i}": {1: 0.0, 2: float(i)} for i in range(5)}
    bands = {n: {at: (y - 1, y + 1) for at, y in of.items()} for n, of in several.items()}
    few = charts.lines(several, "round", "y", bands=dict([*bands.items()][:4]))
    assert (len(marks(few, "area")), len(marks(few, "rule"))) == (4, 0)
    many = marks(charts.lines(several, "round", "y", bands=bands), "rule")
    assert [layer["mark"]["xOffset"] for layer in many] == [5, 9, 13, 17, 21]
    assert [layer["data"]["values"] for layer in many] == [
        [{"name": n, "x": 2, "low": i - 1.0, "high": i + 1.0}] for i, n in enumerate(several)
    ], "only the last interval of each"
    apart = charts.lines(several, "alpha", "y", bands=bands, bars=True)
    for kind in ("rule", "line"):
        assert [layer["mark"]["xOffset"] for layer in marks(apart, kind)] == [-8, -4, 0, 4, 8]
    assert [layer["mark"]["point"]["xOffset"] for layer in marks(apart, "line")] == [-8, -4, 0, 4, 8]
    assert [len(layer["data"]["values"]) for layer in marks(apart, "rule")] == [2] * 5


def test_a_line_on_another_is_dashed() -> None:
    several = {"a": {1: 0.0, 2: 1.0}, "b": {1: 0.005, 2: 1.0}, "c": {1: 0.05, 2: 1.0}, "d": {1: 0.0, 2: 1.0}}
    (line,) = (layer for layer in charts.lines(several, "x", "y")["layer"] if layer["mark"]["type"] == "line")
    assert line["encoding"]["strokeDash"]["scale"]["range"] == [charts.DASHES[at] for at in (0, 1, 0, 2)]


def test_many_bars_become_dots_on_one_line() -> None:
    for groups, mark in ((8, "bar"), (9, "circle")):
        chart = charts.bars({f"g{i}": dict.fromkeys("abcde", 1.0) for i in range(groups)}, "x")
        assert chart["layer"][0]["mark"]["type"] == mark
        assert ("yOffset" in chart["layer"][0]["encoding"]) == (mark == "bar")


def test_texts_on_strong_colours_are_light() -> None:
    light = {
        r["value"]: r["light"] for r in charts.rows_of(charts.heat({"a": {0: -1, 1: 0, 2: 1}}, range(3), middle=0))
    }
    assert light == {-1: True, 0: False, 1: True}
    assert {r["light"] for r in charts.rows_of(charts.heat({"a": {0: 0, 1: 0.5}}, range(2), low=0, high=1))} == {False}


def test_ranks_with_their_critical_difference(tmp_path: Path) -> None:
    means = {"best": 1.25, "$\\frac{$ <b>&\n\x07 " + "long" * 30: 2.0, "last": 2.75}
    made = of_ranks(Ranks("Mean ranks", Ranking(means, 9, 8.0, 0.01, 1.5), "test", "a task at a seed"))
    rows = charts.rows_of(made)
    assert [(row["value"], row["low"], row["high"], row["text"]) for row in rows] == [
        (1.25, 0.5, 2.0, "1.25"),
        (2.0, 1.25, 2.75, "2.00"),
        (2.75, 2.0, 3.5, "2.75"),
    ]
    about = " ".join(made["title"]["subtitle"])
    assert "mean ranks over N = 9 blocks (a task at a seed)" in about
    assert "critical difference of Nemenyi at 5%, 1.50. Friedman's test p = 0.0100." in about
    charts.save(made, tmp_path / "ranks.png")


def test_figures_as_files(tmp_path: Path) -> None:
    made = [charts.lines({"a": {1: 0.5, 2: value}}, "round", "y") for value in (0.6, 0.7)]
    figures = {
        "curves": Figure("Task", [View("loss", made[0]), View("LOSS", made[1])]),
        "given": Figure("", [View("1", made[0], "stem"), View("2", made[1], "stem")], is_slider=True),
    }
    files = save(figures, {"svg": tmp_path / "svg", "csv": tmp_path / "csv"}, "Of two runs.")
    stems = ["Task-loss", "Task-LOSS-2", "given-stem-round-2"]
    assert sorted(f.name for f in files if f.suffix == ".svg") == sorted(f"{stem}.svg" for stem in stems)
    assert (tmp_path / "csv" / "given-stem-round-2.csv").read_text("utf-8").splitlines() == [
        "name,x,y",
        "a,1,0.5",
        "a,2,0.7",
    ]
    captions = (tmp_path / "svg" / CAPTIONS).read_text("utf-8").splitlines()
    assert captions[0].startswith("Task-loss: Task, loss; ")
    assert all(line.endswith("Of two runs.") for line in captions)
    assert drawn(made[0]) == {"a": {1: 0.5, 2: 0.6}}


def test_a_text_stands_behind_the_bar_and_its_dots() -> None:
    chart = charts.bars({"a": {"": 1.0}, "b": {"": 2.0}}, "x", dots={"a": [0.5, 1.5], "b": [2.0]}, texts={"a": "1"})
    texts = [row for row in charts.rows_of(chart) if "text" in row]
    assert [(row["group"], row["value"]) for row in texts] == [("a", 1.5), ("b", 2.0)]
