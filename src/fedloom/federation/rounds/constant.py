"""The scores of the constant prediction, which every model should beat: an estimate from some examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch
from fedloom.federation.rounds.federation import BuiltFederation, Part, together
from fedloom.models.changes import ConstantHead
from fedloom.training.rules import label_means

SOME = 500
"""Examples that are enough for an estimate."""


def constant_scores(federation: BuiltFederation, some: int = SOME) -> dict[str, tuple[str, float]]:
    """Return task -> (metric, score of the method `constant` on test data), from `some` training and test examples.

    Metrics that take long are left out for the next one of the task. Validation data where there is no test data. Empty
    where a user's own task does not say what the mean of its labels is, and where the examples are at nodes.
    """
    tasks = {task.name: task for task in federation.tasks}
    train, val, test = (
        together([(client.part(split), client.tasks) for client in federation.clients.values()]).spread(some)
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
