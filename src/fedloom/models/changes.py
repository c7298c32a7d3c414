"""What a method changes in a model before the first round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedloom.core.context import derive_seed
from fedloom.models.linearised import Linearised
from fedloom.models.multitask import MultiTask


class ModelChange(Protocol):
    """Changes a model in place, given its inputs' shape. New parameters come from torch's global random stream."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None: ...


@dataclass(frozen=True)
class Linearise:
    """The encoder becomes its first-order expansion at the initial parameters; decoders and heads stay as they are."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        model.encoder = Linearised(model.encoder)


def changed(model: MultiTask, changes: Sequence[ModelChange], shape: tuple[int, ...], seed: int) -> MultiTask:
    """The model with all changes made, its new parameters drawn from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "changes"))
        for change in changes:
            change(model, shape)
    return model
