"""The rules that deal examples out to clients, by class, by task or by domain, and partitions that are written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, unknown
from fedloom.core.settings.section import ClientId, Count, NonNegative
from fedloom.data.partition import dealing
from fedloom.data.partition.dealing import PARTITIONERS, Alpha, ByClass, Groups, Held, ValFraction
from fedloom.data.partition.table import Indices, Labels, Partition, Pool
from fedloom.data.prepare import at_nodes

Names = Annotated[list[str], Field(min_length=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positions = list[int]


@PARTITIONERS.register("iid", source="MaT-FL, 'homo'")
def iid(pool: Pool, seed: int, *, clients: Count, val_fraction: ValFraction = 0.1) -> Partition:
    """Every client holds every task and an equal, random share of the examples."""
    groups = dealing.deal(pool, [dict.fromkeys(pool.tasks, 1.0)] * clients, dealing.stream(seed, "iid"))
    return dealing.finish(pool, seed, val_fraction, dealing.ids(clients), groups)


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
    label of `task` are split evenly. Raises RecipeError where no draw succeeds or `task` has no classes.
    """
    name = pool.tasks[0] if task is None else task
    if name not in pool.labels:
        raise RecipeError(f"class-dirichlet: {unknown('task', name, pool.tasks)}")
    rng = dealing.stream(seed, "class-dirichlet")
    by_class = ByClass(alpha, min_examples, max_tries, balanced)
    with_class = np.flatnonzero(pool.labelled(name))
    groups = by_class.split(pool, name, with_class, clients, rng, f"class-dirichlet over task {name!r}")
    for tasks, index in dealing.patterns(pool, rng):
        if name not in tasks:
            dealing.add(groups, range(clients), dealing.cut(index, [len(g) for g in groups]))
    return dealing.finish(pool, seed, val_fraction, dealing.ids(clients), groups)


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
    kinds = [(task, {task: 1.0}, clients_per_task) for task in pool.tasks]
    if all_task_clients:
        if "all" in pool.tasks:
            raise RecipeError("one-task: a task named 'all' cannot be told from clients that hold all tasks")
        kinds.append(("all", dict.fromkeys(pool.tasks, 1.0), all_task_clients))
    clients = [client for name, _, count in kinds for client in dealing.numbered(f"{name}-", count)]
    held = [tasks for _, tasks, count in kinds for _ in range(count)]
    if images == "disjoint":
        groups = dealing.deal(pool, held, dealing.stream(seed, "one-task"))
    else:
        groups = []
        for name, tasks, count in kinds:
            own = Pool({task: pool.labels[task] for task in tasks})
            groups += dealing.deal(own, [tasks] * count, dealing.stream(seed, "one-task", name))
    return dealing.finish(pool, seed, val_fraction, clients, groups, held, shared=images == "shared")


@PARTITIONERS.register("task-weights", source="DFMTL thesis: SingleTask, Pairwise, MultiTask")
def task_weights(
    pool: Pool,
    seed: int,
    *,
    weights: Literal["single", "pairwise", "multi"] | list[dict[str, NonNegative]] = "pairwise",
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
        dealing.known_tasks(pool, rows, "task-weights, row")
    count = clients or len(rows)
    held = [rows[i % len(rows)] for i in range(count)]
    for task in tasks:
        if not any(task in row for row in held):
            raise RecipeError(f"task-weights: no client holds task {task!r}; found {count} clients")
    groups = dealing.deal(pool, held, dealing.stream(seed, "task-weights"))
    return dealing.finish(pool, seed, val_fraction, dealing.ids(count), groups, held)


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
    `alpha_tasks` 0, tasks go round and are then shuffled. A task that no client drew goes to the client with the
    fewest tasks; among several, to the one that drew most of it.

    Then the examples of each task are split over the clients that hold it: by Dirichlet(alpha_classes) per class,
    redrawn until each has `min_examples` of it, or evenly where `alpha_classes` is None. An example that has labels of
    several tasks counts, for this, as an example of one of them, in equal parts. Raises RecipeError where no draw
    succeeds.
    """
    rng = dealing.stream(seed, "task-dirichlet")
    total = len(pool.tasks)
    if alpha_tasks == 0:
        if clients < total:
            raise RecipeError(
                f"task-dirichlet with alpha_tasks 0 gives each client one task: expected at least {total} clients for "
                f"{total} tasks, found {clients}"
            )
        holds = np.eye(total, dtype=bool)[rng.permutation(np.arange(clients) % total)]
    else:
        drawn = np.stack([dealing.proportions(rng, alpha_tasks, total) for _ in range(clients)])
        holds = drawn >= 1 / (2 * total)
        holds[np.arange(clients), drawn.argmax(1)] = True
        for orphan in np.flatnonzero(~holds.any(0)):
            holds[np.lexsort((-drawn[:, orphan], holds.sum(1)))[0], orphan] = True

    held = [dict.fromkeys(itertools.compress(pool.tasks, row), 1.0) for row in holds]
    by_class = None if alpha_classes is None else ByClass(alpha_classes, min_examples, max_tries)
    groups = _split(pool, held, by_class, rng, "task-dirichlet")
    return dealing.finish(pool, seed, val_fraction, dealing.ids(clients), groups, held)


@PARTITIONERS.register("task-groups", source="MaTU, Figures 5 and 6: clients with fixed groups of tasks")
def task_groups(
    pool: Pool,
    seed: int,
    *,
    groups: Annotated[list[Names], Field(min_length=1)] | None = None,
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
    group or held by no client, and where no draw succeeds.
    """
    rng = dealing.stream(seed, "task-groups")
    if groups is not None and tasks_per_client is None:
        held = _given(pool, groups, clients)
    elif groups is None and tasks_per_client is not None:
        held = _drawn(pool, tasks_per_client, clients, rng)
    else:
        raise RecipeError("task-groups: expected either groups or tasks_per_client")
    by_class = None if alpha_classes is None else ByClass(alpha_classes, min_examples, max_tries)
    shares = _split(pool, held, by_class, rng, "task-groups")
    return dealing.finish(pool, seed, val_fraction, dealing.ids(len(held)), shares, held)


def _given(pool: Pool, groups: list[Names], clients: int | None) -> Held:
    """The groups, going round until there are `clients`; RecipeError where they do not fit."""
    dealing.known_tasks(pool, groups, "task-groups, group")
    for number, group in enumerate(groups):
        for task in group:
            if group.count(task) > 1:
                raise RecipeError(f"task-groups, group {number}: task {task!r} is named twice")
    if clients is not None and clients < len(groups):
        raise RecipeError(f"task-groups: expected a client for each of {len(groups)} groups, found {clients}")
    for task in pool.tasks:
        if not any(task in group for group in groups):
            raise RecipeError(f"task-groups: no group holds task {task!r}; leave it out of the data set")
    return [dict.fromkeys(groups[k % len(groups)], 1.0) for k in range(clients or len(groups))]


def _drawn(pool: Pool, per_client: int, clients: int | None, rng: np.random.Generator) -> Held:
    """Random groups of `per_client` tasks, each of those that the fewest clients hold so far."""
    if clients is None:
        raise RecipeError("task-groups: tasks_per_client needs the number of clients")
    total = len(pool.tasks)
    if per_client > total or per_client * clients < total:
        raise RecipeError(
            f"task-groups: {clients} clients with {per_client} tasks each cannot cover {total} tasks; "
            f"expected tasks_per_client in {-(-total // clients)}..{total}"
        )
    holders = np.zeros(total, np.int64)
    held = []
    for _ in range(clients):
        fewest = np.lexsort((rng.random(total), holders))[:per_client]
        holders[fewest] += 1
        held.append({pool.tasks[t]: 1.0 for t in sorted(fewest.tolist())})
    return held


def _split(pool: Pool, held: Held, by_class: ByClass | None, rng: np.random.Generator, partitioner: str) -> Groups:
    """Split the examples of each task over the clients that hold it: by class, or evenly."""
    examples: dict[str, Groups] = {task: [] for task in pool.tasks}
    for tasks, index in dealing.patterns(pool, rng):
        sizes = [sum(map(len, examples[task])) for task in tasks]
        for task, part in zip(tasks, dealing.cut(index, sizes), strict=True):
            examples[task].append(part)
    groups = dealing.empty(len(held))
    for task in pool.tasks:
        holders = [k for k, tasks in enumerate(held) if task in tasks]
        index = np.concatenate([*examples[task], np.empty(0, np.int64)])
        if by_class is None:
            parts = dealing.cut(index, [len(groups[k]) for k in holders])
        else:
            parts = by_class.split(pool, task, index, len(holders), rng, f"{partitioner}, task {task!r}")
        dealing.add(groups, holders, parts)
    return groups


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
    clients: list[str] = []
    groups: Groups = []
    held: list[Mapping[str, float]] = []
    domains_: list[str] = []
    for name, here in _members(pool, (*single, *multi), "single-and-multi").items():
        tasks = [task for task in pool.tasks if pool.labelled(task)[here].any()]
        kinds = [(task, {task: 1.0}, single.get(name, 0)) for task in tasks]
        kinds.append((f"{name}-multi", dict.fromkeys(tasks, 1.0), multi.get(name, 0)))
        mine = [client for label, _, count in kinds for client in dealing.numbered(f"{label}-", count)]
        clients += mine
        held += [row for _, row, count in kinds for _ in range(count)]
        domains_ += [name] * len(mine)
        groups += np.array_split(dealing.stream(seed, "single-and-multi", name).permutation(here), len(mine))
    return dealing.finish(pool, seed, val_fraction, clients, groups, held, domains_)


@PARTITIONERS.register("domains", source="FedHEAL and F2DC: fixed and random allocation, without replacement")
def domains(
    pool: Pool,
    seed: int,
    *,
    clients: Count | dict[str, Count],
    fraction: Fraction | dict[str, Fraction] | None = None,
    allocation: Literal["fixed", "random"] = "fixed",
    cover_classes: bool = False,
    max_tries: Count = 1000,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Each client holds every task and examples of one domain; the order of the clients is shuffled.

    `clients` per domain: one number, or {domain: number} in which an absent domain has none. `allocation: random` keeps
    the total and draws each client's domain, again until every one of these domains has a client and none runs out.
    `fraction` of the domain's examples per client, rounded down, drawn without replacement; the rest is not used. By
    default the clients of a domain share all of it evenly. `cover_classes` gives every client at least one example of
    each class of the first task.

    Raises RecipeError where fraction x clients exceeds a domain, and DataError where the data set has no domains, a
    domain is unknown, or there are too few examples of a class.
    """
    counts = clients if isinstance(clients, dict) else dict.fromkeys(pool.domains, clients)
    fractions = fraction if isinstance(fraction, dict) else dict.fromkeys(counts, fraction)
    everything = _members(pool, (*counts, *fractions), "domains")
    for name in counts:
        if name not in fractions:
            raise RecipeError(f"domains: no fraction is given for domain {name!r}")
    labelled = np.any([pool.labelled(task) for task in pool.tasks], axis=0)
    rng = dealing.stream(seed, "domains")
    order = _allocated(counts, fractions, allocation == "random", max_tries, rng)
    groups = dealing.empty(len(order))
    for name in counts:
        members = everything[name][labelled[everything[name]]]
        mine = [k for k, domain in enumerate(order) if domain == name]
        part, n = fractions[name], len(members)
        if part is None:
            sizes = [n // len(mine) + (i < n % len(mine)) for i in range(len(mine))]
        else:
            sizes = [int(part * n + 1e-9)] * len(mine)
        labels = dealing.classes_of(pool, pool.tasks[0]) if cover_classes else None
        for k, index in zip(mine, _draw(members, sizes, labels, rng, name), strict=True):
            groups[k] = index
    return dealing.finish(pool, seed, val_fraction, dealing.ids(len(order)), groups, domains=order)


def _members(pool: Pool, names: Iterable[str], partitioner: str) -> dict[str, Indices]:
    """Domain -> its examples, labelled or not. DataError where the data set has no domains or lacks one of these."""
    if pool.domain is None or not pool.domains:
        raise DataError(f"{partitioner}: the data set has no domains")
    for name in names:
        if name not in pool.domains:
            raise DataError(f"{partitioner}: {unknown('domain', name, pool.domains)}")
    return {name: np.flatnonzero(pool.domain == pool.domains.index(name)) for name in dict.fromkeys(names)}


def _allocated(
    counts: Mapping[str, int],
    fractions: Mapping[str, float | None],
    drawn: bool,
    tries: int,
    rng: np.random.Generator,
) -> list[str]:
    """The domain of each client: `counts` of each domain, shuffled; if `drawn`, only their total is kept."""
    order = [name for name, count in counts.items() for _ in range(count)]
    if not drawn:
        if problem := _excess(counts, fractions):
            raise RecipeError(f"domains: {problem}")
        rng.shuffle(order)
        return order
    names = list(counts)
    for _ in range(tries):
        order = [names[i] for i in rng.integers(len(names), size=len(order))]
        found = {name: order.count(name) for name in names}
        problem = _excess(found, fractions)
        if all(found.values()) and not problem:
            return order
    raise RecipeError(
        f"domains: no random allocation of {len(order)} clients in {tries} draws gave every domain a "
        f"client and overdrew none; the last one: {problem or found}"
    )


def _excess(counts: Mapping[str, int], fractions: Mapping[str, float | None]) -> str:
    """What to say of the first domain whose clients would together take more than all of it; else an empty string."""
    for name, count in counts.items():
        part = fractions[name]
        if part is not None and part * count > 1 + 1e-9:
            return f"domain {name!r}: {count} clients x fraction {part} = {part * count:.3g} of it, at most 1"
    return ""


def _draw(
    members: Indices, sizes: Sequence[int], labels: Labels | None, rng: np.random.Generator, domain: str
) -> Groups:
    """Disjoint groups of the given sizes; with `labels`, each group has every class of the domain's members."""
    groups = dealing.empty(len(sizes))
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


@PARTITIONERS.register("listed")
def listed(
    pool: Pool,
    seed: int,
    *,
    clients: list[Positions] | dict[ClientId, Positions],
    tasks: dict[str, list[str]] | None = None,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Each client has the examples at the positions that are listed for it; a list of lists names clients c00, c01, ...

    `tasks` {client: its tasks}; by default a client holds the tasks that it has labels of. Raises DataError for a
    position that is not in the data set or that two clients have.
    """
    named = clients if isinstance(clients, dict) else dict(zip(dealing.ids(len(clients)), clients, strict=True))
    for client in tasks or {}:
        if client not in named:
            raise RecipeError(f"listed, tasks: no client is called {client!r}; clients: {', '.join(named)}")
    groups = []
    for client, positions in named.items():
        index = np.asarray(positions, np.int64).reshape(-1)
        wrong = index[(index < 0) | (index >= len(pool))]
        if len(wrong):
            raise DataError(f"client {client!r}: position {wrong[0]} found, expected 0 to {len(pool) - 1}")
        groups.append(np.sort(index))
    labels = {client: tasks[client] if tasks and client in tasks else _labelled(pool, index)
              for client, index in zip(named, groups, strict=True)}  # fmt: skip
    held = [dict.fromkeys(each, 1.0) for each in labels.values()]
    return dealing.finish(pool, seed, val_fraction, list(named), groups, held)


def _labelled(pool: Pool, index: Any) -> list[str]:
    return [task for task in pool.tasks if pool.labelled(task)[index].any()]


@PARTITIONERS.register("own")
def own(pool: Pool, seed: int) -> Partition:
    """As the data set says itself: a `fedloom.Federation` has clients of its own."""
    if pool.deal is None:
        raise DataError("partition: own found, but the data set does not say who holds what; name another partition")
    return pool.deal(pool, seed)


def as_partition(made: Any, pool: Pool, seed: int) -> Partition:
    """A Partition as it is; lists of positions, or {client: positions}, as `listed` reads them.

    Raises DataError for anything else.
    """
    if isinstance(made, Partition):
        made.check(pool, shared=True)
        return made
    if isinstance(made, Mapping):
        return listed(pool, seed, clients={str(name): _positions(each, name) for name, each in made.items()})
    if isinstance(made, list | tuple) and made:
        return listed(pool, seed, clients=[_positions(each, number) for number, each in enumerate(made)])
    raise DataError(
        f"partition: {made!r} found, expected a name, a section, lists of positions, {{client: positions}} or a "
        "function of (pool, seed) that gives one of the last two or a Partition"
    )


def _positions(each: Any, who: object) -> Positions:
    try:
        array = np.asarray(each)
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
        raise DataError(f"partition, client {who!r}: {each!r} found, expected a list of positions such as [0, 5, 9]")
    return [int(i) for i in array]


@PARTITIONERS.register("nodes")
def nodes(pool: Pool, seed: int) -> Partition:
    """Nothing is dealt out: clients hold what they hold (for data: nodes)."""
    at_nodes()
