"""Measuring a model on some examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.federation.rounds.federation import Part
from fedloom.models.tasks.task import Metric, Task
from fedloom.training.flat import FlatModel
from fedloom.training.loop import channels_last

Scores = dict[str, dict[str, float]]
"""Task -> metric -> value; "loss" is the unweighted mean loss."""


def evaluate(
    model: FlatModel,
    part: Part,
    tasks: Mapping[str, Task],
    batch_size: int,
    innermost: bool = True,
    costly: bool = False,
    seen: dict[str, Metric] | None = None,
) -> Scores:
    """Compute metrics of every task, accumulated over the examples that have a label of it; nan if there are none.

    `innermost`: images are given to the model with the channels last in memory, as in training. `costly`: measure what
    takes long too (see `fedloom.models.tasks.pixels.Measure.costly`). `seen` receives each task's metric.
    """
    scores: Scores = {}
    for labelled, names in part.by_labels(tasks):
        metrics = {name: tasks[name].metric() if costly else tasks[name].metric().cheap() for name in names}
        losses = torch.zeros(len(names), dtype=torch.float64, device=model.device)
        with torch.inference_mode():
            for size, outputs, targets in answers(model, labelled, names, batch_size, innermost):
                for number, name in enumerate(names):
                    metrics[name].update(outputs[name], targets[name])
                    losses[number] += tasks[name].loss(outputs[name], targets[name]).double() * size
        size = len(labelled)
        for name, loss in zip(names, losses.tolist(), strict=True):
            scores[name] = {**metrics[name].compute(), "loss": loss / size if size else float("nan")}
        if seen is not None:
            seen |= metrics
    return {name: scores[name] for name in tasks}


def confusions(
    model: FlatModel, part: Part, tasks: Mapping[str, Task], batch_size: int, innermost: bool = True
) -> dict[str, Tensor]:
    """Return counts, truth x prediction (C x C, int64), of every task with classes, over the examples with its label.

    `innermost`: as in `evaluate`.
    """
    counts: dict[str, Tensor] = {}
    metrics = {name: metric for name, task in tasks.items() if (metric := task.metric()).confusion is not None}
    for labelled, names in part.by_labels(metrics):
        with torch.inference_mode():
            for _, outputs, targets in answers(model, labelled, names, batch_size, innermost):
                for name in names:
                    metrics[name].update(outputs[name], targets[name])
    for name, metric in metrics.items():
        assert metric.confusion is not None
        counts[name] = metric.confusion
    return counts


Answers = tuple[int, dict[str, Tensor], dict[str, Tensor]]


def answers(
    model: FlatModel, part: Part, names: Sequence[str], batch_size: int, innermost: bool = True
) -> Iterator[Answers]:
    """Yield (examples, task -> output, task -> label) of each batch; iterate while no model is trained.

    `innermost`: as in `evaluate`.
    """
    model.module.eval()
    for batch in part.index.split(batch_size):
        x, targets = part.examples.batch(batch, model.device, tasks=names)
        if innermost and x.ndim == 4:
            x = channels_last(x)
        yield len(batch), model.module(x, names), targets


def example_losses(
    model: FlatModel, part: Part, tasks: Mapping[str, tuple[Task, float]], batch_size: int, innermost: bool = True
) -> Tensor:
    """Return the loss of each example (n), summed over the tasks with their weights; 0 for a missing label.

    `innermost`: as in `evaluate`.
    """
    names = tuple(tasks)
    losses = torch.zeros(len(part), dtype=torch.float64)
    at = 0
    with torch.inference_mode():
        for size, outputs, targets in answers(model, part, names, batch_size, innermost):
            for name, (task, weight) in tasks.items():
                pairs = zip(outputs[name].split(1), targets[name].split(1), strict=True)
                losses[at : at + size] += weight * torch.stack([task.loss(*pair) for pair in pairs]).cpu()
            at += size
    return losses
