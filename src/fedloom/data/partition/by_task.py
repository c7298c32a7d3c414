"""Clients differ in the tasks that they hold."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import Count, NonNegative
from fedloom.data.partition import dealing
from fedloom.data.partition.dealing import PARTITIONERS, Alpha, ByClass, Groups, Held, ValFraction
from fedloom.data.partition.table import Partition, Pool

Names = Annotated[list[str], Field(min_length=1)]


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
