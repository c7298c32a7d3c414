"""Agreement of the updates of a round: cosine and sign agreement between rows, by groups of layers.

Of a large matrix, columns are drawn once for a run, evenly over each group: a cosine from c of them is wrong by about 1
/ sqrt(c). Everything else is exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import Row, derive_seed
from fedloom.core.grouping import grouped
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Distributed, Summed, Updates, columns_here
from fedloom.federation.runs.reader import DIAGNOSTICS

VALUES = 1 << 20
"""About how many values of the matrix are read."""
AT_PEER = 1 << 16
"""The same at peers, where each reads a matrix of its own."""
PEERS = 64
"""About how many peers look, if there are more."""
EVERY = 4
"""A peer looks every so many rounds, from the first on: a look takes a large part of a peer's round."""
ROWS = 32
"""At most so many rows in a matrix of cosines; among more rows an even choice."""
SOLVED = 128
"""At most so many rows for which weights are computed."""
LAYERS = 4
"""At most so many groups for the layers of one part of the model."""
GROUPS = 12
"""At most so many groups in all: the first ones."""

_RANK = 1e-8  # eigenvalues of the matrix of cosines below this share of the largest are rounding


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Columns that are looked at together."""

    part: str
    task: str | None
    layers: str
    """Names of the first and the last layer."""
    blocks: tuple[int, ...]
    """Positions of its blocks in the layout."""
    size: int
    """The number of all its columns."""
    columns: Tensor
    """The columns that are looked at, ascending."""


Read = tuple[tuple[LayerGroup, ...], int, Tensor, Tensor]
"""Copies of what is looked at: groups, how many are left out, their columns of the rows and of the result."""


@lru_cache(maxsize=32)
def groups_of(layout: Layout, columns: int) -> tuple[tuple[LayerGroup, ...], int]:
    """Return (the groups of a layout, how many are left out), with about `columns` columns to look at in all.

    A group is the blocks of one part and task; layers that all tasks share are put into at most LAYERS groups.
    """
    parts = grouped(((b.part or b.role, b.task), i) for i, b in enumerate(layout.blocks) if b.size)
    parted: list[tuple[str, str | None, list[int]]] = []
    for (part, task), blocks in parts.items():
        for some in _layers(layout.blocks, blocks) if task is None else [blocks]:
            parted.append((part, task, some))
    kept = parted[:GROUPS]
    share = columns // max(1, len(kept))
    groups = []
    for part, task, blocks in kept:
        size = sum(layout.blocks[i].size for i in blocks)
        names = list(dict.fromkeys(_layer(layout.blocks[i].name) for i in blocks))
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        where = np.arange(min(size, share))
        if size > share:
            # one column from each of `share` equal pieces
            rng = np.random.default_rng(derive_seed(0, DIAGNOSTICS, part, task, layers))
            where = ((where + rng.random(share)) * (size / share)).astype(np.int64).clip(max=size - 1)
        # from positions in the group to columns of the layout
        starts = np.array([layout.slices[i].start for i in blocks])
        before = np.cumsum([0, *(layout.blocks[i].size for i in blocks)])
        within = np.searchsorted(before, where, side="right") - 1
        columns_here = torch.from_numpy(starts[within] + where - before[within])
        groups.append(LayerGroup(part, task, layers, tuple(blocks), size, columns_here))
    return tuple(groups), len(parted) - len(kept)


def _layer(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, else all but its last word."""
    numbered = re.match(r"(?:[^.]*?\.)*?[^.\d]*\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _layers(blocks: Sequence[Block], part: Sequence[int]) -> list[list[int]]:
    """Return consecutive blocks, layer by layer, in at most LAYERS groups of about equal size."""
    layers = grouped((_layer(blocks[i].name), i) for i in part)
    if len(layers) <= LAYERS:
        return list(layers.values())
    sizes = [sum(blocks[i].size for i in layer) for layer in layers.values()]
    total, before = sum(sizes), 0
    groups: dict[int, list[int]] = {}
    for layer, size in zip(layers.values(), sizes, strict=True):
        groups.setdefault(min(LAYERS - 1, int((before + size / 2) / total * LAYERS)), []).extend(layer)
        before += size
    return list(groups.values())


def looked_at(layout: Layout, rows: int, peer: str | None = None) -> tuple[tuple[LayerGroup, ...], int, Tensor]:
    """Return (the groups of a layout, how many are left out, the columns that are looked at) among so many rows."""
    groups, left_out = groups_of(layout, max(64, (VALUES if peer is None else AT_PEER) // max(rows, 1)))
    return groups, left_out, torch.cat([torch.zeros(0, dtype=torch.int64), *(g.columns for g in groups)])


def read(updates: Updates, out: Updates, peer: str | None = None) -> Read:
    """Return what `look` reads of a round's updates and of a method's result."""
    among = updates.given.among if isinstance(updates.given, Summed) else len(updates)
    groups, left_out, columns = looked_at(columns_here().whole(updates.layout), among, peer)
    return groups, left_out, _take(updates, columns), _take(out, columns)


def look(updates: Updates, out: Updates, peer: str | None = None, known: Read | None = None) -> dict[str, Any]:
    """Return the diagnostics of a round's updates and of a method's result, as a JSON value.

    rows, out       keys of the received rows and of the result's rows: [client, task or null]
    shown           positions of the rows in the matrices of cosines; at a peer its own row comes first
    groups          for each: part, task, layers, size (columns), looked (columns that were looked at), and
      rows          positions of the rows that have the group, if some lack it
      cosine, sign  for each pair of shown rows (0-1, 0-2, .. 1-2, ..; at a peer 0-1, 0-2, ..): the cosine, and the
                    share of equal signs among the columns in which neither is zero
      kept          for each row: the share of columns that are not zero, 1 if nothing was masked
      weights       for each row of the result: the w (one number per row) with which sum_k w_k X_k is nearest to it
      explained     for each row of the result: 1 - |residual|^2 / |row|^2

    A number is null if it is not defined: for rows of zeros, rows without the group, weights with fewer columns than
    rows. Weights are left out for more than SOLVED rows. `left_out` counts groups that are not looked at.

    If columns lie in several processes, each sums over its own columns, and all of them get the same value.
    """
    groups, left_out, X, outputs = known or read(updates, out, peer)
    shown = _shown([client for client, _ in updates.rows], peer)
    value: dict[str, Any] = {
        **({} if peer is None else {"peer": peer}),
        "rows": [list(row) for row in updates.rows],
        "out": [list(row) for row in out.rows],
        "shown": shown,
        "groups": [],
        **({"left_out": left_out} if left_out else {}),
    }
    if not groups:
        return value
    sizes = [len(columns_here().at(updates.layout, group.columns)) for group in groups]
    sums = _together(_sums(X, outputs, sizes, shown, peer))
    have = updates.has.cpu()
    # in a task's own parts only the task's rows count
    own = [[group.task is None or task in (None, group.task) for _, task in updates.rows] for group in groups]
    members = torch.stack([have[:, list(group.blocks)].any(1) for group in groups])
    value["groups"] = _about(groups, sums, members & torch.tensor(own).view(members.shape), shown, peer, out.rows)
    return value


def _take(updates: Updates, columns: Tensor) -> Tensor:
    """Return the columns `columns` of X that this process has; X itself is not computed (K x c, on the CPU)."""
    here = columns_here().at(updates.layout, columns)
    if isinstance(updates.given, Tensor) or "data" in vars(updates):
        data = updates.data.index_select(1, here.to(updates.data.device))
    else:
        data = updates.given.take(columns if isinstance(updates.given, Distributed) else here)
    data = data.cpu()
    return data if updates.mixing is None else updates.mixing.cpu().to(data) @ data


def _shown(names: Sequence[str], peer: str | None) -> list[int]:
    rows = list(range(len(names)))
    if peer in names:
        rows.sort(key=lambda i: names[i] != peer)
    if len(rows) <= ROWS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (ROWS - 1))] for i in range(ROWS)]


class _Sums(NamedTuple):
    """Sums over the columns of each of g groups, in float64; counts are exact. Shown are some rows or all.

    rows       g x K: columns that are not zero
    gram       of the shown rows among themselves
    alike      of the first shown row(s) with the shown: columns of equal sign minus columns of opposite sign
    both       for the same pairs: columns in which neither is zero
    outputs    of the result's rows with all rows, if weights are computed
    square     of the result's rows with themselves
    """

    rows: Tensor
    gram: Tensor
    alike: Tensor
    both: Tensor
    outputs: Tensor
    square: Tensor


def _sums(X: Tensor, outputs: Tensor, sizes: Sequence[int], shown: Sequence[int], peer: str | None) -> _Sums:
    """Return the sums of groups that lie one after another and have `sizes` columns."""
    solved = len(X) <= SOLVED
    looked, seen = (X, list(shown)) if solved else (X[list(shown)], list(range(len(shown))))
    own = seen[:1] if peer is not None else seen

    def one(every: Tensor, x: Tensor, result: Tensor) -> tuple[Tensor, ...]:
        wide, signs, target = x.double(), x.sign(), result.double()
        mask = signs.abs()
        products = ((wide, wide), (signs[own], signs[seen]), (mask[own], mask[seen]), (target, wide))
        sums = [(a @ b.t()).double() for a, b in products]
        return every.count_nonzero(1).double(), *sums, (target * target).sum(1)

    # group by group, for copies of all would be as large as a small model
    groups = zip(*(each.split(sizes, 1) for each in (X, looked, outputs if solved else outputs[:0])), strict=True)
    return _Sums(*map(torch.stack, zip(*(one(*group) for group in groups), strict=True)))


def _together(sums: _Sums) -> _Sums:
    """Return the sums over all processes, exchanged in one message."""
    summed = columns_here().total(torch.cat([part.flatten() for part in sums]))
    parts = zip(summed.split([part.numel() for part in sums]), sums, strict=True)
    return _Sums(*(flat.view_as(part) for flat, part in parts))


def _about(
    groups: Sequence[LayerGroup],
    sums: _Sums,
    members: Tensor,
    shown: Sequence[int],
    peer: str | None,
    out: Sequence[Row],
) -> list[dict[str, Any]]:
    """Return the diagnostics of each group; `members` (g x K) are the rows that have it."""
    solved = members.shape[1] <= SOLVED
    seen = list(shown) if solved else list(range(len(shown)))
    own = seen[:1] if peer is not None else seen
    looked = torch.tensor([len(group.columns) for group in groups])
    norms = sums.gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    cosine = (sums.gram / norms[:, :, None] / norms[:, None])[:, own][:, :, seen]
    ok = members[:, list(shown)]
    pairs = torch.ones(len(own), len(seen)).triu(1).bool()
    known = (ok[:, : len(own), None] & ok[:, None])[:, pairs]
    cosine = torch.where(known, cosine[:, pairs], torch.nan)
    alike = torch.where(known, ((sums.alike / sums.both + 1) / 2)[:, pairs], torch.nan)
    kept = torch.where(members, sums.rows / looked[:, None].clamp(min=1), torch.nan)
    values = []
    for i, group in enumerate(groups):
        value = {name: getattr(group, name) for name in ("part", "task", "layers", "size")}
        value["looked"] = len(group.columns)
        if not members[i].all():
            value["rows"] = members[i].nonzero().flatten().tolist()
        value |= {"cosine": _numbers(cosine[i]), "sign": _numbers(alike[i]), "kept": _numbers(kept[i])}
        values.append(value)
    if solved:
        # in a result's row for one task, other tasks' parts have no owner
        theirs = [[group.task is None or task in (None, group.task) for _, task in out] for group in groups]
        enough = (looked >= members.sum(1))[:, None] & torch.tensor(theirs).view(len(groups), len(out))
        weights, explained = _weights(sums.gram, sums.outputs, sums.square, members)
        weights = torch.where(enough[:, :, None], weights, torch.nan)
        explained = torch.where(enough, explained, torch.nan)
        for value, some, w, e in zip(values, members.any(1).tolist(), weights, explained, strict=True):
            if some:
                value |= {"weights": [_numbers(row) for row in w], "explained": _numbers(e)}
    return values


def _weights(G: Tensor, H: Tensor, square: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return (W, explained): the least-squares W (rows of the result x K) of outputs = W X; on unit rows the shortest.

    For each group (first dimension), from inner products: G of the rows (K x K), H of the result's rows with them,
    `square` of the result's rows with themselves. Only `members` (K) get a weight.
    """
    norms = G.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    there = members & (norms > 0)
    scale = torch.where(there, 1 / norms, 0.0)
    G, H = G * scale[:, None] * scale[:, :, None], H * scale[:, None]
    values, vectors = torch.linalg.eigh(G)
    inverse = torch.where(values > _RANK * values[:, -1:].clamp(min=1e-300), 1 / values, 0.0)
    W = (H @ (vectors * inverse[:, None])) @ vectors.mT
    explained = (2 * (W * H).sum(2) - ((W @ G) * W).sum(2)) / square
    return torch.where(there[:, None], W * scale[:, None], torch.nan), explained


def looks(peer: str, population: int | None, round: int) -> bool:
    """Return whether this peer records diagnostics in a round (those of `sampled`, every EVERY rounds)."""
    return not (round - 1) % EVERY and sampled(peer, population)


def sampled(peer: str, population: int | None) -> bool:
    """Return whether it is on record what this peer knows of each other: a fixed sample of about PEERS peers."""
    return population is None or population <= PEERS or derive_seed(0, DIAGNOSTICS, peer) % population < PEERS


def _numbers(values: Tensor) -> list[float | None]:
    """Round to four digits, which are enough to read; nan becomes None."""
    return [None if v != v else float(f"{v:.4g}") for v in values.tolist()]
