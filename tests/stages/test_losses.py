"""FAMO's weights: against its equations on plain numbers, with absences."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.updates import Updates
from fedloom.stages import LossWeights

LOSSES = [{"a": 2.0, "b": 1.0, "c": 0.5}, {"a": 1.8, "b": 0.6, "c": 0.45}, {"a": 1.5, "c": 0.4}, {"a": 1.4, "b": 0.5}]
"""Of four rounds; b lacks the third, c the fourth."""


def weights(stage: LossWeights, rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    found, state = [], {}
    for round_, losses in enumerate(rounds, 1):
        X = torch.zeros(len(losses), 2)
        updates = Updates.of(X, rows=[*losses], n=[7.0] * len(losses), loss_received=[*losses.values()])
        out, state = stage(updates, state, Ctx(round_))
        found.append(dict(zip(losses, out.weight.tolist(), strict=True)))
    return found


def by_definition(step: float, decay: float) -> list[dict[str, float]]:
    """With torch's own Adam, one for each client."""
    xi = {k: torch.zeros(1, dtype=torch.float64, requires_grad=True) for k in "abc"}
    adam = {k: torch.optim.Adam([x], lr=step) for k, x in xi.items()}
    found, before = [], {}
    for losses in LOSSES:
        both = [k for k in losses if k in before]
        if both:
            z = torch.softmax(torch.cat([xi[k].detach() for k in both]), 0)
            delta = torch.tensor([math.log(before[k]) - math.log(losses[k]) for k in both], dtype=torch.float64)
            slopes = (torch.diag(z) - torch.outer(z, z)) @ delta  # the Jacobian of the softmax
            for k, slope in zip(both, slopes, strict=True):
                xi[k].grad = slope[None] + decay * xi[k].detach()
                adam[k].step()
        raw = {k: math.exp(xi[k].item()) / loss for k, loss in losses.items()}
        found.append({k: v / sum(raw.values()) for k, v in raw.items()})
        before = losses
    return found


def test_famo_is_its_definition() -> None:
    for mine, expected in zip(weights(LossWeights(0.3, 0.05), LOSSES), by_definition(0.3, 0.05), strict=True):
        assert mine == pytest.approx(expected, rel=1e-9)


def test_who_progresses_more_slowly_gains_weight() -> None:
    first, second = weights(LossWeights(0.3, 0.0), LOSSES[:2])
    assert first == pytest.approx({"a": 1 / 7, "b": 2 / 7, "c": 4 / 7})
    still = {k: first[k] * LOSSES[0][k] / LOSSES[1][k] for k in "abc"}  # with the same xi
    assert second["b"] < still["b"] / sum(still.values())  # its loss fell most


def test_losses_of_nothing_and_clients_without_a_past() -> None:
    assert weights(LossWeights(), [{"a": 0.0, "b": -1.0}])[0] == {"a": 0.5, "b": 0.5}
    alone = weights(LossWeights(), [{"a": 0.3}, {"a": 0.2}, {"b": 9.0}])
    assert alone == [{"a": 1.0}, {"a": 1.0}, {"b": 1.0}]
    lost = [{"a": 0.3, "b": math.nan}, {"a": 0.2, "b": 0.1}, {"a": math.inf, "b": math.inf}]
    found = weights(LossWeights(), lost)
    assert found[0] == {"a": 1.0, "b": 0.0}
    assert sum(found[1].values()) == pytest.approx(1)
    assert found[2] == {"a": 0.0, "b": 0.0}
