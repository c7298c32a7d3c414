"""Similarities: by hand, row form against matrix form, and what cannot be judged.

Sketches: linear, the same everywhere, right on average, and as wrong as the formula says.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.layout import Block, Layout
from fedloom.methods.peers import similarity as module
from fedloom.peers import (
    Sketch,
    combined,
    cross_loss,
    disparity,
    feature_statistics,
    features,
    gradient,
    normalised,
    overlap,
    parameters,
    per_task,
    shared_columns,
    task_weights,
)

NAN, INF = math.nan, math.inf
ROWS = torch.tensor([[3.0, 4, 0], [4, 3, 0], [-3, -4, 0], [0, 0, 2], [0, 0, 0]])


def test_gradient_is_the_cosine() -> None:
    # 24 / 25; opposite; orthogonal; nothing
    assert gradient(ROWS[0], ROWS[1:], "cosine").tolist() == pytest.approx([0.96, -1, 0, 0])
    assert gradient(ROWS[0], ROWS[1:]).tolist() == pytest.approx([0.98, 0, 0.5, 0.5])
    S = gradient(ROWS)
    assert S.dtype == torch.float64
    assert torch.equal(S.diagonal(), torch.ones(5, dtype=torch.float64))


def test_cosines_of_parallel_rows_are_1_or_minus_1_at_most_in_spite_of_rounding() -> None:
    for seed in range(20):
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        cosines = gradient(x, torch.stack([x * scale for scale in (3, -3, 1 / 7, -1 / 7, 0.1, -0.1)]), "cosine")
        assert float(cosines.abs().max()) <= 1


def test_only_the_direction_counts() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(4, 50, generator=g)
    scale = torch.tensor([1e-12, 1.0, 1e3, 1e12])[:, None]
    torch.testing.assert_close(gradient(X * scale), gradient(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [gradient, parameters, overlap])
def test_rows_agree_with_the_matrix(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.rand(5, 37, generator=torch.Generator().manual_seed(1)) - 0.3
    S = function(X)  # type: ignore[operator]
    torch.testing.assert_close(S, S.t())
    monkeypatch.setattr(module, "_CHUNK", 50)  # several chunks
    for i in range(5):
        others = [j for j in range(5) if j != i]
        torch.testing.assert_close(function(X[i], X[others]), S[i, others])  # type: ignore[operator]
    assert function(X[0], X[1:2]).shape == (1,)  # type: ignore[operator]
    assert function(X[0], X[:0]).shape == (0,)  # type: ignore[operator]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_cannot_be_judged(bad: float) -> None:
    X = ROWS.clone()
    X[1, 1] = bad
    S = gradient(X)
    assert torch.isnan(S).tolist() == [[(i == 1) != (j == 1) for j in range(5)] for i in range(5)]
    assert torch.isnan(gradient(X[0], X[1:])).tolist() == [True, False, False, False]
    assert torch.isnan(gradient(X[1], ROWS)).all()


def test_parameters() -> None:
    a, b = torch.tensor([3.0, 4]), torch.tensor([[3.0, 4], [0, 0], [6, 8], [-3, -4]])
    assert parameters(a, b).tolist() == pytest.approx([1, 0.5, 1, 0])
    zero = torch.zeros(2)
    assert parameters(zero, zero[None]).tolist() == [0.5]


def test_features() -> None:
    pooled = torch.tensor([[1.0, 0], [3, 0]])
    own = feature_statistics(pooled)
    assert own.tolist() == [[2, 0], [1, 0]]
    # means (0, 1): orthogonal, 1/2; deviations (2, 0): parallel, 1
    other = torch.tensor([[[0.0, 1], [2, 0]]])
    assert features(own, other).tolist() == pytest.approx([0.75])
    both = torch.cat([own[None], other.double()])
    torch.testing.assert_close(features(both), torch.tensor([[1, 0.75], [0.75, 1]]).double())
    with pytest.raises(ValueError, match="at least one sample"):
        feature_statistics(torch.zeros(0, 4))


def test_overlap_of_the_thesis_example() -> None:
    W = task_weights({"b": {"depth": 7.0, "seg": 3.0}, "a": {"depth": 0.7, "normal": 0.3}, "c": {"seg": 1.0}})
    torch.testing.assert_close(W, torch.tensor([[0.7, 0.3, 0], [0.7, 0, 0.3], [0, 0, 1]], dtype=torch.float64))
    expected = torch.tensor([[1, 0.7, 0], [0.7, 1, 0.3], [0, 0.3, 1]], dtype=torch.float64)
    torch.testing.assert_close(overlap(W), expected)
    assert overlap(W[0], W[1:]).tolist() == pytest.approx([0.7, 0])
    assert task_weights({}).shape == (0, 0)
    # Loss weights that do not sum to 1 give the same.
    assert task_weights({"a": {"x": 0.0, "y": 3.0}}).tolist() == [[0, 1]]
    torch.testing.assert_close(task_weights({"a": {"x": 2.0, "y": 2.0}})[0], torch.tensor([0.5, 0.5]).double())
    for wrong in ({}, {"x": 0.0}, {"x": -1.0, "y": 2.0}):
        with pytest.raises(ValueError, match="tasks of 'a'"):
            task_weights({"a": wrong})


def test_cross_loss() -> None:
    losses = torch.tensor([0.0, 1.0, INF, NAN])
    assert cross_loss(losses).tolist() == pytest.approx([1, 0.367879, 0, NAN], abs=1e-6, nan_ok=True)
    assert disparity(losses).tolist() == pytest.approx([0, 0.632121, NAN, NAN], abs=1e-6, nan_ok=True)
    assert cross_loss(losses, "negative").tolist() == pytest.approx([0, -1, -INF, NAN], nan_ok=True)
    assert cross_loss(losses, "inverse").tolist() == pytest.approx([100, 1 / 1.01, 0, NAN], nan_ok=True)


def test_the_task_with_the_largest_unit_does_not_decide() -> None:
    # Candidate 0 is better at the task in small units by far, worse at the other by a little.
    losses = torch.tensor([[0.001, 1010.0], [0.004, 1000.0], [0.002, 1000.0]])
    both = torch.tensor([0.5, 0.5])
    found = per_task(losses, both)
    assert found.tolist() == pytest.approx([0.5 * 0.5 + 0.505, 0.5 * 2 + 0.5, 0.5 + 0.5])
    assert per_task(losses, both, relative=False).tolist() == pytest.approx((losses @ both).tolist())
    assert int((losses @ both).argmin()) == 2
    assert int(found.argmin()) == 0
    # Tasks that the peer does not have play no part.
    assert per_task(torch.tensor([[1.0, NAN], [2.0, INF]]), torch.tensor([3.0, 0.0])).tolist() == [1.0, 2.0]
    assert per_task(torch.tensor([[0.0], [0.0]]), torch.ones(1)).tolist() == [0, 0]
    assert per_task(torch.tensor([[0.0, 6], [0, 3], [5, 3]]), torch.tensor([3.0, 1])).tolist() == [0.5, 0.25, 4.0]
    assert per_task(torch.tensor([[7.0]]), torch.ones(1)).tolist() == [1]
    assert per_task(torch.tensor([[1.0], [1e20], [2.0]]), torch.ones(1)).tolist() == pytest.approx([0.5, 5e19, 1])
    assert per_task(torch.zeros(0, 2), both).shape == (0,)


def test_normalised_vector() -> None:
    S = torch.tensor([1.0, 2.0, 6.0, NAN])
    assert normalised(S, "min-max").tolist() == pytest.approx([0, 0.2, 1, NAN], nan_ok=True)
    # mean 3, variance (4 + 1 + 9) / 3
    sd = (14 / 3) ** 0.5
    assert normalised(S, "z-score").tolist() == pytest.approx([-2 / sd, -1 / sd, 3 / sd, NAN], nan_ok=True)
    assert torch.equal(normalised(S[:3], "none"), S[:3])
    for how in ("min-max", "z-score"):
        found = normalised(1e-15 * S.double(), how)  # type: ignore[arg-type]
        torch.testing.assert_close(found, normalised(S, how), equal_nan=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "flat"), [("min-max", 0.5), ("z-score", 0.0)])
def test_candidates_that_are_all_alike(how: str, flat: float) -> None:
    assert normalised(torch.full((3,), 0.1), how).tolist() == [flat] * 3  # type: ignore[arg-type]
    assert normalised(torch.zeros(3), how).tolist() == [flat] * 3  # type: ignore[arg-type]
    assert normalised(torch.tensor([7.0]), how).tolist() == [flat]  # type: ignore[arg-type]
    assert normalised(torch.zeros(0), how).shape == (0,)  # type: ignore[arg-type]
    assert torch.isnan(normalised(torch.tensor([NAN, NAN]), how)).all()  # type: ignore[arg-type]
    one = torch.ones(1, 1)
    assert torch.equal(normalised(one, how), one.double())  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["min-max", "z-score"])
def test_normalised_matrix_is_row_by_row_without_self(how: str) -> None:
    S = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)).fill_diagonal_(1.0)
    S[0, 3] = S[0, 4] = S[2, 1] = NAN
    S[3] *= 1e13  # what is round-off in one row is not in another
    S[3, 3] = 1.0
    found = normalised(S, how)  # type: ignore[arg-type]
    assert torch.equal(found.diagonal(), torch.ones(5).double())
    for i in range(5):
        others = [j for j in range(5) if j != i]
        expected = normalised(S[i, others], how)  # type: ignore[arg-type]
        torch.testing.assert_close(found[i, others], expected, equal_nan=True)


def test_combined() -> None:
    parts = {"overlap": torch.tensor([1.0, 0.0]), "gradient": torch.tensor([0.6, 0.8])}
    assert combined(parts, {"overlap": 0.5, "gradient": 0.5}).tolist() == pytest.approx([0.8, 0.4])
    assert combined(parts, {"overlap": 3, "gradient": 1}).tolist() == pytest.approx([0.9, 0.2])
    assert combined(parts, {"gradient": 1}, "min-max").tolist() == [0, 1]
    mixed = combined(parts, {"overlap": 0.5, "gradient": 0.5}, {"gradient": "min-max"})
    assert mixed.tolist() == pytest.approx([0.5, 0.5])
    # One signal unknown: the whole is; but not if it does not count.
    parts["gradient"] = torch.tensor([NAN, 0.8])
    assert torch.isnan(combined(parts, {"overlap": 1, "gradient": 1})).tolist() == [True, False]
    assert combined(parts, {"overlap": 1, "gradient": 0}).tolist() == [1, 0]
    with pytest.raises(ValueError, match="'features' has a weight but no value; values: overlap, gradient"):
        combined(parts, {"features": 1})
    for weights in ({}, {"overlap": 0}, {"overlap": -1, "gradient": 2}):
        with pytest.raises(ValueError, match="with a positive sum"):
            combined(parts, weights)
    with pytest.raises(ValueError, match="one shape"):
        combined({"a": torch.ones(2), "b": torch.ones(3)}, {"a": 1, "b": 1})


def test_counters_and_statistics_are_not_compared() -> None:
    layout = Layout(
        (
            Block("encoder.w", (3,)),
            Block("encoder.bn.weight", (2,), role="norm", part="encoder", kind="batch-norm"),
            Block("heads.a.w", (2,), role="head", task="a"),
            Block("encoder.bn.running_mean", (2,), role="buffer", part="encoder"),
        )
    )
    part = shared_columns(layout)
    assert part.names == ("encoder.w", "encoder.bn.weight")
    # With a statistic of a hundred, opposite updates look alike.
    X = torch.tensor([[1.0, 0, 0, 0, 0, 5, 5, 100, 100], [-1, 0, 0, 0, 0, 5, 5, 100, 100]])
    assert float(gradient(X)[0, 1]) > 0.99
    assert float(gradient(layout.take(X, part))[0, 1]) == 0


def test_rows_too_short_to_be_measured_are_orthogonal_to_all() -> None:
    short, long = (torch.tensor(x, dtype=torch.float64) for x in ([1e-170], [[1e100]]))
    assert gradient(short, long, "cosine").tolist() == [0]


def test_wrong_shapes_and_words() -> None:
    with pytest.raises(ValueError, match="found shapes"):
        gradient(torch.ones(3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="found shapes"):
        gradient(torch.ones(3, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="found shapes"):
        gradient(torch.ones(3), torch.ones(2, 3, 1))
    with pytest.raises(ValueError, match="found shape"):
        gradient(torch.ones(3))
    wrong: Tensor = torch.ones(2, 2)
    for call in (
        lambda: gradient(wrong, scale="log"),  # type: ignore[arg-type]
        lambda: cross_loss(wrong, "log"),  # type: ignore[arg-type]
        lambda: normalised(wrong, "log"),  # type: ignore[arg-type]
        lambda: per_task(wrong, torch.zeros(2)),
        lambda: per_task(wrong, torch.ones(3)),
        lambda: per_task(wrong, torch.tensor([2.0, -1.0])),
        lambda: per_task(torch.ones(2), torch.ones(2)),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()


every_kind = pytest.mark.parametrize("kind", ["count", "rademacher", "gaussian"])


def vectors(d: int = 300) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(d, generator=g)
    return x, x + 0.5 * torch.randn(d, generator=g)


@every_kind
def test_linear(kind: str) -> None:
    x, y = vectors()
    S = Sketch(64, 5, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(S(2 * x - y), 2 * S(x) - S(y), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(S(torch.stack([x, y])), torch.stack([S(x), S(y)]))
    assert S(x).dtype == torch.float32
    assert not S(torch.zeros(300)).any()
    assert S(torch.zeros(0, 300)).shape == (0, 64)


@every_kind
def test_the_same_on_all_peers_and_another_for_another_seed(kind: str) -> None:
    x, _ = vectors()
    assert torch.equal(Sketch(64, 5, kind)(x), Sketch(64, 5, kind)(x.clone()))  # type: ignore[arg-type]
    assert not torch.equal(Sketch(64, 5, kind)(x), Sketch(64, 6, kind)(x))  # type: ignore[arg-type]


def test_pinned() -> None:
    # Peers of different versions must agree.
    assert Sketch(4, 1)(torch.arange(1.0, 9)).tolist() == [4, -8, 5, -1]
    assert (2 * Sketch(4, 1, "rademacher")(torch.arange(1.0, 9))).tolist() == [4, 6, 24, 6]


def variance_of(x: Tensor, y: Tensor, m: int, kind: str) -> float:
    """The variance of <Sx, Sy> over seeds, as `Sketch.error` states it."""
    x, y = x.double(), y.double()
    same = 0.0 if kind == "gaussian" else 2 * float((x.square() * y.square()).sum())
    return (float(x.square().sum() * y.square().sum() + (x @ y).square()) - same) / m


@every_kind
def test_right_on_average_with_the_variance_stated(kind: str) -> None:
    x, y = vectors(40)
    truth = float(x.double() @ y.double())
    found = np.array(
        [float(a @ b) for seed in range(3000) for a, b in [Sketch(16, seed, kind)(torch.stack([x, y]))]]  # type: ignore[arg-type]
    )
    variance = variance_of(x, y, 16, kind)
    assert abs(found.mean() - truth) < 4 * math.sqrt(variance / 3000)
    assert found.var() / variance == pytest.approx(1, abs=0.2)
    size = float(x.norm() * y.norm())
    assert variance <= 2 * size**2 / 16
    for delta in (0.3, 0.1):
        assert (abs(found - truth) >= Sketch(16).error(delta) * size).mean() <= delta


def test_one_entry_each_is_exact() -> None:
    # a random sign squared is 1
    one = torch.tensor([0.0, 3.0])
    assert variance_of(one, one, 4, "count") == 0
    assert all(float(Sketch(4, seed)(one).square().sum()) == 9 for seed in range(20))
    assert Sketch(1000).error(0.05) == pytest.approx(0.2)


@every_kind
def test_chunks_and_types(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = vectors(1000)
    S = Sketch(8, 2, kind)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_CHUNK", 128)
    monkeypatch.setattr(module, "_MAP_CHUNK", 8 * 128)
    small = S(x)
    # Coordinates that are zero change nothing, in whichever chunk they are.
    head = x.clone()
    head[500:] = 0
    tail = x - head
    torch.testing.assert_close(S(head) + S(tail), small, rtol=1e-4, atol=1e-4)
    assert torch.equal(S(x.double()), small)
    assert torch.equal(S(x.clone().requires_grad_()), small)
    assert not torch.equal(S(tail.roll(1)), S(tail))


def test_one_bad_value_shows() -> None:
    x, _ = vectors()
    x[7] = math.nan
    assert int(torch.isnan(Sketch(64)(x)).sum()) == 1


def test_wide_sketches() -> None:
    x, _ = vectors()
    assert Sketch(40_000)(x).count_nonzero() > 290  # beyond 16 bits; few collisions


def test_wrong_parameters() -> None:
    for make in (
        lambda: Sketch(0),
        lambda: Sketch(4, kind="hash"),  # type: ignore[arg-type]
        lambda: Sketch(4).error(0),
        lambda: Sketch(4).error(1),
        lambda: Sketch(4)(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()
