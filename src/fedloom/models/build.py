"""The model of some tasks, made from what a recipe names or a user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedloom.core.context import derive_seed
from fedloom.core.errors import UserError
from fedloom.core.machine import need_memory, out_of_memory
from fedloom.core.settings.registry import Registered
from fedloom.models.encoders import ENCODERS
from fedloom.models.lora import Lora, add_lora
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import load_weights
from fedloom.models.own import as_multitask
from fedloom.models.signal import Signal, blank
from fedloom.models.tasks.task import Task


@contextmanager
def _memory_for_training(what: str) -> Iterator[None]:
    """Ask for the memory of each parameter, a gradient and an update of it before it is filled with numbers.

    Memory that nothing is written to is not taken yet.
    """
    total = asked = 0

    def ask(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total, asked
        total += 0 if parameter is None else 3 * parameter.nbytes
        if total > 1.1 * asked:  # to ask the system takes longer than to make a small parameter
            asked = total
            need_memory(total, f"{what}: to train its parameters")

    handle = register_module_parameter_registration_hook(ask)
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error) and "Storage size" not in str(error):
            raise
        raise UserError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from None
    finally:
        handle.remove()


def build_model(
    encoder: str | Registered,
    params: Mapping[str, Any],
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    seed: int,
    weights: str | None = None,
    lora: Lora | None = None,
    signal: Signal | None = None,
) -> MultiTask:
    """Build the named encoder (with its parameters) and the tasks' heads on the CPU, initialised from `seed` alone.

    What the name stands for may also give any module, or what `fl.model` returns (see `as_multitask`). The encoder then
    loads the file `weights`, and `lora` freezes it and adds factors. What is drawn for one part does not depend on the
    others: heads are the same with and without weights or LoRA. `signal` says what an input is.

    The global random state of torch is as before afterwards. Raises RecipeError for an unknown encoder, inputs that it
    cannot take, a task name that cannot be used, a module that does not fit the tasks, or a target of LoRA that
    is no layer; UserError for weights that do not fit.
    """
    entry = ENCODERS[encoder] if isinstance(encoder, str) else encoder
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed every accelerator.
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        with _memory_for_training(f"a model with the encoder {entry.name!r}"):
            module = entry.make(input_shape, tasks, signal, **params)
            model = as_multitask(module, tasks, blank(input_shape, signal))
        if weights is not None:
            load_weights(model.encoder, weights)
        if lora is not None:
            add_lora(model.encoder, lora)
        return model
