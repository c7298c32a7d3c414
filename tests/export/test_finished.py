"""Finished runs, opened again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedloom.engines.api import Result, trained_models
from fedloom.errors import StateError
from fedloom.experiments.export.finished import open_runs

Quick = Callable[..., Result]
SMALL = ("training.rounds=1", "model.width=4", "model.hidden=8", "data.size=8")


def test_runs_on_the_same_data_share_it(quick: Quick) -> None:
    fedavg, local = (quick(f"method={name}", *SMALL).folder for name in ("fedavg", "local"))
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
    folder = quick("method=fedavg", *SMALL).folder
    other = quick("method=fedavg", *SMALL, "seed=5").folder
    with pytest.raises(StateError, match=r"the data differ: .* \(seed 0\) and .* \(seed 5\)"):
        open_runs([folder, other])
    with pytest.raises(StateError, match=f"{tmp_path} is not a run folder"):
        open_runs([tmp_path])
    changed = shutil.copytree(folder, tmp_path / "changed")
    info = json.loads((changed / "run.json").read_text())
    (changed / "run.json").write_text(json.dumps(info | {"layout_hash": "0", "check": None}))
    with pytest.raises(StateError, match="changed: the model differs from the one that the run began with"):
        open_runs([folder, changed])
    (changed / "model.safetensors").unlink()
    with pytest.raises(StateError, match=r"changed has no model\.safetensors: the run has not finished"):
        open_runs([changed])
