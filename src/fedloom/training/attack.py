"""The base class of attacks: a hostile client acts by it in place of its part of a round. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.core.context import Ctx, State
    from fedloom.core.updates import Updates
    from fedloom.data.dataset import Examples
    from fedloom.models.tasks.task import Task


@dataclass(frozen=True)
class Attack:
    """By default nothing: an honest client. Engines call all of it for all clients, whatever the attack."""

    knows_all: ClassVar[bool] = False
    """True if it needs the honest clients' updates, and so a place where all of them are."""

    def unfit(self, tasks: Mapping[str, Task]) -> str | None:
        """Return why the rule would do nothing at a client with these tasks; None if it does something."""
        return None

    def examples(self, examples: Examples, tasks: Mapping[str, Task]) -> Examples:
        """Return the examples on which the client trains, from its own."""
        return examples

    def answer(self, updates: Updates, memory: State, ctx: Ctx) -> tuple[Updates | None, State]:
        """Return what the client sends in place of its rows, after its stages (edge), and its new memory.

        None: nothing.
        """
        return updates, memory

    def factor_among(self, clients: int, hostile: int) -> float | None:
        """Return the factor in a group of so many clients, of which so many are hostile; None: the attack has none."""
        return None

    def together(
        self, honest: Tensor, clients: Sequence[str], hostile: int, memory: State
    ) -> tuple[Tensor | None, State]:
        """Return what each hostile client of a group sends in the place of its row (d), and what they remember.

        A group is the clients with the same tasks. `honest` are the rows of its honest clients (h x d, h > 0), in the
        order of `clients`; `hostile` counts its other rows. None: each sends its own row. What they remember is plain
        values, which are logged when they change.
        """
        return None, memory


HONEST = Attack()
