"""Layers that split into an extractor for all clients and an eraser of each client's domain shift (FDSE).

Source: Wang et al., Federated Learning with Domain Shift Eraser, CVPR 2025, and its release.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.core.errors import RecipeError
from fedloom.core.layout import Select
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import pass_zeros

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
    """Return mean and variance (n - 1, as in running statistics) per channel: C and C, from B x C or B x C x H x W.

    In single precision at least.
    """
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

    Raises RecipeError for an encoder with frozen parameters (LoRA), with linear layers on tokens (transformers), or
    without such layers.
    """

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        """Change the model in place."""
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
    """(layer, the norm layer behind it or None), in the order in which an input passes through the layers."""
    outputs: list[tuple[str, Tensor]] = []
    norms: dict[str, str] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            outputs.append((name, output))

        return hook

    def look(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            norms.update({layer: name for layer, output in outputs if output is inputs[0]})

        return hook

    handles = []
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            handles.append(module.register_forward_hook(note(name)))
        elif type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm):  # not those that are more than a norm
            handles.append(module.register_forward_pre_hook(look(name)))
    pass_zeros(encoder, shape, handles)
    for name, output in outputs:
        if output.ndim != 2 and isinstance(encoder.get_submodule(name), nn.Linear):
            raise RecipeError(
                f"fdse splits linear layers with one vector per example, but {name!r} of {type(encoder).__name__} "
                f"gives {' x '.join(map(str, output.shape[1:]))} values per example"
            )
    return ((name, norms.get(name)) for name in dict(outputs))
