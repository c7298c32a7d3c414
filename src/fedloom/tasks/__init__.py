"""Tasks: losses, heads and metrics. Importing this package does not import torch."""

from fedloom._lazy import lazy
from fedloom.tasks.task import Direction, Metric, Task

__all__ = ["Classification", "Direction", "Metric", "Task"]

__getattr__, __dir__ = lazy("fedloom.tasks", {"classification": "Classification"})
