"""Peers whose peer messages a server carries give the same as peers in one process, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import fedloom
from fedloom.engines.api import Result
from fedloom.errors import RecipeError
from tests_support import assert_same, load_recipe, stopped_after

pytest.importorskip("flwr")

Quick = Callable[..., Result]
FLOWER = "runtime.engine=flower"
CASES = [
    ("method=fedavg", "peers={}"),
    ("method=matu", "peers={weights: {kind: size}, similarity: {signals: {overlap: 1.0}}}"),
    ("method=fedper", "peers={}", "training.keep_optimizer=true", "training.participation=0.6"),
]


def written(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "bytes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", CASES, ids=lambda c: c[0])
def test_the_same_as_in_one_process(quick: Quick, changes: tuple[str, ...]) -> None:
    here, there = quick(*changes), quick(*changes, FLOWER)
    assert_same(here, there)
    assert written(here.folder) == written(there.folder)


def test_the_packaged_recipe(quick: Quick) -> None:
    changes = ("training.rounds=3", "peers.warmup.until=2")
    here, there = (quick(*changes, *more, recipe="dfmtl-digits") for more in ((), (FLOWER,)))
    assert_same(here, there)
    assert written(here.folder) == written(there.folder)


def test_the_relay_goes_on_as_if_it_had_not_stopped(quick: Quick, tmp_path: Path) -> None:
    changes = ("method=fedavg", "peers={}", "training.rounds=4")
    parts = stopped_after(2, tmp_path / "parts", load_recipe(*changes, FLOWER))
    assert_same(quick(*changes), fedloom.resume(parts))


def test_the_server_has_nothing_of_the_peers(quick: Quick) -> None:
    run = quick("method=fedavg", "peers={}", FLOWER)
    assert all(path.stat().st_size < 100 for path in run.folder.glob("**/peers/*/state.safetensors"))
    assert (run.folder / "state.safetensors").stat().st_size < 100


def test_simulated_time_is_refused(quick: Quick) -> None:
    with pytest.raises(RecipeError, match="peers.deadline"):
        quick("method=fedavg", "peers={deadline: 3}", FLOWER)
