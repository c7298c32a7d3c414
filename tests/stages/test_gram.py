"""Gram matrices and minima over the simplex: against definitions, optimality conditions and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import gram as module
from fedloom.core.gram import (
    cancels,
    conflict_averse,
    conflict_free,
    gram,
    min_norm,
    nonzero,
    normalised,
    simplex_minimum,
)
from fedloom.core.updates import Updates


def draw(seed: int, k: int, d: int, special: str = "") -> Tensor:
    """Rows with a common part; some repeated, opposite, zero, on a grid, or of very different sizes."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(k, d)) + rng.normal() * rng.normal(size=d)
    if special == "repeated":
        X[-1] = X[0]
    elif special == "opposite":
        X[-1] = -X[0]
    elif special == "zero":
        X[0] = 0
    elif special == "grid":
        X = X.round()
    elif special == "sizes":
        X *= 10.0 ** rng.uniform(-6, 0, size=(k, 1))
    return torch.tensor(X)


cases = given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from(["", "repeated", "opposite", "zero", "grid", "sizes"]),
)


def simplex_weights(seed: int, k: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed + 1).dirichlet(np.ones(k)))


def test_gram_is_all_inner_products_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_VALUES", 16)  # several chunks
    X = draw(0, 3, 50).float()
    G = gram(Updates.of(X))
    assert G.dtype == torch.float64
    assert torch.equal(G, G.t())
    torch.testing.assert_close(G, X.double() @ X.double().t(), rtol=1e-13, atol=0)
    some = gram(Updates.of(X), [slice(3, 20), slice(31, 32)])
    Y = torch.cat([X[:, 3:20], X[:, 31:32]], dim=1).double()
    torch.testing.assert_close(some, Y @ Y.t(), rtol=1e-13, atol=1e-15)


def test_gram_of_a_mixing_is_the_gram_of_what_is_mixed() -> None:
    updates = Updates.of(draw(0, 3, 50)).mixed(draw(1, 3, 3))
    torch.testing.assert_close(gram(updates), updates.X @ updates.X.t(), rtol=1e-12, atol=1e-12)
    assert "X" not in Updates.of(draw(0, 3, 5)).mixed(torch.eye(3)).__dict__


def test_normalised() -> None:
    G, scale = normalised(torch.diag(torch.tensor([1.0, 3.0]).double()) * 1e-60)
    torch.testing.assert_close(G.diagonal().tolist(), [0.5, 1.5])
    assert scale == pytest.approx(2e-60)
    for k in (0, 2):
        zero, scale = normalised(torch.zeros(k, k).double())
        assert scale == 0
        assert not zero.any()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_what_cancels_is_below_a_millionth_of_its_parts(size: float) -> None:
    w = torch.tensor([0.5, 0.5]).double()
    for left, expected in ((1.9e-6, True), (2.1e-6, False)):
        x = size * torch.tensor([[1.0], [left - 1]]).double()
        assert cancels(x @ x.t(), w) is expected


def test_the_only_row_that_is_not_zero_counts_by_its_share() -> None:
    """g_0 is half of the row, so phi is c / 2 of its length."""
    w, lam = conflict_averse(torch.diag(torch.tensor([4.0, 0.0])).double(), torch.tensor([0.5, 0.5]).double(), 0.4)
    assert w.tolist() == [1, 0]
    assert lam == pytest.approx(0.2)


def test_nonzero_is_relative_to_the_largest_row() -> None:
    squares = torch.tensor([1e-30, 1e-60, 0.0, 1e-53], dtype=torch.float64)
    assert nonzero(torch.diag(squares)).tolist() == [True, False, False, True]
    assert nonzero(torch.zeros(2, 2).double()).tolist() == [False, False]
    assert nonzero(torch.zeros(0, 0).double()).tolist() == []


@cases
def test_quadratic_minimum_is_optimal(seed: int, k: int, d: int, special: str) -> None:
    X = draw(seed, k, d, special)
    Q, b = X @ X.t(), draw(seed + 7, 1, k)[0] * (seed % 3)
    w = simplex_minimum(Q, b)
    assert float(w.min()) >= 0
    assert float(w.sum()) == pytest.approx(1, abs=1e-12)
    slope = Q @ w + b
    size = Q.abs() @ w + b.abs()
    # Round-off of each row's own size, so that small rows are held to theirs; singular and badly scaled together, less.
    assert bool((w @ slope - slope <= (1e-10 if special == "sizes" else 1e-12) * (size + w @ size)).all())


@cases
def test_a_solution_nearby_is_a_good_start(seed: int, k: int, d: int, special: str) -> None:
    X = draw(seed, k, d, special)
    Q, b = X @ X.t(), draw(seed + 7, 1, k)[0]
    start = simplex_minimum(Q, 1.1 * b)
    a, c = simplex_minimum(Q, b), simplex_minimum(Q, b, start)
    assert float(a @ Q @ a / 2 + b @ a) == pytest.approx(float(c @ Q @ c / 2 + b @ c), rel=1e-10, abs=1e-10)


@cases
def test_minimum_norm_combination_agrees_with_every_row(seed: int, k: int, d: int, special: str) -> None:
    X = draw(seed, k, d, special)
    for unit in (True, False):
        q = min_norm(X @ X.t(), unit)
        kept = nonzero(X @ X.t())
        rows, u = X[kept], q @ X
        assert not q[~kept].any()
        if not len(rows):
            continue
        assert bool((rows @ u >= -1e-9 * rows.norm(dim=1) * rows.norm(dim=1).max()).all())
        if not unit:
            assert float(q.sum()) in (0, pytest.approx(1, abs=1e-12))
            assert float(u.norm()) <= float(rows.norm(dim=1).min()) * (1 + 1e-12)


@given(
    st.integers(0, 10_000),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from(["", "repeated", "opposite", "zero", "grid", "sizes"]),
    st.sampled_from([0.01, 0.2, 0.4, 0.8, 0.99]),
)
def test_conflict_averse_weights_are_optimal(seed: int, k: int, d: int, special: str, c: float) -> None:
    X, p = draw(seed, k, d, special), simplex_weights(seed, k)
    G = X @ X.t()
    w, lam = conflict_averse(G, p, c)
    kept = nonzero(G)
    if not bool(kept.any()):
        assert (float(w.sum()), lam) == (0, 0)
        return
    assert float(w.min()) >= 0
    assert float(w.sum()) == pytest.approx(1, abs=1e-12)
    assert not w[~kept].any()
    phi = c * math.sqrt(float(p @ G @ p))
    if lam == 0:
        # Nothing is better than a combination that vanishes, or the mean itself does.
        assert cancels(G, w) or cancels(G, p)
        return
    assert lam * math.sqrt(float(w @ G @ w)) == pytest.approx(phi)
    direction = p + lam * w
    # The optimum of max min <X_k, u> over the ball, and that of its dual, meet.
    worst = float((G @ direction)[kept].min())
    dual = float(w @ G @ p) + phi * math.sqrt(float(w @ G @ w))
    size = float(G.diagonal().max())
    assert worst == pytest.approx(dual, abs=1e-9 * size)
    assert worst >= float((G @ p)[kept].min()) - 1e-9 * size


@pytest.mark.parametrize(("apart", "found"), [(9e-7, False), (1.1e-6, True), (1e-3, True), (1.0, True)])
def test_a_direction_shorter_than_a_millionth_of_its_parts_is_none(apart: float, found: bool) -> None:
    X = torch.tensor([[1.0, apart], [-1.0, apart]], dtype=torch.float64)
    q = conflict_free(X @ X.t(), torch.tensor([0.5, 0.5]).double())
    assert bool(q.any()) is found
    if found:
        torch.testing.assert_close(q @ X, torch.tensor([0, apart]).double(), rtol=1e-3, atol=1e-9)


def test_a_combination_that_vanishes_leaves_the_mean() -> None:
    # The origin lies on an edge of the triangle, and no direction is better for all three.
    X = torch.tensor([[1.0, 0], [-1, 0], [0, 1]]).double()
    w, lam = conflict_averse(X @ X.t(), torch.full((3,), 1 / 3).double(), 0.4)
    assert lam == 0
    torch.testing.assert_close(w @ X, torch.zeros(2).double(), atol=1e-6, rtol=0)


def test_rows_that_do_not_count_are_left_out() -> None:
    X = draw(5, 3, 8)
    p = torch.tensor([0.5, 0.0, 0.5]).double()
    w, lam = conflict_averse(X @ X.t(), p, 0.4)
    v, mu = conflict_averse(X[[0, 2]] @ X[[0, 2]].t(), p[[0, 2]], 0.4)
    torch.testing.assert_close(w[[0, 2]], v)
    assert (float(w[1]), lam) == (0, pytest.approx(mu))


def test_many_rows() -> None:
    X = draw(9, 64, 500)
    w = simplex_minimum(X @ X.t())
    slope = X @ (w @ X)
    assert float(w @ slope - slope.min()) <= 1e-10 * float(slope.abs().max())
