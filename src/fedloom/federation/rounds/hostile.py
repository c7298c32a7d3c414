"""Clients that a recipe makes hostile: who they are, and what they send together once all honest updates are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.core.context import Log, Row, State, generator, row_key
from fedloom.core.errors import RecipeError, nearest
from fedloom.core.layout import Layout
from fedloom.federation.recipes.schema import AttackSection
from fedloom.federation.rounds.federation import BuiltFederation
from fedloom.federation.rounds.messages import Payload, unpacked
from fedloom.methods.method import Method
from fedloom.training.rules import HONEST, Attack, within


def attacks_of(section: AttackSection | None, seed: int, federation: BuiltFederation, whole: bool) -> dict[str, Attack]:
    """Return client -> its attack, of the hostile ones: those that the recipe names, or as many, drawn from its seed.

    Where the federation is not whole, only its own clients, and only by their names.
    Raises RecipeError for an unknown client, where no client would be honest, and for an attack that would do nothing.
    """
    clients = sorted(federation.clients)
    if section is None:
        return {}
    if isinstance(section.clients, int):
        if not whole:
            raise RecipeError(
                f"attack.clients: {section.clients} found, but a node with its own data does not know the other "
                "clients, "
                "so it cannot draw some of them; list the clients' names"
            )
        order = torch.randperm(len(clients), generator=generator(seed, "attack")).tolist()
        names = sorted(clients[i] for i in order[: section.clients])
    else:
        names = sorted(name for name in set(section.clients) if whole or name in federation.clients)
    for name in names:
        if name not in federation.clients:
            raise RecipeError(
                f"attack.clients: no client {name!r}.{nearest(name, clients)} Clients: {', '.join(clients)}"
            )
    if whole and len(names) == len(clients):
        raise RecipeError(
            f"attack.clients: {len(names)} of {len(clients)} clients are hostile, expected at least one honest client"
        )
    attack: Attack = section.make()
    for name in names:
        if why := attack.unfit({task: each for task, (each, _) in federation.clients[name].tasks.items()}):
            raise RecipeError(f"attack: {section.name} at client {name!r}: {why}")
    return dict.fromkeys(names, attack)


def group_of(federation: BuiltFederation, row: Row) -> str:
    """Return the name of the group that a row is in: the row's task, or the tasks of its client."""
    client, task = row
    return task or ",".join(sorted(federation.client(client).tasks))


def groups_of(attacks: Mapping[str, Attack], federation: BuiltFederation, rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the clients of each group with a hostile client, from the rows of all clients."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(group_of(federation, row), []).append(row[0])
    return {name: clients for name, clients in groups.items() if attacks.keys() & set(clients)}


def conspired(
    attacks: Mapping[str, Attack],
    method: Method,
    shared: Layout,
    federation: BuiltFederation,
    payloads: Iterable[Payload],
    memory: State,
    log: Log,
) -> Iterator[Payload]:
    """Return the payloads, those of hostile clients that know all others last, and with what these send together.

    `memory`, what the hostile clients of each group remember, is changed, and a change is logged.
    """
    if not any(attack.knows_all for attack in attacks.values()):
        yield from payloads
        return
    honest: dict[str, dict[Row, Tensor]] = {}
    waiting: list[Payload] = []
    for payload in payloads:
        if attacks.get(payload.row[0], HONEST).knows_all and payload.finite:
            waiting.append(payload)
            continue
        if payload.finite:
            theirs, _ = unpacked(method, shared, federation, payload.rows, payload.packed)
            for row, x in zip(payload.rows, theirs, strict=True):
                honest.setdefault(group_of(federation, row), {})[row] = x.clone()
        yield payload
    hostile = sorted((row for payload in waiting for row in payload.rows), key=row_key)
    count = Counter(group_of(federation, row) for row in hostile)
    sent: dict[str, Tensor | None] = {}
    for client, task in hostile:
        group = group_of(federation, (client, task))
        if group in sent or group not in honest:
            continue
        # in the order of their names, for a mean of rows depends on their order in its last bits
        names, before = sorted(honest[group], key=row_key), memory.get(group, {})
        rows = torch.stack([honest[group][name] for name in names])
        sent[group], after = attacks[client].together(rows, [name for name, _ in names], count[group], before)
        if after != before:
            memory[group] = after
            log("attack", {"tasks": group, **after})
    for payload in waiting:
        own, like = unpacked(method, shared, federation, payload.rows, payload.packed)
        X = []
        for row, x in zip(payload.rows, own, strict=True):
            agreed = sent.get(group_of(federation, row))
            X.append(x if agreed is None else agreed)
        yield replace(payload, packed=method.codec.pack(within(like, torch.stack(X))))
