"""Examples of several data sets under one numbering."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from fedloom.core.errors import DataError
from fedloom.data.dataset import Batch, Examples, contents
from fedloom.models.tasks.task import Task


def renamed(task: Task, prefix: str) -> Task:
    """The task under the name PREFIX-NAME."""
    return replace(task, name=f"{prefix}-{task.name}")


@dataclass(frozen=True, eq=False)
class JoinedExamples:
    """The examples of `pieces` one after another; fulfils `Examples`.

    `tasks` has each piece's own task names, which are called PIECE-TASK here. A batch must come from one piece, since
    sizes and tasks differ.
    """

    pieces: Mapping[str, Examples]
    tasks: Mapping[str, tuple[str, ...]]

    @cached_property
    def domain(self) -> Tensor:
        """The piece, by position, from which each example comes (N)."""
        return torch.cat([torch.full((len(p),), i, dtype=torch.int64) for i, p in enumerate(self.pieces.values())])

    @cached_property
    def starts(self) -> dict[str, int]:
        """Position of each piece's first example."""
        lengths = [len(p) for p in self.pieces.values()]
        return dict(zip(self.pieces, [0, *np.cumsum(lengths)[:-1].tolist()], strict=True))

    def __len__(self) -> int:
        return len(self.domain)

    @property
    def prefetch(self) -> bool:
        """Whether any piece is slow enough to load ahead."""
        return any(p.prefetch for p in self.pieces.values())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input of the first piece; others may differ in height and width."""
        return next(iter(self.pieces.values())).input_shape

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(p.nbytes for p in self.pieces.values())

    def fingerprint(self) -> bytes:
        """The pieces' fingerprints with their names."""
        return b"".join(name.encode() + p.fingerprint() for name, p in self.pieces.items())

    def contents(self) -> bytes:
        """The pieces' checksums."""
        return b"".join(contents(piece) for piece in self.pieces.values())

    def batch(
        self, index: Tensor, device: torch.device, rng: Generator | None = None, tasks: Collection[str] | None = None
    ) -> Batch:
        """Inputs and labels of examples of one piece, of those of the tasks that it has.

        Raises DataError for a batch of several.
        """
        name, piece, index = self.piece(index)
        asked = [task for task in self.tasks[name] if tasks is None or f"{name}-{task}" in tasks]
        own = None if tasks is None else asked
        x, y = piece.batch(index, device, rng, own)
        return x, {f"{name}-{task}": labels for task, labels in y.items()}

    def piece(self, index: Tensor) -> tuple[str, Examples, Tensor]:
        """(name of the piece that examples come from, the piece, their positions in it).

        Raises DataError for examples of several.
        """
        names = [list(self.pieces)[i] for i in self.domain[index].unique().tolist()]
        if len(names) != 1:
            raise DataError(f"expected a batch of one data set, found {', '.join(names)}")
        return names[0], self.pieces[names[0]], index - self.starts[names[0]]

    def apart(self, index: Tensor) -> list[Tensor]:
        """Positions by piece."""
        domain = self.domain[index]
        return [index[domain == i] for i in domain.unique()]

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """The labels where the example's piece has the task, -1 elsewhere."""
        columns = []
        for name, piece in self.pieces.items():
            own = task.removeprefix(f"{name}-") if task.startswith(f"{name}-") else ""
            known = own in self.tasks[name]
            columns.append(piece.labels_of(own) if known else np.full(len(piece), -1, dtype=np.int64))
        return np.concatenate(columns).astype(np.int64)
