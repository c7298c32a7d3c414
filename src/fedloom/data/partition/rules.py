"""The rules that deal examples out to clients, by class, by task or by domain, and partitions that are written down.

The second half deals examples evenly or by Dirichlet draws, and sets validation data apart. `Groups` are examples per
client, in the order of the clients.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RecipeError, unknown
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import BelowOne, ClientId, Count, NonNegative, Positive, client_name
from fedloom.data.partition.table import Indices, Labels, Partition, Pool, Share, are_classes
from fedloom.data.prepare import at_nodes, no_repeats, part_of

_OWN = ("fedloom.data.partition.table:Partition", "collections.abc:Mapping", "builtins:list")
PARTITIONERS = Registry("partition", "fedloom.partitions", _OWN)

Groups = list[Indices]
Held = Sequence[Mapping[str, float]]
"""Per client: the tasks that it holds, with their loss weights."""
Alpha = Annotated[float, Field(gt=0, le=1e6)]
ValFraction = BelowOne
Names = Annotated[list[str], Field(min_length=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positions = list[int]
Rng = np.random.Generator


@PARTITIONERS.register("iid", source="MaT-FL, 'homo'")
def iid(pool: Pool, seed: int, *, clients: Count, val_fraction: ValFraction = 0.1) -> Partition:
    """Give every client all tasks and an equal, random share of the examples."""
    groups = deal(pool, [dict.fromkeys(pool.tasks, 1.0)] * clients, stream(seed, "iid"))
    return finish(pool, seed, val_fraction, ids(clients), groups)


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
    """Give every client all tasks, and split each class of `task` (by default the first) by a Dirichlet(alpha) draw.

    The whole split is drawn again, at most `max_tries` times, until every client has `min_examples`. `balanced` is
    NIID-Bench's trick: a client that holds its equal share gets nothing of the classes that follow. Examples without a
    label of `task` are split evenly. Raises RecipeError where no draw succeeds or `task` has no classes.
    """
    name = pool.tasks[0] if task is None else task
    if name not in pool.labels:
        raise RecipeError(f"class-dirichlet: {unknown('task', name, pool.tasks)}")
    rng = stream(seed, "class-dirichlet")
    with_class, what = np.flatnonzero(pool.labelled(name)), f"class-dirichlet over task {name!r}"
    groups = by_class(pool, name, with_class, clients, rng, what, alpha, min_examples, max_tries, balanced)
    for tasks, index in patterns(pool, rng):
        if name not in tasks:
            add(groups, range(clients), cut(index, [len(g) for g in groups]))
    return finish(pool, seed, val_fraction, ids(clients), groups)


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
    """Give each client one task, which names it (`digit-0`), and `all_task_clients` more clients all tasks (`all-0`).

    `images: disjoint` deals each example to one client. `shared` gives the clients of each task together all examples
    of the task, and those that hold all tasks together all examples; within such a group shares are disjoint. Raises
    RecipeError where a task is called 'all' beside such clients.
    """
    kinds = [(task, {task: 1.0}, clients_per_task) for task in pool.tasks]
    if all_task_clients:
        if "all" in pool.tasks:
            raise RecipeError("one-task: the name 'all' stands for clients that hold all tasks: rename the task 'all'")
        kinds.append(("all", dict.fromkeys(pool.tasks, 1.0), all_task_clients))
    clients, held = _clients(kinds)
    if images == "disjoint":
        groups = deal(pool, held, stream(seed, "one-task"))
    else:
        groups = []
        for name, tasks, count in kinds:
            own = Pool({task: pool.labels[task] for task in tasks})
            groups += deal(own, [tasks] * count, stream(seed, "one-task", name))
    return finish(pool, seed, val_fraction, clients, groups, held, shared=images == "shared")


def _clients(kinds: Iterable[tuple[str, dict[str, float], int]]) -> tuple[list[str], list[dict[str, float]]]:
    """Return the names and the tasks of clients of some kinds: (name, tasks, number of clients)."""
    pairs = [(who, tasks) for name, tasks, count in kinds for who in numbered(f"{name}-", count)]
    return [who for who, _ in pairs], [tasks for _, tasks in pairs]


@PARTITIONERS.register("task-weights", source="DFMTL thesis: SingleTask, Pairwise, MultiTask")
def task_weights(
    pool: Pool,
    seed: int,
    *,
    weights: Literal["single", "pairwise", "multi"] | list[dict[str, NonNegative]] = "pairwise",
    clients: Count | None = None,
    sizes: list[Positive] | None = None,
    val_fraction: ValFraction = 0.1,
) -> Partition:
    """Give clients tasks with loss weights, and each client a random share of the examples: equal, or by `sizes`.

    `single`: one task each; `pairwise`: 0.7 and 0.3 on an ordered pair of tasks each; `multi`: 1 / T on all T tasks; or
    one {task: weight} per client, in which a task of weight 0 is not held and never computed. The named modes go round
    until there are `clients`; by default each of the T tasks or T (T - 1) ordered pairs occurs once. `sizes` are in
    proportion, one number per client: [64, 136, 208, 280]. Raises RecipeError where `clients` is needed, does not fit
    an explicit list, or is too small to cover all tasks, and where there is not one size per client.
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
            raise RecipeError("task-weights: 'multi' needs the number of clients: add clients")
        rows = [dict.fromkeys(tasks, 1 / len(tasks))]
    else:
        rows = [{task: weight for task, weight in row.items() if weight > 0} for row in weights]
        if clients not in (None, len(rows)):
            raise RecipeError(f"task-weights: expected {clients} rows of weights, found {len(rows)}")
        known_tasks(pool, rows, "task-weights, row")
    count = clients or len(rows)
    held = [rows[i % len(rows)] for i in range(count)]
    for task in tasks:
        if not any(task in row for row in held):
            raise RecipeError(f"task-weights: no client holds task {task!r}; found {count} clients")
    if sizes is not None and len(sizes) != count:
        raise RecipeError(f"task-weights: expected {count} sizes, one per client, found {len(sizes)}")
    groups = deal(pool, held, stream(seed, "task-weights"), sizes)
    return finish(pool, seed, val_fraction, ids(count), groups, held)


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
    """Draw a group of tasks for each client by Dirichlet(alpha_tasks); 0 gives each client exactly one task.

    A client draws proportions over the T tasks and holds those of at least 1 / (2 T), and always the largest. With
    `alpha_tasks` 0, tasks go round and are then shuffled. A task that no client drew goes to the client with the
    fewest tasks; among several, to the one that drew most of it.

    Then the examples of each task are split over the clients that hold it: by Dirichlet(alpha_classes) per class,
    redrawn until each has `min_examples` of it, or evenly where `alpha_classes` is None. An example that has labels of
    several tasks counts, for this, as an example of one of them, in equal parts. RecipeError where no draw succeeds.
    """
    rng, total = stream(seed, "task-dirichlet"), len(pool.tasks)
    if alpha_tasks == 0:
        if clients < total:
            wanted = f"expected at least {total} clients for {total} tasks, found {clients}"
            raise RecipeError(f"task-dirichlet with alpha_tasks 0 gives each client one task: {wanted}")
        holds = np.eye(total, dtype=bool)[rng.permutation(np.arange(clients) % total)]
    else:
        drawn = np.stack([proportions(rng, alpha_tasks, total) for _ in range(clients)])
        holds = drawn >= 1 / (2 * total)
        holds[np.arange(clients), drawn.argmax(1)] = True
        for orphan in np.flatnonzero(~holds.any(0)):
            holds[np.lexsort((-drawn[:, orphan], holds.sum(1)))[0], orphan] = True

    held = [dict.fromkeys(itertools.compress(pool.tasks, row), 1.0) for row in holds]
    groups = _split(pool, held, alpha_classes, min_examples, max_tries, rng, "task-dirichlet")
    return finish(pool, seed, val_fraction, ids(clients), groups, held)


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
    """Give clients the listed groups of tasks, or groups of `tasks_per_client` tasks drawn at random.

    The `groups` go round until there are `clients`; by default there is one client per group. With `tasks_per_client`,
    which needs `clients`, each client in turn gets those tasks that the fewest clients hold so far, ties being drawn,
    so that the numbers of clients of any two tasks differ by at most one.

    The examples of each task are split over the clients that hold it as `task-dirichlet` does: by
    Dirichlet(alpha_classes) per class, redrawn until each has `min_examples` of it, or evenly where `alpha_classes` is
    None. Raises RecipeError for both or neither of the two, too few clients, a task that is unknown, named twice in a
    group or held by no client, and where no draw succeeds.
    """
    rng = stream(seed, "task-groups")
    if groups is not None and tasks_per_client is None:
        held = _given(pool, groups, clients)
    elif groups is None and tasks_per_client is not None:
        held = _drawn(pool, tasks_per_client, clients, rng)
    else:
        raise RecipeError("task-groups: expected either groups or tasks_per_client")
    shares = _split(pool, held, alpha_classes, min_examples, max_tries, rng, "task-groups")
    return finish(pool, seed, val_fraction, ids(len(held)), shares, held)


def _given(pool: Pool, groups: list[Names], clients: int | None) -> Held:
    """Return the groups, repeated until there are `clients`; RecipeError where they do not fit."""
    known_tasks(pool, groups, "task-groups, group")
    for number, group in enumerate(groups):
        no_repeats(f"task-groups, group {number}", "task", group)
    if clients is not None and clients < len(groups):
        raise RecipeError(f"task-groups: expected a client for each of {len(groups)} groups, found {clients}")
    for task in pool.tasks:
        if not any(task in group for group in groups):
            raise RecipeError(f"task-groups: no group holds task {task!r}; leave it out of the data set")
    return [dict.fromkeys(groups[k % len(groups)], 1.0) for k in range(clients or len(groups))]


def _drawn(pool: Pool, per_client: int, clients: int | None, rng: Rng) -> Held:
    """Draw groups of `per_client` tasks, each of those that the fewest clients hold so far."""
    if clients is None:
        raise RecipeError("task-groups: tasks_per_client needs the number of clients: add clients")
    total = len(pool.tasks)
    if per_client > total or per_client * clients < total:
        found = f"{clients} clients with {per_client} tasks each cannot cover {total} tasks"
        raise RecipeError(f"task-groups: {found}; expected tasks_per_client in {-(-total // clients)}..{total}")
    holders, held = np.zeros(total, np.int64), []
    for _ in range(clients):
        fewest = np.lexsort((rng.random(total), holders))[:per_client]
        holders[fewest] += 1
        held.append({pool.tasks[t]: 1.0 for t in sorted(fewest.tolist())})
    return held


def _split(pool: Pool, held: Held, alpha: float | None, least: int, tries: int, rng: Rng, partitioner: str) -> Groups:
    """Split the examples of each task over the clients that hold it: by Dirichlet(alpha) per class, or evenly."""
    examples: dict[str, Groups] = {task: [np.empty(0, np.int64)] for task in pool.tasks}
    for tasks, index in patterns(pool, rng):
        sizes = [sum(map(len, examples[task])) for task in tasks]
        for task, part in zip(tasks, cut(index, sizes), strict=True):
            examples[task].append(part)
    groups = empty(len(held))
    for task in pool.tasks:
        holders = [k for k, tasks in enumerate(held) if task in tasks]
        index = np.concatenate(examples[task])
        if alpha is None:
            parts = cut(index, [len(groups[k]) for k in holders])
        else:
            what = f"{partitioner}, task {task!r}"
            parts = by_class(pool, task, index, len(holders), rng, what, alpha, least, tries)
        add(groups, holders, parts)
    return groups


@PARTITIONERS.register("single-and-multi", source="FedHCA2: single-task clients on one data set, multi-task on others")
def single_and_multi(
    pool: Pool, seed: int, *, single: dict[str, Count], multi: dict[str, Count], val_fraction: ValFraction = 0.1
) -> Partition:
    """Make single-task clients on some domains (data sets) and multi-task clients on others.

    `single` {domain: n}: n clients for each task of the domain; all of them share the domain's examples in disjoint,
    even parts, as in the authors' release. `multi` {domain: m}: m clients that hold every task of the domain, likewise.
    The paper's 2C and 4C are n = m = 2 and 4. A domain may be in both: then all its clients share its examples.

    Raises DataError where the data set has no such domain.
    """
    clients, groups, held, origins = list[str](), list[Indices](), list[Mapping[str, float]](), list[str]()
    for name, here in _members(pool, (*single, *multi), "single-and-multi").items():
        tasks = tasks_of(pool, here)
        kinds = [(task, {task: 1.0}, single.get(name, 0)) for task in tasks]
        mine, rows = _clients([*kinds, (f"{name}-multi", dict.fromkeys(tasks, 1.0), multi.get(name, 0))])
        clients += mine
        held += rows
        origins += [name] * len(mine)
        groups += np.array_split(stream(seed, "single-and-multi", name).permutation(here), len(mine))
    return finish(pool, seed, val_fraction, clients, groups, held, origins)


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
    named: bool = False,
) -> Partition:
    """Give each client all tasks and examples of one domain; the order of the clients is shuffled.

    Clients are numbered in their order, which differs from seed to seed; with `named` they are called like their
    domains, with a number where a domain has several, if domains have names that clients can have.

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
            raise RecipeError(f"domains: fractions has no number for domain {name!r}: add it")
    labelled = np.any([pool.labelled(task) for task in pool.tasks], axis=0)
    rng = stream(seed, "domains")
    order = _allocated(counts, fractions, allocation == "random", max_tries, rng)
    groups = empty(len(order))
    for name in counts:
        members = everything[name][labelled[everything[name]]]
        mine = [k for k, domain in enumerate(order) if domain == name]
        part, n, m = fractions[name], len(members), len(mine)
        sizes = [n // m + (i < n % m) if part is None else int(part * n + 1e-9) for i in range(m)]
        labels = classes_of(pool, pool.tasks[0]) if cover_classes else None
        for k, index in zip(mine, _draw(members, sizes, labels, rng, name), strict=True):
            groups[k] = index
    names = _like_domains(order) if named else ids(len(order))
    return finish(pool, seed, val_fraction, names, groups, domains=order)


def _like_domains(order: Sequence[str]) -> list[str]:
    """Return names of clients after their domains; numbers where some domain's name is none for a client."""
    counts, seen = Counter(order), Counter[str]()
    names = []
    for domain in order:
        names.append(domain if counts[domain] == 1 else f"{domain}-{seen[domain]}")
        seen[domain] += 1
    try:
        return [client_name(name) for name in names] if len({*names}) == len(names) else ids(len(order))
    except ValueError:
        return ids(len(order))


def _members(pool: Pool, names: Iterable[str], partitioner: str) -> dict[str, Indices]:
    """Return domain -> its examples, labelled or not. DataError where the data set lacks one of these domains."""
    if pool.domain is None or not pool.domains:
        raise DataError(f"{partitioner}: the data set has no domains")
    for name in names:
        if name not in pool.domains:
            raise DataError(f"{partitioner}: {unknown('domain', name, pool.domains)}")
    return {name: np.flatnonzero(pool.domain == pool.domains.index(name)) for name in dict.fromkeys(names)}


def _allocated(
    counts: Mapping[str, int], fractions: Mapping[str, float | None], drawn: bool, tries: int, rng: Rng
) -> list[str]:
    """Allocate a domain to each client: `counts` of each domain, shuffled; if `drawn`, only their total is kept."""
    order = [name for name, count in counts.items() for _ in range(count)]
    if not drawn:
        if problem := _excess(counts, fractions):
            raise RecipeError(f"domains: {problem}")
        rng.shuffle(order)
        return order
    names = list(counts)
    for _ in range(tries):
        order = [names[i] for i in rng.integers(len(names), size=len(order))]
        drawn_counts = {name: order.count(name) for name in names}
        problem = _excess(drawn_counts, fractions)
        if all(drawn_counts.values()) and not problem:
            return order
    told = f"of {len(order)} clients in {tries} draws gave every domain a client and enough examples"
    raise RecipeError(f"domains: no random allocation {told}; the last draw: {problem or drawn_counts}")


def _excess(counts: Mapping[str, int], fractions: Mapping[str, float | None]) -> str:
    """Return a message for the first domain whose clients would take more than all of it; else an empty string."""
    for name, count in counts.items():
        part = fractions[name]
        if part is not None and part * count > 1 + 1e-9:
            return f"domain {name!r}: {count} clients x fraction {part} = {part * count:.3g} of it, at most 1"
    return ""


def _draw(members: Indices, sizes: Sequence[int], labels: Labels | None, rng: Rng, domain: str) -> Groups:
    """Draw disjoint groups of these sizes; with `labels`, each group has every class of the domain's members."""
    groups = empty(len(sizes))
    if labels is not None:
        classes = [int(c) for c in np.unique(labels[members]) if c >= 0]
        if min(sizes) < len(classes):
            wanted = f"at least {len(classes)} examples per client to cover the classes"
            raise DataError(f"domain {domain!r}: expected {wanted}, found {min(sizes)}")
        for value in classes:
            chosen = rng.permutation(members[labels[members] == value])
            if len(chosen) < len(sizes):
                wanted = f"an example for each of {len(sizes)} clients"
                raise DataError(f"domain {domain!r}, class {value}: expected {wanted}, found {len(chosen)}")
            groups = [np.append(g, one) for g, one in zip(groups, chosen[: len(sizes)], strict=True)]
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
    """Give each client the examples at its listed positions; a list of lists names the clients c00, c01, ...

    `tasks` {client: its tasks}; by default a client holds the tasks that it has labels of. Raises DataError for a
    position that is not in the data set or that two clients have.
    """
    named = clients if isinstance(clients, dict) else dict(zip(ids(len(clients)), clients, strict=True))
    for client in tasks or {}:
        if client not in named:
            raise RecipeError(f"listed, tasks: unknown client {client!r}; clients: {', '.join(named)}")
    groups = []
    for client, positions in named.items():
        index = np.asarray(positions, np.int64).reshape(-1)
        if len(wrong := index[(index < 0) | (index >= len(pool))]):
            raise DataError(f"client {client!r}: position {wrong[0]} found, expected 0 to {len(pool) - 1}")
        groups.append(np.sort(index))
    known = tasks or {}
    held = [dict.fromkeys(known.get(who) or tasks_of(pool, i), 1.0) for who, i in zip(named, groups, strict=True)]
    return finish(pool, seed, val_fraction, list(named), groups, held)


@PARTITIONERS.register("own")
def own(pool: Pool, seed: int) -> Partition:
    """Use the partition of the data set itself: a `fedloom.Federation` has clients of its own."""
    if pool.deal is None:
        needs = "needs a data set that assigns examples to clients, and this one does not: choose another partition"
        raise DataError(f"partition: own {needs}")
    return pool.deal(pool, seed)


def as_partition(value: Any, pool: Pool, seed: int) -> Partition:
    """Return a Partition as it is; read lists of positions, or {client: positions}, as `listed` does. Raises DataError
    for anything else."""
    if isinstance(value, Partition):
        value.check(pool, shared=True)
        return value
    if isinstance(value, Mapping):
        return listed(pool, seed, clients={str(name): _positions(each, name) for name, each in value.items()})
    if isinstance(value, list | tuple) and value:
        return listed(pool, seed, clients=[_positions(each, number) for number, each in enumerate(value)])
    forms = "a name, a section, lists of positions, {client: positions}"
    function = "a function of (pool, seed) that gives one of the last two or a Partition"
    raise DataError(f"partition: {value!r} found, expected {forms} or {function}")


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
    """Leave the data where they are: each node holds its own (for data: nodes)."""
    at_nodes()


def stream(seed: int, *purpose: object) -> Rng:
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


def set_apart(
    index: Indices, val_fraction: float, priority: Indices, group: Indices | None = None
) -> tuple[Indices, Indices]:
    """Split a client's examples into a training and a validation part, both sorted. `group` (N) is the number of each
    example's group: examples of one group stay together, and the fraction counts groups."""
    if group is not None:
        _, chosen = set_apart(np.unique(group[index]), val_fraction, priority)
        apart = np.isin(group[index], chosen)
        return np.sort(index[~apart]), np.sort(index[apart])
    val = part_of(val_fraction, len(index)) if val_fraction > 0 else 0
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
            raise DataError(f"client {client!r} would get no example: use fewer clients, or raise the fraction")
        own = dict.fromkeys(tasks_of(pool, index), 1.0) if tasks is None else tasks[k]
        weights = {task: float(weight) for task, weight in own.items()}
        parts = set_apart(index, val_fraction, priority, pool.group)
        shares.append(Share(client, weights, *parts, None if domains is None else domains[k]))
    partition = Partition(tuple(sorted(shares, key=lambda s: s.client)))
    partition.check(pool, shared)
    return partition


def tasks_of(pool: Pool, index: Indices) -> list[str]:
    """Return the tasks of which some examples have labels."""
    return [task for task in pool.tasks if pool.labelled(task, index).any()]


def patterns(pool: Pool, rng: Rng) -> list[tuple[tuple[str, ...], Indices]]:
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


def deal(pool: Pool, held: Held, rng: Rng, sizes: Sequence[float] | None = None) -> Groups:
    """Deal every labelled example to one client that holds a task it is labelled for. Clients get about equal numbers,
    or numbers in proportion to `sizes`."""
    groups = empty(len(held))
    for tasks, index in patterns(pool, rng):
        able = [k for k, row in enumerate(held) if any(task in row for task in tasks)]
        if not able:
            raise RecipeError(f"no client holds the task {tasks[0]!r}: give it to one, or leave the task out")
        if sizes is None:
            parts = cut(index, [len(groups[k]) for k in able])
        else:
            ends = np.cumsum([sizes[k] for k in able])
            parts = np.split(index, np.rint(ends[:-1] / ends[-1] * len(index)).astype(int))
        add(groups, able, parts)
    return groups


def add(groups: Groups, clients: Iterable[int], parts: Groups) -> None:
    """Give each of the clients one more part, in place."""
    for k, part in zip(clients, parts, strict=True):
        groups[k] = np.concatenate([groups[k], part])


def proportions(rng: Rng, alpha: float, count: int) -> np.ndarray[Any, Any]:
    """Draw from the symmetric Dirichlet distribution, also where a tiny alpha makes numpy's draw 0/0."""
    q = rng.dirichlet(np.full(count, alpha))
    if not np.isfinite(q).all():
        q = np.eye(count)[rng.integers(count)]  # the limit for alpha to 0
    return q


def by_class(
    pool: Pool,
    task: str,
    index: Indices,
    count: int,
    rng: Rng,
    what: str,
    alpha: float,
    least: int,
    tries: int,
    balanced: bool = False,
) -> Groups:
    """Split `index` among `count` clients by the classes of `task`: a Dirichlet(alpha) draw over clients for each.

    The whole split is drawn again, at most `tries` times, until every client has at least `least` examples; RecipeError
    where no draw succeeds. `balanced`: a client that holds its equal share gets nothing of the classes that follow.
    """
    labels = classes_of(pool, task)
    if count * least > len(index):
        needs = f"{count} clients with at least {least} examples each need {count * least}"
        raise RecipeError(f"{what}: {needs}, found {len(index)}")
    smallest = 0
    for _ in range(tries):
        groups = empty(count)
        for value in np.unique(labels[index]):
            members = rng.permutation(index[labels[index] == value])
            q = proportions(rng, alpha, count)
            if balanced:
                space = np.array([len(g) < len(index) / count for g in groups])
                q = q * space
                q = q / q.sum() if q.sum() > 0 else space / space.sum()
            # Rounded, not cut off: int() would hand the last client every lost fraction.
            add(groups, range(count), np.split(members, np.rint(np.cumsum(q)[:-1] * len(members)).astype(int)))
        if (drawn := min(map(len, groups))) >= least:
            return groups
        smallest = max(smallest, drawn)
    found = f"the smallest of {count} clients had at best {smallest} examples, expected {least}"
    advice = f"raise alpha or lower the clients or min_examples{'' if balanced else ', or set balanced'}"
    raise RecipeError(f"{what}: after {tries} draws with alpha {alpha} {found}: {advice}")


def classes_of(pool: Pool, task: str) -> Labels:
    """Return the task's labels, which must be classes; RecipeError otherwise."""
    labels = pool.labels[task]
    if not are_classes(labels):
        found = f"{labels.dtype} of shape {labels.shape}"
        raise RecipeError(f"task {task!r}: expected one class per example (N integers), found {found}")
    return labels


def known_tasks(pool: Pool, rows: Iterable[Iterable[str]], what: str) -> None:
    """Raise RecipeError where a row, called `what` and its number, names a task that is not in the pool."""
    for number, row in enumerate(rows):
        for task in row:
            if task not in pool.labels:
                raise RecipeError(f"{what} {number}: {unknown('task', task, pool.tasks)}")
