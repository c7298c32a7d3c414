"""What a method changes in a model before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedloom.core.context import derive_seed
from fedloom.core.errors import RecipeError
from fedloom.models.linearised import Linearised
from fedloom.models.lora import adapted_layers
from fedloom.models.multitask import MultiTask


class ModelChange(Protocol):
    """Changes a model in place, given its inputs' shape. New parameters come from torch's global random stream."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None: ...


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
            raise RecipeError("model.lora: null found, expected low-rank factors, which the method is about")
        found = float(layers[0].scaling["default"])
        if self.scale not in (None, found):
            raise RecipeError(f"scale: {self.scale} found, expected {found}, which is alpha / rank of model.lora")


@dataclass(frozen=True)
class FreeAdaptedWeights(Factors):
    """Weights with low-rank factors beside them become parameters of the model, so that the factors can be merged."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        super().__call__(model, shape)
        for layer in adapted_layers(model.encoder):
            layer.base_layer.weight.requires_grad_(True)


def changed(model: MultiTask, changes: Sequence[ModelChange], shape: tuple[int, ...], seed: int) -> MultiTask:
    """The model with all changes made, its new parameters drawn from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "changes"))
        for change in changes:
            change(model, shape)
    return model
