"""Users' own data: arrays, tensors and torch data sets of clients become one data set that says who holds what.

The second half reads them as inputs and labels of tasks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Generator, Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RunWarning, unknown
from fedloom.core.settings.section import client_name
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import checked
from fedloom.data.dataset import Batch, Dataset, Examples, ItemExamples, TensorExamples
from fedloom.data.drawing import CLASSES
from fedloom.data.inputs import (
    LARGE,
    Axes,
    badly_scaled,
    copied,
    doubtful_axes,
    far_off,
    finite,
    read_folders,
    stated,
    turned,
    with_vocabulary,
)
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share
from fedloom.data.partition.rules import as_partition, by_rank, ids, set_apart
from fedloom.data.prepare import Reading, channel_moments, joined_groups
from fedloom.models.signal import AXES, Kind, Signal, inferred, sized
from fedloom.models.tasks.dense import Depth, read_depth
from fedloom.models.tasks.labels import Regression
from fedloom.models.tasks.own import Description
from fedloom.models.tasks.task import IGNORE, Task

FORMS = (
    "a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping, a TensorDataset, (x, y) or "
    "(x, {task: y}) as arrays or folders of images, or a split of Hugging Face datasets"
)


@dataclass(frozen=True, eq=False)
class Client:
    """One client of a `Federation`.

    train   its examples: a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping; a TensorDataset
            (x, then a column of labels for each task); (x, y) or (x, {task: y}) as arrays; a split of Hugging Face
            datasets. y is the label of its only task, or a mapping
    val     the share of them that is set apart for validation, or a data set of its own
    tasks   names of its tasks, or {name: weight of the loss}; by default those of the federation's tasks of which any
            of its training examples has a label
    test    its own test data; by default it shares the federation's. A client with its own is a domain of its own
    model   its own model, in one of the forms that `fl.run(model=...)` takes, for methods that share no parameters with
            others (`fedmd`, `local`); by default the run's. It must have outputs of all tasks of the federation
    group   a number or a text for each of its training examples, such as the patient or the recording: examples with
            the same one stay together where the share `val` is set apart, which then counts groups
    """

    train: Any
    val: Any = 0.1
    tasks: Sequence[str] | Mapping[str, float] | None = None
    test: Any = None
    model: Any = None
    group: Any = None

    def __repr__(self) -> str:
        return f"Client(tasks={self.tasks!r}, model={self.model!r})"  # without its examples, which may be many


class Federation:
    """Clients with their data and tasks, for `fl.run` in the place of a recipe's `data` and `partition`.

    clients    {name: Client}
    tasks      {name: fl.task(...) or a Task}
    test       test data that all clients share; may be left out where clients have their own, or only validate
    data       instead of `clients`: one data set, which
    partition  deals out: lists of positions, {name: positions}, a partition's name or its section as in a recipe
               ({"name": "iid", "clients": 10}), a function (pool, seed) -> Partition or lists of positions, or, for a
               split of Hugging Face datasets, a partitioner of flwr-datasets: its partitions are clients c00, c01 ...
    inputs     for data sets that give mappings: the key of the input
    labels     and {task: key of its label}
    signal     what an input is: "image" (C x H x W), "series" (channels x steps), "features" or "tokens", or a
               `fedloom.data.Signal`, which has the tokens' vocabulary and padding. By default vectors are features,
               whole numbers tokens, what has three axes an image; encoders ask what has two is
    public     inputs alone (n x ...), like those of the clients, that everybody has: for methods that share predictions
               on them (`fedmd`)
    group      for data=: a number or a text for each example; examples with the same one stay together where a client
               sets validation examples apart (`Client.group` is for clients=)
    axes       of series: "NCT" (channels before steps, as models take them; the default), or "NTC", which is turned

    Tensors and arrays are used as they are, but uint8 is scaled to 0..1, and lists of tokens of different lengths are
    filled up with the signal's padding, by default 0. Other data sets are read example by example, batch after batch,
    and their labels once at the beginning. What they draw from torch's random stream in training, such as
    augmentations, follows from the run's seed.

    A run warns where test examples in memory are byte by byte copies of training examples, in up to a million examples
    and 1 GiB of inputs (features of whole numbers are not compared). A Federation warns of labels and inputs (but
    images) of such a scale that training may not converge, and of clients whose inputs may be in other units.

    Raises DataError for data that do not fit. It names the client, the task, what was found and what is expected.
    """

    def __init__(
        self,
        clients: Mapping[str, Client] | None = None,
        tasks: Mapping[str, Description | Task] | None = None,
        test: Any = None,
        *,
        data: Any = None,
        partition: Any = None,
        inputs: str | None = None,
        labels: Mapping[str, str] | None = None,
        signal: Kind | Signal | None = None,
        axes: Axes | None = None,
        name: str = "federation",
        public: Any = None,
        group: Any = None,
    ) -> None:
        if (clients is None) == (data is None):
            both = "neither" if clients is None else "both"
            raise DataError(f"Federation: expected clients= or data=, found {both}")
        if (data is None) != (partition is None):
            needs = "data= needs partition=, such as {'name': 'iid', 'clients': 10} or lists of positions"
            only = "partition= is only for data=, but clients= have their own data: leave partition= out"
            raise DataError(f"Federation: {needs if partition is None else only}")
        if group is not None and (data is None or isinstance(data, Dataset) or hasattr(partition, "load_partition")):
            has = "clients= have it in fl.Client(..., group=...), and a fedloom Dataset has its own"
            raise DataError(f"Federation: group= found, but it is for data= with positions: {has}")
        if hasattr(partition, "load_partition"):
            clients, data = _dealt(data, partition), None
        if isinstance(data, Dataset):
            if tasks is not None or test is not None or signal is not None:
                has = "already has tasks, test data and a signal: leave these arguments out"
                raise DataError(f"Federation: a fedloom Dataset {has}")
            shared = data.public if public is None else _public(public, data.input_shape)
            self.dataset = replace(data, deal=_rule(partition), public=shared)
            return
        known = _tasks(tasks)
        if labels is not None and not isinstance(labels, Mapping):
            raise DataError(f"Federation: labels={labels!r} found, expected {{task: key of its label}}")
        if axes not in (None, "NCT", "NTC"):
            raise DataError(f"Federation: axes={axes!r} found, expected 'NCT' (channels, steps) or 'NTC'")
        ignored = {str(t): d.ignore for t, d in (tasks or {}).items() if isinstance(d, Description)}
        padding = signal.padding if isinstance(signal, Signal) else None
        is_measured = getattr(signal, "kind", signal) in ("series", "features")
        named = None if labels is None else dict(labels)
        keys = Keys(inputs, named, ignored, padding, axes == "NTC", is_measured)
        own: dict[str, Any] = {}
        if clients is None:
            parts, deal = [read(data, known, "Federation, data", keys)], _rule(partition)
            owners = None if group is None else _groups(group, len(parts[0]), "Federation, data")
        else:
            clients = _named(clients)
            parts, deal, owners = _clients(clients, known, keys)
            own = {who: client.test for who, client in clients.items() if client.test is not None}
        tests = [] if test is None else [read(test, known, "Federation, test", keys)]
        tests += [read(each, known, f"client {who!r}, test", keys) for who, each in own.items()]
        every = _aligned([*parts, *tests], padding)
        parts, tests = every[: len(parts)], every[len(parts) :]
        if signal is None and any(piece.is_ragged for piece in every):
            signal = Signal(kind="tokens", padding=0)
        first = parts[0]
        for piece in every:
            for found, like, of in ((piece.shape, first.shape, "shape "), (piece.dtype, first.dtype, "")):
                if found != like:
                    raise DataError(f"{piece.where}: inputs of {of}{found} found, but {first.where} has {like}")
        domain = None
        if own:  # -1: test data that all clients share belong to no client's domain
            whose = [*([-1] if test is not None else []), *range(len(own))]
            domain = torch.tensor(whose).repeat_interleave(torch.tensor([len(piece) for piece in tests]))
        train, tested = gathered(parts, known, first, keys), gathered(tests, known, first, keys, domain)
        signal = _signal(every, signal)
        if axes is not None and signal is not None and signal.kind != "series":
            raise _unfit(first.where, f"axes={axes!r} of {signal.kind}", "axes for series only: leave it out")
        learned = [piece for piece in parts if not piece.where.endswith(", val")]
        trained, measured = (
            {p.where: p.source.detach() for p in pieces if isinstance(p.source, Tensor)} for pieces in (learned, tests)
        )
        self.dataset = Dataset(
            name,
            tuple(known.values()),
            *(train, tested, tuple(own), deal, signal),
            reading=Reading(stored="stored" if first.is_stored else None, turned=keys.is_turned),
            public=None if public is None else _public(public, first.shape, is_measured),
            models={who: client.model for who, client in (clients or {}).items() if client.model is not None},
            group=owners,
            doubts=copied(trained, measured, signal),
        )
        moments = {where: channel_moments(x) for where, x in trained.items() if x.is_floating_point() and len(x) > 1}
        far = far_off(moments, signal)
        told = [*_large_labels(parts, known), *(far or badly_scaled(moments, signal))]
        told += [f"{first.where}: {doubt}" for doubt in doubtful_axes(first.shape, signal, "axes='{}'") if axes is None]
        for warning in told:
            warnings.warn(warning, RunWarning, stacklevel=2)

    @classmethod
    def from_table(
        cls,
        source: Any,
        site: str | None = None,
        tasks: Sequence[str] | Mapping[str, Description] = (),
        features: Sequence[str] | None = None,
        leave_out: Sequence[str] = (),
        missing: str | float | Sequence[str | int | float] = (),
        preprocess: Literal["federated", "local"] = "federated",
        minimum: int = 5,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        seed: int = 0,
        group: str | None = None,
        time: str | Sequence[str] | None = None,
    ) -> Federation:
        """Make a client of each site of a table.

        source      a pandas.DataFrame; a CSV (also .gz, .xz) or Parquet file; a folder with one of them for each site
        site        the column of a row's site; without it a folder's files are the sites
        tasks       columns, a task each, or {column: fl.task(...)}, or {task: fl.task(kind="multilabel",
                    columns=[...])}; empty cells are no label
        features    the columns that are inputs, or globs; by default all others that pass the checks. A warning names
                    those that do not, with the reason
        leave_out   columns or globs that are no inputs
        missing     cells that mean missing, such as -9 or "?", beside empty ones, NA and NaN
        preprocess  "federated": scale by the counts and sums of all sites, of `minimum` rows or more; "local": each
                    site by its own
        ranges      {column: (least, most)}: under privacy, sums of values clipped to this are sent with noise
        seed        of each site's split into training, validation and test rows
        group       a column, such as the patient's number: rows with the same cell stay in one part of the split
        time        a column of numbers or times, or several, the longest first: each site's last rows are its test
                    rows. Without it, a column of train and test (and val) says which rows are for tests

        The same as `fedloom init FILE` and the data set `table`. Raises DataError for a table that does not fit. It
        names the column and the site.
        """
        from fedloom.data.tables.columns import draft
        from fedloom.data.tables.table import Split, build

        if isinstance(tasks, str) or not isinstance(tasks, Sequence | Mapping) or not tasks:
            raise DataError(f"from_table: tasks={tasks!r} found, expected columns, or {{column: fl.task(...)}}")
        described = tasks if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
        known = {str(name): _known(name, each) for name, each in described.items()}
        chosen = None if features is None else _several("features", features)
        away, codes = _several("leave_out", leave_out), _several("missing", missing, str | Real)
        if time is not None and not time:
            raise DataError("from_table: time=[] found, expected a column, or several")
        plan = draft(source, known, site, chosen, away, codes, preprocess, minimum)
        split = Split(group=group, time=time, column=plan.split if time is None else None)
        built = build(plan.table, plan.tasks, plan.inputs, plan.mode, minimum, split, seed, plan.stored, ranges)
        gone = [note for note in built.notes if "left out" in note]
        if plan.refused or gone:
            agree = ["to use such a column, name all inputs as features=; to agree, name it as leave_out="]
            lines = [*plan.refused, *(agree if plan.refused else ()), *gone]
            warnings.warn(f"from_table: {'; '.join(lines)}", stacklevel=2)
        pairs = zip(built.tasks, described.values(), strict=True)
        federation = cls.__new__(cls)
        federation.dataset = replace(built, tasks=tuple(t if each is None else each.on(t) for t, each in pairs))
        return federation

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Its tasks."""
        return self.dataset.tasks

    def partition(self, seed: int = 0) -> Partition:
        """Return who holds what in a run with this seed."""
        assert self.dataset.deal is not None
        return self.dataset.deal(Pool.of(self.dataset), seed)

    def __repr__(self) -> str:
        shares = self.partition().shares
        listed = [f"{s.client} ({', '.join(s.tasks)}; {len(s.train)} + {len(s.val)})" for s in shares[:8]]
        more = f", and {len(shares) - 8} more" if len(shares) > 8 else ""
        tasks = ", ".join(f"{t.name} ({t.kind}, {t.channels})" for t in self.tasks)
        return (
            f"Federation: {len(shares)} clients with train + validation examples: {', '.join(listed)}{more}; tasks: "
            f"{tasks}; {len(self.dataset.test)} test examples; {sized(self.dataset.input_shape, self.dataset.signal)}"
        )


def _public(inputs: Any, shape: tuple[int, ...], is_real: bool = False) -> Tensor:
    """Return the inputs of a public set as models take them, as real numbers with `is_real`.

    Raises DataError for another shape than the clients'.
    """
    x = as_input(inputs, "Federation, public")
    x = x.float() if is_real and x.dtype == torch.int64 else x
    if x.ndim < 1 or not len(x) or tuple(x.shape[1:]) != tuple(shape):
        found = f"an array of shape {tuple(x.shape)}"
        raise _unfit("Federation, public", found, f"at least one input of shape {tuple(shape)}")
    return _scaled(x)


def _large_labels(parts: Sequence[Piece], known: Mapping[str, Task]) -> list[str]:
    """Return a sentence for each regression task whose labels are so large that training may not converge."""
    sentences = []
    for name, task in known.items():
        base = task.known
        if not isinstance(base, Regression) or (base.mean, base.std) != (0, 1):
            continue
        y = torch.cat([torch.zeros(0), *(part.labels[name] for part in parts if name in part.labels)]).double()
        if not len(y := y[~y.isnan()]):
            continue  # the partition says which client lacks the labels
        mean, std = float(y.mean()), float(y.std(correction=0))
        if max(abs(mean), std) > LARGE:
            sentences.append(
                f"task {name!r}: labels of mean {mean:.3g} and standard deviation {std:.3g} found, so training may not "
                f"converge; let the model predict standardised ones: tasks={{{name!r}: "
                f"fedloom.tasks.Regression({name!r}, mean={mean:.3g}, std={std or 1:.3g})}}"
            )
    return sentences


def _unfit(where: str, what: str, expected: str) -> DataError:
    return DataError(f"{where}: {what} found, expected {expected}")


def _several(argument: str, values: Any, kind: Any = str) -> list[Any]:
    """Return the names or codes of an argument, which may be a single one."""
    many = [values] if isinstance(values, kind) else values
    if isinstance(many, Mapping) or not isinstance(many, Iterable) or not all(isinstance(each, kind) for each in many):
        expected = "texts" if kind is str else "texts or numbers"
        raise DataError(f"from_table: {argument}={values!r} found, expected a list of {expected}")
    return list(many)


def _known(name: str, task: Any) -> dict[str, Any]:
    """Return what a description says of a column's task."""
    if task is None:
        return {}
    if not isinstance(task, Description):
        raise DataError(f"from_table, tasks: {name!r} is {task!r}, expected fl.task(...)")
    if task.ignore is not None:
        raise DataError(f"from_table, tasks: {name!r} has ignore={task.ignore!r}; name such cells as missing=")
    settings = {"kind": task.kind, "classes": task.classes, "metric": task.judge or None, "columns": task.columns}
    return {key: value for key, value in settings.items() if value is not None}


def _tasks(tasks: Any) -> dict[str, Task]:
    if not isinstance(tasks, Mapping) or not tasks:
        raise _unfit("Federation", f"tasks={tasks!r}", "{name: fl.task(...)}")
    known = {}
    for name, each in tasks.items():
        if not isinstance(each, Description | Task):
            raise DataError(f"Federation, tasks: {name!r} is {each!r}, expected fl.task(...)")
        if isinstance(each, Description) and each.columns is not None:
            raise DataError(f"Federation, tasks: {name!r} has columns=, which are those of a table; say classes=")
        known[str(name)] = each.named(str(name)) if isinstance(each, Description) else replace(each, name=str(name))
    return known


def _signal(parts: Sequence[Piece], said: Any) -> Signal | None:
    """Return the kind of the inputs, as stated or by their shape and type; of tokens in memory the vocabulary, too."""
    first, whole = parts[0], parts[0].dtype == torch.int64
    try:
        signal = stated(said) or inferred(first.shape, whole)
    except ValidationError:
        raise _unfit("Federation", f"signal={said!r}", f"one of {', '.join(map(repr, AXES))}") from None
    if said is None and whole and len(first.shape) > 1:
        found = f"whole numbers of shape {first.shape} found, which may be of several kinds"
        advice = "add signal='series' to make float32 of them, or signal='tokens'; make images uint8 or floats"
        raise DataError(f"{first.where}: {found}: {advice}")
    if signal is None:
        return None
    is_other = len(first.shape) != len(AXES[signal.kind]) and signal.kind != "tokens"  # a model may want them in rows
    if said is not None and (is_other or whole != (signal.kind == "tokens")):
        numbers = "int64" if signal.kind == "tokens" else "uint8 or floating point"
        inputs = f"inputs of shape {first.shape}, {str(first.dtype).removeprefix('torch.')}"
        raise _unfit(first.where, inputs, f"{signal.kind}: {' x '.join(AXES[signal.kind])}, {numbers}")
    sources = [part.source for part in parts]
    if not whole or not all(isinstance(source, Tensor) for source in sources):
        return signal
    if said is None and any(bool((source < 0).any()) for source in sources):
        return signal  # whole numbers of some other meaning, for a model that knows it
    return with_vocabulary(signal, sources, first.where)


def _dealt(data: Any, partitioner: Any) -> dict[str, Client]:
    """Return the partitions of a partitioner of flwr-datasets as clients. It may have its data set already."""
    what = f"Federation, partition {type(partitioner).__name__}"
    if isinstance(data, Dataset):
        raise _unfit(what, "a fedloom Dataset", "a split of Hugging Face datasets")
    try:
        if not partitioner.is_dataset_assigned():
            partitioner.dataset = data
        return {who: Client(partitioner.load_partition(i)) for i, who in enumerate(ids(partitioner.num_partitions))}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{what}: {error}") from error


def _rule(partition: Any) -> Any:
    """Return a partition in one of the forms that `Federation` takes as a function of (pool, seed)."""
    if isinstance(partition, str):
        partition = {"name": partition}
    if isinstance(partition, Mapping) and "name" in partition:
        admit(names_in(partition), Origin.TYPED, "Federation, partition")
        if problem := PARTITIONERS.problem(partition["name"]):
            raise DataError(f"Federation, partition: {problem}")
        entry = PARTITIONERS[partition["name"]]
        given = {k: v for k, v in partition.items() if k != "name"}
        params = dict(checked(entry.params, given, f"Federation, partition {entry.name!r}: ", DataError, "; "))
        return lambda pool, seed: as_partition(entry.make(pool, seed, **params), pool, seed)
    rule = PARTITIONERS.of("own", partition).make if callable(partition) else lambda pool, seed: partition
    return lambda pool, seed: as_partition(rule(pool, seed), pool, seed)


def _named(clients: Any) -> dict[str, Client]:
    """Return the clients by their names as texts."""
    if not isinstance(clients, Mapping) or not clients:
        raise _unfit("Federation", f"clients={clients!r}", "{name: fl.Client(...)}")
    named: dict[str, Client] = {}
    for who, client in clients.items():
        if not isinstance(client, Client):
            raise DataError(f"Federation, clients: {who!r} is {type(client).__name__}, expected fl.Client(...)")
        if str(who) in named:
            raise DataError(f"Federation, clients: expected different names, found {who!r} twice")
        try:
            named[client_name(str(who))] = client
        except ValueError as error:
            raise DataError(f"Federation, clients: {error}") from None
    return named


def _groups(group: Any, count: int, where: str) -> np.ndarray[Any, Any]:
    """Return the groups of `count` examples. Raises DataError for what is not one number or text for each."""
    values = np.asarray(group)
    if values.shape != (count,) or values.dtype.kind not in "biufUS" or (values != values).any():
        shown = f"group= with {values.dtype} of shape {values.shape}"
        raise _unfit(where, shown, f"{count} numbers or texts, one for each example")
    return values


def _clients(
    clients: Mapping[str, Client], known: Mapping[str, Task], keys: Keys
) -> tuple[list[Piece], Any, np.ndarray[Any, Any] | None]:
    """Return the clients' data one after another, the function that says who holds what, and the examples' groups."""
    parts: list[Piece] = []
    owners: list[tuple[np.ndarray[Any, Any] | None, int]] = []
    spans: list[tuple[str, dict[str, float], np.ndarray[Any, Any], Any]] = []

    def span(data: Any, tasks: Mapping[str, Task], where: str, group: Any = None) -> np.ndarray[Any, Any]:
        start = sum(map(len, parts))
        parts.append(read(data, tasks, where, keys))
        owners.append((None if group is None else _groups(group, len(parts[-1]), where), len(parts[-1])))
        return np.arange(start, start + len(parts[-1]), dtype=np.int64)

    for who, client in sorted(clients.items()):
        weights = _weights(who, client.tasks, known)
        mine = {name: known[name] for name in weights}
        train, val = span(client.train, mine, f"client {who!r}, train", client.group), client.val
        if client.tasks is None:  # a client without any label of a task lacks it
            mine = {name: known[name] for name, y in parts[-1].labels.items() if _labelled(y).any()}
            weights = {name: weights[name] for name in mine}
            if not mine:
                raise DataError(f"client {who!r}, train: no example has a label of any task ({', '.join(known)})")
        if not isinstance(val, bool | int | float | str | None):
            val = span(val, mine, f"client {who!r}, val")
        elif isinstance(val, bool | str | None) or not 0 <= val < 1:
            raise _unfit(f"client {who!r}", f"val={val!r}", "a share from 0 to below 1, or data")
        spans.append((who, weights, train, val))
    own = {who for who, client in clients.items() if client.test is not None}

    def deal(pool: Pool, seed: int) -> Partition:
        priority = by_rank(pool, seed)
        shares = []
        for who, weights, index, val in spans:
            train, apart = (index, val) if isinstance(val, np.ndarray) else set_apart(index, val, priority, pool.group)
            shares.append(Share(who, weights, train, apart, who if who in own else None))
        partition = Partition(tuple(shares))
        partition.check(pool)
        return partition

    return parts, deal, joined_groups(owners)


def _weights(who: str, tasks: Any, known: Mapping[str, Task]) -> dict[str, float]:
    tasks = list(known) if tasks is None else tasks
    if isinstance(tasks, str) or not isinstance(tasks, Mapping | Iterable):
        raise _unfit(f"client {who!r}", f"tasks={tasks!r}", "a list of names, or {name: weight}")
    weights: dict[str, float] = {}
    for name, weight in tasks.items() if isinstance(tasks, Mapping) else ((task, 1) for task in tasks):
        if name not in known:
            raise DataError(f"client {who!r}: {unknown('task', name, known)}")
        if name in weights:
            raise _unfit(f"client {who!r}", f"tasks={tasks!r}", f"{name!r} once")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise DataError(f"client {who!r}, task {name!r}: expected a weight above 0, found {weight!r}")
        weights[name] = float(weight)
    if not weights:
        raise DataError(f"client {who!r}: tasks is empty, expected at least one of {', '.join(known)}")
    return weights


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

    def turned(self, inputs: Tensor, where: str, axes: int = 2) -> Tensor:
        """Return an input, or many (three `axes`), with channels before steps, and of the type that its kind has."""
        inputs = inputs.float() if self.is_measured and inputs.dtype == torch.int64 else inputs
        return turned(inputs, where, axes) if self.is_turned else inputs

    def chosen(self, item: Mapping[str, Any], tasks: Mapping[str, Task], where: str) -> tuple[Any, dict[str, Any]]:
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


def read(data: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> Piece:
    """Read inputs and labels, and check them."""
    x: Any
    y: Any
    x, y = data if isinstance(data, tuple | list) and len(data) == 2 else (None, None)
    files: Mapping[str, Sequence[Path]] = {}
    is_folder = isinstance(x, str | Path)
    if isinstance(data, TensorDataset):
        x, *rest = data.tensors
        if len(rest) != len(tasks):
            wanted = f"one for each of the tasks {', '.join(tasks)}"
            raise _unfit(where, f"a TensorDataset with {len(rest)} columns of labels", wanted)
        y = dict(zip(tasks, rest, strict=True))
    elif hasattr(data, "iloc") and hasattr(data, "columns"):
        use = "such as (df[features], df[label]); or use fl.Federation.from_table(df, site=..., tasks=...)"
        raise DataError(f"{where}: a table found, expected (inputs, labels), {use}")
    elif is_folder:
        x, y, files = read_folders(Path(x).expanduser(), _by_task(y, tasks, where), tasks, keys.ignored, where)
    elif isinstance(data, Mapping) and keys.inputs in data:
        x, y = keys.chosen(data, tasks, where)
    elif not (isinstance(x, Tensor | np.ndarray | list) or hasattr(x, "to_numpy")):
        return _items(data, tasks, where, keys)
    is_ragged = isinstance(x, list) and all(isinstance(row, list | tuple) for row in x) and len(set(map(len, x))) > 1
    if is_ragged and keys.is_measured:
        raise _uneven(x, where)
    inputs = keys.turned(_padded(x, keys.padding, where) if is_ragged else as_input(x, where), where, 3)
    if inputs.ndim < 2 or not len(inputs):
        raise _unfit(where, f"inputs of shape {tuple(inputs.shape)}", "N x ... with N above 0")
    finite(inputs, where)
    if y is None:
        raise _unfit(where, "inputs without labels", f"labels of {', '.join(tasks)}")
    by_task = _by_task(y, tasks, where)
    labels = {}
    for name, task in tasks.items():
        numbers = None if (column := by_task.get(name)) is None else _numbers(column, task, where)
        labels[name] = _column(numbers, task, inputs.shape, where, keys.ignored.get(name), files.get(name, ()))
    _some(labels, by_task, where)
    is_stored = is_folder and inputs.is_floating_point()
    return Piece(where, inputs, labels, tuple(inputs.shape[1:]), inputs.dtype, is_ragged, is_stored)


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
    if not all(isinstance(token, int) for row in rows for token in row):
        raise _uneven(rows, where)
    if padding is None and any(0 in row for row in rows):
        raise DataError(
            f"{where}: lists of different lengths found. They are padded with 0, but 0 is a token too: add "
            "signal=fedloom.data.Signal(kind='tokens', padding=...) with a number that no list contains"
        )
    tokens = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tokens, batch_first=True, padding_value=padding or 0)


def _aligned(pieces: list[Piece], padding: int | None) -> list[Piece]:
    """Return the pieces with tokens as long as the longest, where lists of different lengths were filled up."""
    if not any(piece.is_ragged for piece in pieces):
        return pieces
    width = max(piece.shape[0] for piece in pieces)
    fill = [functional.pad(p.source, (0, width - p.shape[0]), value=padding or 0) for p in pieces]
    return [replace(piece, source=x, shape=(width,)) for piece, x in zip(pieces, fill, strict=True)]


def _items(data: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> Piece:
    """Read a map-style data set: its labels once, its inputs when they are wanted."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | bytes | Mapping):
        hint = ""
        if isinstance(data, Mapping):
            hint = f"; its keys are {', '.join(map(str, data))}: name them with inputs= and labels="
        elif hasattr(data, "__iter__") and not hasattr(data, "__len__"):
            hint = "; what can only be iterated over has no positions to deal out"
        raise _unfit(where, type(data).__name__, f"{FORMS}{hint}")
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
        finite(x[None], about)
        seen |= dict.fromkeys(y)
        for name in tasks:
            values[name].append(None if (value := y.get(name)) is None else np.asarray(value))
    assert first is not None
    _some(values, seen, where if seen or keys.labels is None else f"{where}, labels={dict(keys.labels)}")
    labels = {}
    for name, task in tasks.items():
        numbers = _numbers(values[name], task, where)
        labels[name] = _column(numbers, task, (count, *first.shape), where, keys.ignored.get(name))
    return Piece(where, data, labels, tuple(first.shape), first.dtype)


def _pair(item: Any, tasks: Mapping[str, Task], where: str, keys: Keys) -> tuple[Any, Mapping[str, Any]]:
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
        raise _unfit(where, type(item).__name__, "(x, y), (x, {task: y}) or a mapping")
    x, *rest = item
    if len(rest) == 1:
        return x, _by_task(rest[0], tasks, where)
    if len(rest) != len(tasks):
        raise _unfit(where, f"{len(rest)} labels", f"one for each of {', '.join(tasks)}")
    return x, dict(zip(tasks, rest, strict=True))


def _by_task(labels: Any, tasks: Mapping[str, Task], where: str) -> Mapping[str, Any]:
    """Return labels by task: as they are, or as those of the only task."""
    if isinstance(labels, Mapping):
        return labels
    if len(tasks) > 1:
        raise _unfit(where, "one label an example", f"{{task: label}} for {', '.join(tasks)}")
    return {next(iter(tasks)): labels}


def _numbers(labels: Any, task: Task, where: str) -> Tensor | None:
    """Return labels as a tensor; None in a list is no label, and there is no tensor if that is all it has."""
    if isinstance(labels, list) and any(label is None for label in labels):
        if (some := next((label for label in labels if label is not None), None)) is None:
            return None
        # Not 255 for classes: beside 0 alone it would look like a mask in black and white.
        blank = np.full(np.shape(some), -1 if task.kind in CLASSES else _absent(task))
        labels = [blank if label is None else label for label in labels]
    try:
        return labels if isinstance(labels, Tensor) else torch.as_tensor(np.array(labels))
    except (TypeError, ValueError):
        raise _unfit(f"{where}, task {task.name!r}", f"labels such as {labels[0]!s}", "numbers") from None


def _some(labels: Mapping[str, Any], there: Iterable[str], where: str) -> None:
    if not set(labels) & set(there):
        raise _unfit(where, f"labels of {', '.join(map(str, there)) or 'nothing'}", f"those of {', '.join(labels)}")


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
        raise _unfit(about, what, f"{size[0]}, one for each example")
    if values.is_complex():
        raise _unfit(about, f"labels of {values.dtype}", "real or whole numbers")
    if task.dense:
        return _maps(values, task, size, about, ignore, files)
    shown = f"labels of shape {tuple(values.shape)}"
    if task.kind == "multilabel":
        if values.shape[1:] != (task.channels,):
            raise _unfit(about, shown, f"N x {task.channels}, for classes={task.channels}")
        values = values.float()
        values = torch.where((values == -1) | (values == (-1 if ignore is None else ignore)), torch.nan, values)
        if len(stray := values[bad := (values != 0) & (values != 1) & ~values.isnan()]):
            raise _unfit(_at(about, bad, files), f"the label {stray[0]:g}", "0 or 1 (-1 or NaN: no label)")
        return values
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise _unfit(about, shown, "one number an example")
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
        raise _unfit(about, f"labels of {values.dtype}", f"whole numbers from 0 to {task.channels - 1} (-1: no label)")
    values = values.long()
    if len(stray := values[(values < -1) | (values >= task.channels)]):
        raise _unfit(_at(about, values == stray.max(), files), f"the label {stray.max()}", _classes(task, -1))
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
        raise _unfit(about, f"labels of shape {tuple(values.shape)} for inputs of shape {tuple(size)}", wanted)
    values = values if normals or values.ndim == 3 else values[:, 0]
    present = sorted({*values.unique().tolist()} - {-1, ignore}) if task.kind in CLASSES else []
    if ignore is not None:
        values = torch.where(values == ignore, torch.tensor(IGNORE), values)
    if task.kind not in CLASSES:
        values = values.float()
        stray = values[bad := ((values < 0) | (values > 1)) & (values != IGNORE) & (values != -1)]
        if task.kind in ("edge", "saliency") and len(stray):
            raise _unfit(_at(about, bad, files), f"the label {stray[0]:g}", f"0 to 1 ({IGNORE}: no label)")
        if isinstance(depth := task.known, Depth):
            metres = values[read_depth(values, values[:, None])[1]]
            if 2 * int((metres >= depth.limit).sum()) > len(metres):  # they would train, but not be measured
                raise _unfit(
                    about,
                    f"depths from {metres.min():g} to {metres.max():g}",
                    f"metres, most of them below {depth.limit:g}; divide millimetres by 1000 (files may be .tif images "
                    f"of floats), or raise the limit: fedloom.tasks.Depth({task.name!r}, limit=...)",
                )
        return values
    if values.is_floating_point():
        raise _unfit(about, f"labels of {values.dtype}", "whole numbers, the classes of pixels")
    if present == [0, IGNORE]:
        raise DataError(
            f'{about}: only the labels 0 and {IGNORE} found, and {IGNORE} means "no label"; divide the masks by '
            f"{IGNORE}, or add ignore={IGNORE} if these pixels have no label"
        )
    if strays := [label for label in present if not 0 <= label < task.channels and label != IGNORE]:
        raise _unfit(_at(about, values == strays[0], files), f"the label {strays[0]}", _classes(task, IGNORE))
    return torch.where(values == -1, IGNORE, values.short()).to(torch.uint8)


def as_input(x: Any, where: str) -> Tensor:
    """Return an input, or many, as a tensor: float32, uint8 as it is, whole numbers (tokens) as int64. An image of
    Pillow becomes C x H x W."""
    if hasattr(x, "getbands") and hasattr(x, "size"):
        image = np.asarray(x)
        x = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    try:
        x = x.to_numpy() if hasattr(x, "to_numpy") else x
        tensor = x if isinstance(x, Tensor) else torch.as_tensor(np.array(x))
    except (TypeError, ValueError):
        if isinstance(x, list) and x and all(hasattr(row, "__len__") and not isinstance(row, str) for row in x):
            raise _uneven(x, where) from None
        raise _unfit(where, f"an input of type {type(x).__name__}", "a tensor, an array or numbers") from None
    if tensor.is_complex():
        raise _unfit(where, f"inputs of {tensor.dtype}", "real or whole numbers")
    whole = tensor if tensor.dtype == torch.uint8 else tensor.long()
    return tensor.float() if tensor.is_floating_point() else whole


def _scaled(x: Tensor) -> Tensor:
    """Return inputs as models take them: bytes between 0 and 1, others as they are."""
    return x.float().div(255) if x.dtype == torch.uint8 else x


def gathered(
    parts: Sequence[Piece], tasks: Mapping[str, Task], like: Piece, keys: Keys, domain: Tensor | None = None
) -> Examples:
    """Join parts, whose inputs are like those of `like`: in memory where all are, else read example by example."""
    shape = like.shape
    labels = {}
    for name, task in tasks.items():
        columns = [p.labels[name] if name in p.labels else _no_labels(task, (len(p), *shape)) for p in parts]
        labels[name] = torch.cat([_no_labels(task, (0, *shape)), *columns])
    every = [pair for part in parts for pair in part.labels.items()]
    told = [(name, y) for name, y in every if y.ndim > 1 or y.is_floating_point()]  # classes tell it themselves
    annotated = {name: _labelled(labels[name]) for name, y in told if not _labelled(y).all()}
    tensors = [part.source for part in parts if isinstance(part.source, Tensor)]
    if len(tensors) == len(parts):
        inputs = torch.cat(tensors) if tensors else torch.zeros(0, *shape, dtype=like.dtype)
        return TensorExamples(inputs, labels, domain, annotated=annotated)
    items = Items(tuple((p.where, p.source) for p in parts), shape, like.dtype, keys)
    held = sum(tensor.nbytes for tensor in tensors)
    return ItemExamples(
        items, sum(map(len, parts)), shape, labels, domain, annotated=annotated, prefetch=False, held=held
    )


def _labelled(column: Tensor) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which examples have a label."""
    if column.ndim == 1 and not column.is_floating_point():
        return (column >= 0).numpy()
    known = ~column.isnan() & (column != IGNORE) & (column != -1) if column.ndim > 1 else ~column.isnan()
    return (known.flatten(1).any(1) if column.ndim > 1 else known).numpy()


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
            raise _unfit(about, f"an input of shape {tuple(x.shape)}", f"{self.shape} as the first example has")
        return _scaled(x)
