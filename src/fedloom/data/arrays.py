"""Any labelled arrays, from an .npz archive, a folder of .npy files or a .csv file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, at, nearest
from fedloom.core.settings.section import Count
from fedloom.core.signal import Kind, Signal
from fedloom.data.augment import Augment, resolve
from fedloom.data.dense_label import DenseLabel
from fedloom.data.prepare import SPLITS, TestFraction, channel_statistics, stratified, subset
from fedloom.data.registry import DATASETS
from fedloom.data.signals import as_inputs, signal_of, stated, with_vocabulary
from fedloom.data.store import ArrayPart, Store, splits

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset, TensorExamples


@DATASETS.register("arrays")
def arrays(
    seed: int,
    *,
    path: str,
    images: str = "x_{split}",
    signal: Kind | Signal | None = None,
    labels: Annotated[dict[str, str], Field(min_length=1)] | None = None,
    dense: Annotated[dict[str, DenseLabel], Field(min_length=1)] | None = None,
    domain: str | None = None,
    domain_names: str | None = None,
    classes: dict[str, Count] | None = None,
    test_fraction: TestFraction | None = None,
    size: Count | None = None,
    channels: Literal[1, 3] | None = None,
    limit: Count | None = None,
    augment: bool | Augment = True,
    crop: tuple[Count, Count] | None = None,
    multiple: Count = 32,
) -> Dataset:
    """Images, series, feature vectors or tokens with class labels, or images with dense labels, from an .npz archive, a
    folder of .npy files or, for feature vectors, a .csv file.

    `images`, `labels` (task -> key; default: task `label`, key `y_{split}`) and `domain` are keys, in which `{split}`
    stands for `train` and `test`. Keys without `{split}` name one pool, and the share `test_fraction` of it (stratified
    by the first task and the domain) becomes the test part. `domain_names` is the key of an array of names; without
    it, domains are named by their numbers.

    `signal` says what an input is. image: N x H x W, N x H x W x C or N x C x H x W (C = 1 or 3), uint8 or floating
    point; it becomes N x C x H x W. series: N x channels x steps, or N x steps. features: N x F. tokens: N x T whole
    numbers, with a vocabulary and a padding if need be (`{kind: tokens, vocabulary: 5000, padding: 0}`); they stay as
    they are. By default N x F is features, four axes are images, and N x A x B is grey images where A = B, or where it
    is uint8 and neither side is four times the other; anything else has to be said.

    Uint8 is scaled to 0..1 per batch, other numbers become float32. All but tokens are normalised per channel (per
    feature) by the mean and standard deviation of the train part. `size` resizes images bilinearly to size x size;
    `channels: 1` makes them grey (ITU-R BT.601 luma), `channels: 3` repeats grey ones. `limit` keeps that many random
    examples of each part.

    Labels: N integers from 0; -1 means unlabelled. `classes` (task -> number) defaults to the largest label plus one.

    `dense` (task -> kind, key and more) takes the place of `labels`. Images are then uint8 and normalised with
    ImageNet's mean and standard deviation; grey ones are repeated. Label images have the images' height and width:
    semseg and human_parts are classes (255 or -1 = ignore); saliency and edge are 0, 1 and 255 (ignore), or shares
    with a `threshold`; depth times `factor` is metres, 0 = no value; normals are N x H x W x 3 or N x 3 x H x W,
    x right, y up, z towards the viewer, zero = no value. In training, images are changed as `augment` says and cropped
    to `crop` (height, width; default: whole); in evaluation, they are padded so that `multiple` divides their sides.

    Of a .csv file, `images` names the columns of the features, "a,b,c"; labels and domains may be texts, numbered in
    their sorted order, and `domain_names` is then the domain's own column.

    Arrays in a folder stay on disk and are read batch by batch, unless a split, `size`, `channels`, `limit` or a
    conversion to float32 makes a copy. Raises DataError for anything absent or inconsistent, naming the key.
    """
    from fedloom.data.dataset import Dataset
    from fedloom.models.tasks.classification import Classification

    if dense is not None:
        beside = {"labels": labels, "classes": classes, "size": size, "channels": channels, "signal": signal}
        for what, value in beside.items():
            if value is not None:
                raise RecipeError(f"arrays: {what} has no use beside dense")
    labels = {} if dense is not None else labels or {"label": "y_{split}"}
    dense, classes = dense or {}, classes or {}
    keys = [images, *labels.values(), *(label.key for label in dense.values()), *([domain] if domain else [])]
    names_of_parts = splits("arrays", keys, test_fraction)
    if domain_names is not None and domain is None:
        raise RecipeError("arrays: domain_names needs domain")
    for task in classes:
        if task not in labels:
            raise RecipeError(f"arrays: classes names the unknown task {task!r}.{nearest(task, labels)}")

    with Store(Path(path).expanduser()) as store:
        where = f"arrays, {store.path}"
        parts = [_read(store, split, images, labels, dense, domain) for split in names_of_parts]
        names = store.names(domain_names) if domain_names is not None else None
    if test_fraction is not None:
        test = stratified(parts[0].strata(), test_fraction, seed)
        if not test.any():
            raise DataError(f"{where}: no class has two examples, so no test part can be split off")
        parts = [parts[0].take(~test), parts[0].take(test)]
    counts = {task: _classes(where, task, parts, classes) for task in labels}
    with at(where):
        tasks = tuple(Classification(task, count) for task, count in counts.items())
    names = _number_domains(where, parts, names)
    for number, split in enumerate(SPLITS):
        kept = subset(len(parts[number].inputs), limit, seed, split)
        if kept is not None:
            parts[number] = parts[number].take(kept)
    if dense:
        from fedloom.data.dense_arrays import build

        return Dataset(store.path.stem, *build(where, dense, parts, resolve(augment), crop, multiple), names)
    train, test_part, said = _examples(where, parts, stated(signal), size, channels)
    return Dataset(store.path.stem, tasks, train, test_part, names, signal=said)


def _read(
    store: Store,
    split: str,
    images: str,
    labels: Mapping[str, str],
    dense: Mapping[str, DenseLabel],
    domain: str | None,
) -> ArrayPart:
    """One part, or the pool: its keys looked up and checked."""
    where, key = f"arrays, {store.path}", images.replace("{split}", split)
    inputs = store.read(key)
    if not inputs.size:
        raise DataError(f"{where}: {key!r} is empty, its shape is {inputs.shape}")
    columns = {}
    for task, pattern in labels.items():
        column = columns[task] = store.integers(pattern.replace("{split}", split), len(inputs), key)
        if column.min() < -1:
            raise DataError(
                f"{where}, task {task!r}: expected labels from 0, or -1 for unlabelled, found {column.min()}"
            )
    places = None if domain is None else store.integers(domain.replace("{split}", split), len(inputs), key)
    for task, label in dense.items():
        from fedloom.data.dense_arrays import decode

        name = label.key.replace("{split}", split)
        array = store.read(name)
        if len(array) != len(inputs):
            raise DataError(f"{where}: expected as many {name!r} as {key!r}, {len(inputs)}, found {len(array)}")
        columns[task] = decode(array, label, f"{where}, {name!r}")
    return ArrayPart(key, inputs, columns, places)


def _examples(
    where: str, parts: Sequence[ArrayPart], signal: Signal | None, size: int | None, channels: int | None
) -> tuple[TensorExamples, TensorExamples, Signal]:
    """The train and the test part, both normalised by the train part's statistics unless they are tokens."""
    import torch

    from fedloom.data.dataset import TensorExamples

    for part in parts:  # what the first part is, the other one is, too
        signal = signal_of(part.inputs, signal, f"{where}, {part.key!r}")
    assert signal is not None
    inputs = [as_inputs(part.inputs, signal, size, channels, f"{where}, {part.key!r}") for part in parts]
    if inputs[0].shape[1:] != inputs[1].shape[1:] or inputs[0].dtype != inputs[1].dtype:
        found = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in inputs)
        raise DataError(f"{where}: expected train and test inputs of one shape and type, found {found}")
    normal: tuple[Any, ...] = ()
    if signal.kind == "tokens":
        signal = with_vocabulary(signal, inputs, where)
    else:
        statistics = [channel_statistics(x) for x in inputs]
        for part, (mean, std) in zip(parts, statistics, strict=True):
            if not np.isfinite([*mean, *std]).all():
                raise DataError(f"{where}, {part.key!r}: expected finite inputs, found NaN or infinity")
        normal = statistics[0]
    train, test = (
        TensorExamples(
            x,
            {task: torch.from_numpy(values) for task, values in part.labels.items()},
            None if part.domain is None else torch.from_numpy(part.domain),
            *normal,
        )
        for x, part in zip(inputs, parts, strict=True)
    )
    return train, test, signal


def _classes(where: str, task: str, parts: Sequence[ArrayPart], stated: Mapping[str, int]) -> int:
    """The number of classes of a task: as stated, or the largest label plus one."""
    largest = max(int(part.labels[task].max()) for part in parts)
    if largest < 0:
        raise DataError(f"{where}, task {task!r}: no example is labelled")
    if largest >= stated.get(task, largest + 1):
        raise DataError(f"{where}, task {task!r}: expected labels below {stated[task]}, found {largest}")
    return stated.get(task, largest + 1)


def _number_domains(where: str, parts: Sequence[ArrayPart], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Check the domains against their names; without names, number the values that occur and name them so."""
    columns = [part.domain for part in parts if part.domain is not None]
    if not columns:
        return ()
    values = np.unique(np.concatenate(columns))
    if names is None:
        for part, column in zip(parts, columns, strict=True):
            part.domain = np.searchsorted(values, column)
        return tuple(map(str, values.tolist()))
    wrong = values[(values < 0) | (values >= len(names))]
    if len(wrong):
        raise DataError(f"{where}: expected domains in 0..{len(names) - 1}, found {wrong[0]}")
    return names
