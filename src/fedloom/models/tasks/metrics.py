"""Metrics of dense prediction. Each accumulates over a data set: what it keeps does not grow with the images, and
neither batch size nor order changes the result.

`update(pred, target)` takes predictions B x C x H x W before any activation and labels of the same B, H and W (see
`losses.py`; other sizes are a DataError). `compute()` returns the metric that the class is named after and
`all()` what comes with it, both nan where no valid pixel was seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.models.tasks.losses import logit, read_binary, read_classes, read_depth, read_normals, unit
from fedloom.models.tasks.task import IGNORE, Metric

Absent = Literal["skip", "zero"]


class Measure(ABC):
    """One accumulator that yields one or several named numbers."""

    kind: str
    """The name of the number that `compute` returns."""
    costly: ClassVar[bool] = False
    """True if it takes too long for every evaluation."""

    @abstractmethod
    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take one batch; neither tensor is changed."""

    @abstractmethod
    def all(self) -> dict[str, float]:
        """Return every number by its name."""

    def compute(self) -> float:
        """Return the number called `kind`."""
        return self.all()[self.kind]


class Measures(Metric):
    """Some measures of one task as one metric; `names` are the numbers to report, in this order."""

    def __init__(self, task: str, names: Collection[str], *measures: Measure) -> None:
        self.task, self.names, self.measures = task, tuple(names), measures

    def update(self, output: Tensor, target: Tensor) -> None:
        """Give the batch to every measure."""
        try:
            for measure in self.measures:
                measure.update(output, target)
        except DataError as error:
            raise DataError(f"task {self.task!r}: {error}") from None

    def compute(self) -> dict[str, float]:
        """Name -> value."""
        values = {name: value for measure in self.measures for name, value in measure.all().items()}
        return {name: values[name] for name in self.names}

    def cheap(self) -> Metric:
        """Return the measures that are not costly, with their names."""
        costly = [measure for measure in self.measures if measure.costly]
        if not costly:
            return self
        names = [name for name in self.names if not any(name in measure.all() for measure in costly)]
        return Measures(self.task, names, *(measure for measure in self.measures if not measure.costly))

    @property
    def confusion(self) -> Tensor | None:
        """The matrix of the first measure that has one."""
        return next((measure.matrix for measure in self.measures if isinstance(measure, _ConfusionMeasure)), None)


class _ConfusionMeasure(Measure):
    """A confusion matrix, truth x prediction, of classes over valid pixels."""

    def __init__(
        self, classes: int, ignore: int = IGNORE, absent: Absent = "skip", sets: Sequence[Sequence[int]] = ()
    ) -> None:
        if absent not in ("skip", "zero"):
            raise ValueError(f"absent: expected 'skip' or 'zero', found {absent!r}")
        self.ignore, self.absent, self.sets = ignore, absent, sets
        self.matrix = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take logits and class numbers; a label of no class that is neither `ignore` nor -1 is a DataError.

        Label `classes` + j means one of the classes `sets[j]`: it counts as class 0, and so does a prediction of any.
        """
        classes = len(self.matrix)
        if pred.shape[1] != classes:
            raise DataError(f"expected a prediction of {classes} channels, found {pred.shape[1]}")
        truth = read_classes(target, pred, self.ignore).cpu()
        guess = pred.detach().max(1).indices.cpu()  # argmax takes five times as long
        for j, some in enumerate(self.sets):
            here = truth == classes + j
            guess = torch.where(here & torch.isin(guess, torch.tensor(some)), 0, guess)
            truth = torch.where(here, 0, truth)
        valid = truth != self.ignore
        if stray := truth[valid & ((truth < 0) | (truth >= classes))][:1].tolist():
            raise DataError(f"expected labels below {classes}, or {self.ignore} for none, found {stray[0]}")
        cell = torch.where(valid, truth * classes + guess, classes**2)
        self.matrix += torch.bincount(cell.flatten(), minlength=classes**2 + 1)[:-1].view(classes, classes)

    def all(self) -> dict[str, float]:
        """Return `miou`: mean over classes of tp / (tp + fp + fn); `pixel_accuracy`: the share of pixels that are
        right.
        """
        hits, seen = self.matrix.diagonal().double(), int(self.matrix.sum())
        if not seen:
            return {"miou": math.nan, "pixel_accuracy": math.nan}
        union = self.matrix.sum(0) + self.matrix.sum(1) - self.matrix.diagonal()
        iou = hits / union.clamp(min=1)
        counted = iou if self.absent == "zero" else iou[union > 0]
        return {"miou": float(counted.mean()), "pixel_accuracy": float(hits.sum()) / seen}


class MeanIoU(_ConfusionMeasure):
    """Mean intersection over union of classes, pooled over the data set.

    `absent`: a class that is in neither truth nor prediction is left out of the mean ("skip") or counts as 0
    ("zero", as FedHCA2's release does).
    """

    kind = "miou"


class PixelAccuracy(_ConfusionMeasure):
    """The share of valid pixels whose class is right."""

    kind = "pixel_accuracy"


class DepthError(Measure):
    """Errors of depth, over all valid pixels of the data set and not as means over images.

    `kind` is one of `rmse`, `mae` (both metres), `rel` (mean of |error| / depth), and `delta1`, `delta2`, `delta3`
    (share of pixels with max(pred / depth, depth / pred) below 1.25, 1.25^2, 1.25^3; Eigen et al. 2014).
    Valid as in `depth_l1`, and nearer than `limit` metres. Predictions are raised to 1e-9 where they are less.
    With `log` they are log(1 + metres).
    """

    KINDS: ClassVar = ("rmse", "mae", "rel", "delta1", "delta2", "delta3")

    def __init__(self, kind: str = "rmse", limit: float = 80.0, log: bool = False) -> None:
        if kind not in self.KINDS:
            raise ValueError(f"kind: expected one of {', '.join(self.KINDS)}, found {kind!r}")
        self.kind, self.limit, self.log = kind, limit, log
        self.seen = 0
        self.sums = torch.zeros(6, dtype=torch.float64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take depths B x 1 x H x W and labels in metres."""
        if pred.shape[1] != 1:
            raise DataError(f"expected a prediction of 1 channel, found {pred.shape[1]}")
        truth, valid = read_depth(target.cpu(), pred)
        valid &= truth < self.limit
        near, truth = pred.detach().cpu()[:, 0][valid].double(), truth[valid].double()
        near = (near.expm1() if self.log else near).clamp(min=1e-9)
        error = near - truth
        ratio = torch.maximum(near / truth, truth / near)
        deltas = [(ratio < 1.25**power).double() for power in (1, 2, 3)]
        self.sums += torch.stack([v.sum() for v in (error.square(), error.abs(), error.abs() / truth, *deltas)])
        self.seen += len(truth)

    def all(self) -> dict[str, float]:
        """Return the six errors by name."""
        means = (self.sums / self.seen if self.seen else self.sums * math.nan).tolist()
        return {**dict(zip(self.KINDS, means, strict=True)), "rmse": math.sqrt(means[0])}


class NormalError(Measure):
    """Angles in degrees between predicted and true normals, over all valid pixels of the data set.

    `kind` is `merr`, the mean angle, or `within_11_25`, `within_22_5`, `within_30`: the share of smaller angles.
    Both vectors are normalised; the angle is 2 atan2(|a - b|, |a + b|), which stays exact near 0 and 180 degrees.
    A predicted zero vector counts as 90 degrees off.
    """

    LIMITS: ClassVar = {"within_11_25": 11.25, "within_22_5": 22.5, "within_30": 30.0}

    def __init__(self, kind: str = "merr") -> None:
        if kind not in ("merr", *self.LIMITS):
            raise ValueError(f"kind: expected one of merr, {', '.join(self.LIMITS)}, found {kind!r}")
        self.kind = kind
        self.seen = 0
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take vectors of any length and labels, both B x 3 x H x W."""
        truth, valid = read_normals(target.cpu(), pred)
        a, b = unit(pred.detach().cpu().contiguous().double()), unit(truth.contiguous().double())
        apart, along = (a - b).square().sum(1).sqrt(), (a + b).square().sum(1).sqrt()
        angle = 2 * torch.atan2(apart, along)[valid] * (180 / math.pi)
        within = [(angle < limit).double() for limit in self.LIMITS.values()]
        self.sums += torch.stack([v.sum() for v in (angle, *within)])
        self.seen += len(angle)

    def all(self) -> dict[str, float]:
        """Return the mean angle and the shares of small ones."""
        means = (self.sums / self.seen if self.seen else self.sums * math.nan).tolist()
        return dict(zip(("merr", *self.LIMITS), means, strict=True))


def levels(count: int) -> Tensor:
    """Return `count` thresholds at equal steps strictly between 0 and 1: 19 give 0.05, 0.10, ..., 0.95."""
    return torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)


def probability(pred: Tensor) -> Tensor:
    """Return the probability of class 1, B x H x W float64, from 2 logits (softmax) or 1 (sigmoid); nan becomes 0."""
    return logit(pred.detach()).cpu().double().sigmoid().nan_to_num(nan=0.0)


class _BestF(Measure):
    """F of a probability map over thresholds: pixels counted over the data set per threshold, the best F of all."""

    beta2: ClassVar[float]

    def __init__(self, thresholds: int) -> None:
        self.levels = levels(thresholds)
        # Per number of thresholds that a pixel reaches: how many other and how many positive pixels.
        self.counts = torch.zeros(2, thresholds + 1, dtype=torch.int64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take 1 or 2 logits and labels; those from 0.5 up are positive."""
        self._count(pred, target)

    def _count(self, pred: Tensor, target: Tensor) -> Tensor:
        """Add the batch; returns its counts, B x 2 x (thresholds + 1)."""
        y, valid = read_binary(target.cpu(), pred)
        reached = torch.bucketize(probability(pred), self.levels, right=True)
        images, bins = len(y), len(self.levels) + 1
        cell = (torch.arange(images).view(-1, 1, 1) * 2 + (y >= 0.5)) * bins + reached
        counts = torch.bincount(cell[valid], minlength=images * 2 * bins).view(images, 2, bins)
        self.counts += counts.sum(0)
        return counts

    def all(self) -> dict[str, float]:
        """Return the best F."""
        if not int(self.counts.sum()):
            return {self.kind: math.nan}
        false, true = _reaching(self.counts)
        return {self.kind: best_f(true, true + false, int(self.counts[1].sum()), self.beta2)}


def _reaching(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (other, positive) pixels at or above each threshold, from counts ... x 2 x (thresholds + 1)."""
    above = counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return above[..., 0, :], above[..., 1, :]


def best_f(hits: Tensor, predicted: Tensor, actual: int, beta2: float) -> float:
    """Return the largest (1 + beta2) P R / (beta2 P + R) over thresholds; P = hits / predicted, R = hits / actual.

    0 where there is nothing to find or nothing was found.
    """
    scores = (1 + beta2) * hits.double() / (beta2 * actual + predicted).double().clamp(min=1e-9)
    return float(scores.max())


class MaxF(_BestF):
    """Saliency: the best F with beta^2 = 0.3 over the thresholds 0.05, 0.10, ..., 0.95 on the probability.

    Hits, predictions and salient pixels are pooled over the data set per threshold (as FedHCA2's release does; not
    the mean over images of their best F). A pixel is predicted when its probability is at least the threshold.
    `all()` adds `max_iou`: the best over thresholds of the mean over images of the intersection over union, where an
    image whose truth and prediction are both empty is left out.
    """

    kind = "maxf"
    beta2 = 0.3

    def __init__(self, thresholds: int = 19) -> None:
        super().__init__(thresholds)
        self.iou = torch.zeros(thresholds, dtype=torch.float64)
        self.images = torch.zeros(thresholds, dtype=torch.int64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take B x 2 x H x W (or B x 1 x H x W) logits and labels 0 or 1."""
        counts = self._count(pred, target)
        false, true = _reaching(counts)
        union = counts[:, 1].sum(1, keepdim=True) + false
        self.iou += (true / union.clamp(min=1).double()).sum(0)
        self.images += (union > 0).sum(0)

    def all(self) -> dict[str, float]:
        """Return `maxf` and `max_iou`."""
        seen = self.images > 0
        iou = float((self.iou[seen] / self.images[seen]).max()) if seen.any() else math.nan
        return {**super().all(), "max_iou": iou}


class PlainEdgeF(_BestF):
    """Edges, quickly: the best F over thresholds of pixels that are right, without thinning and without tolerance.

    Not comparable with odsF: an edge one pixel off counts as wrong twice. `all()` adds precision, recall and F of the
    pixels whose probability reaches the threshold nearest 0.5 (DFMTL thesis, section 6.1.4).
    """

    kind = "edge_f_plain"
    beta2 = 1.0
    AT_HALF: ClassVar = ("edge_precision", "edge_recall", "edge_f1")

    def __init__(self, thresholds: int = 99) -> None:
        super().__init__(thresholds)

    def all(self) -> dict[str, float]:
        """Return `edge_f_plain` and the numbers at 0.5; each is 0 where there is nothing to find or nothing was
        found.
        """
        if not int(self.counts.sum()):
            return dict.fromkeys((self.kind, *self.AT_HALF), math.nan)
        at = int((self.levels - 0.5).abs().argmin())
        false, true = (int(count[at]) for count in _reaching(self.counts))
        actual = int(self.counts[1].sum())
        parts = (true + false, actual, (true + false + actual) / 2)
        return {**super().all(), **{name: true / max(n, 1) for name, n in zip(self.AT_HALF, parts, strict=True)}}
