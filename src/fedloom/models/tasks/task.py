"""A task: what is predicted, how it is trained and how it is measured. Knows nothing of federation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from fedloom.core.errors import RecipeError, choices

if TYPE_CHECKING:
    from torch import Tensor, nn

Direction = Literal["max", "min"]
IGNORE = 255
"""No label, wherever a label is a map, as in the public PASCAL and NYUD code."""


class Metric(ABC):
    """Accumulates over a data set; never a mean of per-batch scores."""

    @abstractmethod
    def update(self, output: Tensor, target: Tensor) -> None:
        """Take one batch: the head's output and the labels."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return metric name -> value over everything seen; nan where nothing valid was seen."""

    def cheap(self) -> Metric:
        """Return the metric without the numbers that take long, before its first update; itself if none does."""
        return self

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """All outputs and labels that were seen, where the metric keeps them and has seen any."""
        return None

    @property
    def confusion(self) -> Tensor | None:
        """Counts of everything seen, truth x prediction (C x C, int64), where the task has classes."""
        return None


@dataclass(frozen=True)
class Task(ABC):
    """One task. `channels` is the width of the head's output, `weight` the default loss weight.

    `judge` names the metrics chosen for the task; the first stands for it. Recipes and `fl.task` call it `metric`.
    """

    name: str
    channels: int
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0

    judge: tuple[str, ...] = field(default=(), kw_only=True)

    kind: ClassVar[str]
    usual: ClassVar[str]
    """The metric that stands for the task where none was chosen."""
    chosen_from: ClassVar[Collection[str]] = ()
    """Names of metrics that can be chosen beside `metrics`."""
    dense: ClassVar[bool] = False
    """True if predictions are one per pixel (B x channels x H x W) and not one per example."""
    masks: ClassVar[bool] = False
    """True if labels are one number per example, and examples without one change nothing of `loss`, wherever they are:
    then clients with batches of different sizes can be trained as one stack. The loss works under torch.func.vmap."""

    @property
    @abstractmethod
    def metrics(self) -> Mapping[str, Direction]:
        """Metric name -> whether larger ("max") or smaller ("min") is better; may be a class variable."""

    @property
    def primary(self) -> str:
        """The metric that stands for the task in tables and Delta_m."""
        return self.judge[0] if self.judge else self.usual

    def __post_init__(self) -> None:
        known = dict.fromkeys((*self.chosen_from, *self.metrics)) if self.judge else {}
        for name in self.judge:
            if name not in self.chosen_from and name not in self.metrics:
                raise RecipeError(f"task {self.name!r}: unknown metric {name!r}.{choices('Metrics', name, known)}")

    @property
    def known(self) -> Task:
        """The task as a file can store it: without functions that a user wrote."""
        return self

    def on(self, base: Task) -> Task:
        """Return `base` with this task's user-defined loss and metrics."""
        return base

    @abstractmethod
    def head(self, features: int) -> nn.Module:
        """Return a new prediction head on encoder features of width `features`."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss of a batch (a scalar); zero, with a gradient path, where no label is valid."""

    @abstractmethod
    def metric(self) -> Metric:
        """Return a new accumulator of this task's metrics."""

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a batch of labels, some of which may be missing, for a prediction that ignores its input (`constant`).

        (sum of the labels as numbers, as many as there are classes where they are classes: k x ...; how many there
        were: 1 x ...); one a pixel where labels are maps. A task that has no such answer need not have this.
        """
        raise NotImplementedError(f"task {self.name!r}: {type(self).__name__} does not define the mean of its labels")

    def codes(self, client: str) -> Tensor | None:
        """Return what each label (0 to 255) of a client becomes (256); None where it stays as it is."""
        return None

    def constant(self, mean: Tensor) -> Tensor:
        """Return the output (channels x ...) that predicts the mean (k x ...) of the labels, as `sums` adds them up."""
        return mean
