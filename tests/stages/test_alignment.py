"""GradVac and ConFIG: against their definitions on the vectors themselves, and against TorchJD."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.context import derive_seed
from fedloom.stages import ConFIG, GradVac, PCGrad

D = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)


def random_rows(seed: int, k: int, d: int = 20) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# GradVac


def vaccinated(X: np.ndarray, orders: list[list[int]], target: np.ndarray, beta: float) -> np.ndarray:
    """The paper's update on the vectors themselves; `target` moves in place."""
    out = X.copy()
    for i, order in enumerate(orders):
        for j in order:
            if j == i:
                continue
            size, other = np.linalg.norm(out[i]), np.linalg.norm(X[j])
            c, t = out[i] @ X[j] / size / other, min(target[i, j], 0.99)
            if c < t:
                out[i] += (
                    size * (t * math.sqrt(1 - c**2) - c * math.sqrt(1 - t**2)) / other / math.sqrt(1 - t**2) * X[j]
                )
                assert out[i] @ X[j] / np.linalg.norm(out[i]) / other == pytest.approx(t)
            target[i, j] = (1 - beta) * target[i, j] + beta * c
    return out


def test_gradvac_is_its_definition_over_rounds_with_an_absence() -> None:
    target, stage, state = np.zeros((4, 4)), GradVac(0.3), {}
    for round_, here in enumerate(([0, 1, 2, 3], [0, 1, 3], [1, 2, 3], [0, 1, 2, 3]), 1):
        X = random_rows(round_, 4, 8) + 0.8 * random_rows(9, 1, 8)
        X[1] += 2 * X[0]
        draws = [[derive_seed(5, round_, "pcgrad", f"c{i}", None, f"c{j}", None) for j in here] for i in here]
        orders = [sorted(range(len(here)), key=draw.__getitem__) for draw in draws]
        part = target[np.ix_(here, here)]
        expected = vaccinated(X[here].numpy(), orders, part, 0.3)
        target[np.ix_(here, here)] = part
        found, state = stage.on(X[here], rows=[f"c{i}" for i in here], round=round_, seed=5, state=state)
        torch.testing.assert_close(found, torch.tensor(expected))
    assert state["cosines"]["c0"]["c2"] == pytest.approx(target[0, 2])
    assert target[0, 1] > 0.3


def test_gradvac_without_targets_is_pcgrad() -> None:
    state: dict[str, object] = {}
    for round_ in (1, 2):
        found, state = GradVac(0.0).on(D, round=round_, state=state)
        torch.testing.assert_close(found, PCGrad().on(D, round=round_)[0])
    torch.testing.assert_close(GradVac(0.5).on(D, round=1)[0], PCGrad().on(D, round=1)[0])


def test_gradvac_is_torchjds_for_two_rows() -> None:
    library = pytest.importorskip("torchjd.aggregation")
    own, state = library.GradVac(0.4), {}
    for round_ in range(1, 6):
        X = random_rows(round_, 2, 6) + random_rows(7, 1, 6)
        found, state = GradVac(0.4).on(X, round=round_, state=state)
        torch.testing.assert_close(found.sum(0), own(X), rtol=1e-6, atol=1e-6)
    assert state["cosines"]["c0"]["c1"] > 0.1


def test_gradvac_does_not_explode_where_rows_were_alike_until_now() -> None:
    state: dict[str, object] = {}
    for round_ in range(60):
        _, state = GradVac(0.9).on(D[:1].repeat(2, 1), round=round_, state=state)
    X = torch.eye(2, dtype=torch.float64)
    found, _ = GradVac(0.9).on(X, round=60, state=state)
    assert float(found.norm(dim=1).max()) == pytest.approx(1 / math.sqrt(1 - 0.99**2))


# ConFIG


def conflict_free_direction(X: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The definition, by least squares on the unit rows in float64."""
    X = X.astype(np.float64)
    v = np.linalg.lstsq(X / np.linalg.norm(X, axis=1, keepdims=True), np.ones(len(X)), rcond=1e-9)[0]
    return (p @ X @ v) * v / (v @ v)


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [2, 5])
def test_config_is_its_definition(k: int, sign: int, apart: float) -> None:
    """In float32, also for rows that differ only in the fourth digit, or oppose each other but for that.

    In the second case coefficients are large and cancel.
    """
    signs = torch.tensor([sign**i for i in range(k)], dtype=torch.float64)[:, None]
    X = (signs * random_rows(3, 1, 500) + apart * random_rows(4, k, 500)).float()
    n = np.arange(1.0, k + 1) ** 2
    found, _ = ConFIG().on(X, n=n)
    expected = conflict_free_direction(X.numpy(), n / n.sum())
    assert np.linalg.norm(found[0].numpy() - expected) <= 1e-6 * np.linalg.norm(expected)
    assert apart < 1 or not np.allclose(expected, n / n.sum() @ X.numpy(), rtol=1e-2)


@pytest.mark.slow
def test_config_is_its_definition_for_millions_of_columns() -> None:
    X = (random_rows(3, 1, 3_000_000) + 1e-3 * random_rows(4, 6, 3_000_000)).float()
    found, _ = ConFIG().on(X)
    expected = conflict_free_direction(X.numpy(), np.full(6, 1 / 6))
    assert np.linalg.norm(found[0].numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


def test_config_is_torchjds_divided_by_the_number_of_rows() -> None:
    library = pytest.importorskip("torchjd.aggregation")
    X = random_rows(1, 4)
    torch.testing.assert_close(4 * ConFIG().on(X)[0][0], library.ConFIG()(X), rtol=1e-9, atol=1e-9)


def test_config_of_rows_without_a_common_angle() -> None:
    assert not ConFIG().on(torch.stack([D[0], -D[0]]))[0].any()
    with_zero = torch.cat([D, torch.zeros(1, 4, dtype=torch.float64)])
    torch.testing.assert_close(ConFIG().on(with_zero)[0], 0.75 * ConFIG().on(D)[0])
    twice = torch.cat([D, D[:1]])
    torch.testing.assert_close(ConFIG().on(twice, n=[1, 2, 2, 1])[0], ConFIG().on(D)[0])
