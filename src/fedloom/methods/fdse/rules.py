"""Layers that split into an extractor for all clients and an eraser of each client's domain shift (FDSE), and its loss.

Source: Wang et al., Federated Learning with Domain Shift Eraser, CVPR 2025, and its release, whose term differs from
the divergence of the paper (`released_consistency`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.context import State
from fedloom.core.errors import RecipeError
from fedloom.core.layout import Select
from fedloom.methods.fdse import ConsistencySettings
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import pass_zeros
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

    `Erase` must have given the model its layers. The term starts once the received statistics have counted a batch.
    """

    def begin(self, view: View, state: State) -> State:
        norms = [layer.norm for layer in erased_layers(view.module)]
        if self.lam == 0 or not all(norm.num_batches_tracked for norm in norms):
            return {}
        received = [(n.get_buffer("running_mean").clone(), n.get_buffer("running_var").clone()) for n in norms]
        return {"received": received, "running": None}

    def penalty(self, view: View, state: State) -> Tensor | None:
        if not state:
            return None
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
        return {}, {}


ERASERS = Select(name=("*.eraser.*", "*.eraser_norm.*"))
"""The parameters of erasers."""
_STATISTICS = "encoder.*.eraser_norm.running_*"


class ErasedLayer(nn.Module):
    """A convolution or linear layer as extractor and eraser, with the norm layer behind it.

    `extractor` gives half of the channels (rounded up) and begins as the layer's first ones; `eraser_norm` and the
    depthwise `eraser` (3 x 3; one weight a channel for vectors) make the others from them. Both, one after the other
    and cut to the layer's width, are shifted by `shift` and normalised by `norm`: the given one where it is batch norm,
    else a new one. The extractor has no bias, which `eraser_norm` would take away again.

    In training `seen` keeps mean and variance of each channel of what enters `norm` (see `moments`).
    """

    def __init__(self, layer: nn.Conv2d | nn.Linear, norm: nn.Module | None = None) -> None:
        super().__init__()
        outputs = len(layer.weight)
        half = -(-outputs // 2)
        self.extractor = copy.deepcopy(layer)
        self.extractor.weight = nn.Parameter(layer.weight.detach()[:half].clone())
        self.extractor.bias = None
        self.eraser: nn.Conv1d | nn.Conv2d
        if isinstance(layer, nn.Conv2d):
            self.extractor.out_channels = half
            kind: type[_BatchNorm] = nn.BatchNorm2d
            self.eraser = nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False)
        else:
            self.extractor.out_features = half
            kind = nn.BatchNorm1d
            self.eraser = nn.Conv1d(half, half, 1, groups=half, bias=False)
        self.eraser_norm = kind(half)
        self.shift = nn.Parameter(torch.zeros(outputs))
        self.norm = norm if isinstance(norm, _BatchNorm) else kind(outputs)
        self.seen: tuple[Tensor, Tensor] | None = None

    def before_norm(self, x: Tensor) -> Tensor:
        """Return the input of `norm`: B x outputs x H' x W', or B x outputs for vectors."""
        x = self.eraser_norm(self.extractor(x))
        erased = self.eraser(x) if x.ndim == 4 else self.eraser(x[..., None])[..., 0]
        both = torch.cat([x, erased], 1)[:, : len(self.shift)]
        return both + self.shift.view(-1, *[1] * (x.ndim - 2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of the layer and its norm, in the same shapes."""
        y = self.before_norm(x)
        if self.training:
            self.seen = moments(y)
        out: Tensor = self.norm(y)
        return out


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (n - 1) per channel: C and C, from B x C or B x C x H x W, not in half precision."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    over = (0, *range(2, x.ndim))
    return x.mean(over), x.var(over)


def erased_layers(model: nn.Module) -> list[ErasedLayer]:
    """Return a model's erased layers, in its own order."""
    return [module for module in model.modules() if isinstance(module, ErasedLayer)]


@dataclass(frozen=True)
class Erase:
    """Every convolution and linear layer of the encoder becomes an `ErasedLayer`, together with the norm behind it.

    Depthwise and other grouped convolutions stay. Where a layer has no norm behind it, or one that keeps no running
    statistics, it gets batch norm. The running statistics of eraser norms never leave a client.

    RecipeError for an encoder with frozen parameters (LoRA), linear layers on tokens (transformers), or no such layers.
    """

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        encoder = model.encoder
        if not all(p.requires_grad for p in encoder.parameters()):
            raise RecipeError("fdse replaces layers, but some of them are frozen; leave model.lora out")
        layers = list(_with_norms(encoder, shape))
        if not layers:
            raise RecipeError(
                f"fdse needs an encoder with convolutions or linear layers, found {type(encoder).__name__}"
            )
        for name, norm in layers:
            layer: Any = encoder.get_submodule(name)
            behind = None
            if norm is not None:
                behind = encoder.get_submodule(norm)
                _put(encoder, norm, nn.Identity())
            _put(encoder, name, ErasedLayer(layer, behind))
        model.more_roles[_STATISTICS] = "private"


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, module)


def _with_norms(encoder: nn.Module, shape: tuple[int, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield (layer, the norm layer behind it or None), in the order in which an input passes through the layers."""
    outputs: list[tuple[str, Tensor]] = []
    norms: dict[str, str] = {}

    def note(name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        outputs.append((name, output))

    def look(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norms.update({layer: name for layer, output in outputs if output is inputs[0]})

    handles = []
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            handles.append(module.register_forward_hook(partial(note, name)))
        elif type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm):  # not those that are more than a norm
            handles.append(module.register_forward_pre_hook(partial(look, name)))
    pass_zeros(encoder, shape, handles)
    for name, output in outputs:
        if output.ndim != 2 and isinstance(encoder.get_submodule(name), nn.Linear):
            raise RecipeError(
                f"fdse splits linear layers with one vector per example, but {name!r} of {type(encoder).__name__} "
                f"gives {' x '.join(map(str, output.shape[1:]))} values per example"
            )
    return ((name, norms.get(name)) for name in dict(outputs))
