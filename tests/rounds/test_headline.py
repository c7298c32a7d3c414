"""Test what a progress line says of a round: which metric of which split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.federation.rounds.measure import headline

TASKS = [SimpleNamespace(name=n, primary=m) for n, m in (("digit", "accuracy"), ("odd", "accuracy"), ("depth", "rmse"))]
BUILT: Any = SimpleNamespace(federation=SimpleNamespace(tasks=TASKS))


def entry(task: str, metric: str, value: float, split: str) -> dict[str, Any]:
    return {"task": task, "metric": metric, "value": value, "split": split}


def test_validation_comes_first_and_metrics_are_apart() -> None:
    metrics = [entry("digit", "accuracy", 0.5, "val"), entry("odd", "accuracy", 0.7, "val")]
    metrics += [entry("depth", "rmse", 2.0, "val"), entry("depth", "rmse", float("nan"), "val")]
    metrics += [entry("digit", "accuracy", 0.1, "test"), entry("digit", "loss", 9.0, "val")]
    found = headline(BUILT, {"train": [{"loss": 1.0}, {"loss": 2.0}], "metrics": metrics})
    assert found == pytest.approx({"training loss": 1.5, "val accuracy": 0.6, "val rmse": 2.0})


def test_test_data_where_there_is_nothing_else() -> None:
    assert headline(BUILT, {"train": [], "metrics": [entry("odd", "accuracy", 0.25, "test")]}) == {
        "test accuracy": 0.25
    }
    assert headline(BUILT, {"train": [], "metrics": []}) == {}
