"""Methods that were written for a server, at peers: on a complete graph they are the same, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.engines.api import trained_models
from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import method_of
from fedloom.federation.runs.checkpoint import load
from fedloom.methods import METHODS
from peers_support import Valleys
from quadratics import Quadratics
from tests_support import POOLED, Quick, load_recipe, named, same

H = [[1.0, 2, 3], [0.5, 1, 1], [2, 0.1, 1], [1, 1, 4]]
B = [[1.0, 2, -3], [0, 5, 1], [-2, 2, 2], [4, -1, 0.5]]
FEW = ("colnet", "fedamp", "fedhca2", "fedsta")
"""Leaders, own starts, a row for each, a part for all and a part for each."""
ALONE = ("local", "simple", "matu", "ntk-fedavg", "fedmerge", "separate", *POOLED)
"""Nothing is shared, tasks have models of their own, or peers refuse them."""
SHORT = ("training.steps=1", "training.rounds=2", "evaluation={every: 2, splits: [val]}", "partition.val_fraction=0.1")


def compare(quick: Quick, *changes: str) -> None:
    changes = (*SHORT, *changes, "method.weights=uniform")
    server = trained_models(quick(*changes).folder)
    peers = trained_models(quick(*changes, "peers={weights: {kind: uniform}}").folder)
    for name, model in peers.items():
        theirs = server.get(name) or server[""]
        for key, tensor in model.items():
            assert torch.equal(tensor, theirs[key]), (name, key)


@pytest.mark.parametrize("name", FEW)
def test_peers_equal_a_server(name: str, quick: Quick) -> None:
    compare(quick, f"method={name}")


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["own", "all"])
@pytest.mark.parametrize("name", sorted(METHODS.entries.keys() - {*ALONE}))
def test_all_others_too(name: str, heads: str, quick: Quick) -> None:
    compare(quick, f"method={{{named(name)}}}", f"model.heads={heads}")


@pytest.mark.parametrize("name", ["fedmtl", "cfl"])
def test_quadratics_at_peers_equal_those_at_a_server(name: str) -> None:
    training: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1}, "steps": [2, 3, 1, 2]}
    method = METHODS[name].function
    server = Quadratics(method(), H, B, **training)
    peers = Valleys({"weights": {"kind": "uniform"}}, H, B, method(), **training)
    for _ in range(4):
        server.go()
        for client, model in peers.go().items():
            assert torch.equal(model, server.server["personal"].get(client, server.point))


@pytest.mark.parametrize("name", ["ifca", "fedsoft"])
def test_clusters_have_the_same_numbers_at_all_peers_if_they_begin_with_noise(name: str, quick: Quick) -> None:
    """DFCA, and soft clusters, on a ring: what sets two models apart is the same everywhere, though means are not."""
    peers = "peers={graph: ring, weights: {kind: uniform}}"
    run = quick(*SHORT, "training.rounds=1", f"method={{name: {name}, first: noise}}", peers)
    models = []
    for peer in run.run.info["clients"]:
        own, _, _ = load(run.folder / "peers" / peer, f"state-{run.run.last_round}", lambda head: head["round"])
        models.append(torch.stack(own["server"]["stage"]["models"]))
    apart = torch.nn.functional.normalize(torch.stack([m[0] - m[1] for m in models]))
    assert float((apart @ apart.t()).min()) > 0.99
    assert any(not torch.equal(models[0], other) for other in models[1:])


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("graph: ring", r"peers\.graph: ring"),
        ("choose: {top: 2}", r"peers\.choose"),
        ("scenario: {loss: 0.5}", r"peers\.scenario"),
        ("warmup: {until: 3, alone: 2}", r"peers\.warmup\.alone"),
        ("mode: asynchronous, scenario: {speed: 1}", r"peers\.mode: asynchronous"),
    ],
)
@pytest.mark.parametrize("name", ["ifca", "fedsoft", "rr-cluster"])
def test_groups_that_each_peer_numbers_for_itself_are_refused(name: str, more: str, found: str) -> None:
    peers = f"peers={{{more}, weights: {{kind: uniform}}}}"
    with pytest.raises(RecipeError, match=f"{found} found, but {name} starts with groups of the clients"):
        method_of(load_recipe(f"method={name}", peers))
    method_of(load_recipe(f"method={{name: {name}, first: noise}}", peers))
    method_of(load_recipe(f"method={name}", "peers={weights: {kind: uniform}}"))


def test_clients_that_are_sometimes_away_number_groups_apart_too() -> None:
    changes = ("method=ifca", "peers={weights: {kind: uniform}}", "training.participation=0.5")
    with pytest.raises(RecipeError, match=r"training\.participation: 0\.5 found, but ifca starts with groups"):
        method_of(load_recipe(*changes))
    method_of(load_recipe("method=ifca", "training.participation=0.5"))


@pytest.mark.parametrize("name", ["matu", "separate"])
def test_vectors_of_tasks_equal_the_servers(name: str, quick: Quick) -> None:
    changes = (*SHORT, f"method={name}", "method.weights=uniform", "model={name: resnet10, width: 4, norm: group}")
    server, _, _ = load(quick(*changes).folder, "state", lambda head: head["round"])
    run = quick(*changes, "peers={weights: {kind: uniform}}")
    for peer in run.run.info["clients"]:
        own, _, _ = load(run.folder / "peers" / peer, f"state-{run.run.last_round}", lambda head: head["round"])
        assert same(own["server"]["tasks"], server["server"]["tasks"])


def test_what_keeps_a_model_for_each_sees_updates_as_a_server_does(quick: Quick) -> None:
    """From the second round on starts differ: they travel only where stages read them."""
    bytes_ = {}
    for name in ("colnet", "fedhca2", "fedper"):
        run = quick(*SHORT, f"method={name}", "peers={weights: {kind: uniform}}").run
        role = [[e["bytes"] for e in line["up"] if e["role"] == "side"] for line in run.traffic]
        bytes_[name] = [sum(each) for each in role]
    assert bytes_["colnet"][1] == bytes_["fedper"][-1] == 0
    assert bytes_["colnet"][-1] > 1000 > bytes_["fedhca2"][-1]


def test_prototypes_alone_are_something_to_tell(quick: Quick) -> None:
    compare(quick, "method={name: fedproto, share: nothing}")


def test_local_has_nothing_to_tell(quick: Quick) -> None:
    with pytest.raises(RecipeError, match="shares nothing"):
        quick(*SHORT, "method=local", "peers={weights: {kind: uniform}}")


@pytest.mark.parametrize("scope", ["encoder", "full"])
def test_after_a_round_all_have_the_mean_of_what_is_in_scope_and_their_own_rest(scope: str, quick: Quick) -> None:
    once = ("training.steps=1", "training.rounds=1", "evaluation={every: 1, splits: [val]}", "model.heads=all")
    alone = trained_models(quick(*once, "partition.val_fraction=0.1", "method=local").folder)
    mixed = trained_models(
        quick(*once, "partition.val_fraction=0.1", f"peers={{scope: {scope}, weights: {{kind: uniform}}}}").folder
    )
    for name, model in mixed.items():
        for key, tensor in model.items():
            shared = scope == "full" or key.startswith("encoder.")
            expected = torch.stack([own[key] for own in alone.values()]).mean(0) if shared else alone[name][key]
            torch.testing.assert_close(tensor, expected, msg=f"{name}, {key}")
