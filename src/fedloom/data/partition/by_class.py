"""Every client holds every task: equal random shares, or shares that differ in their classes."""

from __future__ import annotations

import numpy as np

from fedloom.core.errors import RecipeError, unknown
from fedloom.core.settings.section import Count
from fedloom.data.partition import dealing
from fedloom.data.partition.dealing import PARTITIONERS, Alpha, ByClass, ValFraction
from fedloom.data.partition.table import Partition, Pool


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
