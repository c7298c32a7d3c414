"""Names of older versions in recipes, grids and run folders are read, and one line says what they are called now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedloom
from fedloom.core.settings import renamed
from fedloom.federation.recipes import load, recipe_hash
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import checksum
from fedloom.study.grid import Cell, load_grid
from tests_support import load_recipe

TOGETHER = ("method=centralised", "training.rounds=1")


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    renamed._say.cache_clear()


@pytest.mark.parametrize(("old", "new"), renamed.METHODS.items())
def test_methods(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(f"method={old}")
    assert recipe.method.name == new
    assert recipe_hash(recipe) == recipe_hash(load_recipe(f"method={new}"))
    assert capsys.readouterr().err == f"warning: method {old!r} is now called {new!r}\n"


def test_packaged_recipes_and_grids(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("beds/digits") == load("benchmarks/digits")
    assert load_grid("beds/digits") == load_grid("benchmarks/digits")
    assert "'beds/digits' is now called 'benchmarks/digits'" in capsys.readouterr().err


def test_grids(tmp_path: Path) -> None:
    text = "name: g\ndata: {D: {recipe: beds/digits}}\nbases: {A: {method: fedavg}}\n"
    more = "references: [joint, joint-by-task, trivial]\ntuned: {D: {joint/-: {training.optimizer.lr: 0.1}}}\n"
    (tmp_path / "g.yaml").write_text(text + more + "delta: trivial/-\nbeds: {E: {title: other}}\n")
    grid = load_grid(tmp_path / "g.yaml")
    assert grid.references == ("centralised", "centralised-by-task", "constant")
    assert (grid.delta, list(grid.tuned["D"])) == ("constant/-", ["centralised/-"])
    assert load_grid(tmp_path / "g.yaml", benchmark="E").title == "other"
    cell = Cell("D", "constant", "-", 0)
    assert cell.folder(tmp_path).parent.parent.name == "constant"
    begun = tmp_path / "cells" / "D" / "trivial" / "plain" / "s0"
    begun.mkdir(parents=True)
    assert cell.folder(tmp_path) == begun


def test_a_run_folder_is_read_and_resumed(tmp_path: Path) -> None:
    folder = fedloom.run(load_recipe(*TOGETHER), tmp_path / "run").folder
    now, text = Run.read(folder), (folder / "recipe.yaml").read_text("utf-8")
    (folder / "recipe.yaml").write_text(text.replace("centralised", "joint", 1), "utf-8")
    info = json.loads((folder / "run.json").read_text("utf-8"))
    del info["check"], info["files"]
    info = {**info, "method": "joint", "recipe_text": info["recipe_text"].replace("centralised", "joint", 1)}
    (folder / "run.json").write_text(json.dumps({**info, "check": checksum(info)}), "utf-8")
    then = Run.read(folder)
    assert (then.label, then.group) == ("centralised", now.group)
    assert fedloom.resume(folder, rounds=2).run.last_round == 2
