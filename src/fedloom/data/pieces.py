"""Reads users' own arrays, tensors, folders and torch data sets as inputs and labels of tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch, Examples, ItemExamples, TensorExamples
from fedloom.data.drawing import CLASSES
from fedloom.data.inputs import finite, read_folders, turned
from fedloom.data.prepare import has_label
from fedloom.models.tasks.dense import Depth, read_depth
from fedloom.models.tasks.task import IGNORE, Task

Tasks = Mapping[str, Task]
FORMS = (
    "a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping, a TensorDataset, (x, y) or "
    "(x, {task: y}) as arrays or folders of images, or a split of Hugging Face datasets"
)


def unfit(where: str, what: str, expected: str) -> DataError:
    """Return the error for data that do not fit. `what` may be an object of the user's, of any length."""
    return DataError(f"{where}: {shorten(what, 200, placeholder=' ...')} found, expected {expected}")


@dataclass(frozen=True)
class Keys:
    """The keys of inputs and labels in mappings, the labels that mean "no label", and the order of axes."""

    inputs: str | None
    labels: Mapping[str, str] | None
    ignored: Mapping[str, float | None]
    padding: int | None = None
    """The token that fills up lists of different lengths, where one was named."""
    is_turned: bool = False
    """True: the last two axes of inputs are exchanged."""
    is_measured: bool = False
    """True: the inputs are series or features, so whole numbers become float32."""
    size: int | None = None
    """The side of images and maps that are read from folders; None: as they are."""

    def turned(self, inputs: Tensor, where: str, axes: int = 2) -> Tensor:
        """Return an input, or many (three `axes`), with channels before steps, and of the type that its kind has."""
        inputs = inputs.float() if self.is_measured and inputs.dtype == torch.int64 else inputs
        return turned(inputs, where, axes) if self.is_turned else inputs

    def chosen(self, item: Mapping[str, Any], tasks: Tasks, where: str) -> tuple[Any, dict[str, Any]]:
        """Return the input and {task: label} of a mapping that has the input."""
        if self.labels is None:
            raise DataError(f"{where}: inputs= is given without labels=, expected {{task: key}} for {', '.join(tasks)}")
        return item[str(self.inputs)], {task: item[key] for task, key in self.labels.items() if key in item}


@dataclass(frozen=True, eq=False)
class Piece:
    """Some examples as they were read: a tensor of inputs, or the data set that gives them; labels by task."""

    where: str
    source: Any
    labels: Mapping[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_ragged: bool = False
    is_stored: bool = False
    """True: the inputs are the numbers in files of more than 8 bits."""

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


def read(data: Any, tasks: Tasks, where: str, keys: Keys) -> Piece:
    """Read inputs and labels, and check them."""
    x: Any
    y: Any
    x, y = data if isinstance(data, tuple | list) and len(data) == 2 else (None, None)
    files: Mapping[str, Sequence[Path]] = {}
    is_folder = isinstance(x, str | Path)
    if keys.size is not None and not is_folder:
        raise DataError(f"{where}: size={keys.size} found, which is for folders of images: resize others beforehand")
    if isinstance(data, TensorDataset):
        x, *rest = data.tensors
        if len(rest) != len(tasks):
            wanted = f"one for each of the tasks {', '.join(tasks)}"
            raise unfit(where, f"a TensorDataset with {len(rest)} columns of labels", wanted)
        y = dict(zip(tasks, rest, strict=True))
    elif hasattr(data, "iloc") and hasattr(data, "columns"):
        use = "such as (df[features], df[label]); or use fl.Federation.from_table(df, site=..., tasks=...)"
        raise DataError(f"{where}: a table found, expected (inputs, labels), {use}")
    elif is_folder:
        y = _by_task(y, tasks, where)
        x, y, files = read_folders(Path(x).expanduser(), y, tasks, keys.ignored, where, keys.size)
    elif isinstance(data, Mapping) and keys.inputs in data:
        x, y = keys.chosen(data, tasks, where)
    elif not (isinstance(x, Tensor | np.ndarray | list) or hasattr(x, "to_numpy")):
        return _items(data, tasks, where, keys)
    if getattr(x, "dtype", None) == np.dtype(object) and x.ndim == 1:  # a column of lists or arrays
        x = [*x]
    ragged = _ragged(x)
    if ragged and keys.is_measured:
        raise _uneven(ragged, where)
    inputs = keys.turned(_padded(ragged, keys.padding, where) if ragged else as_input(x, where), where, 3)
    if inputs.ndim < 2 or not len(inputs):
        raise unfit(where, f"inputs of shape {tuple(inputs.shape)}", "N x ... with N above 0")
    finite(inputs, where)
    if y is None:
        raise unfit(where, "inputs without labels", f"labels of {', '.join(tasks)}")
    by_task = _by_task(y, tasks, where)
    labels = {}
    for name, task in tasks.items():
        numbers = None if (column := by_task.get(name)) is None else _numbers(column, task, where)
        labels[name] = _column(numbers, task, inputs.shape, where, keys.ignored.get(name), files.get(name, ()))
    _some(labels, by_task, where)
    is_stored = is_folder and inputs.is_floating_point()
    return Piece(where, inputs, labels, tuple(inputs.shape[1:]), inputs.dtype, bool(ragged), is_stored)


def _ragged(x: Any) -> list[Any]:
    """Return inputs as lists if they are lists, or vectors of tokens, of different lengths; [] of others."""
    rows = [row.tolist() if _is_tokens(row) else row for row in x] if isinstance(x, list) else []
    is_ragged = all(isinstance(row, list | tuple) for row in rows) and len(set(map(len, rows))) > 1
    return rows if is_ragged else []


def _is_tokens(row: Any) -> bool:
    """Return whether an input is a vector of tokens: a recording of whole numbers has some below 0."""
    if not isinstance(row, Tensor | np.ndarray) or row.ndim != 1:
        return False
    whole = "int" in str(row.dtype) and not str(row.dtype).endswith("uint8")
    return whole and not bool((row < 0).any())


def _uneven(rows: Sequence[Any], where: str) -> DataError:
    """Return the error for inputs of different shapes that are not lists of tokens."""
    try:
        shapes = sorted({" x ".join(map(str, np.shape(row))) or "one number" for row in rows})
    except (TypeError, ValueError):  # an input that is uneven in itself
        shapes = []
    found = f"inputs of different shapes found{f' ({shapes[0]} and {shapes[-1]})' if len(shapes) > 1 else ''}"
    advice = "cut series or pad them to one length, for example with numpy.pad"
    return DataError(f"{where}: {found}; only lists of tokens (whole numbers) are padded: {advice}")


def _padded(rows: Any, padding: int | None, where: str) -> Tensor:
    """Return lists of tokens as one tensor, the shorter ones filled up at the end."""
    if not all(isinstance(token, Integral) for row in rows for token in row):
        raise _uneven(rows, where)
    if padding is None and any(0 in row for row in rows):
        found = "lists of different lengths found. They are padded with 0, but 0 is a token too"
        advice = "add signal=fedloom.data.Signal(kind='tokens', padding=...) with a number that no list contains"
        raise DataError(f"{where}: {found}: {advice}")
    tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tokens, batch_first=True, padding_value=padding or 0)


def aligned(pieces: list[Piece], padding: int | None) -> list[Piece]:
    """Return the pieces with tokens as long as the longest, where lists of different lengths were filled up."""
    if not any(piece.is_ragged for piece in pieces):
        return pieces
    width = max(piece.shape[0] for piece in pieces)

    def filled(piece: Piece) -> Piece:
        if not isinstance(piece.source, Tensor):  # one that is read example by example
            return piece
        x = functional.pad(piece.source, (0, width - piece.shape[0]), value=padding or 0)
        return replace(piece, source=x, shape=(width,))

    return [filled(piece) for piece in pieces]


def _items(data: Any, tasks: Tasks, where: str, keys: Keys) -> Piece:
    """Read a map-style data set: its labels once, its inputs when they are wanted."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | bytes | Mapping):
        hint = ""
        if isinstance(data, Mapping):
            hint = f"; its keys are {', '.join(map(str, data))}: name them with inputs= and labels="
        elif hasattr(data, "dataset") and hasattr(data, "batch_size"):
            hint = "; of a DataLoader its data set: loader.dataset"
        elif hasattr(data, "__iter__") and not hasattr(data, "__len__"):
            hint = "; what can only be iterated over has no positions to deal out"
        raise unfit(where, type(data).__name__, f"{FORMS}{hint}")
    if not (count := len(data)):
        raise DataError(f"{where}: expected data, found none")
    values: dict[str, list[Any]] = {name: [] for name in tasks}
    seen: dict[str, None] = {}
    first: Tensor | None = None
    for i in range(count):
        about = f"{where}, example {i}"
        try:
            item = data[i]
        except Exception as error:
            raise DataError(f"{about} of {count}: {type(error).__name__}: {error}") from error
        x, y = _pair(item, tasks, about, keys)
        x = keys.turned(as_input(x, about), about)
        first = x if first is None else first
        if x.shape != first.shape:
            like = f"{(*first.shape,)} as the first example has"
            advice = "pad or cut inputs to one length, or give tokens as (lists, labels), which are padded"
            raise unfit(about, f"an input of shape {(*x.shape,)}", f"{like}; {advice}")
        if x.dtype != first.dtype:
            raise unfit(about, f"an input of {x.dtype}", f"{first.dtype} as the first example has")
        finite(x[None], about)
        seen |= dict.fromkeys(y)
        for name in tasks:
            is_absent = (value := y.get(name)) is None or value is np.ma.masked
            values[name].append(None if is_absent else np.asarray(value))
    assert first is not None
    _some(values, seen, where if seen or keys.labels is None else f"{where}, labels={dict(keys.labels)}")
    labels = {}
    for name, task in tasks.items():
        numbers = _numbers(values[name], task, where)
        labels[name] = _column(numbers, task, (count, *first.shape), where, keys.ignored.get(name))
    return Piece(where, data, labels, tuple(first.shape), first.dtype)


def _pair(item: Any, tasks: Tasks, where: str, keys: Keys) -> tuple[Any, Mapping[str, Any]]:
    """Return one example as (input, {task: label})."""
    if isinstance(item, Mapping):
        if keys.inputs is None:
            example = "Federation(..., inputs='image', labels={'task': 'label'})"
            found = f"a mapping with {', '.join(map(str, item))} found"
            raise DataError(f"{where}: {found}: add the keys of the input and the labels: {example}")
        if keys.inputs not in item:
            raise DataError(f"{where}: no key {keys.inputs!r} (inputs=). Found: {', '.join(map(str, item))}")
        return keys.chosen(item, tasks, where)
    if not isinstance(item, tuple | list) or len(item) < 2:
        forms = "(x, y), (x, {task: y}) or a mapping; arrays as a pair: fl.Client((x, y))"
        raise unfit(where, type(item).__name__, forms)
    x, *rest = item
    if len(rest) == 1:
        return x, _by_task(rest[0], tasks, where)
    if len(rest) != len(tasks):
        raise unfit(where, f"{len(rest)} labels", f"one for each of {', '.join(tasks)}")
    return x, dict(zip(tasks, rest, strict=True))


def _by_task(labels: Any, tasks: Tasks, where: str) -> Mapping[str, Any]:
    """Return labels by task: as they are, or as those of the only task."""
    if isinstance(labels, Mapping):
        return labels
    if len(tasks) > 1:
        raise unfit(where, "one label an example", f"{{task: label}} for {', '.join(tasks)}")
    return {next(iter(tasks)): labels}


def _numbers(labels: Any, task: Task, where: str) -> Tensor | None:
    """Return labels as a tensor; None in a list, and what is masked in an array, is no label. There is no tensor if
    that is all that a list has."""
    # Not 255 for classes: beside 0 alone it would look like a mask in black and white.
    absent = -1 if task.kind in CLASSES else _absent(task)
    if getattr(labels, "dtype", None) == np.dtype(object):
        labels = [*labels]
    if isinstance(labels, list) and any(label is None for label in labels):
        if (some := next((label for label in labels if label is not None), None)) is None:
            return None
        blank = np.full(np.shape(some), absent)
        labels = [blank if label is None else label for label in labels]
    if isinstance(labels, np.ma.MaskedArray):
        dtype = np.result_type(labels.dtype, np.int8 if absent == -1 else type(absent))
        labels = np.ma.filled(labels.astype(dtype), absent)
    try:
        return labels if isinstance(labels, Tensor) else _tensor(labels)
    except (TypeError, ValueError):
        is_class = not (task.dense or _is_real(task))
        ways = f"numbers{'; number the classes from 0, in the same order at all clients' * is_class}"
        raise unfit(f"{where}, task {task.name!r}", f"labels such as {next(iter(labels))!s}", ways) from None


def _tensor(values: Any) -> Tensor:
    """Return numbers as a tensor. Raises TypeError or ValueError for anything else."""
    array = np.array(values)
    if array.dtype == np.dtype(object):  # as tables of several types are
        array = np.array(array.tolist())
    return torch.as_tensor(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def _some(labels: Mapping[str, Any], there: Iterable[str], where: str) -> None:
    if not set(labels) & set(there):
        raise unfit(where, f"labels of {', '.join(map(str, there)) or 'nothing'}", f"those of {', '.join(labels)}")


def _is_real(task: Task) -> bool:
    return task.kind in ("regression", "multilabel")


def _absent(task: Task) -> float:
    """Return the label that means "no label"."""
    return float("nan") if _is_real(task) else IGNORE if task.dense else -1


def _no_labels(task: Task, size: Sequence[int]) -> Tensor:
    """Return the labels of inputs of this size (N x ...) of which none has one."""
    shape: tuple[int, ...] = (task.channels,) if task.kind == "multilabel" else ()
    dtype = torch.float32 if _is_real(task) else torch.int64
    if task.dense:
        shape = (3, *size[2:]) if task.kind == "normals" else tuple(size[2:])
        dtype = torch.uint8 if task.kind in CLASSES else torch.float32
    return torch.tensor(_absent(task)).to(dtype).expand(size[0], *shape)


def _column(
    values: Tensor | None, task: Task, size: Sequence[int], where: str, ignore: float | None, files: Sequence[Path] = ()
) -> Tensor:
    """Return the labels of one task of inputs of this size (N x ...), of the type that the task wants. Without `values`
    none has a label. Raises DataError for labels that the task cannot have; it names the file where `files` do."""
    if values is None:
        return _no_labels(task, size)
    about = f"{where}, task {task.name!r}"
    if not values.ndim or len(values) != size[0]:
        what = f"{len(values)} labels" if values.ndim else f"the label {values.item()} alone"
        raise unfit(about, what, f"{size[0]}, one for each example")
    if values.is_complex():
        raise unfit(about, f"labels of {values.dtype}", "real or whole numbers")
    if task.dense:
        return _maps(values, task, size, about, ignore, files)
    shown = f"labels of shape {tuple(values.shape)}"
    if task.kind == "multilabel":
        if values.shape[1:] != (task.channels,):
            raise unfit(about, shown, f"N x {task.channels}, for classes={task.channels}")
        values = values.float()
        values = torch.where((values == -1) | (values == (-1 if ignore is None else ignore)), torch.nan, values)
        if len(stray := values[bad := (values != 0) & (values != 1) & ~values.isnan()]):
            raise unfit(_at(about, bad, files), f"the label {stray[0]:g}", "0 or 1 (-1 or NaN: no label)")
        return values
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise unfit(about, shown, "one number an example")
    if ignore is not None:
        values = torch.where(values == ignore, _absent(task), values.float() if _is_real(task) else values)
    if _is_real(task):
        if bool((bad := values.float().isinf()).any()):
            first = int(bad.int().argmax())
            found = f"{int(bad.sum())} of {len(bad)} labels are infinite or too large"
            where = f"{_at(about, bad, files)}: {found}, the first ({values[first]}) at position {first}"
            raise DataError(f"{where}; expected finite numbers, or NaN for no label")
        return values.float()
    if values.is_floating_point():
        known = values[has := ~values.isnan()]  # with missing labels, pandas makes real numbers of whole ones
        if bool((known % 1 != 0).any()):
            expected = f"whole numbers from 0 to {task.channels - 1} (-1 or NaN: no label)"
            raise unfit(about, f"labels of {values.dtype}", expected)
        values = torch.where(has, values, -1)
    values = values.long()
    if len(stray := values[(values < -1) | (values >= task.channels)]):
        raise unfit(_at(about, values == stray.max(), files), f"the label {stray.max()}", _classes(task, -1))
    return values


def _classes(task: Task, ignore: int) -> str:
    return f"0 to {task.channels - 1} ({ignore}: no label), for classes={task.channels}"


def _at(about: str, bad: Tensor, files: Sequence[Path]) -> str:
    """Return where the first bad label (N x ...) is, with its file if labels have files."""
    return f"{about}: {files[int(bad.reshape(len(bad), -1).any(1).int().argmax())]}" if files else about


def _maps(
    values: Tensor, task: Task, size: Sequence[int], about: str, ignore: float | None, files: Sequence[Path]
) -> Tensor:
    """Return labels of a task with one label per pixel: as large as the inputs; 255 where there is none."""
    normals = task.kind == "normals"
    shapes = [(3, *size[2:])] if normals else [tuple(size[2:]), (1, *size[2:])]
    if len(size) != 4 or tuple(values.shape[1:]) not in shapes:
        wanted = f"N x {'3 x ' if normals else ''}H x W labels of N x C x H x W inputs"
        raise unfit(about, f"labels of shape {tuple(values.shape)} for inputs of shape {tuple(size)}", wanted)
    values = values if normals or values.ndim == 3 else values[:, 0]
    present = sorted({*values.unique().tolist()} - {-1, ignore}) if task.kind in CLASSES else []
    if ignore is not None:
        values = torch.where(values == ignore, torch.tensor(IGNORE), values)
    if task.kind not in CLASSES:
        values = values.float()
        stray = values[bad := ((values < 0) | (values > 1)) & (values != IGNORE) & (values != -1)]
        if task.kind in ("edge", "saliency") and len(stray):
            raise unfit(_at(about, bad, files), f"the label {stray[0]:g}", f"0 to 1 ({IGNORE}: no label)")
        if isinstance(depth := task.known, Depth):
            metres = values[read_depth(values, values[:, None])[1]]
            if 2 * int((metres >= depth.limit).sum()) > len(metres):  # they would train, but not be measured
                found = f"depths from {metres.min():g} to {metres.max():g}"
                advice = "divide millimetres by 1000 (files may be .tif images of floats), or raise the limit"
                limit = f"fedloom.tasks.Depth({task.name!r}, limit=...)"
                raise unfit(about, found, f"metres, most of them below {depth.limit:g}; {advice}: {limit}")
        return values
    if values.is_floating_point():
        raise unfit(about, f"labels of {values.dtype}", "whole numbers, the classes of pixels")
    if present == [0, IGNORE]:
        found = f'only the labels 0 and {IGNORE} found, and {IGNORE} means "no label"'
        advice = f"divide the masks by {IGNORE}, or add ignore={IGNORE} if these pixels have no label"
        raise DataError(f"{about}: {found}; {advice}")
    if strays := [label for label in present if not 0 <= label < task.channels and label != IGNORE]:
        raise unfit(_at(about, values == strays[0], files), f"the label {strays[0]}", _classes(task, IGNORE))
    return torch.where(values == -1, IGNORE, values.short()).to(torch.uint8)


def as_input(x: Any, where: str) -> Tensor:
    """Return an input, or many, as a tensor: float32, also of yes and no, uint8 as it is, whole numbers (tokens) as
    int64. An image of Pillow becomes C x H x W."""
    if hasattr(x, "getbands") and hasattr(x, "size"):
        image = np.asarray(x)
        x = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    try:
        x = x.to_numpy() if hasattr(x, "to_numpy") else x
        tensor = x if isinstance(x, Tensor) else _tensor(x)
    except (TypeError, ValueError):
        if isinstance(x, list) and x and all(hasattr(row, "__len__") and not isinstance(row, str) for row in x):
            raise _uneven(x, where) from None
        found = f"an array of {x.dtype}" if hasattr(x, "dtype") else f"an input of type {type(x).__name__}"
        raise unfit(where, found, "a tensor, an array or numbers") from None
    if np.ma.is_masked(x):
        advice = "x.filled(...) fills them in, or leave the examples out"
        raise DataError(f"{where}: {np.ma.count_masked(x)} masked values found, expected none: {advice}")
    if tensor.layout != torch.strided:
        raise unfit(where, f"a tensor of layout {tensor.layout}", "a dense one, as to_dense() returns")
    if tensor.is_complex():
        raise unfit(where, f"inputs of {tensor.dtype}", "real or whole numbers")
    whole = tensor if tensor.dtype == torch.uint8 else tensor.long()
    return tensor.float() if tensor.is_floating_point() or tensor.dtype == torch.bool else whole


def scaled(x: Tensor) -> Tensor:
    """Return inputs as models take them: bytes between 0 and 1, others as they are."""
    return x.float().div(255) if x.dtype == torch.uint8 else x


def gathered(parts: Sequence[Piece], tasks: Tasks, like: Piece, keys: Keys, domain: Tensor | None = None) -> Examples:
    """Join parts, whose inputs are like those of `like`: in memory where all are, else read example by example."""
    shape = like.shape
    labels = {}
    for name, task in tasks.items():
        columns = [p.labels[name] if name in p.labels else _no_labels(task, (len(p), *shape)) for p in parts]
        labels[name] = torch.cat([_no_labels(task, (0, *shape)), *columns])
    every = [pair for part in parts for pair in part.labels.items()]
    told = [(name, y) for name, y in every if y.ndim > 1 or y.is_floating_point()]  # classes tell it themselves
    annotated = {name: has_label(labels[name].numpy()) for name, y in told if not has_label(y.numpy()).all()}
    tensors = [part.source for part in parts if isinstance(part.source, Tensor)]
    if len(tensors) == len(parts):
        inputs = torch.cat(tensors) if tensors else torch.zeros(0, *shape, dtype=like.dtype)
        return TensorExamples(inputs, labels, domain, annotated=annotated)
    items = Items(tuple((p.where, p.source) for p in parts), shape, like.dtype, keys)
    count, held = sum(map(len, parts)), sum(tensor.nbytes for tensor in tensors)
    return ItemExamples(items, count, shape, labels, domain, annotated=annotated, prefetch=False, held=held)


@dataclass(frozen=True, eq=False)
class Items:
    """A reader of the inputs of map-style data sets, one after another, example by example."""

    sources: tuple[tuple[str, Any], ...]
    """Where each is from, for errors, and the data set."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    keys: Keys

    def __call__(self, index: Tensor, device: torch.device, rng: Generator | None, tasks: object) -> Batch:
        """Return inputs at `index`. What a data set draws from torch's random stream follows from `rng`."""
        with torch.random.fork_rng(devices=[]):
            drawn = derive_seed(0, "items") if rng is None else int(torch.randint(1 << 62, (), generator=rng))
            torch.default_generator.manual_seed(drawn)
            x = [self._input(position) for position in index.tolist()]
        none = torch.zeros(0, *self.shape, dtype=torch.float32 if self.dtype == torch.uint8 else self.dtype)
        return (torch.stack(x) if x else none).to(device), {}

    def _input(self, position: int) -> Tensor:
        for where, source in self.sources:
            about = f"{where}, example {position}"
            if position < len(source):
                break
            position -= len(source)
        x = source[position]
        if not isinstance(source, Tensor):
            x = x[self.keys.inputs] if isinstance(x, Mapping) else x[0]
            x = self.keys.turned(as_input(x, about), about)
        if tuple(x.shape) != self.shape:
            raise unfit(about, f"an input of shape {tuple(x.shape)}", f"{self.shape} as the first example has")
        return scaled(x)
