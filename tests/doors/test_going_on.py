"""Runs that go on further than they were meant to, and runs that begin with another one's model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.engines.api import Engine
from fedloom.errors import RecipeError, StateError
from fedloom.federation.recipes.loader import load
from fedloom.study.report.collect import of_run
from tests_support import Quick, assert_same, load_recipe, stopped_after


def test_a_run_goes_on_as_if_it_had_been_meant_to(quick: Quick) -> None:
    short, long = quick(), quick("training.rounds=4")
    assert CliRunner().invoke(app, ["resume", str(short.folder), "training.rounds=4"]).exit_code == 0
    assert_same(short.folder, long, models_only=True)
    assert [row for row in short.run.rows() if row["round"] == 4] == [r for r in long.run.rows() if r["round"] == 4]
    info = json.loads((short.folder / "run.json").read_text())
    assert info["changes"] == [{"after_round": 2, "keys": {"training.rounds": [2, 4]}}]
    assert (info["status"], info["rounds"]) == ("finished", 4)
    assert dict(of_run(short.run).facts)["segments"] == "after round 2: training.rounds was 2, is 4"
    assert "recipe changed" in (short.folder / "metrics.jsonl").read_text()
    fl.resume(short.folder, rounds=5)  # once more, from Python
    assert [c["after_round"] for c in short.run.info["changes"]] == [2, 4]
    assert fl.resume(short.folder).run.last_round == 5


def test_a_run_from_before_a_key_existed_goes_on(tmp_path: Path) -> None:
    """A key that came later, and has its default, is no change of the recipe; one with another value is."""
    data = "data={name: digits, domains: [plain, inverted], tasks: [parity], size: 16, test_fraction: 0.2}"
    recipe = load_recipe(data, "partition={name: domains, clients: 1}", "training.rounds=1")
    folder = fl.run(recipe, tmp_path / "run").folder
    file = folder / "run.json"
    info = json.loads(file.read_text())
    del info["check"]  # as runs from before it
    del info["recipe"]["partition"]["named"], info["recipe"]["runtime"]["exact"], info["recipe"]["privacy"]
    file.write_text(json.dumps(info))
    assert fl.resume(folder, rounds=2).run.last_round == 2
    changed = json.loads(file.read_text())
    del changed["check"]
    assert changed["changes"] == [{"after_round": 1, "keys": {"training.rounds": [1, 2]}}]
    del changed["recipe"]["partition"]["named"]
    file.write_text(json.dumps(changed | {"recipe": changed["recipe"] | {"seed": 7}, "recipe_hash": "0"}))
    with pytest.raises(StateError, match=r"has changed since the run began: seed was 7, is 0, training\.rounds was 2"):
        fl.resume(folder, rounds=3)


def test_a_change_that_is_killed_before_the_recipe_has_its_name_is_made(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain resume goes on with it and tells it, and so does the next one where its line was lost."""

    class Killed(Exception):
        pass

    run, replace = quick(), os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == "recipe.next.yaml":
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(Killed):
            fl.resume(run.folder, rounds=3)
    again = fl.resume(run.folder).run
    told = [
        (line["round"], e["keys"]) for line in again.rounds for e in line["events"] if e["event"] == "recipe changed"
    ]
    assert told == [(3, "training.rounds was 2, is 3")]
    assert load(run.folder / "recipe.yaml").training.rounds == 3


def test_a_change_without_a_round_after_it_is_told_in_the_last_line(tmp_path: Path) -> None:
    folder = stopped_after(2, tmp_path / "run", load_recipe("training.rounds=3"))
    last = fl.resume(folder, rounds=2).run.rounds[-1]
    assert (last["round"], [e["event"] for e in last["events"]]) == (2, ["recipe changed"])


@pytest.mark.parametrize(
    ("started", "change", "message"),
    [
        ("training.schedule.name=cosine", "training.rounds=4", r"training.schedule \(cosine\) spans all rounds: .*"
         r"\(round 2: 0.0427, not 0.025\)"),
        ("training.schedule.warmup_share=0.5", "training.rounds=4", r"training.schedule \(warmup_share: 0.5\)"),
        ("method=fedga", "training.rounds=4", "training.rounds cannot change, because fedga depends on the number "
            "of rounds"),
        ("seed=0", "training.rounds=1", "has had 2 rounds, so training.rounds cannot become 1"),
        ("seed=0", "training.batch_size=4", r"training.batch_size cannot change after the run has begun.*--from"),
        ("seed=0", "method=fedprox", r"method.mu, method.name cannot change after .*--from \S+ method=fedprox$"),
        ("seed=0", "runtime.engine=flower", r"runtime.engine cannot change after the run has begun.*--from"),
    ],
)  # fmt: skip
def test_what_would_change_rounds_that_are_done_is_refused(
    quick: Quick, started: str, change: str, message: str
) -> None:
    run = quick(started)
    before = {f.name: f.read_bytes() for f in run.folder.iterdir() if f.is_file() and f.name != "run.json"}
    with pytest.raises(StateError, match=message):
        fl.resume(run.folder, overrides=[change])
    assert before == {f.name: f.read_bytes() for f in run.folder.iterdir() if f.is_file() and f.name != "run.json"}
    assert fl.resume(run.folder).run.last_round == 2


def test_a_run_of_a_cluster_goes_on_in_one_process(quick: Quick, tmp_path: Path) -> None:
    recipe = load_recipe("training.rounds=1", "runtime.engine=cluster")
    begun = fl.run(recipe, tmp_path / "run", engine=Engine())
    ended = fl.resume(begun.folder, overrides=["training.rounds=2", "runtime.engine=process"])
    assert load(ended.folder / "recipe.yaml").runtime.engine == "process"
    assert_same(ended.folder, quick(), models_only=True)


def test_a_run_begins_with_the_model_of_another(quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = quick()
    done = CliRunner().invoke(app, ["run", "--from", str(first.folder), "training.rounds=1", "--quiet"])
    assert done.exit_code == 0, done.output
    second = Path("runs") / f"digits-tasks-fedavg-s0-after-{first.folder.name}"
    start, end = (
        {(r["client"], r["task"], r["metric"], r["split"]): r["value"] for r in run.rows() if r["round"] == number}
        for run, number in ((fl.Result(second, "").run, 0), (first.run, 2))
    )
    assert start == end
    local = quick("method=local")
    with pytest.raises(RecipeError, match=r"model.start: .*it has models of client/all-0, .*, and none that all share"):
        quick(f"model.start={local.folder}")
    with pytest.raises(RecipeError, match=r"'encoder.conv1.weight': shape \(16, 1, 3, 3\) found, expected \(4, 1"):
        quick(f"model.start={first.folder}", "model.width=4")
    weights = load_file(first.folder / "model.safetensors")
    for value in (torch.nan, 1e300):  # the latter is not finite as float32
        save_file(weights | {"encoder.conv1.weight": weights["encoder.conv1.weight"].double() * 0 + value}, "other")
        with pytest.raises(RecipeError, match="model.start: other, 'encoder.conv1.weight': expected finite numbers"):
            quick("model.start=other")
    with pytest.raises(RecipeError, match="model.start: 'nowhere': the file nowhere does not exist"):
        fl.run(load_recipe(), model={"name": "small-cnn", "start": "nowhere"})
