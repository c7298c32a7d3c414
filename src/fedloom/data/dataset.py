"""Labelled examples, in memory or read when wanted, and a data set as a train and a test part; no federation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError, in_one_line
from fedloom.data.prepare import Array, Reading, digest
from fedloom.data.transforms import MEAN, STD, Crop, Dense
from fedloom.models.signal import Signal, inferred
from fedloom.models.tasks.task import IGNORE, Task

Batch = tuple[Tensor, dict[str, Tensor]]
"""Inputs (B x ...) and {task: labels (B x ...)}."""
Scale = Sequence[float] | Tensor | None
"""Numbers that inputs are normalised with: one per channel, or one row of them per domain; None: they are not."""
Rng = Generator | None
Tasks = Collection[str] | None
Read = Callable[[Tensor, torch.device, Generator | None, Collection[str]], Batch]
"""(positions, device, rng, tasks) -> inputs as models take them, and those labels that are read with them."""


class Examples(Protocol):
    """Examples that can be read in batches by index. `batch` may be called from another thread."""

    def __len__(self) -> int: ...

    @property
    def prefetch(self) -> bool:
        """Return whether batches are so slow to build that training should load them ahead."""

    @property
    def domain(self) -> Tensor | None:
        """The domain of each example (N integers), if it is known."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input in evaluation, without the batch dimension (C x H x W for images)."""

    @property
    def nbytes(self) -> int:
        """Bytes that inputs and labels occupy in memory (or in a mapped file)."""

    def fingerprint(self) -> bytes:
        """Return bytes that let a resumed run check that the labels are the same."""

    def batch(self, index: Tensor, device: torch.device, rng: Rng = None, tasks: Tasks = None) -> Batch:
        """Return inputs and labels at the given positions, of the given tasks (all if None). Training passes an `rng`:
        augmentations draw from it and from nothing else. Without it nothing is random."""

    def labels_of(self, task: str) -> Array:
        """Return one integer per example for partitioners and tables: the class, or 0 where the label is an image, -1
        where the example has no label of this task."""


class Labelled:
    """Labels and domains of examples. The base of the two kinds of examples, which differ in where their inputs are.

    labels      task -> N classes (whole numbers, -1 = no label), N real numbers (NaN = none), or N label images
    annotated   task -> N, bool: which examples have a label, for tasks whose labels are not classes
    mark        the fingerprint, where it is not all labels
    held        bytes of inputs in memory
    """

    labels: Mapping[str, Tensor]
    domain: Tensor | None
    annotated: Mapping[str, Array]
    mark: bytes | None
    held: Any

    @property
    def nbytes(self) -> int:
        """Bytes of inputs in memory and of labels."""
        return self.held + sum(labels.nbytes for labels in self.labels.values())

    def columns(self, index: Tensor, device: torch.device, tasks: Collection[str]) -> dict[str, Tensor]:
        """Return labels at `index` of the given tasks, on `device`. Classes that are stored as int16 become int64."""
        stored = {task: self.labels[task].index_select(0, index) for task in tasks}
        wide = {task: y.long() if y.dtype == torch.int16 else y for task, y in stored.items()}
        return {task: y.to(device, non_blocking=True) for task, y in wide.items()}

    def labels_of(self, task: str) -> Array:
        """Return the labels as they are stored, or 0 and -1 where `annotated` says which examples have one."""
        if task in self.annotated:
            return np.where(self.annotated[task], 0, -1)
        return np.asarray(self.labels[task].numpy())

    def fingerprint(self) -> bytes:
        """Return the mark, or all labels, task by task."""
        return label_bytes(self.labels) if self.mark is None else self.mark


def label_bytes(labels: Mapping[str, Tensor]) -> bytes:
    """Return all labels, task by task."""
    return b"".join(labels[task].numpy().tobytes() for task in sorted(labels))


def tensor_digest(tensor: Tensor) -> bytes:
    """Compute a checksum of a tensor's values."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


@dataclass(frozen=True, eq=False)
class TensorExamples(Labelled):
    """Examples in memory, or mapped from disk: inputs (N x ...) and labels per task.

    In a batch, uint8 is scaled to 0..1, and inputs are normalised by `mean` and `std`; a `change` does all of that
    itself. `checked` says whether a resumed run must find the same inputs. DataError where the number of a task's
    labels is not that of the inputs.
    """

    images: Tensor
    labels: Mapping[str, Tensor]
    domain: Tensor | None = None
    mean: Scale = None
    std: Scale = None
    change: Crop | Dense | None = None
    annotated: Mapping[str, Array] = field(default_factory=dict)
    mark: bytes | None = None
    checked: bool = True

    def __post_init__(self) -> None:
        for task, labels in self.labels.items():
            if len(labels) != len(self.images):
                raise DataError(f"task {task!r}: expected {len(self.images)} labels, found {len(labels)}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def prefetch(self) -> bool:
        """Return whether the change takes long."""
        return self.change is not None and self.change.slow

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        size = None if self.change is None else self.change.size
        return tuple(self.images.shape[1:]) if size is None else (self.images.shape[1], *size)

    @property
    def held(self) -> int:
        """Bytes of inputs."""
        return self.images.nbytes

    def contents(self) -> bytes:
        """Compute a checksum of all inputs, if they are checked."""
        return tensor_digest(self.images) if self.checked else b""

    def batch(self, index: Tensor, device: torch.device, rng: Rng = None, tasks: Tasks = None) -> Batch:
        """Return inputs and labels at `index`, on `device`."""
        x, chosen = self.images.index_select(0, index), self.labels if tasks is None else tasks
        if self.change is not None:
            return self.change(x, self.columns(index, x.device, chosen), device, rng)
        x = x.to(device, non_blocking=True)
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        if self.mean is not None and self.std is not None:
            x = (x - self._scale(self.mean, index, x)).div_(self._scale(self.std, index, x))
        return x, self.columns(index, device, chosen)

    def _scale(self, scale: Sequence[float] | Tensor, index: Tensor, x: Tensor) -> Tensor:
        """Return a mean or a standard deviation in a shape that fits the batch `x`."""
        values = torch.as_tensor(scale)
        if values.ndim == 2:
            assert self.domain is not None
            values = values.index_select(0, self.domain.index_select(0, index))
        return values.view(-1, values.shape[-1], *(1,) * (x.ndim - 2)).to(x.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ItemExamples(Labelled):
    """`count` examples whose inputs are read when they are wanted; `labels` are those that are not read with them.

    mean, std   what inputs are normalised with as they are read, so that pictures can be shown
    files       what is read, whose contents a resumed run must find unchanged
    """

    read: Read
    count: int
    input_shape: tuple[int, ...]
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    domain: Tensor | None = None
    mean: Scale = MEAN
    std: Scale = STD
    annotated: Mapping[str, Array] = field(default_factory=dict)
    mark: bytes | None = None
    prefetch: bool = True
    held: int = 0
    files: tuple[Path | str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def contents(self) -> bytes:
        """Compute a checksum of the files."""
        return digest(self.files) if self.files else b""

    def batch(self, index: Tensor, device: torch.device, rng: Rng = None, tasks: Tasks = None) -> Batch:
        """Return inputs and labels at `index`, on `device`."""
        chosen = dict.fromkeys([*self.labels, *self.annotated]) if tasks is None else tasks
        x, y = self.read(index, device, rng, [task for task in chosen if task not in self.labels])
        return x, {**y, **self.columns(index, device, [task for task in chosen if task in self.labels])}


@dataclass(frozen=True, eq=False)
class JoinedExamples:
    """The examples of `pieces` one after another, of any shapes. `tasks` has each piece's own task names, which are
    called PIECE-TASK here. A batch must come from one piece, since sizes and tasks differ."""

    pieces: Mapping[str, Examples]
    tasks: Mapping[str, tuple[str, ...]]

    @cached_property
    def domain(self) -> Tensor:
        """The piece, by position, from which each example comes (N)."""
        return torch.repeat_interleave(torch.tensor([len(piece) for piece in self.pieces.values()]))

    def __len__(self) -> int:
        return len(self.domain)

    @property
    def prefetch(self) -> bool:
        """Return whether any piece is slow enough to load ahead."""
        return any(piece.prefetch for piece in self.pieces.values())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input of the first piece; others may differ in height and width."""
        return next(iter(self.pieces.values())).input_shape

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces.values())

    def fingerprint(self) -> bytes:
        """Return the pieces' fingerprints with their names."""
        return b"".join(name.encode() + piece.fingerprint() for name, piece in self.pieces.items())

    def contents(self) -> bytes:
        """Return the pieces' checksums."""
        return b"".join(contents(piece) for piece in self.pieces.values())

    def batch(self, index: Tensor, device: torch.device, rng: Rng = None, tasks: Tasks = None) -> Batch:
        """Return inputs and labels of examples of one piece, of those tasks that it has."""
        name, piece, index = self.piece(index)
        own = [task for task in self.tasks[name] if tasks is None or f"{name}-{task}" in tasks]
        x, y = piece.batch(index, device, rng, None if tasks is None else own)
        return x, {f"{name}-{task}": labels for task, labels in y.items()}

    def piece(self, index: Tensor) -> tuple[str, Examples, Tensor]:
        """Return (name of the examples' piece, the piece, their positions in it); DataError for examples of several."""
        numbers = self.domain[index].unique().tolist()
        names = [list(self.pieces)[number] for number in numbers]
        if len(names) != 1:
            raise DataError(f"expected a batch of one data set, found {', '.join(names)}")
        return names[0], self.pieces[names[0]], index - int((self.domain < numbers[0]).sum())

    def apart(self, index: Tensor) -> list[Tensor]:
        """Return positions by piece."""
        domain = self.domain[index]
        return [index[domain == i] for i in domain.unique()]

    def labels_of(self, task: str) -> Array:
        """Return the labels where the example's piece has the task, -1 elsewhere."""
        columns = []
        for name, piece in self.pieces.items():
            own = task.removeprefix(f"{name}-")
            known = own != task and own in self.tasks[name]
            columns.append(piece.labels_of(own) if known else np.full(len(piece), -1))
        return np.concatenate(columns).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Behind:
    """Examples whose labels are not to be seen as they are (`changed`); all else is the examples' own."""

    examples: Examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getattr__(self, name: str) -> Any:
        if name == "examples" or name.startswith("__"):  # while it is unpickled, it has no examples yet
            raise AttributeError(name)
        return getattr(self.examples, name)

    def batch(self, index: Tensor, device: torch.device, rng: Rng = None, tasks: Tasks = None) -> Batch:
        """Return inputs and labels at `index`, on `device`."""
        x, y = self.examples.batch(index, device, rng, tasks)
        return x, {task: self.changed(task, labels, index) for task, labels in y.items()}

    def changed(self, task: str, labels: Tensor, index: Tensor) -> Tensor:
        """Return a batch's labels of a task as they are to be seen."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Withheld(Behind):
    """Examples of which only some labels are to be seen: task -> which examples (N, bool) keep their label of it."""

    kept: Mapping[str, Tensor]

    def changed(self, task: str, labels: Tensor, index: Tensor) -> Tensor:
        return without_label(labels, ~self.kept[task][index])

    def labels_of(self, task: str) -> Array:
        """Return -1 where the label is withheld, else the examples' (0 where that is no whole number)."""
        labels = self.examples.labels_of(task)
        whole = labels if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer) else np.zeros(len(labels), int)
        return np.where(self.kept[task].numpy(), whole, -1)


@dataclass(frozen=True, eq=False)
class Coded(Behind):
    """Examples whose labels become others: task -> (the table of each example, N; tables, k x 256, by label)."""

    codes: Mapping[str, tuple[Tensor, Tensor]]

    def changed(self, task: str, labels: Tensor, index: Tensor) -> Tensor:
        if task not in self.codes:
            return labels
        which, tables = self.codes[task]
        table = tables[which[index]].to(labels.device)
        coded = table.gather(1, labels.long().flatten(1) % tables.shape[1])  # -1 is no label, as 255 is
        return coded.view_as(labels).to(labels.dtype)


@dataclass(frozen=True, eq=False)
class Flipped(Behind):
    """Examples with other labels: task -> number of classes of those whose labels are turned round."""

    classes: Mapping[str, int]

    def changed(self, task: str, labels: Tensor, index: Tensor) -> Tensor:
        """Return wrong labels; those that are missing stay so."""
        return torch.where(labels >= 0, self.classes[task] - 1 - labels, labels) if task in self.classes else labels

    def labels_of(self, task: str) -> Array:
        """Return wrong labels."""
        labels = self.examples.labels_of(task)
        return np.where(labels >= 0, self.classes[task] - 1 - labels, labels) if task in self.classes else labels


def contents(examples: Examples) -> bytes:
    """Compute a checksum of inputs; empty where the fingerprint has it, or where the inputs lie elsewhere."""
    return bytes(examples.contents()) if hasattr(examples, "contents") else b""


def apart(examples: Examples, index: Tensor) -> list[Tensor]:
    """Return positions in groups, so that a batch holds examples of one group: several for joined data sets alone."""
    return cast("list[Tensor]", examples.apart(index)) if hasattr(examples, "apart") else [index]


def normal(examples: Examples, index: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (mean, standard deviation) that the examples at `index` are normalised with, None where they are not. Each
    is 1 x channels where all examples have the same, else one row an example. They must be of one data set."""
    if isinstance(examples, JoinedExamples):
        _, examples, index = examples.piece(index)
    both: tuple[Scale, Scale] = getattr(examples, "mean", MEAN), getattr(examples, "std", STD)
    if both[0] is None or both[1] is None:
        return None
    mean, std = (torch.as_tensor(scale, dtype=torch.float64) for scale in both)
    if mean.ndim == 2:
        assert examples.domain is not None
        return mean[examples.domain[index]], std[examples.domain[index]]
    return mean[None], std[None]


def without_label(labels: Tensor, where: Tensor) -> Tensor:
    """Return a batch of labels (B x ...) without those of some examples (B, bool). In their place stands IGNORE where
    there is a label per pixel, NaN for real numbers and several labels, -1 for classes."""
    absent = IGNORE if labels.ndim > 2 else math.nan if labels.is_floating_point() else -1
    return labels.masked_fill(where.to(labels.device).view(-1, *(1,) * (labels.ndim - 1)), absent)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set: its tasks, its train and test examples, the names of its domains (may be empty).

    deal      (pool, seed) -> Partition, if the data set has its own partition
    signal    the kind of the inputs; by default from their shape and type, None if these do not determine it
    classes   name of a task -> names of its classes, if they have names
    table     the `Preprocessing` that turned a table's columns into inputs
    words     the `texts.Words` that turned texts into tokens
    notes     notes of `fedloom show` on the data
    doubts    warnings of `fedloom show` and of a run about values that are probably wrong
    private   noise on what sites send of a table (a `Noise`) -> the same data set, preprocessed by that; None: nothing
              is sent, or no noise can be added
    redrawn   whether each seed draws the test part anew from the examples that others train on
    drawn_from  size of the pool from which each seed draws the train part, infinity for new ones; None: its own size
    reading   how files become inputs
    public    inputs (n x ...), as models take them, that every client has; they have no labels
    models    client -> a model of its own, as `fl.run(model=...)` takes it
    group     the group of each train example (N numbers or texts), whose examples stay in one part of a client's data
    """

    name: str
    tasks: tuple[Task, ...]
    train: Examples
    test: Examples
    domains: tuple[str, ...] = ()
    deal: Callable[[Any, int], Any] | None = None
    signal: Signal | None = None
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    table: Any = None
    words: Any = None
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    private: Callable[[Any], Dataset] | None = None
    redrawn: bool = False
    drawn_from: float | None = None
    reading: Reading = Reading()
    public: Tensor | None = None
    models: Mapping[str, Any] = field(default_factory=dict)
    group: Array | None = None

    def __post_init__(self) -> None:
        for domain in self.domains:
            if not in_one_line(domain):
                raise DataError(f"data set {self.name}: the domain {domain!r} found, expected a name in one line")
        if self.signal is None:
            whole = isinstance(self.train, TensorExamples) and self.train.images.dtype == torch.int64
            object.__setattr__(self, "signal", inferred(self.input_shape, whole))

    @property
    def ratio(self) -> float:
        """The examples of the smaller of the two parts over those of the larger one."""
        small, large = sorted((len(self.train), len(self.test)))
        return small / large

    def ratio_of(self, share: float) -> float:
        """Return the examples of a share of the train part that each seed draws anew over all others that it draws
        from."""
        whole = (self.drawn_from or len(self.train)) + len(self.test) * self.redrawn
        return share * len(self.train) / (whole - share * len(self.train))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch dimension (C x H x W for images)."""
        return self.train.input_shape
