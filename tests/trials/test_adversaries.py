"""Hostile clients against the rule that docs/robust.md recommends, on the bed of ten clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.recipes.loader import load
from trials.scale import cases

ATTACKS = ["sign-flip, factor: 10", "huge", "fake", "scaled", "sign-flip", "gaussian", "ipm, factor: 2", "alie", "mimic",
           "label-flip", "replay", "drop-out"]  # fmt: skip
"""Those that the page says are defended; the first few are tried by default."""
HOSTILE = "clients: [c00, c01, c02]"
DEFENDED = ("method={name: fedavg, add: {multi-krum: {}}, weights: declared}",)


def accuracy(folder: Path, *changes: str) -> dict[str, float]:
    """Task -> mean test accuracy (points) of its honest clients."""
    recipe = load("robust/digits", changes)
    values: dict[str, list[float]] = {}
    for row in fedloom.run(recipe, folder).rows:
        if row["metric"] == "accuracy" and row["round"] == recipe.training.rounds:
            values.setdefault(row["task"], []).append(100 * row["value"])
    return {task: sum(each) / len(each) for task, each in values.items()}
