"""Run folders as the engine writes them, also while a run is going on and after a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.core.errors import CONTROL
from fedloom.errors import StateError
from fedloom.federation.runs.reader import Run, human_bytes
from fedloom.study.comparison import compare
from fedloom.study.report.records import agreement_of
from fedloom.study.results import falls, losses
from report_support import write_files

RECIPE = {
    "name": "t",
    "seed": 3,
    "data": {"name": "toy"},
    "method": {"name": "fedavg", "add": {"feddea": {"rho": 0.3}}},
    "runtime": {"workers": 1, "threads": 1},
}
TASKS = {
    "seg": {"kind": "dense", "primary": "miou", "metrics": {"miou": "max", "loss": "min"}, "weight": 1.0},
    "depth": {"kind": "dense", "primary": "rmse", "metrics": {"rmse": "min"}, "weight": 1.0},
}
CLIENTS = {"a": {"tasks": {"seg": 1.0}}, "b": {"tasks": {"seg": 1.0, "depth": 1.0}}}


def metric(client: Any, task: str, value: float | None, model: str = "global", split: str = "test", name: str = ""):
    where = {"model": model, "split": split, "data": "shared test" if split == "test" else "own"}
    return {"client": client, "task": task, "metric": name or TASKS[task]["primary"], "value": value, **where}


@pytest.fixture
def folder(tmp_path: Path):
    """Write a run folder from {round: metrics}; keywords change run.json."""

    def write(metrics: dict[int, list[dict[str, Any]]], **info: Any) -> Path:
        value = {"method": "fedavg + feddea", "tasks": TASKS, "clients": CLIENTS, "status": "finished"}
        value |= {"rounds": max(metrics), "final_round": max(metrics), **info}
        return write_files(tmp_path, value, ({"round": r, "metrics": m} for r, m in metrics.items()), **RECIPE)

    return write


@pytest.mark.parametrize(
    ("churn", "is_away"),
    [({"joins": 1, "away": [[2, None]]}, True), ({"joins": 3}, True), ({"away": [[1, 2]]}, False), ({}, False)],
)
def test_peers_that_are_away_are_named_and_count(folder, churn: dict[str, Any], is_away: bool) -> None:
    path = folder({2: [metric("a", "seg", 0.2), metric("b", "seg", 0.4)]})
    recipe = yaml.safe_load((path / "recipe.yaml").read_text())
    (path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "peers": {"scenario": {"churn": {"b": churn}}}}))
    said = "away in round 2, with models that they use and that count in the means: b"
    final = Run.read(path).final()
    assert final.values["seg"]["miou"] == pytest.approx(0.3)
    assert (said in final.caption) == is_away
    assert (f"{said}." in compare([path]).notes) == is_away
    (path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "peers": {"scenario": {"churn": {"b": {"away": 3}}}}}))
    with pytest.raises(StateError, match=r"peers\.scenario.*away"):
        Run.read(path)


def test_sites_with_few_test_rows_are_named_and_count(folder) -> None:
    clients = {name: {**about, "test": rows} for (name, about), rows in zip(CLIENTS.items(), (4, 5), strict=True)}
    path = folder({2: [metric(n, "seg", 0.2, split=s) for n in CLIENTS for s in ("test", "val")]}, clients=clients)
    said = "fewer than 5 test rows, which count in the means like those of all others: a"
    assert f"{said}." in compare([path]).notes
    assert said in Run.read(path).final().gaps()
    assert not Run.read(path).final("val").gaps()


def test_final_is_the_mean_over_the_clients_that_hold_the_task(folder):
    entries = [
        metric("a", "seg", 0.2),
        metric("b", "seg", 0.4),
        metric("a", "seg", 9.0, split="val"),
        metric("a", "depth", 7.0),  # a holds the head of depth, but not the task
        metric("b", "depth", 0.5),
        metric("b", "seg", 8.0, model="trained"),
    ]
    run = Run.read(folder({0: [], 1: entries}, final_round=1))
    final = run.final()
    assert final.values == {"seg": {"miou": pytest.approx(0.3)}, "depth": {"rmse": 0.5}}
    assert list(final.values) == ["seg", "depth"]
    assert (final.model, final.round, final.data, final.split) == ("global", 1, ("shared test",), "test")
    assert run.final("val").values == {"seg": {"miou": 9.0}}
    assert (run.seed, run.label, run.is_finished) == (3, "fedavg + feddea", True)


def test_personal_models_go_before_the_global_one(folder):
    entries = [metric("a", "seg", 0.2), metric("a", "seg", 0.6, "personal"), metric("b", "seg", 0.4)]
    final = Run.read(folder({1: entries}, final_round=1)).final()
    assert final.values["seg"]["miou"] == pytest.approx(0.5)
    assert final.model == "personal and global"


def test_a_metric_of_the_whole_federation_counts_as_one(folder):
    assert Run.read(folder({1: [metric(None, "depth", 0.5)]})).final().values == {"depth": {"rmse": 0.5}}


def test_the_kept_round_decides(folder):
    metrics = {r: [metric("a", "seg", r / 10)] for r in (0, 2, 4)} | {5: []}
    assert Run.read(folder(metrics, final_round=2)).final().values["seg"]["miou"] == 0.2
    late = Run.read(folder(metrics, final_round=3)).final()
    assert (late.round, late.values["seg"]["miou"]) == (2, 0.2)
    going = Run.read(folder(metrics, status="running", rounds=0, final_round=0))
    assert (going.final().round, going.last_round, going.is_finished) == (4, 5, False)


def test_undefined_values_are_not_hidden(folder):
    final = Run.read(folder({1: [metric("a", "seg", None), metric("b", "seg", 0.4)]})).final()
    assert math.isnan(final.values["seg"]["miou"])


def test_a_torn_last_line_is_ignored_and_a_torn_middle_is_not(folder):
    path = folder({1: [metric("a", "seg", 0.1)], 2: [metric("a", "seg", 0.2)]}, rounds=1)
    file = path / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[:-30])
    assert [line["round"] for line in Run.read(path).rounds] == [1]
    file.write_text(text[:-30] + "\n" + text)
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 2"):
        Run.read(path)


def test_bytes_are_summed_and_repeated_rounds_count_once(folder):
    path = folder({1: []})
    assert Run.read(path).bytes_total() == {"up": 0, "down": 0}
    about = {"client": "a", "role": "encoder", "task": None}
    line = {"round": 1, "up": [{**about, "bytes": 3}, {**about, "bytes": 4}], "down": [{**about, "bytes": 10}]}
    lines = [line, {**line, "round": 2}, {**line, "round": 2}]
    (path / "bytes.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert Run.read(path).bytes_total() == {"up": 14, "down": 20}


def test_folders_that_are_no_runs_are_refused(folder, tmp_path):
    with pytest.raises(StateError, match=r"is not a run folder: run\.json is absent"):
        Run.read(tmp_path / "nowhere")
    path = folder({0: []})
    with pytest.raises(StateError, match=r"no test metrics up to round 0 \(recorded: none yet\)"):
        Run.read(path).final()
    (path / "run.json").write_text("{")
    with pytest.raises(StateError, match=r"run\.json: "):
        Run.read(path)


def test_runs_that_differ_only_in_the_seed_share_a_group(folder):
    path = folder({0: []})
    groups = set()
    for changes in ({}, {"seed": 4}, {"name": "u"}, {"runtime": {"workers": 2, "threads": 1}}, {"data": {"name": "x"}}):
        (path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))
        groups.add(Run.read(path).group)
    assert len(groups) == 2
    groups.add(Run.read(folder({0: []}, recipe_text="a method made in Python")).group)
    assert len(groups) == 3


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (999_600, "1 MB"), (5e15, "5e+03 TB")]
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_bits_per_task_count_only_who_took_part() -> None:
    info = {"clients": {"a": {"tasks": {"x": 1, "y": 1}}, "b": {"tasks": {"x": 1}}}}
    rounds = ({"round": 0, "cohort": []}, {"round": 1, "cohort": ["a"]}, {"round": 2, "cohort": ["a", "b"]})
    of = {"client": "a", "role": "encoder", "task": None}
    up, down = [{**of, "bytes": 10}, {**of, "bytes": 5}], [{**of, "bytes": 99}]
    traffic = tuple({"round": r, "up": up, "down": down} for r in (1, 2))
    assert Run(Path(), {}, info, rounds, traffic).bits_per_task() == 8 * 30 / 5
    assert math.isnan(Run(Path(), {}, info, rounds[:1], ()).bits_per_task())


def recorded(kind: str, message: str = "", **fields: Any) -> tuple[str, str, str]:
    """A line with a record that is not what readers expect of its kind."""
    line = {"round": 2, "metrics": [], "records": [{"kind": kind, **fields}]}
    return "metrics.jsonl", json.dumps(line) + "\n", rf"metrics.jsonl, line 1, records.0: .*{message}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "[]", "run.json: expected an object, found list"),
        ("run.json", "{}", "run.json, tasks: field required"),
        (
            "metrics.jsonl",
            '{"round": 2, "cohort": []}\n',
            "metrics.jsonl, line 1, metrics: field required",
        ),
        ("bytes.jsonl", '{"round": 1, "up": []}\n', "bytes.jsonl, line 1, down: field required"),
        (
            "run.json",
            '{"tasks": {"t": {"primary": "loss", "metrics": {}}}, "clients": {}, "status": "running"}',
            "run.json, tasks.t: primary 'loss' found, expected one of the metrics",
        ),
        recorded("withheld", what="scores"),
        recorded("constant prediction", tasks={"t": 3}),
        recorded("clock", start=0.0, end="x"),
        recorded("peer", neighbours=[]),
        recorded("mixing", weights={"a": 3}),
        recorded("task-vectors", "similarity for each two tasks", tasks=["a", "b"], similarity=[[1.0]]),
        recorded("hyper-weights", weights=[]),
        (
            "metrics.jsonl",
            '{"round": 2, "metrics": [], "records": [{"kind": "x", "peer": "b"}]}\n',
            "round 2: a record of peer 'b' found, which run.json does not list",
        ),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text("name: t\nseed: 0\n")
    (tmp_path / "run.json").write_text('{"method": "m", "tasks": {}, "clients": {}, "status": "finished"}')
    Run.read(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(StateError, match=message):
        Run.read(tmp_path)


GROUP = {"part": "encoder", "task": None, "layers": "a", "size": 4, "looked": 4, "cosine": [0.5], "sign": [1.0]}
LOOK = {"rows": [["a", None], ["b", None]], "out": [["*", None]], "shown": [0, 1], "groups": [GROUP]}


@pytest.mark.parametrize(
    "change",
    [
        {"shown": [0, 5]},
        {"rows": [["a"]]},
        {"groups": [{**GROUP, "cosine": []}]},
        {"groups": [{**GROUP, "looked": 0}]},
        {"groups": [{**GROUP, "weights": [[1.0]]}]},
    ],
)
def test_diagnostics_that_no_run_wrote_are_no_traceback(folder, change: dict[str, Any]) -> None:
    path = folder({1: [metric("b", "seg", 0.2)]})
    for about in (LOOK, {**LOOK, **change}):
        (path / "diagnostics.jsonl").write_text(json.dumps({"round": 1, "diagnostics": [about]}) + "\n")
        if about is LOOK:
            assert agreement_of(Run.read(path)) is not None
            continue
        with pytest.raises(StateError, match=r"diagnostics\.jsonl: not what diagnostics are"):
            agreement_of(Run.read(path))


def test_a_run_folder_writes_neither_to_a_terminal_nor_into_a_spreadsheet(folder) -> None:
    """Names and events in a run's files are chosen by whoever sends the folder."""
    evil = "\x1b[2J\x1b]0;title\x07\x9b\u202e\ud800"
    path = folder({1: [metric("b", "seg", 0.2)]}, method=f"{evil}m", status=evil)
    line = {"round": 1, "metrics": [metric("b", "seg", 0.2)], "events": [{"event": evil, evil: evil}]}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for words in (["compare", str(path)], ["watch", str(path), "--once"]):
        told = CliRunner().invoke(app, words)
        assert told.exit_code == 0, told.exception
        assert CONTROL.search(told.stdout.replace("\r", "")) is None
        assert "\N{REPLACEMENT CHARACTER}" in told.stdout
    path = folder({1: [metric("b", "seg", 0.2)]}, method='=HYPERLINK("http://x", "y")')
    told = CliRunner().invoke(app, ["compare", str(path), "--format", "csv"])
    assert "\n\"'=HYPERLINK(" in told.stdout


def test_numbers_too_large_to_add_have_no_mean(folder) -> None:
    """A node may send any finite loss."""
    path = folder({1: [metric("b", "seg", 0.2)]})
    train = [{"client": client, "task": "seg", "loss": 1.7e308} for client in ("a", "b")]
    lines = [{"round": number, "metrics": [metric("b", "seg", 0.2)], "train": train} for number in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert math.isnan(losses(Run.read(path))["seg"][0])
    assert falls(Run.read(path)) == {"seg": 0.0}
