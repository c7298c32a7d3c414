"""A partition as a table of clients, and the pool of labels that a partitioner sees."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.core.errors import DataError, at, unknown
from fedloom.core.settings.section import ClientId, Positive, client_name, explain, found

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

Labels = np.ndarray[Any, Any]
Indices = np.ndarray[Any, np.dtype[np.int64]]
_Position = Annotated[int, Field(ge=0, lt=10**15)]


@dataclass(frozen=True, eq=False)
class Pool:
    """Labels and domains of all train examples, never inputs: index i is the i-th train example."""

    labels: Mapping[str, Labels]
    """Task name -> labels (N) of the train part; the order of the tasks is the data set's."""
    domain: Labels | None = None
    domains: tuple[str, ...] = ()
    """Names of the values of `domain`."""
    deal: Callable[[Pool, int], Partition] | None = None
    """The function that deals the examples out, where the data set has one."""
    group: Indices | None = None
    """Number of each example's group (N), from 0: validation data are whole groups."""

    @staticmethod
    def of(dataset: Dataset) -> Pool:
        """Return the pool of a data set's train part."""
        part, group = dataset.train, dataset.group
        labels = {task.name: part.labels_of(task.name) for task in dataset.tasks}
        domain = None if part.domain is None else part.domain.numpy()
        group = None if group is None else np.unique(group, return_inverse=True)[1]
        return Pool(labels, domain, dataset.domains, dataset.deal, group)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names."""
        return tuple(self.labels)

    def labelled(self, task: str, index: Indices | None = None) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which examples (N), or which of those at `index`, have a label of `task`."""
        return labelled(self.labels[task], index)

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


def are_classes(labels: Labels) -> bool:
    """Return whether labels are one class per example (N integers), not maps or real numbers."""
    return labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)


def labelled(labels: Labels, index: Indices | None = None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which examples (N), or of those at `index`, have a label: not -1. Maps and real numbers are labels."""
    if are_classes(labels):
        return np.asarray((labels if index is None else labels[index]) >= 0)
    return np.ones(len(labels if index is None else index), bool)


def class_counts(labels: Labels, classes: int) -> Indices:
    """Count the labels (N integers) of each class (C); -1, no label, is not counted."""
    return np.bincount(labels[labelled(labels)], minlength=classes)


@dataclass(frozen=True, eq=False)
class Share:
    """One client's share: its tasks with loss weights, and its positions in the train part (sorted)."""

    client: str
    tasks: Mapping[str, float]
    train: Indices
    val: Indices
    domain: str | None = None

    def __post_init__(self) -> None:
        """Raise DataError for a client's name that cannot be one."""
        try:
            client_name(self.client)
        except ValueError as error:
            raise DataError(f"clients: {error}") from None

    @property
    def about(self) -> dict[str, Any]:
        """The share's name, tasks and domain, in words."""
        return {"client": self.client, "tasks": dict(self.tasks), "domain": self.domain}

    @property
    def index(self) -> Indices:
        """All positions of the share."""
        return np.concatenate([self.train, self.val])

    def check(self, pool: Pool) -> None:
        """Raise DataError unless the share has examples and tasks of the pool, and labels of each task."""
        who = f"client {self.client!r}"
        if not len(self.train):
            raise DataError(f"{who} has no training example")
        if not self.tasks:
            raise DataError(f"{who} has no task")
        index = self.index
        if len(wrong := index[(index < 0) | (index >= len(pool))]):
            found = f"position {wrong[0]} found, expected 0 to {len(pool) - 1}: the data have {len(pool)} examples"
            asked = "had they more when the partition was made?"
            raise DataError(f"{who}, tasks {', '.join(self.tasks)}: {found}; {asked}")
        if len(np.unique(index)) < len(index):
            raise DataError(f"{who} holds an example twice (in its train part, its validation part or both)")
        for task, weight in self.tasks.items():
            if task not in pool.labels:
                raise DataError(f"{who}: {unknown('task', task, pool.tasks)}")
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(f"{who}, task {task!r}: expected a weight above 0, found {weight}")
            if not pool.labelled(task, index).any():
                raise DataError(f"{who} has no labelled example of its task {task!r}")
        if self.domain is not None and self.domain not in pool.domains:
            raise DataError(f"{who}: {unknown('domain', self.domain, pool.domains)}")


@dataclass(frozen=True, eq=False)
class Partition:
    """The table of all clients, sorted by client id."""

    shares: tuple[Share, ...]
    where: str = ""
    """The file that it was read from, for messages."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value: clients with tasks, domain and indices, and the hash of all that."""
        clients = [s.about | {"train": s.train.tolist(), "val": s.val.tolist()} for s in self.shares]
        return {"hash": self.hash, "clients": clients}

    @staticmethod
    def from_json(value: Any, where: str = "partition.json") -> Partition:
        """Rebuild a partition from `to_json`. `where` is the file that it stands in.

        DataError names the file, client and field for what `to_json` does not give, and where the hash is another one.
        """
        stated, clients = (value.get(key) if isinstance(value, Mapping) else None for key in ("hash", "clients"))
        if not isinstance(stated, str) or not isinstance(clients, list):
            raise DataError(f"{where}: expected the key 'hash' with a text and the key 'clients' with a list")
        for number, one in enumerate(clients):
            try:
                _Saved.model_validate(one)
            except ValidationError as error:
                path, message = explain(error, _Saved)[0]
                place = ", ".join(part for part in (where, _named(one, number), path) if part)
                raise DataError(f"{place}: {message}") from None
        shares = tuple(
            Share(c["client"], c["tasks"], np.array(c["train"], np.int64), np.array(c["val"], np.int64), c["domain"])
            for c in clients
        )
        partition = Partition(shares, where)
        if partition.hash != stated:
            raise DataError(f"{where}: the partition was changed: expected hash {stated}, found {partition.hash}")
        return partition

    def without(self, positions: Indices) -> Partition:
        """Return the partition without some positions."""
        left = [[part[~np.isin(part, positions)] for part in (share.train, share.val)] for share in self.shares]
        shares = [replace(s, train=train, val=val) for s, (train, val) in zip(self.shares, left, strict=True)]
        return replace(self, shares=tuple(shares))

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that change with any client, task, weight, domain or index."""
        digest = hashlib.sha256()
        for s in self.shares:
            digest.update(json.dumps([s.client, sorted(s.tasks.items()), s.domain]).encode())
            for part in (s.train, s.val):
                digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def by_task(self, pool: Pool) -> Partition:
        """Return the partition with a client per client and task, CLIENT-TASK, where a client has several."""
        shares = []
        for s in self.shares:
            for task, weight in s.tasks.items() if len(s.tasks) > 1 else ():
                train, val = (part[pool.labelled(task, part)] for part in (s.train, s.val))
                shares.append(Share(f"{s.client}-{task}", {task: weight}, train, val, s.domain))
            shares += [s] if len(s.tasks) == 1 else []
        return Partition(tuple(sorted(shares, key=lambda share: share.client)), self.where)

    def table(self, pool: Pool) -> list[dict[str, Any]]:
        """Return one row per client: client, tasks (with weights), domain, train and val (sizes), and labels.

        `labels` maps each of the client's tasks to its counts per class (index = class) over train and validation, or
        to the number of examples where the task's labels are not classes.
        """
        rows = []
        for s in self.shares:
            labels: dict[str, list[int] | int] = {task: len(s.index) for task in s.tasks}
            for task in s.tasks:
                if are_classes(own := pool.labels[task]):
                    labels[task] = class_counts(own[s.index], int(own.max(initial=0)) + 1).tolist()
            rows.append(s.about | {"train": len(s.train), "val": len(s.val), "labels": labels})
        return rows

    def check(self, pool: Pool, shared: bool = False) -> None:
        """Raise DataError unless this partition fits the pool and its rules; `shared`: clients share examples."""
        names = [s.client for s in self.shares]
        holder = np.full(len(pool), -1)
        with at(self.where):
            if names != sorted(set(names)):
                raise DataError(f"expected different client ids in sorted order, found {names}")
            for number, s in enumerate(self.shares):
                s.check(pool)
                taken = s.index[holder[s.index] >= 0]
                if len(taken) and not shared:
                    both = f"clients {names[holder[taken[0]]]!r} and {s.client!r} both hold example {taken[0]}"
                    raise DataError(f"{both} ({len(taken)} in common); expected disjoint shares")
                holder[s.index] = number
            for task in pool.tasks:
                if not any(task in s.tasks for s in self.shares):
                    raise DataError(f"no client holds the task {task!r}")


class _Saved(BaseModel):
    """One client in partition.json."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    client: ClientId
    tasks: dict[str, Positive]
    domain: str | None
    train: list[_Position]
    val: list[_Position]


def _named(saved: Any, number: int) -> str:
    """Return the words for a client in partition.json, as far as they can be read: its number, name and tasks."""
    known = saved if isinstance(saved, Mapping) else {}
    name = f" ({found(known['client'])})" if "client" in known else ""
    tasks = known.get("tasks")
    return f"client {number}{name}" + (f", tasks {', '.join(tasks)}" if isinstance(tasks, Mapping) else "")
