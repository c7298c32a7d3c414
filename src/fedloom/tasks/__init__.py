"""Tasks: losses, heads and metrics. Importing this package does not import torch."""

from fedloom._lazy import lazy
from fedloom.tasks.delta import delta_m
from fedloom.tasks.task import Direction, Metric, Task

_LAZY = {
    "classification": "Classification",
    "dense": "DenseTask Depth Edge HumanParts Normals Saliency Semseg",
    "edges": "OdsF",
    "losses": "balanced_bce cross_entropy depth_l1 edge_bce normals_l1",
    "metrics": "DepthError MaxF MeanIoU Measure Measures NormalError PixelAccuracy PlainEdgeF",
    "regression": "Regression",
}

__all__ = [
    "Classification",
    "DenseTask",
    "Depth",
    "DepthError",
    "Direction",
    "Edge",
    "HumanParts",
    "MaxF",
    "MeanIoU",
    "Measure",
    "Measures",
    "Metric",
    "NormalError",
    "Normals",
    "OdsF",
    "PixelAccuracy",
    "PlainEdgeF",
    "Regression",
    "Saliency",
    "Semseg",
    "Task",
    "balanced_bce",
    "cross_entropy",
    "delta_m",
    "depth_l1",
    "edge_bce",
    "normals_l1",
]

__getattr__, __dir__ = lazy("fedloom.tasks", _LAZY)
