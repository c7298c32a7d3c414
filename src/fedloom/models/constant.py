"""Models that a trained network should at least beat: a constant prediction, and a linear one of the raw inputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedloom.core.errors import RecipeError
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import Encoder
from fedloom.models.tasks.task import Task


@dataclass(frozen=True)
class ConstantAnswers:
    """Heads that ignore their input, in place of the encoder, the decoders and the heads."""

    replaces_all = True
    """Whether nothing is left of the model, so that it may be any."""

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        model.encoder = _Inputs()
        model.decoders = nn.ModuleDict()
        model.heads = nn.ModuleDict({task.name: ConstantHead(task, shape) for task in model.tasks})


@dataclass(frozen=True)
class LinearAnswers:
    """A linear head per task on the raw inputs, in place of the encoder, the decoders and the heads."""

    replaces_all = True

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        if dense := [task.name for task in model.tasks if task.dense]:
            raise RecipeError(f"method: simple predicts no maps, but task {dense[0]!r} has a label for each pixel")
        if getattr(model.encoder, "reads_tokens", False):
            raise RecipeError("method: simple reads numbers, but the inputs are tokens")
        model.encoder = _Flat()
        model.decoders = nn.ModuleDict()
        model.heads = nn.ModuleDict({task.name: task.head(prod(shape)) for task in model.tasks})


class _Inputs(Encoder):
    """No encoder: heads get the inputs."""

    features = 0

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Flat(_Inputs):
    """The inputs as vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class ConstantHead(nn.Module):
    """One answer (channels, or channels x H x W for a map) for all inputs; for images of another size it is resized."""

    def __init__(self, task: Task, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.task = task
        self.answer = nn.Parameter(torch.zeros(task.channels, *(shape[-2:] if task.dense else ())))

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (B x ...) to B x channels (x H x W)."""
        answer = self.answer.unsqueeze(0)
        if self.task.dense and answer.shape[2:] != x.shape[2:]:
            answer = interpolate(answer, size=x.shape[2:], mode="bilinear", align_corners=False)
        return answer.expand(len(x), *answer.shape[1:])
