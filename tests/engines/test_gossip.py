"""Peers that do not wait for each other: by hand, replayed, resumed, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.engines.api import Result
from fedloom.federation.runs import checkpoint
from fedloom.methods import METHODS, staleness
from peers_support import Valleys
from tests_support import assert_same, load_recipe, same, stopped_after

B = [[1.0, 2, -3], [0, 5, 1], [-2, 2, 2], [4, -1, 0.5]]
H = [[1.0, 2, 3], [0.5, 1, 1], [2, 0.1, 1], [1, 1, 4]]
JUMP: dict[str, Any] = {"steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}}


def free(scenario: dict[str, Any], **section: Any) -> dict[str, Any]:
    return {"mode": "asynchronous", "scenario": {"speed": 1, **scenario}, **section}


def assert_equal(a: Valleys, b: Valleys) -> None:
    assert same(a.states, b.states)
    assert same(a.pending, b.pending)


def test_two_peers_by_hand() -> None:
    """One step leads to b_k itself. c01 is four times as fast; a message takes 1/8 s, so a model three of them."""
    scenario = {"latency": 0.125, "speeds": {"c00": 0.25, "c01": 1.0}}
    peers = Valleys(free(scenario, weights={"kind": "uniform"}, deadline=8.0), 1.0, [[0.0], [8.0]], **JUMP)
    models = peers.go()
    mixes = [(a["time"], a["peer"], a["neighbours"], a["staleness"], a["age"]) for a in peers.recorded("peer")]
    # c00 ends at 4 and 8. At 4 it has heard of c01's versions and asks: c01's of 4 is there at 4.25, and c00 trains on.
    # c01 hears of c00 at 4.125, asks at 5, has its model of 4 at 5.25, and mixes it at 6.
    assert [m[:2] for m in mixes] == [
        *[(float(t), "c01") for t in (1, 2, 3)],
        (4.0, "c00"), (4.0, "c01"), (5.0, "c01"), (6.0, "c01"), (7.0, "c01"), (8.0, "c00"), (8.0, "c01"),
    ]  # fmt: skip
    by_time = {(m[0], m[1]): m[2:] for m in mixes}
    assert by_time[6.0, "c01"] == (["c00"], {"c00": 2}, {"c00": 2.0})
    assert by_time[8.0, "c00"] == (["c01"], {"c01": 1}, {"c01": 4.0})
    assert all(not m[2] for m in mixes if (m[0], m[1]) not in {(6.0, "c01"), (8.0, "c00")})
    # every mix is (b_0 + b_1) / 2, and c01 jumps back to its own b in the next local round
    assert float(models["c00"]) == 4.0
    assert float(models["c01"]) == 8.0
    assert peers.recorded("clock") == [{"start": 0.0, "end": 8.0, "local rounds": {"c00": 2, "c01": 8}}]
    (histogram,) = peers.recorded("staleness")
    assert histogram == {"models": 2, "local rounds": {"1": 1, "2": 1}, "seconds": {"mean": 3.0, "largest": 4.0}}


def test_a_round_is_as_many_local_rounds_as_there_are_peers() -> None:
    peers = Valleys(free({"speeds": {"c03": 0.1}}), H, B, steps=2)
    peers.go(3)
    assert [sum(r["local rounds"].values()) for r in peers.recorded("clock")] == [4, 4, 4]
    assert [r["end"] for r in peers.recorded("clock")] == [4.0, 6.0, 8.0]


def test_it_comes_to_agree_as_synchronous_peers_do() -> None:
    training = {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.02}}
    scenario = {"latency": 0.1, "speeds": {"c00": 0.5, "c02": 3.0}, "loss": 0.2}

    def ends(section: dict[str, Any]) -> tuple[float, torch.Tensor]:
        models = torch.stack(list(Valleys(section, 1.0, B, **training).go(60).values()))
        return float((models - models.mean(0)).norm()), models.mean(0)

    together = {"graph": "ring", "weights": {"kind": "uniform"}}
    alone, _ = ends({**together, "graph": {"name": "erdos-renyi", "p": 0}})
    for section in (together, free(scenario, **together)):
        apart, mean = ends(section)
        assert apart < alone / 10
        assert float((mean - torch.tensor(B).mean(0)).norm()) < 1.5


SECTION = {
    "choose": {"top": 2},
    "similarity": {"signals": {"gradient": 1, "overlap": 1}, "every": 2},
    "conflict_averse": {},
    "penalty": 0.1,
    "graph": {"name": "random-k", "k": 2, "every": 2},
}
HARD = {
    "seed": 3, "latency": 0.3, "bandwidth": 1000, "loss": 0.2, "dropout": 0.1, "speeds": {"c03": 0.3},
    "stragglers": {"share": 0.3, "every_round": True}, "churn": {"c01": {"joins": 2, "away": [[4, 6]]}},
}  # fmt: skip


def test_runs_replay_from_the_seed_and_resume_bit_for_bit(tmp_path: Path) -> None:
    def fresh(seed: int = 3) -> Valleys:
        section = free({**HARD, "seed": seed}, **SECTION)
        return Valleys(section, H, B, METHODS["scaffold"].function(), steps=[2, 3, 1, 2])

    whole, again, other = fresh(), fresh(), fresh(4)
    for peers in (whole, again, other):
        peers.go(8)
    assert_equal(whole, again)
    assert whole.records == again.records
    assert not same(whole.states, other.states)
    parts = fresh()
    for _ in range(4):
        parts.go(2)
        tree = {"states": parts.states, "pending": parts.pending, "round": parts.round}
        checkpoint.save(tmp_path, "state", tree, round=parts.round)
        parts = fresh()  # what is being trained is known to nobody any more
        tree, _, _ = checkpoint.load(tmp_path, "state", lambda head: head["round"])
        parts.states, parts.pending, parts.round = tree["states"], tree["pending"], tree["round"]
    assert_equal(whole, parts)
    assert all(torch.isfinite(model).all() for model in whole.models.values())
    assert len(whole.recorded("conflict-averse")) > 4


def test_an_absent_peer_hears_nothing_and_does_nothing() -> None:
    peers = Valleys(free({"latency": 0.1, "churn": {"c01": {"away": [[2, 4]]}}}), H, B)
    before = peers.go(1)["c01"]
    assert torch.equal(peers.go(2)["c01"], before)
    assert all("c01" not in about["local rounds"] for about in peers.recorded("clock")[1:])
    peers.go(3)
    assert not torch.equal(peers.models["c01"], before)


def test_a_round_without_anybody_takes_no_time() -> None:
    peers = Valleys(free({"churn": {f"c0{i}": {"joins": 2} for i in range(4)}}), H, B)
    peers.go(1)
    assert peers.clock == 0.0
    peers.go(1)
    assert peers.clock > 0.0
    timed = Valleys(free({"churn": {f"c0{i}": {"joins": 2} for i in range(4)}}, deadline=5.0), H, B)
    timed.go(1)
    assert timed.clock == 5.0


def test_a_slow_peer_is_alone_as_long_as_a_fast_one() -> None:
    """Others send while it is still alone: it asks nobody, and knows later how similar those are that it heard once."""
    warmup, similarity = {"alone": 4, "until": 4}, {"every": 100}
    section = free({"latency": 0.1, "speeds": {"c00": 0.2}}, warmup=warmup, similarity=similarity)
    peers = Valleys(section, H, B)
    peers.go(21)
    mixes = [(a["local round"], bool(a["neighbours"])) for a in peers.recorded("peer") if a["peer"] == "c00"]
    assert mixes == [(1, False), (2, False), (3, False), (4, False), (5, True)]


def test_a_version_is_mixed_once() -> None:
    """Messages that take long: many requests are on their way when the first answer comes."""
    peers = Valleys(free({"latency": 2.5, "speeds": {"c00": 0.2}}), H, B, steps=1)
    peers.go(20)
    used = [(a["peer"], name, a["time"] - age) for a in peers.recorded("peer") for name, age in a["age"].items()]
    versions = [(peer, name, round(made, 6)) for peer, name, made in used]
    assert len(versions) == len(set(versions)) > 20


def test_stale_models_count_less() -> None:
    scenario = {"latency": 0.125, "speeds": {"c00": 0.25, "c01": 1.0}}
    section = free(scenario, weights={"kind": "uniform"}, deadline=8.0)
    peers = Valleys(section, 1.0, [[0.0], [8.0]], staleness(METHODS["fedavg"].function(), a=1.0), **JUMP)
    # c01's model is one local round old when c00 mixes it, as in the test by hand: weights 1 and 1/2
    assert float(peers.go()["c00"]) == pytest.approx(8 / 3)


@pytest.mark.parametrize("name", ["matu", "fedamp", "fedmtl", "colnet", "fednova", "feddyn"])
def test_methods_of_all_sorts_run(name: str) -> None:
    section = free({"latency": 0.1, "speeds": {"c00": 0.4}}, weights={"kind": "uniform"})
    peers = Valleys(section, H, B, METHODS[name].function())
    models = peers.go(6)
    assert all(torch.isfinite(model).all() for model in models.values())
    assert any(about["neighbours"] for about in peers.recorded("peer"))


SHORT = ("training.steps=1", "training.rounds=4", "evaluation={every: 4, splits: [val]}", "model.heads=own")
FREE = (
    "peers={mode: asynchronous, choose: {top: 2}, similarity: {signals: {gradient: 1, cross-loss: 1, features: 1}}, "
    "scenario: {speed: 5, speeds: {digit-0: 1}, latency: 0.05, loss: 0.1}}"
)


def test_a_whole_run_resumes(quick: Callable[..., Result], tmp_path: Path) -> None:
    whole = quick(*SHORT, FREE)
    resumed = fedloom.resume(stopped_after(2, tmp_path / "parts", load_recipe(*SHORT, FREE)))
    assert_same(whole, resumed)
    times = [r["end"] for line in whole.run.rounds for r in line.get("records", ()) if r["kind"] == "clock"]
    assert len(times) == 4
    assert times == sorted(times)
