"""Data sets from an archive or a folder: labelled arrays, and archives with a task per person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, at, nearest
from fedloom.core.settings.section import Count
from fedloom.data import prepare
from fedloom.data.combine import of_classes
from fedloom.data.inputs import Axes, as_inputs, copied, doubtful_axes, far_off, finite, signal_of, with_vocabulary
from fedloom.data.prepare import DATASETS, SPLITS, Array, Augment, DenseLabel, Name, Part, Reading, Store, TestFraction
from fedloom.models.signal import Kind, Signal

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.task import Task


REAL = (
    "real numbers are targets of a regression: the data set tables (kind: regression) takes them for vectors, and "
    "fl.Federation in Python for all inputs"
)
ClassNames = Annotated[list[str], Field(min_length=1)]


@DATASETS.register("arrays")
def arrays(
    seed: int,
    *,
    path: str,
    images: str = "x_{split}",
    signal: Kind | Signal | None = None,
    axes: Axes | None = None,
    labels: Annotated[dict[str, str], Field(min_length=1)] | None = None,
    dense: Annotated[dict[str, DenseLabel], Field(min_length=1)] | None = None,
    domain: str | None = None,
    domain_names: str | None = None,
    group: str | None = None,
    classes: dict[str, Count | ClassNames] | None = None,
    test_fraction: TestFraction | None = None,
    size: Count | None = None,
    channels: Literal[1, 3] | None = None,
    limit: Count | None = None,
    augment: bool | Augment = True,
    crop: tuple[Count, Count] | None = None,
    multiple: Count = 32,
) -> Dataset:
    """Images, series, feature vectors or tokens with class labels, or images with dense labels, from an .npz archive or
    a folder of .npy files.

    `images`, `labels` (task -> key; default: task `label`, key `y_{split}`) and `domain` are keys, in which `{split}`
    stands for `train` and `test`. Keys without `{split}` name one pool, and the share `test_fraction` of it (stratified
    by the first task and the domain) becomes the test part. `domain` has integers or texts. `domain_names` is
    the key of an array of names for integers; without it, domains are named by their numbers.

    Examples with the same value in the array `group` (integers or texts), such as the windows of one recording or of
    one person, stay together where `test_fraction` splits the pool and where clients set validation examples apart.
    Both then count groups, the test part those of each domain. Without it, parts of one recording are in training and
    test, and scores are too good.

    `signal` says what an input is. image: N x H x W, N x H x W x C or N x C x H x W (C = 1 or 3), uint8 or floating
    point; it becomes N x C x H x W. series: N x channels x steps (`axes: NCT`, the default), or with `axes: NTC`
    N x steps x channels, or N x steps. features: N x F. tokens: N x T whole
    numbers, with a vocabulary and a padding if need be (`{kind: tokens, vocabulary: 5000, padding: 0}`); they stay as
    they are. By default N x F is features, four axes are images, and N x A x B is grey images where A = B, or where it
    is uint8 and neither side is four times the other; anything else has to be said.

    Uint8 is scaled to 0..1 per batch, other numbers become float32. All but tokens are normalised per channel (per
    feature) by the mean and standard deviation of the train part. `size` resizes images bilinearly to size x size;
    `channels: 1` makes them grey (ITU-R BT.601 luma), `channels: 3` repeats grey ones. `limit` keeps that many random
    examples of each part.

    Labels: N integers from 0, where -1 means unlabelled, or N texts, where an empty one does. `classes` (task ->
    number, or names in the order of their numbers) defaults to the largest label plus one, or to the texts in
    alphabetical order. Nodes of a deployment whose labels are texts need the names, so that all number them alike.

    `dense` (task -> kind, key and more) takes the place of `labels`. Images are then uint8 and normalised with
    ImageNet's mean and standard deviation; grey ones are repeated. Label images have the images' height and width:
    semseg and human_parts are classes (255 or -1 = ignore); saliency and edge are 0, 1 and 255 (ignore), or shares
    with a `threshold`; depth times `factor` is metres, 0 = no value; normals are N x H x W x 3 or N x 3 x H x W,
    x right, y up, z towards the viewer, zero = no value. In training, images are changed as `augment` says and cropped
    to `crop` (height, width; default: whole); in evaluation, they are padded so that `multiple` divides their sides.

    `fedloom show` and a run warn where test examples are byte by byte copies of training examples, in up to a million
    examples and 1 GiB of inputs (features of whole numbers are not compared); where a series has more channels than
    steps and `axes` does not state their order; and where the mean of a channel or feature in one domain is more than
    five standard deviations away from the others', as in other units.

    Arrays in a folder stay on disk and are read batch by batch, unless a split, `size`, `channels`, `limit` or a
    conversion to float32 makes a copy. Raises DataError for anything absent or inconsistent, naming the key.
    """
    if dense is not None:
        beside = {"labels": labels, "classes": classes, "size": size, "channels": channels, "signal": signal}
        for what, value in (beside | {"axes": axes}).items():
            if value is not None:
                raise RecipeError(f"arrays: {what} cannot be combined with dense: leave one of them out")
    labels = {} if dense is not None else labels or {"label": "y_{split}"}
    dense, classes = dense or {}, classes or {}
    beside_inputs = [key for key in (domain, group) if key is not None]
    keys = [images, *labels.values(), *(label.key for label in dense.values()), *beside_inputs]
    named = prepare.splits("arrays", keys, test_fraction)
    if domain_names is not None and domain is None:
        raise RecipeError("arrays: domain_names names the values of domain, which is missing: add domain")
    for task in classes:
        if task not in labels:
            hint = nearest(task, labels)
            raise RecipeError(f"arrays: classes names the task {task!r}, which labels does not name.{hint}")
        if not isinstance(listed := classes[task], int):
            prepare.no_repeats(f"arrays, classes, task {task!r}", "class", listed)

    def read(store: Store, split: str) -> Part:
        """Read one part, or the pool, and check it."""
        key = images.replace("{split}", split)
        inputs = store.read(key)
        if not inputs.size:
            raise DataError(f"{where}: {key!r} is empty, its shape is {inputs.shape}")
        if inputs.dtype.kind == "f":
            finite(inputs, f"{where}, {key!r}")
        columns = {}
        for task, name in labels.items():
            columns[task] = store.integers(name.replace("{split}", split), len(inputs), key, True, f"; {REAL}")
            if columns[task].dtype.kind == "i" and (least := columns[task].min()) < -1:
                raise DataError(f"{where}, task {task!r}: expected labels from 0, or -1 for unlabelled, found {least}")
        for task, label in dense.items():
            from fedloom.data.dense import decode

            array = store.read(name := label.key.replace("{split}", split), len(inputs), key)
            columns[task] = decode(array, label, f"{where}, {name!r}")
        places = None if domain is None else store.integers(domain.replace("{split}", split), len(inputs), key, True)
        owners = None if group is None else store.integers(group.replace("{split}", split), len(inputs), key, True)
        return Part(inputs, columns, places, key, owners)

    store = Store(Path(path).expanduser())
    where = f"arrays, {store.path}"
    parts = [read(store, split) for split in named]
    names = store.names(domain_names) if domain_names is not None else None
    found = {task: _classes(where, task, parts, classes.get(task)) for task in labels}
    domains = _number_domains(where, parts, names)
    if test_fraction is not None:
        parts = parts[0].cut(test_fraction, seed)
        if not len(parts[1].inputs):
            lacks = "no class has two examples" if group is None else f"no domain has two groups ({group!r})"
            raise DataError(f"{where}: {lacks}, so no test part can be split off")
    drawn_from = len(parts[0].inputs)
    parts = prepare.limited(parts, limit, seed)
    if dense:
        from fedloom.data.dataset import Dataset
        from fedloom.data.dense import build

        built = build(where, dense, parts, prepare.resolve(augment), crop, multiple)
        data, inputs = Dataset(store.path.stem, *built, domains), [part.images for part in built[1:]]
    else:
        said = signal or ("series" if axes and parts[0].inputs.ndim == 3 else None)
        known, normal = _ready(where, parts, said, size, channels, axes)
        counts, called = {t: each[0] for t, each in found.items()}, {t: each[1] for t, each in found.items() if each[1]}
        with at(where):
            data = of_classes(store.path.stem, counts, parts, normal, domains, signal=known, classes=called)
        inputs = [part.inputs for part in parts]
    # Where examples are drawn, their positions are no longer those in the file.
    places = [part.key if test_fraction is limit is None else "" for part in parts]
    doubts = [*_in_both(parts, group), *copied({places[0]: inputs[0]}, {places[1]: inputs[1]}, data.signal)]
    doubts += doubtful_axes(data.input_shape, data.signal, "data.axes={}") if axes is None else ()
    doubts += far_off(_moments_by_domain(inputs[0], parts[0].domain, data), data.signal)
    more: dict[str, Any] = {"reading": Reading(turned=axes == "NTC"), "redrawn": test_fraction is not None}
    return replace(data, group=parts[0].group, doubts=tuple(doubts), drawn_from=drawn_from, **more)


def _moments_by_domain(inputs: Tensor, domain: Array | None, data: Dataset) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean and the deviation of each channel in each domain with two examples or more; of images nothing."""
    if domain is None or data.signal is None or data.signal.kind in ("image", "tokens"):
        return {}
    rows = {name: np.flatnonzero(domain == number) for number, name in enumerate(data.domains)}
    return {f"domain {name!r}": prepare.channel_moments(inputs[own]) for name, own in rows.items() if len(own) > 1}


def _in_both(parts: Sequence[Part], group: str | None) -> tuple[str, ...]:
    """Return a doubt where groups have examples in both parts, which the file itself splits."""
    train, test = ({*np.unique([] if part.group is None else part.group).tolist()} for part in parts)
    if not (both := train & test):
        return ()
    found = f"{len(both)} of {len(test)} groups of the test part are in the train part too, for example {min(both)!r}"
    return (f"{found} of {group!r}: test scores are too good, so remove them from one part",)


def _ready(
    where: str, parts: list[Part], said: Kind | Signal | None, size: int | None, channels: int | None, axes: Axes | None
) -> tuple[Signal, tuple[Any, ...]]:
    """Turn both parts' inputs into those of models, in place; return their kind, and what they are normalised with.
    That are the train part's statistics; tokens are not normalised."""
    signal = signal_of(parts[0].inputs, said, f"{where}, {parts[0].key!r}")
    signal_of(parts[1].inputs, signal, f"{where}, {parts[1].key!r}")
    for part in parts:
        part.inputs = as_inputs(part.inputs, signal, size, channels, f"{where}, {part.key!r}", axes)
    inputs = [part.inputs for part in parts]
    if inputs[0].shape[1:] != inputs[1].shape[1:] or inputs[0].dtype != inputs[1].dtype:
        kinds = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in inputs)
        raise DataError(f"{where}: expected train and test inputs of one shape and type, found {kinds}")
    if signal.kind == "tokens":
        return with_vocabulary(signal, inputs, where), ()
    return signal, prepare.channel_statistics(inputs[0])


def _classes(where: str, task: str, parts: Sequence[Part], said: int | list[str] | None) -> tuple[int, tuple[str, ...]]:
    """Return the number of a task's classes, and their names, as stated or those of texts, which become their numbers
    in place. Without either there are as many as the largest label says."""
    about, columns = f"{where}, task {task!r}", [part.labels[task] for part in parts]
    names = () if isinstance(said, int | None) else tuple(said)
    if _are_texts(about, columns):
        found = np.unique(np.concatenate(columns)).tolist()
        names = names or tuple(text for text in found if text)
        if strange := [text for text in found if text and text not in names]:
            raise DataError(f"{about}: the label {strange[0]!r} found, expected {', '.join(names)}")
        if isinstance(said, int) and said != len(names):
            advice = f"list the names of all {said} as classes"
            raise DataError(f"{about}: {len(names)} classes found ({', '.join(names)}); {advice}")
        place = {name: number for number, name in enumerate(names)}
        for part in parts:
            part.labels[task] = np.array([place.get(text, -1) for text in part.labels[task].tolist()], np.int64)
    largest = max(int(part.labels[task].max()) for part in parts)
    if largest < 0:
        raise DataError(f"{about}: no example is labelled")
    count = len(names) or (said if isinstance(said, int) else largest + 1)
    if largest >= count:
        raise DataError(f"{about}: expected labels below {count}, found {largest}")
    return count, names


def _are_texts(where: str, columns: Sequence[Array]) -> bool:
    """Return whether columns are texts. Raises DataError where one part has texts and the other integers."""
    kinds = [column.dtype.kind == "U" for column in columns]
    if any(kinds) != all(kinds):
        found = " and ".join(str(column.dtype) for column in columns)
        raise DataError(f"{where}: expected texts in both parts or in none, found {found}")
    return any(kinds)


def _number_domains(where: str, parts: Sequence[Part], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Check the domains against their names; without names, number the values that occur and name them so."""
    columns = [part.domain for part in parts if part.domain is not None]
    if not columns:
        return ()
    if (is_text := _are_texts(f"{where}, domain", columns)) and names is not None:
        raise DataError(f"{where}: the domains are texts, which are their names: leave domain_names out")
    values = np.unique(np.concatenate(columns))
    if is_text and not values[0]:
        found = "an example without a domain (an empty text) found"
        raise DataError(f"{where}: {found}: fill the domain in, or remove the example")
    if names is None:
        for part, column in zip(parts, columns, strict=True):
            part.domain = np.searchsorted(values, column)
        return tuple(map(str, values.tolist()))
    if len(wrong := values[(values < 0) | (values >= len(names))]):
        raise DataError(f"{where}: expected domains in 0..{len(names) - 1}, found {wrong[0]}")
    return names


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
    group: str | None = None,
    test_fraction: TestFraction | None = None,
    metric: Literal["accuracy", "auc"] = "accuracy",
) -> Dataset:
    """Feature vectors with one task for each value of a column, from an .npz archive or a folder of .npy files.

    `features` (N x F, or N x ... which is flattened), `targets` and `task_by` (N integers) are keys, in which `{split}`
    stands for `train` and `test`; without it they name one pool, and the share `test_fraction` of it, stratified by
    task, becomes the test part. A value v becomes the task and the domain PREFIX-v, with leading zeros, so that
    `partition: {name: domains, clients: 1}` makes a client of each and tests it on its own examples. `group` is the key
    of integers or texts: examples with the same value stay in one part, as in `arrays`.

    Classification: N integers from 0, -1 = unlabelled; all tasks have as many classes as the largest label says. Their
    own metric is the accuracy, or with `metric: auc`, for two classes, the area under the ROC curve.
    Regression: N or N x K real numbers, NaN = none. K > 1 targets become K tasks PREFIX-v-NAME, named by the key
    `target_names` or numbered. Features and regression targets are standardised by mean and standard deviation of the
    whole train part; RMSE is in the targets' own units.

    Raises DataError for anything absent or inconsistent, and for a task without train or test examples.
    """
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.labels import Classification, Regression

    keys = (features, targets, task_by, *([group] if group is not None else []))
    named = prepare.splits("tables", keys, test_fraction)
    store = Store(Path(path).expanduser())
    where, title = f"tables, {store.path}", store.path.stem
    parts = [_table(store, where, [key.replace("{split}", split) for key in keys], kind) for split in named]
    names = list(store.names(target_names)) if target_names is not None else None
    if test_fraction is not None:
        parts = parts[0].cut(test_fraction, seed)
    doubts = _in_both(parts, group)
    (x, x_test), (y, y_test) = ([part.inputs for part in parts], [part.labels["target"] for part in parts])
    if x.shape[1] != x_test.shape[1] or y.shape[1] != y_test.shape[1]:
        raise DataError(f"{where}: train and test differ in the number of features or targets")
    names = [str(i) for i in range(y.shape[1])] if names is None else names
    if len(names) != y.shape[1]:
        raise DataError(f"{where}: expected a name for each of {y.shape[1]} targets, found {', '.join(names)}")

    real = kind == "regression"
    classes = 0 if real else int(max(y.max(), y_test.max())) + 1
    stored = np.float32 if real else np.int16 if classes < 1 << 15 else np.int64
    if metric == "auc" and classes != 2:
        there = "regression" if real else f"{classes} classes"
        raise DataError(f"{where}: metric auc expects classification with labels 0 and 1, found {there}")
    (mean, std), (mean_y, std_y) = _moments(x), _moments(y)
    values = np.unique(np.concatenate([np.asarray(part.domain) for part in parts]))
    domains = tuple(f"{prefix}-{value:0{len(str(values.max()))}d}" for value in values.tolist())
    places = {
        domain if len(names) == 1 else f"{domain}-{target}": (number, k)
        for number, domain in enumerate(domains)
        for k, target in enumerate(names)
    }

    def task_of(name: str, k: int) -> Task:
        if real:
            return Regression(name, mean=float(mean_y[k]), std=float(std_y[k]))
        return Classification(name, classes, judge=("auc",) if metric == "auc" else ())

    def examples(part: Part, split: str) -> TensorExamples:
        group, columns = np.searchsorted(values, np.asarray(part.domain)), part.labels["target"]
        labels: dict[str, torch.Tensor] = {}
        annotated: dict[str, Array] = {}
        for task, (number, k) in places.items():
            column = np.where(group == number, columns[:, k], np.nan if real else -1)
            has = ~np.isnan(column) if real else column >= 0
            if not has.any():
                raise DataError(f"{where}: task {task!r} has no {split} example")
            labels[task] = torch.from_numpy(column.astype(stored))
            annotated |= {task: has} if real else {}
        inputs = torch.from_numpy(((part.inputs - mean) / std).astype(np.float32))
        return TensorExamples(inputs, labels, torch.from_numpy(group), annotated=annotated)

    with at(where):
        tasks = tuple(task_of(name, k) for name, (_, k) in places.items())
    train, test = (examples(part, split) for part, split in zip(parts, SPLITS, strict=True))
    more: dict[str, Any] = {"redrawn": test_fraction is not None, "group": parts[0].group, "doubts": doubts}
    return Dataset(title, tasks, train, test, domains, reading=Reading(scale=(mean.tolist(), std.tolist())), **more)


_CLASSES = np.iinfo(np.int16).max + 1  # labels are kept as int16


def _table(store: Store, where: str, keys: Sequence[str], kind: str) -> Part:
    """Read one part, or the pool, and check it."""
    features, targets, task_by, *group = keys
    x = store.read(features)
    if x.ndim < 2 or x.dtype.kind not in "fiu" or not x.size:
        raise DataError(f"{where}: {features!r}: expected numbers N x F, found {x.dtype} of shape {x.shape}")
    finite(x, f"{where}: {features!r}")
    if kind == "classification":
        y = store.integers(targets, len(x), features)[:, None]
        if y.min() < -1 or y.max() >= _CLASSES:
            wrong = y.min() if y.min() < -1 else y.max()
            raise DataError(f"{where}: {targets!r}: expected labels from 0 to {_CLASSES - 1}, or -1, found {wrong}")
    else:
        y = store.read(targets)
        if y.dtype.kind not in "fiu":
            raise DataError(f"{where}: {targets!r}: expected numbers, found {y.dtype}")
        y = y.astype(np.float64)
        y = y[:, None] if y.ndim == 1 else y
        if y.ndim != 2 or len(y) != len(x) or np.isinf(y).any():
            raise DataError(f"{where}: {targets!r}: expected {len(x)} finite numbers (x K), found shape {y.shape}")
        if (np.abs(y) > np.finfo(np.float32).max).any():
            largest = np.nanmax(np.abs(y))
            raise DataError(f"{where}: {targets!r}: expected numbers that float32 can hold, found {largest}")
    domain = store.integers(task_by, len(x), features)
    owners = store.integers(group[0], len(x), features, True) if group else None
    return Part(x.reshape(len(x), -1).astype(np.float64), {"target": y}, domain, features, owners)


def _moments(columns: Array) -> tuple[Array, Array]:
    """Compute mean and standard deviation of each column over its numbers; 1 where a column is constant."""
    mean, std = np.nanmean(columns, 0), np.nanstd(columns, 0)
    return mean, np.where(std <= 1e-6 * np.abs(mean), 1.0, std)
