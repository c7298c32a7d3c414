"""The report's figures as image files: what is drawn and how files are called, and in a browser that they are drawn."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedloom.errors import UserError
from fedloom.study.grid import Cell
from fedloom.study.report import collect, write
from fedloom.study.report.images import CAPTIONS, LETTERS, LONG, WIDTH, images_of, save
from fedloom.study.report.plots import curves, figures_of, matrices
from fedloom.study.report.records import Matrices
from fedloom.study.report.scores import Curves
from grid_support import write_run

HOSTILE = ["../../x", "/etc/passwd", "a\x00b", "C:\\x", "..", "", "$x$ <b>\n", "\ud800", "長" * 300, "nul", "A", "a"]
CHROMIUM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)


def lines(name: str = "m", clients: int = 2) -> Curves:
    several = {f"c{i}": {1: 0.1 * i, 2: 0.2 * i} for i in range(clients)}
    return Curves("seg", name, "max", "test", "", several)


def weights(names: tuple[str, ...] = ("a", "b")) -> Matrices:
    rounds = {r: {a: {b: float(r) for b in names} for a in names} for r in (1, 2, 3)}
    return Matrices("w", "Weights", "receiver", "sender", names, rounds)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    clients = {"a": {"semseg": 30.0, "depth": 0.7}, "b": {"semseg": 20.0}}
    history = {r: {c: {t: v + r for t, v in of.items()} for c, of in clients.items()} for r in (1, 2)}
    return write_run(tmp_path / "g", Cell("D", "B", "-", 0), clients, history=history)


def test_each_view_of_a_run_is_an_image_with_its_numbers(run):
    go = pytest.importorskip("plotly.graph_objects")
    figures = figures_of(collect(run))
    made = images_of(figures)
    drawn = {
        tuple(zip(trace["x"], trace["y"], strict=True))
        for image in made.values()
        for trace in image["data"]
        if trace["type"] == "scatter"
    }
    wanted = {
        tuple(zip(trace["x"], trace["y"], strict=True))
        for figure in figures.values()
        for view in figure["views"]
        for trace in view["data"]
        if figure["control"] == "select" and "y" in trace and "z" not in trace
    }
    assert wanted
    assert wanted <= drawn
    assert {"semseg-miou-test-personal", "depth-rmse-test-personal"} <= set(made)
    for image in made.values():
        go.Figure(image)  # raises for what plotly does not know


def test_a_slider_gives_the_last_round_of_each_set():
    figure = matrices(weights()) | {"title": "Weights"}
    assert [(n, i["data"][0]["z"]) for n, i in images_of({"w": figure}).items()] == [
        ("Weights-round-3", [[3.0, 3.0], [3.0, 3.0]])
    ]
    for number, view in enumerate(figure["views"]):
        view["set"] = "one" if number < 2 else "two"
    made = images_of({"w": figure})
    assert {n: i["data"][0]["z"][0][0] for n, i in made.items()} == {
        "Weights-one-round-2": 2.0,
        "Weights-two-round-3": 3.0,
    }


def test_columns_and_axes_of_a_view_are_drawn():
    trace = {"type": "scatter", "mode": "markers", "showlegend": False, "meta": {"kind": "pairs"}}
    views = [{"name": "v", "data": [{}], "columns": {"x": 1, "y": 0}, "across": "over", "axis": "up"}]
    layout = {"xaxis": {}, "yaxis": {}, "height": 100}
    figure = {"views": views, "shared": [trace], "columns": [[1], [2]], "control": "select", "layout": layout}
    image = images_of({"p": figure})["v"]
    assert (image["data"][0]["x"], image["data"][0]["y"]) == ([2], [1])
    assert [image["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")] == ["over", "up"]


def test_names_stay_in_the_folder_and_apart(tmp_path):
    names = [*HOSTILE, *HOSTILE]
    figures = {f"f{i}": curves([lines(name)]) | {"title": name} for i, name in enumerate(names)}
    figures |= {f"g{i}": matrices(weights()) | {"title": name} for i, name in enumerate(names)}
    made = images_of(figures)
    assert len(made) == len(figures)
    assert len({stem.casefold() for stem in made}) == len(figures)
    for stem in made:
        file = tmp_path / f"{stem}.svg"
        file.touch()
        assert file.resolve().parent == tmp_path.resolve()
    assert len(list(tmp_path.iterdir())) == len(figures)


def test_texts_are_escaped_and_cut():
    client = "<b>&" + "n" * 60
    named = Curves("seg", "<i>", "max", "test", "", {client: {1: 1.0}, "c": {1: 2.0}})
    image = next(iter(images_of({"f": curves([named]) | {"title": "<script>"}}).values()))
    assert image["layout"]["title"]["text"] == "&lt;script&gt;: &lt;i&gt;, test"
    shown = next(t["name"] for t in image["data"] if t["meta"]["name"] == client)
    assert shown == "&lt;b&gt;&amp;" + "n" * (LONG - 5) + "…"
    axis = next(iter(images_of({"f": matrices(weights((client, "b")))}).values()))["layout"]["xaxis"]
    assert axis["labelalias"] == {"&lt;b&gt;&amp;" + "n" * 60: shown}


def test_an_image_grows_by_its_legend_and_not_by_the_page():
    few, many = (images_of({"f": curves([lines(clients=n)])})["m-test"]["layout"] for n in (2, 18))
    assert few["width"] == many["width"] == WIDTH
    # the plot itself is as high as before
    assert many["height"] - many["margin"]["b"] == few["height"] - few["margin"]["b"]
    assert many["margin"]["b"] > few["margin"]["b"]
    assert few["paper_bgcolor"] == "#fff"
    assert round(WIDTH / 96 * 25.4) == 90, "a column, in millimetres"
    assert few["font"]["size"] == LETTERS >= 8 * 96 / 72 - 0.1, "8 pt"


def test_kaleido_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UserError, match=r"pip install 'fedloom\[report\]'"):
        save({}, {"png": tmp_path})


@pytest.fixture
def browser() -> None:
    pytest.importorskip("kaleido")
    if CHROMIUM is None:
        pytest.skip("needs chromium")


@pytest.mark.slow
@pytest.mark.usefixtures("browser")
class TestDrawn:
    def test_files(self, run, tmp_path):
        figures: dict[str, Any] = figures_of(collect(run))
        figures |= {
            "w": matrices(weights()),
            "x": curves([lines("$x$ <b>")]) | {"title": "../../x"},
            "y": curves([lines("長" * 300)]),
        }
        png, svg = tmp_path / "new" / "png", tmp_path / "svg"
        files = save(figures, {"png": png, "svg": svg})
        stems = set(images_of(figures))
        assert {f.stem for f in png.iterdir()} == {f.stem for f in svg.iterdir()} == {*stems, "captions"}
        assert set(files) == {*png.iterdir(), *svg.iterdir()}
        assert all(f.read_bytes().startswith(b"\x89PNG") for f in png.glob("*.png"))
        texts = "".join(ElementTree.parse(svg / "x-x-b-test.svg").getroot().itertext())
        assert "../../x: $x$ <b>, test" in texts

    def test_no_browser(self, monkeypatch, tmp_path):
        monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
        with pytest.raises(UserError, match="not found at BROWSER_PATH=.*none: install one"):
            save({}, {"png": tmp_path})

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "f").touch()
        with pytest.raises(UserError, match=f"f/x/{CAPTIONS}: "):
            save({"m": curves([lines()])}, {"png": tmp_path / "f" / "x"})


def test_the_numbers_behind_each_figure(tmp_path: Path) -> None:
    clients = {"a": {1: 0.1, 2: 0.7000000000000001}, "b": {1: 0.3, 2: math.nan}}
    lines = curves([Curves("seg", "miou", "max", "test", "global", clients)])
    whole = {"a": {"a": 1.0, "b": -0.5}, "b": {"a": -0.5, "b": 1.0}}
    heat = matrices(Matrices("mixing", "", "receiver", "sender", ("a", "b"), {3: whole}))
    files = save({"curves": lines | {"title": "seg"}, "mixing": heat | {"title": "Mixing"}}, {"csv": tmp_path / "new"})
    assert sorted(file.name for file in files) == ["Mixing-round-3.csv", CAPTIONS, "seg-miou-test-global.csv"]
    first, _, second = (file.read_text("utf-8").splitlines() for file in sorted(files))
    assert first == ["name,x,y,value", ",a,a,1.0", ",b,a,-0.5", ",a,b,-0.5", ",b,b,1.0"]
    assert second[:5] == ["name,x,y,value", "a,1,0.1,", "a,2,0.7000000000000001,", "b,1,0.3,", "b,2,,"]


def test_captions_say_what_of_how_many_and_whether_there_is_an_interval(run: Path, tmp_path: Path) -> None:
    write(run, tmp_path / "page.html", {"csv": tmp_path / "csv"})
    said = dict(line.split(": ", 1) for line in (tmp_path / "csv" / CAPTIONS).read_text("utf-8").splitlines())
    assert set(said) == {file.stem for file in (tmp_path / "csv").glob("*.csv")}
    text = said["semseg-miou-test-personal"]
    assert text.startswith(
        "semseg: miou, test, personal; upwards mIoU ↑; thin lines are 2 clients, the thick one is their"
    )
    assert "2 clients, 2 rounds, seed 0; of one seed there is no interval." in text
