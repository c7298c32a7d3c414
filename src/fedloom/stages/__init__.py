"""Aggregation, one idea a file: stages that a round's matrix of updates passes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.stages.combine import GroupBy, PerTask, Scope, Split, Switch
    from fedloom.stages.magnitude import TopMagnitude
    from fedloom.stages.mean import Mean, SupportMean
    from fedloom.stages.stage import Chain, Identity, Stage

__getattr__, __dir__ = lazy(
    __name__,
    {
        "combine": "GroupBy PerTask Scope Split Switch",
        "magnitude": "TopMagnitude",
        "mean": "Mean SupportMean",
        "stage": "Chain Identity Stage",
    },
)
__all__ = [
    "Chain", "GroupBy", "Identity", "Mean", "PerTask", "Scope", "Split", "Stage", "SupportMean", "Switch",
    "TopMagnitude",
]  # fmt: skip
