"""FDSE's consistency: the output of erasers should have the statistics of all clients together.

Source: Wang et al., Federated Learning with Domain Shift Eraser, CVPR 2025, and its release, whose term differs from
the divergence of the paper (`released_consistency`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.methods.fdse import ConsistencySettings
from fedloom.models.erased import erased_layers
from fedloom.training.rules import LocalRule, View

Moments = Sequence[tuple[Tensor, Tensor]]
"""Mean and variance (C and C) of each layer."""
MOMENTUM = 0.1
"""The momentum of the moments over a round's steps; norm layers have the same."""
_LEAST = 1e-8


def gaussian_divergence(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """Return KL(N(mean, variance) || N(other)) of each channel (C), averaged: 0 if all channels agree."""
    variance, other_variance = variance.clamp(min=_LEAST), other_variance.clamp(min=_LEAST)
    ratio = variance / other_variance
    return (((mean - other_mean).square() / other_variance + ratio - 1 - ratio.log()) / 2).mean()


def layer_weights(layers: int, beta: float) -> Tensor:
    """Return w_l proportional to exp(beta l), sum 1: later layers count more."""
    return torch.softmax(beta * torch.arange(layers, dtype=torch.float64), 0)


def averaged(before: Moments | None, now: Moments) -> Moments:
    """Return moments over a round's steps, averaged as a norm layer averages them."""
    if before is None:
        return now
    return [(_moved(a, m), _moved(b, v)) for (a, b), (m, v) in zip(before, now, strict=True)]


def _moved(before: Tensor, now: Tensor) -> Tensor:
    return before + MOMENTUM * (now - before)


def consistency(received: Moments, batch: Moments, beta: float) -> Tensor:
    """Return FDSE's term, to be multiplied by lambda: sum over layers l of w_l KL(received_l || batch_l).

    `received` holds the running statistics of each layer's `norm` in the received model, `batch` the moments of that
    norm's input, `averaged` over the steps of the round.
    """
    terms = torch.stack([gaussian_divergence(*a, *b) for a, b in zip(received, batch, strict=True)])
    return terms @ layer_weights(len(terms), beta).to(terms)


def released_consistency(
    received: Moments, means: Sequence[Tensor], before: tuple[Tensor, Tensor] | None, beta: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return (the term as FDSE's release computes it, its running mean and variance): `means` are a batch's, by layer.

    One running mean m and variance v (two numbers) go from layer to layer and from step to step; each layer adds the
    mean and variance of its channels' means. The term is sum_l w_l mean over channels of
    (mu^2 - m^2) / 2v + (log(v / sigma^2) + sigma^2 / v) / 2, with mu and sigma^2 as received. It has a difference of
    squares where a divergence has the square of a difference, so it may be negative.
    """
    terms = []
    for (mu, variance), channels in zip(received, means, strict=True):
        now = (channels.mean(), channels.var(correction=min(1, len(channels) - 1)))
        before = now if before is None else (_moved(before[0], now[0]), _moved(before[1], now[1]))
        m, v, variance = before[0], before[1].clamp(min=_LEAST), variance.clamp(min=_LEAST)
        squares = (mu.square() - m.square()) / (2 * v)
        terms.append((squares + ((v / variance).log() + variance / v) / 2).mean())
    assert before is not None
    total = torch.stack(terms)
    return total @ layer_weights(len(terms), beta).to(total), before


@dataclass(frozen=True)
class Consistency(ConsistencySettings, LocalRule):
    """Adds lam times FDSE's term to the loss, `consistency` or, with `form` "release", `released_consistency`.

    `Erase` must have given the model its layers. The term starts once the received statistics have counted a batch,
    that is in round 2; if they never leave a client (buffers local), in the client's second round.
    """

    def begin(self, view: View, state: State) -> State:
        """Return the received statistics, if there are any."""
        assert view.module is not None
        norms = [layer.norm for layer in erased_layers(view.module)]
        if self.lam == 0 or not all(norm.num_batches_tracked for norm in norms):
            return {}
        received = [(n.get_buffer("running_mean").clone(), n.get_buffer("running_var").clone()) for n in norms]
        return {"received": received, "running": None}

    def penalty(self, view: View, state: State) -> Tensor | None:
        if not state:
            return None
        assert view.module is not None
        batch = [layer.seen for layer in erased_layers(view.module) if layer.seen is not None]
        if self.form == "release":
            means = [mean for mean, _ in batch]
            term, (m, v) = released_consistency(state["received"], means, state["running"], self.beta)
            state["running"] = (m.detach(), v.detach())
        else:
            now = averaged(state["running"], batch)
            term = consistency(state["received"], now, self.beta)
            state["running"] = [(m.detach(), v.detach()) for m, v in now]
        return self.lam * term

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return no state."""
        return {}, {}
