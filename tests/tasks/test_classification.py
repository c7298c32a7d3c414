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
from fedloom.tasks import Classification, Multilabel, Ordinal

NAN = math.nan
GRADES = torch.tensor([2, 0, -1, 1, 3, 0])
LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WEIGHTS = (0.5, 2.0, 0.25, 4.0)


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


def test_metric_names_have_directions():
    task = Classification("t", 3)
    assert task.metrics == {"accuracy": "max", "macro_f1": "max"}
    assert list(task.metric().compute()) == list(task.metrics)
    assert task.primary == "accuracy"


def test_a_label_beyond_the_classes_is_an_error():
    with pytest.raises(DataError, match="task 'digit': expected labels below 3, found 3"):
        Classification("digit", 3).metric().update(torch.zeros(2, 3), torch.tensor([0, 3]))


def test_loss_without_labels_is_zero_and_has_a_gradient():
    output = torch.randn(3, 4).requires_grad_()
    loss = Classification("t", 4).loss(output, torch.full((3,), -1))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(output.grad, torch.zeros(3, 4))


def test_head_is_linear():
    head = Classification("t", 4).head(7)
    assert head(torch.zeros(2, 7)).shape == (2, 4)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_loss_of_weighted_classes_is_torchs(weights):
    given = None if weights is None else torch.tensor(weights).double()
    expected = cross_entropy(LOGITS, GRADES, given, ignore_index=-1)
    torch.testing.assert_close(Classification("t", 4, class_weights=weights).loss(LOGITS, GRADES), expected)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_loss_of_grades_compares_the_probability_above_each_border(weights):
    task = Ordinal("t", 4, class_weights=weights)
    p, total, count = LOGITS.softmax(1), 0.0, 0.0
    for i, grade in enumerate(GRADES.tolist()):
        if grade >= 0:
            of_class = 1.0 if weights is None else weights[grade]
            above = [float(p[i, border + 1 :].sum()) for border in range(3)]
            total -= of_class * sum(math.log(a if grade > border else 1 - a) for border, a in enumerate(above))
            count += of_class
    assert float(task.loss(LOGITS, GRADES)) == pytest.approx(total / count, rel=1e-12)


@pytest.mark.parametrize("task", [Classification("t", 4), Ordinal("t", 4)], ids=repr)
@pytest.mark.parametrize("weights", [None, WEIGHTS, (0.0, 1.0, 1.0, 1.0)])
def test_one_labelled_example_counts_fully_and_none_is_a_loss_of_0(task, weights):
    task = type(task)("t", 4, class_weights=weights)
    for grade in range(1, 4):
        alone = task.loss(LOGITS[:1], torch.tensor([grade]))
        torch.testing.assert_close(task.loss(LOGITS[:2], torch.tensor([grade, -1])), alone)
        torch.testing.assert_close(alone, type(task)("t", 4).loss(LOGITS[:1], torch.tensor([grade])))
    assert float(task.loss(LOGITS[:2], torch.tensor([-1, -1]))) == 0
    if weights is not None and not weights[0]:
        assert float(task.loss(LOGITS[:1], torch.tensor([0]))) == 0, "a class of weight 0 costs nothing"


@pytest.mark.parametrize("kind", [Classification, Ordinal])
def test_the_constant_of_classes_is_the_logarithm_of_their_shares(kind):
    task = kind("t", 5)
    counts, number = task.sums(torch.tensor([0, 0, 1, -1, 3, -1]))
    assert (counts.tolist(), number.tolist()) == ([2, 1, 0, 1, 0], [4])
    torch.testing.assert_close(
        task.constant(counts / number).exp(), torch.tensor([0.5, 0.25, 1e-6, 0.25, 1e-6]).double()
    )


YES_NO = torch.tensor([[1.0, 0.0, NAN], [0.0, NAN, NAN], [1.0, 1.0, NAN]])


@pytest.mark.parametrize("weights", [None, (3.0, 0.5, 1.0)])
def test_the_loss_of_labels_is_the_mean_over_those_that_are_known(weights):
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
    known = [(i, j) for i in range(3) for j in range(3) if not math.isnan(YES_NO[i, j])]
    each = []
    for i, j in known:
        p = torch.sigmoid(logits[i, j]).item()
        positive = 1.0 if weights is None else weights[j]
        each.append(-positive * math.log(p) if YES_NO[i, j] == 1 else -math.log(1 - p))
    loss = Multilabel("t", 3, class_weights=weights).loss(logits, YES_NO)
    assert loss.item() == pytest.approx(math.fsum(each) / 5, rel=1e-6)
    assert Multilabel("t", 3).loss(logits[:1, :1], YES_NO[:1, :1]).item() == pytest.approx(
        each[0] / (weights or [1])[0]
    )
    assert Multilabel("t", 3).loss(logits[:, 2:], YES_NO[:, 2:]).item() == 0


def test_the_constant_of_labels_is_their_log_odds():
    task = Multilabel("t", 3)
    counts, number = task.sums(YES_NO)
    assert (counts.tolist(), number.tolist()) == ([2, 1, 0], [3, 2, 0])
    assert counts.dtype == number.dtype == torch.float64
    assert task.constant(counts / number).tolist() == pytest.approx([math.log(2), 0, 0])
    extreme = task.constant(torch.tensor([0.0, 1.0], dtype=torch.float64)).sigmoid()
    assert extreme.tolist() == pytest.approx([1e-6, 1 - 1e-6], rel=1e-6)


def test_metrics_of_labels_are_means_over_those_with_known_values():
    task = Multilabel("t", 3, judge=("auc",))
    assert task.metrics == {"auc": "max", "accuracy": "max"}
    metric = task.metric()
    metric.update(torch.tensor([[2.0, -1.0, 0.5], [-1.0, 1.0, 0.5], [-0.5, -0.5, 0.5]]), YES_NO)
    # Label 0: 1, 0, 1 predicted as 1, 0, 0; label 1: 0, 1 predicted as 0, 0; nothing is known of label 2.
    found = metric.compute()
    assert found == pytest.approx({"auc": 1.0, "accuracy": (2 / 3 + 1 / 2) / 2})
    unknown = task.metric()
    unknown.update(torch.zeros(2, 1), torch.full((2, 1), NAN))
    assert all(math.isnan(value) for value in unknown.compute().values())
    one_sided = task.metric()
    one_sided.update(torch.tensor([[1.0, -1.0], [2.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert one_sided.compute() == pytest.approx({"auc": 1.0, "accuracy": 1.0}), "no AUC of a label that is always yes"


def test_the_head_of_labels_is_linear():
    assert Multilabel("t", 4).head(7)(torch.zeros(2, 7)).shape == (2, 4)
