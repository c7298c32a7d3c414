"""Many tasks side by side: several labelled image sets, or views of one, in a single shape.

Unlike those of `several`, batches may mix the sets, so that a client may hold any group of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, nearest
from fedloom.core.settings.section import Count
from fedloom.data.digits import LABELS, DigitDomain, originals, render
from fedloom.data.prepare import SPLITS, Array, TestFraction, channel_statistics, stratified, subset
from fedloom.data.registry import DATASETS
from fedloom.data.several import Sets, load

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, Examples, TensorExamples
    from fedloom.data.mixed import Inputs

Group = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
Columns = dict[str, Array]
"""Task -> labels of a set's examples."""

RENDERINGS: tuple[DigitDomain, ...] = ("plain", "inverted", "noisy", "thickened", "textured")
QUESTIONS: dict[str, tuple[int, ...]] = {
    **LABELS,
    "remainder": (0, 1, 2) * 3 + (0,),
    "prime": (0, 0, 1, 1, 0, 1, 0, 1, 0, 0),
}
"""What each question calls the digits 0..9."""


@DATASETS.register("many", source="MaTU, section 4: one classification task per data set")
def many(
    seed: int,
    *,
    sets: Sets,
    root: str | None = None,
    size: Annotated[int, Field(ge=8)] = 32,
    channels: Literal[1, 3] = 3,
    limit: Count | None = None,
    by_domain: list[str] = [],  # noqa: B006
    classes: dict[str, dict[str, Group]] = {},  # noqa: B006
) -> Dataset:
    """Labelled image sets as tasks of one data set: {name: {name: a data set, its parameters}}.

    A set's task has the set's name, or NAME-TASK where the set has several. An example has labels of its own set only
    and -1 for all other tasks. A set named in `by_domain` becomes one task per domain, NAME-DOMAIN; one in `classes`,
    {set: {group: [classes]}}, becomes one task per group of classes, NAME-GROUP, with the classes numbered from 0 as
    listed. Groups of a set are disjoint, and examples of no group are left out.

    All images come in one shape, uint8, `channels` x size x size. `size`, `channels` and `limit` (the number of
    random examples kept of each part of each set) go to every set that takes such a parameter and does not state it
    itself; a relative `path` starts from `root`. A batch may mix sets: each example is normalised per channel by the
    mean and standard deviation of its own set's train part.

    The sets are the domains and lie one after another. Raises DataError where a set holds no such images in memory or a
    task has no example in a part, and RecipeError where `by_domain` or `classes` do not fit the sets.
    """
    import torch

    from fedloom.data.mixed import TensorInputs

    for what, named in {"by_domain": by_domain, "classes": classes}.items():
        for name in named:
            if name not in sets:
                raise RecipeError(f"many: {what} names the unknown set {name!r}.{nearest(name, sets)}")
    common = {"size": size, "channels": channels, "limit": limit}
    columns: dict[str, list[Columns]] = {"train": [], "test": []}
    images: dict[str, list[Tensor]] = {"train": [], "test": []}
    statistics = []
    counts: dict[str, int] = {}
    for name, section in sets.items():
        dataset = load(seed, section, root, common)
        for split, examples in (("train", dataset.train), ("test", dataset.test)):
            part = _images(name, examples, (channels, size, size))
            found = _columns(name, dataset, part, name in by_domain, classes.get(name, {}))
            kept = np.any([labels >= 0 for labels in found.values()], axis=0)
            columns[split].append({task: labels[kept] for task, labels in found.items()})
            images[split].append(part.images if kept.all() else part.images[torch.from_numpy(np.flatnonzero(kept))])
        statistics.append(channel_statistics(images["train"][-1]))
        counts |= _counts(name, dataset, name in by_domain, classes.get(name, {}))
    sources = {split: TensorInputs(torch.cat(parts)) for split, parts in images.items()}
    return joined("many", columns, sources, tuple(sets), *_table(statistics), counts)


@DATASETS.register("digits-many", source="Alpaydin and Kaynak (1998), UCI; the test part that scikit-learn bundles")
def digits_many(
    seed: int,
    *,
    count: Annotated[int, Field(ge=1, le=len(RENDERINGS) * len(QUESTIONS))] = 8,
    size: Annotated[int, Field(ge=8, le=64)] = 16,
    limit: Count | None = None,
    test_fraction: TestFraction = 0.2,
) -> Dataset:
    """Up to 30 tasks on scikit-learn's handwritten digits, in the form of `many`: one label per example.

    A task RENDERING-QUESTION asks one question about digits in one rendering. Renderings are the domains of `digits`:
    plain, inverted, noisy, thickened, textured. Questions are its tasks, digit (10 classes), parity, large and holes
    (3), and remainder (of a division by three, 3) and prime. The first `count` tasks are taken in an order that goes
    round the renderings while the questions shift, so that tasks are related by the one or the other.

    Every task has its own `limit` random images (by default all 1,438) for training and all 359 for testing; an image
    that trains one task tests none. Images are uint8, 1 x size x size, normalised by the statistics of their rendering.
    """
    import torch

    from fedloom.data.mixed import TensorInputs

    pictures, digit = originals(size)
    test = stratified(digit, test_fraction, seed)
    kinds = list(QUESTIONS)
    rounds = [divmod(k, len(RENDERINGS)) for k in range(count)]
    chosen = [(number, kinds[(number + turn) % len(kinds)]) for turn, number in rounds]
    columns: dict[str, list[Columns]] = {"train": [], "test": []}
    images: dict[str, list[Tensor]] = {"train": [], "test": []}
    names = RENDERINGS[:count]
    for number, rendering in enumerate(names):
        rendered = render(pictures, rendering, seed).mul(255).round().to(torch.uint8)
        questions = [q for n, q in chosen if n == number]
        for split, mask in (("train", ~test), ("test", test)):
            pool = np.flatnonzero(mask)
            drawn = []
            for question in questions:
                kept = subset(len(pool), limit, seed, f"{rendering}-{question}") if split == "train" else None
                drawn.append(pool if kept is None else pool[kept])
            asked = np.repeat(np.arange(len(questions)), [len(d) for d in drawn])
            answers = [np.asarray(QUESTIONS[q])[digit[np.concatenate(drawn)]] for q in questions]
            columns[split].append(
                {f"{rendering}-{q}": np.where(asked == i, answers[i], -1) for i, q in enumerate(questions)}
            )
            images[split].append(rendered[torch.from_numpy(np.concatenate(drawn))])
    sources = {split: TensorInputs(torch.cat(parts)) for split, parts in images.items()}
    counts = {f"{RENDERINGS[n]}-{q}": max(QUESTIONS[q]) + 1 for n, q in chosen}
    statistics = [channel_statistics(x) for x in images["train"]]
    return joined("digits-many", columns, sources, tuple(names), *_table(statistics), counts)


def joined(
    name: str,
    columns: Mapping[str, list[Columns]],
    sources: Mapping[str, Inputs],
    domains: tuple[str, ...],
    mean: Tensor,
    std: Tensor,
    classes: Mapping[str, int],
) -> Dataset:
    """A data set of sets that lie one after another: {split: per set, {task: labels}} and {split: inputs}.

    A task has as many classes as `classes` says, or else its largest label. DataError where a task has no label in a
    part.
    """
    from fedloom.data.dataset import Dataset
    from fedloom.data.mixed import MixedExamples, blocks
    from fedloom.models.tasks.classification import Classification

    tasks: dict[str, Classification] = {}
    for number, domain in enumerate(domains):
        both = [columns[split][number] for split in SPLITS]
        for task in both[0]:
            highest = [int(part[task].max(initial=-1)) for part in both]
            for split, value in zip(SPLITS, highest, strict=True):
                if value < 0:
                    raise DataError(f"{name}, set {domain!r}: no {split} example has a label of task {task!r}")
            if task in tasks:
                raise DataError(f"{name}, set {domain!r}: there is another task called {task!r}")
            tasks[task] = Classification(task, classes.get(task, max(highest) + 1))
    train, test = (MixedExamples(sources[s], *blocks(columns[s]), mean, std) for s in SPLITS)
    return Dataset(name, tuple(tasks.values()), train, test, domains)


def _table(statistics: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> tuple[Tensor, Tensor]:
    """Means and standard deviations (sets x C)."""
    import torch

    mean, std = zip(*statistics, strict=True)
    return torch.tensor(mean), torch.tensor(std)


def _images(name: str, part: Examples, shape: tuple[int, ...]) -> TensorExamples:
    """The part, if it holds uint8 images of `shape` in memory; DataError otherwise."""
    import torch

    from fedloom.data.dataset import TensorExamples

    expected = f"many, set {name!r}: expected uint8 images {' x '.join(map(str, shape))} in memory"
    if not isinstance(part, TensorExamples):
        raise DataError(f"{expected}, found another kind of data set")
    if part.images.dtype != torch.uint8 or part.input_shape != shape:
        found = " x ".join(map(str, part.input_shape))
        raise DataError(f"{expected}, found {part.images.dtype} {found}; see size and channels")
    return part


def _columns(
    name: str, dataset: Dataset, part: TensorExamples, by_domain: bool, groups: Mapping[str, list[int]]
) -> Columns:
    """Task -> labels of all examples of one part of a set, -1 where the example is not of the task."""
    own = [task.name for task in dataset.tasks]
    if not (by_domain or groups):
        return {name if len(own) == 1 else f"{name}-{task}": part.labels_of(task) for task in own}
    if len(own) > 1 or (by_domain and groups):
        raise RecipeError(
            f"many, set {name!r}: by_domain or classes can cut one task into several, found {', '.join(own)}"
            + (", and both are given" if by_domain and groups else "")
        )
    labels = part.labels_of(own[0])
    if by_domain:
        if part.domain is None:
            raise RecipeError(f"many: by_domain names set {name!r}, which has no domains")
        domain = part.domain.numpy()
        return {
            f"{name}-{_identifier(d)}": np.where(domain == number, labels, -1)
            for number, d in enumerate(dataset.domains)
        }
    listed = [value for group in groups.values() for value in group]
    total = dataset.tasks[0].channels
    for value in listed:
        if value >= total or listed.count(value) > 1:
            what = f"class {value} twice" if value < total else f"class {value} of 0..{total - 1}"
            raise RecipeError(f"many: classes.{name} names {what}")
    found = {}
    for group, values in groups.items():
        numbers = np.full(total + 1, -1)  # the last one is for label -1
        numbers[values] = np.arange(len(values))
        found[f"{name}-{group}"] = numbers[labels]
    return found


def _counts(name: str, dataset: Dataset, by_domain: bool, groups: Mapping[str, list[int]]) -> dict[str, int]:
    """How many classes the tasks of a set have, as far as that does not depend on the examples of a domain."""
    if groups:
        return {f"{name}-{group}": len(values) for group, values in groups.items()}
    own = {task.name: task.channels for task in dataset.tasks}
    return {} if by_domain else {name if len(own) == 1 else f"{name}-{task}": n for task, n in own.items()}


def _identifier(name: str) -> str:
    """A name as a task may have it: each run of other characters becomes '_'."""
    return re.sub(r"[^A-Za-z0-9-]+", "_", name).strip("_")
