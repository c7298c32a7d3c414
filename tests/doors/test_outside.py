"""A package outside the project brings data, a model, a loss, a metric, a stage, a method and a codec by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.data import DATASETS
from fedloom.methods import METHODS
from fedloom.recipes import load
from fedloom.rounds.build import build
from tests_support import assert_same

OUTSIDE = Path(__file__).with_name("outside")
RECIPE = """
name: wines
data: {name: "beacon:wines", labs: 3}
partition: own
model: {name: "beacon:Net", width: 12}
method: {name: "beacon:clipped", limit: 0.4, add: {"beacon:Clip": {limit: 0.3, at: server}}, codec: "beacon:Plain"}
tasks: {sort: {loss: "beacon:focal", metrics: {balanced: "beacon:balanced"}}}
training: {rounds: 1, steps: 2}
"""
GRID = """
name: mine
data: {Wines: {recipe: wines.yaml}}
bases: {Clipped: {method: "beacon:clipped"}}
addons: {Clip: {"method.add.beacon:Clip.limit": 0.2}}
seeds: [0]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a recipe and a grid, and the package installed."""
    monkeypatch.syspath_prepend(OUTSIDE)
    paths = (os.environ.get("PYTHONPATH"), str(OUTSIDE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in paths if p))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wines.yaml").write_text(RECIPE)
    (tmp_path / "g.yaml").write_text(GRID)
    for registry in (METHODS, DATASETS):
        registry.__dict__.pop("announced", None)
    yield tmp_path
    for registry in (METHODS, DATASETS):
        registry.__dict__.pop("announced", None)


def said(command: str) -> str:
    """What a command prints; it must not fail."""
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
    return done.output


def test_everyday_commands_work_with_it(here: Path) -> None:
    assert "balanced" in said("show wines.yaml")
    assert "balanced" in said("run wines.yaml -q --out a")
    said("run wines.yaml -q --out b method=local")
    said("resume a -q training.rounds=2")
    assert "strong (balanced)" in said("compare a b")
    said("report a --base b")
    assert "2/2" in said("watch a") or "round" in said("watch a")
    said("export a --client lab-1 --out bundle")
    said("run --from a -q --out c")
    said("pretrain wines.yaml --epochs 1 --out encoder.safetensors -q")
    said("data preview wines --out picture.png")
    said("run wines.yaml -q --out m method=matu")
    assert "sort" in said("relatedness m --metrics sign -q")
    said("grid g.yaml -q --jobs 1")
    assert said("table mine") == said("table grids/mine")
    assert "Clip" in said("table mine")
    said("report grids/mine")
    assert "beacon" in said("methods")
    assert "FedAvg of clipped updates." in said("methods clipped")
    assert "limit" in said("methods beacon:Clip")
    assert (here / "bundle" / "export.json").is_file()


def test_a_node_of_flower_has_it_too(here: Path) -> None:
    one, two = (fl.run("wines.yaml", here / name, runtime={"engine": name}) for name in ("process", "flower"))
    assert_same(one, two, models_only=True)


@pytest.mark.slow
def test_workers_and_a_cluster_have_it_too(here: Path) -> None:
    one = fl.run("wines.yaml", here / "one")
    assert_same(one, fl.run("wines.yaml", here / "two", workers=2))
    assert_same(one, fl.run("wines.yaml", here / "cluster", runtime={"engine": "cluster", "workers": 2}))


def test_the_folder_says_what_it_was_and_a_changed_source_is_told(here: Path) -> None:
    run = fl.run("wines.yaml", here / "a")
    info = json.loads((run.folder / "run.json").read_text())
    assert set(info["origins"]) == {
        *("beacon:wines", "beacon:Net", "beacon:clipped", "beacon:Clip", "beacon:Plain", "beacon:focal"),
        "beacon:balanced",
    }
    origin = info["origins"]["beacon:Net"]
    assert (origin["module"], origin["version"]) == ("beacon", "1.0")
    info["origins"] = {name: {**each, "source": "0" * 16} for name, each in info["origins"].items()}  # another one then
    info.pop("check")
    (run.folder / "run.json").write_text(json.dumps(info))
    fl.resume(run.folder, rounds=2)
    events = [e for line in run.run.rounds for e in line["events"] if e["event"] == "source changed"]
    assert {e["of"] for e in events} == set(info["origins"])
    assert events[0]["was"] == f"beacon, 1.0, {'0' * 16}"


def test_names_and_objects_are_the_same(here: Path) -> None:
    import beacon

    section = {"name": "beacon:clipped", "limit": 0.4}
    named = fl.run("wines.yaml", here / "named", method=section, overrides=["tasks={}"])
    made = beacon.wines(0)
    given = fl.run(made, here / "given", model=lambda shape: beacon.Net(shape, 12), method=beacon.clipped(limit=0.4),
                   rounds=1, steps=2)  # fmt: skip
    assert named.run.rows() == given.run.rows()
    halves = build(load("wines.yaml", ["partition=beacon:halves"])).partition
    assert [(s.client, len(s.index)) for s in halves.shares] == [("left", 69), ("right", 69)]


def test_a_module_in_the_current_folder_is_found(here: Path) -> None:
    (here / "mine.py").write_text("from beacon import clipped as method\n")
    script = "from fedloom.recipes import load; print(load('wines.yaml', ['method=mine:method']).method.name)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout == "mine:method\n"
