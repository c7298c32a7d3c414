"""Runs on real public data in small files; skipped where the files are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom

REAL = Path(__file__).parents[3] / "shared" / "data"

RECIPES = {
    "fashion_mnist": {
        "data": {"name": "arrays", "path": str(REAL / "fashion_mnist.npz"), "limit": 600},
        "partition": {"name": "class-dirichlet", "clients": 5, "alpha": 0.3},
        "model": {"name": "cnn", "width": 4, "hidden": 48},
        "method": {"name": "fedprox", "add": {"feddea": {"rho": 0.5}}},
    },
    "pacs": {
        "data": {"name": "arrays", "path": str(REAL / "pacs.npz"), "size": 32, "domain": "domain_{split}",
                 "domain_names": "domain_names"},
        "partition": {"name": "domains", "clients": 1},
        "model": {"name": "resnet10", "width": 8},
        "method": "fedavg",
    },
    "omniglot": {
        "data": {"name": "arrays", "path": str(REAL / "omniglot.npz"), "limit": 500,
                 "labels": {"alphabet": "alphabet_{split}", "drawer": "drawer_{split}"}, "classes": {"drawer": 21}},
        "partition": {"name": "one-task", "all_task_clients": 1},
        "model": "small-cnn",
        "method": "fedavg",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "pacs" else []) for name in RECIPES]
)
def test_real_images_train(name: str, tmp_path: Path) -> None:
    if not (REAL / f"{name}.npz").exists():
        pytest.skip(f"{name}.npz is not here")
    recipe = {"name": name, **RECIPES[name], "training": {"rounds": 3, "epochs": 2}, "evaluation": {"every": 3}}
    result = fedloom.run(recipe, tmp_path / "run")
    rounds = result.run.rounds
    losses = [sum(t["loss"] for t in line["train"]) for line in rounds]
    assert losses[-1] < losses[1]
    assert result.run.final().values
