"""One real number per example: squared error, RMSE and R2."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.models.tasks import scores
from fedloom.models.tasks.task import Direction, Metric, Task


class SquaredError(Metric):
    """RMSE in the target's units, and R2, from sums that grow batch by batch."""

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std
        self.count, self.error, self.sum, self.squares = 0, 0.0, 0.0, 0.0

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take standardised predictions (B x 1) and targets (B, NaN = none)."""
        valid = ~target.isnan()
        y = (target[valid].double() - self.mean) / self.std
        self.count += len(y)
        self.error += float((output[valid, 0].double() - y).square().sum())
        self.sum += float(y.sum())
        self.squares += float(y.square().sum())

    def compute(self) -> dict[str, float]:
        """Return `rmse`, and `r2` = 1 - sum of squared errors / sum of squared deviations of the targets from their
        mean.

        R2 is the share of explained variance; nan where all targets are equal.
        """
        if not self.count:
            return {"rmse": math.nan, "r2": math.nan}
        spread = self.squares - self.sum**2 / self.count
        r2 = 1 - self.error / spread if spread > 1e-12 * self.squares else math.nan
        return {"rmse": self.std * math.sqrt(self.error / self.count), "r2": r2}


@dataclass(frozen=True)
class Regression(Task):
    """A task with one real number per example; NaN means that it has none.

    The model predicts (target - mean) / std, so that the losses of different tasks are of one size; labels and metrics
    are in the target's own units.
    """

    channels: int = 1
    mean: float = 0.0
    std: Annotated[float, Field(gt=0)] = 1.0

    kind: ClassVar[str] = "regression"
    masks: ClassVar[bool] = True
    usual: ClassVar[str] = "rmse"
    chosen_from: ClassVar[Collection[str]] = tuple(scores.NUMBERS)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """The chosen ones, RMSE and R2."""
        return {**scores.directions(self.judge, scores.NUMBERS), "rmse": "min", "r2": "max"}

    def head(self, features: int) -> nn.Module:
        """Return a linear layer from the features to the standardised target."""
        return nn.Linear(features, 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of standardised predictions (B x 1) and targets (B), over the examples that have one."""
        valid = ~target.isnan()
        error = torch.where(valid, output[:, 0] - (target - self.mean) / self.std, 0)
        return error.square().sum() / valid.sum().clamp(min=1)

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the targets in their own units, and how many there are (1 each)."""
        there = target[~target.isnan()].double()
        return there.sum(0, keepdim=True), torch.tensor([float(len(there))], dtype=torch.float64)

    def constant(self, mean: Tensor) -> Tensor:
        """Return the standardised mean."""
        return (mean - self.mean) / self.std

    def metric(self) -> Metric:
        """Return new sums, which also keep outputs where metrics were chosen."""
        usual = SquaredError(self.mean, self.std)
        return scores.Kept(usual, self.judge, scores.NUMBERS, self._in_units) if self.judge else usual

    def _in_units(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions (N) and labels (N) in the labels' own unit."""
        return output[:, 0].double() * self.std + self.mean, target.double()
