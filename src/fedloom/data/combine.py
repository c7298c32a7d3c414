"""Data sets made of others: side by side, as tasks, as domains, or as features of a frozen encoder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from fedloom.core.errors import DataError, RecipeError, nearest
from fedloom.core.settings.registry import Registered
from fedloom.core.settings.section import Count
from fedloom.data import prepare
from fedloom.data.prepare import DATASETS, SPLITS, Array, Part
from fedloom.models.encoders import ENCODERS
from fedloom.models.signal import sized

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, Examples
    from fedloom.models.nets import Encoder
    from fedloom.models.tasks.task import Task

TASK = "label"
Columns = Mapping[str, Array]
"""Task -> labels of a set's examples."""
Pieces = dict[str, list[tuple["Tensor", Array, Array]]]
"""`train` and `test` -> images (n x 3 x H x W, uint8), their labels (n) and their domains' numbers (n), by piece."""
Make = Callable[[str, list[Any], dict[str, "Tensor"], "Tensor"], "Examples"] | None
"""(split, each set's inputs, labels per task (N, int16, -1 outside the task's set), domain (N)) -> the examples."""
Group = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
Pad = Annotated[int, Field(ge=0, le=32)]
Side = Annotated[int, Field(ge=8)]


def loaded(entry: Registered, seed: int, params: Mapping[str, Any]) -> Dataset:
    """Make the data set that a function of the registry gives, or a Federation has. RecipeError for anything else."""
    from fedloom.data.dataset import Dataset

    built = entry.make(seed, **params)
    built = getattr(built, "dataset", built)
    if not isinstance(built, Dataset):
        expected = "a fedloom.Federation or a fedloom.data.Dataset"
        raise RecipeError(f"data: {entry.name} gives {type(built).__name__}, expected {expected}")
    return built


@DATASETS.register("nodes")
def nodes(seed: int) -> Dataset:
    """Leave the data at the nodes of a deployment; the node.yaml of each says where they are (docs/flower.md)."""
    prepare.at_nodes()


def _joined(sets: Mapping[str, Dataset], groups: Sequence[tuple[Array | None, int]]) -> dict[str, Any]:
    """Return what a data set made of sets has of all: their doubts and groups, and what each seed draws anew."""
    doubts = tuple(f"set {name!r}: {doubt}" for name, dataset in sets.items() for doubt in dataset.doubts)
    redrawn = any(dataset.redrawn for dataset in sets.values())
    drawn_from = sum(dataset.drawn_from or len(dataset.train) for dataset in sets.values())
    return {"redrawn": redrawn, "drawn_from": drawn_from, "doubts": doubts, "group": prepare.joined_groups(groups)}


def _check(sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sections, each of which must name a data set and fit its parameters."""
    for name, section in sets.items():
        try:
            DATASETS.fits(section)
        except ValueError as error:
            raise ValueError(f"set {name!r}: {error}") from None
    return sets


Sets = Annotated[dict[str, dict[str, Any]], Field(min_length=1), AfterValidator(_check)]


def load(
    seed: int, section: Mapping[str, Any], root: str | None = None, common: Mapping[str, Any] = MappingProxyType({})
) -> Dataset:
    """Make the data set of one section, with the common parameters that it takes and does not state. A relative `path`
    starts from `root`."""
    entry = DATASETS[section["name"]]
    given = {key: value for key, value in common.items() if key in entry.params.model_fields}
    given.update((key, value) for key, value in section.items() if key != "name")
    if root is not None and "path" in given:
        given["path"] = str(Path(root, given["path"]))  # an absolute path stays as it is
    return loaded(entry, seed, dict(entry.params.model_validate(given)))


def of_classes(
    name: str,
    counts: Mapping[str, int],
    parts: Sequence[Part],
    normal: Sequence[Any] = (),
    domains: tuple[str, ...] = (),
    **more: Any,
) -> Dataset:
    """Make a data set of classification tasks (name -> number of classes) of a train and a test part in memory.
    `normal` is what inputs are normalised with: mean and standard deviation, or nothing. `more` goes to `Dataset`."""
    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.labels import Classification

    tasks = tuple(Classification(task, count) for task, count in counts.items())
    train, test = (TensorExamples(part.inputs, *part.tensors(), *normal) for part in parts)
    return Dataset(name, tasks, train, test, domains, **more)


def combine(
    name: str, sets: Mapping[str, Mapping[str, tuple[Columns, Any]]], classes: Mapping[str, int], make: Make = None
) -> Dataset:
    """Join sets one after another, each with tasks of its own: name -> split -> ({task: labels}, inputs).

    The sets are its domains. By default, examples are images in memory, each set normalised by its own train part. A
    task has as many classes as `classes` says, or else its largest label. DataError where one has no label in a part.
    """
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.labels import Classification

    tasks: dict[str, Task] = {}
    for domain, both in sets.items():
        for task in both["train"][0]:
            highest = [int(both[split][0][task].max(initial=-1)) for split in SPLITS]
            if min(highest) < 0:
                split = SPLITS[highest.index(min(highest))]
                raise DataError(f"{name}, set {domain!r}: no {split} example has a label of task {task!r}")
            if task in tasks:
                raise DataError(f"{name}, set {domain!r}: another task has the name {task!r} too")
            tasks[task] = Classification(task, classes.get(task, max(highest) + 1))
    if make is None:
        statistics = [prepare.channel_statistics(both["train"][1]) for both in sets.values()]
        mean, std = (torch.tensor(table) for table in zip(*statistics, strict=True))

    def joined(split: str) -> Examples:
        columns, inputs = map(list, zip(*(both[split] for both in sets.values()), strict=True))
        lengths = [len(next(iter(part.values()))) for part in columns]
        labels = {}
        for task in tasks:
            pieces = [part.get(task, np.full(n, -1)) for part, n in zip(columns, lengths, strict=True)]
            labels[task] = torch.from_numpy(np.concatenate(pieces).astype(np.int16))
        domain = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        if make is not None:
            return make(split, inputs, labels, domain)
        return TensorExamples(torch.cat(inputs), labels, domain, mean, std)

    return Dataset(name, tuple(tasks.values()), joined("train"), joined("test"), tuple(sets))


def pictures(name: str, parts: Pieces, domains: tuple[str, ...], classes: int, pad: int, flip: bool) -> Dataset:
    """Make a data set of one task, `label`, cropped and mirrored at random for training. DataError where a domain has
    no example in a part."""
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples, label_bytes
    from fedloom.data.transforms import MEAN, STD, Crop
    from fedloom.models.tasks.labels import Classification

    ready = []
    for split in SPLITS:
        images, *both = zip(*parts[split], strict=True)
        label, domain = (torch.from_numpy(np.concatenate(column).astype(np.int64)) for column in both)
        for number, missing in enumerate(torch.bincount(domain, minlength=len(domains)) == 0):
            if missing:
                raise DataError(f"{name}: domain {domains[number]!r} has no {split} example")
        change = Crop(pad, flip) if split == "train" else Crop(0, False)
        mark = label_bytes({TASK: label}) + label_bytes({TASK: domain})
        ready.append(TensorExamples(torch.cat(images), {TASK: label}, domain, MEAN, STD, change, mark=mark))
    return Dataset(name, (Classification(TASK, classes),), ready[0], ready[1], domains)


@DATASETS.register("several")
def several(seed: int, *, sets: Sets) -> Dataset:
    """Train on several data sets together: {name: {name: a data set, its parameters}}.

    The tasks of a set are called NAME-TASK, for equal tasks of two sets differ in classes and cameras; the set's name
    is the domain of its examples. A client holds examples of one set (partition single-and-multi or domains).

    Raises DataError where the shapes of inputs have different numbers of channels or a set has domains of its own.
    """
    from fedloom.data.dataset import Dataset, JoinedExamples

    built = {name: load(seed, section) for name, section in sets.items()}
    for name, d in built.items():
        if len(d.domains) > 1:
            has = ", ".join(d.domains)
            raise DataError(f"several: expected sets without domains, but set {name!r} has the domains ({has})")
    channels = {name: d.input_shape[0] for name, d in built.items()}
    if len(set(channels.values())) > 1:
        raise DataError(f"several: expected inputs with the same number of channels, found {channels}")
    signals = {d.signal for d in built.values()}
    if len(signals) > 1:
        listed = ", ".join(f"{name!r} has {sized(d.input_shape, d.signal)}" for name, d in built.items())
        raise DataError(f"several: expected inputs of one kind, found {listed}")
    own = {name: tuple(task.name for task in d.tasks) for name, d in built.items()}
    train, test = (JoinedExamples({name: getattr(d, split) for name, d in built.items()}, own) for split in SPLITS)
    tasks = tuple(replace(task, name=f"{name}-{task.name}") for name, d in built.items() for task in d.tasks)
    classes = {f"{name}-{task}": names for name, d in built.items() for task, names in d.classes.items()}
    more = _joined(built, [(d.group, len(d.train)) for d in built.values()])
    return Dataset("several", tasks, train, test, tuple(built), classes=classes, signal=signals.pop(), **more)


@DATASETS.register("many", source="MaTU, section 4: one classification task per data set")
def many(
    seed: int,
    *,
    sets: Sets,
    root: str | None = None,
    size: Side = 32,
    channels: Literal[1, 3] = 3,
    limit: Count | None = None,
    by_domain: list[str] = [],  # noqa: B006
    classes: dict[str, dict[str, Group]] = {},  # noqa: B006
) -> Dataset:
    """Join labelled image sets as tasks of one data set: {name: {name: a data set, its parameters}}.

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

    for what, named in {"by_domain": by_domain, "classes": classes}.items():
        for name in named:
            if name not in sets:
                hint = nearest(name, sets)
                raise RecipeError(f"many: {what} names the set {name!r}, which sets does not list.{hint}")
    pieces: dict[str, dict[str, tuple[Columns, Tensor]]] = {}
    counts: dict[str, int] = {}
    groups: list[tuple[Array | None, int]] = []
    common = {"size": size, "channels": channels, "limit": limit}
    built = {name: load(seed, section, root, common) for name, section in sets.items()}
    for name, dataset in built.items():
        pieces[name] = {}
        labels, known = _labels(name, dataset, name in by_domain, classes.get(name, {}))
        counts |= known
        for split, columns in labels.items():
            x = _images(f"many, set {name!r}", getattr(dataset, split), (channels,), size, "uint8 ")
            kept = np.flatnonzero(np.any([column >= 0 for column in columns.values()], axis=0))
            x = x if len(kept) == len(x) else x[torch.from_numpy(kept)]
            groups += [(None if dataset.group is None else dataset.group[kept], len(kept))] * (split == "train")
            pieces[name][split] = {task: column[kept] for task, column in columns.items()}, x
    return replace(combine("many", pieces, counts), **_joined(built, groups))


def _labels(
    name: str, dataset: Dataset, by_domain: bool, groups: Mapping[str, list[int]]
) -> tuple[dict[str, dict[str, Array]], dict[str, int]]:
    """Return {split: {task: labels}} of a set, -1 for examples not of the task, and task -> its number of classes. The
    tasks are the set's own, or views of its only task, whose classes may not be known before."""
    parts: dict[str, Examples] = {split: getattr(dataset, split) for split in SPLITS}
    own = {task.name: task.channels for task in dataset.tasks}
    if not (by_domain or groups):
        called = {task: name if len(own) == 1 else f"{name}-{task}" for task in own}
        labels = {split: {called[task]: part.labels_of(task) for task in own} for split, part in parts.items()}
        return labels, {called[task]: count for task, count in own.items()}
    if len(own) > 1 or (by_domain and groups):
        found = ", ".join(own) + (", and both of them" if by_domain and groups else "")
        only = "by_domain and classes can split only a data set with one task"
        raise RecipeError(f"many, set {name!r}: {only}, found {found}")
    ((task, total),) = own.items()
    whole = {split: part.labels_of(task) for split, part in parts.items()}
    if by_domain:
        if dataset.train.domain is None:
            raise RecipeError(f"many: by_domain names set {name!r}, which has no domains")
        # A name as a task may have it: each run of other characters becomes '_'.
        names = [f"{name}-{re.sub(r'[^A-Za-z0-9-]+', '_', domain).strip('_')}" for domain in dataset.domains]
        labels = {}
        for split, part in parts.items():
            origin = np.asarray(part.domain)
            labels[split] = {each: np.where(origin == i, whole[split], -1) for i, each in enumerate(names)}
        return labels, {}
    listed = [value for group in groups.values() for value in group]
    for value in listed:
        if value >= total or listed.count(value) > 1:
            what = f"class {value} twice" if value < total else f"class {value} of 0..{total - 1}"
            raise RecipeError(f"many: classes.{name} names {what}")
    labels = {split: {} for split in SPLITS}
    for group, values in groups.items():
        numbers = np.full(total + 1, -1)  # the last one is for label -1
        numbers[values] = np.arange(len(values))
        for split in SPLITS:
            labels[split][f"{name}-{group}"] = numbers[whole[split]]
    return labels, {f"{name}-{group}": len(values) for group, values in groups.items()}


def _images(where: str, examples: Examples, channels: Sequence[int], size: int, kind: str = "") -> Tensor:
    """Return images in memory, channels x size x size; DataError for anything else."""
    import torch

    from fedloom.data.dataset import TensorExamples

    expected = f"{where}: expected {kind}images {' or '.join(map(str, channels))} x {size} x {size} in memory"
    # What a change makes of raw images would be lost here, except for crops, which joined domains have themselves.
    if not isinstance(examples, TensorExamples) or len(examples.images.shape) != 4 or (kind and examples.change):
        raise DataError(f"{expected}, found another kind of data set")
    x = examples.images
    if x.shape[1] not in channels or x.shape[2:] != (size, size) or (kind and x.dtype != torch.uint8):
        raise DataError(f"{expected}, found {x.dtype} {' x '.join(map(str, x.shape[1:]))}; see size and channels")
    return x


@DATASETS.register("joined-domains", source="F2DC, section 5.1 and release: domains of one classification task")
def joined_domains(
    seed: int, *, sets: Sets, root: str | None = None, size: Side = 32, pad: Pad = 4, flip: bool = True
) -> Dataset:
    """Join sets of the same classes as domains of one task, `label`: {domain: {name: a data set, its parameters}}.

    A set that has several domains of its own keeps them, by their own names; any other set is one domain, by its name
    here. Each set has one task, and all have the same number of classes. Images become colour, `size` x `size`, uint8:
    `size` and `channels: 3` go to every set that takes such a parameter and does not state it, and a relative `path`
    starts from `root`. Floating-point images must lie in 0..1.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2; they are always normalised by ImageNet's mean and standard deviation. Raises DataError where sets
    do not fit together or a name of a domain occurs twice.
    """
    import torch

    parts: Pieces = {split: [] for split in SPLITS}
    domains: list[str] = []
    classes: dict[str, int] = {}
    every = {name: load(seed, section, root, {"size": size, "channels": 3}) for name, section in sets.items()}
    for name, built in every.items():
        where = f"joined-domains, set {name!r}"
        if len(built.tasks) != 1:
            raise DataError(f"{where}: expected one task, found {', '.join(task.name for task in built.tasks)}")
        (task,) = built.tasks
        if task.dense:
            raise DataError(f"{where}: expected a task with one class per image, found the dense task {task.name!r}")
        classes[name] = task.channels
        own = built.domains if len(built.domains) > 1 else (name,)
        for domain in own:
            if domain in domains:
                raise DataError(f"{where}: another domain has the name {domain!r} too")
        for split in SPLITS:
            examples: Examples = getattr(built, split)
            x = _images(where, examples, (1, 3), size)
            if x.dtype != torch.uint8:
                low, high = float(x.min()), float(x.max())
                if not (low >= 0 and high <= 1):
                    raise DataError(f"{where}: expected uint8 images or values in 0..1, found {low:g}..{high:g}")
                x = x.mul(255).round().to(torch.uint8)
            numbers = np.full(len(examples), len(domains))
            if len(own) > 1 and examples.domain is not None:
                numbers += examples.domain.numpy()
            parts[split].append((x.expand(-1, 3, -1, -1), examples.labels_of(task.name), numbers))
        domains += own
    if len(set(classes.values())) > 1:
        raise DataError(f"joined-domains: expected sets with the same number of classes, found {classes}")
    joined = pictures("joined-domains", parts, tuple(domains), next(iter(classes.values())), pad, flip)
    return replace(joined, **_joined(every, [(built.group, len(built.train)) for built in every.values()]))


BATCH = 128  # images that pass an encoder together
STATED = {"arrays", "digits", "digits-many", "many", "joined-domains"}
"""Data sets of classes that follow from their parameters, the seed and the files that `path` names."""
ROOT = Path(__file__).parents[1]


@DATASETS.register("embedded", source="the linear-probe protocol: features of an encoder that does not change")
def embedded(
    seed: int,
    *,
    of: Annotated[dict[str, Any], AfterValidator(DATASETS.fits)],
    encoder: Annotated[dict[str, Any], AfterValidator(ENCODERS.fits)],
    weights: str | None = None,
) -> Dataset:
    """Replace the inputs of the data set `of`, {name: a data set, its parameters}, by an encoder's features.

    `encoder` is {name: an encoder, its parameters}, for example {name: vit, architecture: tf_efficientnet_lite0,
    pretrained: true}; `weights` is a file with its weights, as of `model.weights`. An encoder with neither is drawn
    from the seed. It sees each input once, as evaluation does (nothing is augmented), normalised as its weights want
    it where that is known. Of an encoder with feature maps the features are the mean of the last one over positions.

    Features are N x F, float32, each scaled to mean 0 and deviation 1 over the train part. They are kept in
    FEDLOOM_CACHE, so that only the first run computes them. Raises DataError for dense tasks, which features without
    positions cannot answer, and for data sets whose inputs differ in shape.
    """
    import torch

    from fedloom.data.dataset import Dataset, Labelled, TensorExamples
    from fedloom.models.build import build_model

    def made(features: Callable[[Encoder, Examples], Tensor]) -> Dataset:
        """Load the data set and the encoder; return the data set with `features` as its inputs."""
        data = load(seed, of)
        if dense := [task.name for task in data.tasks if task.dense]:
            raise DataError(f"embedded: features have no positions, but the dense task {dense[0]!r} needs them")
        if not (isinstance(data.train, Labelled) and isinstance(data.test, Labelled)):
            raise DataError(f"embedded: data {data.name!r} has inputs of several shapes, expected one; see `many`")
        params = {key: value for key, value in encoder.items() if key != "name"}
        model = build_model(encoder["name"], params, data.input_shape, data.tasks, seed, weights, signal=data.signal)
        net = model.encoder.eval()

        def part(of: Any) -> Examples:
            x = features(net, of)
            labels = of.columns(torch.arange(len(x)), torch.device("cpu"), [task.name for task in data.tasks])
            return TensorExamples(x, labels, of.domain)

        both = part(data.train), part(data.test)
        more: dict[str, Any] = {key: getattr(data, key) for key in ("redrawn", "drawn_from", "doubts", "group")}
        return Dataset(f"embedded-{data.name}", data.tasks, *both, data.domains, data.deal, **more)

    place = _place(seed, of, encoder, weights)
    data = made(_kept) if place is None else _restored(prepare.kept(place, lambda: _stored(made(_features))))
    train: Any = data.train
    std, mean = torch.std_mean(train.images, 0, correction=0)

    def scaled(part: Any) -> Examples:
        return replace(part, images=(part.images - mean) / std.clamp(min=1e-6))

    return replace(data, train=scaled(data.train), test=scaled(data.test), reading=prepare.Reading(derived=True))


def _place(seed: int, of: Mapping[str, Any], encoder: Mapping[str, Any], weights: str | None) -> Path | None:
    """Return the folder of a data set's features, by what determines them. Nothing is decoded for that.

    These are the sections, the seed, the contents of the files that they name, the code and its versions. None where
    one of them is known only after loading.
    """
    import torch

    from fedloom.models.nets import pretrained_file

    files = _files(of)
    if files is None or ENCODERS[encoder["name"]].package:
        return None
    if weights is not None:
        files.append(Path(weights).expanduser())
    if encoder.get("pretrained"):
        files.append(pretrained_file(encoder["architecture"]))
    if not all(file.is_file() for file in files):
        return None  # loading says what is missing
    every = (file for room in ("data", "models") for file in (ROOT / room).rglob("*"))
    code = sorted(file for file in every if file.suffix in {".py", ".npz"})
    versions = [torch.__version__, *(package.version for package in metadata.distributions(name="timm"))]
    key = json.dumps([seed, of, encoder, versions, len(files)], default=str).encode()
    key += prepare.digest(files) + prepare.digest(code)
    return prepare.cache_folder() / "embedded" / hashlib.sha256(key).hexdigest()[:20]


def _files(section: Mapping[str, Any], root: str = "") -> list[Path] | None:
    """Return the files of which a data set in STATED is made; None for any other."""
    if section["name"] not in STATED:
        return None
    if "sets" in section:
        each = [_files(one, section.get("root") or "") for one in section["sets"].values()]
        return None if None in each else [file for files in each for file in files or ()]
    if "path" not in section:
        return []
    path = Path(root, section["path"]).expanduser()
    return sorted(path.glob("*.npy")) if path.is_dir() else [path]


def _stored(data: Dataset) -> dict[str, Array]:
    """Return a data set of features and classes as arrays; what is no array is JSON."""
    counts = {task.name: task.channels for task in data.tasks}
    about: dict[str, Any] = {"name": data.name, "tasks": [*counts.items()], "domains": data.domains}
    about |= {"redrawn": data.redrawn, "drawn_from": data.drawn_from, "doubts": data.doubts}
    arrays: dict[str, Array] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    if data.group is not None:
        arrays["group"] = np.unique(data.group, return_inverse=True)[1]
    for split in SPLITS:
        part: Any = getattr(data, split)
        arrays[f"{split}-features"] = part.images.numpy()
        arrays[f"{split}-labels"] = np.stack([part.labels[task].numpy() for task in counts])
        if part.domain is not None:
            arrays[f"{split}-domain"] = part.domain.numpy()
    return arrays


def _restored(arrays: Mapping[str, Array]) -> Dataset:
    """Return the data set that `_stored` made arrays of."""
    import torch

    about = json.loads(arrays["about"].tobytes())
    counts = dict(about["tasks"])
    parts = []
    for split in SPLITS:
        x, labels = torch.from_numpy(arrays[f"{split}-features"]), arrays[f"{split}-labels"]
        parts.append(Part(x, dict(zip(counts, labels, strict=True)), arrays.get(f"{split}-domain")))
    more = {"redrawn": about["redrawn"], "doubts": tuple(about["doubts"]), "group": arrays.get("group")}
    more |= {"drawn_from": about["drawn_from"]}
    return of_classes(about["name"], counts, parts, (), tuple(about["domains"]), **more)


def _features(net: Encoder, part: Examples) -> Tensor:
    """Compute the encoder's features of each input of a part, N x F."""
    import torch

    rows = []
    with torch.inference_mode():
        for index in torch.arange(len(part)).split(BATCH):
            out: Tensor | list[Tensor] = net(_seen(net, part, index))
            # Of feature maps, finest first, the last one tells most about the whole image.
            rows.append(out[-1].mean((2, 3)) if isinstance(out, list) else out)
    return torch.cat(rows)


def _kept(net: Encoder, part: Examples) -> Tensor:
    """Return the features, from the cache if it has those of this encoder, its weights and these inputs."""
    import torch

    from fedloom.data.dataset import contents, tensor_digest

    key = hashlib.sha256(repr(net).encode())
    for name, value in net.state_dict().items():
        key.update(name.encode() + tensor_digest(value))
    key.update(part.fingerprint() + contents(part))
    place = prepare.cache_folder() / "embedded" / key.hexdigest()[:20]
    return torch.from_numpy(prepare.kept(place, lambda: {"features": _features(net, part).numpy()})["features"])


def _seen(net: Encoder, part: Examples, index: Tensor) -> Tensor:
    """Return the inputs at `index`, normalised as the encoder's weights want it where that is known."""
    import torch

    from fedloom.data.dataset import normal

    x, _ = part.batch(index, torch.device("cpu"), None, ())
    if net.seen is None:
        return x
    if x.shape[1] != len(net.seen[0]):
        raise DataError(f"embedded: the encoder's weights are for {len(net.seen[0])} channels, found {x.shape[1]}")
    shape = (-1, x.shape[1], *(1,) * (x.ndim - 2))
    if (own := normal(part, index)) is not None:
        x = x * own[1].to(x).view(shape) + own[0].to(x).view(shape)
    mean, std = (torch.tensor(list(value)).view(shape) for value in net.seen)
    return (x - mean) / std
