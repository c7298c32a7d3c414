"""The modules behind the encoders of series and tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn, relu
from torch.nn.functional import gelu, max_pool2d

from fedloom.models.nets import Encoder


class Conv1d(Encoder):
    """Convolutions over the steps, each with ReLU and a pool of 2 steps; the mean over the steps; a linear layer.

    A convolution over steps is one over an image of height 1, so that what looks at maps (B x C x H x W), and what
    replaces convolutions, does so here, too.
    """

    def __init__(self, channels: int, widths: tuple[int, ...], kernel: int, hidden: int) -> None:
        super().__init__()
        self.features = hidden
        inputs = (channels, *widths)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, (1, kernel), padding=(0, kernel // 2)) for a, b in zip(inputs, widths, strict=False)
        )
        self.linear = nn.Linear(widths[-1], hidden)

    def forward(self, x: Tensor) -> Tensor:
        """B x C x T to B x hidden."""
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
        """B x T x width to the same; nothing attends to the positions `ignored` (B x T, bool)."""
        x = x + self.proj(self.attention(self.norm1(x), ignored))
        out: Tensor = x + self.fc2(gelu(self.fc1(self.norm2(x))))
        return out

    def attention(self, x: Tensor, ignored: Tensor | None) -> Tensor:
        """B x T x width to the same.

        Written out: fused kernels have no forward mode, no rule for vmap, and no fixed order of summation on a GPU.
        """
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        if ignored is not None:  # not -inf: a text may have no word
            scores = scores.masked_fill(ignored[:, None, None], torch.finfo(scores.dtype).min)
        return (scores.softmax(3) @ v).transpose(1, 2).flatten(2)


class Transformer(Encoder):
    """Tokens, or pieces of a series, with learned positions; blocks; the mean over the positions.

    `embed` maps an input to B x T x width, with T = `positions`. Positions with the token `padding` are left out.
    """

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
        """B x T tokens, or B x C x steps of a series, to B x width."""
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

    def forward(self, x: Tensor) -> Tensor:
        """B x C x T to B x T / steps x width."""
        out: Tensor = self.linear(x.unflatten(2, (-1, self.steps)).transpose(1, 2).flatten(2))
        return out
