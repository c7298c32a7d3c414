"""One class, or several yes/no labels, per example: cross entropy, accuracy, macro-F1 and metrics of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy

from fedloom.core.errors import DataError
from fedloom.core.machine import need_memory
from fedloom.models.tasks import scores
from fedloom.models.tasks.task import Direction, Metric, Task


class ConfusionMetric(Metric):
    """Accuracy and macro-F1 from a confusion matrix (truth x prediction) that grows batch by batch."""

    def __init__(self, task: str, classes: int) -> None:
        self.task = task
        self.matrix = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take logits (B x C) and labels (B, -1 = unlabelled). A label of C or more is a DataError."""
        classes = len(self.matrix)
        valid = target >= 0
        pairs = (target[valid] * classes + output.argmax(1)[valid]).cpu()
        if len(pairs) and int(pairs.max()) >= classes * classes:
            raise DataError(f"task {self.task!r}: expected labels below {classes}, found {int(target.max())}")
        self.matrix += torch.bincount(pairs, minlength=classes * classes).view(classes, classes)

    @property
    def confusion(self) -> Tensor:
        return self.matrix

    def compute(self) -> dict[str, float]:
        """Return accuracy, and the mean F1 of the classes that occur in truth or prediction (as scikit-learn's)."""
        seen = int(self.matrix.sum())
        if not seen:
            return {"accuracy": float("nan"), "macro_f1": float("nan")}
        hits = self.matrix.diagonal().double()
        either = (self.matrix.sum(0) + self.matrix.sum(1)).double()  # 2 tp + fp + fn
        occurs = either > 0
        f1 = 2 * hits[occurs] / either[occurs]
        return {"accuracy": float(hits.sum()) / seen, "macro_f1": float(f1.mean())}


@dataclass(frozen=True)
class Classification(Task):
    """A task with one class per example. Labels are int64 in 0..channels-1; -1 means unlabelled.

    `class_weights` weigh the loss of the examples of each class.
    """

    class_weights: tuple[float, ...] | None = None

    kind: ClassVar[str] = "classification"
    masks: ClassVar[bool] = True
    usual: ClassVar[str] = "accuracy"
    by_name: ClassVar[Mapping[str, scores.Score]] = scores.CLASSES

    def __post_init__(self) -> None:
        super().__post_init__()
        need_memory(8 * self.channels**2, f"task {self.name!r}: the confusion matrix of {self.channels} classes")

    @property
    def chosen_from(self) -> Collection[str]:  # type: ignore[override]
        """The names of the metrics of classes."""
        return self.by_name

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, accuracy and macro-F1."""
        return {**scores.directions(self.judge, self.by_name), "accuracy": "max", "macro_f1": "max"}

    def head(self, features: int) -> nn.Module:
        """Return a linear layer from the features to one logit per class."""
        return nn.Linear(features, self.channels)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the cross entropy of logits (B x C) and labels (B), averaged over the labelled examples."""
        weights = None if self.class_weights is None else output.new_tensor(self.class_weights)
        total = cross_entropy(output, target, weights, ignore_index=-1, reduction="sum")
        # A mean over no label would be 0/0; the sum over none is zero and keeps its gradient path.
        return total / _weight(target, weights)

    def metric(self) -> Metric:
        """Return a new confusion matrix, which also keeps outputs where metrics were chosen."""
        usual = ConfusionMetric(self.name, self.channels)
        return scores.Kept(usual, self.judge, self.by_name) if self.judge else usual

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return examples of each class (C), and labelled ones (1)."""
        counts = torch.bincount(target[target >= 0], minlength=self.channels).double()
        return counts, counts.sum(0, keepdim=True)

    def constant(self, mean: Tensor) -> Tensor:
        return log_share(mean)


def _weight(target: Tensor, weights: Tensor | None) -> Tensor:
    """Return the number of labelled examples (at least 1), or the sum of their classes' weights."""
    if weights is None:
        return (target >= 0).sum().clamp(min=1)
    total = torch.where(target >= 0, weights[target.clamp(min=0)], 0.0).sum()
    return torch.where(total > 0, total, 1.0)


@dataclass(frozen=True)
class Ordinal(Classification):
    """A task with one of `channels` ordered classes per example, such as a stage or a grade.

    Outputs are one logit per class, as of a classification. The loss compares, at each border between two classes, the
    probability of lying above it with the truth: a wrong class costs more the further away it is.
    """

    kind: ClassVar[str] = "ordinal"
    by_name: ClassVar[Mapping[str, scores.Score]] = scores.ORDERED

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy, summed over the borders and averaged over the labelled examples."""
        p = output.log_softmax(1)
        below, above = p.logcumsumexp(1)[:, :-1], p.flip(1).logcumsumexp(1).flip(1)[:, 1:]
        is_above = target[:, None] > torch.arange(self.channels - 1, device=target.device)
        weights = output.new_tensor(self.class_weights or (1.0,) * self.channels)
        each = -torch.where(is_above, above, below).sum(1) * weights[target.clamp(min=0)]
        return torch.where(target >= 0, each, 0.0).sum() / _weight(target, weights)


def log_share(p: Tensor) -> Tensor:
    """Return the logarithm of a share; shares below a millionth count as one."""
    return p.clamp(min=1e-6).log()


Of = Callable[[Tensor, Tensor], float]
"""A metric of outputs and labels."""


def _of_label(one: Of, place: int) -> Of:
    """Return a metric of two classes as one of the label at this place; nan where it is known of no example."""

    def score(output: Tensor, target: Tensor) -> float:
        known = ~target[:, place].isnan()
        logit, truth = output[known, place], target[known, place].long()
        return one(torch.stack([torch.zeros_like(logit), logit], 1), truth) if len(truth) else math.nan

    return score


def _over_labels(one: Of) -> Of:
    """Return the mean of a metric of two classes over the labels that have a value."""

    def score(output: Tensor, target: Tensor) -> float:
        values = [_of_label(one, place)(output, target) for place in range(target.shape[1])]
        values = [value for value in values if not math.isnan(value)]
        return math.fsum(values) / len(values) if values else math.nan

    return score


LABELS: Mapping[str, scores.Score] = {
    name: scores.Score(_over_labels(score.of), score.direction) for name, score in scores.CLASSES.items()
}
"""Metrics of classes, as means over labels."""


@dataclass(frozen=True)
class Multilabel(Task):
    """A task with `channels` yes/no labels per example: N x channels numbers 0 or 1; NaN means that one is missing.

    Outputs are one logit per label. `class_weights` are weights of the positive examples of each label. Where labels
    have names, the metric that stands for the task is measured of each label too.
    """

    class_weights: tuple[float, ...] | None = None
    labels: tuple[Annotated[str, Field(pattern=r"^[\w-]{1,200}$")], ...] = ()

    kind: ClassVar[str] = "multilabel"
    usual: ClassVar[str] = "accuracy"
    chosen_from: ClassVar[Collection[str]] = tuple(LABELS)

    @property
    def _scores(self) -> dict[str, scores.Score]:
        """The chosen metrics and the accuracy as means over labels, then the first of them of each label."""
        of, way = (scores.CLASSES[self.primary].of, scores.CLASSES[self.primary].direction)
        each = {f"{self.primary}[{name}]": scores.Score(_of_label(of, i), way) for i, name in enumerate(self.labels)}
        return {**{name: LABELS[name] for name in (*self.judge, "accuracy")}, **each}

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones and the accuracy, which are means over labels, and the first of them of each label."""
        return {name: score.direction for name, score in self._scores.items()}

    def head(self, features: int) -> nn.Module:
        """Return a linear layer from the features to one logit per label."""
        return nn.Linear(features, self.channels)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross entropy of logits and labels (B x channels), averaged over the known labels."""
        valid = ~target.isnan()
        weights = None if self.class_weights is None else output.new_tensor(self.class_weights)
        loss = bce(output, torch.where(valid, target, 0.0), pos_weight=weights, reduction="none")
        return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=1)

    def metric(self) -> Metric:
        """Return a metric that keeps all outputs and labels."""
        return scores.Kept(None, tuple(self.metrics), self._scores, lambda output, target: (output, target))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many examples have each label, and for how many it is known (both channels)."""
        return target.nan_to_num(0.0).sum(0, dtype=torch.float64), (~target.isnan()).sum(0).double()

    def constant(self, mean: Tensor) -> Tensor:
        """Return the log odds of the shares; even odds for a label without known examples."""
        return mean.nan_to_num(0.5).clamp(1e-6, 1 - 1e-6).logit()
