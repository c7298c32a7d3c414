"""The seconds that a run writes down are those that its parts took."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom.federation.rounds import messages, worker
from fedloom.federation.rounds.messages import Ledger
from fedloom.federation.runs.reader import seconds_of
from tests_support import Quick


@pytest.mark.parametrize("changes", [(), ("model={name: mlp, hidden: [4]}", "training.stacked=true")])
def test_all_seconds_of_a_run_are_within_those_that_passed(quick: Quick, changes: tuple[str, ...]) -> None:
    began = time.perf_counter()
    folder: Path = quick(*changes, "evaluation.models=[global, trained]").folder
    passed = time.perf_counter() - began
    lines: list[dict[str, Any]] = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["round"] > 0]
    for line in rounds:
        assert line["seconds"]
        assert all(0 <= value < passed for value in line["seconds"].values()), line["seconds"]
        trained = line["seconds_of"]
        assert len(trained) > 1
        assert all(0 < value < passed for value in trained.values()), trained
    assert sum(sum(line["seconds_of"].values()) for line in rounds) < passed


def test_no_second_of_a_round_counts_twice() -> None:
    phases = {"train and aggregate": 2.0, "evaluate": 1.0}
    inside = {"local training, sum over clients": 1.5, "waiting for data, sum over clients": 0.25, "diagnostics": 0.5}
    assert seconds_of({"round": 1, "seconds": {**phases, **inside}}) == 3.0
    assert seconds_of({"round": 0, "seconds": None}) == seconds_of({"round": 0}) == 0.0


def test_a_phase_adds_the_time_inside_also_where_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(messages.time, "perf_counter", lambda: next(now))
    ledger = Ledger()
    with ledger.phase("train"):
        pass
    assert ledger.seconds == {"train": 2.5}
    with pytest.raises(RuntimeError), ledger.phase("train"):
        raise RuntimeError
    assert ledger.seconds == {"train": 3.5}


def test_waiting_for_batches_is_a_part_of_the_time_of_training(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    real = worker.Worker.train

    def noting(self: Any, job: Any, evaluate_trained: bool = False) -> Any:
        done = real(self, job, evaluate_trained)
        assert 0 <= done.result.waiting <= done.seconds
        waited.append(done.result.waiting)
        return done

    monkeypatch.setattr(worker.Worker, "train", noting)
    quick("training.rounds=1")
    assert sum(waited) > 0
