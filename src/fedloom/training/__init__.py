"""What happens on a client: the local loop, its settings and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy
from fedloom.training.config import Optimizer, Schedule, Training

if TYPE_CHECKING:
    from fedloom.training.clusters import BestCluster, SoftAnchors
    from fedloom.training.contrast import ModelContrast
    from fedloom.training.drift import ControlVariate, CountedSteps, Dual
    from fedloom.training.flat import FlatModel
    from fedloom.training.gap import ValidationLosses
    from fedloom.training.personal import Anchor, TaskCoupling
    from fedloom.training.rules import LocalRule, Proximal, View

__getattr__, __dir__ = lazy(
    __name__,
    {
        "clusters": "BestCluster SoftAnchors",
        "contrast": "ModelContrast",
        "drift": "ControlVariate CountedSteps Dual",
        "flat": "FlatModel",
        "gap": "ValidationLosses",
        "personal": "Anchor TaskCoupling",
        "rules": "LocalRule Proximal View",
    },
)
__all__ = [
    "Anchor", "BestCluster", "ControlVariate", "CountedSteps", "Dual", "FlatModel", "LocalRule", "ModelContrast",
    "Optimizer", "Proximal", "Schedule", "SoftAnchors", "TaskCoupling", "Training", "ValidationLosses", "View",
]  # fmt: skip
