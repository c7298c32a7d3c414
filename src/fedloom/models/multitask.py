"""One shared encoder with one head per task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.context import derive_seed
from fedloom.errors import RecipeError
from fedloom.models.encoders import ENCODERS
from fedloom.models.nets import Encoder
from fedloom.tasks.task import Task


class MultiTask(nn.Module):
    """`encoder` and `heads`, a module per task name.

    A task name becomes part of parameter names, so it may hold letters, digits, '_' and '-' only and must not be an
    attribute of ModuleDict (such as 'keys' or 'type'); RecipeError otherwise, and where a name occurs twice.
    """

    def __init__(self, encoder: Encoder, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict()
        for task in tasks:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", task.name):
                raise RecipeError(
                    f"task name {task.name!r}: expected letters, digits, '_' and '-' only, since it becomes a part of "
                    "parameter names"
                )
            if task.name in self.heads:
                raise RecipeError(f"task name {task.name!r} occurs twice")
            if hasattr(self.heads, task.name):
                raise RecipeError(
                    f"task name {task.name!r} cannot be used: torch.nn.ModuleDict has an attribute of that name. "
                    f"Rename the task, for example {task.name + '_task'!r}"
                )
            self.heads[task.name] = task.head(encoder.features)

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Inputs (B x ...) to {task: output of its head}; all tasks if `tasks` is None. The encoder runs once."""
        features = self.encoder(x)
        return {task: self.heads[task](features) for task in (self.heads if tasks is None else tasks)}

    def roles(self) -> dict[str, str | tuple[str, str]]:
        """Glob over parameter names -> role, or (role, task) for what belongs to one task."""
        heads = {f"heads.{task}.*": ("head", task) for task in self.heads}
        return {"encoder.*": "encoder", **heads}


def build_model(
    encoder: str, params: Mapping[str, Any], input_shape: tuple[int, ...], tasks: Sequence[Task], seed: int
) -> MultiTask:
    """The named encoder (with its recipe parameters) and the tasks' heads on the CPU, initialised from `seed` alone.

    The global random state of torch is as before afterwards. Raises RecipeError for an unknown encoder, an input shape
    that it cannot take, or a task name that cannot be used.
    """
    entry = ENCODERS[encoder]
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also reseed every accelerator.
        torch.default_generator.manual_seed(derive_seed(seed, "init"))
        return MultiTask(entry.function(input_shape, **params), tasks)
