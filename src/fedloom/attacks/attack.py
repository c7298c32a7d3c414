"""What an attack may change: what a client trains on, what it sends, and what all hostile clients send together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.data.dataset import Examples
from fedloom.tasks.task import Task


@dataclass(frozen=True)
class Attack:
    """By default nothing: an honest client. Engines call all of it for all clients, whatever the attack."""

    knows_all: ClassVar[bool] = False
    """Whether it needs the honest clients' updates, and so a place where all of them are."""

    def unfit(self, tasks: Mapping[str, Task]) -> str | None:
        """Why it would do nothing at a client with these tasks; None if it does something."""
        return None

    def examples(self, examples: Examples, tasks: Mapping[str, Task]) -> Examples:
        """What the client trains on, from its own examples."""
        return examples

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        """What the client sends in the place of its rows, after its stages (edge), and what it remembers.

        None: nothing.
        """
        return updates, memory

    def together(self, own: Tensor, honest: Tensor, clients: int) -> Tensor:
        """What a hostile client sends in the place of its row (d), from honest rows of the same tasks (h x d, h > 0).

        `clients` counts all rows of these tasks, hostile ones too.
        """
        return own


HONEST = Attack()


def within(updates: Updates, X: Tensor) -> Updates:
    """Rows X with zeros in blocks that the rows lack."""
    if updates.present is not None:
        X = X.clone()
        for columns, have in zip(updates.layout.slices, updates.present.t(), strict=True):
            X[~have, columns] = 0.0
    return updates.replace(X=X)
