"""What is sent in a round: a Message to a client, a Payload from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Row
from fedloom.core.layout import Layout
from fedloom.core.updates import EVERYONE, Rows, Updates
from fedloom.methods.method import Method
from fedloom.rounds.federation import Federation

ALL = EVERYONE[0]


@dataclass(frozen=True, eq=False)
class Message:
    """From the server to one client: the shared parameters, the buffers unless they are local, and the broadcast of
    stages.

    `vector` is None if the client continues from its own model, which it has, and if rows are (client, task). Then
    `packed` has the vectors of `tasks`; any other task starts from the initial model.
    """

    vector: Tensor | None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Payload:
    """From one client to the server: packed updates, number of examples, extras, auxiliary vectors, buffers.

    `finite` is False if local training produced nan or inf; the payload is then empty. If rows are (client, task),
    `tasks` are the numbers of examples of the rows, an extra is a list, and support is a matrix of as many rows.
    """

    row: Row
    n: float
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    support: Tensor | None = None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    finite: bool = True
    tasks: Mapping[str, float] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """All fields but the client, as plain values for messages and checkpoints. `of` is the inverse."""
        tree = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("row", "finite")}
        tree["side"] = tree.pop("auxiliary")  # the key in files
        return tree if self.finite else {**tree, "finite": False}

    @staticmethod
    def of(client: str, tree: Mapping[str, Any]) -> Payload:
        """A client's payload from its tree."""
        values = {"auxiliary" if key == "side" else key: value for key, value in tree.items()}
        return Payload((client, None), **values)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The keys of its rows."""
        return tuple((self.row[0], task) for task in self.tasks) or (self.row,)

    @property
    def sizes(self) -> tuple[float, ...]:
        """Number of examples of each row."""
        return tuple(self.tasks.values()) or (self.n,)


def rows_of(method: Method, federation: Federation, clients: Iterable[str]) -> tuple[Row, ...]:
    """The rows that these clients will send."""
    if method.rows == "client":
        return tuple((client, None) for client in clients)
    return tuple((client, task) for client in clients for task in sorted(federation.clients[client].tasks))


def blank(shared: Layout, federation: Federation, rows: tuple[Row, ...], X: Tensor | Rows) -> Updates:
    """Rows X of one client with its presence: a codec packs them, or fills them from zeros."""
    ones = torch.ones(len(rows), dtype=torch.float64)
    tasks = tuple(task for _, task in rows if task is not None)
    present = federation.present(federation.clients[rows[0][0]], shared, tasks)
    return Updates(shared, rows, X, ones, ones, present=present)
