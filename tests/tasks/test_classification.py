"""Loss and metrics of classification, against scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import cross_entropy

from fedloom.errors import DataError
from fedloom.tasks import Classification


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 7), st.integers(1, 50))
def test_metrics_are_those_of_scikit_learn(seed, classes, n):
    rng = torch.Generator().manual_seed(seed)
    output = torch.randn(n, classes, generator=rng)
    target = torch.randint(0, classes, (n,), generator=rng)
    target[torch.rand(n, generator=rng) < 0.2] = -1
    metric = Classification("t", classes).metric()
    for part in torch.arange(n).split(7):
        metric.update(output[part], target[part])
    found = metric.compute()
    valid = target >= 0
    if not valid.any():
        assert all(math.isnan(value) for value in found.values())
        return
    truth, predicted = target[valid].numpy(), output.argmax(1)[valid].numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro", zero_division=0))


def test_tasks_count_alike_unless_a_recipe_says_otherwise():
    assert Classification("t", 3).weight == 1


def test_metric_names_have_directions():
    task = Classification("t", 3)
    assert task.metrics == {"accuracy": "max", "macro_f1": "max"}
    assert list(task.metric().compute()) == list(task.metrics)
    assert task.primary == "accuracy"


def test_a_label_beyond_the_classes_is_an_error():
    with pytest.raises(DataError, match="task 'digit': expected labels below 3, found 3"):
        Classification("digit", 3).metric().update(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_loss_is_the_mean_over_labelled_examples():
    task = Classification("t", 4)
    output = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, -1, 3, 2, -1, 1])
    valid = target >= 0
    torch.testing.assert_close(task.loss(output, target), cross_entropy(output[valid], target[valid]))


def test_loss_without_labels_is_zero_and_has_a_gradient():
    output = torch.randn(3, 4).requires_grad_()
    loss = Classification("t", 4).loss(output, torch.full((3,), -1))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(output.grad, torch.zeros(3, 4))


def test_head_is_linear():
    head = Classification("t", 4).head(7)
    assert head(torch.zeros(2, 7)).shape == (2, 4)
