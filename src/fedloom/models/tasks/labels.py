"""Tasks with one class, several yes/no labels or one real number per example, and the metrics that judge them.

Metrics that can be chosen by name are functions of all outputs and labels of a data set, as scikit-learn has them
(`calibration` as torchmetrics). They are nan, which means "no value", where the labels do not determine them or an
output is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy

from fedloom.core.errors import DataError
from fedloom.core.machine import need_memory
from fedloom.core.settings.section import Positive
from fedloom.models.tasks.task import Direction, Metric, Task

BINS = 15
"""Bins of equal width in which `calibration` compares probabilities with shares."""
Of = Callable[[Tensor, Tensor], float]
"""A metric of outputs and labels."""


@dataclass(frozen=True)
class Score:
    """A metric by name: its direction, and a function of (outputs, labels) of the examples that have a label. Outputs
    are logits (N x C) with classes (N), or predictions (N) with numbers (N) in the labels' own unit, float64."""

    of: Of
    direction: Direction = "max"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _each_class(one: Of) -> Of:
    """Return the score of class 1 of two; of more classes the mean over those that some examples have and some lack."""

    def score(output: Tensor, target: Tensor) -> float:
        if output.shape[1] == 2:
            columns = {1: output[:, 1] - output[:, 0]}
        else:
            columns = dict(enumerate(output.double().softmax(1).unbind(1)))
        truths = {c: target == c for c in columns}
        return _mean([one(columns[c].double(), truth) for c, truth in truths.items() if truth.any() > truth.all()])

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
    return float((hits.diff(prepend=hits.new_zeros(1)) * hits / taken).sum() / hits[-1])


def _balanced_accuracy(output: Tensor, target: Tensor) -> float:
    """Return the mean share of a class's examples that are right; nan where fewer than two classes occur."""
    right = (output.argmax(1) == target).double()
    shares = [float(right[target == c].mean()) for c in target.unique()]
    return _mean(shares) if len(shares) > 1 else math.nan


def _brier(output: Tensor, target: Tensor) -> float:
    """Return half the mean squared distance of probabilities from the truth, which lies in 0..1 (`scale_by_half`)."""
    p = output.double().softmax(1)
    p[torch.arange(len(p)), target] -= 1
    return float(p.square().sum(1).mean() / 2)


def _calibration(output: Tensor, target: Tensor) -> float:
    """Return the expected calibration error over BINS bins of p(class 1); of more than two classes, of the top's."""
    p = output.double().softmax(1)
    sure, top = (p[:, 1], target.new_ones(1)) if p.shape[1] == 2 else p.max(1)
    at = (sure * BINS).long().clamp(max=BINS - 1)
    apart = torch.zeros(BINS, dtype=torch.float64).index_add_(0, at, sure - (top == target).double())
    return float(apart.abs().sum() / len(p))


def _r2(output: Tensor, target: Tensor) -> float:
    """Return 1 - squared errors / squared deviations of the labels from their mean; nan where all labels are equal."""
    if bool((target == target[0]).all()):
        return math.nan
    return float(1 - (output - target).square().sum() / (target - target.mean()).square().sum())


def _median(output: Tensor) -> Tensor:
    """Return the class that splits the probability in half, of ordered classes."""
    return (output.double().softmax(1).cumsum(1) < 0.5).sum(1).clamp(max=output.shape[1] - 1)


def _kappa(output: Tensor, target: Tensor) -> float:
    """Return Cohen's kappa with quadratic weights; nan where truth and prediction are one and the same class."""
    truth, guess = target.double(), _median(output).double()
    apart = truth.mean() - guess.mean()
    chance = truth.var(correction=0) + guess.var(correction=0) + apart.square()  # of all pairs
    return float(1 - (truth - guess).square().mean() / chance) if chance > 0 else math.nan


CLASSES: Mapping[str, Score] = {
    "auc": Score(_each_class(_auc)),
    "pr-auc": Score(_each_class(_average_precision)),
    "balanced-accuracy": Score(_balanced_accuracy),
    "brier": Score(_brier, "min"),
    "calibration": Score(_calibration, "min"),
    "accuracy": Score(lambda output, target: float((output.argmax(1) == target).double().mean())),
}
"""Metrics of classes."""
ORDERED: Mapping[str, Score] = {
    **CLASSES,
    "kappa": Score(_kappa),
    "mae": Score(lambda output, target: float((_median(output) - target).double().abs().mean()), "min"),
}
"""Metrics of ordered classes: of the median class the distance in classes and the weighted kappa, and those above."""
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
"""(outputs, labels) as a task has them -> as its scores take them; by default logits and classes."""


class Kept(Metric):
    """A task's usual metric and some scores of all examples together, whose outputs and labels it keeps for that."""

    def __init__(
        self,
        usual: Metric | None,
        names: Sequence[str],
        scores: Mapping[str, Score],
        prepared: Prepared = lambda output, target: (output, target.long()),
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
        if (kept := self.kept) is not None:
            output, target = self.prepared(*kept)
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
        if not (seen := int(self.matrix.sum())):
            return {"accuracy": math.nan, "macro_f1": math.nan}
        hits = self.matrix.diagonal().double()
        either = (self.matrix.sum(0) + self.matrix.sum(1)).double()  # 2 tp + fp + fn
        f1 = 2 * hits[either > 0] / either[either > 0]
        return {"accuracy": float(hits.sum()) / seen, "macro_f1": float(f1.mean())}


@dataclass(frozen=True)
class Linear(Task):
    """The base of tasks with labels per example: the head is a linear layer from the features."""

    def head(self, features: int) -> nn.Module:
        return nn.Linear(features, self.channels)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the probability of each class (B x channels) of logits."""
        return output.softmax(1)


@dataclass(frozen=True)
class Classification(Linear):
    """A task with one class per example. Labels are int64 in 0..channels-1; -1 means unlabelled.

    `class_weights` weigh the loss of the examples of each class.
    """

    class_weights: tuple[float, ...] | None = None

    kind: ClassVar[str] = "classification"
    masks: ClassVar[bool] = True
    usual: ClassVar[str] = "accuracy"
    chosen_from: ClassVar[Mapping[str, Score]] = CLASSES

    def __post_init__(self) -> None:
        super().__post_init__()
        need_memory(8 * self.channels**2, f"task {self.name!r}: the confusion matrix of {self.channels} classes")

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, accuracy and macro-F1."""
        return {**directions(self.judge, self.chosen_from), "accuracy": "max", "macro_f1": "max"}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Compute the cross entropy of logits (B x C) and labels (B), averaged over the labelled examples."""
        weights = None if self.class_weights is None else output.new_tensor(self.class_weights)
        # A mean over no label would be 0/0; the sum over none is zero and keeps its gradient path.
        return cross_entropy(output, target, weights, ignore_index=-1, reduction="sum") / _weight(target, weights)

    def metric(self) -> Metric:
        """Return a new confusion matrix, which also keeps outputs where metrics were chosen."""
        usual = ConfusionMetric(self.name, self.channels)
        return Kept(usual, self.judge, self.chosen_from) if self.judge else usual

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
    chosen_from: ClassVar[Mapping[str, Score]] = ORDERED

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
        return _mean([value for value in values if not math.isnan(value)])

    return score


LABELS: Mapping[str, Score] = {name: Score(_over_labels(each.of), each.direction) for name, each in CLASSES.items()}
"""Metrics of classes, as means over labels."""


@dataclass(frozen=True)
class Multilabel(Linear):
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
    def _scores(self) -> dict[str, Score]:
        """The chosen metrics and the accuracy as means over labels, then the first of them of each label."""
        of, way = CLASSES[self.primary].of, CLASSES[self.primary].direction
        each = {f"{self.primary}[{name}]": Score(_of_label(of, i), way) for i, name in enumerate(self.labels)}
        return {**{name: LABELS[name] for name in (*self.judge, "accuracy")}, **each}

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones and the accuracy, which are means over labels, and the first of them of each label."""
        return {name: score.direction for name, score in self._scores.items()}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross entropy of logits and labels (B x channels), averaged over the known labels."""
        valid = ~target.isnan()
        weights = None if self.class_weights is None else output.new_tensor(self.class_weights)
        loss = bce(output, torch.where(valid, target, 0.0), pos_weight=weights, reduction="none")
        return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=1)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the probability of each label (B x channels) of logits."""
        return output.sigmoid()

    def metric(self) -> Metric:
        return Kept(None, tuple(self.metrics), self._scores, lambda output, target: (output, target))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many examples have each label, and for how many it is known (both channels)."""
        return target.nan_to_num(0.0).sum(0, dtype=torch.float64), (~target.isnan()).sum(0).double()

    def constant(self, mean: Tensor) -> Tensor:
        """Return the log odds of the shares; even odds for a label without known examples."""
        return mean.nan_to_num(0.5).clamp(1e-6, 1 - 1e-6).logit()


@dataclass(frozen=True)
class Regression(Linear):
    """A task with one real number per example; NaN means that it has none.

    The model predicts (target - mean) / std, so that the losses of different tasks are of one size; labels and metrics
    are in the target's own units.
    """

    channels: int = 1
    mean: float = 0.0
    std: Positive = 1.0

    kind: ClassVar[str] = "regression"
    masks: ClassVar[bool] = True
    usual: ClassVar[str] = "rmse"
    chosen_from: ClassVar[Collection[str]] = tuple(NUMBERS)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, RMSE and R2."""
        return {**directions(self.judge, NUMBERS), "rmse": "min", "r2": "max"}

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of standardised predictions (B x 1) and targets (B), over the examples that have one."""
        valid = ~target.isnan()
        error = torch.where(valid, output[:, 0] - (target - self.mean) / self.std, 0)
        return error.square().sum() / valid.sum().clamp(min=1)

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the targets in their own units, and how many there are (1 each)."""
        there = target[~target.isnan()].double()
        return there.sum(0, keepdim=True), torch.tensor([float(len(there))], dtype=torch.float64)

    def constant(self, mean: Tensor) -> Tensor:
        return (mean - self.mean) / self.std

    def predictions(self, output: Tensor) -> Tensor:
        """Return outputs (B x 1) in the labels' own unit."""
        return output * self.std + self.mean

    def metric(self) -> Metric:
        """Return new scores of outputs in the labels' own unit."""

        def in_units(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return self.predictions(output[:, 0].double()), target.double()

        return Kept(None, tuple(self.metrics), NUMBERS, in_units)
