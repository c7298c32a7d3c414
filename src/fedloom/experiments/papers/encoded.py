"""Features of a task's examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.federation.rounds.federation import Part
from fedloom.training.features import pooled

BATCH = 64
"""Examples that go through a network together."""


@torch.inference_mode()
def encoded(encoder: nn.Module, part: Part, task: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(pooled features n x D of a part's examples, their labels of the task n), both on the CPU."""
    features, labels = [], []
    for index in part.index.split(BATCH):
        x, y = part.examples.batch(index, device, tasks=(task,))
        features.append(pooled(encoder(x)).float().cpu())
        labels.append(y[task].cpu())
    return torch.cat(features), torch.cat(labels)
