"""Users' own data: arrays, tensors and torch data sets of clients become one data set that says who holds what."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from fedloom.core.errors import DataError, RunWarning, first_of, unknown
from fedloom.core.settings.section import client_name
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import checked
from fedloom.data.dataset import Dataset
from fedloom.data.inputs import LARGE, Axes, badly_scaled, copied, doubtful_axes, far_off, stated, with_vocabulary
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share
from fedloom.data.partition.rules import as_partition, by_rank, ids, set_apart
from fedloom.data.pieces import Keys, Piece, aligned, as_input, gathered, read, scaled, unfit
from fedloom.data.prepare import Reading, channel_moments, has_label, joined_groups
from fedloom.models.signal import AXES, Kind, Signal, inferred, sized
from fedloom.models.tasks.labels import Regression
from fedloom.models.tasks.own import Description
from fedloom.models.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Client:
    """One client of a `Federation`.

    train   its examples: a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping; a TensorDataset
            (x, then a column of labels for each task); (x, y) or (x, {task: y}) as arrays; a split of Hugging Face
            datasets. y is the label of its only task, or a mapping
    val     the share of them to set apart for validation, or a separate data set
    tasks   names of its tasks, or {name: weight of the loss}; by default the tasks for which one of its training
            examples has a label
    test    its own test data; by default the federation's. A client with its own test data forms its own domain
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
    """Clients with their data and tasks, for `fl.run` instead of a recipe's `data` and `partition`.

    clients    {name: Client}
    tasks      {name: fl.task(...) or a Task}
    test       test data that all clients share; not needed if clients have their own, or only validate
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
    size       for folders of images: images become size x size pixels (bilinear), and their maps too (nearest pixels)
    axes       of series: "NCT" (channels before steps, as models take them; the default), or "NTC", which is turned

    Tensors and arrays are used as they are, except that uint8 is scaled to 0..1, and lists of tokens of different
    lengths are padded with the signal's padding, by default 0. Other data sets are read example by example, batch after
    batch, and their labels once at the beginning. Their draws from torch's random stream in training, such as
    augmentations, follow from the run's seed.

    A run warns if test examples in memory are exact copies of training examples, in up to a million examples and 1 GiB
    of inputs (features of whole numbers are not compared). A Federation warns if labels or inputs (except images) have
    a scale at which training may not converge, and if a client's inputs may be in other units.

    Raises DataError for data that do not fit; it names the client, the task, the value found and the value expected.
    """

    _drawn: Callable[[int], Federation] | None = None
    _redrawn_of: Federation | None = None
    """The federation whose rows these are, with the split of another seed."""

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
        size: int | None = None,
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
            if any(each is not None for each in (tasks, test, signal, size)):
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
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise DataError(f"Federation: size={size!r} found, expected a whole number of pixels")
        ignored = {str(t): d.ignore for t, d in (tasks or {}).items() if isinstance(d, Description)}
        padding = signal.padding if isinstance(signal, Signal) else None
        is_measured = getattr(signal, "kind", signal) in ("series", "features")
        named = None if labels is None else dict(labels)
        keys = Keys(inputs, named, ignored, padding, axes == "NTC", is_measured, size)
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
        every = aligned([*parts, *tests], padding)
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
            raise unfit(first.where, f"axes={axes!r} of {signal.kind}", "axes for series only: leave it out")
        learned = [piece for piece in parts if not piece.where.endswith(", val")]
        trained, measured = (
            {p.where: p.source.detach() for p in pieces if isinstance(p.source, Tensor)} for pieces in (learned, tests)
        )
        stored: Literal["stored", "stretched"] = "stored" if size is None else "stretched"
        self.dataset = Dataset(
            name,
            tuple(known.values()),
            *(train, tested, tuple(own), deal, signal),
            reading=Reading(stored=stored if first.is_stored else None, turned=keys.is_turned),
            public=None if public is None else _public(public, first.shape, is_measured),
            models={who: client.model for who, client in (clients or {}).items() if client.model is not None},
            group=owners,
            doubts=copied(trained, measured, signal),
        )
        moments = {where: channel_moments(x) for where, x in trained.items() if x.is_floating_point() and len(x) > 1}
        far = far_off(moments, signal)
        told = list[str]()
        if own and test is None and (without := [who for who in clients or {} if who not in own]):
            said = f"no test data for {first_of(without)}, so numbers on test data are those of the other clients"
            told.append(f"{said}; give these clients test=, or the federation one that all share")
        told += [*_large_labels(parts, known), *(far or badly_scaled(moments, signal))]
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

        source      a pandas.DataFrame; a CSV (also .gz, .xz), .xlsx, Stata or Parquet file, or a folder of them
        site        the column of a row's site; without it each file of a folder, or sheet of a workbook, is one
        tasks       columns, a task each, or {column: fl.task(...)}, or {task: fl.task(kind="multilabel",
                    columns=[...])}; empty cells are no label
        features    the columns that are inputs, or globs; by default all others that pass the checks. A warning names
                    those that do not, with the reason
        leave_out   columns or globs that are no inputs
        missing     cells that mean missing, such as -9 or "?", beside empty ones, NA and NaN
        preprocess  "federated": scale by the counts and sums of all sites, of `minimum` rows or more; "local": each
                    site by its own
        ranges      {column: (least, most)}: under privacy, sums of values clipped to this are sent with noise
        seed        of each site's split into training, validation and test rows; `fl.compare` draws a split for each of
                    its seeds
        group       a column, such as the patient's number: rows with the same cell stay in one part of the split
        time        a column of numbers or times, or several, the longest first: each site's last rows are its test
                    rows. Without it, a column of train and test (and val) says which rows are for tests

        The same as `fedloom init FILE` and the data set `table`. Raises DataError for a table that does not fit. It
        names the column and the site.
        """
        from fedloom.data.tables.columns import ONE_PATIENT, draft
        from fedloom.data.tables.table import RowSplit, build

        if isinstance(tasks, str) or not isinstance(tasks, Sequence | Mapping) or not tasks:
            raise DataError(f"from_table: tasks={tasks!r} found, expected columns, or {{column: fl.task(...)}}")
        described = tasks if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
        known = {str(name): _known(name, each) for name, each in described.items()}
        chosen = None if features is None else _several("features", features)
        away, codes = _several("leave_out", leave_out), _several("missing", missing, str | Real)
        if time is not None and not time:
            raise DataError("from_table: time=[] found, expected a column, or several")
        plan = draft(source, known, site, chosen, away, codes, preprocess, minimum)
        days = time if time is None or isinstance(time, str) else [*time]
        split = RowSplit(group=group, time=days, split=plan.split if time is None else None)

        def drawn(seed: int) -> Federation:
            built = build(plan.table, plan.tasks, plan.inputs, plan.mode, minimum, split, seed, plan.stored, ranges)
            pairs = zip(built.tasks, described.values(), strict=True)
            federation = cls.__new__(cls)
            federation.dataset = replace(built, tasks=tuple(t if each is None else each.on(t) for t, each in pairs))
            return federation

        federation = drawn(seed)
        federation._drawn = drawn
        leaks = () if group is not None else [note.replace("data.", "") for note in plan.notes if ONE_PATIENT in note]
        gone = [*leaks, *(note for note in federation.dataset.notes if "left out" in note)]
        if plan.refused or gone:
            agree = ["to use such a column, name all inputs as features=; to agree, name it as leave_out="]
            lines = [*plan.refused, *(agree if plan.refused else ()), *gone]
            warnings.warn(f"from_table: {'; '.join(lines)}", stacklevel=2)
        return federation

    def redrawn(self, seed: int) -> Federation:
        """Return the rows of the table with the split of a seed; the federation itself where it is of no table."""
        if self._drawn is None:
            return self
        other = self._drawn(seed)
        other._redrawn_of = self
        return other

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of the federation."""
        return self.dataset.tasks

    def partition(self, seed: int = 0) -> Partition:
        """Return the partition of a run with this seed."""
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
        raise unfit("Federation, public", found, f"at least one input of shape {tuple(shape)}")
    return scaled(x)


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
    classes = task.names or task.classes
    settings = {"kind": task.kind, "classes": classes, "metric": task.judge or None, "columns": task.columns}
    return {key: value for key, value in settings.items() if value is not None}


def _tasks(tasks: Any) -> dict[str, Task]:
    if not isinstance(tasks, Mapping) or not tasks:
        raise unfit("Federation", f"tasks={tasks!r}", "{name: fl.task(...)}")
    known = {}
    for name, each in tasks.items():
        if not isinstance(each, Description | Task):
            raise DataError(f"Federation, tasks: {name!r} is {each!r}, expected fl.task(...)")
        if isinstance(each, Description) and each.columns is not None:
            raise DataError(f"Federation, tasks: {name!r} has columns=, which are those of a table; say classes=")
        if isinstance(each, Description) and each.names:
            has = f"names of classes, which are those of a table; say classes={each.classes}"
            raise DataError(f"Federation, tasks: {name!r} has {has}")
        known[str(name)] = each.named(str(name)) if isinstance(each, Description) else replace(each, name=str(name))
    return known


def _signal(parts: Sequence[Piece], said: Any) -> Signal | None:
    """Return the kind of the inputs, as stated or by their shape and type; of tokens in memory the vocabulary, too."""
    first, whole = parts[0], parts[0].dtype == torch.int64
    try:
        signal = stated(said) or inferred(first.shape, whole)
    except ValidationError:
        raise unfit("Federation", f"signal={said!r}", f"one of {', '.join(map(repr, AXES))}") from None
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
        raise unfit(first.where, inputs, f"{signal.kind}: {' x '.join(AXES[signal.kind])}, {numbers}")
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
        raise unfit(what, "a fedloom Dataset", "a split of Hugging Face datasets")
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
        raise unfit("Federation", f"clients={clients!r}", "{name: fl.Client(...)}")
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
        raise unfit(where, shown, f"{count} numbers or texts, one for each example")
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
            mine = {name: known[name] for name, y in parts[-1].labels.items() if has_label(y.numpy()).any()}
            weights = {name: weights[name] for name in mine}
            if not mine:
                raise DataError(f"client {who!r}, train: no example has a label of any task ({', '.join(known)})")
        if not isinstance(val, bool | int | float | str | None):
            val = span(val, mine, f"client {who!r}, val")
        elif isinstance(val, bool | str | None) or not 0 <= val < 1:
            raise unfit(f"client {who!r}", f"val={val!r}", "a share from 0 to below 1, or data")
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
        raise unfit(f"client {who!r}", f"tasks={tasks!r}", "a list of names, or {name: weight}")
    weights: dict[str, float] = {}
    for name, weight in tasks.items() if isinstance(tasks, Mapping) else ((task, 1) for task in tasks):
        if name not in known:
            raise DataError(f"client {who!r}: {unknown('task', name, known)}")
        if name in weights:
            raise unfit(f"client {who!r}", f"tasks={tasks!r}", f"{name!r} once")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise DataError(f"client {who!r}, task {name!r}: expected a weight above 0, found {weight!r}")
        weights[name] = float(weight)
    if not weights:
        raise DataError(f"client {who!r}: tasks is empty, expected at least one of {', '.join(known)}")
    return weights
