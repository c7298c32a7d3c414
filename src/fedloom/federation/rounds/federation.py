"""Clients with their data: a data set and a partition brought together.

Who takes part in a round: a pure function of (seed or secret, round)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.context import Row, draws
from fedloom.core.errors import DataError
from fedloom.core.layout import Layout
from fedloom.data.dataset import Coded, Dataset, Examples, Withheld, apart
from fedloom.data.partition import Indices, Partition, class_counts, labelled
from fedloom.methods.method import Method, Pooled
from fedloom.models.tasks.task import Task
from fedloom.training.config import Training
from fedloom.training.loop import Work


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the examples: positions in train or test. `name` says whose they are: "own" or "shared"."""

    examples: Examples
    positions: Indices
    name: str

    def __len__(self) -> int:
        return len(self.positions)

    def by_labels(self, tasks: Iterable[str]) -> list[tuple[Part, tuple[str, ...]]]:
        """Return the tasks, grouped by the examples that have their labels, with these examples; none is left out."""
        groups: dict[bytes, tuple[Part, list[str]]] = {}
        for task in tasks:
            part = self.of(task)
            groups.setdefault(part.positions.tobytes(), (part, []))[1].append(task)
        return [(part, tuple(names)) for part, names in groups.values()]

    def of(self, task: str) -> Part:
        """Return the examples that have a label of the task; the same object every time."""
        if task not in self._of:
            have = labelled(self.examples.labels_of(task), self.positions)
            self._of[task] = None if have.all() else Part(self.examples, self.positions[have], self.name)
        found = self._of[task]
        return self if found is None else found

    @cached_property
    def _of(self) -> dict[str, Part | None]:
        return {}  # None stands for the part itself: in its own dictionary it would outlive the run

    def has(self, tasks: Iterable[str]) -> dict[str, Tensor]:
        """Return task -> whether the example at each position (up to the last one here) has a label of it.

        Only tasks that lack some labels are in it. A batch takes one lookup, where a search would sort.
        """
        partial = {task: part for task in tasks if (part := self.of(task)) is not self}
        size = int(self.positions.max(initial=-1)) + 1
        return {t: torch.zeros(size, dtype=torch.bool).index_fill_(0, part.index, True) for t, part in partial.items()}

    def spread(self, count: int) -> Part:
        """Return at most `count` of its examples, evenly spaced."""
        if count >= len(self):
            return self
        return Part(self.examples, self.positions[torch.linspace(0, len(self) - 1, count).long().numpy()], self.name)

    @property
    def index(self) -> Tensor:
        """Positions as a tensor."""
        return torch.from_numpy(self.positions)


TOGETHER = "together"
"""The name of who has the examples of all clients."""


def together(parts: Sequence[tuple[Part, Iterable[str]]]) -> Part:
    """Join parts of the same examples in one, each with its labels of the given tasks only."""
    examples = parts[0][0].examples
    held: dict[str, NDArray[np.bool_]] = {}
    some = np.zeros(len(examples), bool)
    for part, tasks in {(id(part), *tasks): (part, tasks) for part, tasks in parts}.values():  # a shared one once
        some[part.positions] = True
        for task in tasks:
            held.setdefault(task, np.zeros(len(examples), bool))[part.of(task).positions] = True
    positions = np.flatnonzero(some)
    if all(mine[positions].all() for mine in held.values()):
        return Part(examples, positions, "all")
    return Part(Withheld(examples, {task: torch.from_numpy(mine) for task, mine in held.items()}), positions, "all")


def coded(examples: Examples, tasks: Iterable[Task], owned: Mapping[str, Sequence[Indices]]) -> Examples:
    """Return examples with the labels of each client's own ones as its tasks say (`Task.codes`)."""
    codes: dict[str, tuple[Tensor, Tensor]] = {}
    for task in tasks:
        which, tables = torch.zeros(len(examples), dtype=torch.int64), [torch.arange(256)]
        for client, parts in owned.items():
            if (table := task.codes(client)) is not None:
                which[torch.from_numpy(np.concatenate(parts))] = len(tables)
                tables.append(table)
        if len(tables) > 1:
            codes[task.name] = which, torch.stack(tables)
    return Coded(examples, codes) if codes else examples


@dataclass(frozen=True, eq=False)
class BuiltClient:
    """One client of a run: its tasks with loss weights, its data, its domain."""

    id: str
    tasks: Mapping[str, tuple[Task, float]]
    train: Part
    val: Part
    test: Part
    domain: str | None = None
    batches: float = 1.0
    """The factor by which its batches are larger than the recipe's."""
    counted: bool = True
    """True if the lengths of its parts are known, which a node may keep to itself."""

    def settings(self, training: Training) -> Training:
        """Return the recipe's settings for this client."""
        if self.batches == 1 and not isinstance(training.epochs, dict):
            return training
        training = training.of(self.domain)
        return training.model_copy(update={"batch_size": round(self.batches * training.batch_size)})

    def part(self, split: str) -> Part:
        """Return train, val or test."""
        return {"train": self.train, "val": self.val, "test": self.test}[split]

    @property
    def shares(self) -> dict[str, float]:
        """Task -> the client's own weight for it, without the task's weight for all clients."""
        return {name: weight / task.weight if task.weight else 0.0 for name, (task, weight) in self.tasks.items()}

    @property
    def extras(self) -> dict[str, str]:
        """Its domain and its tasks, as stages see them beside its rows."""
        return {"domain": self.domain or "", "tasks": ",".join(sorted(self.tasks))}

    @property
    def class_counts(self) -> Tensor:
        """Train examples of each class (C, float64) of the first classification task; empty without such a task."""
        for task, _ in self.tasks.values():
            if task.kind == "classification":
                labels = self.train.examples.labels_of(task.name)[self.train.positions]
                return torch.from_numpy(class_counts(labels, task.channels)).double()
        return torch.zeros(0, dtype=torch.float64)

    def work(self, who: str) -> Work:
        """Return its train examples, for all its tasks; `who` names the streams of random numbers."""
        if who not in self._work:
            train, groups = self.train, tuple(apart(self.train.examples, self.train.index))
            self._work[who] = Work(who, train.examples, train.index, self.tasks, train.has(self.tasks), groups=groups)
        return self._work[who]

    @cached_property
    def _work(self) -> dict[str, Work]:
        return {}

    def only(self, task: str) -> BuiltClient:
        """Return the client with one of its tasks, and the examples that have a label of it."""
        train, val, test = self.train.of(task), self.val.of(task), self.test.of(task)
        return replace(self, tasks={task: self.tasks[task]}, train=train, val=val, test=test)


@dataclass(frozen=True, eq=False)
class BuiltFederation:
    """All clients of a run with their shares for a seed; of a unified federation with the heads of all tasks.

    With a `pool`, one who has the examples of all clients, or one per task, trains in the clients' place, and clients
    are only measured (see `pooled`).
    """

    tasks: tuple[Task, ...]
    clients: Mapping[str, BuiltClient]
    unified: bool = True
    pool: Mapping[str, BuiltClient] | None = None

    @staticmethod
    def build(dataset: Dataset, partition: Partition, unified: bool = True) -> BuiltFederation:
        """Give each client its share. The test part is shared by all clients (of the same domain, if they have one).

        It is a client's own where no other client is of its domain. A client without a domain shares what is of none
        if other clients have one. The partition was checked (`Partition.check`).
        """
        known = {t.name: t for t in dataset.tasks}
        everything = common = np.arange(len(dataset.test), dtype=np.int64)
        holders = Counter(share.domain for share in partition.shares)
        of_domain: dict[str | None, Indices] = {}
        if dataset.test.domain is not None:
            numbers = dataset.test.domain.numpy()
            of_domain = {name: everything[numbers == i] for i, name in enumerate(dataset.domains)}
            if holders.keys() - {None}:
                common = everything[numbers < 0]
        only = [s for s in partition.shares if holders[s.domain] == 1 and s.domain in of_domain]
        alone = {s.client: [of_domain[s.domain]] for s in only}
        train = coded(dataset.train, dataset.tasks, {s.client: [s.train, s.val] for s in partition.shares})
        test = coded(dataset.test, dataset.tasks, alone)
        tests: dict[str | None, Part] = {None: Part(test, common, "shared")}
        for name, mine in of_domain.items():
            tests[name] = Part(test, mine, "own" if holders[name] == 1 else "shared")
        clients = {}
        for s in partition.shares:
            clients[s.client] = BuiltClient(
                s.client,
                {n: (known[n], w * known[n].weight) for n, w in s.tasks.items()},
                Part(train, s.train, "own"),
                Part(train, s.val, "own"),
                tests.get(s.domain, tests[None]),
                s.domain,
            )
        return BuiltFederation(dataset.tasks, dict(sorted(clients.items())), unified)

    def pooled(self, by: Pooled) -> BuiltFederation:
        """Return the federation with one trainer that has all clients' examples, with the labels of their tasks.

        "all" is for all tasks at once, "task" one for each. Batches are larger, as many times as there are more
        examples than the largest client has: it makes as many steps, and sees examples as often. Raises DataError for a
        client of the same name.
        """
        clients = self.clients.values()
        train, val, test = (together([(c.part(split), c.tasks) for c in clients]) for split in ("train", "val", "test"))
        tasks = {t.name: (t, t.weight) for t in self.tasks}
        everyone = BuiltClient(TOGETHER, tasks, train, val, test)
        some = {TOGETHER: (everyone, self.clients)}
        if by == "task":
            some = {
                f"{TOGETHER}-{task}": (everyone.only(task), {c.id: c.only(task) for c in clients if task in c.tasks})
                for task in tasks
            }
        pool = {}
        for name, (one, holders) in some.items():
            if name in self.clients:
                raise DataError(
                    f"client {name!r}: this name is reserved for the pool of all clients' examples; rename the client"
                )
            largest = max(len(client.train) for client in holders.values())
            pool[name] = replace(one, id=name, batches=len(one.train) / largest)
        return replace(self, pool=pool)

    @cached_property
    def trainers(self) -> Mapping[str, BuiltClient]:
        """Those who train: the clients, or who has the examples of all."""
        return self.clients if self.pool is None else self.pool

    def client(self, name: str) -> BuiltClient:
        """Return a client, or one of the pool."""
        return self.trainers[name] if name in self.trainers else self.clients[name]

    @cached_property
    def held(self) -> dict[str, int]:
        """Task -> how many of those who train hold it."""
        return {task.name: sum(task.name in c.tasks for c in self.trainers.values()) for task in self.tasks}

    def holder(self, task: str) -> BuiltClient:
        """Return the first client that holds the task."""
        return next(client for client in self.clients.values() if task in client.tasks)

    def whole(self, layout: Layout) -> bool:
        """Return whether each client has all blocks of a layout."""
        return self.unified and not layout.predicts

    def presence(self, layout: Layout, rows: Sequence[Row]) -> Tensor | None:
        """Return which blocks of a layout the rows have (K x blocks, bool); None where every row has all."""
        if self.whole(layout) and all(task is None for _, task in rows):
            return None
        present = []
        for client, task in rows:
            tasks = {None, *self.client(client).tasks} if task is None else {None, task}
            every = task is None and self.unified
            present.append([b.task in tasks or (every and b.role != "public") for b in layout.blocks])
        return torch.tensor(present, dtype=torch.bool).view(len(rows), len(layout.blocks))


@dataclass(frozen=True, eq=False)
class Common:
    """The parts of a run that all functions of a round need: the method, the model's layout, the clients."""

    method: Method
    layout: Layout
    federation: BuiltFederation

    @cached_property
    def shared(self) -> Layout:
        """The parameters that are aggregated: the columns of the matrix of updates."""
        return self.method.shared_part(self.layout)

    @cached_property
    def shared_buffers(self) -> Layout:
        """The float buffers that may leave a client."""
        return self.method.shared_buffers(self.layout)


def drawn_of(clients: int, participation: float) -> int:
    """Return how many clients a round of fixed size has."""
    return max(1, int(participation * clients + 0.5))


def cohort(
    clients: Iterable[str], participation: float, key: int | bytes, round: int, poisson: bool = False
) -> tuple[str, ...]:
    """Return the participants of a round, sorted: max(1, round(participation x clients)) of them.

    With `poisson` each is drawn by itself; there may be none. `key` is the run's seed, or a deployment's secret.
    """
    clients = sorted(clients)
    if participation == 1:
        return tuple(clients)
    source = draws(key, "cohort", round)
    if poisson:
        drawn = source.uniform(len(clients)).tolist()
        return tuple(client for client, u in zip(clients, drawn, strict=True) if u < participation)
    chosen = source.permutation(len(clients))[: drawn_of(len(clients), participation)].tolist()
    return tuple(clients[i] for i in sorted(chosen))
