"""F2DC's mask, split and losses: identities, limits and values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedloom.methods.f2dc.rules import (
    AuxiliaryHead,
    Corrector,
    Decoupler,
    decouple,
    feature_losses,
    gumbel_mask,
    noise_of,
    wrong_labels,
)

SHAPE = (2, 3, 4, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_noise_the_mask_is_the_sigmoid_of_the_score_over_sigma():
    score = torch.tensor([-0.1, 0.0, 0.05], dtype=torch.float64)
    expected = [1 / (1 + math.e), 0.5, 1 / (1 + math.exp(-0.5))]
    torch.testing.assert_close(gumbel_mask(score, 0.1), torch.tensor(expected, dtype=torch.float64))
    half = torch.full_like(score, 0.5)
    torch.testing.assert_close(gumbel_mask(score, 0.1, half, half), gumbel_mask(score, 0.1))


@pytest.mark.parametrize("noise", ["gumbel", "logistic"])
def test_the_mask_is_the_papers_softmax(noise):
    score, a, b, sigma = draw(*SHAPE), uniform(*SHAPE), uniform(*SHAPE, seed=1), 0.3
    p = torch.sigmoid(score)
    keep = torch.exp((torch.log(p) + noise_of(a, noise)) / sigma)
    drop = torch.exp((torch.log(1 - p) + noise_of(b, noise)) / sigma)
    torch.testing.assert_close(gumbel_mask(score, sigma, a, b, noise), keep / (keep + drop))


def test_noise_by_hand_and_its_variance():
    u = torch.tensor([0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(noise_of(u), -torch.log(-torch.log(u)), rtol=1e-6, atol=1e-6)
    assert noise_of(u, "logistic").tolist() == pytest.approx([0, math.log(9)])
    a, b = uniform(100_000), uniform(100_000, seed=1)
    for noise, variance in (("gumbel", math.pi**2 / 3), ("logistic", 2 * math.pi**2 / 3)):
        difference = noise_of(a, noise) - noise_of(b, noise)
        assert float(difference.var()) == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("noise", ["gumbel", "logistic"])
def test_the_mask_is_finite_at_the_extremes(noise):
    score = torch.tensor([-1e30, -1e3, -1.0, 1.0, 1e3, 1e30]).requires_grad_()
    for u, v in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)):
        mask = gumbel_mask(score, 1e-3, torch.full((6,), u), torch.full((6,), v), noise)
        assert ((mask >= 0) & (mask <= 1)).all()
        (grad,) = torch.autograd.grad(mask.sum(), score)
        assert torch.isfinite(grad).all()


def test_a_small_sigma_gives_a_hard_mask_and_a_large_one_a_half():
    score = torch.tensor([-0.5, -1e-3, 1e-3, 0.5])
    assert gumbel_mask(score, 1e-6).tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(gumbel_mask(score, 1e6), torch.full((4,), 0.5))


def test_wrong_arguments_of_the_mask():
    with pytest.raises(ValueError, match="expected sigma > 0, found 0"):
        gumbel_mask(torch.zeros(1), 0)
    with pytest.raises(ValueError, match="both draws"):
        gumbel_mask(torch.zeros(1), 1, torch.zeros(1))


def test_the_parts_add_up():
    f, mask = draw(*SHAPE), uniform(*SHAPE)
    corrector = nn.Conv2d(3, 3, 1).double()
    parts = decouple(f, mask, corrector)
    torch.testing.assert_close(parts.robust + parts.related, f)
    torch.testing.assert_close(parts.robust + parts.corrected, parts.fused)
    torch.testing.assert_close(parts.fused, f + (1 - mask) * corrector((1 - mask) * f))


def test_a_mask_of_one_and_a_corrector_of_zero_change_nothing():
    f = draw(*SHAPE)
    kept = decouple(f, torch.ones(*SHAPE), lambda x: x + 7)
    assert torch.equal(kept.fused, f)
    assert torch.equal(kept.robust, f)
    assert not kept.related.any()
    assert torch.equal(decouple(f, uniform(*SHAPE), torch.zeros_like).fused, f)
    dropped = decouple(f, torch.zeros(*SHAPE), lambda x: 2 * x)
    assert torch.equal(dropped.fused, f + 2 * f)
    assert not dropped.robust.any()


def test_modules_have_the_sizes_of_the_release():
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert size(Decoupler(512, "release")) == size(Corrector(512, "release")) == 483_500
    assert size(AuxiliaryHead(512, 7)) == 3_591
    assert size(Decoupler(512)) == 2 * 9 * 512 * 64 + 2 * 64
    assert size(Corrector(8, "release", 4)) == 2 * 9 * 8 * 4 + 9 * 16 + 4 * 4
    kinds = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    assert all(isinstance(layer, kind) for layer, kind in zip(Decoupler(8), kinds, strict=True))
    assert Decoupler(8)(torch.zeros(2, 8, 4, 5)).shape == (2, 8, 4, 5)


def test_the_wrong_label_is_the_most_confident_wrong_class():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [-5.0, -9.0, -7.0]])
    assert wrong_labels(logits, torch.tensor([0, 1, 0])).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="at least two classes"):
        wrong_labels(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))


def pixel(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)[:, :, None, None]


def test_losses_by_hand():
    # f = (3, 4), mask = (1, .5): f+ = (3, 2), f- = (0, 2); A_C gives (1, 4), so f* = (0, 4) and f~ = (3, 6).
    parts = decouple(pixel(3, 4), pixel(1, 0.5), lambda x: pixel(1, 4))
    assert parts.fused.flatten().tolist() == [3, 6]
    losses = feature_losses(parts, pixel(1, 0).flatten(1), torch.tensor([1]), lambda x: x, tau=0.5)
    log = math.log
    assert float(losses.classification) == pytest.approx(log(1 + math.e))
    assert float(losses.separability) == pytest.approx(2 * 2 / math.sqrt(13))
    assert float(losses.robust) == pytest.approx(log(1 + math.e))
    assert float(losses.related) == pytest.approx(log(1 + math.exp(2)))  # the wrong label is 0, m says (0, 2)
    assert float(losses.corrected) == pytest.approx(log(1 + math.exp(-4)))
    penalty = 0.8 * (4 / math.sqrt(13) + log(1 + math.e) + log(1 + math.exp(2))) + log(1 + math.exp(-4))
    assert float(losses.penalty) == pytest.approx(penalty)
    assert float(losses.total) == pytest.approx(penalty + log(1 + math.e))


def test_pooling_is_the_mean_over_positions_and_unlabelled_examples_do_not_count():
    f, mask, m = draw(3, 4, 2, 2), uniform(3, 4, 2, 2), AuxiliaryHead(4, 3).double()
    logits, labels = draw(3, 3), torch.tensor([2, -1, 0])
    every = feature_losses(decouple(f, mask, torch.sin), logits, labels, m)
    means = f.mean((2, 3), keepdim=True)  # constant maps have the same mean
    known = [0, 2]
    some = feature_losses(decouple(f[known], mask[known], torch.sin), logits[known], labels[known], m)
    torch.testing.assert_close(every.total, some.total)
    flat = torch.full_like(f, 0.25)
    a = feature_losses(decouple(f, flat, torch.zeros_like), logits, labels, m)
    b = feature_losses(decouple(means.expand_as(f), flat, torch.zeros_like), logits, labels, m)
    torch.testing.assert_close(a.total, b.total)
    assert float(a.separability) == pytest.approx(1 / 0.06)  # f+ and f- are parallel
    nobody = feature_losses(decouple(f, mask, torch.sin), logits, torch.full((3,), -1), m)
    assert float(nobody.total) == 0
    with pytest.raises(ValueError, match="tau"):
        feature_losses(decouple(f, mask, torch.sin), logits, labels, m, tau=0)


def test_every_module_learns_and_the_wrong_label_passes_no_gradient():
    torch.manual_seed(0)
    f = torch.randn(4, 6, 3, 3, requires_grad=True)
    decoupler, corrector, m, head = Decoupler(6), Corrector(6), AuxiliaryHead(6, 3), nn.Linear(6, 3)
    parts = decouple(f, gumbel_mask(decoupler(f), 0.1), corrector)
    losses = feature_losses(parts, head(parts.fused.mean((2, 3))), torch.tensor([0, 1, 2, 0]), m)
    losses.total.backward()
    for module in (decoupler, corrector, m, head):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    head.zero_grad()
    parts = decouple(f.detach(), gumbel_mask(decoupler(f.detach()), 0.1), corrector)
    logits = head(parts.fused.mean((2, 3)))
    feature_losses(parts, logits, torch.tensor([0, 1, 2, 0]), m).penalty.backward()
    assert head.weight.grad is None or not head.weight.grad.any()
