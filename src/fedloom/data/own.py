"""Data of one's own: arrays, tensors and torch data sets of clients become one data set that says who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from fedloom.core.errors import DataError, unknown
from fedloom.core.settings.names import client_name
from fedloom.core.settings.section import strict
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.signal import AXES, Kind, Signal, sized, told
from fedloom.data.dataset import Dataset
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share
from fedloom.data.partition.dealing import by_rank, ids, set_apart
from fedloom.data.partition.listed import as_partition
from fedloom.data.reading import Keys, Piece, gathered, read
from fedloom.data.signals import stated, with_vocabulary
from fedloom.models.tasks.own import Description
from fedloom.models.tasks.task import Task


@dataclass(frozen=True, eq=False)
class Client:
    """One client of a `Federation`.

    train   its examples: a torch Dataset with a length that gives (x, y), (x, {task: y}) or a mapping; a TensorDataset
            (x, then a column of labels for each task); (x, y) or (x, {task: y}) as arrays; a split of Hugging Face
            datasets. y is the label of its only task, or a mapping
    val     the share of them that is set apart for validation, or a data set of its own
    tasks   names of its tasks, or {name: weight of the loss}; by default all tasks of the federation
    test    its own test data; by default it shares the federation's. A client with its own is a domain of its own
    """

    train: Any
    val: Any = 0.1
    tasks: Sequence[str] | Mapping[str, float] | None = None
    test: Any = None


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

    Tensors and arrays are used as they are, but that uint8 is scaled to 0..1; other data sets are read example by
    example, batch after batch, and their labels once at the beginning. What they draw from torch's random stream in
    training, such as augmentations, follows from the run's seed.

    Raises DataError for what does not fit, naming the client, the task, what was found and what is expected.
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
        name: str = "federation",
    ) -> None:
        if (clients is None) == (data is None):
            both = "neither" if clients is None else "both"
            raise DataError(f"Federation: {both} of clients= and data= found, expected one of them")
        if (data is None) != (partition is None):
            raise DataError(
                "Federation: data= needs partition=, such as {'name': 'iid', 'clients': 10} or lists of positions"
                if partition is None
                else "Federation: partition= deals out data=, but there are clients= with data of their own"
            )
        if hasattr(partition, "load_partition"):
            clients, data = _dealt(data, partition), None
        if isinstance(data, Dataset):
            if tasks is not None or test is not None or signal is not None:
                raise DataError(
                    "Federation: a fedloom Dataset has tasks, test data and a signal of its own; leave them out"
                )
            self.dataset = replace(data, deal=_rule(partition))
            return
        known = _tasks(tasks)
        if labels is not None and not isinstance(labels, Mapping):
            raise DataError(f"Federation: labels={labels!r} found, expected {{task: key of its label}}")
        keys = Keys(inputs, dict(labels) if labels is not None else None)
        if clients is None:
            parts = [read(data, known, "Federation, data", keys)]
            deal: Any = _rule(partition)
        else:
            clients = _named(clients)
            parts, deal = _clients(clients, known, keys)
        shape, dtype = parts[0].shape, parts[0].dtype
        own = {} if clients is None else {who: c.test for who, c in clients.items() if c.test is not None}
        tests = [] if test is None else [read(test, known, "Federation, test", keys)]
        tests += [read(each, known, f"client {who!r}, test", keys) for who, each in own.items()]
        for part in (*parts, *tests):
            if part.shape != shape:
                raise DataError(f"{part.where}: inputs of shape {part.shape} found, but {parts[0].where} has {shape}")
            if part.dtype != dtype:
                raise DataError(f"{part.where}: inputs of {part.dtype} found, but {parts[0].where} has {dtype}")
        whose = [*([-1] if test is not None else []), *range(len(own))]
        sizes = [len(part) for part in tests]
        domain = torch.repeat_interleave(torch.tensor(whose, dtype=torch.int64), torch.tensor(sizes)) if own else None
        self.dataset = Dataset(
            name,
            tuple(known.values()),
            gathered(parts, known, shape, dtype),
            gathered(tests, known, shape, dtype, domain),
            tuple(own),
            deal,
            _signal([*parts, *tests], signal),
        )

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Its tasks."""
        return self.dataset.tasks

    def partition(self, seed: int = 0) -> Partition:
        """Who holds what in a run with this seed."""
        assert self.dataset.deal is not None
        return self.dataset.deal(Pool.of(self.dataset), seed)

    def __repr__(self) -> str:
        shares = self.partition().shares
        told = [f"{s.client} ({', '.join(s.tasks)}; {len(s.train)} + {len(s.val)})" for s in shares[:8]]
        more = f", and {len(shares) - 8} more" if len(shares) > 8 else ""
        tasks = ", ".join(f"{t.name} ({t.kind}, {t.channels})" for t in self.tasks)
        return (
            f"Federation: {len(shares)} clients with train + validation examples: {', '.join(told)}{more}; tasks: "
            f"{tasks}; {len(self.dataset.test)} test examples; {sized(self.dataset.input_shape, self.dataset.signal)}"
        )


def _tasks(tasks: Any) -> dict[str, Task]:
    if not isinstance(tasks, Mapping) or not tasks:
        raise DataError(f"Federation: tasks={tasks!r} found, expected {{name: fl.task(...)}}")
    known = {}
    for name, each in tasks.items():
        if not isinstance(each, Description | Task):
            raise DataError(f"Federation, tasks: {name!r} is {each!r}, expected fl.task(...)")
        known[str(name)] = each.named(str(name)) if isinstance(each, Description) else replace(each, name=str(name))
    return known


def _signal(parts: Sequence[Piece], said: Any) -> Signal | None:
    """What the inputs are, as said or as their shape and type tell; of tokens in memory the vocabulary, too."""
    first, whole = parts[0], parts[0].dtype == torch.int64
    try:
        signal = stated(said)
    except ValidationError:
        raise DataError(f"Federation: signal={said!r} found, expected one of {', '.join(map(repr, AXES))}") from None
    signal = signal or told(first.shape, whole)
    if signal is None:
        return None
    if said is not None and (len(first.shape) != len(AXES[signal.kind]) or whole != (signal.kind == "tokens")):
        numbers = "int64" if signal.kind == "tokens" else "uint8 or floating point"
        raise DataError(
            f"{first.where}: inputs of shape {first.shape}, {str(first.dtype).removeprefix('torch.')} found, expected "
            f"{signal.kind}: {' x '.join(AXES[signal.kind])}, {numbers}"
        )
    held = [part.source for part in parts]
    if not whole or not all(isinstance(source, torch.Tensor) for source in held):
        return signal
    if said is None and any(bool((source < 0).any()) for source in held):
        return signal  # whole numbers of some other meaning, for a model that knows it
    return with_vocabulary(signal, held, first.where)


def _dealt(data: Any, partitioner: Any) -> dict[str, Client]:
    """The partitions of a partitioner of flwr-datasets as clients. It may have its data set already."""
    what = f"Federation, partition {type(partitioner).__name__}"
    if isinstance(data, Dataset):
        raise DataError(f"{what}: a fedloom Dataset found, expected a split of Hugging Face datasets")
    try:
        if not partitioner.is_dataset_assigned():
            partitioner.dataset = data
        count = partitioner.num_partitions
        return {who: Client(partitioner.load_partition(i)) for i, who in enumerate(ids(count))}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{what}: {error}") from error


def _rule(partition: Any) -> Any:
    """A partition in one of the forms that `Federation` takes, as a function of (pool, seed)."""
    if isinstance(partition, str):
        partition = {"name": partition}
    if isinstance(partition, Mapping) and "name" in partition:
        from fedloom.core.settings.problems import explain

        admit(names_in(partition), Origin.TYPED, "Federation, partition")
        if problem := PARTITIONERS.problem(partition["name"]):
            raise DataError(f"Federation, partition: {problem}")
        entry = PARTITIONERS[partition["name"]]
        try:
            params = dict(strict(entry.params, {k: v for k, v in partition.items() if k != "name"}))
        except ValidationError as error:
            said = "; ".join(f"{path}: {message}" for path, message in explain(error, entry.params))
            raise DataError(f"Federation, partition {entry.name!r}: {said}") from None
        return lambda pool, seed: as_partition(entry.make(pool, seed, **params), pool, seed)
    if callable(partition):
        rule = PARTITIONERS.of("own", partition)
        return lambda pool, seed: as_partition(rule.make(pool, seed), pool, seed)
    return lambda pool, seed: as_partition(partition, pool, seed)


def _named(clients: Any) -> dict[str, Client]:
    """The clients by their names as texts."""
    if not isinstance(clients, Mapping) or not clients:
        raise DataError(f"Federation: clients={clients!r} found, expected {{name: fl.Client(...)}}")
    named: dict[str, Client] = {}
    for who, client in clients.items():
        if not isinstance(client, Client):
            raise DataError(f"Federation, clients: {who!r} is {type(client).__name__}, expected fl.Client(...)")
        if str(who) in named:
            raise DataError(f"Federation, clients: the name {who!r} found a second time, expected one for each client")
        try:
            named[client_name(str(who))] = client
        except ValueError as error:
            raise DataError(f"Federation, clients: {error}") from None
    return named


def _clients(clients: Mapping[str, Client], known: Mapping[str, Task], keys: Keys) -> tuple[list[Piece], Any]:
    """The clients' data one after another, and the function that says whose is what."""
    parts: list[Piece] = []
    held: list[tuple[str, dict[str, float], np.ndarray[Any, Any], Any]] = []
    at = 0
    for who, client in sorted(clients.items()):
        weights = _weights(who, client.tasks, known)
        mine = {name: known[name] for name in weights}
        part = read(client.train, mine, f"client {who!r}, train", keys)
        spans = [part]
        if not isinstance(client.val, bool | int | float | str | None):
            spans.append(read(client.val, mine, f"client {who!r}, val", keys))
        elif isinstance(client.val, bool | str | None) or not 0 <= client.val < 1:
            raise DataError(f"client {who!r}: val={client.val!r} found, expected a share from 0 to below 1, or data")
        ranges = []
        for span in spans:
            ranges.append(np.arange(at, at + len(span), dtype=np.int64))
            at += len(span)
        parts += spans
        held.append((who, weights, ranges[0], ranges[1] if len(ranges) > 1 else float(client.val)))
    own = {who for who, client in clients.items() if client.test is not None}

    def deal(pool: Pool, seed: int) -> Partition:
        priority = by_rank(pool, seed)
        shares = []
        for who, weights, index, val in held:
            train, apart = set_apart(index, val, priority) if isinstance(val, float) else (index, val)
            shares.append(Share(who, weights, train, apart, who if who in own else None))
        partition = Partition(tuple(shares))
        partition.check(pool)
        return partition

    return parts, deal


def _weights(who: str, tasks: Any, known: Mapping[str, Task]) -> dict[str, float]:
    if tasks is None:
        tasks = list(known)
    if isinstance(tasks, str) or not isinstance(tasks, Mapping | Iterable):
        raise DataError(f"client {who!r}: tasks={tasks!r} found, expected a list of names, or {{name: weight}}")
    weights: dict[str, float] = {}
    for name, weight in tasks.items() if isinstance(tasks, Mapping) else ((task, 1) for task in tasks):
        if name not in known:
            raise DataError(f"client {who!r}: {unknown('task', name, known)}")
        if name in weights:
            raise DataError(f"client {who!r}: tasks={tasks!r} found, expected {name!r} once")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise DataError(f"client {who!r}, task {name!r}: expected a weight above 0, found {weight!r}")
        weights[name] = float(weight)
    if not weights:
        raise DataError(f"client {who!r}: tasks is empty, expected at least one of {', '.join(known)}")
    return weights
