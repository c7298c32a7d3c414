"""Who holds what: pure functions of (pool, seed, parameters) that return a table of clients.

Rules shared by all partitioners:

- No two clients hold the same example, unless the parameter says `shared`. An example without a label in any task
  goes to nobody. Unless a partitioner says otherwise, every other example goes to exactly one client.
- A client's tasks are those the partitioner gives it; where it gives all, those of which the client holds a label.
  A task that no client holds, a client without an example and a client without a label of one of its tasks are errors.
- `val_fraction` of a client's examples (rounded, at least one, at most all but one) are set apart for validation. The
  validation part is empty only where `val_fraction` is 0 or the client has a single example. Examples are taken in one
  order that all clients share, so clients that hold the same images also validate on the same ones.
- The result depends on (seed, parameters, labels) and on numpy's random streams, never on torch or a global state.

Sources of the rules: NIID-Bench (class Dirichlet), MaTU (task Dirichlet), FedDEA and FedHCA2 (one task per client),
the DFMTL thesis (task weights), FedHEAL and F2DC (domain allocation).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.errors import DataError, RecipeError, unknown
from fedloom.settings.registry import Registry

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

PARTITIONERS = Registry("partition")
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Pool:
    """What a partitioner may look at: labels and domains, never inputs. Index i is the i-th train example."""

    labels: Mapping[str, np.ndarray[Any, Any]]
    """Task name -> labels (N) of the train part; the order of the tasks is the data set's."""
    domain: np.ndarray[Any, Any] | None = None
    domains: tuple[str, ...] = ()
    """Names of the values of `domain`."""

    @staticmethod
    def of(dataset: Dataset) -> Pool:
        """The pool of a data set's train part."""
        part = dataset.train
        labels = {task.name: part.labels_of(task.name) for task in dataset.tasks}
        return Pool(labels, None if part.domain is None else part.domain.numpy(), dataset.domains)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names."""
        return tuple(self.labels)

    def labelled(self, task: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which examples (N) have a label of `task`: not -1; every example where labels are maps or real numbers."""
        return labelled(self.labels[task])

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


def labelled(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which examples (N) have a label: not -1; every example where labels are maps or real numbers."""
    if labels.ndim == 1 and np.issubdtype(labels.dtype, np.signedinteger):
        return np.asarray(labels >= 0)
    return np.ones(len(labels), bool)


def class_counts(labels: np.ndarray[Any, Any], classes: int) -> Indices:
    """How many of the labels (N integers) are of each class (C); -1, no label, is not counted."""
    return np.bincount(labels[labelled(labels)], minlength=classes)


@dataclass(frozen=True, eq=False)
class Share:
    """One client's share: its tasks with loss weights, and its positions in the train part (sorted)."""

    client: str
    tasks: Mapping[str, float]
    train: Indices
    val: Indices
    domain: str | None = None


@dataclass(frozen=True, eq=False)
class Partition:
    """The table of all clients, sorted by client id."""

    shares: tuple[Share, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value: clients with tasks, domain and indices, and the hash of all that."""
        clients = [
            {
                "client": s.client,
                "tasks": dict(s.tasks),
                "domain": s.domain,
                "train": s.train.tolist(),
                "val": s.val.tolist(),
            }
            for s in self.shares
        ]
        return {"hash": self.hash, "clients": clients}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Partition:
        """Rebuild a partition from `to_json`. DataError where a field is absent or the hash does not fit."""
        try:
            shares = tuple(
                Share(
                    c["client"],
                    c["tasks"],
                    np.asarray(c["train"], np.int64),
                    np.asarray(c["val"], np.int64),
                    c["domain"],
                )
                for c in value["clients"]
            )
            stated = value["hash"]
        except KeyError as error:
            raise DataError(f"the saved partition has no field {error.args[0]!r}") from None
        partition = Partition(shares)
        if partition.hash != stated:
            raise DataError(f"the saved partition was changed: expected hash {stated}, found {partition.hash}")
        return partition

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that change with any client, task, weight, domain or index."""
        digest = hashlib.sha256()
        for s in self.shares:
            digest.update(json.dumps([s.client, sorted(s.tasks.items()), s.domain]).encode())
            for part in (s.train, s.val):
                digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def table(self, pool: Pool) -> list[dict[str, Any]]:
        """One row per client: client, tasks (with weights), domain, train and val (sizes), and labels.

        `labels` maps each of the client's tasks to its counts per class (index = class) over train and validation, or
        to the number of examples where the task's labels are not classes.
        """
        rows = []
        for s in self.shares:
            index = np.concatenate([s.train, s.val])
            labels = {task: _counts(pool, task, index) for task in s.tasks}
            sizes = {"train": len(s.train), "val": len(s.val)}
            rows.append({"client": s.client, "tasks": dict(s.tasks), "domain": s.domain, **sizes, "labels": labels})
        return rows

    def check(self, pool: Pool, shared: bool = False) -> None:
        """Raise DataError unless this partition fits the pool and obeys the rules at the top of this module.

        `shared` says that clients may hold the same example.
        """
        names = [s.client for s in self.shares]
        if names != sorted(set(names)):
            raise DataError(f"expected different client ids in sorted order, found {names}")
        holder = np.full(len(pool), -1)
        for number, s in enumerate(self.shares):
            _check_share(s, pool)
            index = np.concatenate([s.train, s.val])
            taken = index[holder[index] >= 0]
            if len(taken) and not shared:
                other = names[holder[taken[0]]]
                raise DataError(
                    f"clients {other!r} and {s.client!r} both hold example {taken[0]} ({len(taken)} in common); "
                    "expected disjoint shares"
                )
            holder[index] = number
        for task in pool.tasks:
            if not any(task in s.tasks for s in self.shares):
                raise DataError(f"task {task!r} is held by no client")


def _counts(pool: Pool, task: str, index: Indices) -> list[int] | int:
    labels = pool.labels[task]
    if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
        return len(index)
    return class_counts(labels[index], int(labels.max(initial=0)) + 1).tolist()


def _check_share(share: Share, pool: Pool) -> None:
    who = f"client {share.client!r}"
    if not len(share.train):
        raise DataError(f"{who} has no training example")
    index = np.concatenate([share.train, share.val])
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= len(pool):
        raise DataError(f"{who}: expected positions in 0..{len(pool) - 1}, found {low if low < 0 else high}")
    if len(np.unique(index)) < len(index):
        raise DataError(f"{who} holds an example twice, in its train or validation part or in both")
    if not share.tasks:
        raise DataError(f"{who} has no task")
    for task, weight in share.tasks.items():
        if task not in pool.labels:
            raise DataError(f"{who}: {unknown('task', task, pool.tasks)}")
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"{who}, task {task!r}: expected a weight above 0, found {weight}")
        if not pool.labelled(task)[index].any():
            raise DataError(f"{who} has no labelled example of its task {task!r}")
    if share.domain is not None and share.domain not in pool.domains:
        known = ", ".join(pool.domains) or "none"
        raise DataError(f"{who}: unknown domain {share.domain!r}. Known: {known}")


# What the partitioners share. `Groups` are examples per client, in the order of the clients.

Groups = list[Indices]
Count = Annotated[int, Field(ge=1)]
Alpha = Annotated[float, Field(gt=0, le=1e6)]
ValFraction = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[float, Field(gt=0, le=1)]


def _rng(seed: int, *purpose: object) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition", *purpose))


def _ids(count: int) -> list[str]:
    """c00, c01, ...: their lexical order is their numeric order."""
    return [f"c{i:0{max(2, len(str(count - 1)))}d}" for i in range(count)]


def _finish(
    pool: Pool,
    seed: int,
    val_fraction: float,
    clients: Sequence[str],
    groups: Sequence[Indices],
    tasks: Sequence[Mapping[str, float]] | None = None,
    domains: Sequence[str] | None = None,
    shared: bool = False,
) -> Partition:
    """Set validation data apart, sort, and check. `tasks` None: each client holds what it has labels of."""
    priority = _rng(seed, "val").permutation(len(pool))
    shares = []
    for k, (client, index) in enumerate(zip(clients, groups, strict=True)):
        if not len(index):
            raise DataError(f"client {client!r} would get no example: too many clients, or too small a fraction")
        if tasks is None:
            held = {task: 1.0 for task in pool.tasks if pool.labelled(task)[index].any()}
        else:
            held = {task: float(weight) for task, weight in tasks[k].items()}
        val = round(val_fraction * len(index))
        if val_fraction > 0:
            val = min(max(1, val), len(index) - 1)
        ranked = index[np.argsort(priority[index])]
        parts = np.sort(ranked[val:]), np.sort(ranked[:val])
        shares.append(Share(client, held, *parts, None if domains is None else domains[k]))
    partition = Partition(tuple(sorted(shares, key=lambda s: s.client)))
    partition.check(pool, shared)
    return partition


def _patterns(pool: Pool, rng: np.random.Generator) -> list[tuple[tuple[str, ...], Indices]]:
    """Examples grouped by the tasks they have labels of, each group shuffled; unlabelled examples are left out."""
    labelled = np.stack([pool.labelled(task) for task in pool.tasks], axis=1)
    patterns, which = np.unique(labelled, axis=0, return_inverse=True)
    found = []
    for number, pattern in enumerate(patterns):
        tasks = tuple(itertools.compress(pool.tasks, pattern))
        if tasks:
            found.append((tasks, rng.permutation(np.flatnonzero(which.reshape(-1) == number))))
    return found


def _cut(index: Indices, sizes: Sequence[int]) -> Groups:
    """`index` cut into parts of about equal size; holders with the smaller sizes so far get the larger parts."""
    parts = np.array_split(index, len(sizes))
    ranks = np.argsort(np.argsort(sizes, kind="stable"), kind="stable")
    return [parts[rank] for rank in ranks]


def _deal(pool: Pool, holders: Sequence[Mapping[str, float]], rng: np.random.Generator) -> Groups:
    """Deal every labelled example to one holder that has a task it is labelled for, in about equal numbers."""
    groups: Groups = [np.empty(0, np.int64) for _ in holders]
    for tasks, index in _patterns(pool, rng):
        able = [k for k, held in enumerate(holders) if any(task in held for task in tasks)]
        if not able:
            raise RecipeError(f"no client holds the task {tasks[0]!r}: give it to one, or leave the task out")
        for k, part in zip(able, _cut(index, [len(groups[k]) for k in able]), strict=True):
            groups[k] = np.concatenate([groups[k], part])
    return groups


def _proportions(rng: np.random.Generator, alpha: float, count: int) -> np.ndarray[Any, Any]:
    """A draw from the symmetric Dirichlet distribution, also where a tiny alpha makes numpy's draw 0/0."""
    q = rng.dirichlet(np.full(count, alpha))
    if not np.isfinite(q).all():
        q = np.eye(count)[rng.integers(count)]  # the limit for alpha to 0
    return q


def _dirichlet(
    labels: np.ndarray[Any, Any],
    index: Indices,
    count: int,
    alpha: float,
    balanced: bool,
    least: int,
    tries: int,
    rng: np.random.Generator,
    what: str,
) -> Groups:
    """Split `index` among `count` clients: a Dirichlet draw over clients per class, redrawn until all have `least`."""
    if count * least > len(index):
        raise RecipeError(
            f"{what}: {count} clients with at least {least} examples each need {count * least}, found {len(index)}"
        )
    smallest = 0
    for _ in range(tries):
        groups: Groups = [np.empty(0, np.int64) for _ in range(count)]
        for value in np.unique(labels[index]):
            members = rng.permutation(index[labels[index] == value])
            q = _proportions(rng, alpha, count)
            if balanced:
                space = np.array([len(g) < len(index) / count for g in groups])
                q = q * space
                q = q / q.sum() if q.sum() > 0 else space / space.sum()
            # Rounded, not cut off: int() would hand the last client every lost fraction.
            cuts = np.rint(np.cumsum(q)[:-1] * len(members)).astype(int)
            groups = [np.concatenate(pair) for pair in zip(groups, np.split(members, cuts), strict=True)]
        found = min(len(g) for g in groups)
        if found >= least:
            return groups
        smallest = max(smallest, found)
    raise RecipeError(
        f"{what}: after {tries} draws with alpha {alpha} the smallest of {count} clients had at best {smallest} "
        f"examples, expected {least}: raise alpha or lower the clients or min_examples"
        + ("" if balanced else ", or set balanced")
    )


def _classes(pool: Pool, task: str) -> np.ndarray[Any, Any]:
    """The task's labels, which must be classes."""
    labels = pool.labels[task]
    if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
        raise RecipeError(
            f"task {task!r}: expected one class per example (N integers), found {labels.dtype} of shape {labels.shape}"
        )
    return labels


@PARTITIONERS.register("iid", source="MaT-FL, 'homo'")
def iid(pool: Pool, seed: int, *, clients: Count, val_fraction: ValFraction = 0.1) -> Partition:
    """Every client holds every task and an equal, random share of the examples."""
    groups = _deal(pool, [dict.fromkeys(pool.tasks, 1.0)] * clients, _rng(seed, "iid"))
    return _finish(pool, seed, val_fraction, _ids(clients), groups)


@PARTITIONERS.register("class-dirichlet", source="NIID-Bench (Li et al., 2022), noniid-labeldir")
def class_dirichlet(
    pool: Pool,
    seed: int,
    *,
    clients: Count,
    alpha: Alpha = 0.1,
    task: str | None = None,
    min_examples: Count = 10,
    balanced: bool = False,
    max_tries: Count = 1000,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Every client holds every task; each class of `task` (default the first) is split by a Dirichlet(alpha) draw.

    The whole split is drawn again, at most `max_tries` times, until every client has `min_examples`. `balanced` is
    NIID-Bench's trick: a client that holds its equal share gets nothing of the classes that follow. Examples without a
    label of `task` are split evenly. Raises RecipeError where no draw will do or `task` has no classes.
    """
    name = pool.tasks[0] if task is None else task
    if name not in pool.labels:
        raise RecipeError(f"class-dirichlet: {unknown('task', name, pool.tasks)}")
    rng = _rng(seed, "class-dirichlet")
    with_class = np.flatnonzero(pool.labelled(name))
    what = f"class-dirichlet over task {name!r}"
    groups = _dirichlet(_classes(pool, name), with_class, clients, alpha, balanced, min_examples, max_tries, rng, what)
    for tasks, index in _patterns(pool, rng):
        if name not in tasks:
            parts = _cut(index, [len(g) for g in groups])
            groups = [np.concatenate(pair) for pair in zip(groups, parts, strict=True)]
    return _finish(pool, seed, val_fraction, _ids(clients), groups)


@PARTITIONERS.register("task-dirichlet", source="MaTU, section 4; the paper gives no formula, this is our reading")
def task_dirichlet(
    pool: Pool,
    seed: int,
    *,
    clients: Count,
    alpha_tasks: Annotated[float, Field(ge=0, le=1e6)] = 0.2,
    alpha_classes: Alpha | None = None,
    min_examples: Count = 1,
    max_tries: Count = 1000,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Clients hold different groups of tasks, drawn by Dirichlet(alpha_tasks); 0 gives each client exactly one task.

    A client draws proportions over the T tasks and holds those of at least 1 / (2 T), and always the largest. With
    `alpha_tasks` 0, tasks go round and are then shuffled. A task that nobody drew goes to the client with the fewest
    tasks, among those to the one that drew most of it.

    Then the examples of each task are split over the clients that hold it: by Dirichlet(alpha_classes) per class,
    redrawn until each has `min_examples` of it, or evenly where `alpha_classes` is None. An example that has labels of
    several tasks counts, for this, as an example of one of them, in equal parts. Raises RecipeError where no draw will
    do.
    """
    rng = _rng(seed, "task-dirichlet")
    total = len(pool.tasks)
    if alpha_tasks == 0:
        if clients < total:
            raise RecipeError(
                f"task-dirichlet with alpha_tasks 0 gives each client one task: expected at least {total} clients for "
                f"{total} tasks, found {clients}"
            )
        holds = np.eye(total, dtype=bool)[rng.permutation(np.arange(clients) % total)]
    else:
        drawn = np.stack([_proportions(rng, alpha_tasks, total) for _ in range(clients)])
        holds = drawn >= 1 / (2 * total)
        holds[np.arange(clients), drawn.argmax(1)] = True
        for orphan in np.flatnonzero(~holds.any(0)):
            holds[np.lexsort((-drawn[:, orphan], holds.sum(1)))[0], orphan] = True

    held = [dict.fromkeys(itertools.compress(pool.tasks, row), 1.0) for row in holds]
    groups = _split_tasks(pool, held, alpha_classes, min_examples, max_tries, rng, "task-dirichlet")
    return _finish(pool, seed, val_fraction, _ids(clients), groups, held)


def _split_tasks(
    pool: Pool,
    held: Sequence[Mapping[str, float]],
    alpha: float | None,
    least: int,
    tries: int,
    rng: np.random.Generator,
    partitioner: str,
) -> Groups:
    """Split the examples of each task over the clients that hold it: Dirichlet(alpha) per class, or evenly."""
    examples: dict[str, Groups] = {task: [] for task in pool.tasks}
    for tasks, index in _patterns(pool, rng):
        sizes = [sum(map(len, examples[task])) for task in tasks]
        for task, part in zip(tasks, _cut(index, sizes), strict=True):
            examples[task].append(part)
    groups: Groups = [np.empty(0, np.int64) for _ in held]
    for task in pool.tasks:
        holders = [k for k, tasks in enumerate(held) if task in tasks]
        index = np.concatenate([*examples[task], np.empty(0, np.int64)])
        if alpha is None:
            parts = _cut(index, [len(groups[k]) for k in holders])
        else:
            what = f"{partitioner}, task {task!r}"
            parts = _dirichlet(_classes(pool, task), index, len(holders), alpha, False, least, tries, rng, what)
        for k, part in zip(holders, parts, strict=True):
            groups[k] = np.concatenate([groups[k], part])
    return groups


@PARTITIONERS.register("one-task", source="FedDEA, toy study; FedHCA2, one task per client beside multi-task clients")
def one_task(
    pool: Pool,
    seed: int,
    *,
    clients_per_task: Count = 1,
    images: Literal["disjoint", "shared"] = "disjoint",
    all_task_clients: Annotated[int, Field(ge=0)] = 0,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Clients named after the one task they hold (`digit-0`), and `all_task_clients` more that hold all (`all-0`).

    `images: disjoint` deals each example to one client. `shared` gives the clients of each task together all examples
    of the task, and those that hold all tasks together all examples; within such a group shares are disjoint. Raises
    RecipeError where a task is called 'all' beside such clients.
    """
    every = dict.fromkeys(pool.tasks, 1.0)
    kinds = [({task: 1.0}, task, clients_per_task) for task in pool.tasks]
    if all_task_clients:
        if "all" in pool.tasks:
            raise RecipeError("one-task: a task named 'all' cannot be told from clients that hold all tasks")
        kinds.append((every, "all", all_task_clients))
    clients, held = [], []
    for tasks, name, count in kinds:
        clients += [f"{name}-{i:0{len(str(count - 1))}d}" for i in range(count)]
        held += [tasks] * count
    if images == "disjoint":
        groups = _deal(pool, held, _rng(seed, "one-task"))
    else:
        groups = []
        for tasks, name, count in kinds:
            rng = _rng(seed, "one-task", name)
            mine = Pool({task: pool.labels[task] for task in tasks})
            groups += _deal(mine, [tasks] * count, rng)
    return _finish(pool, seed, val_fraction, clients, groups, held, shared=images == "shared")


@PARTITIONERS.register(
    "single-and-multi", source="FedHCA2: single-task clients on one data set, multi-task on the other"
)
def single_and_multi(
    pool: Pool,
    seed: int,
    *,
    single: dict[str, Count],
    multi: dict[str, Count],
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Single-task clients on some domains (data sets) and multi-task clients on others.

    `single` {domain: n}: n clients for each task of the domain; all of them share the domain's examples in disjoint,
    even parts, as in the authors' release. `multi` {domain: m}: m clients that hold every task of the domain, likewise.
    The paper's 2C and 4C are n = m = 2 and 4. A domain may be in both: then all its clients share its examples.

    Raises DataError where the data set has no such domain.
    """
    if pool.domain is None or not pool.domains:
        raise DataError("single-and-multi: the data set has no domains")
    clients: list[str] = []
    groups: Groups = []
    held: list[Mapping[str, float]] = []
    domains_: list[str] = []
    for name in dict.fromkeys((*single, *multi)):
        if name not in pool.domains:
            raise DataError(f"single-and-multi: {unknown('domain', name, pool.domains)}")
        here = pool.domain == pool.domains.index(name)
        tasks = [task for task in pool.tasks if pool.labelled(task)[here].any()]
        kinds = [({task: 1.0}, task, single.get(name, 0)) for task in tasks]
        kinds.append((dict.fromkeys(tasks, 1.0), f"{name}-multi", multi.get(name, 0)))
        before = len(clients)
        for row, label, count in kinds:
            clients += [f"{label}-{i:0{len(str(count - 1))}d}" for i in range(count)]
            held += [row] * count
        mine = len(clients) - before
        domains_ += [name] * mine
        groups += np.array_split(_rng(seed, "single-and-multi", name).permutation(np.flatnonzero(here)), mine)
    return _finish(pool, seed, val_fraction, clients, groups, held, domains_)


@PARTITIONERS.register("task-weights", source="DFMTL thesis: SingleTask, Pairwise, MultiTask")
def task_weights(
    pool: Pool,
    seed: int,
    *,
    weights: Literal["single", "pairwise", "multi"] | list[dict[str, Annotated[float, Field(ge=0)]]] = "pairwise",
    clients: Count | None = None,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Clients hold tasks with given loss weights and an equal, random share of the examples each.

    `single`: one task each; `pairwise`: 0.7 and 0.3 on an ordered pair of tasks each; `multi`: 1 / T on all T tasks; or
    one {task: weight} per client, in which a task of weight 0 is not held and never computed. The named modes go round
    until there are `clients`; by default each of the T tasks or T (T - 1) ordered pairs occurs once. Raises RecipeError
    where `clients` is needed, does not fit an explicit list, or is too small to cover all tasks.
    """
    tasks = pool.tasks
    if weights == "single":
        rows = [{task: 1.0} for task in tasks]
    elif weights == "pairwise":
        if len(tasks) < 2:
            raise RecipeError(f"task-weights: 'pairwise' needs at least two tasks, found {len(tasks)}")
        rows = [{a: 0.7, b: 0.3} for a, b in itertools.permutations(tasks, 2)]
    elif weights == "multi":
        if clients is None:
            raise RecipeError("task-weights: 'multi' needs the number of clients")
        rows = [dict.fromkeys(tasks, 1 / len(tasks))]
    else:
        rows = [{task: weight for task, weight in row.items() if weight > 0} for row in weights]
        if clients not in (None, len(rows)):
            raise RecipeError(f"task-weights: expected {clients} rows of weights, found {len(rows)}")
        for number, row in enumerate(rows):
            for task in row:
                if task not in tasks:
                    raise RecipeError(f"task-weights, row {number}: {unknown('task', task, tasks)}")
    count = clients or len(rows)
    held = [rows[i % len(rows)] for i in range(count)]
    missing = [task for task in tasks if not any(task in row for row in held)]
    if missing:
        raise RecipeError(f"task-weights: no client holds task {missing[0]!r}; found {count} clients")
    groups = _deal(pool, held, _rng(seed, "task-weights"))
    return _finish(pool, seed, val_fraction, _ids(count), groups, held)


@PARTITIONERS.register("domains", source="FedHEAL and F2DC: fixed and random allocation, without replacement")
def domains(
    pool: Pool,
    seed: int,
    *,
    clients: Count | dict[str, Count],
    fraction: Part | dict[str, Part] | None = None,
    allocation: Literal["fixed", "random"] = "fixed",
    cover_classes: bool = False,
    max_tries: Count = 1000,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Each client holds every task and examples of one domain; the order of the clients is shuffled.

    `clients` per domain: one number, or {domain: number} in which an absent domain has none. `allocation: random` keeps
    the total and draws each client's domain, again until every one of these domains has a client and none runs out.
    `fraction` of the domain's examples per client, rounded down, drawn without replacement; the rest goes to nobody. By
    default the clients of a domain share all of it evenly. `cover_classes` gives every client at least one example of
    each class of the first task.

    Raises RecipeError where fraction x clients exceeds a domain, and DataError where the data set has no domains, a
    domain is unknown, or there are too few examples of a class.
    """
    if pool.domain is None or not pool.domains:
        raise DataError("domains: the data set has no domains")
    counts = clients if isinstance(clients, dict) else dict.fromkeys(pool.domains, clients)
    fractions = fraction if isinstance(fraction, dict) else dict.fromkeys(counts, fraction)
    for name in (*counts, *fractions):
        if name not in pool.domains:
            raise DataError(f"domains: {unknown('domain', name, pool.domains)}")
    for name in counts:
        if name not in fractions:
            raise RecipeError(f"domains: no fraction is given for domain {name!r}")
    anything = np.any([pool.labelled(task) for task in pool.tasks], axis=0)
    members = {name: np.flatnonzero(anything & (pool.domain == pool.domains.index(name))) for name in counts}

    def excess(allocated: Mapping[str, int]) -> str:
        """The first domain that this allocation overdraws, in words, or an empty string."""
        for name, count in allocated.items():
            part = fractions[name]
            if part is not None and part * count > 1 + 1e-9:
                return f"domain {name!r}: {count} clients x fraction {part} = {part * count:.3g} of it, at most 1"
        return ""

    rng = _rng(seed, "domains")
    order = [name for name, count in counts.items() for _ in range(count)]
    if allocation == "fixed":
        if excess(counts):
            raise RecipeError(f"domains: {excess(counts)}")
        rng.shuffle(order)
    else:
        names = list(counts)
        for _ in range(max_tries):
            order = [names[i] for i in rng.integers(len(names), size=len(order))]
            drawn = {name: order.count(name) for name in names}
            if all(drawn.values()) and not excess(drawn):
                break
        else:
            raise RecipeError(
                f"domains: no random allocation of {len(order)} clients in {max_tries} draws gave every domain a "
                f"client and overdrew none; the last one: {excess(drawn) or drawn}"
            )

    groups: Groups = [np.empty(0, np.int64) for _ in order]
    for name in counts:
        mine = [k for k, domain in enumerate(order) if domain == name]
        part, n = fractions[name], len(members[name])
        if part is None:
            sizes = [n // len(mine) + (i < n % len(mine)) for i in range(len(mine))]
        else:
            sizes = [int(part * n + 1e-9)] * len(mine)
        labels = _classes(pool, pool.tasks[0]) if cover_classes else None
        for k, index in zip(mine, _draw(members[name], sizes, labels, rng, name), strict=True):
            groups[k] = index
    return _finish(pool, seed, val_fraction, _ids(len(order)), groups, domains=order)


def _draw(
    members: Indices,
    sizes: Sequence[int],
    labels: np.ndarray[Any, Any] | None,
    rng: np.random.Generator,
    domain: str,
) -> Groups:
    """Disjoint groups of the given sizes; with `labels`, each group has every class of the domain's members."""
    groups: Groups = [np.empty(0, np.int64) for _ in sizes]
    if labels is not None:
        classes = [int(c) for c in np.unique(labels[members]) if c >= 0]
        if min(sizes) < len(classes):
            raise DataError(
                f"domain {domain!r}: expected at least {len(classes)} examples per client to cover the classes, found "
                f"{min(sizes)}"
            )
        for value in classes:
            found = rng.permutation(members[labels[members] == value])
            if len(found) < len(sizes):
                raise DataError(
                    f"domain {domain!r}, class {value}: expected an example for each of {len(sizes)} clients, found "
                    f"{len(found)}"
                )
            groups = [np.append(g, one) for g, one in zip(groups, found[: len(sizes)], strict=True)]
    rest = rng.permutation(np.setdiff1d(members, np.concatenate(groups)))
    ends = np.cumsum([size - len(g) for size, g in zip(sizes, groups, strict=True)])
    return [np.concatenate(pair) for pair in zip(groups, np.split(rest, ends)[: len(sizes)], strict=True)]


@PARTITIONERS.register("task-groups", source="MaTU, Figures 5 and 6: clients with fixed groups of tasks")
def task_groups(
    pool: Pool,
    seed: int,
    *,
    groups: Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)] | None = None,
    tasks_per_client: Count | None = None,
    clients: Count | None = None,
    alpha_classes: Alpha | None = None,
    min_examples: Count = 1,
    max_tries: Count = 1000,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Clients hold given groups of tasks, or groups of `tasks_per_client` tasks drawn at random.

    The `groups` go round until there are `clients`; by default there is one client per group. With `tasks_per_client`,
    which needs `clients`, each client in turn gets those tasks that the fewest clients hold so far, ties being drawn,
    so that the numbers of clients of any two tasks differ by at most one.

    The examples of each task are split over the clients that hold it as `task-dirichlet` does: by
    Dirichlet(alpha_classes) per class, redrawn until each has `min_examples` of it, or evenly where `alpha_classes` is
    None. Raises RecipeError for both or neither of the two, too few clients, a task that is unknown, named twice in a
    group or held by nobody, and where no draw will do.
    """
    if (groups is None) == (tasks_per_client is None):
        raise RecipeError("task-groups: expected either groups or tasks_per_client")
    rng = _rng(seed, "task-groups")
    if groups is not None:
        for number, group in enumerate(groups):
            for task in group:
                if task not in pool.tasks:
                    raise RecipeError(f"task-groups, group {number}: {unknown('task', task, pool.tasks)}")
                if group.count(task) > 1:
                    raise RecipeError(f"task-groups, group {number}: task {task!r} is named twice")
        if clients is not None and clients < len(groups):
            raise RecipeError(f"task-groups: expected a client for each of {len(groups)} groups, found {clients}")
        missing = [task for task in pool.tasks if not any(task in group for group in groups)]
        if missing:
            raise RecipeError(f"task-groups: no group holds task {missing[0]!r}; leave it out of the data set")
        held = [dict.fromkeys(groups[k % len(groups)], 1.0) for k in range(clients or len(groups))]
    else:
        assert tasks_per_client is not None
        if clients is None:
            raise RecipeError("task-groups: tasks_per_client needs the number of clients")
        total = len(pool.tasks)
        if tasks_per_client > total or tasks_per_client * clients < total:
            raise RecipeError(
                f"task-groups: {clients} clients with {tasks_per_client} tasks each cannot cover {total} tasks; "
                f"expected tasks_per_client in {-(-total // clients)}..{total}"
            )
        holders = np.zeros(total, np.int64)
        held = []
        for _ in range(clients):
            fewest = np.lexsort((rng.random(total), holders))[:tasks_per_client]
            holders[fewest] += 1
            held.append({pool.tasks[t]: 1.0 for t in sorted(fewest.tolist())})
    shares = _split_tasks(pool, held, alpha_classes, min_examples, max_tries, rng, "task-groups")
    return _finish(pool, seed, val_fraction, _ids(len(held)), shares, held)
