"""The learning rate by validation progress, against torch's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.engines.api import Result, trained_models
from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from fedloom.training import Plateau, View
from tests_support import load_recipe

SHORT = ("training.steps=1", "training.optimizer={name: sgd, lr: 0.1}", "partition.val_fraction=0.2")


@pytest.mark.parametrize("settings", [{}, {"patience": 1, "factor": 0.1}, {"patience": 2, "min_delta": 0.1}])
def test_the_learning_rate_falls_as_torchs_scheduler_says(settings: dict[str, Any]) -> None:
    rule, zero = Plateau(**settings), torch.zeros(1)
    optimizer = torch.optim.SGD([zero.clone().requires_grad_()], lr=1.0)
    # torch's patience is the number of bad rounds that it forgives, ours the number after which it acts
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=rule.factor, patience=rule.patience - 1, threshold=rule.min_delta, eps=0
    )
    state, ours, expected = rule.init(zero), [], []
    for loss in (3.0, 2, 2, 1.9, 2.1, 1.95, 1.99, 1.9, 1.2, 1.3, 1.25, 1.19, 1.3, 1.4, 1.5):
        view = View(zero, zero, zero, (), validate=lambda loss=loss: {"a": loss - 1, "b": 1.0})
        state, _ = rule.finish(view, rule.begin(view, state))
        theirs.step(loss)
        ours.append(view.scale)
        expected.append(optimizer.param_groups[0]["lr"])
    assert ours == pytest.approx(expected)
    assert ours[-1] < 1


def test_a_clients_steps_get_shorter(quick: Callable[..., Result]) -> None:
    """Only a loss a hundred times lower counts as better, so the second round moves a thousandth as far, or as far."""

    def model(rounds: int, *more: str) -> torch.Tensor:
        tensors = trained_models(quick(*SHORT, f"training.rounds={rounds}", *more).folder)[""]
        return torch.cat([tensor.flatten().double() for tensor in tensors.values()])

    once, plain = model(1), model(2)
    same, short = (
        model(2, f"method.add={{plateau: {{patience: 1, min_delta: 0.99, factor: {factor}}}}}") for factor in (1, 0.001)
    )
    assert torch.equal(same, plain)
    assert float((short - once).norm()) == pytest.approx(0.001 * float((plain - once).norm()), rel=0.1)


def test_it_needs_validation_data() -> None:
    with pytest.raises(RecipeError, match=r"Plateau.* measures models on validation data, but client .* has none"):
        build(load_recipe("partition.val_fraction=0", "method.add={plateau: }"))
