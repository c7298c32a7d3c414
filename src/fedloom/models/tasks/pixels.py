"""Labels, losses and metrics of dense prediction.

Predictions are B x C x H x W before any activation, labels are of the same B, H and W (see the functions `read_` for
their layouts and for what counts as valid); other sizes are a DataError.

The losses are those of the release of FedHCA2 (Lu et al., CVPR 2024, supplement C): a sum over the valid pixels of the
batch divided by their number. Where no pixel is valid it is 0 and has a gradient, also 0. All of them compute in
float32 (float64 for float64), also under autocast, and work under `torch.func.vmap`.

Each metric accumulates over a data set: what it keeps does not grow with the images, and neither batch size nor order
changes the result. `compute()` returns the metric that the class is named after and `all()` what comes with it, both
nan where no valid pixel was seen. All is computed where the predictions are; only sums and counts come to the host.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.core.errors import DataError
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
        try:
            for measure in self.measures:
                measure.update(output, target)
        except DataError as error:
            raise DataError(f"task {self.task!r}: {error}") from None

    def compute(self) -> dict[str, float]:
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
        truth = read_classes(target, pred, self.ignore)
        guess = pred.detach().max(1).indices  # argmax takes five times as long
        for j, some in enumerate(self.sets):
            here = truth == classes + j
            guess = torch.where(here & torch.isin(guess, torch.tensor(some, device=guess.device)), 0, guess)
            truth = torch.where(here, 0, truth)
        valid = truth != self.ignore
        if stray := truth[valid & ((truth < 0) | (truth >= classes))][:1].tolist():
            raise DataError(f"expected labels below {classes}, or {self.ignore} for none, found {stray[0]}")
        cell = torch.where(valid, truth * classes + guess, classes**2)
        self.matrix += torch.bincount(cell.flatten(), minlength=classes**2 + 1)[:-1].view(classes, classes).cpu()

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

    `rmse`, `mae` (both metres), `rel` (mean of |error| / depth), and `delta1`, `delta2`, `delta3`
    (share of pixels with max(pred / depth, depth / pred) below 1.25, 1.25^2, 1.25^3; Eigen et al. 2014).
    Valid as in `depth_l1`, and nearer than `limit` metres. Predictions are raised to 1e-9 where they are less.
    With `log` they are log(1 + metres).
    """

    kind = "rmse"
    KINDS: ClassVar = ("rmse", "mae", "rel", "delta1", "delta2", "delta3")

    def __init__(self, limit: float = 80.0, log: bool = False) -> None:
        self.limit, self.log = limit, log
        self.seen = 0
        self.sums = torch.zeros(6, dtype=torch.float64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take depths B x 1 x H x W and labels in metres."""
        if pred.shape[1] != 1:
            raise DataError(f"expected a prediction of 1 channel, found {pred.shape[1]}")
        truth, valid = read_depth(target, pred)
        valid &= truth < self.limit
        near, truth = pred.detach()[:, 0][valid].double(), truth[valid].double()
        near = (near.expm1() if self.log else near).clamp(min=1e-9)
        error = near - truth
        ratio = torch.maximum(near / truth, truth / near)
        deltas = [(ratio < 1.25**power).double() for power in (1, 2, 3)]
        self.sums += torch.stack([v.sum() for v in (error.square(), error.abs(), error.abs() / truth, *deltas)]).cpu()
        self.seen += len(truth)

    def all(self) -> dict[str, float]:
        means = (self.sums / self.seen if self.seen else self.sums * math.nan).tolist()
        return {**dict(zip(self.KINDS, means, strict=True)), "rmse": math.sqrt(means[0])}


class NormalError(Measure):
    """Angles in degrees between predicted and true normals, over all valid pixels of the data set.

    `merr` is the mean angle, and `within_11_25`, `within_22_5`, `within_30` are the shares of smaller angles.
    Both vectors are normalised; the angle is 2 atan2(|a - b|, |a + b|), which stays exact near 0 and 180 degrees.
    A predicted zero vector counts as 90 degrees off.
    """

    kind = "merr"
    LIMITS: ClassVar = {"within_11_25": 11.25, "within_22_5": 22.5, "within_30": 30.0}

    def __init__(self) -> None:
        self.seen = 0
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take vectors of any length and labels, both B x 3 x H x W."""
        truth, valid = read_normals(target, pred)
        a, b = unit(pred.detach().contiguous().double()), unit(truth.contiguous().double())
        apart, along = (a - b).square().sum(1).sqrt(), (a + b).square().sum(1).sqrt()
        angle = 2 * torch.atan2(apart, along)[valid] * (180 / math.pi)
        within = [(angle < limit).double() for limit in self.LIMITS.values()]
        self.sums += torch.stack([v.sum() for v in (angle, *within)]).cpu()
        self.seen += len(angle)

    def all(self) -> dict[str, float]:
        means = (self.sums / self.seen if self.seen else self.sums * math.nan).tolist()
        return dict(zip(("merr", *self.LIMITS), means, strict=True))


def levels(count: int) -> Tensor:
    """Return `count` thresholds at equal steps strictly between 0 and 1: 19 give 0.05, 0.10, ..., 0.95."""
    return torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)


def probability(pred: Tensor) -> Tensor:
    """Return the probability of class 1, B x H x W float64, from 2 logits (softmax) or 1 (sigmoid); nan becomes 0."""
    return logit(pred.detach()).double().sigmoid().nan_to_num(nan=0.0)


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
        y, valid = read_binary(target, pred)
        reached = torch.bucketize(probability(pred), self.levels.to(y.device), right=True)
        images, bins = len(y), len(self.levels) + 1
        cell = (torch.arange(images, device=y.device).view(-1, 1, 1) * 2 + (y >= 0.5)) * bins + reached
        counts = torch.bincount(cell[valid], minlength=images * 2 * bins).view(images, 2, bins).cpu()
        self.counts += counts.sum(0)
        return counts

    def all(self) -> dict[str, float]:
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


def _flat(labels: Tensor, pred: Tensor) -> Tensor:
    """Return labels as B x H x W, from that or from B x 1 x H x W; DataError for another size than that of `pred`."""
    if labels.ndim == 4 and labels.shape[1] == 1:
        labels = labels[:, 0]
    _same(labels, (pred.shape[0], *pred.shape[2:]))
    return labels


def _same(labels: Tensor, expected: Sequence[int]) -> None:
    if labels.shape != tuple(expected):
        raise DataError(
            f"expected labels of shape {' x '.join(map(str, expected))}, found {' x '.join(map(str, labels.shape))}"
        )


def read_classes(labels: Tensor, pred: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return class numbers, B x H x W int64, with `ignore` (also for -1) where there is no label."""
    classes = _flat(labels, pred).long()
    return torch.where(classes == -1, ignore, classes)


def read_binary(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y in [0, 1], valid), both B x H x W. What is outside 0..1, so 255 and -1, is not valid; y is 0 there."""
    values = real(_flat(labels, pred))
    valid = (values >= 0) & (values <= 1)
    return torch.where(valid, values, 0.0), valid


def read_depth(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (metres, valid), both B x H x W. Valid: finite, above 0 and not 255; the depth is 1 elsewhere."""
    depth = real(_flat(labels, pred))
    valid = depth.isfinite() & (depth > 0) & (depth != IGNORE)
    return torch.where(valid, depth, 1.0), valid


def read_normals(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (vectors B x 3 x H x W as given, valid B x H x W). Valid: finite, no channel 255, not the zero vector; the
    vector is 0 elsewhere."""
    _same(labels, pred.shape)
    normals = real(labels)
    valid = (normals.isfinite() & (normals != IGNORE)).all(1) & (normals != 0).any(1)
    return torch.where(valid.unsqueeze(1), normals, 0.0), valid


def real(x: Tensor) -> Tensor:
    """Return a tensor as float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore: int = IGNORE,
    weights: Sequence[float] | None = None,
    sets: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Compute the cross entropy in nats over classes: semantic segmentation and human parts.

    `logits` B x C x H x W; `labels` B x H x W or B x 1 x H x W, class numbers below C. `ignore` and -1 do not count.
    `weights` are those of the classes; the mean is then weighted. Label C + j means one of the classes `sets[j]`, whose
    probabilities add up (the marginal loss); it weighs as much as the set's first class.
    """
    target = read_classes(labels, logits, ignore)
    of = None if weights is None else real(logits).new_tensor([*weights, *(weights[some[0]] for some in sets)])
    log_p = real(logits).log_softmax(1)
    if sets:
        log_p = torch.cat([log_p, *(log_p[:, list(some)].logsumexp(1, keepdim=True) for some in sets)], 1)
    total = functional.nll_loss(log_p, target, of, ignore_index=ignore, reduction="sum")
    if of is None:
        return total / (target != ignore).sum().clamp(min=1)
    whole = torch.where(target != ignore, of[torch.where(target == ignore, 0, target)], 0.0).sum()
    return total / torch.where(whole > 0, whole, 1.0)


def balanced_bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the two-class cross entropy in nats, balanced over the batch: saliency.

    The weights are q for salient pixels and 1 - q for others, where q is the share of the others among the valid
    pixels. `logits` B x 2 x H x W (background, salient) or B x 1 x H x W (their difference: the same loss);
    `labels` B x H x W or B x 1 x H x W in 0..1.
    """
    y, valid = read_binary(labels, logits)
    count = valid.sum().clamp(min=1)
    others = torch.where(valid, 1 - y, 0).sum() / count
    return _weighted_bce(logit(logits), y, valid, others, 1 - others)


def edge_bce(
    logits: Tensor, labels: Tensor, positive_weight: float = 0.95, negative_weight: float | None = None
) -> Tensor:
    """Compute the binary cross entropy in nats with fixed weights: edges.

    `logits` B x 1 x H x W; `labels` B x H x W or B x 1 x H x W in 0..1, where fractions are allowed.
    `negative_weight` is 1 - `positive_weight` unless given: (10, 1) is a cross entropy with pos_weight 10.
    """
    y, valid = read_binary(labels, logits)
    negative = 1 - positive_weight if negative_weight is None else negative_weight
    return _weighted_bce(logit(logits), y, valid, positive_weight, negative)


def normals_l1(pred: Tensor, labels: Tensor) -> Tensor:
    """Compute the L1 distance, summed over the three channels, of normalised predictions to the labels as they are.

    `pred` and `labels` B x 3 x H x W; labels in -1..1. A pixel counts unless a channel is 255 or all are 0.
    """
    target, valid = read_normals(labels, pred)
    distance = (unit(real(pred)) - target).abs().sum(1)
    return _mean(distance, valid)


def depth_l1(pred: Tensor, labels: Tensor, log: bool = False) -> Tensor:
    """Compute the L1 distance in metres.

    `pred` B x 1 x H x W; `labels` B x 1 x H x W or B x H x W in metres; 255, values of 0 or less and those that
    are not finite do not count. With `log`, predictions are log(1 + metres), and so is the distance.
    """
    target, valid = read_depth(labels, pred)
    if log:
        target = target.log1p()
    return _mean((real(pred)[:, 0] - target).abs(), valid)


def logit(pred: Tensor) -> Tensor:
    """Return the logit of class 1, B x H x W, from one channel or from those of two classes (class 1 minus class 0)."""
    if pred.shape[1] not in (1, 2):
        raise DataError(f"expected a prediction of 1 or 2 channels, found {pred.shape[1]}")
    values = real(pred)
    return values[:, 0] if pred.shape[1] == 1 else values[:, 1] - values[:, 0]


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (channels second) to length 1; vectors shorter than 1e-12 stay as they are.

    With u the unit roundoff (2^-24, in float64 2^-53), each component of up to three is within 4 u of the exact one,
    relative to it: three roundings of the sum of squares count half, then one of the root and one of the quotient.
    With torch's norm, which was used before, it is too, so components differ from then by at most 8 u of themselves and
    the L1 distance of a pixel, but for its own rounding, by at most 8 sqrt(3) u. Holds for lengths up to 1e19 (float64:
    1e154), above which squares overflow.
    """
    # Torch's norm along channels takes a hundred times as long as squares and their sum.
    square = vectors.square().sum(1, keepdim=True)
    # Not divided by a small number instead: the gradient at zero would be its inverse.
    return vectors / torch.where(square > 1e-24, square, 1.0).sqrt()


def _weighted_bce(z: Tensor, y: Tensor, valid: Tensor, positive: Tensor | float, negative: Tensor | float) -> Tensor:
    """Mean over valid pixels of positive y -log s(z) + negative (1 - y) -log(1 - s(z)), s the sigmoid."""
    cost = positive * y * functional.softplus(-z) + negative * (1 - y) * functional.softplus(z)
    return _mean(cost, valid)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0).sum() / valid.sum().clamp(min=1)
