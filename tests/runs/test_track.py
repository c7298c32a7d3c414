"""Trackers are told what the files say, each round once, and cannot break a run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedloom
from fedloom.engines.api import Result
from fedloom.errors import UserError
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs.track import _allowed, flat, scalars
from tests_support import assert_same, load_recipe, stopped_after


def told_by(folder: Path) -> tuple[list[dict], list[dict]]:
    """The lines of metrics.jsonl and of bytes.jsonl."""
    files = (folder / "metrics.jsonl", folder / "bytes.jsonl")
    metrics, traffic = ([json.loads(text) for text in file.read_text().splitlines()] for file in files)
    return metrics, traffic


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


def test_tensorboard(tmp_path: Path) -> None:
    """Also of a run that was cut off: what it wrote of rounds that were done again is not shown."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe("training.rounds=3", "runtime.checkpoint_every=2", "runtime.track=tensorboard")
    for stop in (1, 2):  # before the first round is saved, and after
        run = stopped_after(stop, tmp_path / f"run{stop}", recipe)
        fedloom.resume(run)
        events = EventAccumulator(str(run / "tensorboard"))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            assert [e.step for e in events.Scalars(tag)] in ([0, 1, 2, 3], [1, 2, 3]), tag
        for line, sent in zip(*told_by(run), strict=True):
            for tag, value in scalars(line, sent).items():
                told = {e.step: e.value for e in events.Scalars(tag)}
                assert told[line["round"]] == pytest.approx(value, rel=1e-6)


def test_tracking_changes_nothing(quick: Callable[..., Result]) -> None:
    pytest.importorskip("tensorboard")
    run, plain = quick("runtime.track=tensorboard"), quick()
    assert_same(run, plain)
    assert run.run.info["recipe_hash"] == plain.run.info["recipe_hash"]


class Ledger:
    """A library's own memory, which survives a run; the fakes of MLflow and wandb write to it, and may fail."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.params: dict[str, Any] = {}
        self.status = ""
        self.fails_at: int | None = None

    def log(self, run: str, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        assert step not in self.runs[run], "told twice"
        self.runs[run][step] = values


def fake_mlflow(ledger: Ledger) -> SimpleNamespace:
    class Client:
        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri.startswith("sqlite:///")

        def get_experiment_by_name(self, name: str) -> None:
            assert name == "fedloom"

        def create_experiment(self, name: str, place: str) -> str:
            return "0"

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            ledger.runs[run_name] = {}
            return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

        def update_run(self, run: str, status: str) -> None:
            assert run in ledger.runs

        def get_metric_history(self, run: str, key: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(step=step) for step in ledger.runs[run]]

        def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
            assert len(params) <= 100
            ledger.params |= dict(params)
            if metrics:
                (step,) = {step for _, _, _, step in metrics}
                ledger.log(run, step, {key: value for key, value, _, _ in metrics})

        def set_terminated(self, run: str, status: str) -> None:
            ledger.status = {"FINISHED": "ok", "FAILED": "failed"}[status]

    entities = SimpleNamespace(Param=lambda key, value: (key, value), Metric=lambda *values: values)
    return SimpleNamespace(MlflowClient=Client, entities=entities)


def fake_wandb(ledger: Ledger) -> SimpleNamespace:
    def init(**given: Any) -> SimpleNamespace:
        run = given["id"]
        assert given["resume"] == "allow"
        assert Path(given["dir"]).is_dir()
        ledger.params |= flat(given["config"])
        told = ledger.runs.setdefault(run, {})
        return SimpleNamespace(
            starting_step=max(told, default=-1) + 1,
            log=lambda values, step: ledger.log(run, step, values),
            finish=lambda exit_code: setattr(ledger, "status", "failed" if exit_code else "ok"),
        )

    return SimpleNamespace(init=init, Settings=lambda **given: given)


FAKES = {"mlflow": fake_mlflow, "wandb": fake_wandb}


@pytest.fixture(params=FAKES)
def faked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Ledger]:
    """(the name of a tracker, what its library was told)."""
    ledger = Ledger()
    monkeypatch.setitem(sys.modules, request.param, FAKES[request.param](ledger))
    for module in ("sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    return request.param, ledger


def test_a_resumed_run_goes_on_with_its_tracked_run(faked: tuple[str, Ledger], tmp_path: Path) -> None:
    """Round 3 of 4 is cut off after a checkpoint of round 2, and what was told of round 2 is lost, or is not."""
    name, ledger = faked
    recipe = load_recipe("training.rounds=4", f"runtime.track={name}")
    for lost in (False, True):
        run = stopped_after(2, tmp_path / f"run{lost}", recipe)
        assert ledger.status == "failed"
        (steps,) = ledger.runs.values()
        assert list(steps) == [0, 1, 2]
        if lost:
            del steps[2]
        fedloom.resume(run)
        (steps,) = ledger.runs.values()
        assert list(steps) == [0, 1, 2, 3, 4]
        assert ledger.status == "ok"
        lines, traffic = told_by(run)
        for line, sent in zip(lines, traffic, strict=True):
            assert sorted(steps[line["round"]].values()) == sorted(scalars(line, sent).values())
        ledger.runs.clear()
    assert ledger.params["training.rounds"] == "4"
    assert ledger.params["data.name"] == "digits"


def test_rounds_that_count_no_more_are_not_told_again(faked: tuple[str, Ledger], tmp_path: Path) -> None:
    """The last checkpoint is two rounds older than what was told: they are done again, and are there once."""
    name, ledger = faked
    recipe = load_recipe("training.rounds=4", "runtime.checkpoint_every=3", f"runtime.track={name}")
    fedloom.resume(stopped_after(2, tmp_path / "run", recipe))
    (steps,) = ledger.runs.values()
    assert list(steps) == [0, 1, 2, 3, 4]


def test_an_error_ends_the_tracking_alone(faked: tuple[str, Ledger], quick: Callable[..., Result]) -> None:
    name, ledger = faked
    ledger.fails_at = 1
    heard: list[str] = []

    class Hears(Progress):
        def event(self, text: str) -> None:
            heard.append(text)

    run = quick(f"runtime.track={name}", progress=Hears())
    assert heard == ["tracking has stopped, the run continues: ConnectionError: the server is gone"]
    assert_same(run, quick())
    (steps,) = ledger.runs.values()
    assert list(steps) == [0]


def test_what_is_not_installed_is_named(quick: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FAKES:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=r"pip install 'fedloom\[track\]'"):
            quick(f"runtime.track={name}")


@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module)
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = load_recipe("training.rounds=3", "runtime.track=mlflow", "runtime.checkpoint_every=3")
    run = stopped_after(2, tmp_path / "run", recipe)
    fedloom.resume(run)
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (there,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert (there.info.run_name, there.info.status) == ("run", "FINISHED")
    assert there.data.params["training.rounds"] == "3"
    for key in there.data.metrics:
        steps = [metric.step for metric in client.get_metric_history(there.info.run_id, key)]
        assert steps in ([0, 1, 2, 3], [1, 2, 3]), key
    last = [scalars(line, sent) for line, sent in zip(*told_by(run), strict=True)][-1]
    assert sorted(there.data.metrics.values()) == pytest.approx(sorted(last.values()))


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = stopped_after(1, tmp_path / "run", load_recipe("runtime.track=wandb"))
    fedloom.resume(run)
    name = json.loads((run / "track.json").read_text())["wandb"]
    assert len(list((run / "wandb").glob(f"offline-run-*-{name}"))) >= 1
    assert_same(run, fedloom.run(load_recipe(), tmp_path / "plain"))


def test_names_that_mlflow_takes() -> None:
    named = _allowed("tâche (a/b) 5%/m, test, global")
    assert named == "tâche :28:a/b:29: 5:25:/m test global"
    assert _allowed("a:28:") != _allowed("a(")
    assert flat({"a": {"b": [1, "x"], "c": None, "d": {}}, "e": "t"}) == {
        "a.b": '[1, "x"]',
        "a.c": "null",
        "a.d": "{}",
        "e": "t",
    }
