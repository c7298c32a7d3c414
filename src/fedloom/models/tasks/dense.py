"""Tasks with one prediction per pixel: heads, labels, losses and metrics of the NYUD and PASCAL benchmarks.

Predictions are B x C x H x W before any activation; labels are of the same B, H and W, with 255 for no label (see the
functions `read_` for their layouts and for what counts as valid). Other sizes are a DataError.

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.core.errors import DataError, RecipeError
from fedloom.models.tasks.edges import Bools, Floats, faded, pairs, suppress, thin
from fedloom.models.tasks.labels import log_share
from fedloom.models.tasks.task import IGNORE, Direction, Metric, Task

Absent = Literal["skip", "zero"]
Protocol = Literal["plain", "seism"]
Label = Literal["classes", "binary", "normals", "depth"]
Sets = Sequence[Sequence[int]]


def _flat(labels: Tensor, pred: Tensor) -> Tensor:
    """Return labels as B x H x W, from that or from B x 1 x H x W; DataError for another size than that of `pred`."""
    if labels.ndim == 4 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return _same(labels, (pred.shape[0], *pred.shape[2:]))


def _same(labels: Tensor, shape: Sequence[int]) -> Tensor:
    if labels.shape != tuple(shape):
        expected, found = (" x ".join(map(str, each)) for each in (shape, labels.shape))
        raise DataError(f"expected labels of shape {expected}, found {found}")
    return labels


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
    """Return (vectors B x 3 x H x W as given, 0 where not valid; valid B x H x W: finite, no channel 255, not zero)."""
    normals = real(_same(labels, pred.shape))
    valid = (normals.isfinite() & (normals != IGNORE)).all(1) & (normals != 0).any(1)
    return torch.where(valid.unsqueeze(1), normals, 0.0), valid


def real(x: Tensor) -> Tensor:
    """Return a tensor as float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def logit(pred: Tensor) -> Tensor:
    """Return the logit of class 1, B x H x W, from one channel or from those of two classes (class 1 minus class 0)."""
    if pred.shape[1] not in (1, 2):
        raise DataError(f"expected a prediction of 1 or 2 channels, found {pred.shape[1]}")
    values = real(pred)
    return values[:, 0] if pred.shape[1] == 1 else values[:, 1] - values[:, 0]


def probability(pred: Tensor) -> Tensor:
    """Return the probability of class 1, B x H x W float64, from 2 logits (softmax) or 1 (sigmoid); nan becomes 0."""
    return logit(pred.detach()).double().sigmoid().nan_to_num(nan=0.0)


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (channels second) to length 1; vectors shorter than 1e-12 stay as they are.

    With u the unit roundoff (2^-24, in float64 2^-53), each component of up to three is within 4 u of the exact one,
    relative to it. Holds for lengths up to 1e19 (float64: 1e154), above which squares overflow.
    """
    # Torch's norm along channels takes a hundred times as long as squares and their sum.
    square = vectors.square().sum(1, keepdim=True)
    # Not divided by a small number instead: the gradient at zero would be its inverse.
    return vectors / torch.where(square > 1e-24, square, 1.0).sqrt()


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore: int = IGNORE, weights: Sequence[float] | None = None, sets: Sets = ()
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
    others = torch.where(valid, 1 - y, 0).sum() / valid.sum().clamp(min=1)
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


def _weighted_bce(z: Tensor, y: Tensor, valid: Tensor, positive: Tensor | float, negative: Tensor | float) -> Tensor:
    """Mean over valid pixels of positive y -log s(z) + negative (1 - y) -log(1 - s(z)), s the sigmoid."""
    cost = positive * y * functional.softplus(-z) + negative * (1 - y) * functional.softplus(z)
    return _mean(cost, valid)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0).sum() / valid.sum().clamp(min=1)


def normals_l1(pred: Tensor, labels: Tensor) -> Tensor:
    """Compute the L1 distance, summed over the three channels, of normalised predictions to the labels as they are.

    The sum is FedHCA2's and ATRC's, for which the weight 10 is chosen; torch's L1, a mean over all, is a third of it.
    `pred` and `labels` B x 3 x H x W; labels in -1..1. A pixel counts unless a channel is 255 or all are 0.
    """
    target, valid = read_normals(labels, pred)
    return _mean((unit(real(pred)) - target).abs().sum(1), valid)


def depth_l1(pred: Tensor, labels: Tensor, log: bool = False) -> Tensor:
    """Compute the L1 distance in metres.

    `pred` B x 1 x H x W; `labels` B x 1 x H x W or B x H x W in metres; 255, values of 0 or less and those that
    are not finite do not count. With `log`, predictions are log(1 + metres), and so is the distance.
    """
    target, valid = read_depth(labels, pred)
    return _mean((real(pred)[:, 0] - (target.log1p() if log else target)).abs(), valid)


class Measure(ABC):
    """One accumulator that yields one or several named numbers."""

    kind: str
    """The name of the number that `compute` returns."""
    costly: ClassVar[bool] = False
    """True if it takes too long for every evaluation."""
    matrix: Tensor | None = None
    """Counts of truth x prediction, of classes."""

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
        """Return the measures that are not costly."""
        left = [measure for measure in self.measures if not measure.costly]
        known = {name for measure in left for name in measure.all()}
        names = [name for name in self.names if name in known]
        return self if left == [*self.measures] else Measures(self.task, names, *left)

    @property
    def confusion(self) -> Tensor | None:
        """The matrix of the first measure that has one."""
        return next((measure.matrix for measure in self.measures if measure.matrix is not None), None)


class MeanIoU(Measure):
    """Mean intersection over union of classes, from a confusion matrix that is pooled over the data set.

    `absent`: a class that is in neither truth nor prediction is left out of the mean ("skip") or counts as 0 ("zero",
    as FedHCA2's release does). Label `classes` + j means one of the classes `sets[j]`: it counts as class 0, and so
    does a prediction of any.
    """

    kind = "miou"
    matrix: Tensor

    def __init__(self, classes: int, absent: Absent = "skip", sets: Sets = ()) -> None:
        if absent not in ("skip", "zero"):
            raise ValueError(f"absent: expected 'skip' or 'zero', found {absent!r}")
        self.absent, self.sets = absent, sets
        self.matrix = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take logits and class numbers; a label of no class that is neither 255 nor -1 is a DataError."""
        classes = len(self.matrix)
        if pred.shape[1] != classes:
            raise DataError(f"expected a prediction of {classes} channels, found {pred.shape[1]}")
        truth = read_classes(target, pred)
        guess = pred.detach().max(1).indices  # argmax takes five times as long
        for j, some in enumerate(self.sets):
            here = truth == classes + j
            guess = torch.where(here & torch.isin(guess, torch.tensor(some, device=guess.device)), 0, guess)
            truth = torch.where(here, 0, truth)
        valid = truth != IGNORE
        if stray := truth[valid & ((truth < 0) | (truth >= classes))][:1].tolist():
            raise DataError(f"expected labels below {classes}, or {IGNORE} for none, found {stray[0]}")
        cell = torch.where(valid, truth * classes + guess, classes**2)
        self.matrix += torch.bincount(cell.flatten(), minlength=classes**2 + 1)[:-1].view(classes, classes).cpu()

    def all(self) -> dict[str, float]:
        """Return `miou`: mean over classes of tp / (tp + fp + fn); `pixel_accuracy`: the share of right pixels."""
        hits, seen = self.matrix.diagonal().double(), int(self.matrix.sum())
        if not seen:
            return {"miou": math.nan, "pixel_accuracy": math.nan}
        union = self.matrix.sum(0) + self.matrix.sum(1) - self.matrix.diagonal()
        iou = hits / union.clamp(min=1)
        counted = iou if self.absent == "zero" else iou[union > 0]
        return {"miou": float(counted.mean()), "pixel_accuracy": float(hits.sum()) / seen}


class Dice(MeanIoU):
    """The mean IoU, and the mean of 2 tp / (2 tp + fp + fn) over all classes but 0, the background."""

    kind = "dice"

    def all(self) -> dict[str, float]:
        hits, both = self.matrix.diagonal().double(), self.matrix.sum(0) + self.matrix.sum(1)
        dice = 2 * hits / both.clamp(min=1)
        counted = dice[1:] if self.absent == "zero" else dice[1:][both[1:] > 0]
        return {"dice": float(counted.mean()) if len(counted) else math.nan, **super().all()}


class PixelAccuracy(MeanIoU):
    """The share of valid pixels whose class is right."""

    kind = "pixel_accuracy"


class _Sums(Measure):
    """Means of numbers over all valid pixels of the data set, not as means over images."""

    KINDS: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.seen = 0
        self.sums = torch.zeros(len(self.KINDS), dtype=torch.float64)

    def _add(self, values: Sequence[Tensor]) -> None:
        """Add the numbers, each of the same valid pixels."""
        self.sums += torch.stack([v.sum(dtype=torch.float64) for v in values]).cpu()
        self.seen += len(values[0])

    def all(self) -> dict[str, float]:
        means = (self.sums / self.seen if self.seen else self.sums * math.nan).tolist()
        return dict(zip(self.KINDS, means, strict=True))


class DepthError(_Sums):
    """Errors of depth, over all valid pixels of the data set.

    `rmse`, `mae` (both metres), `rel` (mean of |error| / depth), and `delta1`, `delta2`, `delta3`
    (share of pixels with max(pred / depth, depth / pred) below 1.25, 1.25^2, 1.25^3; Eigen et al. 2014).
    Valid as in `depth_l1`, and nearer than `limit` metres. Predictions are raised to 1e-9 where they are less.
    With `log` they are log(1 + metres).
    """

    kind = "rmse"
    KINDS = ("rmse", "mae", "rel", "delta1", "delta2", "delta3")

    def __init__(self, limit: float = 80.0, log: bool = False) -> None:
        super().__init__()
        self.limit, self.log = limit, log

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
        self._add([error.square(), error.abs(), error.abs() / truth, *(ratio < 1.25**power for power in (1, 2, 3))])

    def all(self) -> dict[str, float]:
        means = super().all()
        return {**means, "rmse": math.sqrt(means["rmse"])}


class NormalError(_Sums):
    """Angles in degrees between predicted and true normals, over all valid pixels of the data set.

    `merr` is the mean angle, and `within_11_25`, `within_22_5`, `within_30` are the shares of smaller angles.
    Both vectors are normalised; the angle is 2 atan2(|a - b|, |a + b|), which stays exact near 0 and 180 degrees.
    A predicted zero vector counts as 90 degrees off.
    """

    kind = "merr"
    KINDS = ("merr", "within_11_25", "within_22_5", "within_30")

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take vectors of any length and labels, both B x 3 x H x W."""
        truth, valid = read_normals(target, pred)
        a, b = unit(pred.detach().contiguous().double()), unit(truth.contiguous().double())
        apart, along = (a - b).square().sum(1).sqrt(), (a + b).square().sum(1).sqrt()
        angle = 2 * torch.atan2(apart, along)[valid] * (180 / math.pi)
        self._add([angle, *(angle < limit for limit in (11.25, 22.5, 30.0))])


def levels(count: int) -> Tensor:
    """Return `count` thresholds at equal steps strictly between 0 and 1: 19 give 0.05, 0.10, ..., 0.95."""
    return torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)


class _BestF(Measure):
    """F of a probability map over thresholds: pixels counted over the data set per threshold, the best F of all."""

    beta2: ClassVar[float]

    def __init__(self, thresholds: int = 99) -> None:
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
    """Return the largest (1 + beta2) P R / (beta2 P + R) over thresholds; P = hits / predicted, R = hits / actual. 0
    where there is nothing to find or nothing was found."""
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

    def all(self) -> dict[str, float]:
        """Return `edge_f_plain` and the numbers at 0.5; 0 where there is nothing to find or nothing was found."""
        if not int(self.counts.sum()):
            return dict.fromkeys((self.kind, *self.AT_HALF), math.nan)
        at = int((self.levels - 0.5).abs().argmin())
        false, true = (int(count[at]) for count in _reaching(self.counts))
        actual = int(self.counts[1].sum())
        parts = (true + false, actual, (true + false + actual) / 2)
        return {**super().all(), **{name: true / max(n, 1) for name, n in zip(self.AT_HALF, parts, strict=True)}}


class OdsF(Measure):
    """Edges: the best F over thresholds, with hits, predictions and true edge pixels pooled over images per threshold.

    Per image: pixels whose probability is not the largest across their edge are dropped, once; at every threshold
    what is left is thinned to lines and matched one-to-one with the thinned truth, as many pairs as can be, none
    further apart than `max_dist` times the diagonal (0.0075 for PASCAL-Context, 0.011 for NYUD). Truth is thinned
    as predictions are, so that a perfect map scores 1 also where labels are wider than a pixel.
    The image is the smallest box around the pixels that have a label, so padding with 255 changes nothing.
    `thresholds`: their number, at equal steps between 0 and 1; the benchmark has 99. `protocol` "seism" fades
    predictions towards the border, as the public code of the benchmark does (see `faded`).
    """

    kind = "odsf"
    costly = True

    def __init__(self, max_dist: float = 0.0075, thresholds: int = 99, protocol: Protocol = "plain") -> None:
        if not max_dist > 0:
            raise ValueError(f"max_dist: expected a number above 0, found {max_dist}")
        self.max_dist, self.protocol = max_dist, protocol
        self.levels = levels(thresholds).numpy()
        self.hits, self.predicted = (torch.zeros(thresholds, dtype=torch.int64) for _ in range(2))
        self.actual, self.seen = 0, False

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take logits B x 1 x H x W and labels; those from 0.5 up are edges."""
        from scipy import ndimage

        y, valid = read_binary(target.cpu(), pred)
        for one, truth, known in zip(probability(pred).cpu().numpy(), (y >= 0.5).numpy(), valid.numpy(), strict=True):
            for box in ndimage.find_objects(known.astype(np.int8)):  # one, or none
                self._add(one[box], truth[box], known[box])

    def _add(self, soft: Floats, truth: Bools, known: Bools) -> None:
        """Count one image, all H x W."""
        line = thin((truth & known)[None])[0]
        crests = np.where(known, suppress(soft), 0.0)
        if self.protocol == "seism":
            crests = faded(crests)
        reached = np.searchsorted(self.levels, crests, side="right")
        # Thresholds between two values that occur give one set: the largest set first, and an empty one at the end.
        values = np.unique(np.append(reached, len(self.levels) + 1))
        values = values[values > 0]
        thinned = thin(reached >= values[:, None, None])
        which = np.searchsorted(values, np.arange(len(self.levels)), side="right")
        self.hits += torch.from_numpy(pairs(thinned, line, self.max_dist * math.hypot(*truth.shape))[which])
        self.predicted += torch.from_numpy(thinned.sum((1, 2))[which])
        self.actual += int(line.sum())
        self.seen = True

    def all(self) -> dict[str, float]:
        """Return `odsf`; 0 where there are no true edges."""
        return {"odsf": best_f(self.hits, self.predicted, self.actual, 1.0) if self.seen else math.nan}


@dataclass(frozen=True)
class DenseTask(Task):
    """A task with one prediction per pixel."""

    dense: ClassVar[bool] = True
    label: ClassVar[Label]
    """The kind of labels, which decides how they follow the image when it is scaled and flipped."""
    widths: ClassVar[tuple[int, ...]] = ()
    """Numbers of channels that make sense; any where empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.widths and self.channels not in self.widths:
            found = f"{' or '.join(map(str, self.widths))} for {self.kind}, found {self.channels}"
            raise RecipeError(f"task {self.name!r}, channels: expected {found}")

    def head(self, features: int) -> nn.Module:
        """Return a head from features at stride 4 to predictions at full size.

        Two transposed convolutions and one of 1 x 1 make B x channels x 4H x 4W of B x F x H x W, over F/2 and F/4
        channels and with no activation in between (FedHCA2's release; 96, 48, 24 for Swin-T).
        """
        half, quarter = max(features // 2, 1), max(features // 4, 1)
        larger = [nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ((features, half), (half, quarter))]
        return nn.Sequential(*larger, nn.Conv2d(quarter, self.channels, kernel_size=1))

    def like(self, target: Tensor) -> Tensor:
        """Return the shape of a prediction for labels."""
        return torch.empty(len(target), self.channels, *target.shape[-2:], device="meta")


def _total(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the valid values of a batch (B x k x H x W), and count them (B x H x W)."""
    values = torch.where(valid.unsqueeze(1), values, 0)
    return values.sum(0, dtype=torch.float64), valid.sum(0, keepdim=True).double()


@dataclass(frozen=True)
class BinaryTask(DenseTask):
    """Each pixel is or is not: labels 0 or 1; two channels (no, yes), or one logit."""

    label: ClassVar[Label] = "binary"
    widths: ClassVar[tuple[int, ...]] = (1, 2)

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Count how often each pixel is (1 x H x W), and how often it has a label."""
        y, valid = read_binary(target, self.like(target))
        return _total(y.unsqueeze(1), valid)

    def constant(self, mean: Tensor) -> Tensor:
        """Return the logarithms of both shares, or their difference."""
        no, yes = log_share(1 - mean), log_share(mean)
        return yes - no if self.channels == 1 else torch.cat([no, yes])


@dataclass(frozen=True)
class Semseg(DenseTask):
    """Semantic segmentation: one of `channels` classes per pixel, labels 0..channels-1.

    `absent` says what a class counts in mIoU that occurs in neither truth nor prediction (see `MeanIoU`).
    `class_weights` weigh the loss of the pixels of each class. `labelled` says of clients which classes they label: in
    their masks 0 means any other class, and the loss adds up the probabilities of these. Such a pixel has the label
    `channels` + j, of the j-th of `sets`, in their training, validation and own test data.
    """

    absent: Absent = "skip"
    class_weights: tuple[float, ...] | None = None
    labelled: Mapping[str, tuple[int, ...]] | None = None

    kind: ClassVar[str] = "semseg"
    label: ClassVar[Label] = "classes"
    usual: ClassVar[str] = "miou"
    chosen_from: ClassVar[tuple[str, ...]] = ("dice",)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, the mean IoU and the share of right pixels."""
        return dict.fromkeys((*self.judge, "miou", "pixel_accuracy"), "max")

    def __post_init__(self) -> None:
        super().__post_init__()
        for client, some in (self.labelled or {}).items():
            known = range(1, self.channels)
            if not some or len({*some}) != len(some) or not all(type(c) is int and c in known for c in some):
                found = f"{list(some)} found, expected different classes from 1 to {self.channels - 1}"
                raise RecipeError(f"task {self.name!r}, labelled, client {client!r}: {found}")
        if self.channels + len(self.sets) > IGNORE:
            found = f"{self.channels} classes and {len(self.sets)} different sets in labelled found"
            raise RecipeError(f"task {self.name!r}: {found}, expected at most {IGNORE} together")

    def _rest(self, some: Sequence[int]) -> tuple[int, ...]:
        return tuple(c for c in range(self.channels) if c not in some)

    @cached_property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of classes, each with 0, of which some client's labels say no more than that it is one of them."""
        return tuple(sorted({rest for some in (self.labelled or {}).values() if len(rest := self._rest(some)) > 1}))

    def codes(self, client: str) -> Tensor | None:
        """Return labels with those outside the client's classes replaced by their set's."""
        rest = self._rest((self.labelled or {}).get(client) or range(1, self.channels))
        if rest not in self.sets:
            return None
        codes = torch.arange(IGNORE + 1)
        codes[list(rest)] = self.channels + self.sets.index(rest)
        return codes

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, weights=self.class_weights, sets=self.sets)

    def metric(self) -> Measures:
        measure = Dice if "dice" in self.judge else MeanIoU
        return Measures(self.name, self.metrics, measure(self.channels, absent=self.absent, sets=self.sets))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Count how often each pixel is of each class (C x H x W), and how often it has a label."""
        y = read_classes(target, self.like(target))
        valid = (y != IGNORE).double()
        counts = torch.zeros(self.channels, *y.shape[1:], dtype=torch.float64)
        return counts.scatter_add_(0, torch.where(y >= self.channels, 0, y), valid), valid.sum(0, keepdim=True)

    def constant(self, mean: Tensor) -> Tensor:
        return log_share(mean)


@dataclass(frozen=True)
class HumanParts(Semseg):
    """Segmentation of people: 0 is background, the others are parts of the body. Images without people are 255."""

    channels: int = 7
    weight: float = 2.0

    kind: ClassVar[str] = "human_parts"


@dataclass(frozen=True)
class Saliency(BinaryTask):
    """Pixels that stand out: labels 0 or 1; two channels (background, salient), or one logit."""

    channels: int = 2
    weight: float = 5.0

    kind: ClassVar[str] = "saliency"
    metrics: ClassVar[Mapping[str, Direction]] = {"maxf": "max", "max_iou": "max"}
    usual: ClassVar[str] = "maxf"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return balanced_bce(output, target)

    def metric(self) -> Measures:
        return Measures(self.name, self.metrics, MaxF())


@dataclass(frozen=True)
class Normals(DenseTask):
    """Surface normals: labels B x 3 x H x W in -1..1. The prediction's length does not matter."""

    channels: int = 3
    weight: float = 10.0

    kind: ClassVar[str] = "normals"
    label: ClassVar[Label] = "normals"
    widths: ClassVar[tuple[int, ...]] = (3,)
    metrics: ClassVar[Mapping[str, Direction]] = {"merr": "min", **dict.fromkeys(NormalError.KINDS[1:], "max")}
    usual: ClassVar[str] = "merr"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return normals_l1(output, target)

    def metric(self) -> Measures:
        return Measures(self.name, self.metrics, NormalError())

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of each pixel's vectors (3 x H x W), and how many it has."""
        return _total(*read_normals(target, self.like(target)))


@dataclass(frozen=True)
class Depth(DenseTask):
    """Depth in metres: labels B x 1 x H x W or B x H x W.

    With `log` the head predicts log(1 + metres) and the loss compares that; metrics stay in metres. Pixels from
    `limit` metres on train but are not measured.
    """

    channels: int = 1
    log: bool = False
    limit: float = 80.0

    kind: ClassVar[str] = "depth"
    label: ClassVar[Label] = "depth"
    widths: ClassVar[tuple[int, ...]] = (1,)
    metrics: ClassVar[Mapping[str, Direction]] = {
        **dict.fromkeys(DepthError.KINDS[:3], "min"),
        **dict.fromkeys(DepthError.KINDS[3:], "max"),
    }
    usual: ClassVar[str] = "rmse"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return depth_l1(output, target, self.log)

    def metric(self) -> Measures:
        return Measures(self.name, self.metrics, DepthError(limit=self.limit, log=self.log))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of each pixel's metres (1 x H x W), and how often they are known."""
        metres, valid = read_depth(target, self.like(target))
        return _total(metres.unsqueeze(1), valid)

    def constant(self, mean: Tensor) -> Tensor:
        """Return the mean in metres, as the head says it."""
        return mean.log1p() if self.log else mean


@dataclass(frozen=True)
class Edge(BinaryTask):
    """Boundaries: labels 0 or 1 (shares of annotators train as they are, and count as edges from 0.5 up).

    `positive_weight` and `negative_weight` weigh the loss of edge and other pixels (see `edge_bce`).
    With `ods` the task is judged by odsF (see `OdsF`, which `max_dist`, `thresholds` and `protocol` go to: 0.0075 is
    usual for PASCAL-Context, 0.011 for NYUD) and the plain F comes second. Without, it is the plain F alone. A core
    takes about 0.02 s for the odsF of an image of 96 x 128 and 0.5 s for 448 x 576, so it is measured of a run's last
    models and as often as `evaluation.costly_every` says, and the plain F at every evaluation.
    """

    channels: int = 1
    weight: float = 50.0
    positive_weight: float = 0.95
    negative_weight: float | None = None
    ods: bool = False
    max_dist: float = 0.0075
    thresholds: int = 99
    protocol: Protocol = "plain"

    kind: ClassVar[str] = "edge"
    widths: ClassVar[tuple[int, ...]] = (1,)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """`odsf`, if asked for, and those of `PlainEdgeF`."""
        return dict.fromkeys((*(("odsf",) if self.ods else ()), "edge_f_plain", *PlainEdgeF.AT_HALF), "max")

    @property
    def usual(self) -> str:  # type: ignore[override]
        """`odsf` where it is measured, `edge_f_plain` elsewhere."""
        return next(iter(self.metrics))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return edge_bce(output, target, self.positive_weight, self.negative_weight)

    def metric(self) -> Measures:
        """Return the F of edges, once or twice."""
        plain = PlainEdgeF(self.thresholds)
        measures = (OdsF(self.max_dist, self.thresholds, self.protocol), plain) if self.ods else (plain,)
        return Measures(self.name, self.metrics, *measures)


KINDS: dict[str, type[DenseTask]] = {task.kind: task for task in (Semseg, HumanParts, Saliency, Normals, Depth, Edge)}
"""The tasks by the names of their kinds."""


def as_label(task: DenseTask, output: Tensor) -> Tensor:
    """Return a prediction (C x H x W) in the form of the label."""
    if task.label == "classes":
        return output.argmax(0)
    if task.label == "normals":
        return functional.normalize(output, dim=0)
    if isinstance(task, Depth):
        return output.expm1() if task.log else output
    return probability(output[None])[0].reshape(1, *output.shape[1:])
