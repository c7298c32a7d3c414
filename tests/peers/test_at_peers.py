"""A method of a server, as it runs at peers: what is refused, and what becomes of its stage, weights and rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core.combine import Switch
from fedloom.errors import RecipeError
from fedloom.methods import METHODS
from fedloom.methods.method import EachTask, Method
from fedloom.methods.peers.aggregation import AtPeer, InterCluster, at_peers
from fedloom.methods.peers.config import PeersBase
from fedloom.peers import Safeguards
from fedloom.stages import ConflictAverseMix, Mean

SIZE: dict[str, Any] = {"weights": {"kind": "size"}}
OVERLAP: dict[str, Any] = {"similarity": {"signals": {"overlap": 1}}}
MATU: list[tuple[dict[str, Any], str]] = [
    (SIZE, ""),
    ({"weights": {"kind": "uniform"}}, ""),
    ({**SIZE, "scope": "encoder"}, "a scope other than full"),
    ({**SIZE, "warmup": {"until": 2}}, "a scope other than full"),
    ({**SIZE, "warmup": {"until": 2, "scope": "full"}}, ""),
    ({**SIZE, "penalty": 0.5}, "a penalty"),
    ({"weights": {"kind": "soft"}}, "metropolis or soft weights"),
    ({"weights": {"kind": "metropolis"}}, "metropolis or soft weights"),
    ({**SIZE, **OVERLAP, "choose": {"groups": {}}}, "groups by outputs"),
    ({**SIZE, **OVERLAP, "choose": {"groups": {"fine": None}}}, ""),
    ({"weights": {"kind": "size", "include_self": False}}, "weights without the peer itself"),
    ({**SIZE, "choose": {"top": 1}}, "judging by anything but overlap"),
    ({**SIZE, **OVERLAP, "choose": {"top": 1}}, ""),
]


@pytest.mark.parametrize(("section", "why"), MATU)
def test_vectors_for_each_task_go_with_some_settings_only(section: dict[str, Any], why: str) -> None:
    matu, config = METHODS["matu"].make(), PeersBase(**section)
    assert matu.task_vectors
    if why:
        with pytest.raises(RecipeError, match=f"has one vector per task, which cannot be combined with {why}"):
            at_peers(matu, config)
    else:
        assert at_peers(matu, config).weights == config.weights.kind
    at_peers(Method(), config)  # all of these go with one vector for all tasks


@pytest.mark.parametrize(
    ("method", "section", "why"),
    [
        (METHODS["local"].make(), SIZE, "local shares nothing"),
        (Method(weights="declared"), SIZE, "method.weights: declared found"),
        (Method(turn=EachTask()), SIZE, "sends one update per task to one model"),
        (METHODS["colnet"].make(), {}, "does not read weights, so weights of kind 'soft'"),
        (METHODS["colnet"].make(), {"weights": {"kind": "metropolis"}}, "does not read weights"),
    ],
)
def test_what_needs_a_server_is_refused(method: Method, section: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        at_peers(method, PeersBase(**section))


@pytest.mark.parametrize("kind", ["size", "uniform", "soft", "metropolis"])
def test_weights_of_the_kinds_size_and_uniform_are_those_of_the_method(kind: str) -> None:
    for usual in ("size", "uniform"):
        found = at_peers(Method(weights=usual), PeersBase(weights={"kind": kind}))  # type: ignore[arg-type]
        assert found.weights == (usual if kind in ("soft", "metropolis") else kind)


def test_the_conflict_averse_mix_takes_the_place_of_the_mean_after_the_warmup() -> None:
    averse = {"c": 0.2, "rescale": "none", "add_own": True, "safeguards": {"clip": None}}
    mix = ConflictAverseMix(0.2, "none", True, Safeguards(clip=None))
    assert at_peers(Method(), PeersBase()).stage == AtPeer(Mean())
    assert at_peers(Method(), PeersBase(conflict_averse=averse)).stage == AtPeer(mix)
    later = at_peers(Method(), PeersBase(conflict_averse=averse, warmup={"until": 3})).stage
    assert later == AtPeer(Switch(3, Mean(), mix))
    at_peers(METHODS["colnet"].make(), PeersBase(weights={"kind": "uniform"}))
    assert at_peers(Method(), PeersBase(warmup={"until": 3})).stage == AtPeer(Mean())


@pytest.mark.parametrize("penalty", [0.0, 0.5, 2.0])
def test_a_penalty_is_a_rule_at_the_client_and_a_broadcast_of_the_stage(penalty: float) -> None:
    found = at_peers(Method(), PeersBase(penalty=penalty))
    assert found.local == ((InterCluster(penalty),) if penalty else ())
    assert found.stage == AtPeer(Mean(), also=InterCluster.needs if penalty else frozenset())


def test_the_penalty_pulls_towards_the_other_groups_and_does_nothing_without_a_broadcast() -> None:
    class Seen:
        shared = (slice(0, 2), slice(3, 4))
        params = torch.tensor([1.0, 2.0, 3.0, 4.0])

        def __init__(self) -> None:
            self.grad = torch.ones(4)
            self.broadcast: dict[str, torch.Tensor] = {}

    view: Any = Seen()
    InterCluster(0.5).grad(view, {})
    assert view.grad.tolist() == [1, 1, 1, 1]
    view.broadcast = {"others": torch.tensor([0.0, 4.0, 9.0, 1.0]), "pull": torch.full((4,), 0.5)}
    InterCluster(0.5).grad(view, {})
    assert view.grad.tolist() == [1.5, 0, 1, 2.5]
