"""A model that answers the same whatever its input: what a trained model should at least beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

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


class _Inputs(Encoder):
    """No encoder: heads get the inputs."""

    features = 0

    def forward(self, x: Tensor) -> Tensor:
        return x


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
