"""Measuring a model on some examples, and what the constant prediction, which every model should beat, scores there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch
from fedloom.federation.rounds.federation import BuiltFederation, Part, together
from fedloom.models.changes import ConstantHead
from fedloom.models.tasks.task import Metric, Task
from fedloom.training.flat import FlatModel
from fedloom.training.loop import laid_out, loaded
from fedloom.training.rules import label_means

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
    takes long too (see `fedloom.models.tasks.dense.Measure.costly`). `seen` receives each task's metric.
    """
    metrics = {name: task.metric() if costly else task.metric().cheap() for name, task in tasks.items()}
    losses = {name: torch.zeros((), dtype=torch.float64, device=model.device) for name in tasks}
    with torch.inference_mode():
        for name, output, target in _labelled(model, part, tasks, batch_size, innermost):
            metrics[name].update(output, target)
            losses[name] += tasks[name].loss(output, target).double() * len(target)
    means = torch.stack([*losses.values()]).tolist() if losses else ()
    sizes = [len(part.of(name)) or float("nan") for name in tasks]
    if seen is not None:
        seen |= metrics
    return {
        name: {**metric.compute(), "loss": loss / size}
        for (name, metric), loss, size in zip(metrics.items(), means, sizes, strict=True)
    }


def _labelled(
    model: FlatModel, part: Part, tasks: Collection[str], batch_size: int, innermost: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (task, output, label) of each batch, of the examples with a label of the task.

    One pass serves all tasks if the examples have at least half of their labels; else these take a pass each.
    """
    full = 2 * sum(len(part.of(task)) for task in tasks) >= len(part) * len(tasks)
    for examples, names in [(part, tuple(tasks))] if full else part.by_labels(tasks):
        some = examples.has(names)
        for batch, outputs, targets in answers(model, examples, names, batch_size, innermost):
            for name in names:
                output, target = outputs[name], targets[name]
                if name in some:
                    here = some[name][batch].to(model.device)
                    output, target = output[here], target[here]
                if len(target):
                    yield name, output, target


MAPS, MEMORY = 40, 1 << 32
"""The maps of a model take about so many times the bytes of its input; those of a batch at most so many bytes."""


def maps_of(shape: Sequence[int]) -> int:
    """Return about how many bytes a model's maps of one input of a shape take."""
    return MAPS * 4 * math.prod(shape)


def at_once(most: int, shape: Sequence[int]) -> int:
    """Return the number of inputs of a shape that are measured together: `most`, or as many as MEMORY has room for."""
    return max(1, min(most, MEMORY // maps_of(shape)))


def answers(
    model: FlatModel, part: Part, names: Sequence[str], batch_size: int, innermost: bool = True
) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield (positions, task -> output, task -> label) of each batch; iterate while no model is trained."""
    model.module.eval()
    batches = part.index.split(at_once(batch_size, part.examples.input_shape))
    for batch, (x, targets) in zip(batches, loaded(part.examples, batches, model.device, names), strict=True):
        x = laid_out(model, x, innermost) if x.ndim == 4 else x
        yield batch, model.module(x, names), targets


def example_losses(model: FlatModel, part: Part, tasks: Mapping[str, tuple[Task, float]], batch_size: int) -> Tensor:
    """Return the loss of each example (n), summed over the tasks with their weights; 0 for a missing label."""
    names = tuple(tasks)
    losses = torch.zeros(len(part), dtype=torch.float64)
    at = 0
    with torch.inference_mode():
        for batch, outputs, targets in answers(model, part, names, batch_size):
            size = len(batch)
            for name, (task, weight) in tasks.items():
                pairs = zip(outputs[name].split(1), targets[name].split(1), strict=True)
                losses[at : at + size] += weight * torch.stack([task.loss(*pair) for pair in pairs]).cpu()
            at += size
    return losses


SOME = 500
"""Examples that are enough for an estimate."""


def constant_scores(federation: BuiltFederation) -> dict[str, tuple[str, float]]:
    """Return task -> (metric, score of the method `constant` on test data), from `SOME` training and test examples.

    Metrics that take long are left out for the next one of the task. Validation data where there is no test data. Empty
    where a user's own task does not say what the mean of its labels is, and where the examples are at nodes.
    """
    tasks = {task.name: task for task in federation.tasks}
    train, val, test = (
        together([(client.part(split), client.tasks) for client in federation.clients.values()]).spread(SOME)
        for split in ("train", "val", "test")
    )
    try:
        means = label_means(tasks, (y for part, names in train.by_labels(tasks) for _, y in _batches(part, names)))
    except (NotImplementedError, DataError):
        return {}
    scores = {}
    for part, names in (test if len(test) else val).by_labels(means):
        metrics = {name: tasks[name].metric().cheap() for name in names}
        heads = {name: ConstantHead(tasks[name], tuple(means[name].shape)) for name in names}
        for name, head in heads.items():
            head.answer.data = means[name]
        for x, y in _batches(part, names):
            for name, head in heads.items():
                metrics[name].update(head(x).detach(), y[name])
        for name, metric in metrics.items():
            values = metric.compute()
            first = next(m for m in (tasks[name].primary, *tasks[name].metrics) if m in values)
            scores[name] = first, values[first]
    return {name: scores[name] for name in tasks if name in scores}


def _batches(part: Part, tasks: tuple[str, ...]) -> Iterator[Batch]:
    some = part.index.split(50) if len(part) else ()  # where the data is at nodes there is nothing to read
    return (part.examples.batch(index, torch.device("cpu"), tasks=tasks) for index in some)
