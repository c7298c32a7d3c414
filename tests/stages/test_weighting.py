"""Weightings of TorchJD: against their definitions, worked out in numpy, and against TorchJD's own aggregators."""

from __future__ import annotations

import itertools
import sys
import warnings

import numpy as np
import pytest
import torch

from fedloom.errors import RecipeError, UserError
from fedloom.federation.rounds.build import build
from fedloom.stages import IMTLG, AlignedMTL, DualProj, FairGrad, Mean, Stage, UPGrad
from tests_support import TORCHJD, installed, load_recipe

with_torchjd = pytest.mark.skipif(not installed(UPGrad()), reason="the extra methods is not installed")
ALL: list[Stage] = [UPGrad(), DualProj(), AlignedMTL(), AlignedMTL("rmse"), IMTLG(), FairGrad(), FairGrad(2.0)]
N = [1.0, 2, 3, 4]
P = np.array(N) / 10


def rows(seed: int) -> np.ndarray:
    """Four rows of six columns, some of which conflict."""
    return np.random.default_rng(seed).normal(size=(4, 6))


def projected(u: np.ndarray, G: np.ndarray) -> np.ndarray:
    """argmin w' G w over w >= u: of all choices of active bounds the one that fulfils the conditions of optimality."""
    for size in range(len(u) + 1):
        for free in map(list, itertools.combinations(range(len(u)), size)):
            w = u.copy()
            fixed = [i for i in range(len(u)) if i not in free]
            w[free] = np.linalg.solve(G[np.ix_(free, free)], -G[np.ix_(free, fixed)] @ u[fixed])
            if (w >= u - 1e-12).all() and (G @ w >= -1e-9).all():
                return w
    raise AssertionError("some choice is optimal")


def by_definition(stage: Stage, X: np.ndarray) -> np.ndarray:
    G = X @ X.T
    if isinstance(stage, UPGrad):
        return sum(p * projected(e, G) @ X for p, e in zip(P, np.eye(4), strict=True))
    if isinstance(stage, DualProj):
        return projected(P, G) @ X
    if isinstance(stage, AlignedMTL):
        U, s, V = np.linalg.svd(X, full_matrices=False)
        return {"min": s.min(), "rmse": np.sqrt((s**2).mean())}[stage.scale] * P @ U @ V
    if isinstance(stage, IMTLG):  # <u, r_1 - r_k> = 0 for k > 1, and the coefficients sum to 1
        R = X / np.linalg.norm(X, axis=1, keepdims=True)
        return np.linalg.solve(np.vstack([(R[:1] - R[1:]) @ X.T, np.ones(4)]), [0, 0, 0, 1.0]) @ X
    assert isinstance(stage, FairGrad)
    w = np.ones(4)
    for _ in range(200):  # Newton on log w, damped
        jacobian = G * w + np.diag(w ** (-1 / stage.alpha)) / stage.alpha
        w *= np.exp(np.clip(-np.linalg.solve(jacobian, G @ w - w ** (-1 / stage.alpha)), -0.5, 0.5))
    assert np.abs(G @ w - w ** (-1 / stage.alpha)).max() < 1e-9
    return w / w.sum() @ X


@with_torchjd
@pytest.mark.parametrize("stage", ALL, ids=repr)
def test_it_is_its_definition(stage: Stage) -> None:
    for seed in range(5):
        X = rows(seed)
        found, _ = stage.on(torch.tensor(X), n=N)
        np.testing.assert_allclose(found[0].numpy(), by_definition(stage, X), rtol=0, atol=1e-6)


@with_torchjd
def test_it_is_what_torchjd_makes_of_the_matrix() -> None:
    library = pytest.importorskip("torchjd.aggregation")
    X, p = torch.tensor(rows(0)), torch.tensor(P)
    for stage, own, close in (
        (UPGrad(), library.UPGrad(p), 1e-2),  # their projector adds 1e-4 to the diagonal
        (DualProj(), library.DualProj(p), 1e-2),
        (AlignedMTL("median"), library.AlignedMTL(p, "median"), 1e-9),
        (IMTLG(), library.IMTLG(), 1e-9),
    ):
        torch.testing.assert_close(stage.on(X, n=N)[0][0], own(X), rtol=0, atol=close)
    fair = library.FairGrad(1.0)(X)
    mine = FairGrad().on(X, n=N)[0][0]
    torch.testing.assert_close(mine / mine.norm(), fair / fair.norm(), rtol=0, atol=1e-5)


@with_torchjd
def test_fairgrad_with_alpha_1_is_nash_mtl() -> None:
    library = pytest.importorskip("torchjd.aggregation")
    pytest.importorskip("cvxpy")
    pytest.importorskip("ecos")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its solver
        for seed in range(3):
            X = torch.tensor(rows(seed))
            nash = library.NashMTL(4, max_norm=0.0, optim_niter=100)(X)
            cosine = torch.cosine_similarity(FairGrad().on(X)[0][0], nash, dim=0)
            assert float(cosine) == pytest.approx(1, abs=1e-6)


@with_torchjd
@pytest.mark.parametrize("stage", ALL, ids=repr)
def test_one_row_equal_rows_opposite_rows_and_zero_rows(stage: Stage) -> None:
    X = torch.tensor(rows(1))
    torch.testing.assert_close(stage.on(X[:1], n=[7])[0], X[:1])
    torch.testing.assert_close(stage.on(X[:1].repeat(3, 1), n=[1, 2, 4])[0], X[:1])
    assert float(stage.on(torch.stack([X[0], -X[0]]))[0].abs().max()) < 1e-12
    without, _ = stage.on(X[:2], n=[1, 1])
    with_zero, _ = stage.on(torch.cat([X[:2], torch.zeros(1, 6)]), n=[1, 1, 0])
    torch.testing.assert_close(with_zero, without)
    assert not stage.on(torch.zeros(3, 6))[0].any()


@with_torchjd
@pytest.mark.parametrize("stage", [UPGrad(), DualProj()], ids=repr)
def test_no_update_is_conflicted_with_and_without_conflict_it_is_the_mean(stage: Stage) -> None:
    for seed in range(10):
        X = torch.tensor(rows(seed))
        assert float((X @ stage.on(X, n=N)[0][0]).min()) > -1e-9
        agreeing = X.abs()
        torch.testing.assert_close(stage.on(agreeing, n=N)[0], Mean().on(agreeing, n=N)[0])


@pytest.mark.parametrize("name", TORCHJD)
def test_without_the_extra_a_recipe_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchjd", "torchjd.aggregation", "torchjd.linalg", "quadprog"):
        monkeypatch.setitem(sys.modules, module, None)
    why = r"needs the package '(torchjd|quadprog)', which is not installed: pip install 'fedloom\[methods\]'"
    if name == "upgrad":
        with pytest.raises(RecipeError, match=rf"fedavg \+ upgrad: UPGrad\(\) cannot work: This {why}"):
            build(load_recipe("method.add.upgrad={}"))
    with pytest.raises(UserError, match=why):
        dict(zip(TORCHJD, ALL[:3] + ALL[4:6], strict=True))[name].on(torch.eye(2))
