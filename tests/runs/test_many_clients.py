"""Test lines of rounds with many clients: what is the same for all of them stands there once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.engines.api import Result
from fedloom.engines.peers import peer
from fedloom.errors import StateError
from fedloom.federation.rounds.diagnostics import PEERS, sampled
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.recorded import MANY, lines_of, packed, unpacked
from fedloom.study.report.records import quality
from tests_support import assert_same

NAMES = [f"c{i:03}" for i in range(MANY)]


def line(names: list[str], **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as rounds make it."""
    scores = {"accuracy": 0.5, "loss": None}
    about = {"model": "global", "split": "test", "data": "shared test"}
    return {
        "round": 1,
        "cohort": names,
        "train": [{"client": n, "task": "t", "loss": i / 7, "examples": 10, "steps": 2} for i, n in enumerate(names)],
        "metrics": [
            {"client": n, "task": "t", "metric": metric, "value": value, **about}
            for n in names
            for metric, value in scores.items()
        ],
        "events": [],
        **more,
    }


def test_what_is_the_same_for_all_clients_stands_there_once() -> None:
    found = packed(line(NAMES))
    about = {"clients": 0, "task": "t", "model": "global", "split": "test", "data": "shared test"}
    assert found["groups"] == [NAMES]
    assert found["metrics"] == [
        {**about, "metric": "accuracy", "value": 0.5},
        {**about, "metric": "loss", "value": None},
    ]
    losses = [i / 7 for i in range(MANY)]
    assert found["train"] == [{"clients": 0, "task": "t", "loss": losses, "examples": 10, "steps": 2}]
    assert unpacked(json.loads(json.dumps(found))) == line(NAMES)
    assert packed(line(NAMES[1:])) == line(NAMES[1:])


def test_clients_of_which_more_is_known_keep_their_entries() -> None:
    """A value of all clients comes last, as in a round's line; who has two entries of one kind keeps both."""
    whole = line(NAMES)
    whole["metrics"].append({"client": None, "task": "t", "metric": "auc", "value": 0.1, "model": "m", "split": "test"})
    whole["train"] += [{"client": "d", "task": "u", "loss": 1.0}, {"client": "e", "task": "u", "loss": -0.0}]
    assert unpacked(packed(whole)) == whole
    assert repr(unpacked(packed(whole))["train"][-1]["loss"]) == "-0.0"
    twice = {"round": 1, "up": [{"client": n, "role": "head", "bytes": 8} for n in [*NAMES, NAMES[0]]]}
    assert packed(twice) == twice


def test_a_run_folder_reads_what_it_writes(tmp_path: Path) -> None:
    sent = {way: [{"client": n, "role": "head", "task": "t", "bytes": 8} for n in NAMES] for way in ("up", "down")}
    with RunFolder(tmp_path) as folder:
        folder.write_round(line(NAMES), sent)
        folder.add_metrics(1, [{"client": "c000", "task": "t", "metric": "f1", "model": "global", "split": "test",
                                "value": 0.2}])  # fmt: skip
        folder.write_round({**line(NAMES), "round": 2}, sent)
        folder.cut(1)
    metrics, traffic = (lines_of(tmp_path / name) for name in ("metrics.jsonl", "bytes.jsonl"))
    assert [one["round"] for one in metrics] == [1]
    assert metrics[0]["train"] == line(NAMES)["train"]
    assert metrics[0]["metrics"][:-1] == line(NAMES)["metrics"]
    assert metrics[0]["metrics"][-1]["metric"] == "f1"
    assert traffic == ({"round": 1, **sent},)
    assert (tmp_path / "bytes.jsonl").stat().st_size < 1000


@pytest.mark.parametrize(
    "damage",
    [
        {"groups": 3},
        {"groups": [NAMES[1:]]},
        {"groups": []},
        {"groups": [3]},
        {"train": [{"clients": "0", "task": "t", "loss": 1.0}]},
        {"train": [{"clients": 7, "task": "t", "loss": 1.0}]},
        {"train": [3]},
        {"groups": [NAMES * 2000], "train": [{"clients": 0, "task": "t", "loss": 1.0}] * 100},
    ],
)
def test_a_damaged_line_is_one_sentence(damage: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps({**packed(line(NAMES)), **damage})
    (tmp_path / "metrics.jsonl").write_text(f"{text}\n{json.dumps({**line(NAMES), 'round': 2})}\n")
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 1: expected the JSON of a round"):
        lines_of(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("end", ["", '{"round": 2', '{"round": 2, "metrics": []}', "\x00\x00\n"])
def test_what_follows_the_last_whole_line_is_cut(end: str, tmp_path: Path) -> None:
    first = '{"round": 1, "metrics": []}\n'
    (tmp_path / "metrics.jsonl").write_text(first + end)
    with RunFolder(tmp_path) as folder:
        folder.cut(1)
    assert (tmp_path / "metrics.jsonl").read_text() == first


def test_of_many_peers_a_fixed_sample_says_what_it_knows_of_others() -> None:
    names = [f"p{i}" for i in range(1000)]
    assert all(sampled(name, PEERS) for name in names)
    chosen = [name for name in names if sampled(name, len(names))]
    assert PEERS / 2 < len(chosen) < PEERS * 2


def test_other_peers_keep_it_to_themselves(quick: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do stays the same, and their record says that they mixed."""
    changes = ("method=fedavg", "model.heads=own", "peers={}")
    whole = quick(*changes)
    monkeypatch.setattr(peer, "sampled", lambda name, population: name == "all-0" or population < 5)
    few = quick(*changes)
    assert_same(whole, few, models_only=True)
    known = {"neighbours", "weights", "similarity"}
    for before, (round_, now) in zip(whole.run.records("peer"), few.run.records("peer"), strict=True):
        expected = {k: v for k, v in before[1].items() if before[1]["peer"] == "all-0" or k not in known}
        assert (round_, now) == (before[0], expected)
    assert quality(few.run)["neighbours with the same tasks"].keys() == {1, 2}


def test_metrics_come_after_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"round": 1, "metrics": [], "events": []}\n{"round": 2, "met')
    more = {"client": "a", "task": "t", "metric": "f1", "model": "global", "split": "test", "value": 0.5}
    with RunFolder(tmp_path) as folder:
        folder.add_metrics(1, [more])
        folder.add_metrics(2, [more])
    assert [(line["round"], len(line["metrics"])) for line in lines_of(file)] == [(1, 1), (2, 1)]
    file.write_text('{"round": [], "metrics": []}\n[]\n')
    with RunFolder(tmp_path) as folder, pytest.raises(StateError, match="expected the JSON of rounds, one a line"):
        folder.add_metrics(1, [more])
