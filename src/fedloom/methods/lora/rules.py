"""Low-rank factors: added to the weights beside them after training, or trained up to a rank of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedloom.core.context import State
from fedloom.models.lora import adapted_layers, factors
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class MergeFactors(LocalRule):
    """After training W <- W + (alpha / rank) B A in each layer with factors, which are again what they were before.

    B begins as 0, so merging leaves the outputs as they are, and each round adds a product of the factors' rank.
    """

    def begin(self, view: View, state: State) -> State:
        """Return the factors before training, in the order of the layers."""
        return {"factors": [x.detach().clone() for x in _factors(view)]}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the client's state after the round, and what it provides (name -> value of this client)."""
        assert view.module is not None
        with torch.no_grad():
            for layer in adapted_layers(view.module):
                layer.base_layer.weight += layer.get_delta_weight("default")
            for x, before in zip(_factors(view), state["factors"], strict=True):
                x.copy_(before)
        return {}, {}


@dataclass(frozen=True)
class OwnRank(LocalRule):
    """Trains the first components of all factors only: as many rows of A and columns of B as the server says.

    The others keep their values, whatever the optimiser does beside the gradient. Without a word all are trained.
    """

    needs = frozenset({"broadcast:rank"})

    def begin(self, view: View, state: State) -> State:
        """Return the values of the other components."""
        return {"kept": [x[where].detach().clone() for x, where in self._others(view)]}

    def grad(self, view: View, state: State) -> None:
        for x, where in self._others(view):
            assert x.grad is not None
            x.grad[where] = 0.0

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the client's state after the round, and what it provides (name -> value of this client)."""
        with torch.no_grad():
            for (x, where), values in zip(self._others(view), state["kept"], strict=True):
                x[where] = values
        return {}, {}

    @staticmethod
    def _others(view: View) -> list[tuple[nn.Parameter, tuple[slice, ...]]]:
        """Return each factor with where its other components are."""
        if "rank" not in view.broadcast:
            return []
        rest = slice(int(view.broadcast["rank"]), None)
        places = (rest,), (slice(None), rest)
        return [(x, places[i % 2]) for i, x in enumerate(_factors(view))]


def _factors(view: View) -> list[nn.Parameter]:
    assert view.module is not None
    return [x for layer in adapted_layers(view.module) for x in factors(layer)]
