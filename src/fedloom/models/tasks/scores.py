"""Metrics that a task can be judged by, by name: functions of all outputs and labels of a data set.

Each is defined as scikit-learn has it (`calibration` as torchmetrics does). It is nan, which means "no value", where
the labels do not determine it or an output is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.models.tasks.task import Direction, Metric

BINS = 15
"""Bins of equal width in which `calibration` compares probabilities with shares."""


@dataclass(frozen=True)
class Score:
    """A metric by name: its direction, and a function of (outputs, labels) of the examples that have a label.

    Outputs are logits (N x C) with classes (N), or predictions (N) with numbers (N) in the labels' own unit, float64.
    """

    of: Callable[[Tensor, Tensor], float]
    direction: Direction = "max"


def _each_class(one: Callable[[Tensor, Tensor], float]) -> Callable[[Tensor, Tensor], float]:
    """Return the score of class 1 of two; of more classes the mean over those that some examples have and some lack."""

    def score(output: Tensor, target: Tensor) -> float:
        if output.shape[1] == 2:
            columns = {1: output[:, 1] - output[:, 0]}
        else:
            columns = dict(enumerate(output.double().softmax(1).unbind(1)))
        truths = {c: target == c for c in columns}
        values = [one(columns[c].double(), truth) for c, truth in truths.items() if truth.any() and not truth.all()]
        return math.fsum(values) / len(values) if values else math.nan

    return score


def _auc(score: Tensor, truth: Tensor) -> float:
    """Return how often a positive example scores above a negative one; a tie counts half (Mann and Whitney)."""
    positive, negative = score[truth], score[~truth].sort().values
    above = torch.searchsorted(negative, positive) + torch.searchsorted(negative, positive, right=True)
    return int(above.sum()) / (2 * len(positive) * len(negative))


def _average_precision(score: Tensor, truth: Tensor) -> float:
    """Return the mean precision at the positive examples, where equal scores are one step."""
    score, order = score.sort(descending=True, stable=True)
    last = torch.cat([score.diff() != 0, torch.ones(1, dtype=torch.bool)])
    hits, taken = truth[order].cumsum(0)[last], torch.arange(1, len(score) + 1)[last]
    steps = hits.diff(prepend=hits.new_zeros(1))
    return float((steps * hits / taken).sum() / hits[-1])


def _balanced_accuracy(output: Tensor, target: Tensor) -> float:
    """Return the mean share of a class's examples that are right; nan where fewer than two classes occur."""
    right = (output.argmax(1) == target).double()
    shares = [float(right[target == c].mean()) for c in target.unique()]
    return math.fsum(shares) / len(shares) if len(shares) > 1 else math.nan


def _brier(output: Tensor, target: Tensor) -> float:
    """Return half the mean squared distance of probabilities from the truth, which lies in 0..1 (`scale_by_half`)."""
    p = output.double().softmax(1)
    p[torch.arange(len(p)), target] -= 1
    return float(p.square().sum(1).mean() / 2)


def _calibration(output: Tensor, target: Tensor) -> float:
    """Return the expected calibration error over BINS bins of p(class 1); of more than two classes, of the top's."""
    p = output.double().softmax(1)
    if p.shape[1] == 2:
        sure, right = p[:, 1], (target == 1).double()
    else:
        sure, top = p.max(1)
        right = (top == target).double()
    at = (sure * BINS).long().clamp(max=BINS - 1)
    apart = torch.zeros(BINS, dtype=torch.float64).index_add_(0, at, sure - right)
    return float(apart.abs().sum() / len(p))


def _r2(output: Tensor, target: Tensor) -> float:
    """Return 1 - squared errors / squared deviations of the labels from their mean; nan where all labels are equal."""
    spread = (target - target.mean()).square().sum()
    return float(1 - (output - target).square().sum() / spread) if spread > 1e-12 * target.square().sum() else math.nan


CLASSES: Mapping[str, Score] = {
    "auc": Score(_each_class(_auc)),
    "pr-auc": Score(_each_class(_average_precision)),
    "balanced-accuracy": Score(_balanced_accuracy),
    "brier": Score(_brier, "min"),
    "calibration": Score(_calibration, "min"),
    "accuracy": Score(lambda output, target: float((output.argmax(1) == target).double().mean())),
}
"""Metrics of classes."""


def _median(output: Tensor) -> Tensor:
    """Return the class that splits the probability in half, of ordered classes."""
    return (output.double().softmax(1).cumsum(1) < 0.5).sum(1).clamp(max=output.shape[1] - 1)


def _kappa(output: Tensor, target: Tensor) -> float:
    """Return Cohen's kappa with quadratic weights; nan where truth and prediction are one and the same class."""
    truth, guess = target.double(), _median(output).double()
    apart = truth.mean() - guess.mean()
    chance = truth.var(correction=0) + guess.var(correction=0) + apart.square()  # of all pairs
    return float(1 - (truth - guess).square().mean() / chance) if chance > 0 else math.nan


ORDERED: Mapping[str, Score] = {
    **CLASSES,
    "kappa": Score(_kappa),
    "mae": Score(lambda output, target: float((_median(output) - target).double().abs().mean()), "min"),
}
"""Metrics of ordered classes: those of classes, and of the median class the distance in classes and the weighted kappa.
"""
NUMBERS: Mapping[str, Score] = {
    "r2": Score(_r2),
    "mae": Score(lambda output, target: float((output - target).abs().mean()), "min"),
    "rmse": Score(lambda output, target: math.sqrt(float((output - target).square().mean())), "min"),
}
"""Metrics of real numbers."""


def labelled(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples of a batch that have a label. Labels that are maps are left as they are."""
    if target.ndim > 1:
        return output, target
    have = ~target.isnan() if target.is_floating_point() else target >= 0
    return (output, target) if bool(have.all()) else (output[have], target[have])


def directions(names: Sequence[str], scores: Mapping[str, Score]) -> dict[str, Direction]:
    """Return the directions of the metrics of these names that have a score."""
    return {name: scores[name].direction for name in names if name in scores}


Prepared = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(outputs, labels) as a task has them -> as its scores take them."""


def as_classes(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and classes."""
    return output, target.long()


class Kept(Metric):
    """A task's usual metric and some scores of all examples together, whose outputs and labels it keeps for that."""

    def __init__(
        self, usual: Metric | None, names: Sequence[str], scores: Mapping[str, Score], prepared: Prepared = as_classes
    ) -> None:
        self.usual, self.prepared = usual, prepared
        self.scores = {name: scores[name] for name in names}
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        if self.usual is not None:
            self.usual.update(output, target)
        output, target = labelled(output.detach().cpu(), target.cpu())
        if len(target):
            self.outputs.append(output)
            self.targets.append(target)

    def compute(self) -> dict[str, float]:
        """Return the scores, then the usual metrics; nan where there was no label."""
        values = dict.fromkeys(self.scores, math.nan)
        if self.kept is not None:
            output, target = self.prepared(*self.kept)
            if bool(output.isfinite().all()):
                values = {name: score.of(output, target) for name, score in self.scores.items()}
        usual = {} if self.usual is None else self.usual.compute()
        return {**values, **{name: value for name, value in usual.items() if name not in values}}

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        return (torch.cat(self.outputs), torch.cat(self.targets)) if self.targets else None

    @property
    def confusion(self) -> Tensor | None:
        return None if self.usual is None else self.usual.confusion
