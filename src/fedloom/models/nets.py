"""The modules behind the encoders. Every module keeps the width of its output in `features`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn, relu
from torch.nn.functional import max_pool2d


class Encoder(nn.Module):
    """Maps a batch of inputs (B x ...) to B x features."""

    features: int


class SmallCNN(Encoder):
    """conv 3x3, pool, conv 3x3, pool to between 2 x 2 and 5 x 5 positions, linear."""

    def __init__(self, shape: tuple[int, int, int], width: int, hidden: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.features = hidden
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool = (max(2, height // 8), max(2, breadth // 8))
        positions = (height // 2 // self.pool[0]) * (breadth // 2 // self.pool[1])
        self.linear = nn.Linear(2 * width * positions, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """B x C x H x W to B x hidden."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), self.pool)
        return relu(self.linear(x.flatten(1)))


class BenchmarkCNN(Encoder):
    """conv 5x5, pool, conv 5x5, pool, linear."""

    def __init__(self, shape: tuple[int, int, int], width: int, hidden: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        self.features = hidden
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5, padding=2)
        self.linear = nn.Linear(2 * width * (height // 4) * (breadth // 4), hidden)

    def forward(self, x: Tensor) -> Tensor:
        """B x C x H x W to B x hidden."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        return relu(self.linear(x.flatten(1)))


class MLP(Encoder):
    """Linear layers, each followed by ReLU."""

    def __init__(self, shape: tuple[int, ...], hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = hidden[-1]
        widths = [math.prod(shape), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """B x ... to B x hidden[-1]."""
        x = x.flatten(1)
        for layer in self.layers:
            x = relu(layer(x))
        return x


Norm = Literal["batch", "group"]


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(channels, max(1, channels // 16)), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside an identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """B x inputs x H x W to B x outputs x H/stride x W/stride."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(Encoder):
    """Stem, four stages of one basic block each, mean over positions."""

    def __init__(self, shape: tuple[int, int, int], width: int, norm: Norm) -> None:
        super().__init__()
        self.features = 8 * width
        self.stem = nn.Conv2d(shape[0], width, 3, padding=1, bias=False)
        self.norm = _norm(norm, width)
        self.stages = nn.Sequential(
            BasicBlock(width, width, 1, norm),
            BasicBlock(width, 2 * width, 2, norm),
            BasicBlock(2 * width, 4 * width, 2, norm),
            BasicBlock(4 * width, 8 * width, 2, norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        """B x C x H x W to B x 8 width."""
        return self.stages(relu(self.norm(self.stem(x)))).mean((2, 3))
