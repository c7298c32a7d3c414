"""Test what a report shows of the folder `predictions` of runs, from files made by hand."""

from __future__ import annotations

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.data.drawing import CELL, GAP
from fedloom.errors import StateError, UserError
from fedloom.experiments.export.predictions import over_rounds
from fedloom.federation.runs.reader import index_of
from fedloom.study.charts import rows_of
from fedloom.study.grid import Cell
from fedloom.study.report import collect, predictions, write
from fedloom.study.report.collect import GridReport, RunReport
from fedloom.study.report.figures import figures_of
from grid_support import DEA, FEDAVG, paper_grid, write_grid, write_run
from report_support import cells

NASTY = "</script><img src=x onerror=alert(1)>&\"'"
CLIENTS = {name: {"semseg": 1.0, "depth": 2.0} for name in ("a", "b")}


def png(red: int) -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes([0, red, 0, 0]))) + chunk(
        b"IEND", b""
    )  # fmt: skip


def uri(red: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(red)).decode()


def keep(run: Path, tasks: tuple[str, ...] = ("semseg", "depth"), shift: int = 0, examples: int = 2) -> Path:
    """Pictures of `examples` examples: input 0, truth 1, answer 2 + shift."""
    home = run / predictions.PREDICTIONS
    home.mkdir()
    for name, red in (("input", 0), ("truth", 1), ("answer", 2 + shift)):
        (home / f"{name}.png").write_bytes(png(red))
    about = [
        {"task": t, "model": "global", "client": "a"}
        | {what: [{"file": f"{what}.png", "text": f"{t}!"}] * examples for what in ("truth", "answer")}
        for t in tasks
    ]
    part = {"data": "shared test", "domain": None, "tasks": about}
    part["examples"] = [{"position": 3 * i, "input": "input.png"} for i in range(examples)]
    put(run, predictions.INDEX, {"round": 1, "split": "test", "parts": [part]})
    return home


def put(run: Path, name: str, value: Any) -> None:
    (run / predictions.PREDICTIONS).mkdir(exist_ok=True)
    (run / predictions.PREDICTIONS / name).write_text(json.dumps(value))


def stored(run: Path, name: str = predictions.INDEX) -> Any:
    return json.loads((run / predictions.PREDICTIONS / name).read_text())


def counted(run: Path, *models: Mapping[str, Any], task: str = "semseg", in_all: int | None = None) -> None:
    base = {"clients": ["a"], "model": "personal", "data": "shared test", "examples": 9, "examples_in_all": 9}
    of = {"unit": "examples", "models": [base | model for model in models], "in_all": in_all or len(models)}
    put(run, predictions.CONFUSION, {"round": 1, "split": "test", "tasks": {task: of}})


def run_of(folder: Path, values: Any = None) -> Path:
    return write_run(folder, Cell("D", "B", "-", 0), values or CLIENTS)


class Images(HTMLParser):
    """The images of a page with their alt texts, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str | None, str | None]] = []
        self.text = ""
        self.hidden = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.hidden = tag in ("script", "style")
        if tag == "img":
            about = dict(attributes)
            if about.get("class") in ("under", "over"):  # the places of an enlarged one
                return
            assert set(about) <= {"src", "alt"}
            self.found.append((about["alt"], about["src"]))

    def handle_endtag(self, tag: str) -> None:
        self.hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self.hidden else data


def page_of(folder: Path) -> Images:
    return Images(write(folder, folder / "page.html").read_text("utf-8"))


def run_report(folder: Path) -> RunReport:
    found = collect(folder)
    assert isinstance(found, RunReport)
    return found


def test_a_run_shows_input_truth_and_prediction(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    keep(run)
    page = page_of(run)
    for i in (0, 3):
        assert (f"input, test example {i}", uri(0)) in page.found
        for task in ("semseg", "depth"):
            assert (f"truth of {task}, test example {i}", uri(1)) in page.found
            assert (f"prediction of {task}, test example {i}", uri(2)) in page.found
    assert len(page.found) == 2 * 5
    assert page.text.count("depth!") == 2  # the same text stands once, with the truth


def test_the_same_images_over_the_rounds(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    home = keep(run)
    assert not run_report(run).predictions.over_rounds
    assert "over the rounds" not in page_of(run).text
    index = stored(run)
    put(run, predictions.INDEX, index | {"round": 300})
    for round in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):  # the last is of a run that was longer once
        (home / f"round-{round}.png").write_bytes(png(round % 200))
        earlier = json.loads(json.dumps(index).replace("answer.png", f"round-{round}.png"))
        put(run, index_of(round), earlier | {"round": round})
    put(run, index_of("x"), {"round": 3, "parts": "none"})
    found = run_report(run).predictions
    assert [name for name, _ in found.over_rounds[0].rows] == [
        *("truth", "round 1", "round 4", "round 16", "round 64", "round 256", "round 300")
    ]
    page = page_of(run)
    assert ("round 64 of depth, test example 3", uri(64)) in page.found
    assert ("round 300 of depth, test example 3", uri(2)) in page.found
    assert "The same images over the rounds" in page.text
    assert "round-x.json is not used, because it is damaged" in page.text


def test_the_same_images_over_the_rounds_as_one_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    run, out = run_of(tmp_path), tmp_path / "out.png"
    home = keep(run)
    asked = ["plot", "picture", str(run), "--over-rounds", "--count", "1", "--out", str(out)]
    for more in ([], [str(run)]):
        result = CliRunner().invoke(app, [*asked, *more])
        assert isinstance(result.exception, UserError)
        assert ("expected one run" if more else "expected predictions of several rounds") in str(result.exception)
    index = stored(run)
    put(run, predictions.INDEX, index | {"round": 2})
    (home / "then.png").write_bytes(png(99))
    put(run, index_of(1), json.loads(json.dumps(index).replace("answer.png", "then.png")))
    assert CliRunner().invoke(app, asked).exit_code == 0
    with image.open(out) as drawn:
        across = [drawn.getpixel((GAP + at * (CELL + GAP) + 9, 90)) for at in range(4)]
        assert drawn.width == GAP + 4 * (CELL + GAP)
    assert across == [(red, 0, 0) for red in (0, 1, 99, 2)]  # input, truth, after round 1, after round 2
    (home / "then.png").write_bytes(png(99)[:40])
    with pytest.raises(StateError, match="absent or damaged"):
        over_rounds(run)


def test_a_run_without_predictions_has_no_such_section(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run_report(run).predictions == predictions.Predictions()
    text = write(run).read_text("utf-8")
    assert 'id="predictions"' not in text
    assert 'id="confusion"' not in text


def test_names_from_files_are_texts_and_nothing_else(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    info = json.loads((run / "run.json").read_text())
    info["tasks"] = {NASTY: info["tasks"]["semseg"]}
    info["clients"] = {NASTY: {"tasks": {NASTY: 1.0}}}
    (run / "run.json").write_text(json.dumps(info))
    (run / "metrics.jsonl").write_text("")
    keep(run, tasks=(NASTY,))
    counted(run, {"clients": [NASTY], "model": NASTY, "data": NASTY, "counts": [[1, 0], [1, 1]]}, task=NASTY)
    index = stored(run)
    index["parts"][0]["domain"] = NASTY
    index["parts"][0]["tasks"][0]["truth"][0]["text"] = NASTY
    put(run, predictions.INDEX, index)
    text = write(run).read_text("utf-8")
    page = Images(text)  # which knows no attribute but src and alt
    assert {src for _, src in page.found} == {uri(0), uri(1), uri(2)}
    assert f"truth of {NASTY}, {NASTY}, test example 0" in {alt for alt, _ in page.found}
    assert page.text.count(NASTY) > 3
    assert "<img src=x" not in text
    data = re.search(r'id="report-data">(.*?)</script>', text, re.S)
    assert data is not None
    views = json.loads(data[1])["figures"]["confusion-0"]
    assert [view["name"] for view in views] == [f"{NASTY} model, {NASTY} data, {NASTY}"]


@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/b.png", "..png", "secret.txt", ""])
def test_pictures_are_read_from_the_folder_alone(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path)
    keep(run)
    (run / "secret.png").write_bytes(png(77))
    index = stored(run)
    index["parts"][0]["examples"][0]["input"] = name
    put(run, predictions.INDEX, index)
    page = page_of(run)
    assert page.found == []
    assert "index.json is not used, because it is damaged" in page.text


def test_what_is_no_picture_or_too_large_is_not_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    home = keep(run, tasks=("semseg",), examples=1)
    (home / "input.png").unlink()
    (home / "truth.png").write_text("<svg onload=alert(1)>")
    (home / "answer.png").write_bytes(png(2) + bytes(5000))
    monkeypatch.setattr(predictions, "LARGEST", 4000)
    page = page_of(run)
    assert page.found == []
    assert "3 pictures are absent, damaged or too large" in page.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_among_the_pictures_is_named_and_not_waited_for(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    home = keep(run, tasks=("semseg",), examples=1)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "status": "running"}))  # its checkpoint's head is read
    for file in (home / "truth.png", home / predictions.CONFUSION, run / "partition.json", run / "state.json"):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    found = run_report(run).predictions
    assert found.notes == (
        "confusion.json is not opened, because it is no regular file.",
        "truth.png is not opened, because it is no regular file.",
        "1 picture is absent, damaged or too large.",
    )
    assert found.examples[0].rows[0] == ("truth", (None,))


@pytest.mark.parametrize("name", [predictions.INDEX, predictions.CONFUSION])
@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"parts": 3, "tasks": 3}', '{"parts": [{}], "tasks": {"semseg": {}}}', "\udcff"]
)
def test_a_damaged_file_is_a_note(tmp_path: Path, name: str, text: str) -> None:
    run = run_of(tmp_path)
    keep(run)
    counted(run, {"counts": [[3, 1], [0, 5]]})
    (run / predictions.PREDICTIONS / name).write_bytes(text.encode(errors="surrogateescape"))
    found = run_report(run).predictions
    assert [note for note in found.notes if name in note and "damaged" in note] == list(found.notes)
    assert len(found.notes) == 1
    # the other one is shown all the same
    assert bool(found.examples) == (name == predictions.CONFUSION)
    assert bool(found.confusions) == (name == predictions.INDEX)
    assert found.notes[0] in page_of(run).text


@pytest.mark.parametrize("counts", [[[1, 2]], [[1], [2]], [[1, -1], [0, 1]], [[1, 0.5], [0, 1]], [["x"]]])
def test_matrices_must_be_square_and_of_counts(tmp_path: Path, counts: Any) -> None:
    run = run_of(tmp_path)
    counted(run, {"counts": counts})
    found = run_report(run).predictions
    assert found.confusions == ()
    assert "damaged" in found.notes[0]


def test_confusion_is_in_shares_of_the_truth_with_counts_beside(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    counted(run, {"counts": [[3, 1], [0, 0]]}, {"clients": ["b"], "counts": [[1, 1], [0, 5]]}, in_all=4)
    report = run_report(run)
    figure = figures_of(report)["confusion-0"]
    assert {view.name: cells(view.chart) for view in figure.views} == {
        "2 models together": {"1": {"1": 1, "0": 0}, "0": {"1": 2 / 6, "0": 4 / 6}},
        "personal model of a, shared test data": {"1": {}, "0": {"1": 0.25, "0": 0.75}},
        "personal model of b, shared test data": {"1": {"1": 1, "0": 0}, "0": {"1": 0.5, "0": 0.5}},
    }
    assert list(cells(figure.views[0].chart)) == ["1", "0"]  # the class that is recognised best comes first
    assert [row["note"].split()[0] for row in rows_of(figure.views[0].chart)] == ["5", "0", "2", "4"]
    assert report.predictions.confusions[0].note == "The first 2 of 4 models."
    few = replace(report.predictions, confusions=(replace(report.predictions.confusions[0], minimum=3),))
    drawn = figures_of(replace(report, predictions=few))["confusion-0"].views[0].chart
    assert cells(drawn) == {"1": {"1": 1, "0": 0}, "0": {}}  # of class 0 two are wrong: too few of a table to show


def test_the_sum_of_confusions_tells_no_count_of_few_rows_of_a_client(tmp_path: Path) -> None:
    """Class 1 of the second client would follow from the sum and the first client."""
    run = run_of(tmp_path)
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "table": {"minimum": 5}}))
    counted(run, {"counts": [[9, 6], [10, 9]]}, {"clients": ["b"], "counts": [[8, 0], [3, 7]]})
    together, *each = figures_of(run_report(run))["confusion-0"].views
    assert cells(together.chart)["1"] == {"1": 16 / 29, "0": 13 / 29}
    assert [cells(view.chart)["1"] for view in each] == [{}, {}]
    assert [cells(view.chart)["0"] for view in each] == [{"1": 0.4, "0": 0.6}, {"1": 0.0, "0": 1.0}]


def test_a_model_of_many_clients_is_named_by_some(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    one = {"clients": list("abcde"), "model": "global", "counts": [[1]], "examples": 9, "examples_in_all": 1234}
    counted(run, one)
    (found,) = run_report(run).predictions.confusions
    assert list(found.views) == ["global model, shared test data, a, b, c and 2 more"]
    assert found.note == "Counted on 9 of 1,234 examples, evenly spaced."


def grid_folder(folder: Path, seeds: Mapping[tuple[str, str, int], int]) -> Path:
    """A grid with predictions in these cells (base, add-on, seed) -> shift."""
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, seeds=[0, 1])
    write_grid(folder, grid, {})
    for base in grid.bases:
        for addon in grid.addons:
            for seed in grid.seeds:
                path = write_run(folder, Cell("D", base, addon, seed), DEA if addon != "-" else FEDAVG)
                if (base, addon, seed) in seeds:
                    keep(path, shift=seeds[base, addon, seed])
                    counted(path, {"counts": [[1, seed], [0, 1]]}, {"counts": [[1, 2], [3, 1]]})
    return folder


def grid_report(folder: Path) -> GridReport:
    found = collect(folder)
    assert isinstance(found, GridReport)
    return found


def test_a_grid_shows_its_methods_side_by_side(tmp_path: Path) -> None:
    folder = grid_folder(tmp_path / "g", {("FedAvg", "-", 0): 0, ("FedAvg", "-", 1): 1, ("FedProx", "+DEA", 1): 2})
    report = grid_report(folder)
    # of seed 1, which has more
    assert [e.title for e in report.predictions.examples] == ["seed 1, test example 0", "seed 1, test example 3"]
    for example in report.predictions.examples:
        assert example.tasks == ("semseg", "depth")
        drawn = {label: [p.uri for p in pictures if p] for label, pictures in example.rows}
        assert drawn == {"truth": [uri(1)] * 2, "FedAvg": [uri(3)] * 2, "FedProx +DEA": [uri(4)] * 2}
    (confusion,) = report.predictions.confusions
    assert confusion.views == {"FedAvg": ((2, 3), (3, 2)), "FedProx +DEA": ((2, 3), (3, 2))}
    page = page_of(folder)
    assert ("FedProx +DEA of depth, seed 1, test example 3", uri(4)) in page.found
    assert sum(src == uri(0) for _, src in page.found) == 2  # inputs are there once


def with_errors(run: Path, legend: Any) -> None:
    """Add to what `keep` wrote where answers are wrong (picture 9) and what colours mean."""
    home = run / predictions.PREDICTIONS
    (home / "wrong.png").write_bytes(png(9))
    index = stored(run)
    for task in index["parts"][0]["tasks"]:
        task |= {"wrong": [{"file": "wrong.png", "text": "24 % wrong"}] * 2, "legend": legend}
        task["truth"] = [{**picture, "ends": ["1 m", "7 m"]} for picture in task["truth"]]
        task["wrong_legend"] = {"colours": [["#f5f5f5", "right"], ["#d55e00", "wrong"]]}
    put(run, predictions.INDEX, index)


def test_where_answers_are_wrong_stands_below_them_and_colours_have_names(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    keep(run)
    with_errors(run, {"colours": [["#112233", NASTY]], "ramp": ["#000000", "#ffffff"], "ends": ["near", "far"]})
    text = write(run).read_text("utf-8")
    page = Images(text)
    assert ("where prediction of depth is wrong, test example 3", uri(9)) in page.found
    assert page.text.count("24 % wrong") == 4
    assert NASTY in page.text  # the name of a class, as text
    assert "<img src=x" not in text
    assert "linear-gradient(90deg, #000000, #ffffff)" in text
    assert "near" in page.text


@pytest.mark.parametrize("color", ["red", "#12345", "#112233;background:url(//x)", "#11223g"])
def test_a_legend_takes_nothing_but_colours(tmp_path: Path, color: str) -> None:
    run = run_of(tmp_path)
    keep(run)
    with_errors(run, {"colours": [[color, "x"]]})
    found = run_report(run).predictions
    assert found.examples == ()
    assert "damaged" in found.notes[0]


def test_methods_show_where_they_are_wrong_in_the_place_of_their_answers(tmp_path: Path) -> None:
    folder = grid_folder(tmp_path / "g", {("FedAvg", "-", 0): 0, ("FedProx", "-", 0): 1})
    for number, base in enumerate(("FedAvg", "FedProx")):
        with_errors(Cell("D", base, "-", 0).folder(folder), {"colours": [["#00000" + str(number), base]]})
    found = grid_report(folder).predictions
    assert [name for _, name in found.legends["semseg"][0].colours] == ["FedAvg", "FedProx"]
    assert set(found.examples[0].wrong) == {"FedAvg", "FedProx"}
    page = page_of(folder)
    assert sum(src == uri(9) for _, src in page.found) == 2 * 2 * 2
    assert "Show where predictions are wrong" in page.text


def test_confusions_name_their_classes(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    counted(run, {"counts": [[8, 2, 0], [0, 5, 5], [1, 0, 3]]})
    found = stored(run, predictions.CONFUSION)
    found["tasks"]["semseg"]["classes"] = ["floor", "wall", "sky"]
    put(run, predictions.CONFUSION, found)
    figure = figures_of(run_report(run))["confusion-0"]
    assert list(cells(figure.views[0].chart)) == ["floor", "sky", "wall"]
    assert "wall for sky (50\u00a0% of all wall)" in page_of(run).text
    found["tasks"]["semseg"]["classes"] = ["floor", "floor", "sky"]  # which do not tell classes apart
    put(run, predictions.CONFUSION, found)
    assert list(cells(figures_of(run_report(run))["confusion-0"].views[0].chart)) == ["0", "2", "1"]


def test_methods_with_other_data_are_not_put_side_by_side(tmp_path: Path) -> None:
    folder = grid_folder(tmp_path / "g", {("FedAvg", "-", 0): 0, ("FedProx", "-", 0): 1})
    info = Cell("D", "FedProx", "-", 0).folder(folder) / "run.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"data_hash": "other"}))
    found = grid_report(folder).predictions
    assert found.examples == ()
    assert "the data of its runs differ" in found.notes[0]


def test_an_answer_to_another_example_is_not_shown(tmp_path: Path) -> None:
    folder = grid_folder(tmp_path / "g", {("FedAvg", "-", 0): 0, ("FedProx", "-", 0): 1})
    run = Cell("D", "FedProx", "-", 0).folder(folder)
    index = stored(run)
    index["parts"][0]["examples"][1]["position"] = 5
    put(run, predictions.INDEX, index)
    first, second = grid_report(folder).predictions.examples
    assert all(dict(first.rows)["FedProx"])
    assert dict(second.rows)["FedProx"] == (None, None)


def test_a_page_that_would_be_too_large_shows_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    keep(run, examples=4)
    monkeypatch.setattr(predictions, "ROOM", 6 * len(png(0)))  # an example takes five
    page = page_of(run)
    assert len(page.found) == 10
    assert "2 more examples are not shown" in page.text
