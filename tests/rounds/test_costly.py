"""Metrics that take long: when they are measured, and that the kept model always has them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.federation.runs.reader import Run
from fedloom.models.tasks.dense import Edge
from fedloom.study.results import over_rounds
from folders_support import nyud, pascal
from tests_support import assert_same

SMALL = (
    "data.count=16", "data.test_count=2", "data.tasks=[depth,edge]", "tasks.edge={ods: true, thresholds: 5}",
    "training.epochs=null", "training.steps=1", "training.batch_size=2", "evaluation.predictions=false",
    "evaluation.every=1",
)  # fmt: skip
LEAVES = ("partition.val_fraction=0.25", "early_stopping={patience: 1, min_delta: 9}")
"""No round improves on the first by 9, so a run stops after the second and keeps the first."""


def run(folder: Path, *changes: str) -> Run:
    return fedloom.run(load("feddea/scenes", (*SMALL, *changes)), folder).run


def rounds_with(run: Run, metric: str, model: str = "global", split: str = "test") -> list[int]:
    wanted = (metric, model, split)
    measured = {line["round"]: {(m["metric"], m["model"], m["split"]) for m in line["metrics"]} for line in run.rounds}
    return sorted(number for number, found in measured.items() if wanted in found)


def test_after_the_last_round_only_or_every_so_many(tmp_path: Path) -> None:
    models = "evaluation.models=[global, trained]"
    last = run(tmp_path / "last", "training.rounds=3", models)
    assert (rounds_with(last, "odsf"), rounds_with(last, "edge_f_plain")) == ([3], [0, 1, 2, 3])
    assert rounds_with(last, "odsf", "trained") == [3]
    assert rounds_with(last, "rmse", "trained") == [1, 2, 3]
    often = run(tmp_path / "often", "training.rounds=5", models, "evaluation.costly_every=2")
    assert rounds_with(often, "odsf") == rounds_with(often, "odsf", "trained") == [2, 4, 5]
    # They change nothing else, and what is drawn over the rounds has a task where it was measured.
    same = [
        {(m["task"], m["metric"], m["model"]): m["value"] for m in each.rounds[2]["metrics"]} for each in (last, often)
    ]
    assert same[0].items() < same[1].items()
    assert {number: set(values) for number, values in over_rounds(often, "test", False).items()} == {
        0: {"depth"}, 1: {"depth"}, 2: {"depth", "edge"}, 3: {"depth"}, 4: {"depth", "edge"}, 5: {"depth", "edge"}
    }  # fmt: skip


@pytest.mark.parametrize("more", [(), ("early_stopping.restore_best=false",)])
def test_a_run_that_stops_early_measures_the_model_that_it_keeps(tmp_path: Path, more: tuple[str, ...]) -> None:
    found = run(tmp_path / "run", "training.rounds=4", *LEAVES, *more)
    assert found.info["status"] == "stopped early"
    kept = found.info["final_round"]
    assert kept == (2 if more else 1)
    assert rounds_with(found, "odsf") == rounds_with(found, "odsf", split="val") == [kept]
    assert not math.isnan(found.final().values["edge"]["odsf"])
    # The same as a run measures that ends there.
    short = run(tmp_path / "short", f"training.rounds={kept}", "partition.val_fraction=0.25")
    assert found.final().values == short.final().values


def test_workers_and_a_stop_at_the_very_end_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("training.rounds=4", *LEAVES)
    whole = run(tmp_path / "whole", *changes)
    assert_same(whole.folder, run(tmp_path / "pool", *changes, "runtime.workers=2").folder)
    with monkeypatch.context() as broken:
        broken.setattr("fedloom.federation.runs.folder.RunFolder.save_model", _full)
        with pytest.raises(OSError, match="full"):
            run(tmp_path / "again", *changes)
    again = fedloom.resume(tmp_path / "again").run
    assert again.final() == whole.final()
    assert again.rounds[1]["metrics"] == whole.rounds[1]["metrics"]


def _full(*_: Any, **__: Any) -> None:
    raise OSError("disk full")


CUT = ("model={name: tiny-pyramid}", "training.rounds=1", "training.epochs=null", "training.steps=1",
       "training.batch_size=2", "runtime.diagnostics=false")  # fmt: skip
FULL = {
    "feddea/nyud": ("data.root={nyud}", "data.size=[32, 32]"),
    "feddea/pascal": ("data.root={pascal}", "data.size=[32, 32]"),
    "fedhca2/pascal-st-nyud-mt": (
        "data.sets.pascal.root={pascal}", "data.sets.nyud.root={nyud}", "data.sets.pascal.size=[32, 32]",
        "data.sets.nyud.size=[32, 32]", "model.heads=own",
    ),
}  # fmt: skip
FULL["fedhca2/nyud-st-pascal-mt"] = FULL["fedhca2/pascal-st-nyud-mt"]


@pytest.mark.parametrize("name", FULL)
def test_the_papers_recipes_judge_edges_by_odsf(name: str, tmp_path: Path) -> None:
    homes = {"nyud": nyud(tmp_path / "n", 6), "pascal": pascal(tmp_path / "p", 6)}
    recipe = load(name, [*CUT, *(change.format(**homes) for change in FULL[name])])
    final = fedloom.run(recipe, tmp_path / "run").run.final().values
    tasks = json.loads((tmp_path / "run" / "run.json").read_text())["tasks"]
    distance = {task.name: task.max_dist for task in build(recipe).federation.tasks if isinstance(task, Edge)}
    sets = ("nyud", "pascal") if "-st-" in name else (name.removeprefix("feddea/"),)
    assert distance == {
        f"{home}-edge" if len(sets) > 1 else "edge": {"nyud": 0.011, "pascal": 0.0075}[home] for home in sets
    }
    for task in distance:
        assert tasks[task]["primary"] == "odsf"
        assert {"odsf", "edge_f_plain"} <= tasks[task]["metrics"].keys()
        assert 0 < final[task]["odsf"] < 1
