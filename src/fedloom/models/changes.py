"""Changes that a recipe (low-rank factors) or a method makes in a model before the first round."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import interpolate

from fedloom.core.context import seeded
from fedloom.core.errors import RecipeError
from fedloom.core.lazy import need
from fedloom.models.multitask import MultiTask, Plain
from fedloom.models.nets import Encoder, PyramidEncoder
from fedloom.models.signal import Lora
from fedloom.models.tasks.task import Task


class Linearised(Encoder):
    """f(x; theta0) + J(x) (theta - theta0): B x ... to B x features, by one forward-mode product with the Jacobian J.

    theta are the parameters of `encoder` that need a gradient, under the names they have there; theta0 is their value
    now. The encoder's modules become this one's, so `encoder` should not be used on its own any more. With LoRA the
    factors are theta: since B is 0 in theta0, the expansion is B A0 and A has no gradient.

    The output is linear in theta, so the mean of parameters gives the mean of outputs. Norm layers use their running
    statistics and dropout is off, in training too. theta0 is a buffer outside the state dictionary: it moves with the
    module and is copied with it, but is neither trained nor sent. On a CPU a step of a small
    vision transformer takes about four times as long, of a convolutional network hardly longer.

    RecipeError for an encoder with feature maps.
    """

    plain: Encoder
    """The encoder as it was, on the same parameters."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if isinstance(encoder, PyramidEncoder):
            found = f"found maps of {type(encoder).__name__}"
            raise RecipeError(f"expected an encoder with features, which can be linearised, {found}")
        self.features, self.reads_tokens = encoder.features, encoder.reads_tokens
        start = [p.detach().reshape(-1) for p in encoder.parameters() if p.requires_grad]
        # One and the same dictionaries: whatever moves, binds or replaces a tensor here does so in the encoder.
        self._modules, self._parameters, self._buffers = encoder._modules, encoder._parameters, encoder._buffers
        self._non_persistent_buffers_set = encoder._non_persistent_buffers_set
        self.register_buffer("origin", torch.cat(start), persistent=False)
        self.__dict__["plain"] = encoder.eval()  # not a submodule, which would give every parameter a second name
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Map B x ... to B x features."""
        theta = {name: p for name, p in self.named_parameters() if p.requires_grad}
        pieces = self.get_buffer("origin").split([p.numel() for p in theta.values()])
        theta0 = {name: piece.view_as(p) for piece, (name, p) in zip(pieces, theta.items(), strict=True)}
        change = {name: p - theta0[name] for name, p in theta.items()}
        # Group norm has no forward mode for images with the channels last in memory. Flattened and viewed again, they
        # are laid out plainly; strides alone do not tell, since those of images of one channel fit either layout.
        x = x.reshape(-1).view(x.shape)
        # The fused kernels of attention have no forward mode, and torch before 2.9 has none in inference mode.
        with_grad, fused = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # of torch.nn.TransformerEncoderLayer and MultiheadAttention
        try:
            with sdpa_kernel(SDPBackend.MATH), torch.inference_mode(False), torch.set_grad_enabled(with_grad):
                both = jvp(lambda weights: functional_call(self.plain, weights, (x,)), (theta0,), (change,))
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        return both[0] + both[1]

    def train(self, mode: bool = True) -> Linearised:
        """Stay in evaluation mode, since the network is expanded as it is used."""
        return super().train(False)


def add_lora(encoder: nn.Module, lora: Lora) -> None:
    """Freeze an encoder and add factors to its linear layers that `lora.targets` name, in place (Hu et al., 2021).

    W x becomes W x + (alpha / rank) B A x. A is drawn from torch's global generator (Kaiming uniform, a = sqrt 5, like
    nn.Linear), B is 0. Their names are the layer's and lora_A.default.weight or lora_B.default.weight; W is then called
    base_layer.weight. Raises RecipeError for a target that names no linear layer, or one that is passed by.
    """
    linear = [name for name, module in encoder.named_modules() if isinstance(module, nn.Linear)]
    chosen = set()
    for target in lora.targets:
        matches = {name for name in linear if f".{name}".endswith(f".{target}")}
        if not matches:
            # A layer that many blocks have is listed once.
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in linear)) or "none"
            names = f"{target!r} names no linear layer of the encoder"
            raise RecipeError(f"model.lora.targets: {names}; its linear layers: {known}")
        chosen |= matches
    for name, module in encoder.named_modules():
        if isinstance(module, nn.MultiheadAttention) and (layer := f"{name}.out_proj".removeprefix(".")) in chosen:
            why = "is part of a torch.nn.MultiheadAttention, which reads its weight and would pass factors by"
            raise RecipeError(f"model.lora.targets: {layer!r} {why}; choose other layers")
        if not any(f".{layer}".startswith(f".{name}".rstrip(".") + ".") for layer in chosen):
            continue
        # In evaluation these read the weights of their layers in one kernel, which would pass factors by.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    peft = need("peft", "methods")
    alpha = lora.rank if lora.alpha is None else lora.alpha
    config = peft.LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(chosen))
    peft.inject_adapter_in_model(config, encoder)


def adapted_layers(module: nn.Module) -> list[Any]:
    """Return the layers with factors beside them, in order: peft's, with `base_layer` and `get_delta_weight`."""
    return [layer for layer in module.modules() if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")]


def factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (rank x inputs) and B (outputs x rank) of such a layer."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


_BASE = ".base_layer.weight"


class ModelChange(Protocol):
    """Changes a model in place, given its inputs' shape. New parameters come from torch's global random stream."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        """Change the model in place."""


@dataclass(frozen=True)
class Linearise:
    """The encoder becomes its first-order expansion at the initial parameters; decoders and heads stay as they are."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        model.encoder = Linearised(model.encoder)


@dataclass(frozen=True)
class Factors:
    """Low-rank factors must be there; nothing is changed. `scale` is what alpha / rank must be, where it matters."""

    scale: float | None = None

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        layers = adapted_layers(model.encoder)
        if not layers:
            raise RecipeError("model.lora: null found, expected low-rank factors, which the method needs")
        factor = float(layers[0].scaling["default"])
        if self.scale not in (None, factor):
            raise RecipeError(f"scale: {self.scale} found, expected {factor}, which is alpha / rank of model.lora")


@dataclass(frozen=True)
class FreeAdaptedWeights(Factors):
    """Weights with low-rank factors beside them become parameters of the model, so that the factors can be merged."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        super().__call__(model, shape)
        seen: set[nn.Parameter] = set()
        names = [*model.named_parameters(remove_duplicate=False)]
        for layer in adapted_layers(model.encoder):
            weight = layer.base_layer.weight
            own, *others = sorted((n for n, p in names if p is weight), key=lambda n: not n.endswith(_BASE))
            if weight in seen or any(not other.endswith(_BASE) for other in others):
                tied = f"{own.removesuffix(_BASE)!r} shares its weight with another layer"
                why = f"{tied} ({others[-1]}), which merged factors would change, too"
                raise RecipeError(f"model.lora.targets: {why}; choose other layers, or a method that merges none")
            seen.add(weight)
            weight.requires_grad_(True)


def changed(model: MultiTask, changes: Sequence[ModelChange], shape: tuple[int, ...], seed: int) -> MultiTask:
    """Return the model with all changes made, its new parameters drawn from `seed` alone."""
    with seeded(seed, "changes"):
        for change in changes:
            change(model, shape)
    return model


@dataclass(frozen=True)
class PublicOutputs:
    """Parameters `public_outputs`: of each task the outputs (n x ...) of some model on the n public inputs.

    They are 0 at first; only local rules read and write them. Their role is "public", so that a method whose other
    parameters are private shares predictions in their place. RecipeError without a public set.
    """

    any_model = True

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        """Change the model in place."""
        if model.public is None:
            why = "nodes with data of their own share no examples; give one as fl.Federation(public=...)"
            raise RecipeError(f"the method sends predictions on a public set, but there is none: {why}")
        modes = model.training
        with torch.no_grad():
            outputs = model.eval()(model.public[:1])
        model.train(modes)
        n = len(model.public)
        model.public_outputs = nn.ParameterDict({name: torch.zeros(n, *y.shape[1:]) for name, y in outputs.items()})
        own: dict[str, str | tuple[str, str]] = {f"public_outputs.{name}": ("public", name) for name in outputs}
        model.more_roles = {**own, **model.more_roles}


@dataclass(frozen=True)
class ConstantAnswers:
    """Heads that ignore their input, in place of the encoder, the decoders and the heads."""

    any_model = True
    """True if it looks into no part of the model, so that any model will do."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        _replace_all(model, nn.Identity(), {task.name: ConstantHead(task, shape) for task in model.tasks})


@dataclass(frozen=True)
class LinearAnswers:
    """A linear head per task on the raw inputs, in place of the encoder, the decoders and the heads."""

    any_model = True

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        if dense := [task.name for task in model.tasks if task.dense]:
            raise RecipeError(f"method: simple cannot predict maps, but task {dense[0]!r} has one label per pixel")
        if getattr(model.encoder, "reads_tokens", False):
            raise RecipeError("method: simple reads numbers, but the inputs are tokens")
        _replace_all(model, nn.Flatten(), {task.name: task.head(prod(shape)) for task in model.tasks})


def _replace_all(model: MultiTask, encoder: nn.Module, heads: dict[str, nn.Module]) -> None:
    """Put another encoder and heads in the place of a model's own, and nothing in that of its decoders."""
    model.encoder, model.decoders, model.heads = Plain(encoder, False), nn.ModuleDict(), nn.ModuleDict(heads)


class ConstantHead(nn.Module):
    """One answer (channels, or channels x H x W for a map) for all inputs; for images of another size it is resized."""

    def __init__(self, task: Task, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.task = task
        self.answer = nn.Parameter(torch.zeros(task.channels, *(shape[-2:] if task.dense else ())))

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B x ...) to B x channels (x H x W)."""
        answer = self.answer.unsqueeze(0)
        if self.task.dense and answer.shape[2:] != x.shape[2:]:
            answer = interpolate(answer, size=x.shape[2:], mode="bilinear", align_corners=False)
        return answer.expand(len(x), *answer.shape[1:])
