"""Rules of model merging: against their equations in numpy, and in plain cases."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core.layout import Block, Layout
from fedloom.methods import dare, fedavg, feddea, ties
from fedloom.methods.merging.aggregation import sparse_part
from fedloom.stages import (
    ConsensusMask,
    ElectedMean,
    IsotropicMerge,
    LeastInterference,
    LowRankAndSparse,
    Mean,
    SingularMerge,
    Stage,
    TopMagnitude,
)

LAYOUT = Layout((Block("w", (6, 4)), Block("conv", (3, 2, 2, 2)), Block("b", (5,))))
N = [1.0, 2, 5]
P = np.array(N) / 8


def rows(seed: int = 0, k: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(k, LAYOUT.d))


def on(stage: Stage, X: np.ndarray, n: list[float] | None = None, **more: object) -> np.ndarray:
    return stage.on(torch.tensor(X), n=N if n is None else n, layout=LAYOUT, **more)[0][0].numpy()


def in_blocks(u: np.ndarray) -> list[np.ndarray]:
    return [u[s].reshape(b.shape[0], -1) for b, s in zip(LAYOUT.blocks, LAYOUT.slices, strict=True)]


def test_ties_is_its_definition() -> None:
    X = rows()
    trimmed = np.array([np.where(np.abs(x) >= np.sort(np.abs(x))[-15], x, 0) for x in X])  # 30 % of 53
    expected = np.zeros(LAYOUT.d)
    for i in range(LAYOUT.d):
        sign = np.sign(P @ trimmed[:, i])
        agree = [k for k in range(3) if trimmed[k, i] * sign > 0]
        if agree:
            expected[i] = sum(P[k] * trimmed[k, i] for k in agree) / sum(P[k] for k in agree)
    assert 0 < (expected != 0).mean() < 1
    method = ties(fedavg(), keep=0.3)
    np.testing.assert_allclose(on(method.edge >> method.stage, X), expected, rtol=1e-12)


def test_a_sign_is_elected_by_weight_and_a_tie_elects_none() -> None:
    X = [[3.0, 1, -1], [-1, 1, 1], [-1, -4, 0]]
    assert ElectedMean().on(X)[0].tolist() == [[3, -4, 0]]
    assert ElectedMean().on(X, n=[1, 3, 1])[0].tolist() == [[-1, 0, 1]]


def test_consensus_is_its_definition() -> None:
    X = rows(1)
    total = X.sum(0)
    votes = sum((np.abs(x) >= 0.7 * np.abs(total - x)).astype(int) for x in X)
    assert set(votes) >= {1, 2}
    for least in (1, 2, 3):
        np.testing.assert_allclose(on(ConsensusMask(0.7, least), X), np.where(votes >= least, P @ X, 0), rtol=1e-12)


def test_a_tensor_that_one_row_trained_is_that_rows() -> None:
    """A decoder in a model that all clients share: the other rows are zeros there, which are no votes."""
    X, support = rows(2), torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
    X[:2, -5:] = 0
    matrices = (IsotropicMerge(), SingularMerge(), LeastInterference(), LowRankAndSparse())
    for stage in (ElectedMean(), ConsensusMask(), *matrices):
        np.testing.assert_allclose(on(stage, X, support=support)[-5:], X[2, -5:])
    assert not on(ConsensusMask(), X)[-5:].any()


def inverse_root(A: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(A)
    return vectors / np.sqrt(values) @ vectors.T


def test_iso_c_is_its_definition() -> None:
    """U V' is the polar factor M (M'M)^(-1/2)."""
    found, mean = in_blocks(on(IsotropicMerge(), rows(3))), in_blocks(P @ rows(3))
    for u, M in zip(found[:2], mean[:2], strict=True):
        M, u = (M, u) if M.shape[0] >= M.shape[1] else (M.T, u.T)
        values = np.sqrt(np.linalg.eigvalsh(M.T @ M))
        np.testing.assert_allclose(u, values.mean() * M @ inverse_root(M.T @ M), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[2], mean[2])


def test_iso_c_keeps_directions_that_nobody_has_at_zero() -> None:
    u, v = np.linalg.qr(rows(4)[:, :18].reshape(6, 9)[:, :2])[0], np.linalg.qr(rows(5)[0, :8].reshape(4, 2))[0]
    layout = Layout((Block("w", (6, 4)),))
    X = torch.tensor(u * [3.0, 1] @ v.T).reshape(1, -1).repeat(2, 1)
    found = IsotropicMerge().on(X, layout=layout)[0].view(6, 4).numpy()
    np.testing.assert_allclose(found, 2 * u @ v.T, atol=1e-12)


def test_tsv_m_is_its_definition() -> None:
    """Whitening: U (U'U)^(-1/2), of the leading parts by the eigenvectors of M'M."""
    X = rows(6, 2)
    found = in_blocks(on(SingularMerge(), X, [1.0, 3]))
    for i, most in ((0, 2), (1, 1)):
        left, size, right = [], [], []
        for x in X:
            M = in_blocks(x)[i]
            values, vectors = np.linalg.eigh(M.T @ M)
            for j in range(1, most + 1):
                size.append(np.sqrt(values[-j]))
                right.append(vectors[:, -j])
                left.append(M @ vectors[:, -j] / size[-1])
        U, V = np.array(left).T, np.array(right).T
        expected = U @ inverse_root(U.T @ U) * size @ (V @ inverse_root(V.T @ V)).T
        np.testing.assert_allclose(found[i], expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[2], in_blocks(np.array([0.25, 0.75]) @ X)[2])


def test_tsv_m_of_one_row_of_equal_rows_and_of_rows_without_a_common_direction() -> None:
    X = rows(7, 1)
    np.testing.assert_allclose(on(SingularMerge(), X, [4.0]), X[0], atol=1e-12)
    layout = Layout((Block("w", (4, 4)),))
    rank_one = np.outer([1.0, 0, 0, 0], [0, 2.0, 0, 0]).reshape(1, -1)
    twice = SingularMerge().on(torch.tensor(rank_one).repeat(3, 1), layout=layout)[0]
    np.testing.assert_allclose(twice.numpy(), rank_one, atol=1e-12)
    other = np.outer([0, 0, 1.0, 0], [0, 0, 0, 5.0]).reshape(1, -1)
    both = SingularMerge().on(torch.tensor(np.concatenate([rank_one, other])), layout=layout)[0]
    np.testing.assert_allclose(both.numpy(), rank_one + other, atol=1e-12)


def test_wudi_is_the_closed_form_of_its_objective() -> None:
    """U = sum_k D_k C_k (sum_k C_k)^-1 with C_k = D_k'D_k / |D_k|^2, whatever the weights."""
    X = rows(8)
    found = in_blocks(on(LeastInterference(), X))
    for i in (0, 1):
        D = [in_blocks(x)[i] for x in X]
        C = [M.T @ M / (M**2).sum() for M in D]
        expected = sum(M @ c for M, c in zip(D, C, strict=True)) @ np.linalg.pinv(sum(C), rcond=1e-10)
        np.testing.assert_allclose(found[i], expected, rtol=1e-7, atol=1e-9)
        assert np.abs(sum((found[i] - M) @ c for M, c in zip(D, C, strict=True))).max() < 1e-9
    np.testing.assert_allclose(found[2], in_blocks(P @ X)[2])


def test_wudi_of_equal_rows_and_of_rows_that_react_to_other_inputs() -> None:
    X = np.concatenate([rows(9, 1), rows(9, 1), np.zeros((1, LAYOUT.d))])
    X[2, -5:] = X[0, -5:]  # biases get the mean, so they must not be zero
    np.testing.assert_allclose(on(LeastInterference(), X), X[0], atol=1e-12)
    layout = Layout((Block("w", (4, 4)),))
    apart = np.zeros((2, 4, 4))
    apart[0, :, :2], apart[1, :, 2:] = rows(10)[0, :8].reshape(4, 2), rows(11)[0, :8].reshape(4, 2)
    found = LeastInterference().on(torch.tensor(apart.reshape(2, -1)), layout=layout)[0]
    np.testing.assert_allclose(found[0].numpy(), apart.sum(0).flatten(), atol=1e-12)


SIGNS = np.where(np.random.default_rng(12).random(16) < 0.5, -1.0, 1.0)
COMMON = np.outer(np.ones(4), SIGNS)  # four clients that agree
OWN = np.zeros((4, 16))
OWN[0, 3], OWN[2, 7] = 5.0, -3.0  # and two that have learned something alone


def test_robust_pca_finds_a_split_that_is_known() -> None:
    np.testing.assert_allclose(sparse_part(torch.tensor(COMMON + OWN)).numpy(), OWN, atol=1e-4)
    for scale in (1e-6, 1e6):
        np.testing.assert_allclose(
            sparse_part(torch.tensor(scale * (COMMON + OWN))).numpy(), scale * OWN, atol=scale / 1e4
        )
    assert not sparse_part(torch.zeros(3, 5, dtype=torch.float64)).any()


def test_no_split_is_better_than_that_of_robust_pca() -> None:
    rng = np.random.default_rng(13)

    def objective(M: np.ndarray, S: np.ndarray) -> float:
        return np.linalg.norm(M - S, "nuc") + np.abs(S).sum() / np.sqrt(max(M.shape))

    for k, n in ((4, 30), (6, 5)):
        M = rng.normal(size=(k, 1)) @ rng.normal(size=(1, n)) + rng.normal(size=(k, n)) * (rng.random((k, n)) < 0.3)
        S = sparse_part(torch.tensor(M)).numpy()
        best = objective(M, S)
        assert 0 < (S == 0).mean() < 1
        for step in (1e-3, 0.1, 1.0):
            any_way = rng.normal(size=(k, n))
            for other in (any_way, M - S, -S, any_way * (S == 0)):
                assert objective(M, S + step * other) > best * (1 - 1e-5)


def test_fedrpca_adds_what_is_common_and_what_is_sparse_times_beta() -> None:
    layout = Layout((Block("w", (4, 4)), Block("b", (2,))))
    X, p = np.concatenate([COMMON + OWN, np.arange(8.0).reshape(4, 2)], 1), np.array([1.0, 2, 2, 3]) / 8

    def found(stage: Stage) -> np.ndarray:
        return stage.on(torch.tensor(X), n=8 * p, layout=layout)[0][0].numpy()

    own = np.sqrt(((COMMON + OWN) ** 2).sum() / 34)  # |M| / |S|, |S|^2 = 25 + 9
    for stage, beta in ((LowRankAndSparse(2.5), 2.5), (LowRankAndSparse(), own)):
        np.testing.assert_allclose(found(stage)[:16], p @ COMMON + beta * p @ OWN, atol=1e-3)
        np.testing.assert_allclose(found(stage)[16:], p @ X[:, 16:])  # a bias gets the mean
    np.testing.assert_allclose(found(LowRankAndSparse(1.0)), p @ X, atol=1e-12)
    X[0, 3] = COMMON[0, 3] + 0.1 * np.sign(COMMON[0, 3])
    X[2, 7] = COMMON[2, 7]
    assert np.sqrt((X[:, :16] ** 2).sum()) / 0.1 > 10  # beyond the limit of beta
    np.testing.assert_allclose(found(LowRankAndSparse()), found(LowRankAndSparse(10.0)), atol=1e-9)
    assert np.abs(found(LowRankAndSparse()) - found(LowRankAndSparse(1.0))).max() > 0.1 * p[0] * 8.9


def test_dare_is_a_random_choice_that_is_right_on_average() -> None:
    assert dare(fedavg(), drop=0.75).edge == feddea(fedavg(), rho=0.25, keep="random").edge
    stage = dare(fedavg(), drop=0.75).edge >> Mean()
    found = np.mean([on(stage, rows(), seed=seed) for seed in range(400)], axis=0)
    np.testing.assert_allclose(found, P @ rows(), atol=0.3)
    assert dare(fedavg(), drop=0).edge == TopMagnitude(1, "random")
