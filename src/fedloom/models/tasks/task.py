"""A task: what is predicted, how it is trained and how it is measured. Knows nothing of federation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from inspect import isabstract
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model

from fedloom.core.errors import DataError, RecipeError, UserError, at, choices
from fedloom.core.settings.section import Section, found, hints_of
from fedloom.core.settings.yaml import section_of

if TYPE_CHECKING:
    from torch import Tensor, nn

Direction = Literal["max", "min"]
IGNORE = 255
"""No label, wherever a label is a map, as in the public PASCAL and NYUD code."""
USUAL = {"binary": ("auc",), "multilabel": ("auc",), "ordinal": ("mae",)}
"""Kind of a label -> the metric of its task by default, where it is not the one of the task's class."""


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
        """Metric name -> "max" if larger is better, "min" if smaller is; may be a class variable."""

    @property
    def primary(self) -> str:
        """The metric that stands for the task in tables and Delta_m."""
        return self.judge[0] if self.judge else self.usual

    def __post_init__(self) -> None:
        known = dict.fromkeys((*self.chosen_from, *self.metrics)) if self.judge else {}
        for name in self.judge:
            if name not in known:
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


def as_plain(task: Task, key: str = "kind") -> dict[str, Any]:
    """Return a task as plain values; `key` is the one that has the name of its class."""
    return {key: type(task.known).__name__, **asdict(task.known)}


def as_task(values: Mapping[str, Any], where: str = "", error: type[UserError] = DataError, key: str = "kind") -> Task:
    """Invert `as_plain`. Raises `error` that begins with `where`, or with the task's name, for what is no task."""
    where = where or f"task {found(values.get('name'))}"
    name, kinds = values.get(key), {kind.__name__: kind for kind in _kinds(Task)}
    if not isinstance(name, str) or name not in kinds:
        raise error(f"{where}: {key} {found(name)} found, expected one of {', '.join(sorted(kinds))}")
    section = section_of(_section(kinds[name]), {k: v for k, v in values.items() if k != key}, where, error)
    with at(where):
        return kinds[name](**{field: getattr(section, field) for field in type(section).model_fields})


@cache
def _section(kind: Any) -> type[Section]:
    """Return the fields of a class of tasks as a section."""
    hints, keys = hints_of(kind), fields(kind)
    typed: Any = {key.name: (hints[key.name], ... if key.default is MISSING else key.default) for key in keys}
    return create_model(kind.__name__, __base__=Section, **typed)


def _kinds(base: Any) -> list[Any]:
    """Return the classes of tasks that are stored as they are."""
    every = [kind for sub in base.__subclasses__() for kind in (sub, *_kinds(sub))]
    return [kind for kind in every if not isabstract(kind) and kind.known is Task.known]
