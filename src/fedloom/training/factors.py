"""Low-rank factors that are trained, and then added to the weights that they stand beside."""

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
        """The factors before training, in the order of the layers."""
        return {"factors": [x.detach().clone() for x in _factors(view)]}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        assert view.module is not None
        with torch.no_grad():
            for layer in adapted_layers(view.module):
                layer.base_layer.weight += layer.get_delta_weight("default")
            for x, before in zip(_factors(view), state["factors"], strict=True):
                x.copy_(before)
        return {}, {}


def _factors(view: View) -> list[nn.Parameter]:
    assert view.module is not None
    return [x for layer in adapted_layers(view.module) for x in factors(layer)]
