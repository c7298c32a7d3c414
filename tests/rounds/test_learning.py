"""Longer: dense training learns. Local training beats the best constant on every task; the unified model interferes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.models.tasks.dense import DenseTask

REAL = Path(__file__).parents[3] / "shared" / "data" / "nyuv2.npz"


def constants(name: str, *changes: str) -> dict[str, tuple[float, str]]:
    """Task -> (primary metric of the best constant of the training labels on the test part, direction)."""
    dataset = build(load(name, changes)).dataset
    cpu, scores = torch.device("cpu"), {}
    _, train = dataset.train.batch(torch.arange(len(dataset.train)), cpu)
    _, test = dataset.test.batch(torch.arange(len(dataset.test)), cpu)
    for task in dataset.tasks:
        assert isinstance(task, DenseTask)
        seen, target = train[task.name], test[task.name]
        output = torch.zeros(len(target), task.channels, *target.shape[-2:])
        if task.label == "classes":
            output[:, torch.bincount(seen[seen != 255].flatten()).argmax()] = 1
        elif task.label == "normals":
            valid = (seen != 255).all(1)
            output += torch.stack([seen[:, i][valid].mean() for i in range(3)]).view(1, 3, 1, 1)
        elif task.label == "depth":
            output += seen[seen != 255].mean()
        else:
            output += 5.0  # an edge everywhere, which has the best F of all constants
        metric = task.metric()
        metric.update(output, target)
        scores[task.name] = metric.compute()[task.primary], task.metrics[task.primary]
    return scores


def gains(result: fedloom.Result, base: dict[str, tuple[float, str]]) -> dict[str, float]:
    """Task -> how much better than the constant, as a share of it."""
    info, final = result.run.info["tasks"], result.run.final().values
    return {
        task: (final[task][info[task]["primary"]] / score - 1) * (1 if direction == "max" else -1)
        for task, (score, direction) in base.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scenes(tmp_path: Path) -> None:
    base = constants("feddea/scenes")
    local = fedloom.run("feddea/scenes", tmp_path / "local", overrides=["method=local"])
    gained = gains(local, base)
    assert gained["semseg"] > 5
    assert gained["normals"] > 0.3
    assert gained["depth"] > 0.15
    assert gained["edge"] > 1
    fedavg = fedloom.run("feddea/scenes", tmp_path / "fedavg", overrides=["method=fedavg"])
    unified = gains(fedavg, base)
    assert any(unified[task] < gained[task] for task in base)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not REAL.exists(), reason="the small NYU v2 is not here")
def test_real_nyu(tmp_path: Path) -> None:
    change = f"data.path={REAL}"
    local = fedloom.run("feddea/nyud-mini", tmp_path / "local", overrides=["method=local", change])
    gained = gains(local, constants("feddea/nyud-mini", change))
    assert gained["semseg"] > 1.5
    assert gained["normals"] > 0.15
    assert gained["depth"] > 0.02
    assert gained["edge"] > 0.7
