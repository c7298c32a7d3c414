"""`fl.check` finds no fault with fedloom's stages, and finds each fault of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom import methods
from fedloom.core.context import Ctx, State
from fedloom.core.stage import Traits
from fedloom.core.updates import Updates
from fedloom.errors import UserError
from fedloom.methods.laws import OVERLAPPING
from fedloom.stages import Mean, PerTask, Split, Stage
from stages_support import BESIDE, STAGES

TEXTS_AND_TENSORS = ("domain", "cluster", "classes", "prototypes", "edges", "projections", "prototype_labels")
OF_CLIENTS = {name: dict(zip(OVERLAPPING, [*BESIDE[name], BESIDE[name][0]], strict=True)) for name in TEXTS_AND_TENSORS}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_every_stage_obeys_the_laws(stage: Stage) -> None:
    fl.check(stage, OF_CLIENTS)


@pytest.mark.parametrize("name", ["fedavg", "fedhca2", "ditto", "local"])
def test_methods_do_as_well(name: str) -> None:
    fl.check(getattr(methods, name)())


@dataclass(frozen=True)
class Own(Stage):
    """A stage that changes the rows by a function of (rows, state, context)."""

    rule: Callable[[Tensor, Ctx], Tensor]
    traits: Traits = field(default_factory=lambda: Traits("matrix", presence="row"))  # type: ignore[misc]

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=self.rule(updates.X, ctx)), state


def centred(X: Tensor, ctx: Ctx) -> Tensor:
    return X - X.mean(0) if len(X) else X


FAULTS: dict[str, tuple[Callable[[Tensor, Ctx], Tensor], list[str]]] = {
    "the first client counts twice": (
        lambda X, ctx: X * (2 - (torch.arange(len(X)) > 0).double())[:, None],
        ["names", "presence"],
    ),
    "the mean over all clients is taken off": (centred, ["presence"]),
    "a norm is divided by": (lambda X, ctx: X / X.norm(dim=1, keepdim=True), ["zero"]),
    "noise from nowhere": (lambda X, ctx: X + torch.randn_like(X), ["zero", "presence"]),
    "a logarithm of negative numbers": (lambda X, ctx: X.log(), ["finite", "repeat", "zero", "presence"]),
    "a largest row where there is none": (lambda X, ctx: X - 0 * X[X.norm(dim=1).argmax()], ["nobody"]),
}


@pytest.mark.parametrize("what", FAULTS)
def test_each_fault_is_found(what: str) -> None:
    rule, laws = FAULTS[what]
    with pytest.raises(UserError) as refused:
        fl.check(Own(rule))
    found = [line.partition(":")[0].split()[0] for line in str(refused.value).splitlines()[1:]]
    assert found == laws, refused.value


def test_per_task_makes_a_stage_obey() -> None:
    fl.check(Split({"encoder": Mean(), "head": PerTask(Own(centred))}))
