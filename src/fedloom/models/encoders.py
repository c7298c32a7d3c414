"""The encoders that a recipe may name; the modules themselves are in `nets.py`, which needs torch.

An encoder is a module with the attribute `features` (int) that maps a batch (B x input shape) to B x features. Dense
tasks need a `PyramidEncoder`, which maps images to feature maps at several strides; its recipe keys `decoder`,
`decoder_norm` and `dim` say how the decoders between it and the heads are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field

from fedloom.core.errors import RecipeError
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import BelowOne, Count
from fedloom.models.signal import Decoding, Norm, sized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedloom.models.nets import Encoder, PyramidEncoder
    from fedloom.models.signal import Signal
    from fedloom.models.tasks.task import Task

ENCODERS = Registry("encoder", "fedloom.encoders", ("torch.nn:Module", "fedloom.models.build:Own"))
"""Functions `f(input_shape, tasks, signal, *, ...) -> Encoder`; their keyword-only arguments are the recipe's keys.

They take as many of the others as they need; `signal` is the kind of input, None if unknown.
"""


@ENCODERS.register("small-cnn")
def small_cnn(input_shape: tuple[int, ...], *, width: Count = 16, hidden: Count = 64) -> Encoder:
    """Build two 3 x 3 convolutions and one hidden layer, for images of 8 to 64 pixels; no norm layers, no dropout.

    The second pooling leaves at most 5 x 5 positions, so the size of the hidden layer hardly grows with the image.
    It holds no state beside its parameters, so torch.func.vmap can train many clients at once.
    """
    from fedloom.models.nets import SmallCNN

    shape = _image("small-cnn", input_shape, 8)
    return SmallCNN(shape, width, hidden, 3, (max(2, shape[1] // 8), max(2, shape[2] // 8)))


@ENCODERS.register("cnn", source="McMahan et al. (2017), section 3")
def cnn(input_shape: tuple[int, ...], *, width: Count = 32, hidden: Count = 512) -> Encoder:
    """Build the convolutional network of federated benchmarks: two 5 x 5 convolutions with pooling, one hidden layer.

    With the defaults, 28 x 28 grey images and 10 classes the whole model has the paper's 1,663,370 parameters;
    width 4 and hidden 48 give 20,266.
    """
    from fedloom.models.nets import SmallCNN

    return SmallCNN(_image("cnn", input_shape, 4), width, hidden, 5, (2, 2))


@ENCODERS.register("mlp")
def mlp(
    input_shape: tuple[int, ...],
    *,
    hidden: list[Count] = [128, 64],  # noqa: B006
) -> Encoder:
    """Build a multilayer perceptron with ReLU after each layer, for feature vectors and flattened images and series.

    Without `hidden` layers the heads are linear models of the inputs: logistic and linear regression.
    """
    from fedloom.models.nets import MLP

    return MLP(input_shape, hidden)


@ENCODERS.register("conv1d")
def conv1d(
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    signal: Signal | None,
    *,
    width: Count = 32,
    depth: Annotated[int, Field(ge=1, le=8)] = 3,
    kernel: Literal[3, 5, 7, 9] = 5,
    hidden: Count = 64,
) -> Encoder:
    """Build a small convolutional network for series (channels x steps): convolutions over steps, one hidden layer.

    The `depth` convolutions have w, 2w, 2w, ... channels, each with ReLU and a pool of 2 steps; the hidden layer sees
    the mean over the steps. There are no norm layers and no dropout, so it holds no state beside its parameters. With
    the defaults and 9 channels it has 36,480 parameters. A series needs at least 2^depth steps.
    """
    from fedloom.models.nets import Conv1d

    channels, steps = _series("conv1d", input_shape, signal)
    if steps < 2**depth:
        advice = "if the steps come first in the data, set axes=NTC (data.axes in a recipe, fl.Federation(axes='NTC'))"
        found = f"{steps} and {channels} channels; {advice}; else lower depth"
        fail("conv1d", f"at least {2**depth} steps for depth {depth}", found)
    return Conv1d(channels, (width, *[2 * width] * (depth - 1)), kernel, hidden)


@ENCODERS.register("transformer", source="Vaswani et al. (2017), shrunk; norm layers first (Xiong et al., 2020)")
def transformer(
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    signal: Signal | None,
    *,
    width: Count = 64,
    depth: Count = 2,
    num_heads: Count = 4,
    piece: Count = 8,
) -> Encoder:
    """Build a small transformer for tokens and for series; its features are the mean over the positions.

    A series (channels x steps) is cut into pieces of `piece` steps, whose number must divide that of the steps; each is
    one position. Of tokens, each is one, and those with the signal's padding are left out. Positions are learned;
    hidden layers have twice the width; there is no dropout. The width must be a multiple of `num_heads`.
    """
    from torch import nn

    from fedloom.models.nets import Pieces, Transformer

    if width % num_heads:
        fail("transformer", f"a width that {num_heads} heads can share", width)
    if signal is not None and signal.kind == "tokens" and len(input_shape) == 1:
        if signal.vocabulary is None:
            needs = "the size of the vocabulary, which the data do not state"
            advice = "add it, for example signal: {kind: tokens, vocabulary: 5000}"
            raise RecipeError(f"encoder 'transformer' needs {needs}; {advice}")
        embed = nn.Embedding(signal.vocabulary, width)
        return Transformer(embed, input_shape[0], width, depth, num_heads, signal.padding)
    channels, steps = _series("transformer", input_shape, signal, " or tokens")
    if steps % piece:
        fail("transformer", f"a number of steps that piece {piece} divides", steps)
    return Transformer(Pieces(channels, piece, width), steps // piece, width, depth, num_heads)


@ENCODERS.register("resnet10", source="He et al. (2016); the small-image form of the FedHEAL and F2DC releases")
def resnet10(input_shape: tuple[int, ...], *, width: Count = 64, norm: Norm = "batch") -> Encoder:
    """Build a ResNet, one basic block per stage: widths w, 2w, 4w, 8w, strides 1, 2, 2, 2, 3 x 3 stem, no max-pooling.

    With width 64, colour images and 7 classes the whole model has 4,901,703 parameters. `norm: group` has no running
    statistics to aggregate; its groups hold at least 16 channels.
    """
    from fedloom.models.nets import ResNet

    return ResNet(_image("resnet10", input_shape, 8), width, norm)


@ENCODERS.register("tiny-pyramid")
def tiny_pyramid(
    input_shape: tuple[int, ...],
    *,
    width: Count = 16,
    norm: Norm = "group",
    dim: Count = 32,
    decoder: Decoding = "pyramid",
    decoder_norm: Norm = "batch",
) -> PyramidEncoder:
    """Build a small convolutional pyramid for dense tasks on a CPU: maps of w, 2w, 4w, 4w channels at strides 4 to 32.

    With width 16 it has about 150,000 parameters. Sides must be multiples of 32. `norm: group` has no running
    statistics to aggregate. `dim` is the decoders' width; see `MultiTask` for `decoder`.
    """
    from fedloom.models.nets import TinyPyramid

    shape = _multiple("tiny-pyramid", input_shape, 32)
    return _decoded(TinyPyramid(shape[0], width, norm), dim, decoder, decoder_norm)


@ENCODERS.register("tiny-swin", source="Liu et al. (2021), shrunk; through timm")
def tiny_swin(
    input_shape: tuple[int, ...],
    *,
    width: Annotated[int, Field(ge=8, multiple_of=8)] = 24,
    window: Annotated[int, Field(ge=2)] = 4,
    drop_path: BelowOne = 0.0,
    dim: Count = 32,
    decoder: Decoding = "pyramid",
    decoder_norm: Norm = "batch",
) -> PyramidEncoder:
    """Build a small Swin transformer for dense tasks on a CPU: 1, 1, 2, 1 blocks, maps of w to 8w channels. Needs timm.

    With width 24 it has about 800,000 parameters. Sides must be multiples of 32. A window is never larger than the map
    it was built for, so models for inputs of different sizes may differ in the shapes of their bias tables.
    """
    from fedloom.models.timm_encoder import TimmPyramid

    shape, heads = _multiple("tiny-swin", input_shape, 32), (1, 2, 4, 8)
    small: dict[str, Any] = {"embed_dim": width, "depths": (1, 1, 2, 1), "num_heads": heads, "window_size": window}
    encoder = TimmPyramid("swin_tiny_patch4_window7_224", shape, dim, drop_path, **small)
    return _decoded(encoder, dim, decoder, decoder_norm)


@ENCODERS.register("timm", source="timm (Wightman); Swin as in FedHCA2 and FedDEA, ResNet-18 as in FedDEA")
def timm(
    input_shape: tuple[int, ...],
    *,
    architecture: str,
    pretrained: bool = False,
    drop_path: BelowOne | None = None,
    dim: Count | None = None,
    decoder: Decoding = "pyramid",
    decoder_norm: Norm = "batch",
) -> PyramidEncoder:
    """Build any hierarchical architecture of timm, for example swin_tiny_patch4_window7_224, resnet18 or convnext_tiny.

    Its maps at strides of 4 and more are used; sides must be multiples of 32. `dim`, the decoders' width, is by default
    the finest map's number of channels, at least 32 and at most 128: 96 for Swin-T and Swin-S, 128 for Swin-B, 64 for
    ResNet-18. `drop_path` is by default 0.1 for Swin and the architecture's own for others.

    `pretrained: true` takes ARCHITECTURE.safetensors from the folder that the environment variable FEDLOOM_WEIGHTS
    names (default ~/.cache/fedloom/weights); no download. That file, or the one that the key `weights` names, may hold
    a classifier, which is left out, or a segmentation network whose backbone has the original Swin names and is then
    taken alone. UserError where the file is absent, or lacks or adds tensors.
    """
    from fedloom.models.timm_encoder import TimmPyramid

    encoder = TimmPyramid(architecture, _multiple("timm", input_shape, 32), dim, drop_path)
    return _decoded(_pretrained(encoder, architecture, pretrained), encoder.dim, decoder, decoder_norm)


@ENCODERS.register("tiny-vit", source="Dosovitskiy et al. (2021), shrunk; through timm")
def tiny_vit(
    input_shape: tuple[int, ...], *, width: Count = 64, depth: Count = 4, num_heads: Count = 4, patch: Literal[4, 8] = 4
) -> Encoder:
    """Build a small vision transformer for images of 8 to 64 pixels on a CPU; its features are the mean of the tokens.

    It has no class token, hidden layers of twice the width, no dropout and no running statistics. With the defaults,
    colour images and 32 x 32 pixels it has 141,248 parameters. Sides must be multiples of `patch`, the width one of
    `num_heads`. Needs timm.
    """
    from fedloom.models.timm_encoder import TimmEncoder

    if width % num_heads:
        fail("tiny-vit", f"a width that is a multiple of num_heads {num_heads}", width)
    small: dict[str, Any] = {"patch_size": patch, "embed_dim": width, "depth": depth, "num_heads": num_heads}
    small |= {"mlp_ratio": 2.0, "class_token": False, "global_pool": "avg"}
    return TimmEncoder("vit_tiny_patch16_224", _multiple("tiny-vit", input_shape, patch), **small)


@ENCODERS.register("vit", source="timm (Wightman); ViT-B/32 as in MaTU")
def vit(input_shape: tuple[int, ...], *, architecture: str, pretrained: bool = False) -> Encoder:
    """Build a vision transformer, or another classifier of timm, for example vit_base_patch32_224: pooled features.

    Transformers are built for the images at hand, whose sides must be multiples of their patches. For dense tasks use
    `timm`, which gives feature maps.

    `pretrained: true` takes ARCHITECTURE.safetensors from the folder that the environment variable FEDLOOM_WEIGHTS
    names (default ~/.cache/fedloom/weights); no download. In that file, or the one that the key `weights` names, a
    classifier is left out and position embeddings are resized. UserError where the file is absent, or lacks or adds
    tensors.
    """
    from fedloom.models.timm_encoder import TimmEncoder

    return _pretrained(TimmEncoder(architecture, _image("vit", input_shape, 8)), architecture, pretrained)


E = TypeVar("E", bound="Encoder")


def _pretrained(encoder: E, architecture: str, wanted: bool) -> E:
    from fedloom.models.nets import load_weights, pretrained_file

    if wanted:
        load_weights(encoder, pretrained_file(architecture))
    return encoder


def _decoded(encoder: PyramidEncoder, dim: int, decoder: Decoding, norm: Norm) -> PyramidEncoder:
    encoder.dim, encoder.decoder, encoder.decoder_norm = dim, decoder, norm
    return encoder


def fail(encoder: str, expected: str, found: object) -> NoReturn:
    """Refuse what an encoder cannot be built for."""
    raise RecipeError(f"encoder {encoder!r} expects {expected}, found {found}".rstrip())


def _multiple(encoder: str, shape: tuple[int, ...], stride: int) -> tuple[int, int, int]:
    """Return `shape` as channels, height, width, both multiples of `stride`, or a RecipeError."""
    channels, height, width = _image(encoder, shape, stride)
    if height % stride or width % stride:
        side = -(-max(height, width) // stride) * stride
        advice = f"resize them, for example by data.size={side} or fl.Federation(..., size={side})"
        fail(encoder, f"images whose height and width are multiples of {stride}", f"{height} x {width}; {advice}")
    return channels, height, width


def _series(encoder: str, shape: tuple[int, ...], signal: Signal | None, more: str = "") -> tuple[int, int]:
    """Return `shape` as channels, steps, or a RecipeError."""
    expected = f"a series (channels x steps){more}"
    if signal is None and len(shape) == 2:
        advice = "which may be a grey image or a series; add: signal='series' of a Federation or a Dataset"
        fail(encoder, expected, f"inputs of shape {tuple(shape)}, {advice}")
    if signal is None or signal.kind != "series" or len(shape) != 2:
        fail(encoder, expected, sized(shape, signal))
    return shape[0], shape[1]


_OTHERS = {
    1: "For feature vectors use 'mlp', for tokens 'transformer'.",
    2: "For series use 'conv1d' or 'transformer'.",
}


def _image(encoder: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return `shape` as channels, height, width, or a RecipeError."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        found = f"inputs of shape {tuple(shape)}. {_OTHERS.get(len(shape), '')}"
        fail(encoder, f"images C x H x W of at least {smallest} pixels a side", found)
    return shape[0], shape[1], shape[2]
