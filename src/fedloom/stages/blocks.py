"""The tensors of a model one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.updates import Updates
from fedloom.stages.combine import Around
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class PerBlock(Around):
    """Apply a stage to the columns of each block (each tensor of the model) by itself, over the rows that have it.

    Rows that lack the block get no update of it; a block that no row has gets a zero update.
    """

    stage: Stage

    def __post_init__(self) -> None:
        self._close("PerBlock")

    @cached_property
    def traits(self) -> Traits:
        return replace(Traits.around(self.inner, self.stage.traits.reduces), presence="block")

    def init(self, layout: Layout) -> State:
        """One state per block."""
        return {block.name: self.stage.init(Layout((block,))) for block in layout.blocks}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        reduces = self.stage.traits.reduces
        X = updates.data.new_zeros(1 if reduces else len(updates), updates.layout.d)
        new = dict(state)
        for i, (block, columns) in enumerate(zip(updates.layout.blocks, updates.layout.slices, strict=True)):
            part, rows = updates.select(Layout((block,))), list(range(len(updates)))
            if updates.present is not None:
                rows = updates.present[:, i].nonzero().squeeze(1).tolist()
                if not rows:
                    continue
            out, new[block.name] = self.stage(part.keep(rows), state[block.name], ctx.among(block.task))
            X[0 if reduces else rows, columns] = out.X
        return (updates.reduced(X) if reduces else updates.replace(X=X)), new

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (Box("per tensor", inside=self.stage.boxes),)
