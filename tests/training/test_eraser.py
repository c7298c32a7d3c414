"""FDSE's consistency term, as its paper means it and as its release computes it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.methods.fdse.rules import (
    MOMENTUM,
    Consistency,
    ErasedLayer,
    averaged,
    consistency,
    gaussian_divergence,
    layer_weights,
    released_consistency,
)
from fedloom.training.rules import View


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_divergence_by_hand() -> None:
    value = gaussian_divergence(t(1, 0), t(1, 4), t(3, 0), t(1, 1))
    assert float(value) == pytest.approx(((4) / 2 + (4 - 1 - math.log(4)) / 2) / 2)
    assert float(gaussian_divergence(t(2), t(3), t(2), t(3))) == 0
    assert torch.isfinite(gaussian_divergence(t(2), t(0), t(2), t(0)))
    p, q = torch.distributions.Normal(t(0.3), t(0.7)), torch.distributions.Normal(t(-1), t(2))
    expected = torch.distributions.kl_divergence(p, q)
    assert float(gaussian_divergence(t(0.3), t(0.49), t(-1), t(4))) == pytest.approx(float(expected))


def test_later_layers_count_more() -> None:
    same, apart = (t(0), t(1)), (t(2), t(1))
    first = consistency([same, same], [apart, same], beta=1.0)
    last = consistency([same, same], [same, apart], beta=1.0)
    assert float(first) == pytest.approx(2 / (1 + math.e))
    assert float(first + last) == pytest.approx(2)
    assert float(consistency([same, same], [same, same], beta=1.0)) == 0
    assert layer_weights(3, 0).tolist() == pytest.approx([1 / 3] * 3)


def test_the_variance_of_channels_in_the_releases_term() -> None:
    """Channels 0, 3 and 6: mean 3, variance 18 / 2. One channel has variance 0."""
    term, (m, v) = released_consistency([(t(1, 3, 0), t(1, 1, 1))], [t(0, 3, 6)], None, beta=0.0)
    assert (float(m), float(v)) == (3, 9)
    assert float(term) == pytest.approx((10 / 3 - 9) / 18 + (math.log(9) + 1 / 9) / 2)
    _, (m, v) = released_consistency([(t(1), t(1))], [t(5)], None, beta=0.0)
    assert (float(m), float(v)) == (5, 0)


def test_the_releases_term_by_hand() -> None:
    """Two layers of two channels: one mean and variance run through both."""
    term, (m, v) = released_consistency([(t(1, 3), t(1, 1)), (t(0, 0), t(1, 4))], [t(0, 2), t(4, 8)], None, beta=0.0)
    # layer 1: mean 1, variance 2; layer 2: mean 1 + 0.1 (6 - 1), variance 2 + 0.1 (8 - 2)
    first = ((1 - 1) / 4 + (9 - 1) / 4) / 2 + (math.log(2) + 1 / 2) / 2
    second = -2.25 / 5.2 + ((math.log(2.6) + 1 / 2.6) + (math.log(2.6 / 4) + 4 / 2.6)) / 4
    assert (float(m), float(v)) == pytest.approx((1.5, 2.6))
    assert float(term) == pytest.approx((first + second) / 2)
    lower, _ = released_consistency([(t(0, 0), t(1, 1))], [t(10, 10.1)], None, beta=1.0)
    assert float(lower) < 0  # it is no divergence
    again, _ = released_consistency([(t(1, 3), t(1, 1))], [t(0, 2)], (t(1).sum(), t(2).sum()), beta=1.0)
    assert float(again) == pytest.approx(first)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(ErasedLayer(nn.Conv2d(2, 2, 3, padding=1)) for _ in range(2)))


def view(net: nn.Module) -> View:
    nothing = torch.zeros(0)
    return View(nothing, nothing, nothing, (), module=net)


X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def test_there_is_no_term_before_the_statistics_have_counted_a_batch() -> None:
    net = Net()
    assert Consistency().begin(view(net), {}) == {}
    state = Consistency().begin(view(net), {})
    net.layers(X)
    assert Consistency().penalty(view(net), state) is None
    assert "received" in Consistency().begin(view(net), {})
    assert Consistency(lam=0).begin(view(net), {}) == {}


@pytest.mark.parametrize("form", ["paper", "release"])
def test_the_term_has_a_gradient_for_shared_parts_and_erasers(form: Any) -> None:
    net, rule = Net(), Consistency(2.0, 0.1, form)
    net.layers(X)
    state = rule.begin(view(net), {})
    net.layers(3 * X + 1)
    term = rule.penalty(view(net), state)
    term.backward()
    for layer in net.layers[:1]:
        for part in (layer.eraser.weight, layer.eraser_norm.weight, layer.shift):
            assert part.grad.isfinite().all()
            assert part.grad.any()
    net.layers(X)
    rule.penalty(view(net), state).backward()  # the first step's graph is gone, and nobody needs it
    assert rule.finish(view(net), state) == ({}, {})


def test_statistics_that_are_as_received_cost_nothing() -> None:
    net, rule = Net(), Consistency(1.0)
    for layer in net.layers:
        layer.norm.momentum = 1.0
    net.layers(X)
    state = rule.begin(view(net), {})
    net.layers(X)
    assert rule.penalty(view(net), state).item() == pytest.approx(0, abs=1e-6)
    net.layers(X + torch.arange(72.0).view(2, 6, 6))
    assert rule.penalty(view(net), state).item() > 1e-4


def test_moments_are_averaged_as_a_norm_layer_does() -> None:
    norm = nn.BatchNorm1d(2).double()
    norm.running_mean, norm.running_var = t(1, 2), t(3, 4)
    x = torch.randn(8, 2, dtype=torch.float64)
    norm(x)
    (mean, variance), *rest = averaged([(t(1, 2), t(3, 4))], [(x.mean(0), x.var(0))])
    assert not rest
    assert norm.momentum == MOMENTUM
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(variance, norm.running_var)
