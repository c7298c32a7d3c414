"""Cluster quality of peers: what the records of a run say about task groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.federation.runs.reader import Run
from fedloom.study.report.records import purity, quality

TASKS = {"a": ["x"], "b": ["x"], "c": ["y"], "d": ["y"]}


def record(peer: str, similarity: dict[str, float], neighbours: list[str]) -> dict[str, Any]:
    return {"kind": "peer", "peer": peer, "neighbours": neighbours, "similarity": similarity}


def run(*rounds: list[dict[str, Any]], tasks: dict[str, list[str]] = TASKS) -> Run:
    lines = tuple({"round": number, "records": records} for number, records in enumerate(rounds, start=1))
    return Run(Path(), {}, {"clients": {name: {"tasks": held} for name, held in tasks.items()}}, lines, ())


def found(high: set[frozenset[str]]) -> list[dict[str, Any]]:
    """All meet; the pairs in `high` are similar and choose each other."""
    records = []
    for peer in TASKS:
        similarity = {o: 0.9 if frozenset((peer, o)) in high else 0.1 for o in TASKS if o != peer}
        records.append(record(peer, similarity, [o for o in similarity if similarity[o] > 0.5]))
    return records


RIGHT = {frozenset("ab"), frozenset("cd")}
WRONG = {frozenset("ac"), frozenset("bd")}


def test_clusters_that_are_the_task_groups_have_index_one() -> None:
    values = quality(run(found(RIGHT), found(RIGHT)))
    assert {name: series[2] for name, series in values.items()} == dict.fromkeys(
        ["neighbours with the same tasks", "neighbours kept", "ARI", "NMI", "purity", "clusters kept"], 1.0
    )


def test_clusters_across_the_task_groups() -> None:
    values = quality(run(found(RIGHT), found(WRONG)))
    last = {name: series[2] for name, series in values.items()}
    assert last["ARI"] == pytest.approx(-0.5)
    assert last["NMI"] == pytest.approx(0, abs=1e-12)
    assert last["purity"] == 0.5
    assert last["neighbours with the same tasks"] == last["neighbours kept"] == 0
    assert last["clusters kept"] == pytest.approx(-0.5)


def test_what_cannot_be_said_is_left_out() -> None:
    assert quality(run()) == {}
    assert quality(run(found(RIGHT), tasks={name: ["x"] for name in TASKS})) == {}
    alone = [record(name, {}, []) for name in TASKS]
    assert quality(run(alone)) == {}
    # each peer with tasks of its own: there is no group to find
    assert quality(run(found(RIGHT), tasks={n: [n] for n in TASKS})) == {"neighbours with the same tasks": {1: 0}}


def test_purity() -> None:
    assert purity([0, 0, 0, 1, 1], [0, 0, 1, 1, 1]) == pytest.approx(0.8)
