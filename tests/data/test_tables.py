"""Tables with one task per school, field or person."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data import DATASETS, PARTITIONERS, Pool
from fedloom.errors import DataError, RecipeError
from fedloom.tasks import Classification, Regression

REAL = Path(__file__).parents[3] / "shared" / "data"
CPU = torch.device("cpu")
X = np.array([[0.0, 7], [2, 7], [4, 7], [6, 7]])


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Two schools of two and one pupils in either part, two targets; feature 1 is constant."""
    np.savez(
        tmp_path / "t.npz",
        x_train=X, y_train=np.array([[1.0, 10], [3, 20], [5, 30], [7, np.nan]]), task_train=np.array([3, 3, 12, 12]),
        x_test=X[:2] + 1, y_test=np.array([[2.0, 10], [4, 30]]), task_test=np.array([12, 3]),
        label_train=np.array([0, 1, 1, 2]), label_test=np.array([1, 0]),
        names=np.array(["score", "age"]),
        x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2, task=np.arange(20) // 10,
    )  # fmt: skip
    return str(tmp_path / "t.npz")


def load(path: str, kind: str = "regression", **params):
    return DATASETS["tables"].function(0, path=path, kind=kind, **params)


def test_every_value_and_target_is_a_task_with_own_examples(table):
    data = load(table, prefix="school", target_names="names")
    assert [t.name for t in data.tasks] == ["school-03-score", "school-03-age", "school-12-score", "school-12-age"]
    assert data.domains == ("school-03", "school-12")
    assert data.train.domain.tolist() == [0, 0, 1, 1]
    assert data.train.labels_of("school-12-score").tolist() == [-1, -1, 0, 0]
    assert data.train.labels_of("school-12-age").tolist() == [-1, -1, 0, -1]
    _, y = data.test.batch(torch.tensor([0, 1]), CPU, tasks=["school-12-score"])
    assert y["school-12-score"].dtype == torch.float32
    assert y["school-12-score"][0] == 2
    assert y["school-12-score"][1].isnan()


def test_features_and_targets_are_standardised_on_the_train_part(table):
    data = load(table, target_names="names")
    x, _ = data.train.batch(torch.arange(4), CPU)
    assert np.allclose(x.numpy(), np.stack([np.array([-3, -1, 1, 3]) / math.sqrt(5), np.zeros(4)], 1))
    x, _ = data.test.batch(torch.arange(2), CPU)
    assert np.allclose(x.numpy(), [[-2 / math.sqrt(5), 1], [0, 1]])
    assert data.tasks[0] == Regression("task-03-score", mean=4, std=math.sqrt(5))
    assert data.tasks[1].mean == 20
    assert data.tasks[1].std == pytest.approx(math.sqrt(200 / 3))


def test_classification_counts_the_classes_of_all_tasks(table):
    data = load(table, "classification", targets="label_{split}")
    assert [(t.name, t.channels) for t in data.tasks] == [("task-03", 3), ("task-12", 3)]
    assert data.train.labels_of("task-03").tolist() == [0, 1, -1, -1]


def test_a_pool_is_split_by_task(table):
    keys = {"features": "x", "targets": "y", "task_by": "task"}
    data = load(table, "classification", **keys, test_fraction=0.3)
    assert [int((data.test.labels_of(t.name) >= 0).sum()) for t in data.tasks] == [3, 3]
    assert len(data.train) == 14
    assert load(table, "classification", **keys, test_fraction=0.3).test.fingerprint() == data.test.fingerprint()
    with pytest.raises(RecipeError, match="needs test_fraction"):
        load(table, **keys)
    with pytest.raises(RecipeError, match="test_fraction has no use"):
        load(table, test_fraction=0.3)
    with pytest.raises(RecipeError, match="in all keys or in none, found x, y_"):
        load(table, features="x")


def test_examples_of_one_group_stay_in_one_part(table):
    made = {**np.load(table), "group": np.repeat([*"abcdefghij"], 2)}
    np.savez(table, **made)
    keys = {"features": "x", "targets": "y", "task_by": "task", "group": "group"}
    data = load(table, "classification", **keys, test_fraction=0.4)
    assert [int((data.test.labels_of(t.name) >= 0).sum()) for t in data.tasks] == [4, 4]
    assert [*Counter(data.group).values()] == [2] * 6


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"features": "z_{split}"}, "no key 'z_train'"),
        ({"features": "task_{split}"}, "'task_train': expected numbers N x F"),
        ({"task_by": "y_{split}"}, "'y_train': expected one integer per example"),
        ({"kind": "classification"}, "'y_train': expected one integer per example"),
        ({"targets": "y"}, "in all keys"),
        ({"target_names": "names", "targets": "label_{split}"}, "a name for each of 1 targets, found score, age"),
    ],
)
def test_what_does_not_fit_is_named(table, params, message):
    with pytest.raises((DataError, RecipeError), match=message):
        load(table, **params)


@pytest.mark.parametrize(
    ("kind", "label", "message"),
    [
        ("classification", 40_000, "'label_train': expected labels from 0 to 32767, or -1, found 40000"),
        ("regression", 1e300, "'y_train': expected numbers that float32 can hold, found 1e\\+300"),
    ],
)
def test_labels_that_would_become_others_are_refused(table, tmp_path, kind, label, message):
    column = "label_train" if kind == "classification" else "y_train"
    arrays = {name: array.copy() for name, array in np.load(table).items()}
    arrays[column].flat[0] = label
    np.savez(tmp_path / "bad.npz", **arrays)
    more = {"targets": "label_{split}"} if kind == "classification" else {}
    with pytest.raises(DataError, match=message):
        load(str(tmp_path / "bad.npz"), kind, **more)


def test_a_task_needs_examples_in_both_parts(table, tmp_path):
    raw = dict(np.load(table))
    np.savez(tmp_path / "u.npz", **{**raw, "task_test": np.array([3, 3])})
    with pytest.raises(DataError, match="task 'task-12-0' has no test example"):
        load(str(tmp_path / "u.npz"))
    np.savez(tmp_path / "v.npz", **{**raw, "x_train": np.where(X == 4, np.nan, X)})
    with pytest.raises(DataError, match="'x_train': 1 of 4 inputs have NaN or infinity, the first at position 2"):
        load(str(tmp_path / "v.npz"))


def test_one_client_per_school_is_tested_on_its_own(table, tmp_path):
    recipe = {
        "name": "t",
        "data": {"name": "tables", "path": table, "kind": "regression", "prefix": "school", "target_names": "names"},
        "partition": {"name": "domains", "clients": 1, "val_fraction": 0},
        "model": {"name": "mlp", "hidden": [4]},
        "method": "fedavg",
        "training": {"rounds": 2},
        "evaluation": {"splits": ["test"]},
    }
    result = fedloom.run(recipe, tmp_path / "run")
    rows = result.run.rounds[-1]["metrics"]
    partition = PARTITIONERS["domains"].function(Pool.of(load(table, prefix="school")), 0, clients=1)
    tasks = {(share.client, f"{share.domain}-{target}") for share in partition.shares for target in ("score", "age")}
    assert {(r["client"], r["task"]) for r in rows} == tasks
    assert {r["metric"] for r in rows} == {"rmse", "r2", "loss"}
    rmse = {r["task"]: r["value"] for r in rows if r["metric"] == "rmse"}
    loss = {r["task"]: r["value"] for r in rows if r["metric"] == "loss"}
    assert rmse["school-03-score"] == pytest.approx(math.sqrt(5 * loss["school-03-score"]), rel=1e-5)


def test_two_classes_may_be_judged_by_the_auc(table):
    pool = {"features": "x", "targets": "y", "task_by": "task", "test_fraction": 0.5, "kind": "classification"}
    assert load(table, **pool).tasks == (Classification("task-0", 2), Classification("task-1", 2))
    assert load(table, **pool, metric="auc").tasks == tuple(
        Classification(f"task-{i}", 2, judge=("auc",)) for i in (0, 1)
    )
    with pytest.raises(DataError, match="metric auc expects classification with labels 0 and 1, found 3 classes"):
        load(table, "classification", targets="label_{split}", metric="auc")
    with pytest.raises(DataError, match="metric auc expects .* found regression"):
        load(table, metric="auc")


TABLES = {"school": 139, "landmine": 29, "har": 24, "parkinsons": 84}


@pytest.mark.parametrize("name", TABLES)
def test_packaged_recipe_trains_on_the_real_table(name, tmp_path):
    if not (REAL / f"{name}.npz").exists():
        pytest.skip(f"{name}.npz is not here")
    overrides = [f"data.path={REAL / name}.npz", "training.rounds=1", "evaluation.every=1"]
    result = fedloom.run(f"matu/{name}", tmp_path / "run", overrides=overrides)
    values = result.run.final().values
    assert len(values) == TABLES[name]
    # Some people's targets do not vary in the test part, which leaves their R2 undefined.
    assert all(math.isfinite(v) for scores in values.values() for name, v in scores.items() if name != "r2")
    assert name != "landmine" or {task["primary"] for task in result.run.info["tasks"].values()} == {"auc"}
