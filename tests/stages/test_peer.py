"""Aggregation at one peer, and ColNet's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.peers import Safeguards, conflict_averse_mix
from fedloom.stages import AtPeer, ConflictAverseMix, Identity, Mean, SimilarityMix, Stage, TaskLeaders

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
