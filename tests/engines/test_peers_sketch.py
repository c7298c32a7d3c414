"""Sketches instead of whole updates: the neighbours of real peers stay, and what a peer hears does not grow with d."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.pool import executor
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.round import Progress, Round
from fedloom.methods.peers.config import SketchSection
from peers_support import Valleys


def neighbours(sketch: str) -> dict[str, set[str]]:
    """The choices of 30 peers on handwritten digits after one local epoch."""
    built = build(
        load(
            "dfmtl-digits",
            (
                "partition.clients=30",
                "training.epochs=1",
                f"peers.similarity={{signals: {{gradient: 1}}, sketch: {sketch}}}",
                "peers.choose.top=3",
            ),
        )
    )
    now = Round(built, 1, Progress())
    workers = executor(built.setup, ("cpu",), 1)
    without_server(built)(built, workers, initial_peers(built), now)
    workers.close()
    return {about["peer"]: set(about["neighbours"]) for about in now.records if about["kind"] == "peer"}


def test_sketches_keep_nine_of_ten_choices_of_real_peers() -> None:
    exact, found = neighbours("null"), neighbours("{}")
    assert [len(chosen) for chosen in exact.values()] == [3] * 30
    kept = sum(len(found[peer] & chosen) for peer, chosen in exact.items())
    assert kept >= 0.9 * 90


@pytest.mark.parametrize("d", [3_000, 24_000])
def test_what_a_peer_hears_does_not_grow_with_the_model(d: int) -> None:
    heard = signals(d, {})
    assert heard == 3 * 2 * SketchSection().m
    assert heard < signals(d, None)


def test_what_is_no_longer_than_a_sketch_is_sent_whole() -> None:
    assert signals(100, {}) == signals(100, None)


def signals(d: int, sketch: Any) -> int:
    """Bytes of signals that one of four peers hears in a round."""
    b = torch.randn(4, d, generator=torch.Generator().manual_seed(0)).tolist()
    peers = Valleys({"choose": {"top": 1}, "similarity": {"sketch": sketch}}, 1.0, b, steps=1)
    peers.go()
    return peers.ledgers[0].down["c00"]["signal", None]
