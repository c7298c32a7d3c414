"""The Flower engine gives the same as the process engine, bit for bit, also among peers and after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.engines.api import Result
from fedloom.errors import RecipeError
from fedloom.methods import METHODS
from tests_support import POOLED, assert_same, load_recipe, named, stopped_after

pytest.importorskip("flwr")

Quick = Callable[..., Result]
FLOWER = "runtime.engine=flower"
HARD = (
    "training.rounds=3",
    "training.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",
    "training.keep_optimizer=true",
    "training.participation=0.6",
    "model.heads=own",
    "evaluation={every: 3, splits: [test]}",
)
# What differs in how it travels and in what stays with a client; all methods are below.
CASES = [
    "method={name: scaffold, add: {pcgrad: }}",
    "method={name: fedper, add: {heal: }}",
    "method={name: fedga, buffers: local}",
    "method={name: fedprox, add: {feddea: {rho: 0.5, keep: random}}, codec: sparse}",
    "method={name: fedproto}",
    "method={name: matu, heads: local}",
    "method={name: fedper, add: {by-task: }}",
    "method={name: fedrep}",
    "attack={name: replay, clients: 2}",
]
PEERS = [
    ("method=fedavg", "peers={}"),
    ("method=matu", "peers={weights: {kind: size}, similarity: {signals: {overlap: 1.0}}}"),
    ("method=fedper", "peers={}", "training.keep_optimizer=true", "training.participation=0.6"),
]
"""The server carries their messages."""


def written(folder: Path, name: str = "bytes.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def check(quick: Quick, *changes: str, **options: Any) -> None:
    changes = ("data.size=8", *changes)
    here, there = quick(*changes, **options), quick(*changes, FLOWER, **options)
    assert_same(here, there)
    assert written(here.folder) == written(there.folder)


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_in_one_process(quick: Quick, case: str) -> None:
    check(quick, case, *HARD)


@pytest.mark.parametrize("changes", PEERS, ids=lambda c: c[0])
def test_peers_are_the_same_as_in_one_process(quick: Quick, changes: tuple[str, ...]) -> None:
    check(quick, *changes)


def test_the_packaged_recipe_of_peers(quick: Quick) -> None:
    few = ("partition.clients=5", "peers.choose.top=2")
    check(quick, *few, "training.rounds=3", "peers.warmup.until=2", recipe="dfmtl-digits")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.entries.keys() - {*POOLED}))
def test_every_method_is_the_same(quick: Quick, name: str) -> None:
    check(quick, f"method={{{named(name)}}}", *HARD)


def test_batch_norm_and_trained_models(quick: Quick) -> None:
    check(
        quick,
        "model={name: resnet10, width: 4}",
        "method.buffers=pooled",
        "evaluation.models=[global, personal, trained]",
    )


def test_batch_norm_of_each_task(quick: Quick) -> None:
    check(quick, "model={name: resnet10, width: 4}", "method=separate")


def test_the_best_state_is_still_at_the_nodes(quick: Quick) -> None:
    """Training gets worse at once, so the best round is several rounds back when the run stops."""
    check(
        quick,
        "method=fedper",
        "training.rounds=8",
        "training.optimizer.lr=3.0",
        "early_stopping={patience: 3}",
        "training.keep_optimizer=true",
    )


@pytest.mark.parametrize("every", [1, 2])
def test_a_server_that_stops_goes_on_as_if_it_had_not(quick: Quick, tmp_path: Path, every: int) -> None:
    changes = ("method=fedper", *HARD, "training.rounds=4", f"runtime.checkpoint_every={every}")
    whole = quick(*changes)
    parts = stopped_after(3, tmp_path / "parts", load_recipe(*changes, FLOWER))
    assert_same(whole, fedloom.resume(parts))


def test_the_server_has_no_client_state_and_nodes_forget_old_ones(quick: Quick) -> None:
    run = quick("method=fedper", "training.keep_optimizer=true", "training.rounds=5", FLOWER)
    from fedloom.federation.runs import checkpoint

    saved, _, _ = checkpoint.load(run.folder, "state", newest=lambda head: head["round"])
    assert saved["clients"]
    for client, kept in saved["clients"].items():
        assert set(kept) == {"node", "tasks"}
        (home,) = (run.folder / "nodes" / client / "runs").iterdir()
        assert sorted(path.name for path in home.glob("round-*.json")) == [f"round-{r}.json" for r in (3, 4, 5)]


def test_the_relay_goes_on_as_if_it_had_not_stopped(quick: Quick, tmp_path: Path) -> None:
    changes = ("method=fedavg", "peers={}", "training.rounds=3")
    parts = stopped_after(2, tmp_path / "parts", load_recipe(*changes, FLOWER))
    assert_same(quick(*changes), fedloom.resume(parts))


def test_the_server_has_nothing_of_the_peers(quick: Quick) -> None:
    run = quick("method=fedavg", "peers={}", FLOWER)
    assert all(path.stat().st_size < 100 for path in run.folder.glob("**/peers/*/state.safetensors"))
    assert (run.folder / "state.safetensors").stat().st_size < 100


def test_simulated_time_is_refused(quick: Quick) -> None:
    with pytest.raises(RecipeError, match="peers.deadline"):
        quick("method=fedavg", "peers={deadline: 3}", FLOWER)
