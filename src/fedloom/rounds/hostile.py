"""Clients that a recipe makes hostile: who they are, and what they send together once all honest updates are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.attacks.attack import HONEST, Attack, within
from fedloom.core.context import Row, generator, row_key
from fedloom.core.layout import Layout
from fedloom.errors import RecipeError, nearest
from fedloom.methods.method import Method
from fedloom.recipes.schema import Recipe
from fedloom.rounds.federation import BuiltFederation
from fedloom.rounds.messages import Payload, unpacked


def attacks_of(recipe: Recipe, federation: BuiltFederation, whole: bool) -> dict[str, Attack]:
    """Client -> its attack, of the hostile ones: those that the recipe names, or as many, drawn from its seed.

    Where the federation is not whole, only its own clients, and only by their names.
    Raises RecipeError for an unknown client, where no client would be honest, and for an attack that would do nothing.
    """
    section, clients = recipe.attack, sorted(federation.clients)
    if section is None:
        return {}
    if isinstance(section.clients, int):
        if not whole:
            raise RecipeError(
                f"attack.clients: {section.clients} found, but a node with its own data does not know the others, so "
                "it cannot draw; list the clients' names"
            )
        order = torch.randperm(len(clients), generator=generator(recipe.seed, "attack")).tolist()
        names = sorted(clients[i] for i in order[: section.clients])
    else:
        names = sorted(name for name in set(section.clients) if whole or name in federation.clients)
    for name in names:
        if name not in federation.clients:
            raise RecipeError(
                f"attack.clients: no client {name!r}.{nearest(name, clients)} Clients: {', '.join(clients)}"
            )
    if whole and len(names) == len(clients):
        raise RecipeError(f"attack.clients: {len(names)} of {len(clients)} clients are hostile, expected an honest one")
    attack: Attack = section.make()
    for name in names:
        if why := attack.unfit({task: each for task, (each, _) in federation.clients[name].tasks.items()}):
            raise RecipeError(f"attack: {section.name} at client {name!r}: {why}")
    return dict.fromkeys(names, attack)


def conspired(
    attacks: Mapping[str, Attack],
    method: Method,
    shared: Layout,
    federation: BuiltFederation,
    payloads: Iterable[Payload],
) -> Iterator[Payload]:
    """The payloads, those of hostile clients that know all others last, and with what these send together."""
    if not any(attack.knows_all for attack in attacks.values()):
        yield from payloads
        return
    honest: dict[str, dict[Row, Tensor]] = {}
    waiting: list[Payload] = []

    def tasks_of(row: Row) -> str:
        client, task = row
        return task or ",".join(sorted(federation.client(client).tasks))

    for payload in payloads:
        if attacks.get(payload.row[0], HONEST).knows_all and payload.finite:
            waiting.append(payload)
            continue
        if payload.finite:
            theirs, _ = unpacked(method, shared, federation, payload.rows, payload.packed)
            for row, x in zip(payload.rows, theirs, strict=True):
                honest.setdefault(tasks_of(row), {})[row] = x.clone()
        yield payload
    hostile = [tasks_of(row) for payload in waiting for row in payload.rows]
    for payload in waiting:
        own, like = unpacked(method, shared, federation, payload.rows, payload.packed)
        X = []
        for row, x in zip(payload.rows, own, strict=True):
            known, alike = honest.get(tasks_of(row), {}), hostile.count(tasks_of(row))
            # in the order of their names, for a mean of rows depends on their order in its last bits
            rows = torch.stack([known[each] for each in sorted(known, key=row_key)]) if known else None
            X.append(x if rows is None else attacks[row[0]].together(x, rows, len(rows) + alike))
        yield replace(payload, packed=method.codec.pack(within(like, torch.stack(X))))
