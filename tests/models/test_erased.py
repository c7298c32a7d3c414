"""FDSE's split layer, and an encoder whose layers are split."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.layout import Layout
from fedloom.federation.rounds.build import build
from fedloom.methods.fdse.rules import ERASERS, Erase, ErasedLayer, erased_layers, moments
from fedloom.models.changes import changed
from fedloom.models.multitask import MultiTask
from fedloom.tasks import Classification
from tests_support import load_recipe

SHAPE = (1, 16, 16)
X = torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1))


def t(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def model(encoder: str, shape: tuple[int, ...] = SHAPE, **params: Any) -> MultiTask:
    from fedloom.models.build import build_model

    return build_model(encoder, params, shape, [Classification("a", 3)], 0)


def erased(encoder: str, **params: Any) -> MultiTask:
    return changed(model(encoder, **params), (Erase(),), SHAPE, 0)


@pytest.mark.parametrize(("outputs", "stride", "side"), [(6, 1, 5), (7, 2, 3), (1, 1, 5)])
def test_shapes_and_parameters_of_a_convolution(outputs: int, stride: int, side: int) -> None:
    layer = ErasedLayer(nn.Conv2d(4, outputs, 3, stride, padding=1))
    assert layer(torch.randn(2, 4, 5, 5)).shape == (2, outputs, side, side)
    half = math.ceil(outputs / 2)
    own = {"extractor": 36 * half, "eraser_norm": 2 * half, "eraser": 9 * half, "norm": 2 * outputs}
    assert {name: sum(p.numel() for p in module.parameters()) for name, module in layer.named_children()} == own
    assert layer.shift.shape == (outputs,)


def test_a_linear_layer() -> None:
    layer = ErasedLayer(nn.Linear(4, 5)).double().eval()
    x = torch.randn(7, 4, dtype=torch.float64)
    extracted = x @ layer.extractor.weight.T / math.sqrt(1 + 1e-5)
    made = extracted * layer.eraser.weight.flatten()
    torch.testing.assert_close(layer.before_norm(x), torch.cat([extracted, made], 1)[:, :5])
    assert sum(p.numel() for p in layer.parameters()) == 4 * 3 + 6 + 3 + 5 + 10


def test_the_first_channels_are_the_normalised_extractor_and_the_others_come_from_it() -> None:
    layer = ErasedLayer(nn.Conv2d(3, 4, 3, padding=1)).double().eval()
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


def test_it_begins_with_the_first_half_of_the_layer_and_leaves_that_alone() -> None:
    conv = nn.Conv2d(3, 5, 5, 2, padding=2, dilation=2)
    before = copy.deepcopy(conv.state_dict())
    layer = ErasedLayer(conv)
    assert torch.equal(layer.extractor.weight, conv.weight[:3])
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        layer.extractor.weight.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in conv.state_dict().items())
    assert layer(x).shape == conv(x).shape


def test_moments_by_hand() -> None:
    x = t([[[1, 3]], [[0, 0]]], [[[5, 7]], [[0, 4]]])
    mean, variance = moments(x)
    assert mean.tolist() == [4, 1]
    assert variance.tolist() == pytest.approx([20 / 3, 4])
    assert moments(t([1, 2], [3, 6]))[1].tolist() == [2, 8]
    assert moments(x.bfloat16())[0].dtype == torch.float32


def test_what_is_seen_is_what_the_norms_statistics_become() -> None:
    layer = ErasedLayer(nn.Conv2d(3, 4, 3)).train()
    layer.norm.momentum = 1.0
    layer(torch.randn(4, 3, 6, 6))
    torch.testing.assert_close(layer.seen[0], layer.norm.running_mean)
    torch.testing.assert_close(layer.seen[1], layer.norm.running_var)


@pytest.mark.parametrize(
    ("encoder", "params", "count"),
    [
        ("small-cnn", {"width": 4}, 3),
        ("cnn", {"width": 4, "hidden": 8}, 3),
        ("mlp", {}, 2),
        ("resnet10", {"width": 4}, 12),
        ("resnet10", {"width": 4, "norm": "group"}, 12),
    ],
)
def test_every_layer_of_an_encoder(encoder: str, params: dict[str, Any], count: int) -> None:
    plain, ours = model(encoder, **params), erased(encoder, **params)
    layers = erased_layers(ours)
    assert len(layers) == count
    assert ours.train()(X)["a"].shape == plain(X)["a"].shape
    assert all(layer.seen is not None for layer in layers)
    inner = {id(m) for layer in layers for m in layer.modules()}
    left = [m for m in ours.encoder.modules() if id(m) not in inner]
    # one norm a layer, beside the eraser's: none is left behind it
    assert not [m for m in left if isinstance(m, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.GroupNorm)]
    assert sum(p.numel() for p in ours.parameters()) < 0.8 * sum(p.numel() for p in plain.parameters())


def test_a_norm_is_taken_along() -> None:
    plain = model("resnet10", width=4)
    with torch.no_grad():
        plain.encoder.norm.weight.fill_(3)
        plain.encoder.stages[1].shortcut[1].weight.fill_(5)
    Erase()(plain, SHAPE)
    assert (plain.encoder.stem.norm.weight == 3).all()
    assert (plain.encoder.stages[1].shortcut[0].norm.weight == 5).all()
    assert plain.train()(X)["a"].isfinite().all()
    assert int(plain.encoder.stem.norm.num_batches_tracked) == 1  # looking at the encoder did not count


def test_new_parameters_depend_on_the_seed_alone() -> None:
    a, b = erased("small-cnn"), erased("small-cnn")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    c = changed(model("small-cnn"), (Erase(),), SHAPE, 1)
    assert not torch.equal(a.encoder.conv1.eraser.weight, c.encoder.conv1.eraser.weight)


def test_erasers_are_shared_but_for_their_statistics() -> None:
    layout = Layout.from_module(erased("resnet10", width=4))
    erasers = layout.parameters.select(ERASERS)
    assert len(erasers.blocks) == 3 * 12
    assert {b.part for b in erasers.blocks} == {"encoder"}
    private = layout.select("private")
    assert {b.role for b in private.blocks} == {"buffer"}
    assert len(private.blocks) == 2 * 12
    assert all("eraser_norm" in b.name for b in private.blocks)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("model={name: tiny-vit, width: 16, depth: 1, num_heads: 2}", "qkv' of TimmEncoder gives 4 x 48 values per"),
        ("model={name: mlp, lora: {rank: 2, targets: [layers.0]}}", "leave model.lora out"),
    ],
)
def test_what_cannot_be_split(model: str, reason: str) -> None:
    with pytest.raises(fedloom.errors.RecipeError, match=reason):
        build(load_recipe("method=fdse", model))
