"""Neighbours: who is chosen, with what weights, in which group, and what is exchanged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.peers import (
    alignment,
    coarse_clusters,
    fine_clusters,
    next_scope,
    recent,
    similar_enough,
    soft_weights,
    task_groups,
    top_k,
)

NAN = math.nan
SIMILARITY = {"d": 0.5, "b": 0.9, "c": 0.5, "e": -0.2, "f": NAN, "g": math.inf}


def test_top_k() -> None:
    assert top_k(SIMILARITY, 2) == ("b", "c")  # c and d are as similar: by name
    assert top_k(dict(reversed(SIMILARITY.items())), 2) == ("b", "c")
    assert top_k(SIMILARITY, 3) == ("b", "c", "d")
    # Fewer than K that are known; unknown ones are never chosen.
    assert top_k(SIMILARITY, 9) == ("b", "c", "d", "e")
    assert top_k(SIMILARITY, 0) == top_k({}, 3) == top_k({"f": NAN}, 1) == ()
    with pytest.raises(ValueError, match="k: expected at least 0"):
        top_k(SIMILARITY, -1)


def test_similar_enough() -> None:
    assert similar_enough(SIMILARITY, 0.5) == ("b", "c", "d")
    assert similar_enough(SIMILARITY, 0.95) == similar_enough({}, 0.0) == ()


def test_who_was_chosen_lately_counts_less() -> None:
    found = recent(SIMILARITY, {"b": 1, "c": 3, "z": 9}, 0.5)
    late = np.array([0.9, 0.5]) * (1 - np.exp(-0.5 * np.array([1, 3])))
    assert [found["b"], found["c"]] == pytest.approx(late)
    assert {name: found[name] for name in "deg"} == {name: SIMILARITY[name] for name in "deg"}, "never chosen"
    assert math.isnan(found["f"])
    assert top_k(found, 2) == ("d", "c")
    below = recent({"p": -0.2, "q": -0.2}, {"p": 1}, 0.5)
    assert below["p"] == pytest.approx(-0.2 * (1 + np.exp(-0.5)))
    assert top_k(below, 1) == ("q",), "one below 0 that had its turn comes later, too"
    with pytest.raises(ValueError, match="rate: expected a number above 0"):
        recent(SIMILARITY, {}, 0)


def test_soft_weights() -> None:
    # s = 1 (self), 0.9, 0.5, 0 (truncated), 0 (unknown); sum 2.4
    found = soft_weights("a", SIMILARITY, ["e", "b", "c", "f"])
    assert found == pytest.approx({"a": 1 / 2.4, "b": 0.9 / 2.4, "c": 0.5 / 2.4, "e": 0, "f": 0})
    assert list(found) == ["a", "b", "c", "e", "f"]
    # eq. 4.11: a part of the way to the neighbours
    half = soft_weights("a", SIMILARITY, ["b", "c"], step=0.5)
    assert half == pytest.approx({"a": 1 - 0.7 / 2.4, "b": 0.45 / 2.4, "c": 0.25 / 2.4})
    # The release: the neighbours' mean replaces the own model.
    assert soft_weights("a", SIMILARITY, ["b", "c"], include_self=False) == pytest.approx(
        {"a": 0, "b": 0.9 / 1.4, "c": 0.5 / 1.4}
    )


@pytest.mark.parametrize("include_self", [True, False])
def test_without_anybody_to_trust_the_own_model_stays(include_self: bool) -> None:
    assert soft_weights("a", SIMILARITY, [], include_self=include_self) == {"a": 1.0}
    assert soft_weights("a", SIMILARITY, ["e", "f"], include_self=include_self) == {"a": 1.0, "e": 0.0, "f": 0.0}


@given(
    st.dictionaries(st.sampled_from("bcdefghij"), st.floats(allow_nan=True, allow_infinity=True, width=32)),
    st.integers(0, 12),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_weights_are_a_convex_combination(similarity: dict[str, float], k: int, step: float, include: bool) -> None:
    weights = soft_weights("a", similarity, top_k(similarity, k), step=step, include_self=include)
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-14)
    assert min(weights.values()) >= 0


def test_weights_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="'a' is among its own neighbours"):
        soft_weights("a", {"a": 1.0}, ["a"])
    for step in (0.0, 1.5):
        with pytest.raises(ValueError, match="expected 0 < step <= 1"):
            soft_weights("a", {"b": 1.0}, ["b"], step=step)


def blocks(sizes: list[int], inside: float, between: float) -> torch.Tensor:
    label = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    S = torch.where(label[:, None] == label, inside, between).double()
    return S.fill_diagonal_(1.0)


@pytest.mark.parametrize("sizes", [[3, 4], [3, 2, 3], [2, 2, 3, 3]])
@pytest.mark.parametrize("between", [0.2, 0.0])
def test_coarse_clusters_finds_how_many_there_are(sizes: list[int], between: float) -> None:
    names = [f"p{i:02d}" for i in range(sum(sizes))]
    S = blocks(sizes, 0.9, between)
    expected, start = [], 0
    for size in sizes:
        expected.append(tuple(names[start : start + size]))
        start += size
    assert coarse_clusters(names, S) == tuple(expected)
    assert coarse_clusters(names, 1e-6 * S) == tuple(expected), "only ratios of similarities count"
    turned = list(range(len(names)))[::-1]
    assert coarse_clusters([names[i] for i in turned], S[turned][:, turned]) == tuple(expected)


def test_coarse_clusters_of_few_or_equal_peers() -> None:
    assert coarse_clusters([], torch.zeros(0, 0)) == ()
    assert coarse_clusters(["b", "a"], torch.ones(2, 2)) == (("a", "b"),)
    assert coarse_clusters(["a", "b", "c"], torch.zeros(3, 3)) == (("a", "b", "c"),)
    found = coarse_clusters(["a", "b", "c"], torch.ones(3, 3))
    assert sorted(n for group in found for n in group) == ["a", "b", "c"]
    assert len(coarse_clusters(list("abcdef"), torch.ones(6, 6))) == 2, "the smallest of equally good numbers"
    with pytest.raises(ValueError, match="finite numbers >= 0"):
        coarse_clusters(["a", "b"], torch.full((2, 2), -0.1))
    for wrong in (NAN, math.inf):
        with pytest.raises(ValueError, match="finite numbers >= 0"):
            fine_clusters(["a", "b"], torch.full((2, 2), wrong))
    for names, size in ((["a", "a"], 2), (["a", "b"], 3)):
        with pytest.raises(ValueError, match="expected different names and N x N"):
            fine_clusters(names, torch.ones(size, size))
    with pytest.raises(ValueError, match="2 <= low <= high"):
        coarse_clusters(["a", "b"], torch.ones(2, 2), low=1)


def test_coarse_clusters_are_two_to_four() -> None:
    assert coarse_clusters(["a", "b", "c"], blocks([2, 1], 0.9, 0.1)) == (("a", "b"), ("c",))
    names = [f"p{i}" for i in range(10)]
    five = blocks([2] * 5, 0.9, 0.1)
    assert len(coarse_clusters(names, five)) == 4
    assert len(coarse_clusters(names, five, high=6)) == 5
    assert len(coarse_clusters(names, blocks([5, 5], 0.9, 0.1), low=3)) == 3


def test_fine_clusters() -> None:
    S = torch.tensor([[1, 0.7, 0.5], [0.7, 1, 0.6], [0.5, 0.6, 1]])
    # a and b at 0.3; c to both on average (0.5 + 0.4) / 2 = 0.45
    assert fine_clusters(["a", "b", "c"], S, 0.2) == (("a",), ("b",), ("c",))
    assert fine_clusters(["a", "b", "c"], S) == (("a", "b"), ("c",))
    assert fine_clusters(["a", "b", "c"], S, 0.46) == (("a", "b", "c"),)
    assert fine_clusters(["c", "a", "b"], S[[2, 0, 1]][:, [2, 0, 1]]) == (("a", "b"), ("c",))
    assert fine_clusters(["a", "b"], S[:2, :2]) == (("a", "b"),)
    assert fine_clusters(["a", "c"], S[::2, ::2]) == (("a",), ("c",))
    assert fine_clusters(["a"], torch.ones(1, 1)) == (("a",),)
    assert fine_clusters([], torch.zeros(0, 0)) == ()


def test_groups_of_colnet() -> None:
    groups = task_groups({"c": "seg", "a": "seg", "b": "depth"})
    assert groups == {"depth": ("b",), "seg": ("a", "c")}


def test_scope_has_hysteresis_and_full_is_safe() -> None:
    seen = [NAN, 0.5, 0.59, 0.6, 0.5, 0.31, 0.29, 0.5, 0.7, NAN, 0.5]
    scope, found = "full", []
    for value in seen:
        scope = next_scope(value, scope)  # type: ignore[arg-type, assignment]
        found.append(scope[0])
    assert "".join(found) == "fffeeeffeff"
    assert next_scope(0.2, "full", enter=0.1, leave=0.0) == "encoder"
    assert [next_scope(x, "encoder", enter=1, leave=-1) for x in (-1, NAN)] == ["encoder", "full"]
    for wrong in ({"leave": -1.5}, {"enter": 0.2, "leave": 0.3}, {"current": "heads"}, {"enter": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            next_scope(0.5, **wrong)  # type: ignore[arg-type]


def test_alignment() -> None:
    assert alignment([0.5, NAN, -0.1, math.inf]) == pytest.approx(0.2)
    assert alignment(torch.tensor([0.25, 0.75])) == 0.5
    assert math.isnan(alignment([]))
