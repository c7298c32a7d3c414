"""Stages that users write: their draws repeat, and one that breaks its contract is named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import Ctx, Method, Result, methods
from fedloom.core.context import State
from fedloom.core.layout import Layout
from fedloom.core.stage import Traits
from fedloom.core.updates import Updates
from fedloom.errors import UserError
from fedloom.stages import Stage
from tests_support import Quick


@dataclass(frozen=True)
class Noise(Stage):
    """Adds draws of torch's default generator, at the start and in each round."""

    traits = Traits("mix", presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"start": torch.randn(layout.d)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        X = updates.X
        return updates.replace(X=X + 1e-3 * (torch.randn_like(X) + state["start"])), state


@dataclass(frozen=True)
class EdgeNoise(Stage):
    """The same for each row alone, without memory."""

    traits = Traits("row", presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=updates.X + 1e-3 * torch.randn_like(updates.X)), state


def models(result: Result) -> list[bytes]:
    """Return the files with all tensors of a run's state."""
    files = [*result.folder.glob("state.safetensors"), *result.folder.glob("peers/*/*.safetensors")]
    return [file.read_bytes() for file in sorted(files)]


@pytest.mark.parametrize("peers", [(), ("peers={graph: full}",)], ids=["server", "peers"])
def test_draws_without_a_generator_repeat(peers: tuple[str, ...], quick: Quick) -> None:
    plain = methods.fedavg()
    method = replace(plain, name="own", stage=Noise() >> plain.stage, edge=EdgeNoise())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = models(quick(*peers, method=method))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert models(quick(*peers, method=method)) == one
    assert models(quick(*peers, "seed=1", method=method)) != one


@dataclass(frozen=True)
class Slip(Stage):
    """A mean whose author made one mistake."""

    kind: str
    traits = Traits("matrix", reads={"X"}, reduces=True)

    def init(self, layout: Layout) -> State:
        return {"seen": {}, "m": torch.zeros(layout.d)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> Any:
        out = updates.reduced(updates.X.mean(0))
        if self.kind in ("mutates", "weighs"):
            (updates.X if self.kind == "mutates" else updates.weight).mul_(0.5)
            return out, state
        if self.kind == "moves":
            return updates.reduced(state["m"].add_(out.X[0])), state
        if self.kind == "counts":
            state["seen"][updates.rows[0][0]] = 1
            return out, state
        if self.kind == "late":
            return out if ctx.round > 1 else (out, state)
        if self.kind == "double":
            return out.replace(X=out.X.double()), state
        if self.kind == "gradient":
            return out.replace(X=out.X.requires_grad_()), state
        seen = {
            "number": {0: 1},
            "row": {updates.rows[0]: 1},
            "numpy": np.ones(2),
            "set": {1},
            "nested": [{"a": object()}],
        }
        return out, None if self.kind == "none" else {"seen": seen[self.kind]}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("late", "returned Updates, expected updates and state"),
        ("double", "returned X of torch.float64, expected torch.float32"),
        ("gradient", "returned X that requires a gradient"),
        ("none", "the state is a NoneType, expected a dictionary"),
        ("number", r"state.seen has the key 0 \(int\), expected a text"),
        ("row", r"state.seen has the key \(.*\) \(tuple\)"),
        ("numpy", "state.seen is a ndarray; a state holds tensors"),
        ("set", "state.seen is a set"),
        ("mutates", "changed X of its input in place: return new tensors"),
        ("weighs", "changed weight of its input in place"),
        ("moves", "changed its state in place: return a new one"),
        ("counts", "changed its state in place"),
        ("nested", r"state.seen\[0\].a is a object"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named(kind: str, why: str, quick: Quick) -> None:
    with pytest.raises(UserError, match=rf"Slip\(kind='{kind}'\).*{why}"):
        quick(method=Method(name="own", stage=Slip(kind), weights="uniform"))
    stage = methods.fedavg().stage
    with pytest.raises(UserError, match=rf"^Slip\(kind='{kind}'\).*{why}"):  # the member, not the chain
        (stage >> Slip(kind)).on([[1.0]], round=2)
