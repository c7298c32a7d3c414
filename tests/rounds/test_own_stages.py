"""Stages that users write: their draws repeat, and one that breaks its contract is named."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedloom import Ctx, Result, methods
from fedloom.core.context import State
from fedloom.core.layout import Layout
from fedloom.core.stage import Traits
from fedloom.core.updates import Updates
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
