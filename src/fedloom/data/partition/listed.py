"""Partitions that are written down, and those that a data set brings with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, RecipeError
from fedloom.core.settings.names import ClientId
from fedloom.data.partition import dealing
from fedloom.data.partition.dealing import PARTITIONERS, ValFraction
from fedloom.data.partition.table import Partition, Pool

Positions = list[int]


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
