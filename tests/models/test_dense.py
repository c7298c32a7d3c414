"""Pyramid encoders, decoders, and the multi-task model over them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate, leaky_relu

from fedloom.core.layout import Layout
from fedloom.errors import RecipeError
from fedloom.models import ENCODERS, MultiTask, build_model
from fedloom.models.multitask import PyramidDecoder, ThesisDecoder, TransposedDecoder
from fedloom.tasks import Classification
from fedloom.training.flat import FlatModel


@dataclass(frozen=True)
class Dense(Classification):
    """A stand-in for the dense tasks: two transposed convolutions and a 1x1 one."""

    dense: ClassVar[bool] = True

    def head(self, features: int) -> nn.Module:
        half, quarter = features // 2, features // 4
        return nn.Sequential(
            nn.ConvTranspose2d(features, half, 2, 2),
            nn.ConvTranspose2d(half, quarter, 2, 2),
            nn.Conv2d(quarter, self.channels, 1),
        )


TASKS = (Dense("semseg", 5), Dense("depth", 1), Classification("scene", 4))
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
ENCODER_NAMES = ["tiny-pyramid", pytest.param("tiny-swin", marks=needs_timm)]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ENCODER_NAMES)
def test_maps_at_the_strides_that_the_encoder_states(name):
    encoder = ENCODERS[name].function((3, 64, 96)).eval()
    maps = encoder(torch.zeros(2, 3, 64, 96))
    expected = [(2, c, 64 // s, 96 // s) for c, s in zip(encoder.channels, encoder.strides, strict=True)]
    assert [tuple(m.shape) for m in maps] == expected
    assert encoder.features == encoder.channels[-1]


def test_tiny_encoders_are_tiny():
    assert 100_000 < count(ENCODERS["tiny-pyramid"].function((3, 64, 64))) < 200_000


def test_decoder_of_swin_t_has_the_published_size():
    assert count(PyramidDecoder((96, 192, 384, 768), 96)) == 175_776


def test_decoder_equals_its_definition():
    """Linear, resize to the finest map, concatenate, 1x1 convolution, norm, leaky ReLU."""
    torch.manual_seed(0)
    decoder = PyramidDecoder((3, 5, 7), 4)
    nn.init.normal_(decoder.fuse.bias)
    maps = [torch.randn(2, c, 12 // s, 8 // s) for c, s in ((3, 1), (5, 2), (7, 4))]
    wide = [linear(m) for linear, m in zip(decoder.linears, maps, strict=True)]
    wide = [interpolate(m, size=(12, 8), mode="bilinear", align_corners=False) for m in wide]
    expected = leaky_relu(decoder.norm(decoder.fuse(torch.cat(wide, 1))), 0.01)
    torch.testing.assert_close(decoder(maps), expected)


def test_decoders_start_he_normal():
    torch.manual_seed(0)
    decoder = PyramidDecoder((96, 192, 384, 768), 96)
    assert decoder.linears[3].weight.std().item() == pytest.approx((2 / 768) ** 0.5, rel=0.02)
    assert not decoder.fuse.bias.any()


def test_thesis_decoder_halves_the_channels_and_reaches_the_input_size():
    with torch.device("meta"):
        decoder = ThesisDecoder((256, 512, 1024, 2048), (4, 8, 16, 32))
    assert [conv.out_channels for conv in decoder.convs] == [1024, 512, 256, 128, 64]
    small = ThesisDecoder((8, 64), (4, 16), "group")
    assert [conv.out_channels for conv in small.convs] == [32, 16, 16, 16]
    assert small([torch.zeros(1, 8, 8, 8), torch.zeros(1, 64, 2, 2)]).shape == (1, 16, 32, 32)


@pytest.mark.parametrize(("stride", "strides"), [(32, (4, 4, 2)), (16, (4, 2, 2)), (4, (2, 2, 1))])
def test_transposed_decoder_has_three_layers_with_strides_that_fall(stride, strides):
    decoder, task = TransposedDecoder((8, 512), (4, stride)), TASKS[0]
    layers = [*decoder.layers[::2], decoder.head(task)]
    assert [type(layer) for layer in layers] == [nn.ConvTranspose2d] * 3
    assert [(layer.stride, layer.kernel_size) for layer in layers] == [((s, s), (s, s)) for s in strides]
    assert [(layer.in_channels, layer.out_channels) for layer in layers] == [(512, 256), (256, 128), (128, 5)]
    maps = [torch.zeros(1, 8, 16, 16), torch.zeros(1, 512, 2, 3)]
    assert decoder.head(task)(decoder(maps)).shape == (1, 5, 2 * stride, 3 * stride)


@pytest.mark.parametrize("decoder", ["pyramid", "transposed", "thesis"])
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (128, 160)])
def test_outputs_are_as_large_as_the_input(decoder, size):
    model = build_model("tiny-pyramid", {"decoder": decoder, "dim": 8}, (3, 64, 64), TASKS, 0).eval()
    shapes = {task: tuple(y.shape) for task, y in model(torch.zeros(1, 3, *size)).items()}
    assert shapes == {"semseg": (1, 5, *size), "depth": (1, 1, *size), "scene": (1, 4)}


@pytest.mark.parametrize("name", ENCODER_NAMES)
def test_a_task_that_is_not_asked_for_is_not_computed(name):
    model = build_model(name, {}, (3, 64, 64), TASKS, 0)
    model.decoders["depth"].register_forward_pre_hook(lambda *_: pytest.fail("computed"))
    model(torch.randn(2, 3, 64, 64), ["semseg"])["semseg"].sum().backward()
    for key, p in model.named_parameters():
        foreign = key.startswith(("decoders.depth.", "heads.depth.", "heads.scene."))
        assert (p.grad is None) == foreign, key


@pytest.mark.parametrize("name", ENCODER_NAMES)
def test_every_parameter_has_a_role_and_the_flat_model_holds_them_all(name):
    model = build_model(name, {}, (3, 64, 64), TASKS, 0)
    layout = Layout.from_module(model)
    parts = {b.name: (b.part, b.task) for b in layout.blocks}
    assert set(parts) >= {key for key, _ in model.named_parameters()}
    for key, part in parts.items():
        first, second, *_ = key.split(".")
        assert part == {"encoder": ("encoder", None), "decoders": ("decoder", second), "heads": ("head", second)}[first]
    x = torch.randn(1, 3, 64, 64)
    before = model.eval()(x)
    flat = FlatModel(model)
    assert flat.layout.parameters.d == count(model)
    after = model(x)
    for task in before:  # not bit for bit: kernels may look at where a tensor begins
        torch.testing.assert_close(after[task], before[task])
    flat.params.zero_()
    assert not any(p.any() for p in model.parameters())


def test_a_decoder_with_group_norm_has_no_statistics():
    model = build_model("tiny-pyramid", {"decoder_norm": "group"}, (3, 64, 64), TASKS, 0)
    assert not list(model.buffers())


def test_sizes_that_the_strides_do_not_divide():
    with pytest.raises(RecipeError, match="multiples of 32, found 64 x 70"):
        build_model("tiny-pyramid", {}, (3, 64, 70), TASKS, 0)
    with pytest.raises(RecipeError, match="at least 32 pixels"):
        build_model("tiny-pyramid", {}, (3, 16, 16), TASKS, 0)
    model = build_model("tiny-pyramid", {}, (3, 64, 64), TASKS, 0)
    with pytest.raises(RecipeError, match="multiples of 32, found 64 x 48"):
        model(torch.zeros(1, 3, 64, 48))


def test_dense_tasks_need_maps():
    with pytest.raises(RecipeError, match="task 'semseg' predicts a map, .* found SmallCNN"):
        MultiTask(ENCODERS["small-cnn"].function((3, 64, 64)), TASKS)
