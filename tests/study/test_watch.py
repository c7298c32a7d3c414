"""How far a run has come, from its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import StateError
from fedloom.study.watch import now

TASKS = {
    "seg": {"primary": "miou", "metrics": {"miou": "max"}},
    "depth": {"primary": "rmse", "metrics": {"rmse": "min"}},
}
CLIENTS = {"a": {"tasks": {"seg": 1.0}}, "b": {"tasks": {"seg": 1.0, "depth": 1.0}}}


def folder(path: Path, rounds: int, status: str = "running", torn: str = "", **change: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    recipe = {"name": "t", "seed": 3, "data": {"name": "toy"}, "method": {"name": "m"}, "training": {"rounds": 9}}
    info = {"method": "fedavg", "tasks": TASKS, "clients": CLIENTS, "status": status, "final_round": rounds, **change}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (path / "run.json").write_text(json.dumps(info))
    lines, sent = [], []
    for r in range(rounds + 1):
        metrics = [
            {"client": c, "task": t, "metric": m, "value": v, "model": "global", "split": "test", "data": "d"}
            for c, t, m, v in [
                ("a", "seg", "miou", 0.1 * (r + 1)),
                ("b", "seg", "miou", 0.3),
                ("b", "depth", "rmse", 9 - r),
            ]
        ]
        train = (
            [{"client": "b", "task": "depth", "loss": 1 / r}, {"client": "a", "task": "seg", "loss": None}] if r else []
        )
        seconds = {"train and aggregate": 3.0, "evaluate": 1.0, "diagnostics": 5.0, "x, sum over clients": 50.0}
        lines.append({"round": r, "cohort": ["a", "b"] if r else [], "metrics": metrics, "train": train, "events": []})
        lines[-1] |= {"seconds": seconds if r else {}}
        sent.append({"round": r, "up": [{"client": "a", "role": "x", "task": None, "bytes": 10 * bool(r)}], "down": []})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    (path / "bytes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sent))
    return path


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    found = now(folder(tmp_path, 4, torn='{"round": 5, "coh'))
    assert (found.round, found.rounds, found.cohort, found.clients, found.up) == (4, 9, 2, 2, 40)
    assert (found.seconds, found.left) == (4.0, 20.0)
    assert found.quiet is not None
    seg, depth = found.tasks
    assert (depth.loss, depth.value) == (0.25, 5.0)
    assert (depth.best, depth.best_round) == (None, None), "by test data none is best"
    assert seg.loss != seg.loss
    assert seg.value == pytest.approx(0.4)
    assert depth.series == {0: 9, 1: 8, 2: 7, 3: 6, 4: 5}


def test_a_run_that_is_over_and_one_that_has_not_begun(tmp_path: Path) -> None:
    over = now(folder(tmp_path / "over", 2, "finished"))
    assert (over.left, over.quiet, over.status) == (None, None, "finished")
    begun = now(folder(tmp_path / "begun", 0))
    assert (begun.round, begun.seconds, begun.left) == (0, None, None)
    with pytest.raises(StateError, match="not a run folder"):
        now(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(folder(tmp_path, 4))])
    assert result.exit_code == 0, result.output
    text = re.sub(r"\s+", " ", result.output)
    for part in ("t: fedavg, seed 3", "round 4 of 9", "0:20 left", "40 B sent by clients", "depth (rmse) ↓ █▆▅▃▁"):
        assert part in text
