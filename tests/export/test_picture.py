"""Finished runs, opened again, and pictures of one and of several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.data.drawing import GAP
from fedloom.engines.api import Result, trained_models
from fedloom.errors import StateError
from fedloom.experiments.export import predictions as picture
from fedloom.experiments.export.finished import open_runs
from fedloom.experiments.export.predictions import predictions
from fedloom.federation.recipes import load
from fedloom.federation.rounds.showing import some_examples
from fedloom.study.grid import cells, load_grid, runs_in, save

Quick = Callable[..., Result]
SMALL = (
    *(f"data.sets.{name}.{key}" for name in ("outside", "rooms") for key in ("count=20", "test_count=2")),
    *("partition.val_fraction=0", "training.rounds=1", "training.epochs=1", "training.batch_size=4"),
    *("evaluation.every=1", "evaluation.splits=[test]"),
)
CELL = 128  # scenes are 64 pixels wide
OUTSIDE, ROOMS = 5, 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with personal models, one with a global model, one with both, on two data sets side by side."""
    home = tmp_path_factory.mktemp("runs")
    for method in ("local", "fedavg", "ditto"):
        fedloom.run(load("fedhca2/scenes-outside-st-rooms-mt", (*SMALL, f"method={method}")), home / method)
    return {method: home / method for method in ("local", "fedavg", "ditto")}


def width(columns: int) -> int:
    return GAP + columns * (CELL + GAP)


def headings(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Headings, and the texts of each row, that are drawn from now on."""
    seen: list[list[str]] = []
    real = picture.grid

    def grid(columns, rows, title, legends):
        seen.append(list(columns))
        seen.extend([text for _, text in row] for row in rows)
        return real(columns, rows, title, legends)

    monkeypatch.setattr(picture, "grid", grid)
    return seen


def test_several_runs_have_a_column_each(runs, monkeypatch):
    seen = headings(monkeypatch)
    made = predictions([runs["local"], runs["fedavg"], runs["ditto"]], count=2)
    assert made.width == width(5)
    assert made.height > 2 * (OUTSIDE + ROOMS) * CELL
    assert seen[0] == ["input", "truth", "local", "fedavg", "ditto"]
    edge = ["outside-edge", "", "outside-edge-0", "global model", "outside-edge-0"]
    assert seen[OUTSIDE] == seen[2 * OUTSIDE] == edge
    assert seen[2 * OUTSIDE + 1] == seen[0]
    depth = seen[2 * OUTSIDE + 4]
    assert (depth[0], depth[1][-2:], depth[2:]) == (
        "rooms-depth",
        " m",
        ["rooms-multi-0", "global model", "rooms-multi-0"],
    )


def test_the_columns_hold_each_runs_prediction(runs):
    local, fedavg = open_runs([runs["local"], runs["fedavg"]])
    task = next(t for t in local.built.federation.tasks if t.name == "rooms-normals")
    x, truth, shown = some_examples(local.built.federation.holder(task.name), [task], 2)
    assert len(x) == len(shown) == len(truth["rooms-normals"]) == 2
    mine, theirs = (picture._answers(run, task, x)[0] for run in (local, fedavg))
    assert not torch.equal(mine[0], theirs[0])
    assert torch.allclose(mine[0].norm(dim=0), torch.ones(64, 64)[: x.shape[-2], : x.shape[-1]], atol=1e-4)
    assert torch.equal(picture._answers(local, task, x)[0][1], mine[1])


def test_one_run_on_two_data_sets_shows_both(runs, monkeypatch):
    seen = headings(monkeypatch)
    made = predictions(runs["fedavg"], count=1)
    assert made.height > (OUTSIDE + ROOMS) * CELL
    assert seen[0] == ["input", "truth", "fedavg", "where it is wrong"]


def test_equal_methods_are_told_apart(runs, monkeypatch):
    seen = headings(monkeypatch)
    predictions([runs["local"], runs["local"], runs["fedavg"]], count=1)
    assert seen[0][2:] == ["local, run 1", "local, run 2", "fedavg"]


def test_runs_with_other_data_are_not_compared(runs, tmp_path):
    other = load("fedhca2/scenes-outside-st-rooms-mt", (*SMALL, "method=local", "seed=1"))
    fedloom.run(other, tmp_path / "other")
    with pytest.raises(
        StateError, match=r"not comparable, because the data differ: .*local \(seed 0\) and .*other \(seed 1\)"
    ):
        predictions([runs["local"], tmp_path / "other"])


def test_a_grid_is_the_runs_of_its_first_seed(runs, tmp_path, monkeypatch):
    bases = {
        name: {"method": method} for name, method in (("FedAvg", "fedavg"), ("Local", "local"), ("Ditto", "ditto"))
    }
    value = {"name": "g", "data": {"1C": {"recipe": "fedhca2/scenes-outside-st-rooms-mt"}}, "bases": bases}
    grid = load_grid({**value, "seeds": [0, 1]})
    save(grid, tmp_path / "g", {})
    with pytest.raises(StateError, match="no cell of grid g with seed 0 has finished"):
        runs_in(tmp_path / "g")
    for cell in cells(grid):
        if (cell.base, cell.seed) in (("FedAvg", 0), ("Local", 0), ("Local", 1)):
            shutil.copytree(runs[cell.base.lower()], cell.folder(tmp_path / "g"))
    seen = headings(monkeypatch)
    out = tmp_path / "out.png"
    result = CliRunner().invoke(
        app, ["plot", "picture", str(tmp_path / "g"), "--out", str(out), "--count", "1"], catch_exceptions=False
    )
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert seen[0] == ["input", "truth", "fedavg", "local"]


def test_the_command(runs, tmp_path):
    out = tmp_path / "out.png"
    folders = [str(runs["local"]), str(runs["fedavg"])]
    result = CliRunner().invoke(
        app, ["plot", "picture", *folders, "--out", str(out), "--count", "1"], catch_exceptions=False
    )
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert out.stat().st_size > 1000
    assert CliRunner().invoke(app, ["plot", "picture", str(out)]).exit_code == 2


TINY = ("training.rounds=1", "model.width=4", "model.hidden=8", "data.size=8")


def test_runs_on_the_same_data_share_it(quick: Quick) -> None:
    fedavg, local = (quick(f"method={name}", *TINY).folder for name in ("fedavg", "local"))
    told: list[tuple[int, int, str]] = []
    runs = open_runs([fedavg, local, str(fedavg)], lambda *step: told.append(step))
    assert [run.name for run in runs] == ["fedavg, run 1", "local", "fedavg, run 3"]
    assert [run.round for run in runs] == [1, 1, 1]
    assert all(run.built.dataset.train is runs[0].built.dataset.train for run in runs)
    assert told == [(i, 3, f"loading {folder}") for i, folder in enumerate([fedavg, local, fedavg])]
    models = trained_models(fedavg)
    assert runs[0].models.keys() == models.keys()
    assert all(torch.equal(tensor, models[""][name]) for name, tensor in runs[0].models[""].items())


def test_what_is_no_finished_run_on_the_same_data(quick: Quick, tmp_path: Path) -> None:
    folder = quick("method=fedavg", *TINY).folder
    other = quick("method=fedavg", *TINY, "seed=5").folder
    with pytest.raises(StateError, match=r"the data differ: .* \(seed 0\) and .* \(seed 5\)"):
        open_runs([folder, other])
    with pytest.raises(StateError, match=f"{tmp_path} is not a run folder"):
        open_runs([tmp_path])
    changed = shutil.copytree(folder, tmp_path / "changed")
    info = json.loads((changed / "run.json").read_text())
    (changed / "run.json").write_text(json.dumps(info | {"layout_hash": "0", "check": None}))
    with pytest.raises(StateError, match="changed: the model has changed since the run began"):
        open_runs([folder, changed])
    (changed / "model.safetensors").unlink()
    with pytest.raises(StateError, match=r"changed has no model\.safetensors: the run has not finished"):
        open_runs([changed])
