"""Accuracy per domain, read from a small real run and from run folders made by hand."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import load_grid
from fedloom.study.results import DomainScores, Side, columns_of, domain_history


def test_average_and_sample_deviation() -> None:
    # F2DC, table 1: FedAvg on PACS, printed with two digits.
    scores = DomainScores(100, {"photo": 60.98, "art": 52.49, "cartoon": 74.63, "sketch": 77.46})
    assert scores.average == pytest.approx(66.39, abs=5e-3)
    assert scores.deviation == pytest.approx(11.74, abs=0.015)
    assert math.isnan(DomainScores(1, {"a": 0.5}).deviation)
    assert math.isnan(DomainScores(1, {"a": 0.5, "b": math.nan}).deviation)


def test_a_real_run(tmp_path: Path) -> None:
    changes = ["training.rounds=2", "training.epochs=null", "training.steps=2", "model=small-cnn", "evaluation.every=1"]
    run = fedloom.run("f2dc/digits-embedded", tmp_path / "run", overrides=changes).run
    history = domain_history(run)
    assert (history.task, history.metric) == ("digit", "accuracy")
    assert [s.round for s in history.rounds] == [0, 1, 2]
    assert list(history.last.values) == ["plain", "inverted", "thickened", "textured"]
    measured = {
        (run.info["clients"][r["client"]]["domain"], r["value"])
        for r in run.rounds[-1]["metrics"]
        if r["split"] == "test" and r["metric"] == "accuracy"
    }
    assert measured == set(history.last.values.items())  # one global model: all clients of a domain say the same
    values = [v for _, v in measured]
    assert history.last.average == pytest.approx(statistics.mean(values))
    assert history.last.deviation == pytest.approx(statistics.stdev(values))
    assert history.best in history.rounds
    f1 = domain_history(run, metric="macro_f1")
    assert f1.last.values != history.last.values


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Run]:
    """A run folder of clients a, b (domain x) and c (domain y) from {round: {split: values of a, b, c}}."""

    def write(rounds: dict[int, dict[str, list[float]]], direction: str = "max", **domains: Any) -> Run:
        of = {"a": "x", "b": "x", "c": "y", **domains}
        recipe = {"name": "t", "seed": 0, "partition": {"name": "domains", "clients": {"y": 1, "x": 2}}}
        info = {
            "method": "fedavg",
            "status": "finished",
            "final_round": max(rounds),
            "tasks": {"label": {"primary": "accuracy", "metrics": {"accuracy": direction}}},
            "clients": {c: {"tasks": {"label": 1.0}, "domain": d} for c, d in of.items()},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        (tmp_path / "run.json").write_text(json.dumps(info))
        lines = []
        for number, splits in rounds.items():
            metrics = [
                {"client": c, "task": "label", "metric": "accuracy", "value": v, "model": "personal", "split": split}
                for split, values in splits.items()
                for c, v in zip(of, values, strict=True)
            ]
            lines.append(json.dumps({"round": number, "metrics": metrics}))
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return Run.read(tmp_path)

    return write


def test_clients_of_a_domain_are_averaged_first(written: Callable[..., Run]) -> None:
    history = domain_history(written({1: {"test": [0.2, 0.4, 0.9]}}))
    assert list(history.last.values.items()) == [("y", 0.9), ("x", pytest.approx(0.3))]
    assert history.last.average == pytest.approx(0.6)
    assert history.best is None


def test_the_best_round_is_chosen_on_validation_data(written: Callable[..., Run]) -> None:
    rounds = {
        1: {"test": [0.9, 0.9, 0.9], "val": [0.1, 0.1, 0.5]},
        2: {"test": [0.5, 0.5, 0.5], "val": [0.2, 0.2, 0.8]},
        3: {"test": [0.7, 0.7, 0.7], "val": [0.8, 0.8, 0.2]},
        4: {"test": [0.6, 0.6, 0.6], "val": [0.0, 0.0, 0.0]},
        5: {"val": [1.0, 1.0, 1.0]},
    }
    history = domain_history(written(rounds))
    assert history.last.round == 4
    assert history.best is not None
    assert history.best.round == 2  # as good as round 3 over the domains, and earlier
    lowest = domain_history(written(rounds, direction="min"))
    assert lowest.best is not None
    assert lowest.best.round == 4


def test_what_cannot_be_read(written: Callable[..., Run]) -> None:
    run = written({1: {"val": [0.2, 0.4, 0.9]}})
    with pytest.raises(StateError, match="no test accuracy was measured"):
        domain_history(run)
    with pytest.raises(StateError, match="no task 'labels'. Did you mean 'label'"):
        domain_history(run, "labels")
    with pytest.raises(StateError, match="has no metric 'loss'; accuracy"):
        domain_history(run, metric="loss")
    with pytest.raises(StateError, match="client 'c' has no domain"):
        domain_history(written({1: {"test": [0.2, 0.4, 0.9]}}, c=None))


def test_a_grid_has_the_domains_of_the_split_that_it_is_read_on(written: Callable[..., Run]) -> None:
    """The rule for benchmarks reads validation data alone, and test data were not measured then."""
    run = written({1: {"val": [0.2, 0.4, 0.9]}})
    grid = load_grid({"name": "g", "data": {"D": {"recipe": "digits-domains"}}, "bases": {"A": {}}, "show": "domains",
                      "seeds": [0], "delta": "none"})  # fmt: skip
    side = Side("A", {0: run}, {0: run.final("val")}, {0: {"x": 0.3, "y": 0.9}}, by_domain=True)
    assert [column.task for column in columns_of(grid, "D", {("D", "A", "-"): side}) if column.task] == ["y", "x"]


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    def domains(*words: str) -> str:
        result = CliRunner().invoke(app, ["papers", "domains", str(tmp_path / "run"), *words])
        assert result.exit_code == 0, result.output
        return result.output

    changes = ["training.rounds=2", "training.epochs=null", "training.steps=1", "model=small-cnn", "evaluation.every=1"]
    fedloom.run("f2dc/digits-embedded", tmp_path / "run", overrides=changes)
    lines = domains().splitlines()
    assert lines[0] == "f2dc: digit accuracy by domain"
    assert lines[1].split() == ["round", "plain", "inverted", "thickened", "textured", "average", "deviation"]
    assert "last" in lines[-1]
    assert any("best" in line for line in lines[3:])
    domains("--out", str(tmp_path / "d.csv"))
    assert len((tmp_path / "d.csv").read_text().splitlines()) == 1 + 3 * 4
    domains("--out", str(tmp_path / "d.png"))
    assert (tmp_path / "d.png").stat().st_size > 1000
