"""A local rule that compares a model's features with the features of other models (MOON)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedloom.core.context import State
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class ModelContrast(LocalRule):
    """Adds mu * mean of -log(e^(s_g/T) / (e^(s_g/T) + e^(s_p/T))) to the loss (MOON, eq. 3).

    s_g and s_p are cosine similarities of the batch's encoder features with the features of the received model and of
    the client's own model of its last round. Both models run in eval mode without gradient, with their own buffers. A
    client's first round has no own model and so no term. State: the last model, parameters and buffers.
    """

    mu: float = 1.0
    temperature: float = 0.5
    features = True

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.mu == 0 or "previous" not in state:
            return None
        assert view.features is not None
        assert view.received is not None
        z = view.features.now
        to_global = cosine_similarity(z, view.features.under(view.received))
        to_previous = cosine_similarity(z, view.features.under(state["previous"]))
        return self.mu * softplus((to_previous - to_global) / self.temperature).mean()

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """The model as trained."""
        assert view.buffers is not None
        return {"previous": torch.cat([view.params, view.buffers])}, {}
