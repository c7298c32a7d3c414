"""The one extension point of local training: LocalRule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.core.context import Fields, State
from fedloom.core.layout import Columns
from fedloom.training.config import Optimizer
from fedloom.training.features import FeatureRecorder


@dataclass
class View:
    """What a rule sees at a local step. Vectors run over the model's parameters (p); when clients are trained stacked
    they are K x p, so write rules for the last dimension.

    params    parameters now (writing to it changes the model)
    grad      gradient of the loss at `params`; rules edit it in place
    base      parameters as received, at the start of the round
    shared    columns that are aggregated, as slices of the last dimension
    trained   columns that receive a gradient
    lr        learning rate of this step
    step      local steps taken before this one
    optimizer settings of the local optimiser

    Absent if clients are stacked:
    outputs, targets   of the batch, by task
    broadcast what the server sent beside the model: vectors (p, zero outside the shared columns), scalars, or
              unchanged tensors of more dimensions
    module    the model
    buffers   float buffers of the model now
    received  parameters and buffers at the start of the round, as one vector
    features  for rules that ask for them: the batch's encoder features (B x F), now and under other models
    validate  task -> mean loss of the current model on the client's validation data
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
    lr: float = 0.0
    step: int = 0
    optimizer: Optimizer = Optimizer()
    outputs: Mapping[str, Tensor] | None = None
    targets: Mapping[str, Tensor] | None = None
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    module: nn.Module | None = None
    buffers: Tensor | None = None
    received: Tensor | None = None
    features: FeatureRecorder | None = None
    validate: Callable[[], Mapping[str, float]] | None = None
    losses: Callable[[], Tensor] | None = None
    labels: Callable[[], Iterable[Mapping[str, Tensor]]] | None = None
    chosen: Tensor | None = None


class LocalRule:
    """Something a method adds to local training. Rules add up; none may assume that it is alone.

    `provides` names what `finish` returns for the server: "extra:NAME" a number, a text or a tensor, "auxiliary:NAME" a
    vector (p). `needs` names what some stage must broadcast. `features` and `validation` ask for those parts of the
    view. `repeat` is the number of optimiser steps on each batch. `stackable` says that the rule has only `grad` and no
    state, so that it also works on stacked clients.
    """

    features: bool = False
    validation: bool = False
    stackable: bool = False
    keeps_model: ClassVar[bool] = False
    """Whether its state holds a `personal` model."""

    def __init_subclass__(cls) -> None:
        cls.keeps_model = cls.personal is not LocalRule.personal

    @property
    def provides(self) -> Fields:
        return frozenset()

    @property
    def needs(self) -> Fields:
        return frozenset()

    @property
    def repeat(self) -> int:
        return 1

    def init(self, base: Tensor) -> State:
        """The client's state before its first round."""
        return {}

    def begin(self, view: View, state: State) -> State:
        """Before the first step of a round; may change `view.params`. Returns the state to work with."""
        return state

    def penalty(self, view: View, state: State) -> Tensor | None:
        """A scalar to add to the loss, or None."""
        return None

    def grad(self, view: View, state: State) -> None:
        """Edit `view.grad` in place, after the backward pass and before clipping; may change `state` in place."""

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """The client's state after the round, and what it provides (name -> value of this client).

        Afterwards `view.params` holds the client's model.
        """
        return state, {}

    def personal(self, state: State) -> Tensor | None:
        """Parameters (p) of the client's own model, if the rule keeps one in its state (`keeps_model`)."""
        return None


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds (mu/2) |y - base|^2 over the shared parameters to the loss (FedProx, Li et al., MLSys 2020, eq. 2).

    Its gradient mu (y - base) is added directly, so an adaptive optimiser preconditions it like any other loss.
    """

    mu: float
    stackable = True

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"mu: expected a number of at least 0, found {self.mu}")

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0:  # adding zeros would still turn -0.0 into 0.0
            return
        for s in view.shared:
            view.grad[..., s].add_(view.params[..., s] - view.base[..., s], alpha=self.mu)
