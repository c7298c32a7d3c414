"""Decoders of different tasks side by side: which (client, task) has one, and which tensors correspond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.stages.relations import Attention, attention
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class TaskColumns:
    """One task's columns: its blocks, their places in the matrix, and their places in the task's own vector (d)."""

    blocks: tuple[Block, ...]
    at: tuple[slice, ...]
    own: tuple[slice, ...]
    names: tuple[str, ...]
    d: int

    @staticmethod
    def of(layout: Layout, task: str | None) -> TaskColumns:
        mine = [(b, s) for b, s in zip(layout.blocks, layout.slices, strict=True) if b.task == task]
        part = Layout(tuple(b for b, _ in mine))
        names = tuple(_local_name(b.name, task) for b in part.blocks)
        return TaskColumns(part.blocks, tuple(s for _, s in mine), part.slices, names, part.d)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(_layer, self.names)))

    def inner(self, x: Tensor, added: Tensor) -> dict[str, float]:
        """<x, added> of each layer, x being a whole row."""
        sums = dict.fromkeys(self.layers, 0.0)
        for name, at, own in zip(self.names, self.at, self.own, strict=True):
            sums[_layer(name)] += float(x[at].double() @ added[own].to(x.device, torch.float64))
        return sums


def by_task(layout: Layout) -> dict[str | None, TaskColumns]:
    """The columns of every task."""
    return {task: TaskColumns.of(layout, task) for task in dict.fromkeys(b.task for b in layout.blocks)}


Decoder = tuple[int, str | None]


def decoders(updates: Updates, parts: dict[str | None, TaskColumns]) -> list[Decoder]:
    """(row, task) of every decoder that takes part."""
    have = updates.present if updates.present is not None else updates.support
    tasks = [block.task for block in updates.layout.blocks]
    held = []
    for i, (_, only) in enumerate(updates.rows):
        mine = [True] * len(tasks) if have is None else torch.as_tensor(have[i]).bool().tolist()
        here = {task for task, has in zip(tasks, mine, strict=True) if has}
        held += [(i, task) for task in parts if task in here and (task is None or only in (None, task))]
    return held


def together(held: list[Decoder], parts: dict[str | None, TaskColumns]) -> list[list[Any]]:
    """Tensors that attend to each other: lists of (row, task, columns, columns in the task's vector, layer)."""
    found: dict[Any, list[Any]] = {}
    for i, task in held:
        part = parts[task]
        for block, name, at, own in zip(part.blocks, part.names, part.at, part.own, strict=True):
            found.setdefault((name, block.shape), []).append((i, task, at, own, _layer(name)))
    return list(found.values())


def _local_name(name: str, task: str | None) -> str:
    """The part of a tensor's name after the task; the whole name if the task is not in it."""
    words = name.split(".")
    return ".".join(words[words.index(task) + 1 :]) if task in words[:-1] else name


def _layer(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if head and last in ("weight", "bias") else name


@dataclass(frozen=True)
class AcrossTasks(Stage):
    """Gives every decoder the plain mean of all decoders' models (not updates), whatever their task.

    This is how the supplement of FedHCA2 adapts FedAvg to clients with different tasks. Decoders and corresponding
    tensors are those of `HyperCrossAttention`; absent clients keep theirs. Rows stay K.
    """

    traits = Traits("matrix", reads={"X", "base"}, wants={"support"}, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        parts = by_task(updates.layout)
        X, base = updates.X, updates.base
        out = X.clone()
        for members in together(decoders(updates, parts), parts):
            moved = torch.stack([X[i, s] for i, _, s, _, _ in members])
            start = torch.zeros_like(moved)
            if base is not None:
                start = torch.stack([base[i, s] for i, _, s, _, _ in members])
            # X + (mean - own), so that one decoder, or equal ones, come back as they are
            mean = (start + moved).mean(dim=0)
            for own, at, (i, _, s, _, _) in zip(moved, start, members, strict=True):
                out[i, s] = own if len(members) == 1 else own + (mean - (at + own))
        return updates.replace(X=out), state


@dataclass(frozen=True)
class AttentionAcrossTasks(Attention):
    """`Attention` among encoders, and apart from that among decoders, whatever their task (FedHCA2, supplement).

    A decoder's u is a mix of all decoders, by the distances between whole decoders. Decoders are those of
    `HyperCrossAttention`; they are compared where all their tensors have the same shapes and the same names after the
    task's. Each client's latest model counts, absent clients' too.
    """

    traits = Traits(writes=frozenset(), wants={"support"}, broadcasts={"broadcast:anchor"}, presence="coupled")

    def init(self, layout: Layout) -> State:
        """Groups of tasks with comparable decoders: task -> its columns. The task "" is the encoder, alone."""
        alike: dict[Any, dict[str, list[list[int]]]] = {}
        for task, part in by_task(layout).items():
            tensors = sorted(zip(part.names, part.blocks, part.at, strict=True), key=lambda tensor: tensor[0])
            kind = (task is None, *((name, block.shape) for name, block, _ in tensors))
            alike.setdefault(kind, {})[task or ""] = [[at.start, at.stop] for _, _, at in tensors]
        return {"alike": list(alike.values()), "held": {}}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        held: dict[str, list[str]] = {}
        for i, task in decoders(updates, by_task(updates.layout)):
            held.setdefault(updates.rows[i][0], []).append(task or "")
        return updates, {**state, "held": {**state["held"], **held}}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """u for the encoder and for each decoder of clients that have a model; nothing before the first round."""
        anchors = {client: models[client].clone() for client in clients if client in models}
        for columns in state["alike"]:
            members = [
                (client, spans)
                for client in sorted(models)
                for task, spans in columns.items()
                if task in state["held"].get(client, ())
            ]
            if not members:
                continue
            W = torch.stack([torch.cat([models[client][a:b] for a, b in spans]) for client, spans in members])
            mixed = attention(W, self.alpha, self.sigma, self.scale).to(W) @ W
            for (client, spans), u in zip(members, mixed, strict=True):
                if client in anchors:
                    for (a, b), part in zip(spans, u.split([b - a for a, b in spans]), strict=True):
                        anchors[client][a:b] = part
        return {client: {"anchor": anchors[client]} if client in anchors else {} for client in clients}
