"""Metrics of task relatedness against brute force and known cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import nn

from fedloom.relatedness import (
    agreement,
    cosine,
    etran,
    etran_totals,
    fim,
    fisher_diagonal,
    logme,
    sign,
    symmetrised,
    wte,
    wte_embeddings,
)
from fedloom.study.relatedness import plan, standardised

ROWS = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]])


# Task vectors


def test_sign_and_cosine() -> None:
    S, C = sign(ROWS), cosine(ROWS)
    assert [S[0, 1], S[0, 2], S[1, 2]] == pytest.approx([0.25, 0.5, 0.375])
    assert [C[0, 1], C[0, 2], C[1, 2]] == pytest.approx([-8 / 126**0.5, 2 / 252**0.5, -4 / 162**0.5])
    same = torch.stack([ROWS[0], 2 * ROWS[0], -ROWS[0], torch.zeros(4)])
    for scale in (1, 1e-3):
        assert cosine(scale * same).tolist() == pytest.approx(
            np.array([[1, 1, -1, 0], [1, 1, -1, 0], [-1, -1, 1, 0], [0, 0, 0, 0]])  # type: ignore[arg-type]
        )


def test_no_cosine_leaves_its_range_by_rounding() -> None:
    x = torch.randn(200, 7, generator=torch.Generator().manual_seed(0))
    C = cosine(torch.cat([x, -x, 3 * x, -7 * x]))
    assert (float(C.min()), float(C.max())) == (-1, 1)


# LogME


def evidence(F: np.ndarray, y: np.ndarray, alpha: float, beta: float) -> float:
    """log p(y) of y ~ N(0, 1/beta I + F F' / alpha), per sample: the marginal itself, without the formula of LogME."""
    n = len(F)
    cov = np.eye(n) / beta + F @ F.T / alpha
    return float(stats.multivariate_normal(np.zeros(n), cov, allow_singular=True).logpdf(y)) / n


def best(F: np.ndarray, y: np.ndarray) -> float:
    """The maximum over alpha and beta, by a grid and Nelder-Mead."""

    def loss(x: np.ndarray) -> float:
        return -evidence(F, y, math.exp(x[0]), math.exp(x[1]))

    starts = [np.array([a, b]) for a in (-3.0, 0.0, 3.0, 7.0) for b in (-1.0, 1.0, 4.0)]
    start = min(starts, key=loss)
    return -float(optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12}).fun)


def problem(n: int, D: int, seed: int, rank: int | None = None, noise: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    F = chance.normal(size=(n, D))
    if rank is not None:
        F = chance.normal(size=(n, rank)) @ chance.normal(size=(rank, D))
    return F, F @ chance.normal(size=D) / D**0.5 + noise * chance.normal(size=n)


@pytest.mark.parametrize(("n", "D", "rank"), [(40, 5, None), (20, 30, None), (30, 12, 4), (12, 40, 5)])
def test_logme_is_the_largest_evidence(n: int, D: int, rank: int | None) -> None:
    for seed in range(3):
        F, y = problem(n, D, seed, rank)
        assert logme(F, y) == pytest.approx(best(standardised(F), y), abs=1e-5)


def test_targets_are_finite_and_as_many_as_samples() -> None:
    F, y = problem(10, 3, 0)
    for wrong in (y[:9], np.where(np.arange(10) == 4, np.nan, y), np.where(np.arange(10) == 4, np.inf, y)):
        with pytest.raises(ValueError, match="targets: expected 10 finite values"):
            logme(F, wrong)


def test_features_that_say_nothing_of_a_target_leave_the_evidence_of_noise() -> None:
    basis = np.linalg.qr(np.column_stack([np.ones(30), np.random.default_rng(0).normal(size=(30, 5))]))[0][:, 1:]
    y = 30 * basis[:, 4]
    assert logme(basis[:, :4], y) == pytest.approx(-math.log(2 * math.pi * np.mean(y**2)) / 2 - 0.5, abs=1e-5)


@pytest.mark.parametrize("scale", [1e-9, 1e12])
def test_logme_does_not_depend_on_the_scale_of_the_features(scale: float) -> None:
    F, y = problem(40, 6, 3)
    assert logme(scale * F, y) == pytest.approx(logme(F, y), abs=1e-9)


def test_logme_of_classes_is_the_mean_over_indicators() -> None:
    F, y = problem(40, 6, 0)
    labels = np.digitize(y, [-0.5, 0.5])
    Z = (F - F.mean(0)) / F.std(0)
    expected = np.mean([best(Z, (labels == c).astype(float)) for c in range(3)])
    assert logme(F, labels) == pytest.approx(expected, abs=1e-5)
    assert logme(torch.tensor(F), torch.tensor(labels + 7)) == logme(F, labels)
    Y = np.stack([(labels == c).astype(float) for c in range(3)], axis=1)
    assert logme(F, Y) == pytest.approx(logme(F, labels))


def test_what_varies_by_rounding_beside_another_feature_is_constant() -> None:
    F = np.array([[0.0, 1.0, 7.0], [2e6, 1.0 + 2e-7, 8.0]])
    assert standardised(F).tolist() == [[-1, 0, -1], [1, 0, 1]]
    assert standardised(F[:, 1:]) == pytest.approx(np.array([[-1.0, -1], [1, 1]]))


def test_logme_knows_better_features() -> None:
    F, y = problem(60, 6, 1)
    labels = (y > 0).astype(int)
    chance = np.random.default_rng(0)
    assert logme(F, labels) > logme(chance.normal(size=F.shape), labels) > -10
    order = chance.permutation(60)
    assert logme(F[order], labels[order]) == pytest.approx(logme(F, labels))
    assert logme(100 * F + 3, labels) == pytest.approx(logme(F, labels))


def test_logme_of_degenerate_data() -> None:
    F = problem(10, 3, 0)[0]
    assert math.isnan(logme(F, np.zeros(10, dtype=int)))
    assert math.isnan(logme(F, np.ones(10)))
    assert math.isnan(logme(F[:0], np.zeros(0, dtype=int)))
    assert math.isfinite(logme(np.zeros((10, 3)), np.arange(10) % 2))
    assert math.isfinite(logme(np.eye(10), np.arange(10) % 2))
    assert math.isfinite(logme(np.arange(10)[:, None] % 2 * 1.0, np.arange(10) % 2))
    with pytest.raises(ValueError, match="labels"):
        logme(F, np.zeros(9, dtype=int))
    with pytest.raises(ValueError, match="nan"):
        logme(F * np.nan, np.arange(10) % 2)


# ETran


def test_etran_golden_values() -> None:
    F = np.array([[0.0, 0.0], [math.log(3), 0.0]])
    assert etran(F, np.array([0, 1])).energy == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert etran(1000 + F, np.array([0, 1])).energy == pytest.approx(1000 + 1.5 * math.log(2))


def test_etran_classes_are_discriminant_analysis() -> None:
    """Against densities of normal distributions with one covariance."""
    F, y = problem(50, 4, 3)
    labels = np.digitize(y, [-0.4, 0.6])
    means = np.stack([F[labels == c].mean(0) for c in range(3)])
    inside = F - means[labels]
    S = inside.T @ inside / 50
    S = 0.9 * S + 0.1 * np.trace(S) / 4 * np.eye(4)
    log_p = np.stack(
        [stats.multivariate_normal(means[c], S).logpdf(F) + math.log((labels == c).mean()) for c in range(3)], 1
    )
    log_p -= np.logaddexp.reduce(log_p, axis=1)[:, None]
    assert etran(F, labels, shrinkage=0.1).labels == pytest.approx(log_p[np.arange(50), labels].mean())


def test_etran_tells_good_features_from_bad_ones() -> None:
    F, y = problem(60, 5, 1)
    bad = np.random.default_rng(5).normal(size=F.shape)
    for labels in ((y > 0).astype(int), y):
        assert etran(F, labels, energy_kept=1).labels > etran(bad, labels, energy_kept=1).labels
    wide = np.random.default_rng(6).normal(size=(20, 100))
    assert math.isfinite(etran(wide, np.arange(20) % 3).labels)
    exact = F @ np.arange(5.0)
    assert etran(F, exact, energy_kept=1).labels == pytest.approx(0, abs=1e-20)
    assert etran(F, exact, energy_kept=0.1).labels < -0.1
    for labels in ((y > 0).astype(int), y):
        for scale in (1e-14, 1e6):
            assert etran(scale * F, labels).labels == pytest.approx(etran(F, labels).labels)
    for wrong in ({"shrinkage": 0}, {"shrinkage": 1.1}, {"energy_kept": 0}, {"energy_kept": 1.1}):
        with pytest.raises(ValueError, match="expected 0 < shrinkage, energy_kept <= 1"):
            etran(F, y, **wrong)
    assert math.isfinite(etran(F, y, 1, 1).labels)


def test_etran_of_numbers_keeps_as_many_directions_as_hold_the_share() -> None:
    """Orthogonal features of squares 36, 9, 4 and 1 to 50; the targets have 1 in each direction."""
    basis = np.linalg.qr(np.column_stack([np.ones(8), np.random.default_rng(0).normal(size=(8, 4))]))[0][:, 1:]
    F, y = basis * [6, 3, 2, 1] + 5, basis.sum(1) - 2
    for kept, count in ((0.5, 1), (0.72, 1), (0.73, 2), (0.9, 2), (0.91, 3), (0.98, 3), (0.99, 4), (1, 4)):
        assert etran(F, y, energy_kept=kept).labels == pytest.approx(-(4 - count) / 8), kept


def test_etran_of_degenerate_data() -> None:
    F = problem(10, 3, 0)[0]
    assert math.isnan(etran(F, np.zeros(10, dtype=int)).labels)
    assert etran(np.zeros((4, 2)), np.array([0, 0, 0, 1])).labels == pytest.approx(
        0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    )
    assert math.isfinite(etran(np.eye(4), np.array([0, 0, 1, 1])).labels)
    for D in (1, 3):  # no spread inside the classes: that of all samples, 1 / D, takes its place
        F = np.eye(1, D) * np.array([[-1.0], [1]])
        assert etran(F, np.array([0, 1]), shrinkage=1).labels == pytest.approx(-math.log1p(math.exp(-2 * D)))
    assert etran(np.zeros((4, 2)), np.array([0.0, 0, 0, 2])).labels == pytest.approx(-0.75)


def test_etran_totals() -> None:
    energy = np.array([[1.0, 5], [3, 5], [2, 5]])
    labels = np.array([[-1.0, -3], [-1, -2], [-2, -1]])
    for scale in (0.01, 1, 100):
        assert etran_totals(scale * energy, scale * labels) == pytest.approx(np.array([[1, 0], [2, 0.5], [0.5, 1]]))


# Fisher information


def test_empirical_fisher_of_logistic_regression() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    x, y = torch.randn(10, 3), torch.randint(0, 4, (10,))
    p = model(x).softmax(1)
    slope = (nn.functional.one_hot(y, 4) - p).double()
    weight = ((slope[:, :, None] * x.double()[:, None]) ** 2).mean(0).reshape(-1)
    expected = torch.cat([weight, (slope**2).mean(0)]).detach()
    model.train()
    found = fisher_diagonal(model, [(x[:7], y[:7]), (x[7:], y[7:])], at_once=4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    assert model.training
    torch.testing.assert_close(fisher_diagonal(model, [(x, y)], parameters=["b*"]), found[12:], rtol=1e-5, atol=1e-8)
    one = fisher_diagonal(model, [(x[:1], y[:1])])
    torch.testing.assert_close(one[12:], slope[0].detach() ** 2, rtol=1e-4, atol=1e-7)
    assert not fisher_diagonal(model, []).any()
    with pytest.raises(ValueError, match="no parameter"):
        fisher_diagonal(model, [(x, y)], parameters=["encoder.*"])


def test_true_fisher_draws_from_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    x = torch.randn(4, 2)
    p = model(x).softmax(1).detach().double()
    expected = (p * (1 - p)).mean(0)  # of the bias: the variance of each indicator
    nothing = torch.zeros(8000, dtype=torch.int64)
    found = fisher_diagonal(model, [(x.repeat(2000, 1), nothing)], "true", parameters=["bias"], at_once=1000)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.01)
    # of dense outputs, the sum over the positions, each with a draw of its own
    dense = nn.Conv2d(2, 3, 1)
    nn.init.zeros_(dense.weight)
    p = dense.bias.softmax(0).detach().double()
    maps = (torch.zeros(2000, 2, 2, 3), nothing[:2000])
    found = [
        fisher_diagonal(dense, [maps], "true", parameters=["bias"], **seed) for seed in ({}, {"seed": 0}, {"seed": 1})
    ]
    torch.testing.assert_close(found[0], 6 * p * (1 - p), rtol=0.1, atol=0.01)
    assert found[0].equal(found[1])
    assert not found[0].equal(found[2])
    # a Gaussian with variance 1: mean x_i^2 of the weights, whatever they are
    model = nn.Linear(2, 1)
    found = fisher_diagonal(
        model, [(x.repeat(2000, 1), torch.zeros(8000))], "true", likelihood="gaussian", at_once=1000
    )
    torch.testing.assert_close(found, torch.tensor([*(x**2).mean(0).tolist(), 1.0]).double(), rtol=0.1, atol=0.01)


def test_fisher_of_dense_outputs_and_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1))
    x, y = torch.randn(3, 1, 4, 4), torch.randint(0, 3, (3, 4, 4))
    y[:, 0] = 255
    found = fisher_diagonal(model, [(x, y)], parameters=["0.*"])
    assert not found.requires_grad, "the other parameters are constants"
    model.eval()
    expected = torch.zeros(4, dtype=torch.float64)
    for a, b in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(a[None]), b[None], ignore_index=255, reduction="sum").backward()
        expected += torch.cat([p.grad.double().reshape(-1) ** 2 for p in model[0].parameters()]) / 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def test_similarity_of_fisher_diagonals() -> None:
    f = torch.tensor([[1.0, 2, 0, 0], [1, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]])
    S = fim(f)
    assert S.tolist() == pytest.approx(
        np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])  # type: ignore[arg-type]
    )
    a, b = torch.tensor([1.0, 3]), torch.tensor([3.0, 1])
    for scale in (0.01, 1):
        assert float(fim([scale * a, scale * b])[0, 1]) == pytest.approx(6 / 10)
    rows = torch.rand(30, 7, generator=torch.Generator().manual_seed(0))
    assert float(fim([*rows, *rows]).max()) <= 1


# Wasserstein task embedding


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_transport_plans(n: int, m: int, seed: int) -> None:
    """Marginals, and the cost of one-dimensional transport, where sorting is optimal."""
    chance = np.random.default_rng(seed)
    a, b = chance.normal(size=n), chance.normal(size=m)
    cost = (a[:, None] - b) ** 2
    P = plan(cost)
    assert P.min() >= 0
    assert P.sum(1) == pytest.approx(np.full(n, 1 / n))
    assert P.sum(0) == pytest.approx(np.full(m, 1 / m))
    spread = np.mean((np.repeat(np.sort(a), m) - np.repeat(np.sort(b), n)) ** 2)
    for scale in (1e-9, 1):
        assert (plan(scale * cost) * cost).sum() == pytest.approx(spread, abs=1e-9)


def blobs(seed: int, n: int = 20, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    return chance.normal(size=(n, 3)) + 2 * labels[:, None] + shift, labels


def test_scaling_gives_points_with_these_distances_about_the_origin() -> None:
    from fedloom.study.relatedness import _distances, _scaling

    points = np.random.default_rng(2).normal(size=(6, 3)) * [3, 2, 1] + 5
    for dims in (3, 4, 10):
        found = _scaling(np.sqrt(_distances(points, points)), dims)
        assert found.shape == (6, 3)
        assert found.mean(0) == pytest.approx(np.zeros(3), abs=1e-12)
        assert _distances(found, found) == pytest.approx(_distances(points, points))
    assert (np.diff((found**2).sum(0)) < 0).all(), "the widest direction first"
    assert np.array_equal(_scaling(np.sqrt(_distances(points, points)), 2), found[:, :2])
    assert _scaling(np.zeros((4, 4)), 10).shape == (4, 0)


def test_references_do_not_depend_on_the_order_or_on_a_rotation_of_the_labels() -> None:
    from fedloom.study.relatedness import _reference

    rng = np.random.default_rng(3)
    samples = np.column_stack([np.repeat(rng.normal(size=(5, 2)), 4, axis=0), rng.normal(size=(20, 3))])
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    turned = np.column_stack([samples[:, :2], samples[:, 2:] @ turn])
    for m in (1, 6, 20, 50):
        chosen = _reference(samples, 2, m, 0)
        assert len(chosen) == len(np.unique(chosen, axis=0)) == min(m, 20)
        at = [int(np.flatnonzero((samples == row).all(1))[0]) for row in chosen]
        assert np.array_equal(_reference(turned, 2, m, 0), turned[at])
        order = rng.permutation(20)
        assert {tuple(row) for row in _reference(samples[order], 2, m, 0)} == {tuple(row) for row in chosen}


def test_wte_of_identical_tasks_is_zero() -> None:
    x, y = blobs(0)
    order = np.random.default_rng(1).permutation(len(x))
    for m in (11, 20, 64):
        assert wte([x, x, x[order]], [y, y + 5, y[order]], reference=m).max() < 1e-6


def test_wte_of_a_shift_is_its_length() -> None:
    """Of a single class each: as far as the inputs are apart, and as far again as the classes are."""
    x, _ = blobs(0)
    one = np.zeros(len(x), dtype=int)
    v = np.array([3.0, 0, 4.0])
    assert wte([x, x + v], [one, one])[0, 1] == pytest.approx(5 * 2**0.5)
    assert wte([x, x + v], [one, one], reference=7)[0, 1] == pytest.approx(5 * 2**0.5)


def test_wte_orders_tasks_by_their_distance() -> None:
    sets = [blobs(i, n=20 + 2 * i, shift=s) for i, s in enumerate((0.0, 0.5, 4.0))]
    X, Y = [x for x, _ in sets], [y for _, y in sets]
    D = wte(X, Y, reference=16)
    assert np.array_equal(D, D.T)
    assert not D.diagonal().any()
    assert D[0, 1] < D[1, 2] < D[0, 2]
    turned = wte(X[::-1], Y[::-1], reference=16)
    assert turned[::-1, ::-1] == pytest.approx(D)


def test_wte_has_64_references_and_ten_dimensions_of_labels() -> None:
    rng = np.random.default_rng(0)
    X, Y = [rng.normal(size=(40, 11)) for _ in range(2)], [np.arange(40) % 12] * 2
    V = wte_embeddings(X, Y)
    assert np.abs(wte_embeddings(X[:1], Y[:1], reference=1000)).max() < 1e-6, "nothing moves"
    assert V.shape == (2, 64 * 21)
    assert np.array_equal(V, wte_embeddings(X, Y, seed=0))
    assert wte(X, Y)[0, 1] == np.linalg.norm(V[1] - V[0])


def test_wte_sees_labels() -> None:
    """The same inputs under other labels are another task."""
    x, y = blobs(0)
    assert wte([x, x], [y, np.arange(len(x)) // 10])[0, 1] > 0.1
    with pytest.raises(ValueError, match="samples of one size"):
        wte([x, x[:, :2]], [y, y])


# Side by side


def test_agreement() -> None:
    chance = np.random.default_rng(0)
    A = symmetrised(chance.normal(size=(6, 6)))
    B = symmetrised(chance.normal(size=(6, 6)))
    found = agreement({"sign": A, "other": B, "double": 2 * A + 1, "wte": -A, "cube": A**3})
    upper = np.triu_indices(6, 1)
    assert found.names == ("sign", "other", "double", "wte", "cube")
    assert found.pearson[0].tolist() == pytest.approx(
        [1, stats.pearsonr(A[upper], B[upper])[0], 1, 1, stats.pearsonr(A[upper], A[upper] ** 3)[0]]
    )
    assert found.spearman[0].tolist() == pytest.approx([1, stats.spearmanr(A[upper], B[upper])[0], 1, 1, 1])
    assert (found.pairs == 15).all()
    assert agreement({"wte": A, "b": -A}, distances=()).pearson[0, 1] == pytest.approx(-1)


def test_a_correlation_is_between_minus_one_and_one() -> None:
    from fedloom.study.agreement import _correlation

    for seed in range(100):
        x = np.random.default_rng(seed).normal(size=7)
        assert (_correlation(x, x), _correlation(x, -x)) == pytest.approx((1, -1))
        assert max(abs(_correlation(x, x)), abs(_correlation(x, -x))) <= 1


def test_ranks_of_pairs_multiply_to_spearman_in_any_order_of_the_tasks() -> None:
    from fedloom.study.agreement import pair_ranks

    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 4, (6, 6)), rng.normal(size=(6, 6))  # with ties
    above = np.triu_indices(6, 1)
    for order in (np.arange(6), rng.permutation(6)):
        at = np.ix_(order, order)
        product = (pair_ranks(one)[at] * pair_ranks(other))[above].sum()
        assert product == pytest.approx(agreement({"a": one[at], "b": other}).spearman[0, 1])
    assert np.isnan(pair_ranks(np.ones((4, 4)))).all()


def test_agreement_leaves_out_what_is_not_known() -> None:
    A = symmetrised(np.arange(16.0).reshape(4, 4) ** 2)
    B = A.copy()
    B[0, 1] = np.nan
    found = agreement({"a": A, "b": B, "constant": np.ones((4, 4))})
    assert found.pairs.tolist() == [[6, 5, 6], [5, 5, 5], [6, 5, 6]]
    assert found.pearson[0, 1] == pytest.approx(1)
    assert np.isnan(found.pearson[2]).all()
    ties = agreement({"a": A, "b": np.sign(A - A.mean())})
    upper = np.triu_indices(4, 1)
    assert ties.spearman[0, 1] == pytest.approx(stats.spearmanr(A[upper], np.sign(A - A.mean())[upper])[0])
    with pytest.raises(ValueError, match="different sizes"):
        agreement({"a": A, "b": np.eye(3)})
    with pytest.raises(ValueError, match="square"):
        symmetrised(np.zeros((2, 3)))
