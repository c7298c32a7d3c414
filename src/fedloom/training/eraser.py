"""Layers that split into a shared extractor and a personal eraser of domain shift, and their consistency (FDSE).

Source: Wang et al., Federated Learning with Domain Shift Eraser, CVPR 2025, and its release. The release's regulariser
is not the divergence below: it takes the difference of squared means instead of the squared difference, and keeps one
scalar mean and variance for all layers. Here every channel of every layer has its own, as the paper intends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn, relu
from torch.nn.functional import normalize


class ErasedConv(nn.Module):
    """A convolution as extractor and eraser: B x C x H x W to B x outputs x H' x W', after norm and ReLU.

    `extractor` gives half of the channels (rounded up); `eraser_norm` and the depthwise `eraser` make the others from
    them; both are put one after the other, shifted by `shift` and normalised by `norm`. Shared by clients are
    extractor, shift and norm; personal are the eraser and eraser_norm, whose running statistics never travel.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        half = -(-outputs // 2)
        self.extractor = nn.Conv2d(inputs, half, kernel, stride, padding=kernel // 2)
        self.eraser_norm = nn.BatchNorm2d(half)
        self.eraser = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
        self.shift = nn.Parameter(torch.zeros(outputs))
        self.norm = nn.BatchNorm2d(outputs)

    def before_norm(self, x: Tensor) -> Tensor:
        """What enters `norm`: its batch statistics are those that `consistency` compares."""
        x = self.eraser_norm(self.extractor(x))
        both = torch.cat([x, self.eraser(x)], 1)[:, : len(self.shift)]
        return both + self.shift[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        """B x inputs x H x W to B x outputs x H/stride x W/stride."""
        return relu(self.norm(self.before_norm(x)))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (not corrected) of each channel over batch and positions: C and C, from B x C x H x W."""
    return x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)


def gaussian_divergence(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(other)) of each channel (C), averaged: 0 where all agree."""
    variance, other_variance = variance.clamp(min=1e-8), other_variance.clamp(min=1e-8)
    ratio = variance / other_variance
    return (((mean - other_mean).square() / other_variance + ratio - 1 - ratio.log()) / 2).mean()


def consistency(
    received: Sequence[tuple[Tensor, Tensor]], batch: Sequence[tuple[Tensor, Tensor]], beta: float = 0.1
) -> Tensor:
    """FDSE's term, to be multiplied by lambda: sum over layers l of w_l KL(received_l || batch_l), w_l ~ exp(beta l).

    `received` holds the running statistics (mean, variance) of each layer's `norm` in the model as received, `batch`
    the moments of what enters it, averaged over the steps of the round as a norm layer does. Later layers count more.
    The term starts in round 2, when running statistics mean something.
    """
    weights = torch.softmax(beta * torch.arange(len(received), dtype=torch.float64), 0)
    terms = [gaussian_divergence(*a, *b) for a, b in zip(received, batch, strict=True)]
    return torch.stack(terms) @ weights.to(terms[0])


def eraser_mixing(erasers: Tensor, tau: float = 0.5) -> Tensor:
    """W (K x K, rows sum to 1): softmax of the cosine similarities of the clients' erasers (K x n) over tau.

    The server gives client k the mix W_k of all erasers, tensor by tensor.
    """
    unit = normalize(erasers.double(), dim=1)
    return torch.softmax(unit @ unit.t() / tau, 1)
