"""Losses of dense tasks: by hand, with ignored pixels, without any label, in half precision and under vmap."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from fedloom.errors import DataError
from fedloom.federation.recipes import load
from fedloom.models.tasks.dense import unit
from fedloom.tasks import balanced_bce, cross_entropy, depth_l1, edge_bce, normals_l1

SIZE = (6, 5)


def example(kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(prediction, labels, valid B x H x W) with about a fifth of the pixels without a label."""
    rng = torch.Generator().manual_seed(seed)
    channels = {"semseg": 4, "saliency": 2, "normals": 3, "depth": 1, "edge": 1}[kind]
    pred = torch.randn(3, channels, *SIZE, generator=rng)
    ignored = torch.rand(3, *SIZE, generator=rng) < 0.2
    if kind == "normals":
        labels = functional.normalize(torch.randn(3, 3, *SIZE, generator=rng), dim=1)
        labels[ignored.unsqueeze(1).expand_as(labels)] = 255.0
    elif kind == "depth":
        labels = 0.5 + 9 * torch.rand(3, 1, *SIZE, generator=rng)
        labels[ignored.unsqueeze(1)] = 255.0
    else:
        labels = torch.randint(0, max(channels, 2), (3, *SIZE), generator=rng)
        labels[ignored] = 255
    return pred, labels, ~ignored


LOSSES = {
    "semseg": cross_entropy,
    "saliency": balanced_bce,
    "normals": normals_l1,
    "depth": depth_l1,
    "edge": edge_bce,
}


def nothing(labels: torch.Tensor) -> torch.Tensor:
    return torch.full_like(labels, 255)


def test_cross_entropy_by_hand():
    logits = torch.log(torch.tensor([[[[0.5, 0.1, 0.3]], [[0.25, 0.8, 0.3]], [[0.25, 0.1, 0.4]]]]))
    labels = torch.tensor([[[0, 1, 255]]])
    expected = -(math.log(0.5) + math.log(0.8)) / 2
    assert cross_entropy(logits, labels).item() == pytest.approx(expected)
    assert cross_entropy(logits, labels.unsqueeze(1)).item() == pytest.approx(expected)
    assert cross_entropy(logits, torch.tensor([[[0, 1, -1]]])).item() == pytest.approx(expected)
    assert cross_entropy(logits, torch.tensor([[[0, 1, 2]]]), ignore=2).item() == pytest.approx(expected)
    assert cross_entropy(logits, labels.to(torch.uint8)).item() == pytest.approx(expected)


def test_the_loss_of_a_single_labelled_pixel_is_its_own():
    labels = torch.full((2, 1, 3, 3), 255.0)
    pred = torch.full((2, 1, 3, 3), 0.7)
    labels[1, 0, 2, 1] = 1.0
    assert depth_l1(pred, labels).item() == pytest.approx(0.3)
    assert edge_bce(pred, labels).item() == pytest.approx(0.95 * math.log1p(math.exp(-0.7)))
    # Balanced, all labelled pixels are of one kind and the weight of that kind is the share of the other: nothing.
    assert [balanced_bce(pred, labels * (labels == 255) + y * (labels == 1)).item() for y in (0, 1)] == [0, 0]
    both = pred.expand(-1, 2, -1, -1)
    assert cross_entropy(both, labels).item() == pytest.approx(math.log(2))
    normal = torch.full((2, 3, 3, 3), 255.0)
    normal[1, :, 2, 1] = torch.tensor([0.0, 0.6, 0.8])
    assert normals_l1(torch.tensor([3.0, 0, 4]).view(1, 3, 1, 1).expand(2, -1, 3, 3), normal).item() == pytest.approx(
        1.2
    )


def test_balanced_bce_by_hand():
    # Three of four valid pixels are background: q = 3/4 weighs the salient one, 1/4 each of the others.
    p = torch.tensor([0.2, 0.9, 0.4, 0.6, 0.5])
    logits = torch.stack([torch.log(1 - p), torch.log(p)]).view(1, 2, 1, 5)
    labels = torch.tensor([[[0, 1, 0, 0, 255]]])
    others = math.log(0.8) + math.log(0.6) + math.log(0.4)
    expected = -(0.75 * math.log(0.9) + 0.25 * others) / 4
    assert balanced_bce(logits, labels).item() == pytest.approx(expected)
    assert balanced_bce(logits[:, 1:] - logits[:, :1], labels).item() == pytest.approx(expected)


def test_balanced_bce_takes_its_balance_from_the_batch_not_from_each_image():
    logits, labels, _ = example("saliency")
    labels[0] = 0
    labels[1] = 1
    apart = torch.stack([balanced_bce(logits[i : i + 1], labels[i : i + 1]) for i in (0, 1)]).mean()
    assert apart == 0  # one class alone has weight 0
    assert balanced_bce(logits[:2], labels[:2]) > 0.1


def test_edge_bce_by_hand():
    p = torch.tensor([0.2, 0.9, 0.4])
    logits = torch.logit(p).view(1, 1, 1, 3)
    labels = torch.tensor([[[0.0, 1.0, 255.0]]])
    assert edge_bce(logits, labels).item() == pytest.approx(-(0.05 * math.log(0.8) + 0.95 * math.log(0.9)) / 2)
    assert edge_bce(logits, labels, 0.7).item() == pytest.approx(-(0.3 * math.log(0.8) + 0.7 * math.log(0.9)) / 2)


def test_edge_bce_with_two_weights_is_torchs_pos_weight():
    logits, labels, valid = example("edge")
    expected = functional.binary_cross_entropy_with_logits(
        logits[:, 0][valid], labels[valid].float(), pos_weight=torch.tensor(10.0)
    )
    torch.testing.assert_close(edge_bce(logits, labels, 10, 1), expected)


def test_edge_bce_of_shares_lies_between_that_of_no_and_yes():
    logits = torch.tensor([[[[0.7]]]])
    no, half, yes = (edge_bce(logits, torch.tensor([[[y]]])).item() for y in (0.0, 0.5, 1.0))
    assert half == pytest.approx((no + yes) / 2)


def test_normals_l1_by_hand():
    pred = torch.tensor([[3.0, 0, 4], [0, 2, 0], [1, 1, 1], [1, 0, 0]]).T.view(1, 3, 1, 4)
    labels = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 255, 0]]).T.reshape(1, 3, 1, 4)
    assert normals_l1(pred, labels).item() == pytest.approx((0.4 + 0.8 + 2) / 2)


def test_the_thesis_normals_have_torchs_l1() -> None:
    """Algorithm 3 names L1 as torch has it, a mean over x, y and z too."""
    pred, labels = torch.randn(2, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    [weight] = {load(f"thesis/nyud-{name}").tasks["normals"]["weight"] for name in ("single", "pairwise", "multi")}
    expected = functional.l1_loss(functional.normalize(pred), labels)
    torch.testing.assert_close(weight * normals_l1(pred, labels), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_vectors_are_within_four_roundings_and_eight_of_those_by_the_norm(dtype: torch.dtype):
    rng = torch.Generator().manual_seed(0)
    lengths = 10 ** (26 * torch.rand(4, 1, 50, 50, generator=rng, dtype=torch.float64) - 11)
    vectors = (lengths * torch.randn(4, 3, 50, 50, generator=rng, dtype=torch.float64)).to(dtype)
    exact = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    by_norm = (vectors / vectors.norm(dim=1, keepdim=True)).double()
    u = torch.finfo(dtype).eps / 2
    found = unit(vectors).double()
    if dtype == torch.float32:  # the reference is in float64
        assert bool(((found - exact).abs() <= 4 * u * exact.abs()).all())
    assert bool(((found - by_norm).abs() <= 8 * u * exact.abs()).all())
    short = torch.full((1, 3, 1, 1), 1e-13, dtype=dtype)
    assert torch.equal(unit(short), short)


def test_a_zero_normal_has_a_finite_gradient():
    pred = torch.zeros(1, 3, 1, 1, requires_grad=True)
    normals_l1(pred, torch.tensor([0.6, 0.0, 0.8]).view(1, 3, 1, 1)).backward()
    assert pred.grad.isfinite().all()
    assert pred.grad.abs().max() <= 1


def test_depth_l1_by_hand():
    pred = torch.tensor([1.0, 2, 3, 4, 5, 6]).view(1, 1, 1, 6)
    labels = torch.tensor([2.0, 5, 0, 255, -1, math.nan]).view(1, 1, 1, 6)
    assert depth_l1(pred, labels).item() == pytest.approx((1 + 3) / 2)
    assert depth_l1(pred, labels[:, 0]).item() == pytest.approx((1 + 3) / 2)


def test_depth_l1_of_logarithms():
    pred = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    labels = torch.tensor([math.e - 1, 5.0]).view(1, 1, 1, 2)
    assert depth_l1(pred, labels, log=True).item() == pytest.approx((2 - math.log(6)) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", LOSSES)
def test_ignored_pixels_have_no_gradient_and_no_effect(kind):
    pred, labels, valid = example(kind)
    loss = LOSSES[kind](pred.requires_grad_(), labels)
    loss.backward()
    outside = ~valid.unsqueeze(1).expand_as(pred)
    assert torch.equal(pred.grad[outside], torch.zeros_like(pred.grad[outside]))
    assert (pred.grad[~outside] != 0).any()
    other = pred.detach().clone()
    other[outside] = 5.0
    torch.testing.assert_close(LOSSES[kind](other, labels), loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_no_label_at_all_is_zero_with_a_gradient(kind):
    pred, labels, _ = example(kind)
    loss = LOSSES[kind](pred.requires_grad_(), nothing(labels))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(pred.grad, torch.zeros_like(pred))


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_right(kind):
    pred, labels, _ = example(kind)
    pred, labels = pred[:1, :, :3, :3].double().requires_grad_(), labels[:1, ..., :3, :3]
    labels = labels.double() if labels.is_floating_point() else labels
    assert torch.autograd.gradcheck(lambda p: LOSSES[kind](p, labels), pred)


@pytest.mark.parametrize("kind", LOSSES)
def test_vmap_gives_the_losses_one_by_one(kind):
    parts = [example(kind, seed)[:2] for seed in range(3)]
    preds, labels = (torch.stack(x) for x in zip(*parts, strict=True))
    labels[1] = 255  # one model without any label
    expected = torch.stack([LOSSES[kind](p, y) for p, y in zip(preds, labels, strict=True)])
    torch.testing.assert_close(torch.func.vmap(LOSSES[kind])(preds, labels), expected)
    grads = torch.func.vmap(torch.func.grad(LOSSES[kind]))(preds, labels)
    alone = torch.stack([torch.func.grad(LOSSES[kind])(p, y) for p, y in zip(preds, labels, strict=True)])
    torch.testing.assert_close(grads, alone)


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_is_computed_in_float32(kind):
    pred, labels, _ = example(kind)
    half = pred.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = LOSSES[kind](half, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, LOSSES[kind](half.float(), labels))


@pytest.mark.parametrize("kind", LOSSES)
def test_labels_of_another_size_are_an_error(kind):
    pred, labels, _ = example(kind)
    with pytest.raises(DataError, match=r"labels of shape 3 x .*6 x 5, found 3 x .*6 x 4"):
        LOSSES[kind](pred, labels[..., :4])


@pytest.mark.parametrize("kind", LOSSES)
def test_inputs_are_not_changed(kind):
    pred, labels, _ = example(kind)
    before = pred.clone(), labels.clone()
    LOSSES[kind](pred, labels)
    assert torch.equal(pred, before[0])
    assert torch.equal(labels, before[1])
