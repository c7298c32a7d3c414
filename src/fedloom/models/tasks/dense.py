"""Prediction heads of dense tasks.

Tasks with one prediction per pixel: their losses, metrics and default weights are those of the NYUD and PASCAL
benchmarks that FedHCA2 and FedDEA use.

Predictions are B x channels x H x W before any activation; labels have the same B, H and W, and 255 for no label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedloom.core.errors import RecipeError
from fedloom.models.tasks.classification import log_share
from fedloom.models.tasks.edges import OdsF, Protocol
from fedloom.models.tasks.pixels import (
    Absent,
    DepthError,
    MaxF,
    MeanIoU,
    Measures,
    NormalError,
    PlainEdgeF,
    balanced_bce,
    cross_entropy,
    depth_l1,
    edge_bce,
    normals_l1,
    probability,
    read_binary,
    read_classes,
    read_depth,
    read_normals,
)
from fedloom.models.tasks.task import IGNORE, Direction, Task


class UpHead(nn.Sequential):
    """Features at stride 4 to predictions at full size: two transposed convolutions and a 1x1 convolution.

    B x F x H x W becomes B x `channels` x 4H x 4W, over F/2 and F/4 channels and with no activation in between
    (FedHCA2's release; 96, 48, 24 for Swin-T).
    """

    def __init__(self, features: int, channels: int) -> None:
        half, quarter = max(features // 2, 1), max(features // 4, 1)
        super().__init__(
            nn.ConvTranspose2d(features, half, kernel_size=2, stride=2),
            nn.ConvTranspose2d(half, quarter, kernel_size=2, stride=2),
            nn.Conv2d(quarter, channels, kernel_size=1),
        )

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = super().forward(features)
        return output


Label = Literal["classes", "binary", "normals", "depth"]


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
            expected = " or ".join(map(str, self.widths))
            raise RecipeError(
                f"task {self.name!r}, channels: expected {expected} for {self.kind}, found {self.channels}"
            )

    def head(self, features: int) -> nn.Module:
        """Return a head from features at stride 4 to predictions at full size."""
        return UpHead(features, self.channels)


def _like(task: DenseTask, target: Tensor) -> Tensor:
    """Return the shape of a prediction for labels."""
    return torch.empty(len(target), task.channels, *target.shape[-2:], device="meta")


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
        y, valid = read_binary(target, _like(self, target))
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
    metrics: ClassVar[Mapping[str, Direction]] = {"miou": "max", "pixel_accuracy": "max"}
    usual: ClassVar[str] = "miou"

    def __post_init__(self) -> None:
        super().__post_init__()
        for client, some in (self.labelled or {}).items():
            known = range(1, self.channels)
            if not some or len({*some}) != len(some) or not all(type(c) is int and c in known for c in some):
                raise RecipeError(
                    f"task {self.name!r}, labelled, client {client!r}: {list(some)} found, expected different classes "
                    f"from 1 to {self.channels - 1}"
                )
        if self.channels + len(self.sets) > IGNORE:
            raise RecipeError(
                f"task {self.name!r}: {self.channels} classes and {len(self.sets)} different sets in labelled found, "
                f"expected at most {IGNORE} together"
            )

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
        """Return mIoU and pixel accuracy."""
        return Measures(self.name, self.metrics, MeanIoU(self.channels, absent=self.absent, sets=self.sets))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Count how often each pixel is of each class (C x H x W), and how often it has a label."""
        y = read_classes(target, _like(self, target))
        valid = (y != IGNORE).double()
        y = torch.where((y >= self.channels) & (y != IGNORE), 0, y)
        counts = torch.zeros(self.channels, *y.shape[1:], dtype=torch.float64)
        return counts.scatter_add_(0, torch.where(y == IGNORE, 0, y), valid), valid.sum(0, keepdim=True)

    def constant(self, mean: Tensor) -> Tensor:
        """Return the logarithms of the classes' shares."""
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
        """Return maxF and the best mean IoU."""
        return Measures(self.name, self.metrics, MaxF())


@dataclass(frozen=True)
class Normals(DenseTask):
    """Surface normals: labels B x 3 x H x W in -1..1. The prediction's length does not matter."""

    channels: int = 3
    weight: float = 10.0

    kind: ClassVar[str] = "normals"
    label: ClassVar[Label] = "normals"
    widths: ClassVar[tuple[int, ...]] = (3,)
    metrics: ClassVar[Mapping[str, Direction]] = {
        "merr": "min",
        "within_11_25": "max",
        "within_22_5": "max",
        "within_30": "max",
    }
    usual: ClassVar[str] = "merr"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return normals_l1(output, target)

    def metric(self) -> Measures:
        """Mean angle in degrees, and shares of small angles."""
        return Measures(self.name, self.metrics, NormalError())

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of each pixel's vectors (3 x H x W), and how many it has."""
        return _total(*read_normals(target, _like(self, target)))


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
        **dict.fromkeys(("rmse", "mae", "rel"), "min"),
        **dict.fromkeys(("delta1", "delta2", "delta3"), "max"),
    }
    usual: ClassVar[str] = "rmse"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return depth_l1(output, target, self.log)

    def metric(self) -> Measures:
        """Return RMSE, MAE, relative error and the delta thresholds."""
        return Measures(self.name, self.metrics, DepthError(limit=self.limit, log=self.log))

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of each pixel's metres (1 x H x W), and how often they are known."""
        metres, valid = read_depth(target, _like(self, target))
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
        plain: dict[str, Direction] = dict.fromkeys(("edge_f_plain", *PlainEdgeF.AT_HALF), "max")
        return {"odsf": "max", **plain} if self.ods else plain

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
        return normalize(output, dim=0)
    if isinstance(task, Depth):
        return output.expm1() if task.log else output
    return probability(output[None])[0].reshape(1, *output.shape[1:])
