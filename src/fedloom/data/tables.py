"""Classic multi-task tables: feature vectors with one task per school, field or person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedloom.core.errors import DataError, at
from fedloom.data.prepare import SPLITS, Array, Name, TestFraction, stratified
from fedloom.data.registry import DATASETS
from fedloom.data.store import Store, splits

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset
    from fedloom.models.tasks.task import Task


@DATASETS.register("tables", source="School, Landmine, HAR and Parkinsons as in MOCHA (Smith et al., 2017) and MALSAR")
def tables(
    seed: int,
    *,
    path: str,
    kind: Literal["classification", "regression"],
    features: str = "x_{split}",
    targets: str = "y_{split}",
    task_by: str = "task_{split}",
    prefix: Name = "task",
    target_names: str | None = None,
    test_fraction: TestFraction | None = None,
    metric: Literal["accuracy", "auc"] = "accuracy",
) -> Dataset:
    """Feature vectors with one task for each value of a column, from an .npz archive, a folder of .npy files or a .csv
    file, whose `features` are "a,b,c".

    `features` (N x F, or N x ... which is flattened), `targets` and `task_by` (N integers) are keys, in which `{split}`
    stands for `train` and `test`; without it they name one pool, and the share `test_fraction` of it, stratified by
    task, becomes the test part. A value v becomes the task and the domain PREFIX-v, with leading zeros, so that
    `partition: {name: domains, clients: 1}` makes a client of each and tests it on its own examples.

    Classification: N integers from 0, -1 = unlabelled; all tasks have as many classes as the largest label says. Their
    own metric is the accuracy, or with `metric: auc`, for two classes, the area under the ROC curve.
    Regression: N or N x K real numbers, NaN = none. K > 1 targets become K tasks PREFIX-v-NAME, named by the key
    `target_names` or numbered. Features and regression targets are standardised by mean and standard deviation of the
    whole train part; RMSE is in the targets' own units.

    Raises DataError for anything absent or inconsistent, and for a task without train or test examples.
    """
    import torch

    from fedloom.data.dataset import Dataset
    from fedloom.data.mixed import MixedExamples, TensorInputs
    from fedloom.models.tasks.classification import BinaryClassification, Classification
    from fedloom.models.tasks.regression import Regression

    keys = (features, targets, task_by)
    named = splits("tables", keys, test_fraction)
    with Store(Path(path).expanduser()) as store:
        parts = [_read(store, split, keys, kind) for split in named]
        names = list(store.names(target_names)) if target_names is not None else None
        where = f"tables, {store.path}"
        title = store.path.stem
    if test_fraction is not None:
        test = stratified(parts[0].group, test_fraction, seed)
        parts = [_Table(*(column[mask] for column in parts[0])) for mask in (~test, test)]
    (x, y, _), (x_test, y_test, _) = parts
    if x.shape[1] != x_test.shape[1] or y.shape[1] != y_test.shape[1]:
        raise DataError(f"{where}: train and test differ in the number of features or targets")
    names = [str(i) for i in range(y.shape[1])] if names is None else names
    if len(names) != y.shape[1]:
        raise DataError(f"{where}: expected a name for each of {y.shape[1]} targets, found {', '.join(names)}")

    classes = int(max(y.max(), y_test.max())) + 1 if kind == "classification" else 0
    stored = np.float32 if kind == "regression" else np.int16 if classes < 1 << 15 else np.int64
    if metric == "auc" and classes != 2:
        there = f"{classes} classes" if kind == "classification" else "regression"
        raise DataError(f"{where}: metric auc expects classification with labels 0 and 1, found {there}")
    mean, std = _moments(x)
    mean_y, std_y = _moments(y)
    values = np.unique(np.concatenate([part.group for part in parts]))
    digits = len(str(values.max()))
    domains = tuple(f"{prefix}-{value:0{digits}d}" for value in values.tolist())
    known: list[Task] = []
    labels: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for value, domain in zip(values, domains, strict=True):
        for k, target in enumerate(names):
            task = domain if len(names) == 1 else f"{domain}-{target}"
            for split, (_, column, group), found in zip(SPLITS, parts, labels, strict=True):
                none = -1 if kind == "classification" else np.nan
                mine = np.where(group == value, column[:, k], none)
                if not ((mine >= 0) if kind == "classification" else ~np.isnan(mine)).any():
                    raise DataError(f"{where}: task {task!r} has no {split} example")
                found[task] = torch.from_numpy(mine.astype(stored))
            if metric == "auc":
                known.append(BinaryClassification(task))
            elif kind == "classification":
                with at(where):
                    known.append(Classification(task, classes))
            else:
                known.append(Regression(task, mean=float(mean_y[k]), std=float(std_y[k])))
    train, test_part = (
        MixedExamples(
            TensorInputs(torch.from_numpy(((inputs - mean) / std).astype(np.float32))),
            found,
            torch.from_numpy(np.searchsorted(values, group)),
        )
        for (inputs, _, group), found in zip(parts, labels, strict=True)
    )
    return Dataset(title, tuple(known), train, test_part, domains)


_CLASSES = np.iinfo(np.int16).max + 1  # labels are kept as int16


class _Table(NamedTuple):
    """One part: features (N x F, float64), targets (N x K) and the value that says the task (N)."""

    x: Array
    y: Array
    group: Array


def _read(store: Store, split: str, keys: Sequence[str], kind: str) -> _Table:
    """One part, or the pool: its keys looked up and checked."""
    where = f"tables, {store.path}"
    features, targets, task_by = (key.replace("{split}", split) for key in keys)
    x = store.read(features)
    if x.ndim < 2 or x.dtype.kind not in "fiu" or not x.size:
        raise DataError(f"{where}: {features!r} expected numbers N x F, found {x.dtype} of shape {x.shape}")
    if not np.isfinite(x).all():
        raise DataError(f"{where}: {features!r} expected finite features, found NaN or infinity")
    if kind == "classification":
        y = store.integers(targets, len(x), features)[:, None]
        if y.min() < -1 or y.max() >= _CLASSES:
            found = y.min() if y.min() < -1 else y.max()
            raise DataError(f"{where}: {targets!r} expected labels from 0 to {_CLASSES - 1}, or -1, found {found}")
    else:
        y = store.read(targets)
        if y.dtype.kind not in "fiu":
            raise DataError(f"{where}: {targets!r} expected numbers, found {y.dtype}")
        y = y.astype(np.float64)
        y = y[:, None] if y.ndim == 1 else y
        if y.ndim != 2 or len(y) != len(x) or np.isinf(y).any():
            raise DataError(f"{where}: {targets!r} expected {len(x)} finite numbers (x K), found shape {y.shape}")
        if (np.abs(y) > np.finfo(np.float32).max).any():
            raise DataError(
                f"{where}: {targets!r} expected numbers that float32 can hold, found {np.nanmax(np.abs(y))}"
            )
    return _Table(x.reshape(len(x), -1).astype(np.float64), y, store.integers(task_by, len(x), features))


def _moments(columns: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each column over its numbers; 1 where a column is constant."""
    mean, std = np.nanmean(columns, 0), np.nanstd(columns, 0)
    return mean, np.where(std <= 1e-6 * np.abs(mean), 1.0, std)
