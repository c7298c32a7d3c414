"""Regression against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.models.tasks.labels import labelled
from fedloom.tasks import Regression

NAN = math.nan


def test_loss_is_the_squared_error_in_standard_units_over_labelled_examples():
    task = Regression("t", mean=10, std=2)
    output = torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)
    loss = task.loss(output, torch.tensor([12.0, 12.0, NAN]))
    assert loss.item() == pytest.approx(0.5)  # (0 - 1)^2 and (1 - 1)^2
    loss.backward()
    assert output.grad.tolist() == [[-1.0], [0.0], [0.0]]


def test_loss_without_a_label_is_zero_with_a_gradient():
    output = torch.zeros(2, 1, requires_grad=True)
    loss = Regression("t").loss(output, torch.tensor([NAN, NAN]))
    loss.backward()
    assert loss.item() == 0
    assert output.grad.tolist() == [[0.0], [0.0]]


def test_metrics_are_in_the_targets_units_and_do_not_depend_on_batches():
    task = Regression("t", mean=10, std=2)
    # Predictions 10, 12, 14 for 8, 12, 16: errors 2, 0, -2; deviations of the targets -4, 0, 4.
    output, target = torch.tensor([[0.0], [1.0], [2.0], [9.0]]), torch.tensor([8.0, 12.0, 16.0, NAN])
    for size in (1, 2, 4):
        metric = task.metric()
        for o, t in zip(output.split(size), target.split(size), strict=True):
            metric.update(o, t)
        assert metric.compute() == pytest.approx({"rmse": math.sqrt(8 / 3), "r2": 1 - 8 / 32})


def test_metrics_without_labels_or_spread_are_nan():
    metric = Regression("t").metric()
    metric.update(torch.zeros(1, 1), torch.tensor([NAN]))
    assert all(map(math.isnan, metric.compute().values()))
    metric.update(torch.zeros(2, 1), torch.tensor([3.0, 3.0]))
    assert metric.compute()["rmse"] == 3
    assert math.isnan(metric.compute()["r2"])


def test_head_predicts_one_number():
    assert Regression("t").head(5)(torch.zeros(3, 5)).shape == (3, 1)
    assert (Regression("t").primary, Regression("t").metrics) == ("rmse", {"rmse": "min", "r2": "max"})


@pytest.mark.parametrize(
    ("target", "have"),
    [
        (torch.tensor([0.5, math.nan, -2.0]), [0, 2]),
        (torch.tensor([1, -1, 0]), [0, 2]),
        (torch.tensor([[1.0], [math.nan], [2.0]]), [0, 1, 2]),
    ],
)
def test_examples_without_a_label_are_left_out_of_a_users_own_metrics(target: torch.Tensor, have: list[int]) -> None:
    output = torch.arange(6.0).view(3, 2)
    found, kept = labelled(output, target)
    assert torch.equal(found, output[have])
    assert torch.equal(kept, target[have]) or target.ndim > 1
