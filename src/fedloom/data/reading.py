"""What a user has, arrays, tensors or a torch data set, read as inputs and labels of tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import TensorDataset

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch, Examples, TensorExamples, label_bytes
from fedloom.models.tasks.task import Task

FORMS = (
    "a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping, a TensorDataset, (x, y) or "
    "(x, {task: y}) as arrays, or a split of Hugging Face datasets"
)


@dataclass(frozen=True)
class Keys:
    """Where inputs and labels are in data sets that give mappings."""

    inputs: str | None
    labels: Mapping[str, str] | None


@dataclass(frozen=True, eq=False)
class Piece:
    """Some examples as they were read: a tensor of inputs, or the data set that gives them; labels by task."""

    where: str
    source: Any
    labels: Mapping[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: str | None = None

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


def read(data: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> Piece:
    """Inputs and labels, checked."""
    if isinstance(data, TensorDataset):
        x, *columns = data.tensors
        if len(columns) != len(tasks):
            raise DataError(
                f"{where}: a TensorDataset with {len(columns)} columns of labels found, expected one for each of the "
                f"tasks {', '.join(tasks)}"
            )
        return _arrays(x, dict(zip(tasks, columns, strict=True)), tasks, where)
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[0]):
        return _arrays(data[0], data[1], tasks, where)
    if isinstance(data, Mapping) and keys.inputs in data:
        named = {task: data[key] for task, key in _columns(keys, tasks, where).items() if key in data}
        return _arrays(data[keys.inputs], named, tasks, where)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | bytes | Mapping):
        hint = ""
        if isinstance(data, Mapping):
            hint = f"; its keys are {', '.join(map(str, data))}: name them with inputs= and labels="
        elif hasattr(data, "__iter__") and not hasattr(data, "__len__"):
            hint = "; what can only be iterated over has no positions to deal out"
        raise DataError(f"{where}: {type(data).__name__} found, expected {FORMS}{hint}")
    return _items(data, tasks, where, keys)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _arrays(x: Any, y: Any, tasks: Mapping[str, Task], where: str) -> Piece:
    inputs = as_input(x, where)
    if inputs.ndim < 2 or not len(inputs):
        raise DataError(f"{where}: inputs of shape {tuple(inputs.shape)} found, expected N x ... with N above 0")
    if y is None:
        raise DataError(f"{where}: inputs without labels found, expected labels of {', '.join(tasks)}")
    columns = y if isinstance(y, Mapping) else {_only(tasks, where): y}
    labels = {}
    for name, task in tasks.items():
        column = columns.get(name)
        labels[name] = _column(None if column is None else _numbers(column, name, where), task, len(inputs), where)
    _some(labels, columns, where)
    return Piece(where, inputs, labels, tuple(inputs.shape[1:]), inputs.dtype)


def _items(data: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> Piece:
    """A map-style data set: its labels are read once, its inputs when they are wanted."""
    count = len(data)
    if not count:
        raise DataError(f"{where}: it is empty")
    found: dict[str, list[Any]] = {name: [] for name in tasks}
    seen: dict[str, None] = {}
    first: Tensor | None = None
    for i in range(count):
        try:
            item = data[i]
        except Exception as error:
            raise DataError(f"{where}: example {i} of {count}: {type(error).__name__}: {error}") from error
        x, y = pair(item, tasks, f"{where}, example {i}", keys)
        if first is None:
            first = as_input(x, f"{where}, example 0")
        seen |= dict.fromkeys(y)
        for name, task in tasks.items():
            value = y.get(name)
            found[name].append(_absent(task) if value is None else value)
    assert first is not None
    _some(found, seen, where if seen or keys.labels is None else f"{where}, labels={dict(keys.labels)}")
    labels = {
        name: _column(_numbers([np.asarray(v) for v in found[name]], name, where), task, count, where)
        for name, task in tasks.items()
    }
    return Piece(where, data, labels, tuple(first.shape), first.dtype, keys.inputs)


def pair(item: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> tuple[Any, Mapping[str, Any]]:
    """One example as (input, {task: label})."""
    if isinstance(item, Mapping):
        if keys.inputs is None:
            raise DataError(
                f"{where}: a mapping with {', '.join(map(str, item))} found; name the input and the labels: "
                "Federation(..., inputs='image', labels={'task': 'label'})"
            )
        if keys.inputs not in item:
            raise DataError(f"{where}: inputs={keys.inputs!r} is not in it. Found: {', '.join(map(str, item))}")
        return item[keys.inputs], {t: item.get(key) for t, key in _columns(keys, tasks, where).items() if key in item}
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{where}: {type(item).__name__} found, expected (x, y), (x, {{task: y}}) or a mapping")
    x, *rest = item
    if len(rest) > 1:
        if len(rest) != len(tasks):
            raise DataError(f"{where}: {len(rest)} labels found, expected one for each of {', '.join(tasks)}")
        return x, dict(zip(tasks, rest, strict=True))
    return x, rest[0] if isinstance(rest[0], Mapping) else {_only(tasks, where): rest[0]}


def _columns(keys: Keys, tasks: Mapping[str, Task], where: str) -> Mapping[str, str]:
    if keys.labels is not None:
        return keys.labels
    raise DataError(f"{where}: inputs= is given without labels=, expected {{task: key}} for {', '.join(tasks)}")


def _only(tasks: Mapping[str, Task], where: str) -> str:
    if len(tasks) > 1:
        raise DataError(f"{where}: one label an example found, expected {{task: label}} for {', '.join(tasks)}")
    return next(iter(tasks))


def _numbers(labels: Any, task: str, where: str) -> Tensor:
    """Labels as a tensor."""
    try:
        return torch.as_tensor(labels if _is_array(labels) else np.asarray(labels))
    except (TypeError, ValueError):
        raise DataError(f"{where}, task {task!r}: labels such as {labels[0]!s} found, expected numbers") from None


def _some(labels: Mapping[str, Any], there: Iterable[str], where: str) -> None:
    if not set(labels) & set(there):
        raise DataError(
            f"{where}: labels of {', '.join(map(str, there)) or 'nothing'} found, expected those of {', '.join(labels)}"
        )


def _absent(task: Task) -> float:
    return float("nan") if task.kind == "regression" else -1


def _column(values: Tensor | None, task: Task, count: int, where: str) -> Tensor:
    """The labels of one task (N), of the type that it wants."""
    real = task.kind == "regression"
    if values is None:
        return torch.full((count,), _absent(task), dtype=torch.float32 if real else torch.int64)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    about = f"{where}, task {task.name!r}"
    if not values.ndim or len(values) != count:
        found = f"{len(values)} labels" if values.ndim else f"the label {values.item()} alone"
        raise DataError(f"{about}: {found} found, expected {count}, one for each example")
    if task.dense:
        return values
    if values.ndim != 1:
        raise DataError(f"{about}: labels of shape {tuple(values.shape)} found, expected one number an example")
    if real and not values.is_complex():
        return values.float()
    if values.is_floating_point() or values.is_complex():
        expected = "real numbers" if real else f"whole numbers from 0 to {task.channels - 1} (-1: no label)"
        raise DataError(f"{about}: labels of {values.dtype} found, expected {expected}")
    values = values.long()
    low, high = int(values.min()), int(values.max())
    if low < -1 or high >= task.channels:
        raise DataError(
            f"{about}: the label {high if high >= task.channels else low} found, expected 0 to {task.channels - 1} "
            f"(-1: no label), for classes={task.channels}"
        )
    return values


def as_input(x: Any, where: str) -> Tensor:
    """An input, or many, as a tensor: float32, uint8 as it is, whole numbers (tokens) as int64.

    An image of Pillow becomes C x H x W.
    """
    if hasattr(x, "getbands") and hasattr(x, "size"):
        image = np.asarray(x)
        x = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    try:
        tensor = x if isinstance(x, Tensor) else torch.as_tensor(np.array(x))
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: an input of type {type(x).__name__} found, expected a tensor, an array or numbers"
        ) from None
    if tensor.is_complex():
        raise DataError(f"{where}: inputs of {tensor.dtype} found, expected real or whole numbers")
    if tensor.dtype == torch.uint8:
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _mine(part: Piece, task: Task) -> Tensor:
    return part.labels[task.name] if task.name in part.labels else _column(None, task, len(part), part.where)


def gathered(
    parts: Sequence[Piece],
    tasks: Mapping[str, Task],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    domain: Tensor | None = None,
) -> Examples:
    """Parts as one: in memory where all are, else read example by example."""
    labels = {
        name: torch.cat([_column(None, task, 0, ""), *(_mine(part, task) for part in parts)])
        for name, task in tasks.items()
    }
    if all(isinstance(part.source, Tensor) for part in parts):
        inputs = torch.cat([part.source for part in parts]) if parts else torch.zeros(0, *shape, dtype=dtype)
        return TensorExamples(inputs, labels, domain)
    key = next((p.inputs for p in parts if p.inputs is not None), None)
    return ItemExamples(tuple(p.source for p in parts), labels, shape, dtype, domain, key)


@dataclass(frozen=True, eq=False)
class ItemExamples:
    """Examples of map-style data sets, one after another; inputs are asked for batch by batch. Fulfils `Examples`."""

    sources: tuple[Any, ...]
    labels: Mapping[str, Tensor]
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    domain: Tensor | None = None
    inputs: str | None = None
    prefetch: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))

    @property
    def nbytes(self) -> int:
        """Bytes of the labels, and of inputs in memory."""
        inputs = sum(s.nbytes for s in self.sources if isinstance(s, Tensor))
        return inputs + sum(labels.nbytes for labels in self.labels.values())

    def fingerprint(self) -> bytes:
        """All labels, task by task."""
        return label_bytes(self.labels)

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and labels at `index`. What a data set draws from torch's random stream follows from `rng`."""
        with torch.random.fork_rng(devices=[]):
            drawn = derive_seed(0, "items") if rng is None else int(torch.randint(1 << 62, (), generator=rng))
            torch.default_generator.manual_seed(drawn)
            x = torch.stack([self._input(i) for i in index.tolist()]) if len(index) else self._none()
        wanted = self.labels if tasks is None else tasks
        y = {task: self.labels[task].index_select(0, index).to(device) for task in wanted}
        return x.to(device), y

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """Labels of one task as a numpy array."""
        column: np.ndarray[Any, Any] = self.labels[task].numpy()
        return column

    def _none(self) -> Tensor:
        return torch.zeros(0, *self.input_shape, dtype=torch.float32 if self.dtype == torch.uint8 else self.dtype)

    def _input(self, position: int) -> Tensor:
        for source in self.sources:
            if position < len(source):
                break
            position -= len(source)
        item = source[position]
        if not isinstance(source, Tensor):
            item = item[self.inputs] if isinstance(item, Mapping) else item[0]
        x = as_input(item, f"example {position}")
        if tuple(x.shape) != self.input_shape:
            raise DataError(
                f"example {position}: an input of shape {tuple(x.shape)} found, expected {self.input_shape} as the "
                "first example has"
            )
        return x.float().div(255) if x.dtype == torch.uint8 else x
