"""The model of some tasks, made from what a recipe names or a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedloom.core.context import derive_seed
from fedloom.models.encoders import ENCODERS
from fedloom.models.lora import Lora, add_lora
from fedloom.models.multitask import MultiTask
from fedloom.models.own import as_multitask
from fedloom.models.weights import load_weights
from fedloom.settings.registry import Registered
from fedloom.tasks.task import Task


def build_model(
    encoder: str | Registered,
    params: Mapping[str, Any],
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    seed: int,
    weights: str | None = None,
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
) -> MultiTask:
    """The named encoder (with its recipe parameters) and the tasks' heads on the CPU, initialised from `seed` alone.

    What the name stands for may also give any module, or what `fl.model` returns (see `as_multitask`). The encoder then
    loads the file `weights`, and `lora` freezes it and adds factors. What is drawn for one part does not depend on the
    others: heads are the same with and without weights or LoRA. Inputs are of type `dtype`.

    The global random state of torch is as before afterwards. Raises RecipeError for an unknown encoder, an input shape
    that it cannot take, a task name that cannot be used, a module that does not fit the tasks, or a target of LoRA that
    is no layer; UserError for weights that do not fit.
    """
    entry = ENCODERS[encoder] if isinstance(encoder, str) else encoder
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed every accelerator.
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        model = as_multitask(entry.make(input_shape, tasks, **params), tasks, torch.zeros(1, *input_shape, dtype=dtype))
        if weights is not None:
            load_weights(model.encoder, weights)
        if lora is not None:
            add_lora(model.encoder, lora)
        return model
