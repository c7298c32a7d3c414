"""One shared encoder with one head, and for dense tasks one decoder, per task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, leaky_relu

from fedloom.core.errors import RecipeError
from fedloom.models.nets import Encoder, PyramidEncoder, norm_layer
from fedloom.models.signal import Norm
from fedloom.models.tasks.task import Task

SLOPE = 0.01


class Decoder(nn.Module):
    """Maps feature maps, finest first, to one map of `width` channels, which a head reads."""

    width: int

    def head(self, task: Task) -> nn.Module:
        """Return the head that goes with the decoder: by default the task's own."""
        return task.head(self.width)


class PyramidDecoder(Decoder):
    """Every map linearly to `dim` channels, all resized to the finest, concatenated, 1x1 convolution, norm, leaky ReLU.

    Source: FedHCA2's decoder (supplement, section C) in the form of its release. For channels 96, 192, 384, 768 and
    dim 96 it has 175,776 parameters. Convolutions start He-normal with bias zero (FedDEA, appendix B.1).
    """

    def __init__(self, channels: Sequence[int], dim: int, norm: Norm = "batch") -> None:
        super().__init__()
        self.width = dim
        self.linears = nn.ModuleList(nn.Conv2d(c, dim, 1) for c in channels)
        self.fuse = nn.Conv2d(len(channels) * dim, dim, 1)
        self.norm = norm_layer(norm, dim)
        _he_normal(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Decode maps (B x C_i x H_i x W_i, finest first) to B x dim x H_0 x W_0."""
        # Bilinear weights sum to one, so a 1x1 convolution may come before the resize: each map is mixed at its own
        # size, and the concatenation, four times as wide and at the finest size, is never made.
        shares = self.fuse.weight.split(self.width, dim=1)
        y = conv2d(self.linears[0](maps[0]), shares[0], self.fuse.bias)
        for linear, x, share in zip(list(self.linears)[1:], maps[1:], shares[1:], strict=True):
            y = y + interpolate(conv2d(linear(x), share), size=y.shape[2:], mode="bilinear", align_corners=False)
        return leaky_relu(self.norm(y), SLOPE)


class ThesisDecoder(Decoder):
    """The coarsest map through as many (3x3 convolution, norm, ReLU, twice as large) as reach the input's size.

    Source: the release of the decentralised thesis, which takes 2048 channels at stride 32 to 64 in five steps that
    halve the channels. Smaller encoders halve down to 16 channels.
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int], norm: Norm = "batch") -> None:
        super().__init__()
        widths = [channels[-1], *(max(16, channels[-1] >> step) for step in range(1, strides[-1].bit_length()))]
        self.width = widths[-1]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_layer(norm, b) for b in widths[1:])
        _he_normal(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Decode maps (B x C_i x H_i x W_i; the last is used) to B x width x H x W at the input's size."""
        x = maps[-1]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = interpolate(norm(conv(x)).relu(), scale_factor=2, mode="bilinear", align_corners=False)
        return x

    def head(self, task: Task) -> nn.Module:
        return nn.Conv2d(self.width, task.channels, 3, padding=1)


class TransposedDecoder(Decoder):
    """The coarsest map through three transposed convolutions to the input's size; the third is the head.

    Source: the text of the decentralised thesis: strides that fall (section 4.1.2), so 4, 4 and 2 for an encoder of
    stride 32, and 256, 128 and the task's channels (section 6.1.3), with no activation at the end. Section 4.1.2 ends
    in a sigmoid or tanh instead, which does not fit its own depth of log(1 + metres). It names neither the kernels,
    which are as large as the strides here, nor what is between the layers, here a ReLU.
    """

    def __init__(self, channels: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        halvings = strides[-1].bit_length() - 1
        first, second, self.last = (2 ** ((halvings + 2 - layer) // 3) for layer in range(3))
        self.width = 128
        larger = nn.ConvTranspose2d(channels[-1], 256, first, first), nn.ConvTranspose2d(256, 128, second, second)
        self.layers = nn.Sequential(larger[0], nn.ReLU(), larger[1], nn.ReLU())

    def forward(self, maps: Sequence[Tensor]) -> Any:
        """Decode maps (B x C_i x H_i x W_i; the last counts) to B x 128 x H / s x W / s; the head enlarges by s."""
        return self.layers(maps[-1])

    def head(self, task: Task) -> nn.Module:
        return nn.ConvTranspose2d(self.width, task.channels, self.last, self.last)


def make_decoder(encoder: PyramidEncoder) -> Decoder:
    """Return a decoder of the kind that an encoder's recipe names."""
    if encoder.decoder == "thesis":
        return ThesisDecoder(encoder.channels, encoder.strides, encoder.decoder_norm)
    if encoder.decoder == "transposed":
        return TransposedDecoder(encoder.channels, encoder.strides)
    return PyramidDecoder(encoder.channels, encoder.dim, encoder.decoder_norm)


def _he_normal(decoder: nn.Module) -> None:
    for module in decoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, a=SLOPE, nonlinearity="leaky_relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def check_name(task: str) -> None:
    """Raise RecipeError unless a task's name can be a part of parameter names."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", task):
        why = "because it becomes part of parameter names"
        raise RecipeError(f"task name {task!r}: expected letters, digits, '_' and '-' only, {why}")
    if hasattr(nn.ModuleDict(), task):
        why = "torch.nn.ModuleDict has an attribute of that name"
        raise RecipeError(f"task name {task!r} cannot be used: {why}. Rename the task, for example {task + '_task'!r}")


class MultiTask(nn.Module):
    """`encoder`, `decoders` (a module per dense task) and `heads` (a module per task).

    Dense tasks need an encoder that gives feature maps. Each has a decoder of its own on all maps, and its head's
    output is resized to the input's size (bilinear, align_corners false). `encoder.decoder` says which decoder:
    `pyramid` (`PyramidDecoder`), `transposed` (`TransposedDecoder`, of the decentralised thesis) or `thesis`
    (`ThesisDecoder`, of its release). Other tasks read the encoder's features; those of maps are the mean of the last
    one. `heads` replace the tasks' own heads.

    RecipeError for a name that no parameter can have (see `check_name`) or that occurs twice, and where a dense task
    meets an encoder without maps.
    """

    public: Tensor | None
    """The inputs of the public set (n x ...), where the federation has one."""
    more_roles: dict[str, str | tuple[str, str]]
    """Globs that go before all others in `roles`: for what a `ModelChange` puts into the model."""
    rescale: tuple[Tensor, Tensor] | None = None
    """The scale and the shift (1 x C x 1 x 1) of inputs before the encoder; None for neither."""
    frozen_statistics: bool = False
    """True if norm layers of the encoder stay in evaluation mode."""

    def __init__(self, encoder: Encoder, tasks: Sequence[Task], heads: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.more_roles = {}
        self.register_buffer("public", None, persistent=False)
        self.tasks = tuple(tasks)
        self.encoder = encoder
        self.decoders = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for task in tasks:
            check_name(task.name)
            if task.name in self.heads:
                raise RecipeError(f"expected different task names, found {task.name!r} twice")
            if heads is not None:
                self.heads[task.name] = heads[task.name]
            elif not task.dense:
                self.heads[task.name] = task.head(encoder.features)
            elif isinstance(encoder, PyramidEncoder):
                decoder = make_decoder(encoder)
                self.decoders[task.name], self.heads[task.name] = decoder, decoder.head(task)
            else:
                needs = "an encoder with feature maps (tiny-pyramid, tiny-swin or timm)"
                found = type(encoder).__name__
                raise RecipeError(f"task {task.name!r} predicts a map, so it needs {needs}, found {found}")

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Map inputs (B x ...) to {task: its output}; all tasks if `tasks` is None. Nothing else is computed.

        The encoder runs once. A dense task's output is B x channels x H x W, as large as the input. RecipeError where
        the sides of an image are no multiples of the encoder's last stride.
        """
        if self.rescale is not None:
            scale, shift = (v.to(x) for v in self.rescale)
            x = x * scale + shift
        if not isinstance(self.encoder, PyramidEncoder):
            features = self.encoder(x)
            return {task: self.heads[task](features) for task in (self.heads if tasks is None else tasks)}
        size, stride = x.shape[2:], self.encoder.strides[-1]
        if any(side % stride for side in size):
            raise RecipeError(f"expected images whose sides are multiples of {stride}, found {size[0]} x {size[1]}")
        maps: list[Tensor] = self.encoder(x)
        outputs = {}
        for task in self.heads if tasks is None else tasks:
            if task in self.decoders:
                y = self.heads[task](self.decoders[task](maps))
                same = y.shape[2:] == size
                outputs[task] = y if same else interpolate(y, size=size, mode="bilinear", align_corners=False)
            else:
                outputs[task] = self.heads[task](maps[-1].mean((2, 3)))
        return outputs

    def train(self, mode: bool = True) -> MultiTask:
        super().train(mode)
        if self.frozen_statistics:
            for module in self.encoder.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        return self

    def roles(self) -> dict[str, str | tuple[str, str]]:
        """Return a mapping: glob over parameter names -> role, or (role, task) for what belongs to one task."""
        decoders = {f"decoders.{task}.*": ("decoder", task) for task in self.decoders}
        heads = {f"heads.{task}.*": ("head", task) for task in self.heads}
        return {**self.more_roles, "encoder.*": "encoder", **decoders, **heads}


class Plain(Encoder):
    """A module of a user as an encoder; where it is a whole model, its features are the tasks' outputs."""

    def __init__(self, net: nn.Module, reads_tokens: bool, features: int = 0) -> None:
        super().__init__()
        self.net, self.features, self.reads_tokens = net, features, reads_tokens

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Picked(nn.Module):
    """Stands where a head does: the whole model gave the outputs already."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task

    def forward(self, outputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        return outputs if isinstance(outputs, Tensor) else outputs[self.task]
