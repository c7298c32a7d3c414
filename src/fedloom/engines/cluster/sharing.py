"""Processes that share the server's work: updates stay with their clients' processes; each combines some columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.core.context import Row, State
from fedloom.core.updates import Updates, spread
from fedloom.engines.cluster.columns import Columns, DistributedRows
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import ALL, Payload, rows_of
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.server import aggregated, assembled, bases, collect
from fedloom.federation.rounds.worker import Executor


class Sharing(Member):
    """This process in a run where no process sees the whole matrix.

    Every process has the server's state, but only its own clients' personal models (all clients' models if stages make
    broadcasts from them).
    """

    def __init__(self, built: Built, comm: Comm, executor: Executor) -> None:
        super().__init__(built, comm, executor)
        self.columns = Columns(comm, built.method.shared_part(built.layout))

    @property
    def _knows_all(self) -> bool:
        return bool(self.built.method.stage.traits.broadcasts)

    def _view(self, server: State, rank: int) -> State:
        names = {c for c, owner in self.owner.items() if owner == rank or self._knows_all} | {ALL}
        return {
            **server,
            "personal": {c: x for c, x in server["personal"].items() if c in names},
            "rule": {c: memory for c, memory in server["rule"].items() if c in names},
        }

    def scattered(self, state: State | None) -> State:
        """This process's part of a whole state, which rank 0 has."""
        mine = super().scattered(state)
        return {**mine, "server": self._view(mine["server"], self.comm.rank)}

    def gathered(self, state: State) -> State:
        """The whole state at rank 0, as one process would have it; elsewhere nothing of use."""
        state = super().gathered(state)
        server = state["server"]
        if not self._knows_all:
            together = {name: self._together(server[name]) for name in ("personal", "rule")}
            server = {**server, **together}
        return {**state, "server": server}

    def _step(self, server: State, payloads: Iterator[Payload], now: Round, members: Sequence[str]) -> State:
        """The server's part of a round, shared by all processes."""
        built, columns, ctx = self.built, self.columns, now.ctx(members)
        method, layout, federation = built.method, built.layout, built.federation
        rows = rows_of(method, federation, [m for m in members if self.owner[m] == self.comm.rank])
        mine, own = collect(method, layout, federation, payloads, rows, server["model"].dtype)
        heads = self.comm.all({"came": [[p.row[0], p.tree()] for p in own], "personal": bool(server["personal"])})
        found = [(Payload.of(*one), rank) for rank, head in enumerate(heads) for one in head["came"]]
        found.sort(key=lambda entry: entry[0].row[0])
        came, places = [payload for payload, _ in found], tuple(rank for _, rank in found)

        def given(X: Tensor, places: tuple[int, ...]) -> DistributedRows:
            return DistributedRows(columns, columns.layout, X, places)

        auxiliary = {name: given(X, places).dense() for name, X in mine.auxiliary.items()}
        updates = assembled(method, federation, columns.here, came, given(mine.X, places), auxiliary)

        def start(clients: Sequence[str]) -> Tensor:
            if not any(head["personal"] for head in heads):
                return columns.cut(columns.here, bases(method, server, clients))
            here = [client for client in clients if self.owner[client] == self.comm.rank]
            base = bases(method, server, here) if here else torch.zeros(0, columns.layout.d)
            return given(base, tuple(self.owner[client] for client in clients)).dense()

        def back(out: Updates) -> list[tuple[Row, Tensor]]:
            return columns.back(out, self.owner, self._knows_all)

        def agree(why: str | None) -> str | None:
            return next((one for one in self.comm.all(why) if one is not None), None)

        with spread(columns):
            return aggregated(method, layout, federation, updates, came, server, ctx, start, back, agree)
