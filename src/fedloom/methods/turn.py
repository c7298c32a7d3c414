"""What a client does in its turn of a round: which model it trains, how many rows it sends, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fedloom.core.context import Row, State
from fedloom.core.server import Plain
from fedloom.training.rules import LocalRule

if TYPE_CHECKING:
    from fedloom.methods.method import Method

Pooled = Literal["all", "task"]


@dataclass(frozen=True)
class Received:
    """A client trains the model that it received, and sends one row. The base of all other turns."""

    start: ClassVar[Literal["received", "own"]] = "received"
    by_task: ClassVar[bool] = False
    """Whether a client sends a row for each of its tasks."""
    beside: ClassVar[tuple[LocalRule, ...] | None] = None
    """Rules of a model of the client's own that is trained beside the shared one, if there is one."""
    pool: ClassVar[Pooled | None] = None
    """Whether one who has the examples of all trains in the clients' place: one model for all, or one a task."""

    @property
    def plain(self) -> bool:
        """Whether a client trains one model, with its own examples."""
        return not self.by_task and self.beside is None and self.pool is None

    def refused(self, method: Method) -> Iterator[str]:
        """Yield why a method cannot have such turns, in sentences."""
        if method.task_vectors:
            yield f"rows are client, but {method.stage!r} leaves one row a task"

    def rows(self, client: str, tasks: Sequence[str]) -> tuple[Row, ...]:
        """Return the keys of the rows that a client with these tasks sends."""
        return ((client, None),)

    def kept(self, start: Tensor, update: Tensor) -> State:
        """Return what a client keeps for its next turn of the shared parameters, which the update has moved."""
        return {}


@dataclass(frozen=True)
class Own(Received):
    """A client trains its own model of its last round, which the server then has no need to send."""

    start = "own"

    def refused(self, method: Method) -> Iterator[str]:
        if method.stage.traits.reduces:
            yield f"clients start from their own models, but {method.stage!r} leaves one for all"
        elif "X" in method.stage.traits.writes or method.server != Plain():
            blame = method.stage if "X" in method.stage.traits.writes else method.server
            yield f"clients start from their own models, so what {blame!r} makes of updates would be lost"

    def kept(self, start: Tensor, update: Tensor) -> State:
        # with the values that the server receives, so that both have the same model
        return {"own": (start + update).to("cpu")}


@dataclass(frozen=True)
class Beside(Received):
    """A client trains the received model, and then a model of its own with these rules, which is never sent.

    Its own model starts as the first received one. Its rules get the broadcast "anchor", the model received in the
    round.
    """

    beside: tuple[LocalRule, ...] = ()  # type: ignore[misc]


@dataclass(frozen=True)
class EachTask(Received):
    """A client trains each of its tasks alone, and sends a row (client, task) for each.

    It starts from the one model for all, or, where the stage makes a vector for each task, from the task's own. Then
    updates are task vectors: differences to the initial model, not to the start.
    """

    by_task = True

    def refused(self, method: Method) -> Iterator[str]:
        reasons = {
            "a server rule": method.task_vectors and method.server != Plain(),
            f"{method.stage!r}, which leaves a row for each,": not method.stage.traits.reduces,
            "tuning": method.tune is not None,
            "the client's own model": method.own_model,
            "auxiliary vectors": bool(method.auxiliary),
            "what rows started from": "base" in method.stage.traits.reads,
            "what the server broadcasts": any(rule.needs for rule in method.rules),
        }
        yield from (f"{what} and rows (client, task) do not go together" for what, there in reasons.items() if there)

    def rows(self, client: str, tasks: Sequence[str]) -> tuple[Row, ...]:
        return tuple((client, task) for task in sorted(tasks))


@dataclass(frozen=True)
class InOnePlace(Received):
    """No client trains: the examples of all lie in one place and train one model ("all"), or one a task ("task").

    That is no federation at all, but what one is compared with.
    """

    pool: Pooled = "all"  # type: ignore[misc]

    def refused(self, method: Method) -> Iterator[str]:
        apart = not method.stage.traits.reduces or method.private is not None or method.own_model
        if self.pool == "all" and apart:
            yield "the examples of all clients train one model, so it is for all"
        if self.pool == "task" and not method.shares_nothing:
            yield "the examples of all clients train a model a task, so there is nothing to share"
