"""The extension point of local training: `LocalRule`, and the view that rules have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.core.context import Broadcast, Fields, State
from fedloom.core.errors import UserError
from fedloom.core.layout import Columns, Selector
from fedloom.core.settings.section import Checked, NonNegative
from fedloom.core.updates import Updates
from fedloom.models.changes import ConstantHead
from fedloom.models.tasks.task import Task
from fedloom.training.attack import Attack as Attack  # where attacks of users look for it
from fedloom.training.config import Optimizer
from fedloom.training.flat import FeatureRecorder

ABSENT: Any = None
"""The value of a part that a view lacks, which a rule that does not ask for it, or is `stackable`, never reads."""


@dataclass
class View:
    """The view of a rule at a local step. Vectors run over the model's parameters (p); when clients are trained stacked
    they are K x p, so write rules for the last dimension.

    params    parameters now (writing to it changes the model)
    grad      gradient of the loss at `params`; rules edit it in place
    base      parameters as received, at the start of the round
    shared    columns that are aggregated, as slices of the last dimension
    trained   columns that receive a gradient
    lr        learning rate of this step; K x 1 where clients of a stack have different ones
    scale     factor of the learning rate in this round, which a rule's `begin` may change
    step      local steps taken before this one
    optimizer settings of the local optimiser

    Absent if clients are stacked:
    outputs, targets   of the batch, by task
    tasks     the names of the client's tasks
    broadcast what the server sent beside the model: vectors (p, zero outside the shared columns), scalars, or
              unchanged tensors of more dimensions
    module    the model
    buffers   float buffers of the model now
    received  parameters and buffers at the start of the round, as one vector
    features  for rules that ask for them: the batch's encoder features (B x F), now and under other models
    under     a model as one vector (parameters, buffers) -> its predictions of the batch by task, without gradient
    validate  the mean loss of the current model on the client's validation data, summed over its tasks by their weights
    losses    the loss of each of the client's training examples (n) under the current model
    labels    the labels of the client's training examples, as they are measured and batch by batch
    chosen    positions, in the order of `losses`, of the examples to train on in this round, which a rule's `begin` may
              set; None: all
    """

    params: Tensor
    grad: Tensor
    base: Tensor
    shared: tuple[Columns, ...]
    trained: tuple[Columns, ...] = ()
    lr: float | Tensor = 0.0
    scale: float = 1.0
    step: int = 0
    optimizer: Optimizer = Optimizer()
    tasks: tuple[str, ...] = ()
    outputs: Mapping[str, Tensor] = ABSENT
    targets: Mapping[str, Tensor] = ABSENT
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    module: nn.Module = ABSENT
    buffers: Tensor = ABSENT
    received: Tensor = ABSENT
    features: FeatureRecorder = ABSENT
    under: Callable[[Tensor], Mapping[str, Tensor]] = ABSENT
    validate: Callable[[], float] = ABSENT
    losses: Callable[[], Tensor] = ABSENT
    labels: Callable[[], Iterable[Mapping[str, Tensor]]] = ABSENT
    chosen: Tensor | None = None


class LocalRule(Checked):
    """The part of a method that changes local training. Rules add up, so none may assume that it is the only one.

    `provides` names what `finish` returns for the server: "extra:NAME" a number, a text or a tensor, "auxiliary:NAME" a
    vector (p). `needs` names what some stage must broadcast. `features` and `validation` ask for those parts of the
    view. `repeat` is the number of optimiser steps on each batch; 0 needs no batches. `stackable` says that the rule
    has only `grad` and no state, so that it also works on stacked clients.
    """

    features: bool = False
    validation: bool = False
    stackable: bool = False
    keeps_model: ClassVar[bool] = False
    """True if its state holds a `personal` model."""

    def __init_subclass__(cls) -> None:
        cls.keeps_model = cls.personal is not LocalRule.personal

    @property
    def provides(self) -> Fields:
        """Return the names of the values that `finish` returns for the server."""
        return frozenset()

    @property
    def needs(self) -> Fields:
        """Return the names of the values that some stage must broadcast."""
        return frozenset()

    @property
    def repeat(self) -> int:
        """Return the number of optimiser steps on each batch."""
        return 1

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError, before anything is trained, for settings of the optimiser that cannot work with it."""

    def init(self, base: Tensor) -> State:
        """Return the client's state before its first round."""
        return {}

    def begin(self, view: View, state: State) -> State:
        """Return the state for a round, before its first step; may change `view.params`."""
        return state

    def penalty(self, view: View, state: State) -> Tensor | None:
        """Return a scalar to add to the loss, or None.

        It must come from `view.outputs`, `view.features` or `view.module`: the vectors of the view, `view.params` among
        them, are outside autograd. Add the gradient of a penalty on these in `grad`, as `Proximal` does.
        """
        return None

    def grad(self, view: View, state: State) -> None:
        """Edit `view.grad` in place (`view.grad.add_(...)`, never `view.grad = ...`), after the backward pass and
        before clipping; may change `state` in place."""

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the client's state after the round, and what it provides (name -> value of this client).

        Every name must stand in `provides`, as "extra:NAME" or "auxiliary:NAME". The state goes into the checkpoint:
        tensors, numbers, texts, None, lists, and dictionaries whose keys are texts. Afterwards `view.params` holds the
        client's model.
        """
        return state, {}

    def moved(self, update: Updates, broadcast: Broadcast) -> Updates:
        """Return rows of one client (possibly noise) with zeros in the coordinates that this rule does not train."""
        return update

    def personal(self, state: State) -> Tensor | None:
        """Return parameters (p) of the client's own model, if the rule keeps one in its state (`keeps_model`)."""
        return None


def check_places(view: View, params: Tensor, grad: Tensor, rules: Sequence[LocalRule]) -> None:
    """Refuse rules that put another tensor in the place of the model's parameters or gradient: it would do nothing."""
    if view.params is not params or view.grad is not grad:
        name = "grad" if view.params is params else "params"
        raise UserError(
            f"local rule {', '.join(map(repr, rules))} assigned view.{name}, which has no effect: write into the "
            f"tensor (view.{name}.copy_(...), view.{name}.add_(...))"
        )


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds (mu/2) |y - base|^2 over the shared parameters to the loss (FedProx, Li et al., MLSys 2020, eq. 2).

    Its gradient mu (y - base) is added directly, so an adaptive optimiser preconditions it like any other loss.
    """

    mu: NonNegative
    stackable = True

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0:  # adding zeros would still turn -0.0 into 0.0
            return
        for s in view.shared:
            view.grad[..., s].add_(view.params[..., s] - view.base[..., s], alpha=self.mu)


@dataclass(frozen=True)
class Phase(Checked):
    """Train the selected parameters only, for a share of a round's batches. The others are frozen: no step, no decay,
    no momentum, and their norm layers keep their statistics."""

    select: Selector
    share: float = 1.0


@dataclass(frozen=True)
class Tune(Checked):
    """Before a personal model is measured or saved, train the selected parameters on the client's data; the result is
    not kept for the next round."""

    epochs: int
    select: Selector = "*"


def ends(phases: tuple[Phase, ...], batches: int) -> list[int]:
    """Return the number of batches after which each phase ends; every phase has at least one if there are enough."""
    total = sum(p.share for p in phases)
    marks = [round(batches * share / total) for share in accumulate(p.share for p in phases)]
    for i in range(len(marks)):
        marks[i] = max(marks[i], min(i + 1, batches))
    for i in reversed(range(len(marks) - 1)):
        marks[i] = min(marks[i], max(marks[i + 1] - 1, min(i + 1, batches)))
    return marks


@dataclass(frozen=True)
class LabelMeans(LocalRule):
    """Sets the predictions of `ConstantAnswers` to the means of the client's labels, in its first round."""

    @property
    def repeat(self) -> int:
        return 0  # means need no step

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        view.params.copy_(view.base)
        heads = {name: head for name, head in view.module.heads.items() if isinstance(head, ConstantHead)}  # type: ignore[union-attr, operator]
        if not state.get("known"):
            answers = label_means({name: head.task for name, head in heads.items()}, view.labels())
            with torch.no_grad():
                for name, answer in answers.items():
                    heads[name].answer.copy_(answer)
        return {"known": True}, {}


def label_means(tasks: Mapping[str, Task], batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return task -> the prediction (channels x ...) that the mean of all its labels is (`Task.constant`).

    Tasks without a label are left out. A pixel without a label gets the mean over all pixels.
    """
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    for labels in batches:
        for name, target in labels.items():
            if name in tasks:
                new = tasks[name].sums(target.cpu())
                old = totals.get(name)
                totals[name] = new if old is None else (old[0] + new[0], old[1] + new[1])
    answers = {}
    for name, (total, count) in totals.items():
        if count.sum() > 0:
            everywhere = total.flatten(1).sum(1) / count.sum() if total.ndim > 1 else total / count
            everywhere = everywhere.view(-1, *(1,) * (total.ndim - 1))
            answers[name] = tasks[name].constant(torch.where(count > 0, total / count, everywhere)).float()
    return answers


def added(losses: Iterable[Tensor]) -> Tensor | None:
    """Return the sum of losses, None where there are none."""
    each = [*losses]
    return sum(each[1:], each[0]) if each else None


def within(updates: Updates) -> Updates:
    """Return the rows with zeros in blocks that they lack."""
    if updates.present is None or bool(updates.present.all()):
        return updates
    X = updates.X.clone()
    for columns, have in zip(updates.layout.slices, updates.present.t(), strict=True):
        X[~have, columns] = 0.0
    return updates.replace(X=X)
