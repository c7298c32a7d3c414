"""A method of a server, as it runs at peers: what is refused, and what becomes of its stage, weights and rules.

And aggregation at one peer, with ColNet's groups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core.combine import Switch
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.errors import RecipeError
from fedloom.methods import METHODS
from fedloom.methods.method import EachTask, Method
from fedloom.methods.peers.aggregation import InterCluster, at_peers
from fedloom.methods.peers.config import PeersBase
from fedloom.peers import Safeguards, conflict_averse_mix
from fedloom.stages import AtPeer, ConflictAverseMix, Identity, Mean, SimilarityMix, Stage, TaskLeaders

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


LAYOUT = Layout((Block("encoder.w", (2,)), Block("head.w", (1,), role="head", task="t")))
X = torch.tensor([[1.0, 2, 3], [4, 8, 6], [-2, 5, 9]])


def at(stage: Stage, own: str, **options: Any) -> torch.Tensor:
    updates = Updates.of(X, [1.0, 2, 1], LAYOUT, ["a", "b", "c"], present=options.pop("present", None))
    peer = AtPeer(stage, own, **options)
    out, _ = peer(updates, peer.init(LAYOUT), Ctx(1, targets=updates.rows))
    assert out.rows == (("*", None),)
    return out.X[0]


def test_a_mean_by_size_or_by_shares() -> None:
    torch.testing.assert_close(at(Mean(), "a"), (X[0] + 2 * X[1] + X[2]) / 4)
    torch.testing.assert_close(at(Mean(), "a", shares={"a": 0.5, "b": 0.5, "c": 0.0}), (X[0] + X[1]) / 2)


def test_out_of_scope_and_where_nobody_else_has_anything_the_own_row_stays() -> None:
    scope = frozenset({"encoder.w"})
    mixed = at(Mean(), "b", scope=scope)
    torch.testing.assert_close(mixed[:2], (X[0] + 2 * X[1] + X[2])[:2] / 4)
    assert mixed[2] == X[1, 2]
    have = torch.tensor([[1, 0], [1, 1], [1, 0]]).bool()
    assert at(Mean(), "b", present=have)[2] == X[1, 2]
    # even where the own row does not count
    left_out = at(Mean(), "b", shares={"a": 1.0, "b": 0.0, "c": 1.0}, present=have)
    torch.testing.assert_close(left_out, torch.tensor([-0.5, 3.5, 6.0]))


def test_of_rows_for_all_the_own_one_is_taken() -> None:
    assert torch.equal(at(Identity(), "c"), X[2])
    rows, _ = SimilarityMix(top=1).on(X)
    torch.testing.assert_close(at(SimilarityMix(top=1), "b"), rows[1])


def test_the_conflict_averse_mix_is_the_functions_where_all_have_blocks() -> None:
    stage = ConflictAverseMix(safeguards=Safeguards(ema=0.5))
    have = torch.tensor([[1, 0], [1, 1], [1, 1]]).bool()
    mixed = at(stage, "a", present=have)
    rows = {name: X[i, :2] for i, name in enumerate("abc")}
    torch.testing.assert_close(mixed[:2], conflict_averse_mix("a", rows, safeguards=stage.safeguards).update)
    torch.testing.assert_close(mixed[2], (2 * X[1, 2] + X[2, 2]) / 3)
    with pytest.raises(ValueError, match="expected one peer as the target"):
        stage.on(X)


def test_without_the_peer_itself_or_a_block_that_all_have_the_mix_is_the_weighted_mean() -> None:
    mean = (X[0] + 2 * X[1] + X[2]) / 4
    torch.testing.assert_close(at(ConflictAverseMix(), "z"), mean)
    apart = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
    found = at(ConflictAverseMix(), "a", present=apart)
    torch.testing.assert_close(found, torch.cat([(X[0] + 2 * X[1])[:2] / 3, X[2, 2:]]))


def test_heads_are_mixed_apart_among_those_that_have_them() -> None:
    """Two of three rows have a head: with `heads` "averse" it is a problem of its own, solved among these two."""
    layout = Layout((Block("encoder", (2,)), Block("head", (2,), task="t"), Block("other", (1,), task="u")))
    X = torch.tensor([[1.0, 0, 3, 1, 2], [0, 1, -1, 1, 5], [1, 1, 9, 9, 1]])
    present = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1]]).bool()
    ctx = Ctx(1, targets=(("a", None),))
    updates = Updates.of(X, rows=["a", "b", "c"], layout=layout, present=present)
    stage = ConflictAverseMix(heads="averse")
    out, state = stage(updates, stage.init(layout), ctx)
    of = {
        name: conflict_averse_mix("a", {c: X[i, s] for i, c in enumerate(who)})
        for name, s, who in (("encoder", slice(0, 2), "abc"), ("head", slice(2, 4), "ab"))
    }
    torch.testing.assert_close(out.X[0, :4], torch.cat([of["encoder"].update, of["head"].update]))
    assert state == {"before": of["encoder"].weights, "heads": {"t": of["head"].weights, "u": {}}}
    mean, _ = ConflictAverseMix()(updates, {"before": {}}, ctx)
    torch.testing.assert_close(mean.X[0], torch.cat([of["encoder"].update, X[:2, 2:4].mean(0), X[2, 4:]]))


def test_smoothed_weights_are_remembered() -> None:
    stage = ConflictAverseMix(safeguards=Safeguards(ema=0.5))
    updates = Updates.of(X, rows=["a", "b", "c"])
    records: list[Any] = []
    ctx = Ctx(1, targets=(("a", None),), record=lambda kind, fields: records.append(fields))
    _, state = stage(updates, stage.init(updates.layout), ctx)
    assert state["before"] == records[0]["weights"]
    _, state = stage(updates.replace(X=-X.flip(0)), {"before": {"a": 1.0, "b": 0.0, "c": 0.0}}, ctx)
    assert state["before"]["a"] >= 0.5 - 1e-9
    assert sum(state["before"].values()) == pytest.approx(1.0)


def test_leaders_by_hand() -> None:
    """Orthogonal updates of two groups: U = (1 + c) / (1 + c^2) times their mean; all start from their group's mean."""
    base = torch.tensor([[0.0, 0], [2, 2], [1, 1]])
    out, _ = TaskLeaders(c=0.4).on(torch.tensor([[1.0, 0], [3, 0], [0, 2]]), base=base, tasks=["a", "a", "b"])
    u = 1.4 / 1.16
    torch.testing.assert_close(base + out, torch.tensor([[3 + u, 1 + u], [3 + u, 1 + u], [1 + u, 3 + u]]))


def test_one_group_and_groups_of_one() -> None:
    one, _ = TaskLeaders().on(X, tasks=["a"] * 3)
    torch.testing.assert_close(one, X.mean(0).expand(3, -1))
    alone, _ = TaskLeaders(alpha=0.0).on(X, tasks=["a", "b", "c"])
    torch.testing.assert_close(alone, X)
