"""Metrics by name: they are scikit-learn's, in any batches, and no value is said where there is none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

import fedloom as fl
from fedloom.core.errors import RecipeError
from fedloom.models.tasks.labels import BINS, CLASSES, NUMBERS
from fedloom.study.report import collect, write
from fedloom.study.statistics import FRACTIONS
from fedloom.tasks import Classification, Depth, Regression


def measured(task, output, target, size=7):
    metric = task.metric()
    for part in torch.arange(len(output)).split(size):
        metric.update(output[part], target[part])
    return metric.compute()


def of_classes(name, y, p):
    """A metric of classes, by scikit-learn or, for the calibration, by hand."""
    two, k = p.shape[1] == 2, p.shape[1]
    there = [c for c in ([1] if two else range(k)) if 0 < (y == c).sum() < len(y)]
    if name in ("auc", "pr-auc"):
        each = {"auc": sk.roc_auc_score, "pr-auc": sk.average_precision_score}[name]
        return np.mean([each(y == c, p[:, c]) for c in there]) if there else math.nan
    if name == "balanced-accuracy":
        return sk.recall_score(y, p.argmax(1), labels=np.unique(y), average="macro") if len(set(y)) > 1 else math.nan
    if name == "brier":
        return sk.brier_score_loss(y, p, labels=range(k), scale_by_half=True)
    if name == "accuracy":
        return sk.accuracy_score(y, p.argmax(1))
    sure, right = (p[:, 1], y == 1) if two else (p.max(1), p.argmax(1) == y)
    bins = [(sure >= i / BINS) & ((sure < (i + 1) / BINS) | (i + 1 == BINS)) for i in range(BINS)]
    return sum(abs(sure[b].mean() - right[b].mean()) * b.mean() for b in bins if b.any())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 60), st.sampled_from([2, 2, 3]))
def test_metrics_of_classes_are_those_of_scikit_learn(seed, n, classes):
    rng = torch.Generator().manual_seed(seed)
    output = torch.randint(-3, 4, (n, classes), generator=rng).double()  # many ties
    target = torch.randint(-1, classes, (n,), generator=rng)
    task = Classification("t", classes, judge=tuple(CLASSES))
    found = measured(task, output, target)
    assert list(found) == list(task.metrics) == [*CLASSES, "macro_f1"]
    valid = target >= 0
    y, p = target[valid].numpy(), output.softmax(1)[valid].numpy()
    for name in CLASSES:
        expected = of_classes(name, y, p) if len(y) else math.nan
        assert found[name] == pytest.approx(expected, nan_ok=True), name


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 40), st.integers(2, 5))
def test_metrics_of_ordered_classes_are_those_of_the_median(seed, n, classes):
    rng = torch.Generator().manual_seed(seed)
    output = torch.randint(-2, 3, (n, classes), generator=rng).double()
    target = torch.randint(0, classes, (n,), generator=rng)
    task = fl.task(kind="ordinal", classes=classes, metric=["kappa", "mae"]).named("t")
    found = measured(task, output, target)
    y, median = target.numpy(), (output.softmax(1).numpy().cumsum(1) >= 0.5).argmax(1)
    same = len({*y, *median}) == 1
    kappa = math.nan if same else sk.cohen_kappa_score(y, median, weights="quadratic", labels=range(classes))
    assert found["kappa"] == pytest.approx(kappa, nan_ok=True)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, median))


def test_metrics_of_several_labels_are_means_over_the_labels():
    rng = torch.Generator().manual_seed(2)
    output, target = torch.randn(30, 3, generator=rng).double(), torch.rand(30, 3, generator=rng).round()
    target[::4, 0] = target[:, 2] = math.nan
    task = fl.task(kind="multilabel", classes=3, metric=["auc", "brier"]).named("t")
    found, p = measured(task, output, target), output.sigmoid()
    known = [~target[:, i].isnan() for i in (0, 1)]
    for name, score in {"auc": sk.roc_auc_score, "brier": sk.brier_score_loss}.items():
        assert found[name] == pytest.approx(np.mean([score(target[k, i], p[k, i]) for i, k in enumerate(known)]))
    total, count = task.sums(target)
    assert count.tolist() == [22, 30, 0]
    torch.testing.assert_close(total, target.nan_to_num(0).sum(0).double())
    odds = task.constant(torch.tensor([0.2, 1, 0, math.nan]).double())
    torch.testing.assert_close(odds.sigmoid(), torch.tensor([0.2, 1 - 1e-6, 1e-6, 0.5]).double())


def test_metrics_of_numbers_are_those_of_scikit_learn_in_the_labels_unit():
    rng = torch.Generator().manual_seed(1)
    output, target = torch.randn(20, 1, generator=rng), 10 + 3 * torch.randn(20, generator=rng)
    target[::5] = math.nan
    found = measured(Regression("t", mean=10.0, std=2.0, judge=tuple(NUMBERS)), output, target)
    y, p = target[~target.isnan()], (output[:, 0] * 2 + 10)[~target.isnan()]
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, p))
    assert found["r2"] == pytest.approx(sk.r2_score(y, p), rel=1e-5)
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(y, p))


def test_a_model_that_answers_nan_has_no_value():
    output, target = torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), torch.tensor([0, 1])
    assert math.isnan(measured(Classification("t", 2, judge=("auc",)), output, target)["auc"])


def test_names_directions_and_fractions():
    assert Classification("t", 2).primary == "accuracy", "packaged data keep their metric"
    chosen = fl.task(classes=2, metric=["brier", "auc"]).named("t")
    assert chosen.primary == "brier"
    assert list(chosen.metrics.items()) == [("brier", "min"), ("auc", "max"), ("accuracy", "max"), ("macro_f1", "max")]
    defaults = [fl.task(classes=2), fl.task(classes=3), fl.task()]
    assert [task.named("t").primary for task in defaults] == ["auc", "accuracy", "rmse"]
    assert set(CLASSES) <= FRACTIONS
    assert not set(NUMBERS) & FRACTIONS
    assert Depth("t", judge=("mae",)).primary == "mae"
    for wrong in ({"classes": 2, "metric": "mae"}, {"metric": "auc"}, {"classes": 2, "metric": 3}):
        with pytest.raises(RecipeError, match=r"metric"):
            fl.task(**wrong)


def site(n, seed, only=None):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=rng)
    return x, {"ill": (x[:, 0] > 0).long() if only is None else torch.full((n,), only), "age": 50 + x[:, 1]}


@pytest.fixture(scope="module")
def sites():
    """Three sites with their own test data, of which one has only one class, and one no label of age there."""
    x, y = site(20, 3)
    clients = {
        "a": fl.Client(site(30, 1), test=site(30, 2)),
        "b": fl.Client(site(30, 3), test=(x, {"ill": y["ill"]})),
        "c": fl.Client(site(30, 4), test=site(10, 5, only=0)),
    }
    tasks = {"ill": fl.task(classes=2), "age": fl.task(metric="mae")}
    return fl.Federation(clients, tasks)


def test_a_site_with_one_class_has_no_value_and_all_sites_together_have_one(sites, tmp_path):
    result = fl.run(
        sites, model="mlp", method="local", rounds=1, training={"optimizer": {"lr": 0.05}}, folder=tmp_path / "run"
    )
    rows = [row for row in result.run.rows() if row["round"] == 1 and row["split"] == "test"]
    auc = {row["client"]: row["value"] for row in rows if row["metric"] == "auc"}
    assert math.isnan(auc.pop("c"))
    final = result.final()
    assert final.values["ill"]["auc"] == pytest.approx(np.mean([auc["a"], auc["b"]]))
    assert {row["client"] for row in rows if row["task"] == "age" and row["metric"] == "mae"} == {"a", "c"}
    outputs, labels = [], []
    with torch.no_grad():
        for who, test in (("a", site(30, 2)), ("b", site(20, 3)), ("c", site(10, 5, only=0))):
            outputs.append(result.model(who)(test[0], ("ill",))["ill"].softmax(1)[:, 1])
            labels.append(test[1]["ill"])
    pooled = sk.roc_auc_score(torch.cat(labels), torch.cat(outputs))
    assert final.values["ill"]["pooled auc"] == pytest.approx(pooled)
    table = result.table()
    assert "auc of ill: no value at 1 of 3 clients (c)" in table
    assert "pooled: over the examples of all of them" in table
    mine = [s for s in collect(result.folder).scores if (s.task, s.split) == ("ill", "test")]
    scores = {score.metric: score.clients for score in mine}
    assert (scores["auc"], scores["accuracy"]) == (2, 3)
    assert "auc of ill: no value at 1 of 3 clients (c), test data." in write(result.folder).read_text("utf-8")


def test_a_recipe_names_metrics_and_tables_show_both_values(sites, tmp_path):
    made = fl.compare(
        sites, model="mlp", methods=["local", "fedavg"], seeds=1, rounds=1, tasks={"ill": {"metric": "pr-auc"}}
    )
    text = str(made)
    assert "ill (pr-auc) ↑" in text
    assert "ill (pooled pr-auc) ↑" in text
    assert "pr-auc of ill: no value at 1 of 3 clients (c)." in text
    with pytest.raises(RecipeError, match=r"'ill': unknown metric 'f1'"):
        fl.run(sites, model="mlp", tasks={"ill": {"metric": "f1"}}, folder=Path(tmp_path / "no"))


def test_clients_that_share_their_test_data_have_no_other_value_together(tmp_path):
    clients = {who: fl.Client(site(20, i)) for i, who in enumerate("ab")}
    fed = fl.Federation(clients, {"ill": fl.task(classes=2), "age": fl.task()}, test=site(30, 9))
    for method in ("fedavg", "local"):
        result = fl.run(fed, model="mlp", method=method, rounds=1, folder=tmp_path / method)
        assert not [row for row in result.run.rows() if row["metric"].startswith("pooled") and row["split"] == "test"]
