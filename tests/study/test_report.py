"""The page of a run and of a grid, from run folders made by hand."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import asdict, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.core.outline import Box, Outline
from fedloom.core.settings.registry import Registered
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.federation.runs.reader import Run
from fedloom.methods import METHODS
from fedloom.study import charts
from fedloom.study.charts import thinned
from fedloom.study.comparison import compare
from fedloom.study.grid import Cell
from fedloom.study.report import collect, records, write
from fedloom.study.report.against import against
from fedloom.study.report.collect import RunReport
from fedloom.study.report.figures import BUDGET, LINES, curve, figures_of, matrices
from fedloom.study.report.pages import in_script
from fedloom.study.report.records import Curves, worst, worst_tasks
from grid_support import DEA, FEDAVG, paper_grid, write_grid, write_run
from report_support import NASTY, SHOWN, Page, cells, check_figures, drawn, part, view_of, write_files

TASKS = {
    "seg": {"kind": "dense", "primary": "miou", "metrics": {"miou": "max"}},
    "depth": {"kind": "dense", "primary": "rmse", "metrics": {"rmse": "min"}},
}
CLIENTS = {
    "a": {"tasks": {"seg": 1.0}, "domain": "city", "train": 30, "val": 3},
    "b": {"tasks": {"seg": 1.0, "depth": 2.0}, "domain": "wood", "train": 20, "val": 2},
}


def metric(client: str | None, task: str, value: float | None, split: str = "test", model: str = "global"):
    name = TASKS[task]["primary"] if task in TASKS else "accuracy"
    where = {"model": model, "split": split, "data": f"shared {split}"}
    return {"client": client, "task": task, "metric": name, "value": value, **where}


def run_folder(folder: Path, lines: list[dict[str, Any]], traffic: list[dict[str, Any]] = [], **info: Any) -> Path:  # noqa: B006
    """A run's folder from the lines of its files; keywords change run.json."""
    method = {"name": info.get("method", "fedavg"), "add": {}}
    recipe = {"name": info.pop("name", "t"), "seed": 3, "method": method, "runtime": {}}
    rounds = max((line["round"] for line in lines), default=0)
    value = {"method": "fedavg", "tasks": TASKS, "clients": CLIENTS, "status": "finished", "final_round": rounds}
    return write_files(folder, value | info, [{"cohort": []} | line for line in lines], traffic, **recipe)


def two_rounds() -> list[dict[str, Any]]:
    """Seg gets better on test data and worse on validation data; b's depth is not measured in round 2."""
    return [
        {
            "round": r,
            "cohort": ["a", "b"],
            "metrics": [
                metric("a", "seg", a),
                metric("b", "seg", b),
                metric("a", "seg", -a, "val"),
                metric("b", "seg", -b, "val"),
                metric("b", "depth", depth),
            ],
            "events": [],
        }
        for r, a, b, depth in [(1, 0.1, 0.3, 0.7000000000000001), (2, 0.2, 0.6, None)]
    ]


def page_of(source: Path, base: Path | str | None = None) -> Page:
    return Page(write(source, base=base).read_text("utf-8"))


def rows_of(text: str, table: str) -> list[list[str]]:
    """Cells of a table of the page, line by line."""
    inside = text.partition(f'<table class="numbers" id="{table}">')[2].partition("</table>")[0]
    lines = re.findall(r"<tr>(.*?)</tr>", inside)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, two_rounds()))
    figures = page.data["figures"]
    check_figures(figures)
    seg = figures["curves-0"]
    assert [view["name"] for view in seg] == ["miou, test, global", "miou, val, global"]
    # validation is best in round 1, and says so on the curve of test data
    assert drawn(view_of(seg, "miou, test, global")) == {
        "a": {1: 0.1, 2: 0.2},
        "b": {1: 0.3, 2: 0.6},
        "mean over clients": {1: 0.2, 2: 0.4},
        "best round by validation: 1": {1: 0.2},
    }
    assert drawn(view_of(figures["curves-1"], "rmse, test, global"))["b"] == {1: 0.7000000000000001, 2: None}
    scores = {(s["task"], s["split"]): s for s in page.data["scores"]}
    assert scores["seg", "test"]["mean"] == 0.4
    assert scores["seg", "test"]["worst"] == {"client": "a", "value": 0.2}
    assert scores["seg", "test"]["round"] == 2
    assert scores["depth", "test"]["mean"] is None
    assert scores["depth", "test"]["worst"] is None
    final = Run.read(tmp_path).final()
    assert (final.values["seg"]["miou"], final.round) == (0.4, 2)
    assert {"about", "final", "curves", "federation"} < set(page.ids)
    assert not {"bytes", "seconds", "hyper-weights", "events", "task-similarity", "mixing", "labels"} & set(page.ids)


def test_a_personal_model_counts_before_the_global_one(tmp_path: Path) -> None:
    measured = [metric("a", "seg", 0.1), metric("b", "seg", 0.2), metric("b", "seg", 0.8, model="personal")]
    folder = run_folder(tmp_path, [{"round": 1, "metrics": measured}])
    found = collect(folder)
    assert isinstance(found, RunReport)
    assert [(c.model, c.mean) for c in found.curves] == [
        ("personal and global", {1: 0.45}),
        ("global", {1: pytest.approx(0.15)}),
    ]
    (score,) = found.scores
    assert (score.mean, score.model, score.worst) == (0.45, "personal and global", ("a", 0.1))


def test_what_a_client_does_not_hold_does_not_count(tmp_path: Path) -> None:
    found = collect(
        run_folder(tmp_path, [{"round": 1, "metrics": [metric("a", "depth", 9.0), metric("b", "depth", 1.0)]}])
    )
    assert isinstance(found, RunReport)
    assert [list(c.clients) for c in found.curves] == [["b"]]
    assert found.scores[0].mean == 1.0


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    tasks = {NASTY: {"kind": "classification", "primary": "accuracy", "metrics": {"accuracy": "max"}}}
    clients = {f"{NASTY}{i}": {"tasks": {NASTY: 1.0}, "domain": NASTY, "train": 1, "val": 1} for i in range(2)}
    one, two = clients
    lines = [
        {
            "round": 1,
            "metrics": [metric(c, NASTY, 0.5) for c in clients],
            "events": [{"event": NASTY, "client": one, "why": NASTY}],
            "seconds": {NASTY: 1.0},
            "records": [
                {"kind": "mixing", "weights": {one: {one: 0.5, two: 0.5}}},
                {"kind": "task-vectors", "tasks": [NASTY], "similarity": [[1.0]], "partners": [[]]},
                {"kind": "hyper-weights", "part": "encoder", "weights": {one: 0.3}},
            ],
        }
    ]
    entry = {"client": one, "role": NASTY, "task": NASTY, "bytes": 8}
    folder = run_folder(
        *(tmp_path, lines, [{"round": 1, "up": [entry], "down": [entry]}]),
        tasks=tasks,
        clients=clients,
        name=NASTY,
        method=NASTY,
        recipe_text=NASTY,
    )
    (folder / "partition.json").write_text(json.dumps({"labels": {one: {NASTY: [1, 2]}}}))
    text = write(folder).read_text("utf-8")
    page = Page(text)
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [a for _, attributes in page.elements for a in attributes if a.startswith("on")]
    assert [attributes.get("id") for tag, attributes in page.elements if tag == "script"] == [
        *("report-data", "vega", "page")
    ]
    assert page.data["title"] == f"{NASTY}: {NASTY}"
    assert f"{NASTY}0" in page.text
    raw = text.partition('id="report-data">')[2].partition("</script>")[0]
    assert not set("<>&\u2028") & set(raw)
    check_figures(page.data["figures"])
    sections = ("bytes", "seconds", "hyper-weights", "task-similarity", "mixing", "events")
    assert set(sections) < set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_the_same_run_makes_the_same_page_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, pages = run_folder(tmp_path / "run", two_rounds()), []
    for now in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write(run, tmp_path / "page.html")
        pages.append((tmp_path / "page.html").read_bytes())
    assert pages[0] == pages[1]


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    lines = two_rounds()
    for line in lines:
        line["records"] = [{"kind": "mixing", "weights": {"a": {"a": 1.0}}}]
    same = {"partition_hash": "p", "data_hash": "d"}  # so that a base can be chosen
    run_folder(tmp_path / "other", two_rounds(), **same)
    page = page_of(run_folder(tmp_path / "run", lines, **same))
    loads = [(tag, a) for tag, a in page.elements if tag in ("link", "img", "iframe") or "src" in a]
    assert not loads
    assert [a["href"][:1] for tag, a in page.elements if tag == "a"] == ["#"] * 6
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    for name in re.findall(r'querySelector(?:All)?\("([^"]+)"\)', page.scripts["page"]):
        tags = [a.get("class", "") for _, a in page.elements] + [tag for tag, _ in page.elements]
        assert any(part.strip().rpartition(".")[2] in tags for part in name.split(",")), name


@pytest.mark.parametrize("lines", [[], [{"round": 0, "cohort": [], "train": [], "metrics": [], "events": []}]])
def test_a_run_that_measured_nothing(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    page = page_of(run_folder(tmp_path, lines, status="running"))
    assert "not finished: round 0 of 9 · 2 clients, 2 tasks · seed 3" in page.text
    assert "No numbers of a kept model have been recorded yet." in page.text
    assert page.data["figures"] == {}
    assert page.data["scores"] == []


def test_one_client_one_round_and_no_more(tmp_path: Path) -> None:
    clients = {"a": {"tasks": {"seg": 1.0}}}
    folder = run_folder(tmp_path, [{"round": 1, "metrics": [metric(None, "seg", 0.5)]}], clients=clients)
    (folder / "bytes.jsonl").unlink()
    page = page_of(folder)
    (view,) = page.data["figures"]["curves-0"]
    assert drawn(view["chart"]) == {"all clients": {1: 0.5}}
    check_figures(page.data["figures"])


def test_a_cut_off_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_rounds(), status="running", final_round=0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "metr')
    page = page_of(folder)
    assert page.data["about"]["status"] == "not finished: round 2 of 9"
    assert "kept model" not in page.data["about"]
    assert {s["round"] for s in page.data["scores"]} == {2}


def test_training_losses_and_seconds(tmp_path: Path) -> None:
    line = {
        "round": 1,
        "metrics": [],
        "train": [{"client": "a", "task": "seg", "loss": 2.5, "examples": 3, "steps": 1}],
        "seconds": {"dispatch": 0.25, "evaluate": 1.0},
        "seconds_of": {"a": 0.5, "b": 0.125},
    }
    figures = page_of(run_folder(tmp_path, [line])).data["figures"]
    assert drawn(view_of(figures["curves-0"], "training loss, train, trained")) == {"a": {1: 2.5}}
    assert drawn(view_of(figures["seconds"], "seconds by phase")) == {"dispatch": {1: 0.25}, "evaluate": {1: 1.0}}
    assert drawn(view_of(figures["seconds"], "local training by client")) == {"a": {1: 0.5}, "b": {1: 0.125}}


def test_simulated_time(tmp_path: Path) -> None:
    def line(round: int, end: float) -> dict[str, Any]:
        records = [
            {"kind": "clock", "start": 2.0 * round - 2, "end": end},
            {"kind": "staleness", "models": 1, "local rounds": {"1": 1}, "seconds": {"mean": 0.5, "largest": 0.5}},
        ]
        return {"round": round, "metrics": [], "train": [], "records": records}

    figures = page_of(run_folder(tmp_path, [line(1, 2.0), line(2, 5.0)])).data["figures"]
    (view,) = figures["seconds"]
    assert drawn(view["chart"]) == {
        "per round": {1: 2.0, 2: 3.0},
        "since the start": {1: 2.0, 2: 5.0},
        "age of mixed models, mean": {1: 0.5, 2: 0.5},
    }


def test_bytes_by_role_task_and_client(tmp_path: Path) -> None:
    def entry(client: str, role: str, task: str | None, count: int) -> dict[str, Any]:
        return {"client": client, "role": role, "task": task, "bytes": count}

    up = [entry("a", "encoder", None, 100), entry("a", "head", "seg", 10), entry("b", "encoder", None, 100)]
    traffic = [{"round": r, "up": up, "down": [entry("a", "encoder", None, 7)]} for r in (1, 2)]
    page = page_of(run_folder(tmp_path, two_rounds(), traffic))
    figure = page.data["figures"]["bytes"]
    assert drawn(view_of(figure, "sent by clients, by role"))["encoder"] == {1: 200, 2: 200}
    by_task = {"no task": {1: 200, 2: 200}, "seg": {1: 10, 2: 10}}
    assert drawn(view_of(figure, "sent by clients, by task")) == by_task
    assert drawn(view_of(figure, "sent by clients, by client"))["a"] == {1: 110, 2: 110}
    assert drawn(view_of(figure, "sent to clients, by client"))["a"] == {1: 7, 2: 7}
    assert page.data["bytes"] == [
        {"role": "encoder", "task": "", "up": 400, "down": 14},
        {"role": "head", "task": "seg", "up": 20, "down": 0},
    ]
    assert sum(t["up"] for t in page.data["bytes"]) == Run.read(tmp_path).bytes_total()["up"]


def test_the_federation(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_rounds())
    labels = {"a": {"seg": 33}, "b": {"seg": 22, "depth": [5, 0, 17]}}
    (folder / "partition.json").write_text(json.dumps({"hash": "x", "clients": [], "labels": labels}))
    page = page_of(folder)
    figures = page.data["figures"]
    assert cells(figures["examples"][0]["chart"]) == {"a": {"seg": 33}, "b": {"seg": 22, "depth": 22}}
    # seg has label images, not classes: its counts are those of the examples
    assert [view["name"] for view in figures["labels"]] == ["depth"]
    assert cells(figures["labels"][0]["chart"]) == {"b": {"0": 5, "1": 0, "2": 17}}
    check_figures(figures)
    assert "seg, depth (weight 2)" in page.text
    assert "city" in page.text
    (folder / "partition.json").write_text("{")
    assert not {"examples", "labels"} & page_of(folder).data["figures"].keys()


def test_counts_of_few_rows_of_a_table_and_its_folder_are_not_shown(tmp_path: Path) -> None:
    """The least count is that of the run; what hides it in a sum is hidden as well."""
    folder = run_folder(tmp_path, two_rounds(), table={"minimum": 25})
    labels = {"a": {"seg": 24, "depth": [24, 26, 70]}, "b": {"depth": [30, 0, 40]}}
    (folder / "partition.json").write_text(json.dumps({"hash": "x", "clients": [], "labels": labels}))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "data": {"name": "table", "path": "/home/her own/visits.csv"}})
    )
    page = page_of(folder)
    assert cells(page.data["figures"]["examples"][0]["chart"]) == {"a": {"depth": 120}, "b": {"depth": 70}}
    shown = {"a": {"2": 70}, "b": {"0": 30, "1": 0, "2": 40}}
    assert cells(page.data["figures"]["labels"][0]["chart"]) == shown
    assert "Counts below 25 are left out." in page.text
    info = json.loads((folder / "run.json").read_text())
    info["clients"]["b"] |= {"train": 60, "val": 11}
    (folder / "run.json").write_text(json.dumps(info))
    figures = page_of(folder).data["figures"]  # one example of b without a label follows from no number
    assert cells(figures["examples"][0]["chart"])["b"] == {}
    assert cells(figures["labels"][0]["chart"])["b"] == {"1": 0, "2": 40}
    assert ("&lt;25" in page.text or "<25" in page.text, "visits.csv" in page.text) == (True, True)
    assert "her own" not in page.text


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    folder, elsewhere = run_folder(tmp_path / "run", two_rounds()), tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (folder / "report.html").symlink_to(elsewhere)
    with pytest.raises(StateError, match="report.html: a link to .*elsewhere found"):
        write(folder)
    assert elsewhere.read_text() == "mine"


def test_a_client_on_whose_data_a_metric_is_not_defined_does_not_count(tmp_path: Path) -> None:
    known = {"a": {0: 0.4, 1: 0.6}, "b": {0: math.nan, 1: math.nan}}
    curve = Curves("t", "auc", "max", "test", "global", known)
    assert curve.mean == {0: 0.4, 1: 0.6}
    diverged = replace(curve, clients=known | {"c": {0: 0.2, 1: math.nan}})
    assert diverged.mean == pytest.approx({0: 0.3, 1: math.nan}, nan_ok=True)
    nobody = replace(curve, clients={"b": known["b"]})
    assert nobody.mean == pytest.approx({0: math.nan, 1: math.nan}, nan_ok=True)


def test_no_line_and_no_change_of_a_client_with_few_test_rows(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = run_folder(tmp_path / name, two_rounds(), table={"minimum": 25})
        info = json.loads((folder / "run.json").read_text())
        info["clients"]["a"]["test"], info["clients"]["b"]["test"] = 30, 24
        (folder / "run.json").write_text(json.dumps(info))
    run = Run.read(tmp_path / "one")
    (of_test,) = [c for c in records.curves(run) if (c.task, c.split, c.is_primary) == ("seg", "test", True)]
    assert {*of_test.clients} == {"a", "b"}
    assert drawn(curve(of_test)).keys() & {"a", "b", "mean over clients"} == {"a", "mean over clients"}
    compared = against(run, Run.read(tmp_path / "two"))
    assert {name for each in compared.each for name in each.clients} == {"a"}


def test_matrices_over_the_rounds(tmp_path: Path) -> None:
    lines = two_rounds()
    lines[0]["records"] = [
        {"kind": "task-vectors", "tasks": ["depth"], "similarity": [[1.0]], "partners": [[]]},
        {
            "kind": "peer",
            "peer": "a",
            "neighbours": ["b"],
            "weights": {"a": 0.75, "b": 0.25},
            "similarity": {"b": -0.5},
        },
        {"kind": "peer", "peer": "b", "neighbours": [], "weights": {"b": 1.0}, "similarity": {}},
        {"kind": "conflict-averse", "peer": "a", "weights": {}, "acted": {"clip": {"b": 0.5}}},
        {"kind": "unheard-of", "what": 1},
    ]
    lines[1]["records"] = [
        {
            "kind": "task-vectors",
            "tasks": ["depth", "seg"],
            "similarity": [[1.0, 0.25], [0.25, 1.0]],
            "partners": [["seg"], []],
        },
        {"kind": "mixing", "weights": {"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}}},
    ]
    lines[1]["events"] = [
        {"event": "update dropped", "client": "b", "why": "nan"},
        {"event": "message dropped", "peer": "a", "what": "late", "sender": "b", "kind": "model"},
    ]
    lines[1]["records"] += [{"kind": "conflict-averse", "peer": "a", "weights": {"b": 0.1}, "acted": {"clip": {}}}]
    found = collect(run_folder(tmp_path, lines))
    assert isinstance(found, RunReport)
    of = {m.name: m for m in records.matrices(found.run)}
    assert of["task-similarity"].names == ("seg", "depth")
    assert of["task-similarity"].marked == {1: [], 2: [("depth", "seg")]}
    assert records.happened(found.run) == [
        ("safeguard: clip", "a", "2", "1 to 2"),
        ("message dropped: what late, kind model", "a from b", "1", "2"),
        ("update dropped: nan", "b", "1", "2"),
    ]
    figures = figures_of(found)
    z = {name: [cells(view.chart) for view in figures[name].views] for name in of}
    # in the order of the run's tasks, seg first
    assert z["task-similarity"] == [
        {"seg": {}, "depth": {"depth": 1.0}},
        {"seg": {"seg": 1.0, "depth": 0.25}, "depth": {"seg": 0.25, "depth": 1.0}},
    ]
    assert z["mixing"] == [{"a": {"a": 0.5, "b": 0.5}, "b": {"b": 1.0}}]
    assert z["neighbours"] == [{"a": {"a": 0.75, "b": 0.25}, "b": {"b": 1.0}}]
    assert z["peer-similarity"] == [{"a": {"b": -0.5}, "b": {}}]
    assert z["conflict-weights"] == [{"a": {}, "b": {}}, {"a": {"b": 0.1}, "b": {}}]
    views = figures["task-similarity"].views
    assert [view.name for view in views] == ["1", "2"]
    assert {(r["row"], r["column"]) for r in charts.rows_of(views[1].chart) if r["text"]} == {("depth", "seg")}


def test_hyper_weights_as_used(tmp_path: Path) -> None:
    lines = two_rounds()
    for line, value in zip(lines, (0.1, 1.5), strict=True):
        line["records"] = [
            {"kind": "hyper-weights", "part": "encoder", "weights": {"a": value}},
            {"kind": "hyper-weights", "part": "decoder", "weights": {"b": {"seg": {"fuse": -value}}}},
        ]
    figures = page_of(run_folder(tmp_path, lines)).data["figures"]
    assert drawn(view_of(figures["alpha"], "alpha of the encoders")) == {"a": {1: 0.1, 2: 1.0}}
    assert drawn(view_of(figures["beta"], "beta of the decoders")) == {"b seg fuse": {1: 0.0, 2: 0.0}}


def test_thinning_keeps_the_ends_and_the_best() -> None:
    rounds = list(range(0, 5000, 5))
    kept = thinned(rounds, 400, keep=(15, 16))
    assert kept[0] == 0
    assert kept[-1] == 4995
    assert 15 in kept
    assert 16 not in kept
    assert len(kept) <= 401
    assert kept == sorted(set(kept))
    assert thinned([3, 1], 400) == [3, 1]
    assert thinned(["a", "b", "c", "d", "e"], 3) == ["a", "c", "e"]


def test_many_clients_become_a_band() -> None:
    clients = {f"c{i:03d}": {1: 0.0, 2: i / 100} for i in range(101)}
    found = drawn(curve(Curves("seg", "miou", "max", "test", "global", clients, 2, True)))
    # the best and the worst, and the band of the 99 others alone
    band = "10 % to 90 % of 99 more clients"
    assert set(found) == {"c100", "c000", band, "mean over clients", "best round by validation: 2"}
    assert found[band][2] == (pytest.approx(0.108), pytest.approx(0.892))
    assert found["mean over clients"] == {1: 0.0, 2: pytest.approx(0.5)}
    few = {name: clients[name] for name in list(clients)[:LINES]}
    assert set(drawn(curve(Curves("seg", "miou", "max", "test", "global", few)))) == {*few, "mean over clients"}


def test_a_large_run_gives_a_small_page(tmp_path: Path) -> None:
    clients = {f"client-{i:04d}": {r: (i * r) % 97 / 97 for r in range(301)} for i in range(300)}
    several = [Curves("seg", m, "max", "test", "global", clients, 7, "test") for m in ("miou", "accuracy")]
    short = collect(run_folder(tmp_path, [{"round": 1, "metrics": []}]))
    assert isinstance(short, RunReport)
    report = replace(short, clients=dict.fromkeys(clients, CLIENTS["a"]), curves=tuple(several))
    figures = figures_of(report)
    assert size(figures) < 300_000
    assert sum(len(charts.rows_of(view.chart)) for figure in figures.values() for view in figure.views) < BUDGET
    # as many metrics again as there are, and more, do not make it larger without bound
    many = replace(report, curves=tuple(several) * 20)
    assert size(figures_of(many)) < 2_000_000


def size(figures: dict[str, Any]) -> int:
    return sum(len(json.dumps(view.chart)) for figure in figures.values() for view in figure.views)


def test_matrices_of_many_clients_are_thinned() -> None:
    from fedloom.study.report.records import Matrices

    names = tuple(f"c{i}" for i in range(150))
    whole = {name: dict.fromkeys(names, i / 150) for i, name in enumerate(names)}
    figure = matrices(Matrices("mixing", "", "receiver", "sender", names, dict.fromkeys(range(40), whole)))
    assert [view.name for view in figure.views] == ["0", "39"]
    found = cells(figure.views[0].chart)
    assert len(found) == 100
    assert list(found["c149"].values()) == [149 / 150] * 100


def test_the_worst() -> None:
    assert worst({"a": 0.5, "b": math.nan, "c": 0.2}, "max") == ("c", 0.2)
    assert worst({"a": 0.5, "c": 0.2}, "min") == ("a", 0.5)
    assert worst({"a": math.nan}, "min") is None


def test_the_worst_task_among_those_with_one_metric(tmp_path: Path) -> None:
    tasks = {t: {"kind": "c", "primary": "accuracy", "metrics": {"accuracy": "max"}} for t in ("x", "y")}
    clients = {"a": {"tasks": {"x": 1.0, "y": 1.0}}}
    lines = [{"round": 1, "metrics": [metric("a", "x", 0.5), metric("a", "y", 0.25)]}]
    folder = run_folder(tmp_path, lines, tasks=tasks, clients=clients)
    found = collect(folder)
    assert isinstance(found, RunReport)
    assert [s.task for s in worst_tasks(found.scores)] == ["y"]
    assert "Worst task by accuracy on test: y (0.2500)." in page_of(folder).text


def test_the_metric_that_judges_a_task_comes_first(tmp_path: Path) -> None:
    def both(split: str, model: str = "personal") -> list[dict[str, Any]]:
        each = [
            metric(c, t, v, split, model) for c, t, v in (("a", "seg", 0.1), ("b", "seg", 0.2), ("b", "depth", 3.0))
        ]
        return [*({**e, "metric": "loss", "value": 9.0} for e in each), *each]

    page = page_of(run_folder(tmp_path, [{"round": 1, "metrics": [*both("val"), *both("test")]}]))
    order = [(s["metric"], s["split"], s["task"]) for s in page.data["scores"]]
    judging = [("miou", "seg"), ("rmse", "depth")]
    assert order[:4] == [(m, split, t) for split in ("test", "val") for m, t in judging]
    assert {m for m, _, _ in order[4:]} == {"loss"}
    html = (tmp_path / "report.html").read_text("utf-8")
    assert [line[0] for line in rows_of(html, "final-table")[1:]] == ["seg (miou) ↑", "depth (rmse) ↓"] * 2
    assert [line[0] for line in rows_of(html, "others-table")[1:]] == ["seg (loss) ↓", "depth (loss) ↓"] * 2
    assert page.ids.index("final") < page.ids.index("about")
    assert "Worst task by" not in page.text, "tasks of different metrics cannot be compared"


def test_no_client_is_the_worst_where_all_have_one_number(tmp_path: Path) -> None:
    lines = [{"round": r, "metrics": [metric(c, "seg", r / 4) for c in "ab"]} for r in (1, 2)]
    lines[1]["metrics"] += [metric(c, "seg", v, "val") for c, v in (("a", 0.1), ("b", 0.3))]
    page = page_of(run_folder(tmp_path, lines))
    test, val = page.data["scores"]
    assert (test["mean"], test["clients"], test["worst"]) == (0.5, 2, None)
    assert val["worst"] == {"client": "a", "value": 0.1}
    assert "all the same" in page.text
    found = drawn(view_of(page.data["figures"]["curves-0"], "miou, test, global"))
    assert found["the same for all 2 clients"] == {1: 0.25, 2: 0.5}
    assert not {"a", "b"} & set(found)


def test_only_a_long_table_scrolls(tmp_path: Path) -> None:
    for count, box in ((40, 'class="wide"'), (41, 'class="wide long" tabindex="0"')):
        clients = {f"c{i}": {"tasks": {"seg": 1.0}} for i in range(count)}
        folder = run_folder(tmp_path / f"{count}", [], clients=clients)
        write(folder)
        assert f'<div {box}><table class="numbers" id="clients-table">' in (folder / "report.html").read_text("utf-8")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such folder, and no grid of this name"):
        collect(tmp_path / "nowhere")
    with pytest.raises(UserError, match="Did you mean 'feddea/table3-scenes'"):
        collect("feddea/table3-scene")


def test_json_for_a_script() -> None:
    text = in_script({"a": NASTY})
    assert json.loads(text) == {"a": NASTY}
    assert "<" not in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        in_script(math.nan)


def test_a_grid(tmp_path: Path) -> None:
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, bases={"FedAvg": {"method": "fedavg"}}, seeds=[0, 1])
    better = {task: value * 1.01 for task, value in FEDAVG.items()}
    write_grid(tmp_path, grid, {("NYUD", "FedAvg", "-", 0): FEDAVG, ("NYUD", "FedAvg", "+DEA", 0): DEA})
    write_run(tmp_path, Cell("NYUD", "FedAvg", "-", 1), better)
    write_run(tmp_path, Cell("NYUD", "FedAvg", "+DEA", 1), DEA, "running", history={1: FEDAVG, 2: DEA})
    page = page_of(tmp_path)
    assert [i for i in page.ids if i in ("about", "table", "curves", "cells")] == ["table", "curves", "cells", "about"]
    assert "3 finished" in page.data["about"]["runs"]
    assert "not finished: round 2" in page.text
    entries = {(e["addon"], e["task"]): e for e in page.data["table"]}
    assert entries["-", "semseg"]["mean"] == pytest.approx(23.05 * 1.005)
    assert entries["-", "semseg"]["n"] == 2
    assert entries["-", "semseg"]["half"] == pytest.approx(12.7062 * 0.2305 / 2, rel=1e-4)
    assert entries["-", ""]["kind"] == "base"
    # FedDEA's table 3, as its tasks' own changes: 33.54, 2.23, 7.16 and -0.56 %
    assert entries["+DEA", ""]["mean"] == pytest.approx(10.59, abs=0.01)
    check_figures(page.data["figures"])
    # seed 1 has two rounds, seed 0 only the first
    found = drawn(view_of(page.data["figures"]["curves-0"], "semseg (miou) ↑"))
    assert found["FedAvg +DEA"] == {1: pytest.approx((30.78 + 23.05) / 2)}


def test_a_grid_at_a_glance(tmp_path: Path) -> None:
    bases = {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": "fedprox"}, "Refused": {"method": "ditto"}}
    grid = paper_grid(
        data={"D": {"recipe": "digits-tasks"}}, bases=bases, addons={"-": {}}, seeds=[0, 1], delta="FedAvg/-"
    )
    better = {**FEDAVG, "semseg": FEDAVG["semseg"] * 1.4}
    runs = {("D", "FedAvg", "-", s): FEDAVG for s in (0, 1)} | {
        ("D", "FedProx", "-", s): {**better, "depth": FEDAVG["depth"] * (1 + s / 100)} for s in (0, 1)
    }
    write_grid(tmp_path, grid, runs, refused={"D / Refused": "why"})
    found = collect(tmp_path)
    assert not isinstance(found, RunReport)
    base, prox = found.methods["FedAvg"]  # type: ignore[union-attr]
    assert (base.delta, prox.reference) == (None, "FedAvg")
    assert prox.seeds == pytest.approx((10.0, 9.75))
    assert prox.delta.mean == pytest.approx(9.875)
    assert {c.task: round(of.mean, 3) for c, of in prox.changes.items()} == {
        "semseg": 40.0, "depth": -0.5, "normals": 0.0, "edge": 0.0
    }  # fmt: skip
    page = page_of(tmp_path)
    assert "FedProx is better than FedAvg (2 seeds)." in page.text
    curves, dots = (page.data["figures"][name][0]["chart"] for name in ("curves-0", "0-0-gains"))
    of_curves = dict(zip(*(curves["encoding"]["color"]["scale"][of] for of in ("domain", "range")), strict=True))
    colors = (layer["encoding"].get("color", {}) for layer in dots["layer"])
    scale = next(color["scale"] for color in colors if "scale" in color)
    of_dots = dict(zip(scale["domain"], scale["range"], strict=True))
    assert of_dots["FedProx"] == of_curves["FedProx"] != of_dots["FedAvg"] == of_curves["FedAvg"]
    key = re.findall(r'<i style="background: (#\w+)"></i>(\w+)', (tmp_path / "report.html").read_text("utf-8"))
    assert key == [(color, name) for name, color in of_curves.items()]
    first = rows_of((tmp_path / "report.html").read_text("utf-8"), "costs-0-0")[1]
    assert (first[0], first[1][-4:], first[2]) == ("FedProx", "1.59", "yes")
    assert page.data["about"]["runs"] == "4 of 4 begun, 4 finished, 1 combination refused"
    assert list(found.methods) == ["FedAvg", "FedProx"]  # type: ignore[union-attr]
    assert [a.get("hidden", "shown") for _, a in page.elements if "data-base" in a] == ["shown", None]
    assert "FedAvg is worse than FedProx" in page.text
    assert "ranks" in page.ids


def test_a_grid_of_which_nothing_has_finished(tmp_path: Path) -> None:
    write_grid(tmp_path, paper_grid(), {})
    page = page_of(tmp_path)
    assert "no cell of grid paper has finished" in page.text
    assert page.data["figures"] == {}
    assert "curves" not in page.ids


def test_a_folder_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="run .*run.json.* grid .*grid.yaml.* relatedness study .*relatedness.json"):
        write(tmp_path)
    run_folder(tmp_path / "a", two_rounds())
    with pytest.raises(StateError, match=r"relatedness.json\); 1 folder in it is a run folder, such as a: name one$"):
        write(tmp_path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", two_rounds())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        write(folder, tmp_path / "file" / "page.html")


def look(rows: list[str], cosine: list[float | None], weights: list[list[float | None]] | None, **more: Any) -> Any:
    """A record of diagnostics with one layer group."""
    pairs = len(rows) * (len(rows) - 1) // 2 if "peer" not in more else len(rows) - 1
    group = {"part": "encoder", "task": None, "layers": "stem", "size": 9, "looked": 9, "cosine": cosine}
    group |= {"sign": [0.5] * pairs, "kept": more.pop("kept", [1.0] * len(rows))}
    group |= {} if weights is None else {"weights": weights, "explained": [1.0] * len(weights)}
    out = more.pop("out", [["*", None]])
    about = {"rows": [[r, None] for r in rows], "out": out, "shown": list(range(len(rows))), "groups": [group]}
    return about | more


def test_diagnostics_of_a_server(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_rounds())
    looks = {
        1: look(["a", "b"], [-0.25], [[0.6, 0.4]], kept=[1.0, 0.3]),
        2: look(["a", NASTY, "b"], [0.5, None, -0.125], [[0.5, None, 0.5]], kept=[1.0, 1.0, 0.5]),
        3: look(["a", "b"], [0.9], [[1.0, 0.0]]),  # of a round that was cut off
    }
    lines = [json.dumps({"round": r, "diagnostics": [about]}) for r, about in looks.items()]
    (folder / "diagnostics.jsonl").write_text("\n".join(lines) + '\n{"round": 4, "diag')
    page = page_of(folder)
    figures = page.data["figures"]
    check_figures({name: figures[name] for name in ("cosine", "sign", "agreement", "weights", "kept")})
    assert "diagnostics" in page.ids
    assert cells(view_of(figures["cosine"], "2")) == {
        "a": {SHOWN: 0.5},
        "b": {SHOWN: -0.125},
        SHOWN: {"a": 0.5, "b": -0.125},
    }
    assert [(v["name"], v["group"]) for v in figures["cosine"]] == [("1", "encoder: stem"), ("2", "encoder: stem")]
    agreement = {view["name"]: drawn(view["chart"])["encoder: stem"] for view in figures["agreement"]}
    assert agreement["mean cosine of two updates"] == {1: -0.25, 2: (0.5 - 0.125) / 2}
    assert agreement["share of pairs in conflict (cosine below 0)"] == {1: 1.0, 2: 0.5}
    assert drawn(view_of(figures["weights"], "encoder: stem"))["b"] == {1: 0.4, 2: 0.5}
    assert drawn(view_of(figures["kept"], "encoder: stem"))["b"] == {1: 0.3, 2: 0.5}
    # the first screen has the mean over layers and rounds, and a share per layers and round
    assert cells(figures["clients"][0]["chart"])["a"] == {"b": -0.25, SHOWN: 0.5}
    assert cells(figures["layers"][0]["chart"]) == {"encoder: stem": {"1": 1.0, "2": 0.5}}
    assert "given" not in figures
    assert not [tag for tag, _ in page.elements if tag == "img"]


def test_diagnostics_of_peers_and_personal_models(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "peers", two_rounds())
    about = [
        look(["a", "b"], [0.5], [[0.75, 0.25]], peer="a"),
        look(["a", "b"], [0.5], [[0.1, 0.9]], peer="b", shown=[1, 0]),
    ]
    (folder / "diagnostics.jsonl").write_text(json.dumps({"round": 1, "diagnostics": about}) + "\n")
    figures = page_of(folder).data["figures"]
    assert cells(figures["given"][0]["chart"]) == {"a": {"a": 0.75, "b": 0.25}, "b": {"a": 0.1, "b": 0.9}}
    assert cells(figures["cosine"][0]["chart"]) == {"a": {"b": 0.5}, "b": {"a": 0.5}}
    assert "weights" not in figures
    folder = run_folder(tmp_path / "personal", two_rounds())
    about = [look(["a", "b"], [0.5], [[1.0, 0.0], [0.5, 0.5]], out=[["a", None], ["b", None]])]
    (folder / "diagnostics.jsonl").write_text(json.dumps({"round": 1, "diagnostics": about}) + "\n")
    given = cells(page_of(folder).data["figures"]["given"][0]["chart"])
    assert given == {"a": {"a": 1.0, "b": 0.0}, "b": {"a": 0.5, "b": 0.5}}


def test_diagnostics_of_one_client(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_rounds())
    about = [look(["a"], [], [[1.0]])]
    (folder / "diagnostics.jsonl").write_text(json.dumps({"round": 1, "diagnostics": about}) + "\n")
    figures = page_of(folder).data["figures"]
    assert "cosine" not in figures
    assert drawn(view_of(figures["weights"], "encoder: stem")) == {"a": {1: 1.0}}


METHOD = Outline(
    local=(Box("Prox", "mu=0.1"), Box("Tune", "steps=3", " of the model")),
    edge=(Box("Identity", ""),),
    wire=Box("Raw", "", facts=("private: Select(role='head')", "one row a client and task")),
    server=(
        Box("First", "<b>"),
        Box("before round 3", inside=(Box("Mean", ""),)),
        Box(
            "from round 3",
            inside=(
                Box("in 'a'", inside=(Box("Inner", "x=(1, 2)"),)),
                Box("in '*'", inside=(Box("Inner", "x=()"),), beside=True),
            ),
            beside=True,
        ),
        Box("Plain", "step=1.0", facts=("weights: size", "buffers: mean")),
    ),
    start="own",
)


def diagram(outline: Outline, peers: bool = False) -> str:
    return part("flow.html", "diagram", outline, peers)


def tree(html: str) -> list[tuple[int, str]]:
    """(how many boxes it is in, text) of what a diagram says."""
    found: list[tuple[int, str]] = []
    stack: list[bool] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            stack.append(dict(attributes).get("class") in ("step", "box"))

        def handle_endtag(self, tag: str) -> None:
            stack.pop()

        def handle_data(self, data: str) -> None:
            if data.strip():
                found.append((sum(stack), data))

    Reader().feed(html)
    assert not stack
    return found


def test_a_method_as_boxes() -> None:
    html = diagram(METHOD)
    assert tree(html) == [
        *((1, "Local training"), (2, "Prox"), (2, "mu=0.1"), (2, "Tune of the model"), (2, "steps=3")),
        *((1, "Before sending"), (2, "Identity")),
        *((1, "On the wire"), (1, "Raw"), (1, "private: Select(role='head')"), (1, "one row a client and task")),
        *((1, "Server"), (2, "First"), (2, "<b>")),
        *((2, "before round 3"), (3, "Mean"), (2, "from round 3")),
        *((3, "in 'a'"), (4, "Inner"), (4, "x=(1, 2)"), (3, "in '*'"), (4, "Inner"), (4, "x=()")),
        *((2, "Plain"), (2, "step=1.0"), (2, "weights: size"), (2, "buffers: mean")),
        *((1, "Back to the clients"), (1, "Local training starts from the own model")),
    ]
    # parts, and times, stand side by side: no arrow is between them
    assert html.count('class="beside"') == 2
    assert "Peers" in [text for _, text in tree(diagram(METHOD, peers=True))]


@pytest.mark.parametrize("outline", [asdict(METHOD), None, {}, "a text", {**asdict(METHOD), "wire": 3}, [[[]]]])
def test_the_outline_of_a_method_is_drawn_and_no_other(tmp_path: Path, outline: Any) -> None:
    page = page_of(run_folder(tmp_path, two_rounds(), recipe_text=NASTY, outline=outline))
    assert any(a.get("class") == "flow" for tag, a in page.elements) == (outline == asdict(METHOD))
    assert NASTY in page.text


@pytest.mark.parametrize("entry", list(METHODS), ids=lambda entry: entry.name)
def test_every_stage_of_a_method_is_in_its_diagram(entry: Registered) -> None:
    method = entry.function()
    text = str(method)
    boxes = tree(diagram(method.outline))
    stages = text.partition("on the wire:")[0] + text.partition("server:")[2]
    said = "".join(part for _, part in boxes)
    assert [name for name in re.findall(r"^ *(\w+)\(", stages, re.MULTILINE) if name not in said] == []
    assert [line for line in re.findall(r"^ +(.*):$", stages, re.MULTILINE) if line not in said] == []
    assert (1, "On the wire") in boxes


def peers_lines(*rounds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Lines of a run whose peers took these weights in its rounds."""
    return [
        {
            "round": number,
            "metrics": [],
            "records": [
                {"kind": "peer", "peer": name, "neighbours": [n for n in row if n != name], "weights": row}
                for name, row in weights.items()
            ],
        }
        for number, weights in enumerate(rounds, 1)
    ]


def takes(view: dict[str, Any]) -> dict[str, float]:
    """'a takes from b' -> the weight of the line between them."""
    return {row["name"]: row["weight"] for row in charts.rows_of(view["chart"]) if "weight" in row}


def test_the_graph_of_neighbours(tmp_path: Path) -> None:
    clients = {n: {"tasks": dict.fromkeys(tasks, 1.0)} for n, tasks in
               {"p": ["seg"], "q": ["seg", "depth"], "r": ["seg"], NASTY: [NASTY]}.items()}  # fmt: skip
    rounds = peers_lines(
        {"p": {"p": 0.6, "r": 0.4}, "q": {"q": 0.9, "p": 0.1, "r": 0.0}, NASTY: {NASTY: 1.0}},
        {"r": {"r": 0.8, NASTY: 0.2}},
    )
    page = page_of(run_folder(tmp_path, rounds, clients=clients, tasks=TASKS | {NASTY: TASKS["seg"]}))
    figure = page.data["figures"]["neighbours-graph"]
    check_figures({"graph": figure})
    assert [view["name"] for view in figure] == ["1", "2"]
    first, second = map(takes, figure)
    assert first == {"p takes from r": 0.4, "q takes from p": 0.1}
    assert second == {f"r takes from {SHOWN}": 0.2}
    peers = {row["name"]: row["tasks"] for row in charts.rows_of(figure[0]["chart"]) if "tasks" in row}
    assert peers == {"p": "seg", "q": "depth, seg", "r": "seg", SHOWN: SHOWN}


def test_no_graph_of_one_peer_or_of_very_many(tmp_path: Path) -> None:
    alone = {"a": {"a": 1.0, "b": math.nan}}
    assert "neighbours-graph" not in page_of(run_folder(tmp_path / "a", peers_lines(alone))).data["figures"]
    for count, there in ((60, True), (61, False)):
        names = [f"c{i:02d}" for i in range(count)]
        clients = {name: {"tasks": {"seg": 1.0}} for name in names}
        everybody = {name: dict.fromkeys(names, 1 / count) for name in names}
        folder = run_folder(tmp_path / str(count), peers_lines(*[everybody] * 3), clients=clients)
        figures = page_of(folder).data["figures"]
        assert ("neighbours-graph" in figures) == there
        if there:
            assert [view["name"] for view in figures["neighbours-graph"]] == ["1", "3"]
            assert len(takes(figures["neighbours-graph"][0])) == 60 * 59


def of_clients(values: dict[tuple[str, str], float | None], split: str = "test", model: str = "global") -> Any:
    """A run's only round from (client, task) -> value."""
    return [{"round": 1, "metrics": [metric(c, t, v, split, model) for (c, t), v in values.items()]}]


SAME = {"partition_hash": "p", "data_hash": "d"}


def test_a_run_against_a_base(tmp_path: Path) -> None:
    mine = {("a", "seg"): 0.2, ("b", "seg"): 0.6, ("b", "depth"): 0.9}
    theirs = {("a", "seg"): 0.4, ("b", "seg"): 0.5, ("b", "depth"): 0.75}
    folder = run_folder(tmp_path / "run", of_clients(mine), **SAME)
    base = run_folder(tmp_path / "base", of_clients(theirs, model="personal"), method="local", **SAME)
    page = page_of(folder, base)
    check_figures(page.data["figures"])
    held = page.data["base"]
    means = {(t["task"], t["split"]): t for t in held["tasks"]}
    seg = {"value": 0.4, "base": 0.45, "percent": pytest.approx(-100 / 9)}
    assert means["seg", "test"] == {"task": "seg", "split": "test", "metric": "miou", **seg}
    # a larger error is worse
    assert means["depth", "test"]["percent"] == pytest.approx(-20)
    compared = compare([base, folder])
    assert compared.columns[1].delta is not None
    assert held["delta_m"] == {"test": pytest.approx(compared.columns[1].delta.mean)}
    assert "Δm against local: -15.56\u00a0% on test (mean change of 2 tasks)" in page.text
    each = {(c["client"], c["task"]): c["percent"] for c in held["clients"]}
    assert each == {("a", "seg"): -50.0, ("b", "seg"): pytest.approx(20), ("b", "depth"): pytest.approx(-20)}
    html = (folder / "report.html").read_text("utf-8")
    assert rows_of(html, "final-table")[:2] == [
        ["task", "split", "mean over clients", "base: local", "change", *rows_of(html, "final-table")[0][5:]],
        ["seg (miou) ↑", "test", "0.4000", "0.4500", "-11.11\u00a0%", *rows_of(html, "final-table")[1][5:]],
    ]
    assert "Lowest change on test: depth (rmse), -20.00\u00a0%." in page.text
    assert rows_of(html, "worse-table")[1:] == [
        ["seg (miou) ↑", "2", "1", "1", "0", "a -50.00\u00a0%"],
        ["depth (rmse) ↓", "1", "1", "0", "0", "b -20.00\u00a0%"],
    ]
    assert "2 of 2 clients have a worse model than with the base" in page.text
    # a loses half of its only task; b gains on one and loses as much on the other
    assert "For 1 of 2 clients the mean change over all their tasks is below 0." in page.text
    (view,) = page.data["figures"]["worse"]
    worse = {"a": {"seg": -50.0}, "b": {"seg": pytest.approx(20), "depth": pytest.approx(-20)}}
    assert cells(view["chart"]) == worse
    assert view["chart"]["layer"][0]["encoding"]["color"]["scale"]["domain"] == [-50, 0, 50]
    about = held["about"]
    assert (about["method"], about["seed"], about["data"]) == ("local", "3", "the same (hash d)")
    assert about["numbers of"] == "the personal model of round 1"
    assert about["differs beside the method in"] == "nothing"


def test_without_a_base_nothing_is_said_of_one(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, two_rounds()))
    assert "base" not in page.data
    assert "base" not in page.ids
    assert "change" not in rows_of((tmp_path / "report.html").read_text("utf-8"), "final-table")[0]


def test_many_clients_with_a_worse_model(tmp_path: Path) -> None:
    names = [f"c{i:03d}" for i in range(150)]
    clients = {name: {"tasks": {"seg": 1.0}} for name in names}
    # c000 to c009 lose, the others gain; the last one's loss has no share, for the base is 0 there
    mine = {(n, "seg"): 0.5 - 0.01 * (10 - i) if i < 10 else 0.6 for i, n in enumerate(names)}
    theirs = {(n, "seg"): 0.5 for n in names}
    mine["c149", "seg"], theirs["c149", "seg"] = -0.1, 0.0
    mine["c148", "seg"] = None
    folder = run_folder(tmp_path / "run", of_clients(mine), clients=clients)
    base = run_folder(tmp_path / "base", of_clients(theirs), clients=clients)
    page = page_of(folder, base)
    (line,) = rows_of((folder / "report.html").read_text("utf-8"), "worse-table")[1:]
    assert line[1:5] == ["150", "11", "138", "1"]
    assert line[5].startswith("c000 -20.00\u00a0%, c001 -18.00")
    assert line[5].count(",") == 4
    assert "11 of 150 clients" in page.text
    shown = cells(page.data["figures"]["worse"][0]["chart"])
    assert (len(shown), next(iter(shown))) == (100, "c000")
    check_figures(page.data["figures"])
    # a mean with an undefined number is undefined, and so is the change
    assert page.data["base"]["delta_m"] == {"test": None}


def test_a_base_with_other_data_tasks_and_seed(tmp_path: Path) -> None:
    more = TASKS | {NASTY: TASKS["seg"]}
    folder = run_folder(tmp_path / "run", of_clients({("a", "seg"): 0.2, ("b", "depth"): 1.0}), tasks=more)
    clients = {"other": {"tasks": {"seg": 1.0, "depth": 1.0}}}
    lines = of_clients({("other", "seg"): 0.1, ("other", "depth"): 0.0})
    base = run_folder(tmp_path / NASTY.replace("/", ""), lines, method=NASTY, clients=clients, **SAME)
    recipe = yaml.safe_load((base / "recipe.yaml").read_text())
    recipe |= {"seed": 4, "training": {"rounds": 12}}
    (base / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    page = page_of(folder, base)
    about = page.data["base"]["about"]
    assert (about["method"], about["seed"]) == (NASTY, "4 (here 3)")
    assert about["differs beside the method in"] == "training.rounds: 12 (here 9)"
    assert about["data"] == "not known: a run without a hash"
    assert page.data["base"]["delta_m"] == {"test": pytest.approx(100)}
    assert "Δm on test leaves out depth: 0 or undefined in the base." in page.text
    assert f"Only here, or judged by another metric there: {NASTY}." in page.text
    assert "clients are not compared" in page.text
    assert "worse" not in page.data["figures"]
    assert not [tag for tag, _ in page.elements if tag == "img"]


def test_bases_that_are_none(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", two_rounds())
    other = {"x": {"kind": "dense", "primary": "miou", "metrics": {"miou": "max"}}}
    flipped = {"seg": {"kind": "dense", "primary": "miou", "metrics": {"miou": "min"}}}
    for number, tasks in enumerate((other, flipped)):
        base = run_folder(tmp_path / str(number), [], tasks=tasks)
        found = "x .miou. ↑" if number == 0 else "seg .miou. ↓"
        with pytest.raises(
            StateError, match=f"no task in common: expected seg .miou. ↑, depth .rmse. ↓, found {found}"
        ):
            write(folder, base=base)
    base = run_folder(tmp_path / "val", of_clients({("a", "seg"): 0.5}, "train"))
    with pytest.raises(StateError, match="measured in both: expected test of seg, depth; val of seg, found none"):
        write(folder, base=base)
    base = run_folder(tmp_path / "other split", of_clients({("b", "depth"): 0.5}, "val"))
    with pytest.raises(StateError, match="measured in both: .*, found val of depth"):
        write(folder, base=base)
    with pytest.raises(StateError, match="the base is the run itself"):
        write(folder, base=folder)
    with pytest.raises(StateError, match="run.json is absent"):
        write(folder, base=tmp_path)
    assert not (folder / "report.html").exists()


def test_only_validation_in_common(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", two_rounds())
    base = run_folder(tmp_path / "base", of_clients({("a", "seg"): -0.4, ("b", "seg"): -0.4}, "val"))
    held = page_of(folder, base).data["base"]
    assert {(t["task"], t["split"]) for t in held["tasks"]} == {("seg", "val")}
    assert {c["split"] for c in held["clients"]} == {"val"}


def test_a_grid_against_another_cell(tmp_path: Path) -> None:
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, bases={"FedAvg": {"method": "fedavg"}})
    write_grid(tmp_path, grid, {("NYUD", "FedAvg", "-", 0): FEDAVG, ("NYUD", "FedAvg", "+DEA", 0): DEA})
    entries = {(e["addon"], e["task"]): e for e in page_of(tmp_path, "FedAvg/+DEA").data["table"]}
    assert entries["+DEA", ""]["kind"] == "base"
    assert entries["-", ""]["mean"] < 0
    with pytest.raises(RecipeError, match="FedProx"):
        write(tmp_path, base="FedProx/-")


def test_the_worst_tasks_and_clients_of_a_grid(tmp_path: Path) -> None:
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, bases={"FedAvg": {"method": "fedavg"}}, seeds=[0, 1])
    write_grid(tmp_path, grid, {})
    numbers = {  # add-on, seed -> semseg and depth of a, of b, and edge of another client
        ("-", 0): (20.0, 0.5, 30.0, 0.6, 1.0),
        ("-", 1): (40.0, 0.5, 20.0, 0.8, 1.0),
        ("+DEA", 0): (30.0, 1.0, 30.0, 1.2, 1.0),
        ("+DEA", 1): (40.0, math.nan, 50.0, 0.8, 0.7),
    }
    for (addon, seed), (*of_a_and_b, edge) in numbers.items():
        values = {
            "a": dict(zip(("semseg", "depth"), of_a_and_b[:2], strict=True)),
            "b": dict(zip(("semseg", "depth"), of_a_and_b[2:], strict=True)),
            NASTY: {"edge": edge},
        }
        path = write_run(tmp_path, Cell("NYUD", "FedAvg", addon, seed), values)
        file = path / "metrics.jsonl"
        file.write_text(file.read_text().replace("NaN", "null"))
    page = page_of(tmp_path)
    plain, dea = page.data["worst"]
    assert (plain["method"], plain["reference"], plain["task"]) == ("FedAvg", "FedAvg", None)
    semseg = plain["clients"]["semseg"]
    assert (semseg["clients"], semseg["mean"], semseg["half"], semseg["n"]) == (["a", "b"], 20.0, 0.0, 2)
    depth = plain["clients"]["depth"]
    assert (depth["clients"], depth["mean"]) == (["b"], pytest.approx(0.7))
    assert depth["half"] == pytest.approx(12.7062 * 0.1, rel=1e-4)
    # a task with one client has no worst one
    assert set(plain["clients"]) == {"semseg", "depth"}
    # depth is not known in seed 1, so the worst change that is known is that of edge
    assert (dea["task"]["task"], dea["task"]["mean"]) == ("edge", pytest.approx(-15))
    assert dea["clients"]["depth"]["clients"] == ["b"]
    table = rows_of((tmp_path / "report.html").read_text("utf-8"), "worst-0")
    assert table[0] == ["method", "worst task", "change", "against", "worst client: semseg (miou) ↑",
                        "worst client: depth (rmse) ↓"]  # fmt: skip
    assert table[1][:5] == ["FedAvg", "", "base", "", "20.00 ± 0.00 (a, b)"]
    assert table[2][:4] == ["FedAvg +DEA", "edge (odsf) ↑", "-15.00 ± 190.59\u00a0%", "FedAvg"]
    assert NASTY not in (tmp_path / "report.html").read_text("utf-8")


def test_a_grid_without_a_reference_or_several_clients_has_no_worst(tmp_path: Path) -> None:
    write_grid(tmp_path, paper_grid(delta="none"), {("NYUD", "FedAvg", "-", 0): FEDAVG})
    page = page_of(tmp_path)
    assert "worst" not in page.ids
    (line,) = page.data["worst"]
    assert (line["task"], line["clients"], line["reference"]) == (None, {}, "")


def test_the_worst_of_domains(tmp_path: Path) -> None:
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"FedAvg": {"method": "fedavg"}}, show="domains")
    domains = {"a": "wood", "b": "wood", "c": "city"}
    for addon, factor in (("-", 1.0), ("+DEA", 0.9)):
        values = {"a": {"semseg": 10.0 * factor}, "b": {"semseg": 20.0}, "c": {"semseg": 40.0}}
        write_run(tmp_path, Cell("D", "FedAvg", addon, 0), values, domains=domains)
    write_grid(tmp_path, grid, {})
    _, dea = page_of(tmp_path).data["worst"]
    assert (dea["task"]["task"], dea["task"]["mean"]) == ("wood", pytest.approx(-10 / 3))
    assert {domain: (of["clients"], of["mean"]) for domain, of in dea["clients"].items()} == {"wood": (["a"], 9.0)}


def test_nobody_is_the_worst_of_a_grid_where_all_have_one_number(tmp_path: Path) -> None:
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"FedAvg": {"method": "fedavg"}}, seeds=[0, 1])
    for others, who in (((10.0, 12.0), ["a"]), ((10.0, 10.0), [])):
        folder = tmp_path / f"{len(who)}"
        for seed, other in enumerate(others):
            write_run(folder, Cell("D", "FedAvg", "-", seed), {"a": {"semseg": 10.0}, "b": {"semseg": other}})
        write_grid(folder, grid, {})
        page = page_of(folder)
        worst_client = page.data["worst"][0]["clients"]["semseg"]
        assert (worst_client["clients"], worst_client["mean"]) == (who, 10.0)
        assert ("(all the same)" in page.text) == (not who)


def test_diagnostics_that_are_something_else_are_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, two_rounds())
    (folder / "diagnostics.jsonl").write_text('{"round": 1, "diagnostics": [{"rows": []}]}\n')
    (folder / "partition.json").write_text('{"labels": 3}')
    with pytest.raises(
        StateError, match=r"diagnostics.jsonl: not what diagnostics are: ValueError\('out field required'\)"
    ):
        collect(folder)
