"""Tasks: losses, heads and metrics. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.models.tasks.dense import DenseTask as DenseTask
    from fedloom.models.tasks.dense import Depth as Depth
    from fedloom.models.tasks.dense import DepthError as DepthError
    from fedloom.models.tasks.dense import Edge as Edge
    from fedloom.models.tasks.dense import HumanParts as HumanParts
    from fedloom.models.tasks.dense import MaxF as MaxF
    from fedloom.models.tasks.dense import MeanIoU as MeanIoU
    from fedloom.models.tasks.dense import Measure as Measure
    from fedloom.models.tasks.dense import Measures as Measures
    from fedloom.models.tasks.dense import NormalError as NormalError
    from fedloom.models.tasks.dense import Normals as Normals
    from fedloom.models.tasks.dense import OdsF as OdsF
    from fedloom.models.tasks.dense import PixelAccuracy as PixelAccuracy
    from fedloom.models.tasks.dense import PlainEdgeF as PlainEdgeF
    from fedloom.models.tasks.dense import Saliency as Saliency
    from fedloom.models.tasks.dense import Semseg as Semseg
    from fedloom.models.tasks.dense import balanced_bce as balanced_bce
    from fedloom.models.tasks.dense import cross_entropy as cross_entropy
    from fedloom.models.tasks.dense import depth_l1 as depth_l1
    from fedloom.models.tasks.dense import edge_bce as edge_bce
    from fedloom.models.tasks.dense import normals_l1 as normals_l1
    from fedloom.models.tasks.labels import Classification as Classification
    from fedloom.models.tasks.labels import Multilabel as Multilabel
    from fedloom.models.tasks.labels import Ordinal as Ordinal
    from fedloom.models.tasks.labels import Regression as Regression
    from fedloom.models.tasks.task import Direction as Direction
    from fedloom.models.tasks.task import Metric as Metric
    from fedloom.models.tasks.task import Task as Task
    from fedloom.study.statistics import delta_m as delta_m

__getattr__, __dir__ = lazy(__name__)
