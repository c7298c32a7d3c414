"""Peers in groups that each of them works out (C2): whom they mix with, and what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core.settings.section import strict
from fedloom.engines.api import trained_models
from fedloom.errors import RecipeError
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.build import build
from peers_support import Valleys
from tests_support import Quick, load_recipe

TWO = [[5.0, 1], [-5, 1], [5, 1.5], [-5, 1.2], [5, 0.8], [-5, 0.9]]
ONCE: dict[str, Any] = {"steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}}


def test_peers_mix_within_their_group() -> None:
    section = {"choose": {"groups": {"fine": None}}, "weights": {"kind": "uniform"}}
    peers = Valleys(section, 1.0, TWO, **ONCE)
    models = peers.go()
    b = torch.tensor(TWO, dtype=torch.float64)
    for i, (name, model) in enumerate(models.items()):
        torch.testing.assert_close(model, b[i % 2 :: 2].mean(0))
        assert {int(other[1:]) % 2 for about in peers.recorded("peer") if about["peer"] == name
                for other in about["neighbours"]} == {i % 2}  # fmt: skip


@pytest.mark.parametrize("choose", [{"threshold": 0.0}, {"threshold": 0.0, "top": 4}])
def test_a_threshold_does_not_open_the_group(choose: dict[str, Any]) -> None:
    section = {"choose": {"groups": {"fine": None}, **choose}, "weights": {"kind": "uniform"}}
    peers = Valleys(section, 1.0, TWO, **ONCE)
    peers.go()
    for about in peers.recorded("peer"):
        assert len(about["neighbours"]) == 2
        assert {int(other[1:]) % 2 for other in about["neighbours"]} == {int(about["peer"][1:]) % 2}


@pytest.mark.parametrize("signal", ["gradient", "parameters", "overlap"])
def test_all_peers_work_out_the_same_groups(signal: str) -> None:
    section = {"choose": {"groups": {"fine": None}}, "similarity": {"signals": {signal: 1}, "sketch": {"m": 64}}}
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 400, generator=g)
    b = (centres.repeat(3, 1) + 0.2 * torch.randn(9, 400, generator=g)).tolist()
    peers = Valleys({**section, "weights": {"kind": "uniform"}}, 1.0, b, **ONCE)
    peers.go()
    groups = {about["peer"]: frozenset([about["peer"], *about["neighbours"]]) for about in peers.recorded("peer")}
    assert all(groups[other] == group for group in groups.values() for other in group)
    if signal != "overlap":  # by which all are alike
        assert {frozenset(f"c0{i}" for i in range(k, 9, 3)) for k in range(3)} == set(groups.values())


C2 = (
    "model.heads=own", "partition.clients_per_task=2", "training.steps=3", "training.rounds=2",
    "partition.val_fraction=0.1", "evaluation={every: 2, splits: [val]}",
)  # fmt: skip


def peers(fine: Any, high: int = 3) -> str:
    return (
        "peers={similarity: {signals: {features: 1}}, weights: {kind: uniform}, "
        f"choose: {{groups: {{high: {high}, fine: {fine}}}}}}}"
    )


def test_heads_are_mixed_among_those_with_like_outputs_only(quick: Quick) -> None:
    """At a threshold of 0 nobody is close, and heads stay each peer's own while encoders are those of the group."""
    run = quick(*C2, peers(0.0))
    about = [r for r in run.run.rounds[-1]["records"] if r["kind"] == "peer"]
    assert all(r["close"] == [] for r in about)
    models, compared = trained_models(run.folder), 0
    for r in about:
        for other in r["neighbours"]:
            a, b = models[r["peer"]], models[other]
            tasks = run.run.info["clients"]
            both = tasks[r["peer"]]["tasks"].keys() & tasks[other]["tasks"].keys()
            heads = [f"heads.{task}.weight" for task in both]
            compared += len(heads)
            assert not any(torch.equal(a[key], b[key]) for key in heads)
    assert compared > 0
    whole = [r for r in quick(*C2, peers(1.0)).run.rounds[-1]["records"] if r["kind"] == "peer"]
    assert all(r["close"] == r["neighbours"] for r in whole)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"choose": {"groups": {}}, "similarity": {"signals": {"cross-loss": 1}}}, "between any two peers"),
        ({"choose": {"groups": {}}, "similarity": {"scale": "cosine"}}, "similarity.scale is cosine"),
        (
            {"choose": {"groups": {}}, "similarity": {"signals": {"parameters": 1}, "scale": "cosine"}},
            "similarity.scale is cosine",
        ),
        ({"similarity": {"signals": {"cross-loss": 1}, "cross_loss": "negative"}}, "leave out every neighbour"),
        ({"similarity": {"model": "received"}}, "set gradient: loss"),
    ],
)
def test_what_does_not_go_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        strict(PeersSection, section)


def test_vectors_of_tasks_have_no_outputs_to_group_by() -> None:
    with pytest.raises(RecipeError, match="groups by outputs"):
        build(load_recipe("method=matu", peers(0.4)))
