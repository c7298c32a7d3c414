"""FedHCA2's personalised aggregation: every client keeps its own update and adds a learned share of others' updates.

The share is learned from what clients do next: a weight grows if a client's next update continues in the direction that
was added to its model, and shrinks if it turns back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State, row_key
from fedloom.core.gram import gram, inner_products
from fedloom.core.grouping import grouped, nested
from fedloom.core.layout import Block, Layout
from fedloom.core.settings.section import BelowOne, NonNegative, UnitInterval
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates, columns_here
from fedloom.methods.conflict.aggregation import rescaling, solved
from fedloom.methods.personal.aggregation import Attention, attention
from fedloom.training.rules import within

KIND = "hyper-weights"


@dataclass(frozen=True)
class _Learner(Stage):
    """Weights of both stages: they begin at `start` and are learned as torch.optim.SGD would, in closed form."""

    start: UnitInterval = 0.1
    lr: NonNegative = 0.01
    momentum: BelowOne = 0.9
    weight_decay: NonNegative = 1e-4
    project: bool = False

    @property
    def _fresh(self) -> State:
        return {"weight": self.start, "momentum": None}

    def _stepped(self, memory: State, inner: float) -> State:
        """Apply one step to a weight. `inner` = <the next update, what was added for a weight of 1>."""
        weight, velocity = memory["weight"], memory["momentum"]
        gradient = (-inner if 0 <= weight <= 1 else 0.0) + self.weight_decay * weight
        velocity = gradient if velocity is None else self.momentum * velocity + gradient
        weight -= self.lr * velocity
        return {"weight": _used(weight) if self.project else weight, "momentum": velocity}


@dataclass(frozen=True)
class HyperConflictAverse(_Learner):
    """Adds to each row alpha_i times a conflict-averse direction U of all rows; see the method `fedhca2`, encoders.

    v = g in the first step. Absent clients keep their state; if all rows are zero, no state changes. Identical rows
    have the same extras "domain" and "tasks"; U and the gradients use the original ones. A row counts as zero in blocks
    that it lacks, and nothing is added there.

    With all alpha 0, and no identical rows, every row comes back bit for bit. Two passes over the matrix; the product
    with it is computed when X is read. State: two numbers a client, and U (d). Records the round's alphas, not clamped.
    """

    c: BelowOne = 0.4
    rescale: Literal["none", "1+c^2", "1+c"] = "1+c^2"
    average_identical: bool = True

    @property
    def traits(self) -> Traits:
        identical = {"extra:domain", "extra:tasks"} if self.average_identical else frozenset[str]()
        return Traits("mix", wants=identical, separable=True, presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"clients": {}, "direction": None, "received": []}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        before = state["direction"]
        G, inner = inner_products(updates, None if before is None else columns_here().cut(updates.layout, before))
        if not bool(G.any()):
            return updates, state
        names = [row_key(row) for row in updates.rows]
        clients = dict(state["clients"])
        for name, value in zip(names, inner.tolist(), strict=True):
            clients.setdefault(name, self._fresh)
            if name in state["received"]:
                clients[name] = self._stepped(clients[name], value)
        weights = {name: clients[name]["weight"] for name in names}
        ctx.record(KIND, {"part": "encoder", "weights": weights})

        w, lam = solved(G, self.c)
        q = (1 / len(names) + lam * w) / rescaling(self.rescale, self.c)
        share = q if updates.mixing is None else q @ updates.mixing.cpu()
        direction = torch.mv(updates.data.t(), share.to(updates.data))
        alpha = torch.tensor([_used(value) for value in weights.values()], dtype=torch.float64)
        own = self._averaging(updates)
        new = {"clients": clients, "direction": columns_here().join(updates.layout, direction), "received": names}
        if not bool(alpha.any()) and torch.equal(own, torch.eye(len(names), dtype=torch.float64)):
            return updates, new
        return within(updates.mixed((own + torch.outer(alpha, q)).to(updates.data.device))), new

    def _averaging(self, updates: Updates) -> Tensor:
        """Return K x K: the identity, except that identical clients get their mean."""
        k = len(updates)
        if not self.average_identical or not {"domain", "tasks"} <= updates.extra.keys():
            return torch.eye(k, dtype=torch.float64)
        kinds = [(str(d), str(t)) for d, t in zip(updates.extra["domain"], updates.extra["tasks"], strict=True)]
        same = torch.tensor([[a == b for b in kinds] for a in kinds], dtype=torch.float64)
        return same / same.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class HyperCrossAttention(_Learner):
    """Adds to each decoder a learned share of its attention over all decoders' updates; see the method `fedhca2`.

    Tensors of different tasks correspond if they have the same shape and the same name after the task's:
    decoders.TASK.fuse.weight is fuse.weight. A layer is a tensor's name without .weight or .bias. Columns that belong
    to no task count as a decoder of their own.

    softmax is not homogeneous: short updates, as after a short warm-up, become nearly their mean; long ones stay nearly
    the same. A single decoder gets beta times its own update in addition. With beta 0 every row comes back bit for bit.
    State: two numbers for each decoder and layer, and A of the last round. Records the round's betas, not clamped.
    """

    traits = Traits("matrix", wants={"support"}, presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"decoders": {}, "added": {}}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        parts = by_task(updates.layout)
        held = decoders(updates, parts)
        if not held or not bool(updates.X.any()):
            return updates, state
        X = updates.X
        weights: dict[str, dict[str, dict[str, State]]] = {}
        for i, task in held:
            name, part = row_key(updates.rows[i]), parts[task]
            before = state["decoders"].get(name, {}).get(task or "", {})
            now = {layer: before.get(layer, self._fresh) for layer in map(_layer, part.blocks)}
            added = state["added"].get(name, {}).get(task or "")
            if added is not None:
                inner = _inner(updates.layout.take(X[i], part), added, part)
                now = {layer: self._stepped(memory, inner[layer]) for layer, memory in now.items()}
            weights.setdefault(name, {})[task or ""] = now
        learned = {
            client: {task: {layer: m["weight"] for layer, m in now.items()} for task, now in tasks.items()}
            for client, tasks in weights.items()
        }
        ctx.record(KIND, {"part": "decoder", "weights": learned})

        attended = {(i, task): X.new_empty(parts[task].d) for i, task in held}
        out = X.clone()
        for members in together(updates.layout, held, parts):
            V = torch.stack([X[i, s] for i, _, s, _, _ in members])
            A = cross_attention(V)
            for a, (i, task, s, to, layer) in zip(A, members, strict=True):
                attended[i, task][to] = a
                if (beta := _used(learned[row_key(updates.rows[i])][task or ""][layer])) > 0:
                    out[i, s] += beta * a
        given = nested((row_key(updates.rows[i]), task or "", a) for (i, task), a in attended.items())
        known = {name: {**state["decoders"].get(name, {}), **tasks} for name, tasks in weights.items()}
        return updates.replace(X=out), {"decoders": {**state["decoders"], **known}, "added": given}


def cross_attention(V: Tensor) -> Tensor:
    """Return softmax(V V^T / sqrt(n)) V, softmax over each row; V is K x n. Inner products and softmax in float64."""
    G = gram(Updates.of(V)) / math.sqrt(max(V.shape[1], 1))
    return torch.softmax(G, dim=1).to(V) @ V


def _used(weight: float) -> float:
    return min(max(weight, 0.0), 1.0)


def _inner(x: Tensor, added: Tensor, part: Layout) -> dict[str, float]:
    """Return <x, added> of each layer of a decoder, both over its columns."""
    sums = dict.fromkeys(map(_layer, part.blocks), 0.0)
    for block, s in zip(part.blocks, part.slices, strict=True):
        sums[_layer(block)] += float(x[s].double() @ added[s].to(x.device, torch.float64))
    return sums


def by_task(layout: Layout) -> dict[str | None, Layout]:
    """Return the blocks of every task."""
    return {task: Layout(tuple(blocks)) for task, blocks in grouped((b.task, b) for b in layout.blocks).items()}


Decoder = tuple[int, str | None]


def decoders(updates: Updates, parts: Mapping[str | None, Layout]) -> list[Decoder]:
    """Return (row, task) of every decoder that takes part."""
    have = updates.present if updates.present is not None else updates.support
    tasks = [block.task for block in updates.layout.blocks]
    held = []
    for i, (_, only) in enumerate(updates.rows):
        mine = [True] * len(tasks) if have is None else torch.as_tensor(have[i]).bool().tolist()
        here = {task for task, has in zip(tasks, mine, strict=True) if has}
        held += [(i, task) for task in parts if task in here and (task is None or only in (None, task))]
    return held


def together(layout: Layout, held: list[Decoder], parts: Mapping[str | None, Layout]) -> list[list[Any]]:
    """Return tensors that attend to each other: lists of (row, task, columns, columns in the task's vector, layer)."""
    groups = grouped(
        (_kind(block), (i, task, layout.slice(block.name), own, _layer(block)))
        for i, task in held
        for block, own in zip(parts[task].blocks, parts[task].slices, strict=True)
    )
    return list(groups.values())


def _kind(block: Block) -> tuple[str, tuple[int, ...]]:
    """Return the part of a tensor's name after its task (the whole name if the task is not in it), and its shape."""
    words = block.name.split(".")
    at = words.index(block.task) + 1 if block.task in words[:-1] else 0
    return ".".join(words[at:]), block.shape


def _layer(block: Block) -> str:
    name, _ = _kind(block)
    head, _, last = name.rpartition(".")
    return head if head and last in ("weight", "bias") else name


@dataclass(frozen=True)
class AcrossTasks(Stage):
    """Gives every decoder the plain mean of all decoders' models (not updates), whatever their task.

    Decoders and corresponding tensors are those of `HyperCrossAttention`. Rows stay K. See the add-on `across-tasks`.
    """

    traits = Traits("matrix", reads={"X", "base"}, wants={"support"}, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        parts = by_task(updates.layout)
        X, base = updates.X, updates.start
        out = X.clone()
        for members in together(updates.layout, decoders(updates, parts), parts):
            moved = torch.stack([X[i, s] for i, _, s, _, _ in members])
            start = torch.stack([base[i, s] for i, _, s, _, _ in members])
            # X + (mean - own), so that one decoder, or equal ones, come back as they are
            mean = (start + moved).mean(dim=0)
            for own, at, (i, _, s, _, _) in zip(moved, start, members, strict=True):
                out[i, s] = own if len(members) == 1 else own + (mean - (at + own))
        return updates.replace(X=out), state


@dataclass(frozen=True)
class AttentionAcrossTasks(Attention):
    """`Attention` among encoders, and apart from that among decoders, whatever their task; see `across-tasks`.

    Decoders are those of `HyperCrossAttention`; they are compared where all their tensors have the same shapes and the
    same names after the task's. Each client's latest model counts, absent clients' too.
    """

    traits = Traits(writes={"broadcast:anchor"}, wants={"support"}, presence="coupled")

    def init(self, layout: Layout) -> State:
        alike: dict[Any, dict[str, list[list[int]]]] = {}
        for task, part in by_task(layout).items():
            tensors = sorted(part.blocks, key=lambda block: _kind(block)[0])
            spans = [layout.slice(block.name) for block in tensors]
            kind = (task is None, *map(_kind, tensors))
            alike.setdefault(kind, {})[task or ""] = [[s.start, s.stop] for s in spans]
        return {"alike": list(alike.values()), "held": {}}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        every = decoders(updates, by_task(updates.layout))
        held = grouped((updates.rows[i][0], task or "") for i, task in every)
        return updates, {**state, "held": {**state["held"], **held}}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
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
