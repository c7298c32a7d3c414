"""One shared encoder with one head, and for dense tasks one decoder, per task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedloom.core.context import derive_seed
from fedloom.errors import RecipeError, UserError
from fedloom.memory import need_memory
from fedloom.models.decoders import make_decoder
from fedloom.models.encoders import ENCODERS
from fedloom.models.lora import Lora, add_lora
from fedloom.models.nets import Encoder, PyramidEncoder
from fedloom.models.weights import load_weights
from fedloom.tasks.task import Task


def check_name(task: str) -> None:
    """Raise RecipeError unless a task's name can be a part of parameter names."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", task):
        raise RecipeError(
            f"task name {task!r}: expected letters, digits, '_' and '-' only, since it becomes a part of "
            "parameter names"
        )
    if hasattr(nn.ModuleDict(), task):
        raise RecipeError(
            f"task name {task!r} cannot be used: torch.nn.ModuleDict has an attribute of that name. "
            f"Rename the task, for example {task + '_task'!r}"
        )


class MultiTask(nn.Module):
    """`encoder`, `decoders` (a module per dense task) and `heads` (a module per task).

    Dense tasks need an encoder that gives feature maps. Each has a decoder of its own on all maps, and its head's
    output is resized to the input's size (bilinear, align_corners false). `encoder.decoder` says which decoder:
    `pyramid` (`PyramidDecoder`), `transposed` (`TransposedDecoder`, of the decentralised thesis) or `thesis`
    (`ThesisDecoder`, of its release). Other tasks read the encoder's features; those of maps are the mean of the last
    one.

    A task name becomes part of parameter names, so it may hold letters, digits, '_' and '-' only and must not be an
    attribute of ModuleDict (such as 'keys' or 'type'); RecipeError otherwise, where a name occurs twice, and where a
    dense task meets an encoder without maps.
    """

    more_roles: dict[str, str]
    """Globs that go before all others in `roles`: for what a `ModelChange` puts into the model."""
    rescale: tuple[Tensor, Tensor] | None
    """What inputs are multiplied by, and what is then added (1 x C x 1 x 1), before the encoder; None for nothing."""
    frozen_statistics: bool
    """Whether norm layers of the encoder stay in evaluation mode."""

    def __init__(self, encoder: Encoder, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.more_roles = {}
        self.rescale: tuple[Tensor, Tensor] | None = None
        self.frozen_statistics = False
        self.tasks = tuple(tasks)
        self.encoder = encoder
        self.decoders = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for task in tasks:
            check_name(task.name)
            if task.name in self.heads:
                raise RecipeError(f"task name {task.name!r} occurs twice")
            if not task.dense:
                self.heads[task.name] = task.head(encoder.features)
                continue
            if not isinstance(encoder, PyramidEncoder):
                raise RecipeError(
                    f"task {task.name!r} predicts a map, so it needs an encoder with feature maps (tiny-pyramid, "
                    f"tiny-swin or timm), found {type(encoder).__name__}"
                )
            decoder = make_decoder(encoder)
            self.decoders[task.name], self.heads[task.name] = decoder, decoder.head(task)

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Inputs (B x ...) to {task: its output}; all tasks if `tasks` is None. Nothing else is computed.

        The encoder runs once. A dense task's output is B x channels x H x W, as large as the input. RecipeError where
        the sides of an image are no multiples of the encoder's last stride.
        """
        if self.rescale is not None:
            scale, shift = (v.to(x) for v in self.rescale)
            x = x * scale + shift
        if not isinstance(self.encoder, PyramidEncoder):
            features = self.encoder(x)
            return {task: self.heads[task](features) for task in (self.heads if tasks is None else tasks)}
        size, stride = x.shape[2:], self.encoder.strides[-1]
        if any(side % stride for side in size):
            raise RecipeError(f"expected images whose sides are multiples of {stride}, found {size[0]} x {size[1]}")
        maps: list[Tensor] = self.encoder(x)
        outputs = {}
        for task in self.heads if tasks is None else tasks:
            if task not in self.decoders:
                outputs[task] = self.heads[task](maps[-1].mean((2, 3)))
                continue
            y = self.heads[task](self.decoders[task](maps))
            if y.shape[2:] != size:
                y = interpolate(y, size=size, mode="bilinear", align_corners=False)
            outputs[task] = y
        return outputs

    def train(self, mode: bool = True) -> MultiTask:
        """As usual, but for frozen statistics."""
        super().train(mode)
        if self.frozen_statistics:
            for module in self.encoder.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        return self

    def roles(self) -> dict[str, str | tuple[str, str]]:
        """Glob over parameter names -> role, or (role, task) for what belongs to one task."""
        decoders = {f"decoders.{task}.*": ("decoder", task) for task in self.decoders}
        heads = {f"heads.{task}.*": ("head", task) for task in self.heads}
        return {**self.more_roles, "encoder.*": "encoder", **decoders, **heads}


@contextmanager
def _memory_for_training(what: str) -> Iterator[None]:
    """Ask for the memory of each parameter, a gradient and an update of it before it is filled with numbers.

    Memory that nothing is written to is not taken yet.
    """
    total = 0

    def ask(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        total += 0 if parameter is None else 3 * parameter.nbytes
        need_memory(total, f"{what}: to train its parameters")

    handle = register_module_parameter_registration_hook(ask)
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "Storage size" not in str(error):
            raise
        raise UserError(f"{what} does not fit into memory: {str(error).splitlines()[0]}") from None
    finally:
        handle.remove()


def build_model(
    encoder: str,
    params: Mapping[str, Any],
    input_shape: tuple[int, ...],
    tasks: Sequence[Task],
    seed: int,
    weights: str | None = None,
    lora: Lora | None = None,
) -> MultiTask:
    """The named encoder (with its recipe parameters) and the tasks' heads on the CPU, initialised from `seed` alone.

    The encoder then loads the file `weights`, and `lora` freezes it and adds factors. What is drawn for one part does
    not depend on the others: heads are the same with and without weights or LoRA.

    The global random state of torch is as before afterwards. Raises RecipeError for an unknown encoder, an input shape
    that it cannot take, a task name that cannot be used, or a target of LoRA that is no layer; UserError for weights
    that do not fit.
    """
    entry = ENCODERS[encoder]
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed every accelerator.
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        with _memory_for_training(f"a model with the encoder {encoder!r}"):
            model = MultiTask(entry.function(input_shape, **params), tasks)
        if weights is not None:
            load_weights(model.encoder, weights)
        if lora is not None:
            add_lora(model.encoder, lora)
        return model
