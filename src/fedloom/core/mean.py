"""Weighted means: the plain one, the one over the clients that trained a parameter, and a mean for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.grouping import grouped
from fedloom.core.layout import Layout, pieces
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import EVERYONE, Updates

_CHUNK = 1 << 20  # columns at a time, where a K x d intermediate would otherwise be made


def weighted_mean(updates: Updates, support: Tensor | None = None) -> Tensor:
    """Return sum_k w_k c_ki X_ki / sum_k w_k c_ki over the rows that have block b(i); 0 where nobody counts. Shape (d).

    `support` (K x blocks, bool) narrows presence further. Without coef the weights are applied block by block.
    """
    w = shares(updates.weight)
    if updates.coef is not None:
        X = updates.X
        out = X.new_zeros(updates.layout.d)
        w = w.to(X)
        present = _columns(updates, support)
        for s in pieces(slice(0, updates.layout.d), _CHUNK):
            coef = updates.coef[:, s].to(X)
            if present is not None:
                coef = coef * present[:, s]
            total = w @ coef
            out[s] = _ratio(w @ (coef * X[:, s]), total)
        return out
    groups = block_groups(updates.layout, updates.present, support)
    runs = [(first, end, shares(w if members is None else w * members)) for first, end, members in groups]
    return updates.summed([run for run in runs if bool(run[2].any())])


def shares(weight: Tensor) -> Tensor:
    """Return weights that sum to 1, so that a single row comes back bit for bit; zeros where the sum is 0."""
    total = float(weight.sum())
    return weight / total if total > 0 else torch.zeros_like(weight)


def block_groups(
    layout: Layout, present: Tensor | None, support: Tensor | None
) -> list[tuple[int, int, Tensor | None]]:
    """Return runs of blocks that the same rows have: (first, end, K x bool, or None for all rows)."""
    if present is None and support is None:
        return [(0, len(layout.blocks), None)]
    have = support if present is None else present if support is None else present & support
    assert have is not None
    runs: list[tuple[int, int, Tensor | None]] = []
    for i, members in enumerate(have.t()):
        first = i
        if runs and torch.equal(runs[-1][2], members):  # type: ignore[arg-type]
            first = runs.pop()[0]
        runs.append((first, i + 1, members))
    return runs


def column_groups(layout: Layout, present: Tensor | None, support: Tensor | None) -> list[tuple[slice, Tensor | None]]:
    """Return runs of columns that the same rows have: (columns, K x bool, or None for all rows)."""
    return [(layout.run(first, end), members) for first, end, members in block_groups(layout, present, support)]


def problems(layout: Layout, present: Tensor | None, k: int) -> list[tuple[list[slice], Tensor]]:
    """Return groups of columns that the same of k rows have, with the positions of these rows."""
    every = tuple(range(k))
    groups = column_groups(layout, present, None)
    slices = grouped((every if m is None else tuple(m.nonzero().squeeze(1).tolist()), columns) for columns, m in groups)
    return [(columns, torch.tensor(rows, dtype=torch.int64)) for rows, columns in slices.items()]


def _columns(updates: Updates, support: Tensor | None) -> Tensor | None:
    """Return presence per column (K x d, a broadcast if possible), or None if every row has all blocks."""
    groups = column_groups(updates.layout, updates.present, support)
    if groups == [] or groups[0][1] is None:
        return None
    k = len(updates)
    return torch.cat([m.view(k, 1).expand(k, s.stop - s.start) for s, m in groups if m is not None], dim=1)


def _ratio(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(total != 0, part / total, torch.zeros_like(part))


def mixed_models(updates: Updates, M: Tensor) -> Tensor:
    """Return updates (K x d) that move each row from its own start to a mix of the trained models w = base + X.

    X_k + sum_j M_kj (w_j - w_k), where the rows of M (K x K, not negative) sum to 1; so M = I is X bit for bit. A block
    that only some rows have is mixed among those rows.
    """
    X, base = updates.X, updates.base
    out = X.clone()
    for columns, have in column_groups(updates.layout, updates.present, None):
        rows = torch.arange(len(X)) if have is None else have.nonzero().squeeze(1)
        part = M[rows][:, rows].double()
        total = part.sum(dim=1, keepdim=True)
        eye = torch.eye(len(rows), dtype=torch.float64)
        change = (torch.where(total > 0, part / total, eye) - eye).to(X)
        if not bool(change.any()):
            continue
        for s in pieces(columns, _CHUNK):
            # models relative to the first start: the rows of `change` sum to 0
            w = X[rows, s] if base is None else X[rows, s] + (base[rows, s] - base[0, s])
            out[rows, s] += change @ w
    return out


class ModelMix(Stage):
    """Base of stages that mix trained models (see `mixed_models`). A single row passes as it is."""

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        """Return the weight of each row (column) for each row (K x K, rows sum to 1)."""
        raise NotImplementedError

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if len(updates) < 2:
            return updates, state
        return updates.replace(X=mixed_models(updates, self.matrix(updates, ctx))), state


@dataclass(frozen=True)
class Mean(Stage):
    """The weighted mean of the rows (McMahan et al., AISTATS 2017), with `weight`, `coef` and presence, zero-safe."""

    traits = Traits("mix", reads={"X", "coef", "weight"}, reduces=True, separable=True, presence="block", sums=True)
    replaceable = True

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.reduced(weighted_mean(updates)), state


@dataclass(frozen=True)
class TaskMeans(Stage):
    """One model per task that a client sent: the weighted mean of its rows (client, task), as a row ("*", task)."""

    traits = Traits("matrix", reads={"X", "coef", "weight"}, writes={"X", "tasks"}, reduces=True, presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        members = rows_of_tasks(updates)
        X = torch.stack([weighted_mean(updates.keep(rows)) for rows in members.values()])
        return of_tasks(updates, members, X), state


def rows_of_tasks(updates: Updates) -> dict[str, list[int]]:
    """Return the positions of the rows of each task, by name. Raises ValueError for a row that has no task."""
    if nameless := [client for client, task in updates.rows if task is None]:
        raise ValueError(f"rows are (client, task), but a row of {nameless[0]!r} has no task")
    tasks = sorted({str(task) for _, task in updates.rows})
    return {task: [i for i, (_, t) in enumerate(updates.rows) if t == task] for task in tasks}


def of_tasks(updates: Updates, members: Mapping[str, Sequence[int]], X: Tensor) -> Updates:
    """Return one row of X (T x d) for each task, which covers the rows of its `members`."""
    n, weight = (torch.stack([v[rows].sum() for rows in members.values()]) for v in (updates.n, updates.weight))
    return Updates(updates.layout, tuple((EVERYONE[0], task) for task in members), X, n, weight)


@dataclass(frozen=True)
class SupportMean(Stage):
    """Per coordinate, the mean over the clients that trained it: u_i = sum_k p_k X_ki / sum_{k: i in support_k} p_k.

    A control for unified models: plain averaging divides a decoder's update by the number of all clients. Without
    `updates.support`, the support are the coordinates that are not zero.
    """

    traits = Traits(
        "matrix", reads={"X", "coef", "weight"}, wants={"support"}, reduces=True, separable=True, presence="block"
    )

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if updates.support is not None:
            return updates.reduced(weighted_mean(updates, updates.support)), state
        out = updates.X.new_zeros(updates.layout.d)
        for s in pieces(slice(0, updates.layout.d), _CHUNK):
            X = updates.X[:, s]
            coef = (X != 0).to(X.dtype)
            if updates.coef is not None:
                coef *= updates.coef[:, s]
            w = shares(updates.weight).to(X)
            out[s] = _ratio(w @ (coef * X), w @ coef)
        return updates.reduced(out), state
