"""Models mixed by their cosines, and stages that act tensor by tensor."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.stage import combined_by
from fedloom.core.updates import Updates
from fedloom.methods.clusters.aggregation import cosine_mixing
from fedloom.stages import CosineMix, Identity, Mean, MinNorm, PerBlock

LAYOUT = Layout((Block("encoder.a", (2,)), Block("encoder.b", (2,))))


def t(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weights_by_hand() -> None:
    X = t([1, 0], [5, 0], [0, 2])
    W = cosine_mixing(X @ X.T, tau=0.5)
    assert W[0].tolist() == pytest.approx([math.e**2 / (2 * math.e**2 + 1)] * 2 + [1 / (2 * math.e**2 + 1)])
    torch.testing.assert_close(W.sum(1), torch.ones(3, dtype=torch.float64))
    assert cosine_mixing(t([25]), 0.5).tolist() == [[1]]


def test_it_is_models_that_are_compared_and_mixed() -> None:
    base, X = t([4, 3], [4, 3], [-3, 4]), t([-3, -3], [1, -3], [3, -2])
    updates = Updates.of(X, base=base)
    out, _ = CosineMix(0.5)(updates, {}, Ctx(1))
    trained = t([1, 0], [5, 0], [0, 2])
    torch.testing.assert_close(base + out.X, cosine_mixing(trained @ trained.T, 0.5) @ trained)


def test_the_ends_of_tau() -> None:
    X = t([1, 0.2], [0.9, 0.3], [-1, 2])
    torch.testing.assert_close(CosineMix(1e9).on(X)[0], X.mean(0, keepdim=True).expand(3, -1))
    torch.testing.assert_close(CosineMix(1e9).on(X[:2])[0], X[:2].mean(0, keepdim=True).expand(2, -1))
    torch.testing.assert_close(CosineMix(1e-6).on(X)[0], X)


def test_one_row_and_equal_rows_come_back() -> None:
    X = torch.randn(1, 5)
    assert torch.equal(CosineMix().on(X)[0], X)
    assert torch.equal(CosineMix().on(X.repeat(3, 1))[0], X.repeat(3, 1))


def test_a_model_that_is_zero_resembles_no_other() -> None:
    out = CosineMix(0.01).on(t([0, 0], [1, 1], [2, 2]))[0]
    torch.testing.assert_close(out[0], t(0, 0))
    torch.testing.assert_close(out[1], t(1.5, 1.5))


def test_each_tensor_by_itself() -> None:
    X = t([1, 0, 3, 0], [0, 1, -6, 0])
    whole, _ = MinNorm().on(X, layout=LAYOUT)
    each, _ = PerBlock(MinNorm()).on(X, layout=LAYOUT)
    torch.testing.assert_close(each, t([0.5, 0.5, 0, 0]))
    assert not torch.allclose(whole, each)
    torch.testing.assert_close(each[:, :2], MinNorm().on(X[:, :2])[0])


def test_what_looks_at_columns_alone_is_the_same_per_tensor() -> None:
    X = torch.randn(3, 4)
    for stage in (Mean(), Identity()):
        assert torch.equal(PerBlock(stage).on(X, [1, 2, 3], layout=LAYOUT)[0], stage.on(X, [1, 2, 3], layout=LAYOUT)[0])


def test_a_product_put_off_is_worked_out() -> None:
    W = t([0.5, 0.5], [0, 1])
    updates = Updates.of(t([1, 0, 3, 0], [0, 1, -6, 0]), layout=LAYOUT).mixed(W)
    stage = PerBlock(MinNorm())
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(1))
    torch.testing.assert_close(out.X, stage.on(updates.X, layout=LAYOUT)[0])


def test_tensors_that_only_some_have() -> None:
    X = t([1, 2, 3, 4], [5, 6, 0, 0])
    out, _ = PerBlock(MinNorm(unit=False)).on(X, layout=LAYOUT, present=[[True, True], [True, False]])
    torch.testing.assert_close(out[0, 2:], t(3, 4))


def test_a_mean_inside_cannot_be_replaced_by_name() -> None:
    with pytest.raises(ValueError, match="would replace a mean"):
        combined_by(PerBlock(MinNorm()), MinNorm())
