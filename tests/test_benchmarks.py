"""Test that every benchmark starts, and that those who are compared do the same job."""

from __future__ import annotations

import csv
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.methods import ADDONS, METHODS

HOME = Path(__file__).parents[1] / "benchmarks"
SLOW = {
    *("cluster_scaling", "diagnostics_cost", "f2dc_cost", "flower_simulation", "method_costs", "peers", "peers_growth"),
    *("merging", "sketch_choices", "table"),
}
"""These start each night, in processes of their own; by default they are only imported."""
SCRIPTS = [HOME / "peers", *sorted(HOME.glob("[!_]*.py"))]


@pytest.mark.usefixtures("torch_stays_as_it_is")
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.suffix == ".py"], ids=lambda s: s.stem)
def test_every_benchmark_starts(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(HOME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick"])
    runpy.run_path(str(script), run_name="imported" if script.stem in SLOW else "__main__")
    printed = capsys.readouterr().out.strip()
    assert "failed" not in printed
    assert printed or script.stem in SLOW


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem in SLOW], ids=lambda s: s.stem)
def test_every_long_benchmark_starts(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), "--quick"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert done.stdout.strip()


def test_all_are_listed() -> None:
    listed = (HOME / "README.md").read_text("utf-8")
    assert [script.name for script in SCRIPTS if f"python benchmarks/{script.name}" not in listed] == []


def test_every_method_and_add_on_has_its_costs_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HOME)
    monkeypatch.setattr(sys, "argv", ["method_costs"])
    costs = runpy.run_path(str(HOME / "method_costs.py"), run_name="imported")
    with (HOME.parent / "docs" / "results" / "method-costs.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["method"] for row in csv.DictReader(file)}
    assert costs["cases"]().keys() - {"fedavg"} == rows - {"fedavg"}
    reasons = {*costs["cases"](), *costs["LEFT_OUT"]}
    every = [*METHODS.entries, *(f"fedavg + {name}" for name in ADDONS.entries)]
    assert [name for name in every if not any(each.split(", ")[0] == name for each in reasons)] == []


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(HOME / "peers")
    import job

    return job


def test_by_hand_and_ours_train_the_same_network(job: ModuleType, tmp_path: Path) -> None:
    import ours

    job.write(tmp_path / "images.npz")
    built = build(load(ours.recipe(str(tmp_path / "images.npz"), "1")))
    by_hand = job.network()
    assert [p.shape for p in built.module.parameters()] == [p.shape for p in by_hand.parameters()]
    assert sum(p.numel() for p in by_hand.parameters()) == 29_914
    built.module.load_state_dict(dict(zip(built.module.state_dict(), by_hand.state_dict().values(), strict=True)))
    x = torch.randn(4, 1, 28, 28)
    assert torch.allclose(built.module(x)["label"], by_hand(x), atol=1e-6)
    first, second = (layer for layer in by_hand if isinstance(layer, torch.nn.Conv2d))
    assert 28 * 28 * first.weight.numel() + 14 * 14 * second.weight.numel() == 1_016_064
    assert {len(client.train) for client in built.federation.clients.values()} == {job.EXAMPLES}


def test_both_ways_by_hand_train_the_same_model(job: ModuleType) -> None:
    import loop

    x, y = torch.randn(40, 1, 28, 28), torch.arange(40) % 10
    trained = []
    for epoch in (job.epoch, loop.careful):
        model = job.network()
        torch.manual_seed(1)
        epoch(model, x, y)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*trained, atol=1e-5)
