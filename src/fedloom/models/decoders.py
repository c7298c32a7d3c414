"""Decoders of dense tasks: from an encoder's feature maps to one map that a head reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, leaky_relu

from fedloom.models.kinds import Norm
from fedloom.models.nets import PyramidEncoder, norm_layer
from fedloom.models.tasks.task import Task

SLOPE = 0.01


class Decoder(nn.Module):
    """Maps feature maps, finest first, to one map of `width` channels, which a head reads."""

    width: int

    def head(self, task: Task) -> nn.Module:
        """The head that goes with the decoder: by default the task's own."""
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
        """Maps (B x C_i x H_i x W_i, finest first) to B x dim x H_0 x W_0."""
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
        """Maps (B x C_i x H_i x W_i; the last is used) to B x width x H x W at the input's size."""
        x = maps[-1]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = interpolate(norm(conv(x)).relu(), scale_factor=2, mode="bilinear", align_corners=False)
        return x

    def head(self, task: Task) -> nn.Module:
        """One 3x3 convolution."""
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
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(channels[-1], 256, first, first),
            nn.ReLU(),
            nn.ConvTranspose2d(256, self.width, second, second),
            nn.ReLU(),
        )

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B x C_i x H_i x W_i; the last is used) to B x 128 x H / s x W / s, where the head enlarges by s."""
        found: Tensor = self.layers(maps[-1])
        return found

    def head(self, task: Task) -> nn.Module:
        """The third transposed convolution."""
        return nn.ConvTranspose2d(self.width, task.channels, self.last, self.last)


def make_decoder(encoder: PyramidEncoder) -> Decoder:
    """A decoder of the kind that an encoder's recipe names."""
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
