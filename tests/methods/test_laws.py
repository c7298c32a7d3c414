"""`fl.check` finds no fault with fedloom's stages, and finds each fault of others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
from fedloom.methods.registry import METHODS
from fedloom.stages import GroupBy, Identity, Mean, PerBlock, PerTask, Split, Stage
from stages_support import BESIDE, STAGES

TEXTS_AND_TENSORS = ("domain", "cluster", "classes", "prototypes", "edges", "projections", "prototype_labels")
OF_CLIENTS = {name: dict(zip(OVERLAPPING, [*BESIDE[name], BESIDE[name][0]], strict=True)) for name in TEXTS_AND_TENSORS}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_every_stage_obeys_the_laws(stage: Stage) -> None:
    fl.check(stage, OF_CLIENTS)


@pytest.mark.parametrize("name", ["fedavg", "fedhca2", "ditto", "local"])
def test_methods_do_as_well(name: str) -> None:
    fl.check(getattr(methods, name)())


NEED_MORE = {
    "f2dc": "classes, domain",
    "fedproto": "prototype_labels, prototypes",
    "fedsa": "prototype_labels, prototypes",
    "fedtgp": "prototype_labels, prototypes",
    "fpl": "prototype_labels, prototypes",
    "sheaf-fmtl": "edges, projections",
}
"""Methods that read extras that are no numbers, with these extras."""
BY_TASK = ("matu", "separate")


@pytest.mark.parametrize("name", METHODS.entries)
def test_every_registered_method_passes_or_is_refused_in_words(name: str) -> None:
    method = METHODS[name].make()
    if name in NEED_MORE:
        expected = re.escape(f"fl.check guessed these extras as numbers: {NEED_MORE[name]}. Where")
        with pytest.raises(UserError, match=rf"{expected} .* give a value for each of c0, .*: beside="):
            fl.check(method)
        fl.check(method, OF_CLIENTS)
    elif name in BY_TASK:
        with pytest.raises(UserError, match="takes a row per client and task.* does not support it"):
            fl.check(method)
    else:
        fl.check(method)


@pytest.mark.parametrize(
    "thing", [3, "fedavg", None, Mean, methods.fedavg, fl.task()], ids=lambda it: type(it).__name__
)
def test_neither_a_stage_nor_a_method(thing: Any) -> None:
    with pytest.raises(UserError, match="expected a stage or a method, such as .*, found "):
        fl.check(thing)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (["a"] * 5, "beside: expected a mapping .*, found list"),
        ({"domain": ["a"] * 5}, "beside: 'domain': expected a mapping .*, found list"),
        ({"domain": {"c0": "a", "c2": "b"}}, "beside: 'domain': no value of c1, c3, c4 found"),
        ({"domain": {**dict.fromkeys(OVERLAPPING, "a"), "x": "b"}}, "beside: 'domain': unknown client 'x'"),
    ],
)
def test_what_is_no_value_of_each_client(beside: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fl.check(GroupBy("domain", Mean()), beside)


def test_a_stage_inside_another_says_that_it_needs_clients() -> None:
    fl.check(Trimmed())
    fl.check(PerBlock(Trimmed()))
    fl.check(Identity() >> Trimmed())
    fl.check(fl.Method(name="my-trimmed", stage=Trimmed(), weights="uniform"))


@dataclass(frozen=True)
class Trimmed(Stage):
    """The stage of docs/write-a-method.md."""

    trim: int = 1
    traits = Traits("matrix", reads={"X"}, reduces=True)

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        if rows is not None and min(len(rows), most) <= 2 * self.trim:
            yield f"{self!r} needs at least {2 * self.trim + 1} clients in a round"

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) <= 2 * self.trim:
            raise ValueError(f"{len(updates)} updates came, {2 * self.trim + 1} are needed to trim {self.trim}")
        kept = updates.X.sort(dim=0).values[self.trim : len(updates) - self.trim]
        return updates.reduced(kept.mean(dim=0)), state


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
        lambda X, ctx: X * (2 - (torch.arange(len(X)) > 0).to(X))[:, None],
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


def test_a_stage_that_returns_another_precision_in_a_run_is_found() -> None:
    """Weights are of double precision, and a run's updates of single precision."""

    class Weighted(Own):
        def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
            return updates.replace(X=updates.weight[:, None] * updates.X), state

    with pytest.raises(UserError, match="Weighted.* returned X of torch.float64, expected torch.float32: convert it"):
        fl.check(Weighted(centred))


def test_per_task_makes_a_stage_obey() -> None:
    fl.check(Split({"encoder": Mean(), "head": PerTask(Own(centred))}))
