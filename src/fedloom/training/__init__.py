"""What happens on a client: the local loop, its settings and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy
from fedloom.training.config import Optimizer, Schedule, Training

if TYPE_CHECKING:
    from fedloom.training.flat import FlatModel
    from fedloom.training.rules import LocalRule, Proximal, View

__getattr__, __dir__ = lazy(__name__, {"flat": "FlatModel", "rules": "LocalRule Proximal View"})
__all__ = ["FlatModel", "LocalRule", "Optimizer", "Proximal", "Schedule", "Training", "View"]
