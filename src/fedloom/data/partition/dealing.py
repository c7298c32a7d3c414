"""What partitioners share: dealing examples evenly or by Dirichlet draws, and setting validation data apart.

`Groups` are examples per client, in the order of the clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RecipeError, unknown
from fedloom.core.settings.registry import Registry
from fedloom.data.partition.table import Indices, Labels, Partition, Pool, Share, are_classes

PARTITIONERS = Registry(
    "partition",
    "fedloom.partitions",
    ("fedloom.data.partition.table:Partition", "collections.abc:Mapping", "builtins:list"),
)

Groups = list[Indices]
Held = Sequence[Mapping[str, float]]
"""Per client: the tasks that it holds, with their loss weights."""
Alpha = Annotated[float, Field(gt=0, le=1e6)]
ValFraction = Annotated[float, Field(ge=0, lt=1)]


def stream(seed: int, *purpose: object) -> np.random.Generator:
    """Return the random stream of a partitioner."""
    return np.random.default_rng(derive_seed(seed, "partition", *purpose))


def numbered(prefix: str, count: int, digits: int = 1) -> list[str]:
    """Return PREFIX0, PREFIX1, ... of at least `digits` digits: leading zeros make lexical order numeric order."""
    return [f"{prefix}{i:0{max(digits, len(str(count - 1)))}d}" for i in range(count)]


def ids(count: int) -> list[str]:
    """Return c00, c01, ..."""
    return numbered("c", count, 2)


def empty(count: int) -> Groups:
    """Return groups without an example."""
    return [np.empty(0, np.int64) for _ in range(count)]


def by_rank(pool: Pool, seed: int) -> Indices:
    """Return the order (N) in which examples are taken for validation, the same for all clients."""
    return stream(seed, "val").permutation(len(pool))


def set_apart(index: Indices, val_fraction: float, priority: Indices) -> tuple[Indices, Indices]:
    """Split a client's examples into a training and a validation part, both sorted."""
    val = round(val_fraction * len(index))
    if val_fraction > 0:
        val = min(max(1, val), len(index) - 1)
    ranked = index[np.argsort(priority[index])]
    return np.sort(ranked[val:]), np.sort(ranked[:val])


def finish(
    pool: Pool,
    seed: int,
    val_fraction: float,
    clients: Sequence[str],
    groups: Sequence[Indices],
    tasks: Held | None = None,
    domains: Sequence[str] | None = None,
    shared: bool = False,
) -> Partition:
    """Set validation data apart, sort, and check. `tasks` None: each client holds the tasks it has labels of."""
    priority = by_rank(pool, seed)
    shares = []
    for k, (client, index) in enumerate(zip(clients, groups, strict=True)):
        if not len(index):
            raise DataError(f"client {client!r} would get no example: too many clients, or too small a fraction")
        own = dict.fromkeys(tasks_of(pool, index), 1.0) if tasks is None else tasks[k]
        weights = {task: float(weight) for task, weight in own.items()}
        parts = set_apart(index, val_fraction, priority)
        shares.append(Share(client, weights, *parts, None if domains is None else domains[k]))
    partition = Partition(tuple(sorted(shares, key=lambda s: s.client)))
    partition.check(pool, shared)
    return partition


def tasks_of(pool: Pool, index: Indices) -> list[str]:
    """Return the tasks of which some examples have labels."""
    return [task for task in pool.tasks if pool.labelled(task)[index].any()]


def patterns(pool: Pool, rng: np.random.Generator) -> list[tuple[tuple[str, ...], Indices]]:
    """Group examples by the tasks they have labels of, each group shuffled; leave unlabelled examples out."""
    labelled = np.stack([pool.labelled(task) for task in pool.tasks], axis=1)
    rows, which = np.unique(labelled, axis=0, return_inverse=True)
    return [
        (tuple(itertools.compress(pool.tasks, row)), rng.permutation(np.flatnonzero(which.reshape(-1) == number)))
        for number, row in enumerate(rows)
        if row.any()
    ]


def cut(index: Indices, sizes: Sequence[int]) -> Groups:
    """Cut `index` into parts of about equal size; holders with the smaller sizes so far get the larger parts."""
    parts = np.array_split(index, len(sizes))
    ranks = np.argsort(np.argsort(sizes, kind="stable"), kind="stable")
    return [parts[rank] for rank in ranks]


def deal(pool: Pool, held: Held, rng: np.random.Generator) -> Groups:
    """Deal every labelled example to one client that holds a task it is labelled for, in about equal numbers."""
    groups = empty(len(held))
    for tasks, index in patterns(pool, rng):
        able = [k for k, row in enumerate(held) if any(task in row for task in tasks)]
        if not able:
            raise RecipeError(f"no client holds the task {tasks[0]!r}: give it to one, or leave the task out")
        add(groups, able, cut(index, [len(groups[k]) for k in able]))
    return groups


def add(groups: Groups, clients: Iterable[int], parts: Groups) -> None:
    """Give each of the clients one more part, in place."""
    for k, part in zip(clients, parts, strict=True):
        groups[k] = np.concatenate([groups[k], part])


def proportions(rng: np.random.Generator, alpha: float, count: int) -> np.ndarray[Any, Any]:
    """Draw from the symmetric Dirichlet distribution, also where a tiny alpha makes numpy's draw 0/0."""
    q = rng.dirichlet(np.full(count, alpha))
    if not np.isfinite(q).all():
        q = np.eye(count)[rng.integers(count)]  # the limit for alpha to 0
    return q


@dataclass(frozen=True)
class ByClass:
    """A split of examples by their class: a Dirichlet(alpha) draw over clients for each class.

    The whole split is drawn again, at most `tries` times, until every client has at least `least` examples. `balanced`:
    a client that holds its equal share gets nothing of the classes that follow.
    """

    alpha: float
    least: int
    tries: int
    balanced: bool = False

    def split(self, pool: Pool, task: str, index: Indices, count: int, rng: np.random.Generator, what: str) -> Groups:
        """Split `index` among `count` clients, by the classes of `task`. RecipeError where no draw succeeds."""
        labels = classes_of(pool, task)
        if count * self.least > len(index):
            raise RecipeError(
                f"{what}: {count} clients with at least {self.least} examples each need {count * self.least}, found "
                f"{len(index)}"
            )
        smallest = 0
        for _ in range(self.tries):
            groups = self._draw(labels, index, count, rng)
            found = min(len(g) for g in groups)
            if found >= self.least:
                return groups
            smallest = max(smallest, found)
        raise RecipeError(
            f"{what}: after {self.tries} draws with alpha {self.alpha} the smallest of {count} clients had at best "
            f"{smallest} examples, expected {self.least}: raise alpha or lower the clients or min_examples"
            + ("" if self.balanced else ", or set balanced")
        )

    def _draw(self, labels: Labels, index: Indices, count: int, rng: np.random.Generator) -> Groups:
        groups = empty(count)
        for value in np.unique(labels[index]):
            members = rng.permutation(index[labels[index] == value])
            q = proportions(rng, self.alpha, count)
            if self.balanced:
                space = np.array([len(g) < len(index) / count for g in groups])
                q = q * space
                q = q / q.sum() if q.sum() > 0 else space / space.sum()
            # Rounded, not cut off: int() would hand the last client every lost fraction.
            cuts = np.rint(np.cumsum(q)[:-1] * len(members)).astype(int)
            add(groups, range(count), np.split(members, cuts))
        return groups


def classes_of(pool: Pool, task: str) -> Labels:
    """Return the task's labels, which must be classes; RecipeError otherwise."""
    labels = pool.labels[task]
    if not are_classes(labels):
        raise RecipeError(
            f"task {task!r}: expected one class per example (N integers), found {labels.dtype} of shape {labels.shape}"
        )
    return labels


def known_tasks(pool: Pool, rows: Iterable[Iterable[str]], what: str) -> None:
    """Raise RecipeError where a row, called `what` and its number, names a task that is not in the pool."""
    for number, row in enumerate(rows):
        for task in row:
            if task not in pool.labels:
                raise RecipeError(f"{what} {number}: {unknown('task', task, pool.tasks)}")
