"""Attacks by what a client trains on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.attacks.attack import Attack
from fedloom.data.dataset import Batch, Behind, Examples
from fedloom.tasks.task import Task


@dataclass(frozen=True)
class FlippedLabels(Attack):
    """Class C - 1 - y in the place of y, in tasks with one class an example."""

    def unfit(self, tasks: Mapping[str, Task]) -> str | None:
        if any(task.kind == "classification" for task in tasks.values()):
            return None
        return f"expected a task with one class an example, found {', '.join(tasks)}"

    def examples(self, examples: Examples, tasks: Mapping[str, Task]) -> Examples:
        return Flipped(examples, {n: task.channels for n, task in tasks.items() if task.kind == "classification"})


@dataclass(frozen=True, eq=False)
class Flipped(Behind):
    """Examples with other labels: task -> number of classes of those whose labels are turned round."""

    classes: Mapping[str, int]

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and wrong labels; those that are missing stay so."""
        x, y = self.examples.batch(index, device, rng, tasks)
        wrong = {
            task: torch.where(y[task] >= 0, self.classes[task] - 1 - y[task], y[task])
            for task in y
            if task in self.classes
        }
        return x, {**y, **wrong}

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """Wrong labels."""
        labels = self.examples.labels_of(task)
        return np.where(labels >= 0, self.classes[task] - 1 - labels, labels) if task in self.classes else labels
