"""Clients differ in the domain that their examples come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, unknown
from fedloom.core.settings.section import Count
from fedloom.data.partition import dealing
from fedloom.data.partition.dealing import PARTITIONERS, Groups, ValFraction
from fedloom.data.partition.table import Indices, Labels, Partition, Pool

Fraction = Annotated[float, Field(gt=0, le=1)]


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
