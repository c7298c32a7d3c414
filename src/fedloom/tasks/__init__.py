"""Tasks: losses, heads and metrics. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.tasks.classification import BinaryClassification as BinaryClassification
    from fedloom.tasks.classification import Classification as Classification
    from fedloom.tasks.delta import delta_m as delta_m
    from fedloom.tasks.dense import DenseTask as DenseTask
    from fedloom.tasks.dense import Depth as Depth
    from fedloom.tasks.dense import Edge as Edge
    from fedloom.tasks.dense import HumanParts as HumanParts
    from fedloom.tasks.dense import Normals as Normals
    from fedloom.tasks.dense import Saliency as Saliency
    from fedloom.tasks.dense import Semseg as Semseg
    from fedloom.tasks.edges import OdsF as OdsF
    from fedloom.tasks.losses import balanced_bce as balanced_bce
    from fedloom.tasks.losses import cross_entropy as cross_entropy
    from fedloom.tasks.losses import depth_l1 as depth_l1
    from fedloom.tasks.losses import edge_bce as edge_bce
    from fedloom.tasks.losses import normals_l1 as normals_l1
    from fedloom.tasks.metrics import DepthError as DepthError
    from fedloom.tasks.metrics import MaxF as MaxF
    from fedloom.tasks.metrics import MeanIoU as MeanIoU
    from fedloom.tasks.metrics import Measure as Measure
    from fedloom.tasks.metrics import Measures as Measures
    from fedloom.tasks.metrics import NormalError as NormalError
    from fedloom.tasks.metrics import PixelAccuracy as PixelAccuracy
    from fedloom.tasks.metrics import PlainEdgeF as PlainEdgeF
    from fedloom.tasks.regression import Regression as Regression
    from fedloom.tasks.task import Direction as Direction
    from fedloom.tasks.task import Metric as Metric
    from fedloom.tasks.task import Task as Task

__getattr__, __dir__ = lazy(__name__)
