"""FDSE's split layer, its consistency term and the mixing of erasers."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.training.eraser import ErasedConv, consistency, eraser_mixing, gaussian_divergence, moments


def t(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("outputs", "stride", "side"), [(6, 1, 5), (7, 2, 3), (1, 1, 5)])
def test_shapes_and_parameters(outputs, stride, side):
    layer = ErasedConv(4, outputs, stride=stride)
    assert layer(torch.randn(2, 4, 5, 5)).shape == (2, outputs, side, side)
    half = math.ceil(outputs / 2)
    own = {"extractor": 36 * half + half, "eraser_norm": 2 * half, "eraser": 9 * half, "norm": 2 * outputs}
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in layer.named_children()}
    assert sizes == own
    assert layer.shift.shape == (outputs,)


def test_the_first_channels_are_the_normalised_extractor_and_the_others_come_from_it():
    layer = ErasedConv(3, 4).double().eval()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    extracted = layer.extractor(x)
    layer.shift.data = t(1, 2, 3, 4)
    torch.testing.assert_close(layer.before_norm(x)[:, :2], extracted / math.sqrt(1 + 1e-5) + t(1, 2)[:, None, None])
    layer.eraser.weight.data.zero_()
    assert (layer.before_norm(x)[:, 2:] == t(3, 4)[:, None, None]).all()
    layer.eraser.weight.data[:, :, 1, 1] = 2  # a depthwise kernel that doubles
    torch.testing.assert_close(
        layer.before_norm(x)[:, 2:], 2 * extracted / math.sqrt(1 + 1e-5) + t(3, 4)[:, None, None]
    )


def test_moments_by_hand():
    x = t([[[1, 3]], [[0, 0]]], [[[5, 7]], [[0, 4]]])
    mean, variance = moments(x)
    assert mean.tolist() == [4, 1]
    assert variance.tolist() == [5, 3]


def test_divergence_by_hand():
    value = gaussian_divergence(t(1, 0), t(1, 4), t(3, 0), t(1, 1))
    assert float(value) == pytest.approx(((4) / 2 + (4 - 1 - math.log(4)) / 2) / 2)
    assert float(gaussian_divergence(t(2), t(3), t(2), t(3))) == 0
    assert torch.isfinite(gaussian_divergence(t(2), t(0), t(2), t(0)))
    p, q = torch.distributions.Normal(t(0.3), t(0.7)), torch.distributions.Normal(t(-1), t(2))
    expected = torch.distributions.kl_divergence(p, q)
    assert float(gaussian_divergence(t(0.3), t(0.49), t(-1), t(4))) == pytest.approx(float(expected))


def test_later_layers_count_more():
    same, apart = (t(0), t(1)), (t(2), t(1))
    first = consistency([same, same], [apart, same], beta=1.0)
    last = consistency([same, same], [same, apart], beta=1.0)
    assert float(first) == pytest.approx(2 / (1 + math.e))
    assert float(first + last) == pytest.approx(2)
    assert float(consistency([same, same], [same, same])) == 0


def test_eraser_mixing():
    W = eraser_mixing(t([1, 0], [5, 0], [0, 2]), tau=0.5)
    assert W[0].tolist() == pytest.approx([math.e**2 / (2 * math.e**2 + 1)] * 2 + [1 / (2 * math.e**2 + 1)])
    torch.testing.assert_close(W.sum(1), torch.ones(3, dtype=torch.float64))
    assert eraser_mixing(t([3, 4])).tolist() == [[1]]
