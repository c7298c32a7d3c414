"""Clients in clusters, personal parts, attention on history: what they must do where the right answer is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

import fedloom
from fedloom import Ctx, Method, methods
from fedloom.core.context import derive_seed
from fedloom.core.layout import Block, Layout
from fedloom.core.mean import mixed_models
from fedloom.core.untrusted import Number
from fedloom.core.updates import Updates
from fedloom.engines.api import Result
from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.evaluation import evaluate, example_losses
from fedloom.federation.rounds.server import dispatch
from fedloom.methods.clusters.aggregation import agglomerate, agreement, bipartition, cosines
from fedloom.methods.clusters.centres import _used, rebalanced
from fedloom.stages import (
    ChosenClusters,
    Every,
    HistoryAttention,
    Identity,
    Mean,
    MergedModels,
    PartlyShared,
    PCGrad,
    PerTask,
    SimilarGroups,
    SingleTaskModels,
    SoftClusters,
    SplittingClusters,
    TaskLeaders,
)
from fedloom.training import BestCluster, FlatModel, SoftAnchors
from quadratics import Quadratics
from tests_support import assert_same, client_step, load_recipe, stopped_after

Quick = Callable[..., Result]

# Two groups of clients with opposite optima; within a group they differ a little.
LEFT, RIGHT = ["c00", "c02", "c04"], ["c01", "c03", "c05"]
OPTIMA = [[1.0, 2.0], [-1.1, -2.0], [1.1, 2.1], [-1.0, -1.9], [0.9, 1.9], [-0.9, -2.1]]
MEANS = {"left": torch.tensor([1.0, 2.0]).double(), "right": torch.tensor([-1.0, -2.0]).double()}
OPPOSITE: dict[str, Any] = {"h": [[1.0, 1.0]] * 6, "b": OPTIMA, "steps": 3, "optimizer": {"lr": 0.2}}


def personal(run: Quadratics, name: str) -> Tensor:
    model: Tensor = run.server["personal"].get(name, run.server["model"])
    return model


def draw(rounds: int, each: int, seed: int = 0) -> list[list[str]]:
    rng = random.Random(seed)
    return [[f"c{k:02d}" for k in rng.sample(range(6), each)] for _ in range(rounds)]


def assert_separated(run: Quadratics, atol: float = 1e-6) -> None:
    for group, mean in ((LEFT, MEANS["left"]), (RIGHT, MEANS["right"])):
        for name in group:
            torch.testing.assert_close(personal(run, name), mean, atol=atol, rtol=0)


GROUPED = {
    "matfl": methods.matfl(),
    "matfl soft": methods.matfl(soft=True),
    "cfl": methods.cfl(start=5),
    "cfl absolute": methods.cfl(eps1=0.4, eps2=0.6, start=5, relative=False),
    "ifca": methods.ifca(),
}


def test_thresholds_of_cfl_are_the_releases_where_they_are_absolute() -> None:
    for relative, eps in ((True, (0.2, 0.4)), (False, (0.4, 1.6))):
        assert (methods.cfl(relative=relative).stage.eps1, methods.cfl(relative=relative).stage.eps2) == eps
        assert methods.cfl(eps1=3.0, relative=relative).stage.eps2 == eps[1]


FROM_NOISE = methods.ifca(first="noise")


@pytest.mark.parametrize("method", GROUPED.values(), ids=GROUPED.keys())
def test_two_groups_are_separated_and_each_finds_its_own_mean(method: Method) -> None:
    run = Quadratics(method, **OPPOSITE)
    run.go(60)
    # similarity within a group is not quite the same for all pairs
    assert_separated(run, 1e-4 if method == GROUPED["matfl soft"] else 1e-6)


def test_clusters_that_begin_with_noise_find_the_groups() -> None:
    """Noise is measured by the mean update, so the groups must not cancel in it."""
    shift = torch.tensor([0.5, 0.5], dtype=torch.float64)
    optima = (torch.tensor(OPTIMA, dtype=torch.float64) + shift).tolist()
    run = Quadratics(FROM_NOISE, **{**OPPOSITE, "b": optima})
    run.go(60)
    for group, mean in ((LEFT, MEANS["left"]), (RIGHT, MEANS["right"])):
        for name in group:
            torch.testing.assert_close(personal(run, name), mean + shift, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["ifca", "cfl"])
def test_two_groups_under_partial_participation(name: str) -> None:
    """CFL splits only where all are there; afterwards absent members follow their cluster, bit for bit."""
    method = {"ifca": methods.ifca(), "cfl": methods.cfl(start=5)}[name]
    run = Quadratics(method, **OPPOSITE)
    run.go(12)
    for here in draw(40, 3):
        run.go(1, [here])
        for group in (LEFT, RIGHT):
            models = [personal(run, name) for name in group]
            assert all(torch.allclose(models[0], m, atol=1e-12, rtol=0) for m in models)
    for group, mean in ((LEFT, MEANS["left"]), (RIGHT, MEANS["right"])):
        torch.testing.assert_close(personal(run, group[0]), mean, atol=0.15, rtol=0)


@pytest.mark.parametrize("method", [methods.matfl(), methods.matfl(soft=True), methods.fedsoft()], ids=lambda m: m.name)
def test_absent_clients_keep_their_models(method: Method) -> None:
    run = Quadratics(method, **OPPOSITE)
    run.go(2)
    for here in draw(6, 4):
        before = dict(run.server["personal"]), dict(run.clients)
        run.go(1, [here])
        for client in set(run.names) - set(here):
            assert torch.equal(before[0][client], run.server["personal"][client])
            assert before[1][client] is run.clients[client]


# MaT-FL


def test_updates_tell_groups_apart_while_they_move() -> None:
    """At rest only what differs within a group is left of updates; models still lie apart."""
    run = Quadratics(methods.matfl(source="update"), **OPPOSITE)
    run.go(4)
    for group, mean in ((LEFT, MEANS["left"]), (RIGHT, MEANS["right"])):
        for name in group:
            torch.testing.assert_close(personal(run, name), personal(run, group[0]), atol=1e-12, rtol=0)
            assert torch.equal(personal(run, name).sign(), mean.sign())


@pytest.mark.parametrize("method", [methods.matfl(groups=6), methods.fedsoft(lam=0.0)], ids=["groups", "no term"])
def test_as_many_groups_as_clients_and_no_term_are_local_training(method: Method) -> None:
    """Bit for bit."""
    alone, local = (Quadratics(m, **OPPOSITE) for m in (method, Method(name="identity", stage=Identity())))
    alone.go(5)
    local.go(5)
    for name in alone.names:
        assert torch.equal(personal(alone, name), personal(local, name))


def test_one_group_is_fedavg_on_the_encoder() -> None:
    """But for rounding: models are mixed, not updates."""
    one, mean = (Quadratics(m, **OPPOSITE) for m in (methods.matfl(groups=1), methods.fedavg()))
    one.go(5)
    mean.go(5)
    for name in one.names:
        torch.testing.assert_close(personal(one, name), mean.point, atol=1e-14, rtol=0)


def test_soft_groups_by_hand() -> None:
    """Cosines 0.6, 0 and -0.48: relu(cos + threshold), times the weights 1, 2 and 4."""
    X = torch.tensor([[1.0, 0, 0], [3, 4, 0], [0, -3, 4]], dtype=torch.float64)
    cosine = torch.tensor([[1, 0.6, 0], [0.6, 1, -0.48], [0, -0.48, 1]], dtype=torch.float64)
    M = (cosine + 0.5) * torch.tensor([1.0, 2, 4])
    out, _ = SimilarGroups(soft=True, threshold=0.5, source="update").on(X, n=[1, 2, 4])
    torch.testing.assert_close(out, M / M.sum(1, keepdim=True) @ X)
    M = cosine.clamp(min=0) * torch.tensor([1.0, 2, 4])
    out, _ = SimilarGroups(soft=True, source="update").on(X, n=[1, 2, 4])
    torch.testing.assert_close(out, M / M.sum(1, keepdim=True) @ X)
    for size in (1.0, 1e-3):
        found = SimilarGroups(soft=True, source="update").matrix(Updates.of(X, n=[size, 2 * size, 4 * size]), Ctx(1, 0))
        torch.testing.assert_close(found, M / M.sum(1, keepdim=True))


def test_the_identity_gives_the_update_back_bit_for_bit() -> None:
    rng = torch.Generator().manual_seed(0)
    X, base = torch.randn(2, 4, 1000, generator=rng)
    updates = Updates.of(X, base=100 * base)
    assert torch.equal(mixed_models(updates, torch.eye(4)), X)
    out, _ = SimilarGroups(4).on(X, base=base)
    assert torch.equal(out, X)


def test_two_clients_with_the_same_task_get_one_model() -> None:
    X, base = torch.tensor([[[1.0, 0], [3, 2]], [[0, 1], [4, 1]]])
    out, _ = TaskLeaders().on(X, base=base, tasks=["a", "a"])
    torch.testing.assert_close(base + out, (base + X).mean(0).expand(2, -1))


def test_mixed_models_are_mixes_of_models() -> None:
    rng = torch.Generator().manual_seed(1)
    X, base = torch.randn(2, 4, 9, generator=rng, dtype=torch.float64)
    M = torch.rand(4, 4, generator=rng, dtype=torch.float64)
    M = M / M.sum(1, keepdim=True)
    torch.testing.assert_close(base + mixed_models(Updates.of(X, base=base), M), M @ (base + X))


def test_a_block_that_some_rows_lack_is_mixed_among_the_others() -> None:
    layout = Layout((Block("a", (1,)), Block("b", (1,))))
    updates = Updates.of([[1.0, 2], [3, 4], [5, 9]], None, layout, present=[[True, True], [True, False], [True, True]])
    out = mixed_models(updates, torch.full((3, 3), 1 / 3))
    torch.testing.assert_close(out, torch.tensor([[3.0, 5.5], [3.0, 4.0], [3.0, 5.5]]))


def test_two_centred_rows_are_opposite_and_the_golden_cosines() -> None:
    D = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)
    two = D[:2] - D[:2].mean(0)
    torch.testing.assert_close(cosines(two @ two.T), torch.tensor([[1.0, -1], [-1, 1]]).double())
    three = D - D.mean(0)
    C = cosines(three @ three.T)
    expected = torch.tensor([-0.605530, -0.355580, -0.528498]).double()
    torch.testing.assert_close(C[[0, 0, 1], [1, 2, 2]], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["average", "complete", "single"])
def test_agglomeration_is_scipys(kind: Any) -> None:
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        D = torch.rand(9, 9, generator=rng, dtype=torch.float64)
        D = (D + D.T).fill_diagonal_(0)
        for groups in (1, 2, 4, 9):
            parts = agglomerate(D, groups, kind)
            labels = fcluster(linkage(squareform(D.numpy()), kind), groups, "maxclust")
            theirs = sorted([i for i in range(9) if labels[i] == label] for label in set(labels))
            assert parts == theirs


def test_ties_go_to_the_first() -> None:
    assert agglomerate(torch.zeros(4, 4), 2, "average") == [[0, 1, 2], [3]]
    assert agglomerate(torch.zeros(0, 0), 2, "average") == []


# CFL


def test_positions_become_client_ids() -> None:
    C = torch.tensor([[1.0, -0.9, 0.8], [-0.9, 1, -0.7], [0.8, -0.7, 1]])
    assert bipartition(["3", "5", "7"], C) == (["3", "7"], ["5"])


def largest_across(C: Tensor, one: set[int]) -> float:
    """The largest cosine between two members of different parts."""
    return max(float(C[i, j]) for i in one for j in range(len(C)) if j not in one)


@pytest.mark.parametrize("count", [4, 5, 6])
def test_no_bipartition_has_a_smaller_largest_similarity_across(count: int) -> None:
    """Against all bipartitions of random cosines; complete linkage, the release's, often misses the best one."""
    members, missed = [str(i) for i in range(count)], 0
    for seed in range(100):
        rng = torch.Generator().manual_seed(seed)
        X = torch.randn(count, 3, generator=rng, dtype=torch.float64)
        C = cosines(X @ X.T)
        subsets = ({0, *rest} for k in range(count - 1) for rest in combinations(range(1, count), k))
        best = min(largest_across(C, one) for one in subsets)
        for kind in ("single", "complete"):
            one, two = bipartition(members, C, kind)  # type: ignore[arg-type]
            assert sorted(one + two) == members
            found = largest_across(C, {int(i) for i in one})
            if kind == "single":
                assert found == best
            missed += found > best
    assert missed > 10


def test_the_linkage_of_a_split_is_the_methods() -> None:
    """Gaps of 26, 36 and 37 degrees: single linkage cuts at the widest, complete linkage in the middle."""
    angles = torch.tensor([0.0, 26.0, 62.0, 99.0], dtype=torch.float64).deg2rad()
    X = torch.stack([angles.cos(), angles.sin()], 1)
    parts = {}
    for kind in ("single", "complete"):
        stage = methods.cfl(eps1=9, eps2=0, start=0, linkage=kind).stage  # type: ignore[arg-type]
        assert f"by {kind} linkage" in str(stage.boxes)
        _, state = stage(Updates.of(X), stage.init(Layout((Block("x", (2,)),))), Ctx(1, population=4))
        parts[kind] = list(state["clusters"].values())
    assert parts == {"single": [["c0", "c1", "c2"], ["c3"]], "complete": [["c0", "c1"], ["c2", "c3"]]}


def test_a_later_split_moves_the_right_clients() -> None:
    """A cluster {3, 5, 7}: the union of its parts is {3, 5, 7}, and nobody else moves."""
    stage = SplittingClusters(eps1=0.6, eps2=0.1, start=0, relative=False)
    e = torch.eye(4)
    stay = [e[0], e[0] + 0.1 * e[3]]
    X = torch.stack([stay[0], e[1], stay[1], -e[1] + 0.1 * e[2], e[1] * 1.1])
    rows = ["1", "3", "4", "5", "7"]
    state = {"clusters": {"00": ["1", "4"], "01": ["3", "5", "7"]}, "reference": 1.0, "stages": {"00": {}, "01": {}}}
    out, new = stage(Updates.of(X, rows=rows), state, Ctx(1, population=5))
    assert new["clusters"] == {"00": ["1", "4"], "010": ["3", "7"], "011": ["5"]}
    assert sorted(new["clusters"]["010"] + new["clusters"]["011"]) == ["3", "5", "7"]
    torch.testing.assert_close(out.X[rows.index("3")], 1.05 * e[1])
    torch.testing.assert_close(out.X[rows.index("5")], X[3])
    torch.testing.assert_close(out.X[rows.index("4")], (X[0] + X[2]) / 2)


def test_only_a_cluster_that_is_all_there_is_split() -> None:
    stage = SplittingClusters(0.5, 0.1, start=0)
    X = torch.tensor([[1.0], [1.0], [-1.0]])
    for population, count in ((4, 1), (3, 2)):
        _, state = stage(Updates.of(X), stage.init(Layout((Block("x", (1,)),))), Ctx(1, population=population))
        assert len(state["clusters"]) == count


def test_absent_members_get_their_clusters_update() -> None:
    stage = SplittingClusters(start=0, relative=False)
    state = {"clusters": {"00": ["a", "b"], "01": ["c", "d"]}, "reference": 1.0, "stages": {"00": {}, "01": {}}}
    out, _ = stage(Updates.of([[2.0]], rows=["a"]), state, Ctx(1, population=4))
    assert out.rows == (("a", None), ("b", None))
    assert out.X.tolist() == [[2.0], [2.0]]


def test_cfl_is_fedavg_until_it_splits() -> None:
    one, two = (Quadratics(m, **OPPOSITE) for m in (methods.cfl(start=20), methods.fedavg()))
    assert torch.equal(one.go(20), two.go(20))
    one.go(1)
    assert set(one.server["stage"]["clusters"]) == {"00", "01"}


# FedMerge


@pytest.mark.parametrize("step", [0.0, 0.3])
def test_fedmerge_by_hand(step: float) -> None:
    """Weights of mixes by autograd through softmax and mix, models by their means, absent clients with the models."""
    rng = np.random.default_rng(5)
    models = torch.from_numpy(rng.normal(size=(3, 4)))
    known = {"c0": [0.5, 0.0, -0.5], "c1": [0.0, 1.0, 0.0], "c3": [0.2, 0.1, 0.0]}
    X, n = torch.from_numpy(rng.normal(size=(3, 4))), torch.tensor([1.0, 2, 5], dtype=torch.float64)
    v = torch.tensor([known["c0"], known["c1"], [0.0, 0, 0]], dtype=torch.float64, requires_grad=True)
    mixes = v.softmax(1) @ models
    (n / 8 * (mixes * -X).sum(1)).sum().backward()
    new_v = (v - step * v.grad / v.grad.abs().max()).detach()
    w = new_v.softmax(1) * n[:, None]
    new = models + (w / w.sum(0)).T @ X

    stage = MergedModels(3, step=step)
    state = {"models": list(models), "logits": known, "stages": [{}] * 3}
    updates = Updates.of(X, n, rows=["c0", "c1", "c2"], base=mixes.detach())
    out, after = stage(updates, state, Ctx(2))
    assert [client for client, _ in out.rows] == ["*", "c0", "c1", "c2", "c3"]
    torch.testing.assert_close(torch.stack(after["models"]), new)
    torch.testing.assert_close(torch.tensor([after["logits"][c] for c in ("c0", "c1", "c2")]).double(), new_v)
    assert after["logits"]["c3"] == known["c3"]
    absent = torch.tensor(known["c3"], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(out.X[1:4], new_v.softmax(1) @ new - mixes.detach())
    torch.testing.assert_close(out.X[4], absent @ new - absent @ models)
    torch.testing.assert_close(out.X[0], (new - models).mean(0))  # for clients that never took part


def test_who_joins_fedmerge_later_begins_with_the_models_of_now() -> None:
    """So one model is FedAvg under partial participation too, but for rounding."""
    rounds = [["c00", "c01"], ["c00", "c01"], ["c01", "c02"], ["c02", "c03"], ["c00", "c03"]]
    one, two = (Quadratics(m, **OPPOSITE) for m in (methods.fedmerge(models=1, mu=0.0), methods.fedavg()))
    one.go(5, rounds)
    two.go(5, rounds)
    for name in one.names:
        torch.testing.assert_close(personal(one, name), two.point, atol=1e-12, rtol=0)


def test_fedmerge_separates_groups_and_its_mixes_say_who_belongs_together() -> None:
    run = Quadratics(methods.fedmerge(models=2, mu=0.0), **OPPOSITE)
    run.go(40)
    assert_separated(run, 0.22)  # the line between two models meets no optimum exactly, and each client has its mix
    logits = run.server["stage"]["logits"]
    first = {name: logits[name][0] > logits[name][1] for name in run.names}
    assert len({first[name] for name in LEFT}) == len({first[name] for name in RIGHT}) == 1
    assert first["c00"] != first["c01"]


def test_fedmerge_is_refused_at_peers() -> None:
    build(load_recipe("method=fedmerge"))
    with pytest.raises(RecipeError, match=r"learns how each client mixes a server's models, which no peer has"):
        build(load_recipe("method=fedmerge", "peers={weights: {kind: uniform}}"))


@pytest.mark.parametrize("first", ["groups", "noise"])
def test_fedmerge_begins_with_the_model_of_one_round_of_fedavg(first: Any) -> None:
    b = (torch.tensor(OPTIMA) + 0.5).tolist()  # noise is measured by the mean update, so the groups must not cancel
    one, two = (Quadratics(m, **OPPOSITE | {"b": b}) for m in (methods.fedmerge(mu=0.0, first=first), methods.fedavg()))
    one.go(1)
    two.go(1)
    torch.testing.assert_close(one.point, two.point, atol=1e-14, rtol=0)
    models = torch.stack(one.server["stage"]["models"])
    assert len(models.unique(dim=0)) == 5
    torch.testing.assert_close(models.mean(0), two.point, atol=1e-13, rtol=0)


@pytest.mark.parametrize("method", [methods.fedmerge(models=1, mu=0.0), methods.fedmerge(step=0.0, mu=0.0)])
def test_one_model_and_equal_mixes_are_fedavg(method: Method) -> None:
    """But for rounding."""
    one, two = (Quadratics(m, **OPPOSITE) for m in (method, methods.fedavg()))
    one.go(8)
    two.go(8)
    for name in one.names:
        torch.testing.assert_close(personal(one, name), two.point, atol=1e-12, rtol=0)


# IFCA


def test_ifca_recovers_the_groups() -> None:
    run = Quadratics(methods.ifca(), **OPPOSITE)
    run.go(3)
    members = run.server["stage"]["members"]
    assert len({members[name] for name in LEFT}) == len({members[name] for name in RIGHT}) == 1
    assert members["c00"] != members["c01"]


def test_ifca_with_one_cluster_is_fedavg() -> None:
    """But for rounding."""
    one, two = (Quadratics(m, **OPPOSITE) for m in (methods.ifca(clusters=1), methods.fedavg()))
    rounds = draw(8, 4)
    one.go(8, rounds)
    two.go(8, rounds)
    for name in one.server["stage"]["members"]:
        torch.testing.assert_close(personal(one, name), two.point, atol=1e-13, rtol=0)


def test_a_model_that_nobody_chose_stays() -> None:
    stage = ChosenClusters(3)
    layout = Layout((Block("x", (2,)),))
    X = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    out, state = stage(Updates.of(X, cluster=[-1.0] * 4), stage.init(layout), Ctx(1))
    assert len(out) == 1
    models = state["models"]
    base = torch.stack([models[0], models[0], models[2], models[2]])
    out, state = stage(Updates.of(X, base=base, cluster=[0.0, 0, 2, 2]), state, Ctx(2))
    assert torch.equal(state["models"][1], models[1])
    torch.testing.assert_close(state["models"][0], models[0] + torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(out.X[1], torch.tensor([0.5, 0.5]))


def test_more_clusters_than_clients_and_no_movement() -> None:
    stage = ChosenClusters(4)
    _, state = stage(Updates.of([[1.0, 2, 3]], cluster=[-1.0]), stage.init(Layout((Block("x", (3,)),))), Ctx(1))
    assert len({tuple(m.tolist()) for m in state["models"]}) == 4
    _, state = stage(Updates.of([[0.0, 0, 0]], cluster=[-1.0]), stage.init(Layout((Block("x", (3,)),))), Ctx(1))
    assert all(not m.any() for m in state["models"])


def told(run: Quadratics, models: list[list[float]]) -> Quadratics:
    run.go(1)
    run.server["stage"] = {**run.server["stage"], "models": [torch.tensor(m).double() for m in models]}
    return run


def test_ties_go_to_the_first_model() -> None:
    run = told(Quadratics(methods.ifca(clusters=3), **OPPOSITE), [[5.0, 5], [0, 0], [0, 0]])
    run.go(1)
    assert set(run.server["stage"]["members"].values()) == {1}


def test_a_client_is_trained_from_its_choice() -> None:
    """With one step of rate lr the chosen model moves by -lr times the mean of its members' gradients."""
    run = told(Quadratics(methods.ifca(), **{**OPPOSITE, "steps": 1}), [[2.0, 2.0], [-3.0, -2.0]])
    run.go(1)
    for j, group in enumerate((LEFT, RIGHT)):
        start = torch.tensor([[2.0, 2.0], [-3.0, -2.0]][j]).double()
        b = torch.stack([run.b[run.names.index(name)] for name in group]).mean(0)
        expected = start - 0.2 * (start - b)
        torch.testing.assert_close(run.server["stage"]["models"][j], expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(personal(run, group[0]), expected, atol=1e-12, rtol=0)


def test_losses_of_examples_are_those_of_evaluation() -> None:
    """Mean over examples = the evaluated loss, where every example has a label; the model is left as it was."""
    recipe = load_recipe("model={name: resnet10, width: 4}")
    built = fedloom.federation.rounds.build.build(recipe)
    model = FlatModel(built.module, built.layout)
    client = next(c for c in built.federation.clients.values() if len(c.tasks) > 1)
    before = model.vector.clone()
    each = example_losses(model, client.train, client.tasks, 32)
    scores = evaluate(model, client.train, {name: task for name, (task, _) in client.tasks.items()}, 32)
    assert len(each) == len(client.train)
    assert float(each.mean()) == pytest.approx(sum(s["loss"] for s in scores.values()), rel=1e-5)
    assert torch.equal(before, model.vector)


# FedSoft


def test_fedsoft_shares_find_the_groups_and_models_their_means() -> None:
    run = Quadratics(methods.fedsoft(lam=0.5), **OPPOSITE)
    run.go(40)
    shares = {name: run.clients[name]["rules"]["0"]["shares"] for name in run.names}
    assert all(sorted(s) == [1e-4, 1.0] for s in shares.values())
    assert len({tuple(shares[name]) for name in LEFT}) == 1
    assert shares["c00"] != shares["c01"]
    j = shares["c00"].index(1.0)
    own = torch.stack([personal(run, name) for name in LEFT])
    # what the floor gives the other group pulls a little
    torch.testing.assert_close(run.server["stage"]["models"][j], own.mean(0), atol=2e-3, rtol=0)


def test_fedsoft_is_drawn_to_its_models() -> None:
    """With one step of rate lr from y, the move is -lr (F' + lam sum_s u_s (y - c_s)): the term has its gradient."""
    run = told(Quadratics(methods.fedsoft(lam=0.5), **{**OPPOSITE, "steps": 1}), [[1.0, 1.0], [-2.0, -2.0]])
    before = {name: personal(run, name) for name in run.names}
    run.go(1)
    for k, name in enumerate(run.names):
        u = [1.0, 1e-4] if name in LEFT else [1e-4, 1.0]
        y = before[name]
        pull = sum(u[s] * (y - torch.tensor([[1.0, 1.0], [-2.0, -2.0]][s]).double()) for s in (0, 1))
        expected = y - 0.2 * ((y - run.b[k]) + 0.5 * pull)
        torch.testing.assert_close(personal(run, name), expected, atol=1e-12, rtol=0)


def test_who_uses_one_or_all_models() -> None:
    models = [torch.tensor([1.0, 2]), torch.tensor([5.0, 0])]
    assert _used(models, 1) is models[1]
    assert _used(models, 2) is None
    torch.testing.assert_close(_used(models, [0.25, 0.5]), torch.tensor([2.75, 0.5]))
    torch.testing.assert_close(_used(models[:1], [0.25]), torch.tensor([0.25, 0.5]))


def test_soft_clusters_by_hand() -> None:
    """c_0 = (0.5 * 1 w_0 + 0.25 * 3 w_1) / 1.25; the largest share of c_1 is the floor itself, so it stays."""
    X, base = torch.tensor([[[1.0, 2], [5, 0]], [[1, 1], [-2, 3]]], dtype=torch.float64)
    stage, before = SoftClusters(floor=0.05), [torch.tensor([9.0, 9]).double(), torch.tensor([1.0, 1]).double()]
    updates = Updates.of(X, [1, 3], base=base, share0=[0.5, 0.25], share1=[0.0, 0.05])
    same, state = stage(updates, {"models": before}, Ctx(2))
    w = X + base
    torch.testing.assert_close(state["models"][0], (0.5 * w[0] + 0.75 * w[1]) / 1.25)
    assert torch.equal(state["models"][1], before[1])
    assert same is updates


@pytest.mark.parametrize("first", ["noise", "groups"])
def test_the_first_models_by_hand(first: Any) -> None:
    """Groups of alike rows, or the mean with noise of half its root mean square."""
    X = torch.tensor([[1.0, 2, 0], [-3, -1, 0], [2, 2, 0], [-1, -1, 4]], dtype=torch.float64)
    base = torch.full_like(X, 7.0)
    ctx = Ctx(1, seed=5)
    _, state = SoftClusters(3, first, noise=0.5)(Updates.of(X, [1, 2, 3, 4], base=base), {"models": []}, ctx)
    weights = torch.tensor([1.0, 2, 3, 4]).double() / 10
    mean = weights @ X
    noise = [torch.randn(3, generator=ctx.rng("cluster", j), dtype=torch.float64) for j in range(3)]
    expected = [7 + mean + 0.5 * float(mean.square().mean()) ** 0.5 * draw for draw in noise]
    if first == "groups":
        # the cosines with 1 are 0.99 (row 2), -0.95 and -0.32; of the last two 0.3
        expected = [7 + (X[0] + 3 * X[2]) / 4, 7 + X[1], 7 + X[3]]
    for found, wanted in zip(state["models"], expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_who_begins_later_draws_the_noise_of_the_first_round() -> None:
    stage, updates = ChosenClusters(2, "noise"), Updates.of([[1.0, 2, 3], [3, 2, 1]], cluster=[-1.0, -1])
    apart = []
    for round in (1, 4):
        _, state = stage(updates, stage.init(updates.layout), Ctx(round, seed=3))
        apart.append(state["models"][0] - state["models"][1])
    assert torch.equal(*apart)


def test_chosen_clusters_by_hand() -> None:
    """Members of a cluster move to its new model, wherever they started; z is absent, and moves as its model does."""
    X, base = torch.tensor([[[1.0], [2], [6]], [[0], [10], [12]]], dtype=torch.float64)
    stage = ChosenClusters(count=3)
    assert stage.traits.extras["cluster"] == Number(-1, 2, whole=True)
    models = [torch.tensor([m]).double() for m in (0.0, 10.0, 50.0)]
    state = {"models": models, "members": {"c": 0, "z": 1}, "stages": [{}, {}, {}]}
    updates = Updates.of(X, [1, 1, 3], rows=["a", "b", "c"], base=base, cluster=[0, 1, 1])
    out, state = stage(updates, state, Ctx(3))
    # model 1 moves by (2 + 3 (6 + 12 - 10)) / 4 = 6.5
    assert [float(m) for m in state["models"]] == [1, 16.5, 50]
    assert state["members"] == {"a": 0, "b": 1, "c": 1, "z": 1}
    assert [client for client, _ in out.rows] == ["a", "b", "c", "z"]
    assert out.X[:, 0].tolist() == [1, 16.5 - 10, 16.5 - 12, 6.5]
    assert out.n.tolist() == [1, 1, 3, 0]


# RR-Cluster


@pytest.mark.parametrize("sizes", [[9, 0, 0], [4, 4, 1], [1, 7, 1], [3, 3, 3], [2, 1, 5]])
def test_rebalancing_fills_every_cluster_and_moves_no_more_than_it_must(sizes: list[int]) -> None:
    chosen = [j for j, size in enumerate(sizes) for _ in range(size)]
    drawn = set()
    for seed in range(40):
        moved = rebalanced(chosen, 3, 2, Ctx(1, seed).rng())
        found = [moved.count(j) for j in range(3)]
        assert min(found) >= 2
        assert sum(a != b for a, b in zip(chosen, moved, strict=True)) == sum(max(2 - size, 0) for size in sizes)
        drawn.add(tuple(moved))
    assert (len(drawn) > 1) == (min(sizes) < 2), "who moves is drawn"
    assert rebalanced([0, 0, 0], 3, 2, Ctx(1).rng()).count(0) == 2, "too few: as far as it goes"


def test_a_client_that_is_lent_moves_another_model_by_its_own_update() -> None:
    """Two of four that chose model 0 count at model 1, with their updates; all are measured with what they chose."""
    rng, ctx = np.random.default_rng(0), Ctx(3, 5)
    models, X, n = rng.normal(size=(2, 4)), rng.normal(size=(4, 4)), np.array([1.0, 2, 3, 4])
    stage = ChosenClusters(2, least=2)
    state = {"models": [*torch.tensor(models)], "members": {}, "stages": [{}, {}]}
    base = np.tile(models[0], (4, 1))
    out, new = stage(Updates.of(X, n, base=base, cluster=[0.0] * 4), state, ctx)
    counts = np.array(rebalanced([0] * 4, 2, 2, ctx.rng("rebalanced")))
    assert sorted(counts) == [0, 0, 1, 1]
    for j in range(2):
        mine = counts == j
        expected = models[j] + np.average(X[mine], axis=0, weights=n[mine])
        np.testing.assert_allclose(new["models"][j].numpy(), expected)
    np.testing.assert_allclose(base + out.X.numpy(), np.tile(new["models"][0].numpy(), (4, 1)))
    assert set(new["members"].values()) == {0}


@pytest.mark.parametrize("least", [0, 1])
def test_who_names_no_cluster_counts_to_none(least: int) -> None:
    stage, X = ChosenClusters(2, least=least), torch.tensor([[1.0], [2], [100]])
    state = {"models": [torch.zeros(1), torch.ones(1)], "members": {}, "stages": [{}, {}]}
    updates = Updates.of(X, base=[[0.0], [1], [0]], cluster=[0.0, 1, 1000])
    out, state = stage(updates, state, Ctx(2))
    assert [float(model) for model in state["models"]] == [1, 3]
    assert [client for client, _ in out.rows] == ["c0", "c1"]


def test_with_enough_clients_everywhere_it_is_ifca() -> None:
    one, two = (Quadratics(m, **OPPOSITE) for m in (methods.rr_cluster(least=3), methods.ifca()))
    one.go(4)
    two.go(4)
    assert all(torch.equal(personal(one, name), personal(two, name)) for name in one.names)


def test_more_clients_than_there_are_is_refused() -> None:
    with pytest.raises(RecipeError, match="2 clusters of at least 3 clients each need 6 clients, found 5"):
        build(load_recipe("method={name: rr-cluster, least: 3}"))


def test_peers_that_hear_fewer_than_the_clusters_ask_for_are_refused() -> None:
    """On a ring each of five hears two others; where all hear all, or choose among them, it is their number."""
    rings = "method={name: rr-cluster, first: noise}", "peers={graph: ring, weights: {kind: uniform}}"
    heard = (
        "at peer 'all-0', which hears at most 2 other peers: 2 clusters of at least 2 clients each need 4 "
        "clients, found 3"
    )
    with pytest.raises(RecipeError, match=heard):
        build(load_recipe(*rings))
    build(load_recipe(*rings, "method.least=1"))
    build(load_recipe(*rings, "peers.graph=full"))
    with pytest.raises(RecipeError, match="hears at most 1 other peers"):
        build(load_recipe(*rings, "peers.graph=full", "peers.choose={top: 1}"))


# FedSPD

SPOTS = np.array([[2.0, 1.0], [-1.0, -2.0]])
OWNS = [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
"""At which of the two spots each example of five clients lies."""


def mixtures(method: Method, **training: Any) -> Quadratics:
    """Five clients with four examples each, near two spots."""
    rng = np.random.default_rng(0)
    b = np.concatenate([SPOTS[mine] + 0.1 * rng.normal(size=(4, 2)) for mine in OWNS])
    owns = [list(range(4 * k, 4 * k + 4)) for k in range(5)]
    given = {"steps": 1, "batch_size": 4, "optimizer": {"lr": 0.2}, **training}
    return Quadratics(method, np.ones_like(b).tolist(), b.tolist(), owns=owns, **given)


def test_examples_are_told_apart_and_each_model_is_the_mean_of_those_that_it_fits() -> None:
    run = mixtures(methods.fedspd(least=1, tune=0), steps=8)
    run.go(12)
    models = torch.stack(run.server["stage"]["models"]).numpy()
    order = np.argsort(-models[:, 0])
    np.testing.assert_allclose(models[order], SPOTS, atol=0.15)
    for name, mine in zip(run.names, OWNS, strict=True):
        u = np.array([mine.count(0), mine.count(1)]) / 4
        np.testing.assert_allclose(personal(run, name).numpy(), u @ models[order], atol=1e-12)


def test_a_client_that_has_received_no_model_sends_no_number_and_equal_shares() -> None:
    run = mixtures(methods.fedspd(clusters=3))
    [rule] = run.method.rules
    state = rule.begin(SimpleNamespace(broadcast={}), {})  # type: ignore[arg-type]
    assert rule.finish(None, state)[1] == {"cluster": -1, **{f"share{j}": pytest.approx(1 / 3) for j in range(3)}}  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [1, 4, 9])
def test_a_drawn_model_is_trained_on_the_examples_that_it_fits_best(least: int) -> None:
    """One step of rate 0.2 from c_s towards the mean of a client's examples that are nearer to it; then the mean over
    those that drew s. With `least` 4 only one client has a choice of none but its largest; with 9 all have."""
    run = mixtures(methods.fedspd(least=least))
    run.go(1)
    before = SPOTS + 0.5
    run.server["stage"] = {**run.server["stage"], "models": list(torch.tensor(before))}
    b = run.b.numpy().reshape(5, 4, 2)
    best = np.square(b[:, :, None] - before).sum(-1).argmin(-1)
    run.go(1)
    trained: dict[int, list[Any]] = {0: [], 1: []}
    for k, name in enumerate(run.names):
        won = np.bincount(best[k], minlength=2)
        fit = [j for j in range(2) if won[j] >= least] or [int(won.argmax())]
        torch.manual_seed(derive_seed(0, 2, "model", name))
        j = fit[int(torch.randint(len(fit), ()))]
        assert run.server["stage"]["members"][name] == pytest.approx((won / 4).tolist())
        trained[j].append(before[j] - 0.2 * (before[j] - b[k][best[k] == j].mean(0)))
    after = np.stack([np.mean(each, 0) if each else before[j] for j, each in trained.items()])
    np.testing.assert_allclose(torch.stack(run.server["stage"]["models"]).numpy(), after)
    for k, name in enumerate(run.names):
        np.testing.assert_allclose(personal(run, name).numpy(), np.bincount(best[k], minlength=2) / 4 @ after)


def test_absent_clients_of_mixed_clusters_move_with_the_models() -> None:
    run = mixtures(methods.fedspd(least=1))
    run.go(2)
    run.go(1, [["c01", "c02"]])
    models, members = torch.stack(run.server["stage"]["models"]), run.server["stage"]["members"]
    for name in run.names:
        torch.testing.assert_close(personal(run, name), torch.tensor(members[name]).double() @ models)


# FedPMT

SUBSETS = {"c00": "a", "c01": "a,b", "c02": "b", "c03": "c"}


@pytest.mark.parametrize("attenuation", [0.0, 0.3, 1.0])
def test_models_of_single_tasks_by_hand(attenuation: float) -> None:
    rng, n = np.random.default_rng(2), np.array([1.0, 2, 3, 4])
    X, base = rng.normal(size=(2, 4, 5))
    out, _ = SingleTaskModels(attenuation).on(X, n, base=base, tasks=list(SUBSETS.values()))
    held, models = [s.split(",") for s in SUBSETS.values()], {}
    for task in "abc":
        a = np.array([1.0 if task in tasks else attenuation for tasks in held])
        models[task] = np.average(base + X, axis=0, weights=a * n)
    expected = [np.mean([models[task] for task in tasks], axis=0) for tasks in held]
    np.testing.assert_allclose(base + out.numpy(), expected)
    if attenuation == 0:
        np.testing.assert_allclose(out[3].numpy(), X[3])
    if attenuation == 1:
        np.testing.assert_allclose(base + out.numpy(), np.tile(np.average(base + X, axis=0, weights=n), (4, 1)))


def test_decoders_are_means_of_their_holders_whatever_else_these_hold() -> None:
    layout = Layout((Block("encoder.w", (2,)), *(Block(f"heads.{t}", (3,), role="head", task=t) for t in "abc")))
    have = torch.tensor([[True, *(t in tasks for t in "abc")] for tasks in SUBSETS.values()])
    X = torch.randn(4, layout.d, generator=torch.Generator().manual_seed(0)).double()
    for present, s in zip(have.t(), layout.slices, strict=True):
        X[~present, s] = 0
    method = methods.fedpmt()
    state = method.stage.init(layout)
    updates = Updates.of(X, [1.0, 2, 3, 4], layout, list(SUBSETS), present=have, tasks=list(SUBSETS.values()))
    out, _ = method.stage(updates, state, Ctx(1))
    both = (X[0, 2:5] + 2 * X[1, 2:5]) / 3
    torch.testing.assert_close(out.X[:2, 2:5], both.expand(2, -1))
    torch.testing.assert_close(out.X[3, 8:], X[3, 8:])


def test_shares_are_found_in_every_so_many_rounds() -> None:
    counted: list[int] = []

    class Counting(SoftAnchors):
        def begin(self, view: Any, state: Any) -> Any:
            losses = view.losses
            view.losses = lambda: (counted.append(1), losses())[1]
            return super().begin(view, state)

    method = replace(methods.fedsoft(), local=(Counting(every=3),))
    run = Quadratics(method, **{**OPPOSITE, "h": [[1.0, 1.0]], "b": [[1.0, 2.0]]})
    run.go(8)
    # seven rounds with models: in the first, fourth and seventh both are looked at
    assert len(counted) == 3 * 2
    assert [client["rules"]["0"]["rounds"] for client in run.clients.values()] == [7]


def test_what_is_told_must_be_needed_in_the_same_number() -> None:
    with pytest.raises(ValueError, match="no stage at the server broadcasts"):
        replace(methods.ifca(clusters=2), local=(BestCluster(3),))


# FedPer, FedSTA

LAYOUT = Layout(
    (
        Block("encoder.w", (2,), role="encoder"),
        Block("decoders.a.w", (2,), role="decoder", task="a"),
        Block("heads.a.w", (1,), role="head", task="a"),
        Block("heads.b.w", (1,), role="head", task="b"),
    )
)


def test_fedper_keeps_what_it_says() -> None:
    def shared(method: Method) -> tuple[str, ...]:
        return method.shared_part(LAYOUT).names

    assert shared(methods.fedper()) == ("encoder.w",)
    assert shared(methods.fedper(personal="heads")) == ("encoder.w", "decoders.a.w")
    assert shared(methods.fedper(layers=("*.w",))) == ()
    layout = Layout((*LAYOUT.blocks, Block("encoder.last.w", (1,))))
    assert methods.fedper(layers=("encoder.last.*",)).shared_part(layout).names == ("encoder.w",)
    assert shared(methods.fedsta()) == ("encoder.w",)
    with pytest.raises(ValueError, match="layers"):
        methods.fedper(personal="heads", layers=("encoder.last.*",))


def test_fedsta_averages_decoders_of_the_same_task_in_some_rounds() -> None:
    stage = PartlyShared("encoder", Mean(), Every(2, PerTask(SimilarGroups(1))))
    assert methods.fedsta(every=2).stage == stage
    X = torch.tensor([[1.0, 0, 1, 2, 3, 0], [3.0, 0, 3, 4, 5, 0], [5.0, 3, 0, 0, 0, 7]])
    base = torch.zeros_like(X)
    base[1, 2] = 10.0
    support = torch.tensor([[True, True, True, False]] * 2 + [[True, False, False, True]])
    updates = Updates.of(X, None, LAYOUT, base=base, support=support)
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(1))
    assert [client for client, _ in out.rows] == ["*", "c0", "c1", "c2"]
    assert out.X[0].tolist() == [3, 1, 0, 0, 0, 0]
    assert torch.equal(out.X[1:, 2:], X[:, 2:])
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(2))
    assert (out.X[1:, :2] == out.X[0, :2]).all()
    assert (base + out.X[1:])[0, 2:5].tolist() == (base + out.X[1:])[1, 2:5].tolist() == [7.0, 3.0, 4.0]
    assert out.X[3, 2:].tolist() == [0, 0, 0, 7]


OWN = ("model.heads=own", "training.participation=0.6", "training.rounds=4")


def test_fedsta_keeps_one_encoder_for_all(quick: Quick) -> None:
    """Absent clients' too; and apart from what is averaged it is the adaptation with private decoders."""
    from fedloom.engines.api import trained_models

    run = quick("method={name: fedsta, every: 2}", *OWN)
    models = trained_models(run.folder)
    encoders = [{k: v for k, v in model.items() if k.startswith("encoder.")} for model in models.values()]
    assert len(encoders) >= 5
    for other in encoders[1:]:
        assert all(torch.equal(v, other[k]) for k, v in encoders[0].items())
    # with more rounds between than there are, nothing is averaged
    never, private = quick("method={name: fedsta, every: 100}", *OWN), quick("method=fedsta", *OWN)
    ours = trained_models(private.folder)
    for client, model in trained_models(never.folder).items():
        if client in ours:
            for name, value in ours[client].items():
                torch.testing.assert_close(model[name], value, atol=1e-6, rtol=0)


def test_fedsta_is_fedper_with_uniform_weights(quick: Quick) -> None:
    assert_same(quick("method=fedsta", *OWN), quick("method={name: fedper, weights: uniform}", *OWN), models_only=True)


@pytest.mark.parametrize(
    "method",
    [
        "{name: fedsta, every: 2, add: {heal: , pcgrad: }}",
        "{name: cfl, start: 0, eps1: 10, eps2: 0, share: encoder, add: {heal: }}",
        "{name: ifca, clusters: 3, first: noise, share: encoder}",
        "{name: matfl, soft: true, threshold: 0.3}",
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                "{name: cfl, start: 0, eps1: 10, eps2: 0}",
                "{name: fedsoft, clusters: 3, share: encoder}",
                "{name: matfl, source: update}",
                "{name: fedper, personal: heads}",
            )
        ),
    ],
)
def test_stops_and_workers_do_not_matter(quick: Quick, tmp_path: Path, method: str) -> None:
    # the first split takes all clients
    part = "training.participation=0.6" if "cfl" not in method else "training.participation=1.0"
    changes = (f"method={method}", "model.heads=own", "training.rounds=4", part)
    whole = quick(*changes)
    assert_same(whole, fedloom.resume(stopped_after(2, tmp_path / "parts", load_recipe(*changes))))
    if "encoder, add" in method:
        assert_same(whole, quick(*changes, "runtime.workers=2"))


# FedBone


def test_without_history_it_is_pcgrad() -> None:
    X = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)
    one, state = HistoryAttention().on(X, round=1)
    two, _ = (PCGrad() >> Mean()).on(X, round=1)
    assert torch.equal(one, two)
    torch.testing.assert_close(state["history"], 0.1 * two[0])


def test_rows_that_agree_with_the_past_count_more() -> None:
    stage = HistoryAttention(temperature=0.5, stage=Mean())
    X = torch.tensor([[1.0, 0], [0, 2.0], [0, 0]])
    history = torch.tensor([3.0, 0])
    assert agreement(Updates.of(X), history).tolist() == [1.0, 0.0, 0.0]
    u, state = stage.on(X, state={"history": history, "stage": {}})
    a = torch.softmax(torch.tensor([2.0, 0, 0]), 0)
    torch.testing.assert_close(u, torch.stack([a[0], 2 * a[1]]).unsqueeze(0))
    torch.testing.assert_close(state["history"], 0.9 * history + 0.1 * u[0])
    # lengths do not matter, however small
    little, _ = stage.on(0.01 * X, state={"history": 0.01 * history, "stage": {}})
    torch.testing.assert_close(little, 0.01 * u)
    # alone: the row
    assert stage.on(X[:1], state={"history": -history, "stage": {}})[0].tolist() == [[1.0, 0.0]]


def test_fedbone_is_marked_as_emulated() -> None:
    entry = methods.METHODS["fedbone"]
    assert "emulated" in entry.source
    assert entry.summary.startswith("Emulated")


def test_the_first_message_tells_nothing_and_later_ones_all_models() -> None:
    run = Quadratics(methods.ifca(clusters=3), **OPPOSITE)
    assert not dispatch(run.common, run.server, ["c00"])["c00"].broadcast
    run.go(1)
    message = dispatch(run.common, run.server, ["c00"])["c00"]
    assert set(message.broadcast) == {"cluster0", "cluster1", "cluster2"}
    payload, _, _ = client_step(
        run.method, run.model, run.federation, run.federation.clients["c00"], message, {}, Ctx(2), run.training["c00"]
    )
    assert payload.extra.keys() == {"cluster"}
