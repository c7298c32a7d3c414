"""Processes that share the server's work: each keeps its clients' updates as rows, and combines some columns of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from fedloom.core.context import Row, State
from fedloom.core.layout import Layout, pieces
from fedloom.core.updates import Distributed, Spread, Updates, row_norms, spread, sums
from fedloom.engines.cluster.comm import Comm, offsets, shares
from fedloom.engines.cluster.member import Member
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import ALL, Payload, rows_of
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.server import aggregated, assembled, bases, collect
from fedloom.federation.rounds.worker import Executor

_VALUES = 1 << 23  # values of the matrix in one message
_GRID = 1 << 16  # columns that share a grid


class Columns(Spread):
    """The columns of each process: equal shares of consecutive ones (see `fedloom.core.updates.Spread`)."""

    def __init__(self, comm: Comm, layout: Layout) -> None:
        self.comm, self.layout = comm, layout
        ends = offsets(shares(layout.d, comm.size))
        self._sizes = [
            {
                b.name: max(0, min(s.stop, ends[q + 1]) - max(s.start, ends[q]))
                for b, s in zip(layout.blocks, layout.slices, strict=True)
            }
            for q in range(comm.size)
        ]
        self._blocks = {b.name: b for b in layout.blocks}

    @cached_property
    def here(self) -> Layout:
        """All blocks, each with the columns that this process has."""
        mine = self._sizes[self.comm.rank]
        return Layout(
            tuple(b if mine[b.name] == b.size else replace(b, shape=(mine[b.name],)) for b in self.layout.blocks)
        )

    def sizes(self, layout: Layout) -> list[int]:
        """Return how many columns of a layout's blocks each process has."""
        return [sum(have[name] for name in layout.names) for have in self._sizes]

    def whole(self, layout: Layout) -> Layout:
        return Layout(tuple(self._blocks[name] for name in layout.names))

    def total(self, x: Tensor) -> Tensor:
        return self.comm.total(x)

    def cut(self, layout: Layout, vector: Tensor) -> Tensor:
        return vector.split(self.sizes(layout), dim=-1)[self.comm.rank]

    def at(self, layout: Layout, index: Tensor) -> Tensor:
        rank = self.comm.rank
        return self.split(layout, index)[rank] - offsets(self.sizes(layout))[rank]

    def split(self, layout: Layout, index: Tensor) -> list[Tensor]:
        """Return for each process those of the columns `index` (positions among all) that it has."""
        return [index[(index >= a) & (index < b)] for a, b in pairwise(offsets(self.sizes(layout)))]

    def join(self, layout: Layout, part: Tensor) -> Tensor:
        return self.comm.concat(part, self.sizes(layout))

    def back(self, out: Updates, owner: Mapping[str, int], everywhere: bool) -> list[tuple[Row, Tensor]]:
        """Return whole rows of a result: shared ones in all processes, a client's in its own (or `everywhere`)."""
        rank, size = self.comm.rank, self.comm.size
        if isinstance(out.given, DistributedRows) and out.mixing is None and not everywhere:
            mine = [row for row, place in zip(out.rows, out.given.places, strict=True) if place == rank]
            return list(zip(mine, out.given.own, strict=True))
        X = out.X
        index = [
            [i for i, (name, _) in enumerate(out.rows) if everywhere or owner.get(name, q) == q] for q in range(size)
        ]
        whole = X.new_empty(len(index[rank]), sum(self.sizes(out.layout)))
        for here, parts in self.pieces(out.layout, len(X)):
            send = {q: [X[index[q], here]] for q in range(size)} if rank in parts else {}
            self.comm.exchange(send, {q: [whole[:, part]] for q, part in parts.items()})
        return [(out.rows[i], x) for i, x in zip(index[rank], whole, strict=True)]

    def pieces(self, layout: Layout, rows: int) -> Iterator[tuple[slice, dict[int, slice]]]:
        """Yield pieces of columns for messages about so many rows: (among its own, rank -> that rank's among all)."""
        widths, step = self.sizes(layout), max(1, _VALUES // max(1, rows))
        at, mine = offsets(widths), widths[self.comm.rank]
        for a in range(0, max(widths), step):
            parts = {q: slice(at[q] + a, at[q] + min(a + step, w)) for q, w in enumerate(widths) if a < w}
            yield slice(a, min(a + step, mine)), parts


@dataclass(eq=False)
class DistributedRows(Distributed):
    """Rows that lie whole where their clients are; any process may get some of their columns.

    own     the rows of this process (their number x all columns of the blocks)
    places  the process of every row of the round; `own` has this process's rows in the same order
    """

    columns: Columns
    layout: Layout
    own: Tensor
    places: tuple[int, ...]
    _dense: Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """K, and the number of columns that this process gets once the columns are exchanged."""
        return len(self.places), self.columns.sizes(self.layout)[self._rank]

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def _rank(self) -> int:
        return self.columns.comm.rank

    @property
    def _here(self) -> Layout:
        """The layout of `_dense`: its blocks, each with the columns that this process has."""
        return Layout(tuple(b for b in self.columns.here.blocks if b.name in self.layout.names))

    def _of(self, rank: int) -> list[int]:
        return [i for i, place in enumerate(self.places) if place == rank]

    def dense(self) -> Tensor:
        """Return all rows, in the columns of this process. Each process sends every other its share of its rows."""
        if self._dense is None:
            self._dense = self.own.new_empty(self.shape)
            for here, parts in self.columns.pieces(self.layout, len(self.places)):
                self._gather(parts, self._dense[:, here])
        return self._dense

    def _gather(self, parts: Mapping[int, slice | Tensor], X: Tensor) -> None:
        """Fill X with all rows in the columns that `parts` has for this process; it has those that each other gets."""
        index = [self._of(q) for q in range(self.columns.comm.size)] if self._rank in parts else []
        into = {q: [X.new_empty(len(own), X.shape[1])] for q, own in enumerate(index)}
        self.columns.comm.exchange({q: [self.own[:, part]] for q, part in parts.items()}, into)
        for q, (rows,) in into.items():
            X[index[q]] = rows

    def keep(self, index: Sequence[int]) -> DistributedRows:
        place = {i: at for at, i in enumerate(self._of(self._rank))}
        own = self.own[[place[i] for i in index if i in place]]
        dense = None if self._dense is None else self._dense[list(index)]
        return DistributedRows(self.columns, self.layout, own, tuple(self.places[i] for i in index), dense)

    def select(self, part: Layout) -> DistributedRows:
        own = self.layout.take(self.own, self.columns.whole(part))
        dense = None if self._dense is None else self._here.take(self._dense, part)
        return DistributedRows(self.columns, self.columns.whole(part), own, self.places, dense)

    def take(self, index: Tensor) -> Tensor:
        if self._dense is not None:
            return self._dense[:, self.columns.at(self.layout, index)]
        parts = self.columns.split(self.layout, index)
        X = self.own.new_empty(len(self.places), len(parts[self._rank]))
        self._gather(dict(enumerate(parts)), X)
        return X

    def norms(self) -> Tensor:
        """Return the rows' norms (K), each computed where its row is."""
        mine = list(zip(self._of(self._rank), row_norms(self.own).tolist(), strict=True))
        norms = {i: norm for part in self.columns.comm.all(mine) for i, norm in part}
        return torch.tensor([norms[i] for i in range(len(self.places))], dtype=torch.float64)

    def summed(self, runs: Sequence[tuple[int, int, Tensor]]) -> Tensor:
        """Compute sum_k p_k X_k over runs of blocks (first, end, p), in the columns of this process.

        Until the columns are needed, every process sums the rows it has, and only sums travel. They are exact sums of
        values on a grid, so they depend neither on which process has which rows nor on the number of processes:
        p_k X_ki is rounded to a multiple of 2^(e-51), where 2^e is at least K max |p_k X_ki| over 65,536 columns.
        """
        columns = self.columns
        if self._dense is not None:
            return sums(self._dense, self._here, runs)
        chunks = [(s, p) for first, end, p in runs for s in pieces(self.layout.run(first, end), _GRID)]
        mine = self._of(self._rank)
        weights = [p[mine].to(self.own).double() for _, p in chunks]  # as one process would round them
        largest = torch.zeros(len(chunks), dtype=torch.float64)
        if mine:
            for i, (s, _) in enumerate(chunks):
                largest[i] = (self.own[:, s].abs().amax(dim=1).double() * weights[i].abs()).amax()
        largest = columns.comm.maximum(largest)
        total = torch.zeros(self.own.shape[1], dtype=torch.float64)
        count = max(len(self.places), 1)
        for i, (s, _) in enumerate(chunks):
            if not (top := float(largest[i])):
                continue
            pin = math.ldexp(1.5, math.frexp(count * top)[1] + 1)  # its last bit is the grid's step
            for w, x in zip(weights[i].tolist(), self.own, strict=True):
                total[s] += x[s].double().mul_(w).add_(pin).sub_(pin)
        return columns.comm.reduce(total, columns.sizes(self.layout)).to(self.own.dtype)


class Sharing(Member):
    """The part of one process in a run where no process sees the whole matrix.

    Every process has the server's state, but only its own clients' personal models (all clients' models if stages make
    broadcasts from them).
    """

    def __init__(self, built: Built, comm: Comm, executor: Executor) -> None:
        super().__init__(built, comm, executor)
        self.columns = Columns(comm, built.shared)
        self.knows_all = self.broadcasts

    def _view(self, server: State, rank: int) -> State:
        names = {c for c, owner in self.owner.items() if owner == rank or self.knows_all} | {ALL}
        mine = {name: {c: x for c, x in server[name].items() if c in names} for name in ("personal", "rule")}
        return {**server, **mine}

    def gathered(self, state: State) -> State:
        state = super().gathered(state)
        server = state["server"]
        if not self.knows_all:
            server = {**server, **{name: self._together(server[name]) for name in ("personal", "rule")}}
        return {**state, "server": server}

    def _step(self, server: State, payloads: Iterator[Payload], now: Round, members: Sequence[str]) -> State:
        """Do the server's part of a round, shared by all processes."""
        built, columns, ctx = self.built, self.columns, now.ctx(members)
        rows = rows_of(built, [m for m in members if self.owner[m] == self.comm.rank])
        mine, own = collect(built, payloads, rows, server["model"].dtype)
        heads = self.comm.all({"came": [[p.row[0], p.tree()] for p in own], "personal": bool(server["personal"])})
        arrived = [(Payload.of(*one), rank) for rank, head in enumerate(heads) for one in head["came"]]
        arrived.sort(key=lambda entry: entry[0].row[0])
        received, places = [payload for payload, _ in arrived], tuple(rank for _, rank in arrived)

        def spread_rows(X: Tensor, places: tuple[int, ...]) -> DistributedRows:
            return DistributedRows(columns, columns.layout, X, places)

        auxiliary = {name: spread_rows(X, places).dense() for name, X in mine.auxiliary.items()}
        updates = assembled(built, columns.here, received, spread_rows(mine.X, places), auxiliary)

        def start(clients: Sequence[str]) -> Tensor:
            if not any(head["personal"] for head in heads):
                return columns.cut(columns.here, bases(built.method, server, clients))
            here = [client for client in clients if self.owner[client] == self.comm.rank]
            base = bases(built.method, server, here) if here else torch.zeros(0, columns.layout.d)
            return spread_rows(base, tuple(self.owner[client] for client in clients)).dense()

        back = partial(columns.back, owner=self.owner, everywhere=self.knows_all)

        def agree(why: str | None) -> str | None:
            return next((one for one in self.comm.all(why) if one is not None), None)

        with spread(columns):
            return aggregated(built, updates, received, server, ctx, start, back, agree)
