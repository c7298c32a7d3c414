"""Several yes/no labels per example: binary cross entropy, and the mean over labels of metrics of two classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from fedloom.models.tasks import scores
from fedloom.models.tasks.task import Direction, Metric, Task


def _over_labels(one: Callable[[Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], float]:
    """Return the mean of a metric of two classes over the labels that have a value."""

    def score(output: Tensor, target: Tensor) -> float:
        found = []
        for logit, truth in zip(output.unbind(1), target.unbind(1), strict=True):
            known = ~truth.isnan()
            if known.any():
                found.append(one(torch.stack([torch.zeros_like(logit), logit], 1)[known], truth[known].long()))
        found = [value for value in found if not math.isnan(value)]
        return math.fsum(found) / len(found) if found else math.nan

    return score


LABELS: Mapping[str, scores.Score] = {
    name: scores.Score(_over_labels(score.of), score.direction) for name, score in scores.CLASSES.items()
}
"""Metrics of classes, as means over labels."""


@dataclass(frozen=True)
class Multilabel(Task):
    """A task with `channels` yes/no labels per example: N x channels numbers 0 or 1; NaN means that one is missing.

    Outputs are one logit per label. `class_weights` are weights of the positive examples of each label.
    """

    class_weights: tuple[float, ...] | None = None

    kind: ClassVar[str] = "multilabel"
    usual: ClassVar[str] = "accuracy"
    chosen_from: ClassVar[Collection[str]] = tuple(LABELS)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, and the accuracy; all are means over labels."""
        return scores.directions((*self.judge, "accuracy"), LABELS)

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
        return scores.Kept(None, tuple(self.metrics), LABELS, lambda output, target: (output, target))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many examples have each label, and for how many it is known (both channels)."""
        return target.nan_to_num(0.0).sum(0, dtype=torch.float64), (~target.isnan()).sum(0).double()

    def constant(self, mean: Tensor) -> Tensor:
        """Return the log odds of the shares; even odds for a label that nobody knows."""
        return mean.nan_to_num(0.5).clamp(1e-6, 1 - 1e-6).logit()
