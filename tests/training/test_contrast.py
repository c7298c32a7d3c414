"""MOON's loss against equation 3 as it is written."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.training import ModelContrast, View


def view(now: Tensor, received: Tensor, previous: Tensor) -> View:
    """A view in which the vectors (0,) and (1,) stand for the received and the last model."""
    recorder: Any = SimpleNamespace(now=now, under=lambda vector: [received, previous][int(vector)])
    return View(torch.zeros(1), torch.zeros(1), torch.zeros(1), (), received=torch.zeros(1), features=recorder)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def test_it_is_equation_3() -> None:
    now, received, previous = [[1.0, 0], [3, 4]], [[2.0, 0], [0, 1]], [[0.0, 5], [-1, 1]]
    rule = ModelContrast(mu=3.0, temperature=0.25)
    found = rule.penalty(view(*map(torch.tensor, (now, received, previous))), {"previous": torch.ones(1)})
    terms = []
    for z, z_global, z_previous in zip(now, received, previous, strict=True):
        to_global, to_previous = (math.exp(cosine(z, other) / 0.25) for other in (z_global, z_previous))
        terms.append(-math.log(to_global / (to_global + to_previous)))
    assert float(found) == pytest.approx(3 * sum(terms) / 2, rel=1e-5)
    # As like the one as the other: log 2, whatever the temperature.
    same = ModelContrast().penalty(view(*[torch.tensor(now)] * 3), {"previous": torch.ones(1)})
    assert float(same) == pytest.approx(math.log(2))


def test_it_pulls_to_the_received_model_and_away_from_the_last() -> None:
    z = torch.tensor([[1.0, 1.0]], requires_grad=True)
    ModelContrast().penalty(
        view(z, torch.tensor([[1.0, 0]]), torch.tensor([[0, 1.0]])), {"previous": torch.ones(1)}
    ).backward()
    assert z.grad[0, 0] < 0 < z.grad[0, 1]


@pytest.mark.parametrize(("mu", "state"), [(0.0, {"previous": torch.ones(1)}), (1.0, {})])
def test_there_is_no_term_without_weight_or_last_model(mu: float, state: dict[str, Tensor]) -> None:
    assert ModelContrast(mu=mu).penalty(view(*[torch.ones(1, 2)] * 3), state) is None
