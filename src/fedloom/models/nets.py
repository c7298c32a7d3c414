"""The modules behind the encoders of images, series and tokens, and their weights from files.

Each module keeps the width of its output in `features`.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn, relu
from torch.nn.functional import gelu, max_pool2d
from torch.utils.hooks import RemovableHandle

from fedloom.core.errors import StateError, UserError, first_of, parsing
from fedloom.core.lazy import need
from fedloom.models.signal import Decoding, Norm, Shape


class Encoder(nn.Module):
    """Maps a batch of inputs (B x ...) to B x features."""

    features: int
    reads_tokens: bool = False
    """True if its inputs are whole numbers that stand for something."""
    seen: tuple[Sequence[float], Sequence[float]] | None = None
    """Mean and standard deviation by channel, of 0..1, of the images that its known weights were trained on."""

    def adopt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint (name -> tensor) under this encoder's own names, which here it must have already."""
        return state


class PyramidEncoder(Encoder):
    """Maps a batch of images (B x C x H x W) to feature maps (B x C_i x H/s_i x W/s_i), finest first.

    channels      C_i
    strides       s_i; the height and width of an image must be multiples of the last
    features      C of the last map; its mean over positions is what heads without a decoder read
    dim           width of the decoders of dense tasks
    decoder       their kind, and `decoder_norm` their norm layers
    """

    channels: tuple[int, ...]
    strides: tuple[int, ...]
    dim: int
    decoder: Decoding = "pyramid"
    decoder_norm: Norm = "batch"


class SmallCNN(Encoder):
    """Convolution, pool 2 x 2, convolution, pool, linear; the kernel's size and the second pool are given."""

    def __init__(self, shape: Shape, width: int, hidden: int, kernel: int, pool: tuple[int, int]) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.features = hidden
        self.conv1 = nn.Conv2d(channels, width, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel, padding=kernel // 2)
        self.pool = pool
        self.linear = nn.Linear(2 * width * (height // 2 // pool[0]) * (breadth // 2 // pool[1]), hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map B x C x H x W to B x hidden."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), self.pool)
        return relu(self.linear(x.flatten(1)))


class MLP(Encoder):
    """Linear layers, each followed by ReLU."""

    def __init__(self, shape: tuple[int, ...], hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        self.features = widths[-1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Map B x ... to B x hidden[-1]."""
        x = x.flatten(1)
        for layer in self.layers:
            x = relu(layer(x))
        return x


def norm_layer(kind: Norm, channels: int) -> nn.Module:
    """Return batch norm, or group norm with groups of at least 16 channels."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside an identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map B x inputs x H x W to B x outputs x H/stride x W/stride."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(Encoder):
    """Stem, four stages of one basic block each, mean over positions."""

    def __init__(self, shape: Shape, width: int, norm: Norm) -> None:
        super().__init__()
        self.features = 8 * width
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.norm = norm_layer(norm, width)
        widths = ((1, 1), (1, 2), (2, 4), (4, 8))
        self.stages = nn.Sequential(*(BasicBlock(a * width, b * width, b // a, norm) for a, b in widths))

    def forward(self, x: Tensor) -> Tensor:
        """Map B x C x H x W to B x 8 width."""
        return self.stages(relu(self.norm(self.stem(x)))).mean((2, 3))


class TinyPyramid(PyramidEncoder):
    """A strided 3x3 convolution and four basic blocks of stride 2: maps at strides 4, 8, 16 and 32."""

    def __init__(self, channels: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.channels = (width, 2 * width, 4 * width, 4 * width)
        self.strides = (4, 8, 16, 32)
        self.features = self.channels[-1]
        self.stem = nn.Conv2d(channels, width, 3, 2, padding=1, bias=False)
        self.norm = norm_layer(norm, width)
        self.stages = nn.ModuleList(BasicBlock(a, b, 2, norm) for a, b in itertools.pairwise((width, *self.channels)))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Map B x C x H x W to four maps, finest first."""
        x = relu(self.norm(self.stem(x)))
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return maps


def pass_zeros(encoder: nn.Module, shape: tuple[int, ...], hooks: Sequence[RemovableHandle]) -> None:
    """Pass one example of zeros in evaluation mode, for observing hooks, which are removed afterwards in any case."""
    mode = encoder.training
    try:
        with torch.no_grad():
            whole = getattr(encoder, "reads_tokens", False)
            encoder.eval()(torch.zeros(1, *shape, dtype=torch.int64 if whole else torch.float32))
    finally:
        encoder.train(mode)
        for hook in hooks:
            hook.remove()


class Conv1d(Encoder):
    """Convolutions over the steps, each with ReLU and a pool of 2 steps; the mean over the steps; a linear layer.

    A convolution over steps is one over an image of height 1, so that what looks at maps (B x C x H x W), and what
    replaces convolutions, does so here, too.
    """

    def __init__(self, channels: int, widths: tuple[int, ...], kernel: int, hidden: int) -> None:
        super().__init__()
        self.features = hidden
        sizes = itertools.pairwise((channels, *widths))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, (1, kernel), padding=(0, kernel // 2)) for a, b in sizes)
        self.linear = nn.Linear(widths[-1], hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map B x C x T to B x hidden."""
        x = x[:, :, None]
        for conv in self.convs:
            x = max_pool2d(relu(conv(x)), (1, 2))
        return relu(self.linear(x.mean((2, 3))))


class Block(nn.Module):
    """Attention and a hidden layer of twice the width, each behind a layer norm and beside an identity."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, ignored: Tensor | None) -> Tensor:
        """Map B x T x width to the same; nothing attends to the positions `ignored` (B x T, bool)."""
        x = x + self.proj(self.attention(self.norm1(x), ignored))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))

    def attention(self, x: Tensor, ignored: Tensor | None) -> Tensor:
        """Map B x T x width to the same.

        Written out: fused kernels have no forward mode, no rule for vmap, and no fixed order of summation on a GPU.
        """
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        if ignored is not None:  # not -inf: a text may have no word
            scores = scores.masked_fill(ignored[:, None, None], torch.finfo(scores.dtype).min)
        return (scores.softmax(3) @ v).transpose(1, 2).flatten(2)


class Transformer(Encoder):
    """Tokens, or pieces of a series, with learned positions; blocks; the mean over the positions. `embed` maps an input
    to B x T x width, with T = `positions`. Positions with the token `padding` are left out."""

    def __init__(
        self, embed: nn.Module, positions: int, width: int, depth: int, num_heads: int, padding: int | None = None
    ) -> None:
        super().__init__()
        self.features, self.padding = width, padding
        self.embed = embed
        self.positions = nn.Parameter(torch.empty(1, positions, width))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map B x T tokens, or B x C x steps of a series, to B x width."""
        ignored = None if self.padding is None else x == self.padding
        x = self.embed(x) + self.positions
        for block in self.blocks:
            x = block(x, ignored)
        x = self.norm(x)
        if ignored is None:
            return x.mean(1)
        there = (~ignored)[:, :, None].to(x)
        return (x * there).sum(1) / there.sum(1).clamp(min=1)


class Pieces(nn.Module):
    """A series cut into pieces of some steps, each mapped to a vector."""

    def __init__(self, channels: int, steps: int, width: int) -> None:
        super().__init__()
        self.steps = steps
        self.linear = nn.Linear(channels * steps, width)

    def forward(self, x: Tensor) -> Any:
        """Map B x C x T to B x T / steps x width."""
        return self.linear(x.unflatten(2, (-1, self.steps)).transpose(1, 2).flatten(2))


WEIGHTS = "FEDLOOM_WEIGHTS"


def load_weights(encoder: Encoder, file: str | Path) -> None:
    """Load a .safetensors file, or a .pth file without pickled code, into an encoder.

    It holds the tensors under the encoder's own names, as `fedloom study pretrain` writes them, or in another form that
    the encoder knows (see `Encoder.adopt`). UserError names what is missing, unexpected or of another shape; only the
    batch counters of norm layers may be missing.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"the weights file {path} does not exist")
    state = _read(path)
    try:
        with warnings.catch_warnings():  # timm's resizing of bias tables warns about its own speed
            warnings.simplefilter("ignore")
            state = encoder.adopt(state)
    except (AttributeError, LookupError, RuntimeError) as error:
        raise UserError(f"weights file {path}: the weights do not fit this architecture ({error})") from error
    needed = encoder.state_dict()
    missing = sorted(key for key in needed.keys() - state.keys() if not key.endswith("num_batches_tracked"))
    problems = [f"missing {first_of(map(repr, missing))}"] if missing else []
    more = sorted(state.keys() - needed.keys())
    problems += [f"unexpected {first_of(map(repr, more))}"] if more else []
    both = [(key, form(needed[key]), form(state[key])) for key in needed if key in state]
    shapes = [f"{key}: expected shape {wanted}, found {found}" for key, wanted, found in both if wanted != found]
    if problems or shapes:
        raise UserError(f"weights file {path}: {'; '.join([*problems, *shapes[:3]])}")
    if broken := sorted(repr(key) for key, v in state.items() if infinite(v, needed[key])):
        raise UserError(f"weights file {path}: expected finite values, found nan or inf in {first_of(broken)}")
    encoder.load_state_dict(state, strict=False)


def pretrained_file(architecture: str) -> Path:
    """Return the file with timm's weights of an architecture. Raises UserError if absent; downloads nothing."""
    folder = Path(os.environ.get(WEIGHTS, "~/.cache/fedloom/weights")).expanduser()
    file = folder / f"{architecture}.safetensors"
    if file.is_file():
        return file
    timm, hub = need("timm", "vision"), None
    with suppress(RuntimeError):  # weights of an unknown name after the point
        hub = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    if (name := getattr(hub, "hf_hub_id", None)) is None:
        raise UserError(f"timm has no pretrained weights of {architecture!r}, and {file} does not exist")
    raise UserError(
        f"timm: pretrained weights of {architecture!r} are missing: expected {file}. A run downloads nothing. With "
        f"a network connection: pip install huggingface_hub && hf download {name} model.safetensors --local-dir "
        f"'{folder}' && mv '{folder / 'model.safetensors'}' '{file}'. Or replace `pretrained` by a file with "
        f"the key `weights`, or a folder with the environment variable {WEIGHTS}."
    )


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file, without the prefix that distributed training adds."""
    with parsing(f"weights file {file}: expected a safetensors file, or a state_dict that torch saved"):
        try:
            is_safe = file.suffix == ".safetensors"
            content: Any = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            advice = "which could run untrusted code; save its state_dict alone, or as .safetensors"
            raise UserError(f"it holds more than tensors and plain values, {advice}") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(key).removeprefix("module."): v for key, v in named if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(f"weights file {file}: expected named tensors, found none")
    for key, v in tensors.items():
        if v.layout != torch.strided or v.is_quantized or v.is_complex() or v.is_meta:
            raise UserError(f"weights file {file}: {key}: expected plain real numbers, found {v.dtype} on {v.device}")
    return tensors


def form(value: Tensor) -> str:
    """Return the shape of a weight as text, and the kind of its values where they are no real numbers."""
    return f"{tuple(value.shape)}{kind(value)}"


def kind(value: Tensor) -> str:
    """Return the kind of a weight's values where they are no real numbers, else an empty text."""
    return "" if value.is_floating_point() else " of complex numbers" if value.is_complex() else " of integers"


def check_weights(weights: Mapping[str, Tensor], module: nn.Module, where: str) -> None:
    """Raise StateError for weights with other names, shapes or kinds than the model's, or numbers that are not finite.

    The batch counters of norm layers may be missing.
    """
    own = module.state_dict()
    for name in {**own, **weights}:
        if name not in weights and name.endswith("num_batches_tracked"):
            continue
        pair = weights.get(name), own.get(name)
        have, want = ("nothing" if t is None else f"{[*t.shape]}{kind(t)}" for t in pair)
        if have != want:
            raise StateError(f"{where}: {name}: {have} found, expected {want}")
        if count := infinite(weights[name], own[name]):
            raise StateError(f"{where}: {name}: expected finite numbers, found {count} that are not finite")


def infinite(value: Tensor, own: Tensor) -> int:
    """Count the values of a weight that are not finite in the precision of the model's own."""
    return int((~value.to(own.dtype).isfinite()).sum())
