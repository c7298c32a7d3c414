"""Some columns are one model for everybody, others are each client's own; stages that act in some rounds only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout, Selector, as_select
from fedloom.core.outline import Box
from fedloom.core.updates import EVERYONE, Updates
from fedloom.stages.combine import Around, Inner
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class PartlyShared(Inner):
    """`shared` makes one update of the selected columns, for all clients; `own` keeps a row per client in the others.

    Unlike in a Split, the one update also reaches absent clients, so that they keep the same model in these columns.
    Stages added to the method go into `shared`.
    """

    selector: Selector
    shared: Stage
    own: Stage

    def __post_init__(self) -> None:
        if not self.shared.traits.reduces or self.own.traits.reduces:
            raise ValueError(
                f"PartlyShared({self.selector!r}): expected a stage that leaves one row and one that keeps all, "
                f"found {self.shared!r} and {self.own!r}"
            )
        self._close(f"PartlyShared({self.selector!r})")

    @property
    def inner(self) -> Sequence[Stage]:
        return self.shared, self.own

    def preceded_by(self, stage: Stage) -> Stage:
        """With the other stage in the shared columns."""
        return replace(self, shared=self.shared.preceded_by(stage))

    def combined_by(self, stage: Stage) -> Stage:
        """With the other rule in the shared columns."""
        return replace(self, shared=self.shared.combined_by(stage))

    def _parts(self, layout: Layout) -> tuple[Layout, Layout]:
        part = layout.select(as_select(self.selector))
        if not part.blocks:
            raise ValueError(f"PartlyShared({self.selector!r}): no block matches")
        return part, layout.without(part)

    def init(self, layout: Layout) -> State:
        """Both stages' states. Raises ValueError if the selector matches nothing."""
        part, rest = self._parts(layout)
        return {"shared": self.shared.init(part), "own": self.own.init(rest)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        layout = updates.layout
        part, rest = self._parts(layout)
        one, shared = self.shared(updates.select(part), state["shared"], ctx)
        each, own = self.own(updates.select(rest), state["own"], ctx)
        X = layout.put(one.X.new_zeros(1 + len(each), layout.d), part, one.X)
        layout.put(X[1:], rest, each.X)
        out = Updates(
            layout, (EVERYONE, *each.rows), X, torch.cat([one.n, each.n]), torch.cat([one.weight, each.weight])
        )
        return out, {"shared": shared, "own": own}

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (
            Box(f"in {self.selector!r}, for everybody", inside=self.shared.boxes),
            Box("in the rest, each client's own", inside=self.own.boxes, beside=True),
        )


@dataclass(frozen=True)
class Every(Around):
    """Apply a stage that keeps the rows in every `rounds`-th round only; in other rounds rows pass as they are."""

    rounds: int
    stage: Stage

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"Every: expected at least 1 round, found {self.rounds}")
        if self.stage.traits.reduces:
            raise ValueError(f"Every: {self.stage!r} leaves one row, but in other rounds all rows are kept")
        self._close("Every")

    @cached_property
    def traits(self) -> Traits:
        """It reads no weights and the like, because no field may be lost in some rounds."""
        inner = Traits.around(self.inner)
        reads = {f for f in inner.reads if f in ("X", "base") or f.startswith(("extra:", "auxiliary:"))}
        return replace(inner, reads=reads)

    def init(self, layout: Layout) -> State:
        """The stage's."""
        return self.stage.init(layout)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return (updates, state) if ctx.round % self.rounds else self.stage(updates, state, ctx)

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (Box(f"every {self.rounds} rounds", inside=self.stage.boxes),)
