"""TensorBoard is told what the files say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from fedloom.runtime.api import Result
from fedloom.runtime.track import scalars
from tests_support import assert_same


def test_means_bytes_and_seconds() -> None:
    def metric(client: str, value: float | None) -> dict:
        return {"client": client, "task": "t", "metric": "m", "value": value, "split": "test", "model": "global"}

    line = {"round": 1, "metrics": [metric("a", 0.25), metric("b", 0.75)], "seconds": {"evaluate": 2.0}}
    line["train"] = [{"client": "a", "task": "t", "loss": 3.0}, {"client": "b", "task": "t", "loss": 5.0}]
    traffic = {"up": [{"bytes": 3}, {"bytes": 4}], "down": []}
    wanted = {"t/m, test, global": 0.5, "t/training loss": 4.0, "bytes/up": 7, "bytes/down": 0, "seconds/evaluate": 2.0}
    assert scalars(line, traffic) == wanted
    line["metrics"][0]["value"] = None
    line["train"][0]["loss"] = math.inf
    assert set(scalars(line, traffic)) == {"bytes/up", "bytes/down", "seconds/evaluate"}


@pytest.mark.filterwarnings("ignore")
def test_a_run(quick: Callable[..., Result]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = quick("runtime.track=tensorboard")
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    lines = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    traffic = [json.loads(text) for text in (run.folder / "bytes.jsonl").read_text().splitlines()]
    for line, sent in zip(lines, traffic, strict=True):
        for tag, value in scalars(line, sent).items():
            told = {e.step: e.value for e in events.Scalars(tag)}
            assert told[line["round"]] == pytest.approx(value, rel=1e-6)
    plain = quick()
    assert_same(run, plain)
    assert run.run.info["recipe_hash"] == plain.run.info["recipe_hash"]
