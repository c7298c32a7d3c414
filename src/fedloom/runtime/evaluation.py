"""Measuring a model on some examples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.runtime.federation import Part
from fedloom.tasks.task import Task
from fedloom.training.flat import FlatModel
from fedloom.training.loop import channels_last

Scores = dict[str, dict[str, float]]
"""Task -> metric -> value; "loss" is the unweighted mean loss."""


def evaluate(
    model: FlatModel, part: Part, tasks: Mapping[str, Task], batch_size: int, innermost: bool = True
) -> Scores:
    """Metrics of every task, accumulated over the examples that have a label of it; nan where there is none.

    `innermost`: images are given to the model with the channels last in memory, as in training.
    """
    scores: Scores = {}
    model.module.eval()
    for labelled, names in part.by_labels(tasks):
        metrics = {name: tasks[name].metric() for name in names}
        losses = dict.fromkeys(names, 0.0)
        with torch.inference_mode():
            for batch in labelled.index.split(batch_size):
                x, targets = labelled.examples.batch(batch, model.device, tasks=names)
                if innermost and x.ndim == 4:
                    x = channels_last(x)
                outputs = model.module(x, names)
                for name in names:
                    metrics[name].update(outputs[name], targets[name])
                    losses[name] += float(tasks[name].loss(outputs[name], targets[name])) * len(batch)
        size = len(labelled)
        for name in names:
            scores[name] = {**metrics[name].compute(), "loss": losses[name] / size if size else float("nan")}
    return {name: scores[name] for name in tasks}


def example_losses(
    model: FlatModel, part: Part, tasks: Mapping[str, tuple[Task, float]], batch_size: int, innermost: bool = True
) -> Tensor:
    """The loss of each example (n), summed over the tasks with their weights; 0 where it has no label.

    `innermost`: as in `evaluate`.
    """
    names = tuple(tasks)
    losses = torch.zeros(len(part), dtype=torch.float64)
    model.module.eval()
    at = 0
    with torch.inference_mode():
        for batch in part.index.split(batch_size):
            x, targets = part.examples.batch(batch, model.device, tasks=names)
            if innermost and x.ndim == 4:
                x = channels_last(x)
            outputs = model.module(x, names)
            for name, (task, weight) in tasks.items():
                pairs = zip(outputs[name].split(1), targets[name].split(1), strict=True)
                losses[at : at + len(batch)] += weight * torch.stack([task.loss(*pair) for pair in pairs]).cpu()
            at += len(batch)
    return losses
