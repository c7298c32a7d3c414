"""Conflict-averse mixing at one peer: the three cases that blow it up, each safeguard alone, all of them off."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from fedloom.methods.peers.safeguards import bounded, equalising, shortening, smoothed
from fedloom.peers import Mixed, Safeguards, conflict_averse_mix
from fedloom.stages import CAGrad

OFF = Safeguards(**dict.fromkeys(Safeguards.model_fields))
NAN, INF = math.nan, math.inf


def rows(*values: list[float]) -> dict[str, Tensor]:
    return dict(zip("abcdef", map(torch.tensor, values), strict=False))


def random_rows(k: int = 4, d: int = 30, seed: int = 0) -> dict[str, Tensor]:
    X = torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return dict(zip("abcdef", X, strict=False))


def agrees(mixed: Mixed, given: dict[str, Tensor]) -> None:
    total = sum(c * given[name] for name, c in mixed.coefficients.items() if c)
    torch.testing.assert_close(mixed.update, total if isinstance(total, Tensor) else torch.zeros_like(mixed.update))
    assert not mixed.weights or math.fsum(mixed.weights.values()) == pytest.approx(1)
    json.dumps(mixed.acted, allow_nan=False)


@pytest.mark.parametrize("c", [0.0, 0.4, 0.9])
def test_without_safeguards_it_is_cagrad(c: float) -> None:
    given = random_rows()
    expected = CAGrad(c, "1+c^2").on(torch.stack(list(given.values())))[0][0]
    mixed = conflict_averse_mix("b", given, c=c, safeguards=OFF)
    torch.testing.assert_close(mixed.update, expected)
    assert mixed.acted == {}
    agrees(mixed, given)
    added = conflict_averse_mix("b", given, c=c, add_own=True, safeguards=OFF)
    torch.testing.assert_close(added.update, given["b"] + expected)
    agrees(added, given)


# The golden cases


def test_loss_scales_of_one_to_a_thousand() -> None:
    given = rows([1.0, 0.0], [-1000.0, 0.0])
    # g_0 = -499.5; the row that is worst off is the own one, so w = (1, 0) and U = (-499.5 + 0.4 * 499.5) / 1.16
    off = conflict_averse_mix("a", given, safeguards=OFF)
    assert off.update.tolist() == pytest.approx([-258.362069, 0])
    assert off.weights == pytest.approx({"a": 1, "b": 0})
    # Shortened to 10: g_0 = -4.5
    clip = conflict_averse_mix("a", given, safeguards=OFF.model_copy(update={"clip": 10.0}))
    assert clip.update.tolist() == pytest.approx([-2.7 / 1.16, 0])
    release = conflict_averse_mix("a", given, rescale="1.5+c^2", safeguards=OFF.model_copy(update={"clip": 10}))
    assert release.update.tolist() == pytest.approx([-2.7 / 1.66, 0])
    assert clip.acted == {"clip": {"b": pytest.approx(0.01)}}
    # Of one length: exactly opposing.
    policy = OFF.model_copy(update={"normalise": "own-norm"})
    same = conflict_averse_mix("a", given, safeguards=policy)
    assert same.update.tolist() == pytest.approx([0, 0], abs=1e-7)
    assert same.acted == {"normalise": {"a": 1.0, "b": pytest.approx(0.001)}}
    # Of length 1 (section 6.3.3): neither counts more, and the step is as short.
    unit = conflict_averse_mix(
        "a", rows([3.0, 0.0], [0.0, 500.0]), safeguards=OFF.model_copy(update={"normalise": "unit-norm"})
    )
    assert unit.update.tolist() == pytest.approx([0.7 / 1.16, 0.7 / 1.16])
    assert unit.acted == {"normalise": {"a": pytest.approx(1 / 3), "b": pytest.approx(0.002)}}
    for mixed in (off, clip, same):
        agrees(mixed, given)
    # Whatever the unit of a neighbour's loss, the result is the same.
    for scale in (1e-6, 1.0, 1e6):
        scaled = {"a": torch.tensor([1.0, 0.0]), "b": scale * torch.tensor([0.6, 0.8])}
        found = conflict_averse_mix("a", scaled, safeguards=Safeguards(normalise="own-norm"))
        assert found.update.tolist() == pytest.approx([0.965517, 0.482759], abs=1e-3)


@pytest.mark.parametrize("policy", [OFF, Safeguards(), Safeguards(normalise="own-norm", ridge=0.1)], ids=repr)
def test_exactly_opposing_updates(policy: Safeguards) -> None:
    given = rows([1.0, 2.0], [-1.0, -2.0])
    mixed = conflict_averse_mix("a", given, safeguards=policy)
    assert mixed.update.tolist() == [0, 0]
    agrees(mixed, given)
    # A third that is orthogonal is all that is left: g_0 is a third of it, the rest is c |g_0| long at most.
    three = {**given, "c": torch.tensor([2.0, -1.0])}
    mixed = conflict_averse_mix("a", three, safeguards=policy)
    agrees(mixed, three)
    assert float(mixed.update @ three["c"]) > 0
    assert float(mixed.update.norm()) <= 1.4 / 1.16 * 5**0.5 / 3 + 1e-6


def test_almost_opposing_updates_are_not_blown_up() -> None:
    given = rows([1.0, 1e-4], [-1.0, 1e-4])
    off = conflict_averse_mix("a", given, safeguards=OFF)
    ridged = conflict_averse_mix("a", given, safeguards=OFF.model_copy(update={"ridge": 0.001}))
    # g_0 = g_w = (0, 1e-4): at full length 1.4 of it; the ridge's norm is sqrt(1e-8 + 1e-3 / 2) instead of 1e-4
    assert off.update.tolist() == pytest.approx([0, 1.4e-4 / 1.16])
    assert ridged.update.tolist() == pytest.approx([0, 1e-4 * (1 + 0.4e-4 / math.sqrt(1e-8 + 5e-4)) / 1.16], rel=1e-5)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_are_not_finite(bad: float) -> None:
    given = rows([1.0, 0.0], [0.0, 1.0], [bad, 1.0])
    mixed = conflict_averse_mix("a", given)
    clean = conflict_averse_mix("a", {name: given[name] for name in "ab"})
    assert torch.equal(mixed.update, clean.update)
    assert mixed.weights == clean.weights
    assert mixed.coefficients == {**clean.coefficients, "c": 0.0}
    assert mixed.acted["nonfinite"] == {"left out": ["c"]}
    # The own row: what is left is the neighbours'.
    own = conflict_averse_mix("c", given)
    assert torch.equal(own.update, clean.update)
    assert conflict_averse_mix("c", {"c": given["c"], "a": given["a"]}).update.tolist() == [1, 0]
    alone = conflict_averse_mix("c", {"c": given["c"]})
    assert (alone.update.tolist(), alone.weights, alone.coefficients) == ([0, 0], {}, {"c": 0.0})
    # Off: it spreads.
    assert not torch.isfinite(conflict_averse_mix("a", given, safeguards=OFF).update).all()


def test_where_nothing_needs_a_safeguard_none_acts() -> None:
    """Equal lengths at a right angle: equal weights, which neither the ridge nor old weights move."""
    policy = Safeguards(normalise="own-norm", clip_result=2.0)
    mixed = conflict_averse_mix("a", rows([2.0, 0.0], [0.0, 2.0]), safeguards=policy, before={"a": 0.5, "b": 0.5})
    assert mixed.acted == {}
    assert mixed.update.tolist() == pytest.approx([1.4 / 1.16, 1.4 / 1.16], rel=1e-3)


def test_updates_too_long_for_float32_squares() -> None:
    given = rows([1.0, 0.0], [0.0, 1e30])
    mixed = conflict_averse_mix("a", given, safeguards=OFF.model_copy(update={"clip": 1.0}))
    expected = conflict_averse_mix("a", rows([1.0, 0.0], [0.0, 1.0]), safeguards=OFF)
    torch.testing.assert_close(mixed.update, expected.update)


def test_finite_rows_whose_products_are_not_count_alike() -> None:
    """1e200 squared is no float64. All rows count alike, and nothing is added along g_w."""
    given = dict(zip("ab", 1e200 * torch.eye(2, dtype=torch.float64), strict=True))
    mixed = conflict_averse_mix("a", given, safeguards=Safeguards(clip=None, bounds=None))
    assert mixed.weights == {"a": 0.5, "b": 0.5}
    assert mixed.update.tolist() == pytest.approx([0.5e200 / 1.16, 0.5e200 / 1.16])
    assert mixed.acted["nonfinite"] == {"equal weights": True}
    assert conflict_averse_mix("a", given, safeguards=OFF).acted == {}


# Each safeguard


def test_equalising_and_shortening() -> None:
    lengths = torch.tensor([2.0, 4.0, 0.0, INF])
    assert equalising(lengths, 0).tolist() == [1, 0.5, 1, 1]
    assert equalising(lengths, 2).tolist() == [1, 0.5, 1, 1]  # of 2 and 4 the lower median
    assert equalising(lengths[1:], None).tolist() == [1, 1, 1]
    assert equalising(torch.zeros(2), 0).tolist() == [1, 1]
    assert shortening(torch.tensor([0.0, 5, 10, 40]), 10.0).tolist() == [1, 1, 1, 0.25]


def test_rows_are_shortened_after_they_are_made_alike() -> None:
    """Own norm 5, others 40 and 2.5: all 5 long, then 2; so the mix is that of rows which are 2 long from the start."""
    given = {name: row.double() for name, row in rows([3.0, 4.0], [0.0, -40.0], [2.5, 0.0]).items()}
    by_hand = {"a": 2 / 5, "b": 2 / 40, "c": 2 / 2.5}
    short = {name: row * by_hand[name] for name, row in given.items()}
    policy = OFF.model_copy(update={"normalise": "own-norm", "clip": 2.0})
    mixed = conflict_averse_mix("a", given, safeguards=policy)
    expected = conflict_averse_mix("a", short, safeguards=OFF)
    torch.testing.assert_close(mixed.update, expected.update)
    assert mixed.weights == pytest.approx(expected.weights)
    assert mixed.coefficients == pytest.approx({n: c * by_hand[n] for n, c in expected.coefficients.items()})
    assert mixed.acted["normalise"] == pytest.approx({"a": 1, "b": 1 / 8, "c": 2})
    assert mixed.acted["clip"] == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.4})


def test_bounded() -> None:
    w = torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64)
    assert bounded(w, 0.0, 1.0) is w
    assert bounded(w, float(w.min()), float(w.max())) is w, "also at the bounds"
    # 0.6 is the limit for the first; 0.15 is added to the others
    assert bounded(w, 0.1, 0.6).tolist() == pytest.approx([0.6, 0.25, 0.15])
    assert bounded(torch.tensor([1.5, -0.5]).double()).tolist() == pytest.approx([1, 0])
    assert bounded(torch.tensor([0.6, 0.6]).double()).tolist() == pytest.approx([0.5, 0.5])
    for far in (-0.9, 3.0, 0.2, -100.0):
        apart = torch.tensor([far, far, far + 0.3], dtype=torch.float64)
        assert bounded(apart).tolist() == pytest.approx([0.7 / 3, 0.7 / 3, 1.6 / 3])
    for low, high in ((0.4, 1.0), (0.0, 0.3)):  # three weights cannot satisfy that
        assert bounded(w, low, high).tolist() == pytest.approx([1 / 3] * 3)


def test_bounds_limit_what_one_neighbour_counts() -> None:
    given = rows([1.0, 0.0], [-1000.0, 0.0])
    mixed = conflict_averse_mix("a", given, safeguards=OFF.model_copy(update={"bounds": (0.2, 0.8)}))
    assert mixed.weights == pytest.approx({"a": 0.8, "b": 0.2})
    assert mixed.acted["bounds"]["from"] == pytest.approx({"a": 1, "b": 0})
    agrees(mixed, given)


def test_smoothed() -> None:
    w = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert smoothed(w, ["a", "b"], {"a": 0.0, "b": 1.0}, 0.9).tolist() == pytest.approx([0.1, 0.9])
    # b is new; c has left
    w = torch.tensor([0.2, 0.8], dtype=torch.float64)
    assert smoothed(w, ["a", "b"], {"a": 0.5, "c": 0.5}, 0.9).tolist() == pytest.approx([0.47 / 1.27, 0.8 / 1.27])
    assert smoothed(w, ["a", "b"], {"a": 0.5, "b": 0.5}, 0.0).tolist() == pytest.approx([0.2, 0.8])
    assert smoothed(0 * w, ["a", "b"], {"a": 0.0, "b": 0.0}, 0.9).tolist() == [0, 0]


def test_weights_move_slowly_over_rounds() -> None:
    given = rows([1.0, 0.0], [-1000.0, 0.0])
    policy = OFF.model_copy(update={"ema": 0.9})
    before: dict[str, float] = {"a": 0.0, "b": 1.0}
    seen = []
    for _ in range(3):
        mixed = conflict_averse_mix("a", given, safeguards=policy, before=before)
        before = mixed.weights
        seen.append(before["a"])
        assert "ema" in mixed.acted
    assert seen == pytest.approx([0.1, 0.19, 0.271])
    first = conflict_averse_mix("a", given, safeguards=policy)
    assert (first.weights, first.acted) == (pytest.approx({"a": 1, "b": 0}), {})


def test_ridge_draws_to_equal_weights() -> None:
    given = random_rows(seed=3)
    given["a"] = given["a"] * 3
    apart = []
    for ridge in (None, 1e-3, 1.0, 1e3):
        mixed = conflict_averse_mix("a", given, safeguards=OFF.model_copy(update={"ridge": ridge}))
        apart.append(sum((w - 0.25) ** 2 for w in mixed.weights.values()))
        agrees(mixed, given)
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 0.01
    assert apart[-1] < 1e-4


def test_the_result_is_shortened() -> None:
    given = random_rows()
    policy = OFF.model_copy(update={"clip_result": 0.5})
    few = {name: row / 100 for name, row in given.items()}  # shorter than that already
    unchanged = conflict_averse_mix("a", few, safeguards=policy)
    assert unchanged.acted == {}
    assert 0.01 < float(unchanged.update.norm()) < 0.5
    mixed = conflict_averse_mix("a", given, add_own=True, safeguards=policy)
    whole = conflict_averse_mix("a", given, add_own=True, safeguards=OFF)
    assert float(mixed.update.norm()) == pytest.approx(0.5)
    assert mixed.acted["clip_result"] == pytest.approx(0.5 / float(whole.update.norm()))
    torch.testing.assert_close(mixed.update * float(whole.update.norm()) / 0.5, whole.update)
    agrees(mixed, given)


# Edges


@pytest.mark.parametrize("add_own", [True, False])
def test_alone_and_in_silence(add_own: bool) -> None:
    x = torch.tensor([0.3, -0.7])
    assert torch.equal(conflict_averse_mix("a", {"a": x}, add_own=add_own).update, x)
    zero = conflict_averse_mix("a", rows([0.0, 0.0], [0.0, 0.0]), add_own=add_own)
    assert zero.update.tolist() == [0, 0]
    assert zero.weights == pytest.approx({"a": 0.5, "b": 0.5})
    # Nothing has a direction, so what is left of U is the plain mean, divided by 1 + c^2.
    assert zero.coefficients == pytest.approx({"a": 0.5 / 1.16 + add_own, "b": 0.5 / 1.16})


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an update of peer 'z' itself, found those of \['a'\]"):
        conflict_averse_mix("z", {"a": torch.ones(2)})
    for wrong in ((0.5, 0.2), (0.5, 0.5), (-0.1, 1.0), (0.0, 1.1)):
        with pytest.raises(ValueError, match="bounds: expected"):
            Safeguards(bounds=wrong)


def test_no_gram_matrix_alone_makes_the_mix_long() -> None:
    """Rows that almost cancel, of lengths 1e-3 to 1e3, without a safeguard: |U| <= (1 + c) / (1 + c^2) |mean|.

    So what diverges without protection are steps that are too long (`add_own`, other units), not the solver.
    """
    off = Safeguards(nonfinite=None, clip=None, ridge=None, bounds=None, ema=None)
    g = torch.Generator().manual_seed(0)
    ratios = []
    for case in range(60):
        v, noise = torch.randn(2, 8, generator=g, dtype=torch.float64)
        scales = [1, -1, 1000, -1000, 1e-3, -1e-3][: 2 + case % 5]
        rows = {str(i): s * v + 10.0 ** -(3 + case % 6) * noise.roll(i) for i, s in enumerate(scales)}
        mean = torch.stack(list(rows.values())).mean(0).norm()
        ratios.append(float(conflict_averse_mix("0", rows, safeguards=off).update.norm() / mean))
    assert 1.0 < max(ratios) <= 1.4 / 1.16 + 1e-6


def test_what_a_ridge_prevents_is_told() -> None:
    opposing = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([-1.0, -2.0])}
    assert "ridge" in conflict_averse_mix("a", opposing).acted
    assert "ridge" not in conflict_averse_mix("a", {**opposing, "b": torch.tensor([2.0, 1.0])}).acted


@pytest.mark.parametrize(
    ("n", "low", "high"), [(0, 0.0, 1.0), (1, 0.0, 1.0), (2, 0.5, 1.0), (3, 0.4, 1.0), (4, 0.0, 0.25)]
)
def test_weights_are_equal_where_bounds_leave_no_choice(n: int, low: float, high: float) -> None:
    found = bounded(torch.linspace(0.1, 0.9, n).double(), low, high)
    assert found.tolist() == [1 / max(n, 1)] * n
