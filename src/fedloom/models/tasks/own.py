"""A task with a loss and metrics of one's own: functions, or objects of torchmetrics."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError, RecipeError, at, choices, in_one_line, line_of
from fedloom.core.settings.section import as_plain
from fedloom.models.tasks.dense import Depth, Edge, Normals, Semseg
from fedloom.models.tasks.labels import Classification, Kept, Multilabel, Ordinal, Regression, labelled
from fedloom.models.tasks.task import IGNORE, USUAL, Direction, Metric, Task

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) of the examples that have a label -> their mean loss, or one loss an example."""


@dataclass(frozen=True)
class Measured:
    """One metric of one's own and its direction."""

    name: str
    score: Any
    direction: Direction

    @staticmethod
    def of(task: str, name: str, value: Any) -> Measured:
        """Build it from a function, an object of torchmetrics, or (either, "max" or "min"). Without a direction a
        torchmetrics object has its own (`higher_is_better`), and for others more is better."""
        direction: Any
        score, direction = value if isinstance(value, tuple | list) and len(value) == 2 else (value, None)
        if direction is None:
            direction = "min" if getattr(score, "higher_is_better", None) is False else "max"
        if not isinstance(name, str) or name == "loss" or not in_one_line(name):
            wanted = "expected a text that is not 'loss', in one line"
            raise RecipeError(f"task {task!r}, metrics: the name {name!r} found, {wanted}")
        if not callable(score) or isinstance(score, type) or direction not in ("max", "min"):
            forms = "a function of (outputs, labels), an object of torchmetrics, or a pair of one of them and"
            raise RecipeError(f"task {task!r}, metrics: {name!r} is {value!r}, expected {forms} 'max' or 'min'")
        return Measured(name, score, direction)


class OwnMetric(Kept):
    """The task's usual metrics and those of one's own, over all examples that it is shown."""

    def __init__(self, task: Own) -> None:
        super().__init__(task.base.metric(), (), {})
        self.task = task
        self.objects = {m.name: copy.deepcopy(m.score) for m in task.measured if hasattr(m.score, "compute")}
        for each in self.objects.values():
            each.reset()

    def update(self, output: Tensor, target: Tensor) -> None:
        """Take one batch: torchmetrics objects are updated; for functions outputs and labels are kept."""
        seen = len(self.targets)
        super().update(output, target)
        for output, target in zip(self.outputs[seen:], self.targets[seen:], strict=True):
            for name, each in self.objects.items():
                with self.task.blamed(f"metric {name!r}", output, target):
                    each.update(output, target)

    def compute(self) -> dict[str, float]:
        """Return the user's metrics, then the usual ones; nan where there was no label."""
        values = dict.fromkeys((m.name for m in self.task.measured), float("nan"))
        if (kept := self.kept) is not None:
            output, target = kept
            for m in self.task.measured:
                with self.task.blamed(f"metric {m.name!r}", output, target):
                    value = self.objects[m.name].compute() if m.name in self.objects else m.score(output, target)
                    values[m.name] = float(value)
        return {**super().compute(), **values}


def _pairs_all(call: Any, tail: tuple[int, ...]) -> bool:
    """Return whether the order of labels (B) does not count beside outputs (B x 1), although it does with B x 1 labels.

    `outputs - labels` is such a function: it is B x B.
    """
    outputs, labels = torch.tensor([0.1, 0.5, 0.8]).view(3, 1, *tail), torch.tensor([0.2, 0.9, 0.4])
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            one, other = (
                [float(torch.as_tensor(call(outputs, y.view(shape))).mean()) for y in (labels, labels.flip(0))]
                for shape in ((3, *tail), (3, 1, *tail))
            )
    except Exception:  # a function may fail in any way; a run names it
        return False
    return math.isclose(*one, rel_tol=1e-5) and not math.isclose(*other, rel_tol=1e-5)


@dataclass(frozen=True)
class Own(Task):
    """`base`, but for its loss and some more metrics, of which the first stands for the task."""

    base: Task = field(kw_only=True)
    own_loss: Loss | None = field(default=None, kw_only=True)
    measured: tuple[Measured, ...] = field(default=(), kw_only=True)

    @staticmethod
    def of(base: Task, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Task:
        """Return a task with another loss, or more metrics; itself without both. Raises RecipeError for wrong kinds."""
        if loss is None and not metrics:
            return base
        if loss is not None and (not callable(loss) or isinstance(loss, type)):
            forms = "a function of (outputs, labels) or a module such as torch.nn.CrossEntropyLoss()"
            raise RecipeError(f"task {base.name!r}, loss: {loss!r} found, expected {forms}")
        if not isinstance(metrics or {}, Mapping):
            raise RecipeError(f"task {base.name!r}, metrics: {metrics!r} found, expected a mapping of names to metrics")
        measured = tuple(Measured.of(base.name, name, value) for name, value in (metrics or {}).items())
        functions = {f"metric {each.name!r}": each.score for each in measured if not hasattr(each.score, "compute")}
        for what, call in {"loss": loss, **functions}.items():
            if isinstance(base, Regression | Depth) and _pairs_all(call, (1, 1) if base.dense else ()):
                found = "a function that compares every output (B x 1) with every label (B) found"
                pair = "such as lambda outputs, labels: FUNCTION(outputs.squeeze(1), labels)"
                raise RecipeError(f"task {base.name!r}, {what}: {found}, expected one that pairs them, {pair}")
        return Own(base.name, base.channels, base.weight, base=base, own_loss=loss, measured=measured)

    def __post_init__(self) -> None:
        base = replace(self.base, name=self.name, weight=self.weight)
        for name, value in (("base", base), ("kind", base.kind), ("dense", base.dense)):
            object.__setattr__(self, name, value)

    @property
    def metrics(self) -> Mapping[str, Direction]:
        """Return the user's metrics first, then the usual ones."""
        return {**{m.name: m.direction for m in self.measured}, **self.base.metrics}

    @property
    def primary(self) -> str:
        """Return the user's first metric, if there is one, else the usual one."""
        return self.measured[0].name if self.measured else self.base.primary

    @property
    def known(self) -> Task:
        return self.base

    def on(self, base: Task) -> Task:
        return replace(self, name=base.name, weight=base.weight, base=base)

    def head(self, features: int) -> nn.Module:
        return self.base.head(features)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the user's loss of the examples that have a label, averaged over them."""
        if self.own_loss is None:
            return self.base.loss(output, target)
        output, target = labelled(output, target)
        if not len(target):
            return output.sum() * 0
        with self.blamed("loss", output, target):
            loss = self.own_loss(output, target)
        where = f"task {self.name!r}, loss"
        if not isinstance(loss, Tensor) or loss.ndim > 1 or (loss.ndim == 1 and len(loss) != len(target)):
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            expected = f"a tensor with one number, or with one for each of {len(target)} examples"
            raise DataError(f"{where}: {what} found, expected {expected}")
        # Where nothing is trained, a view of a parameter (a constant prediction) still says that it wants a gradient.
        trained = torch.is_grad_enabled() and output.requires_grad
        if not loss.is_floating_point() or trained > loss.requires_grad:
            expected = "one that is computed from the outputs"
            raise DataError(f"{where}: a tensor of {loss.dtype} without a gradient found, expected {expected}")
        return loss.mean()

    def metric(self) -> Metric:
        return OwnMetric(self) if self.measured else self.base.metric()

    def sums(self, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.sums(target)

    def codes(self, client: str) -> Tensor | None:
        """Return the result of the base task. Raises RecipeError where the user's functions would see its codes."""
        codes = self.base.codes(client)
        if codes is not None and (self.own_loss is not None or self.measured):
            why = "which do not know labels that mean one of several classes; leave one of them out"
            raise RecipeError(f"task {self.name!r}: labelled= found beside a loss or metrics of one's own, {why}")
        return codes

    def constant(self, mean: Tensor) -> Tensor:
        return self.base.constant(mean)

    @contextmanager
    def blamed(self, what: str, output: Tensor, target: Tensor) -> Iterator[None]:
        """Name the user's function, and its arguments, in an error that it raises."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            called = f"outputs of shape {tuple(output.shape)} and labels of shape {tuple(target.shape)}, {target.dtype}"
            line = "" if (line := line_of(error)) is None else f"; {line}"
            found = f"{type(error).__name__}: {error} (called with {called}{line})"
            raise DataError(f"task {self.name!r}, {what}: {found}") from error


KINDS: dict[str, type[Task]] = {each.kind: each for each in (Classification, Ordinal, Multilabel, Regression)}
KINDS |= {"binary": Classification, "segmentation": Semseg, "depth": Depth, "normals": Normals, "edges": Edge}
"""Kind of `task` -> the class of the task."""
COUNTED = ("binary", "classification", "ordinal", "multilabel", "segmentation")
"""Kinds that have classes, or labels."""


@dataclass(frozen=True)
class Description:
    """A task without a name, as `task` makes it."""

    kind: str | None
    """None where it was left out: a table's column says it, and elsewhere whether there are classes."""
    classes: int | None
    loss: Any
    metrics: Mapping[str, Any] | None
    weight: float
    judge: tuple[str, ...]
    class_weights: tuple[float, ...] | None
    ignore: float | None
    columns: tuple[str, ...] | None = None
    labelled: Mapping[str, tuple[int, ...]] | None = None
    names: tuple[str, ...] = ()
    """The names of the classes, where they were given."""

    @property
    def guess(self) -> str:
        """The kind, or without one classification where there are classes, else regression."""
        return self.kind or ("regression" if self.classes is None else "classification")

    def named(self, name: str) -> Task:
        """Return the task of this name."""
        kind = "binary" if (self.guess, self.classes) == ("classification", 2) else self.guess
        judge = self.judge or USUAL.get(kind, ())
        make: Any = KINDS[kind]
        return self.on(make(name, judge=judge, **({"channels": self.classes} if kind in COUNTED else {})))

    def on(self, base: Task) -> Task:
        """Return a task with this weight, loss, metrics and weights of classes. Raises RecipeError where unfit."""
        if self.class_weights is not None and len(self.class_weights) != base.channels:
            found = f"{len(self.class_weights)} class_weights found, expected {base.channels}"
            raise RecipeError(f"task {base.name!r}: {found}")
        own = {"weight": self.weight, "class_weights": self.class_weights, "labelled": self.labelled}
        more: dict[str, Any] = {key: value for key, value in own.items() if value is not None}
        return Own.of(replace(base, **more), self.loss, self.metrics)


def judged(where: str, metric: Any) -> tuple[str, ...]:
    """Return the names of chosen metrics, from one name, some or None. Raises RecipeError for anything else."""
    names = () if metric is None else (metric,) if isinstance(metric, str) else metric
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        expected = "the name of a metric, such as 'auc', or a list of names"
        raise RecipeError(f"{where}: metric={metric!r} found, expected {expected}")
    return tuple(dict.fromkeys(names))


def task(
    kind: str | None = None,
    *,
    classes: int | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    class_weights: Sequence[float] | None = None,
    ignore: float | None = None,
    labelled: Mapping[str, Sequence[int]] | None = None,
    loss: Loss | None = None,
    metric: str | Sequence[str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    weight: float = 1.0,
) -> Description:
    """Describe a task for `fl.Federation(tasks={name: task(...)})`.

    kind           what is predicted, from which outputs of the model and which labels (B examples, C classes):
                   classification  B x C logits; B whole numbers from 0, -1 or NaN where there is none
                   binary          the same, of two classes
                   ordinal         the same, of classes with an order, such as grades
                   multilabel      B x C logits; B x C numbers 0 or 1, -1 or NaN where there is none
                   regression      B x 1, in the labels' own unit; B real numbers, NaN where there is none
                   segmentation    B x C x H x W logits; B x H x W whole numbers from 0, 255 where there is none
                   depth           B x 1 x H x W; B x H x W metres, 0 or less where there is none
                   normals         B x 3 x H x W vectors of any length; the same, zero vectors where there is none
                   edges           B x 1 x H x W logits; B x H x W numbers 0 or 1, 255 where there is none
                   By default what a table's column holds; elsewhere classification with `classes`, else regression
    classes        the number of classes, or of the labels of a multilabel task; for a table also the classes, in order
    columns        the columns of a table that are the labels of a multilabel task, in the place of `classes`
    class_weights  weights of the classes in the loss, or of the positive examples of each label
    ignore         a further value of labels that means "no label"
    labelled       of segmentation: {client: the classes that its masks tell apart}, for sites that label only some.
                   Class 0 then means "none of these"; clients that are not named label all classes
    loss           a function of (outputs, labels), or a module such as nn.CrossEntropyLoss(), that gives the mean loss
                   of a batch or one loss per example; it never sees examples without a label
    metric         the name of the task's main metric in tables, or several names, of which the first is the main
                   one: auc, pr-auc, balanced-accuracy, brier, calibration, accuracy of classes and labels, mae and
                   kappa of ordered classes, rmse, mae, r2 of numbers, and what the kind measures anyway. By default auc
                   of two classes and of labels, accuracy, mae of ordered classes, rmse, miou, merr, edge_f_plain
    metrics        name -> a function of (outputs, labels) of all examples at once, or an object of torchmetrics, which
                   is updated over the data set; (either, "min") if less is better. The first one is then the main
                   metric; the usual ones are measured too
    weight         of the task's loss

    Raises RecipeError for what does not fit, such as a number of classes below 2 or an unknown metric.
    """
    said = kind
    classes, class_weights, weight, ignore = map(as_plain, (classes, class_weights, weight, ignore))
    listed = tuple(map(str, classes)) if isinstance(classes, list | tuple) else ()
    count: Any = len(listed) if len({*listed}) == len(listed) > 1 else classes
    count = 2 if (kind, count) == ("binary", None) else count
    kind = ("regression" if count is None else "classification") if kind is None else kind
    if kind not in KINDS:
        raise RecipeError(f"task: kind={kind!r} found.{choices('Kinds', str(kind), KINDS)}")
    counts = kind in COUNTED
    if columns is not None:
        named = isinstance(columns, list | tuple) and columns and all(isinstance(name, str) for name in columns)
        if kind != "multilabel" or not named or count not in (None, len(columns)):
            raise RecipeError(f"task: columns={columns!r} found, expected the columns of a multilabel task")
        count = len(columns)
    least = 1 if kind == "multilabel" else 2
    if counts and (isinstance(count, bool) or not isinstance(count, int) or count < least):
        raise RecipeError(f"task: classes={count!r} found, expected a whole number of at least {least} for {kind}")
    if kind == "binary" and count != 2:
        raise RecipeError(f"task: classes={count!r} found, expected 2 for binary")
    if kind == "segmentation" and count is not None and count > IGNORE:
        raise RecipeError(f"task: classes={count!r} found, expected at most {IGNORE} for segmentation")
    if not counts and count is not None:
        raise RecipeError(f"task: classes={count!r} found, but {kind} has no classes; leave it out")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise RecipeError(f"task: weight={weight!r} found, expected a number of at least 0")
    if class_weights is not None:
        numbers = tuple(map(float, class_weights)) if isinstance(class_weights, Sequence) else ()
        if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
            none = f"none, because {kind} has no classes"
            expected = f"{count} numbers of at least 0, one per class" if counts else none
            raise RecipeError(f"task: class_weights={class_weights!r} found, expected {expected}")
        class_weights = numbers
    if ignore is not None and (isinstance(ignore, bool) or not isinstance(ignore, int | float) or kind == "normals"):
        raise RecipeError(f"task: ignore={ignore!r} found, expected a number (for normals: None)")
    sites = None
    if labelled is not None:
        if kind != "segmentation" or not isinstance(labelled, Mapping):
            raise RecipeError(f"task: labelled={labelled!r} found, expected {{client: classes}} of a segmentation")
        sites = {str(client): tuple(some) for client, some in labelled.items()}
    names = None if columns is None else tuple(columns)
    choice = judged("task", metric)
    description = Description(said, count, loss, metrics, weight, choice, class_weights, ignore, names, sites, listed)
    with at("" if (said, count) != (None, None) else "without kind or classes it is a regression"):
        description.named("task")  # raises an error for anything but a function
    return description
