"""The tensors of a model one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.updates import Updates
from fedloom.stages.combine import Around
from fedloom.stages.stage import Stage, Traits


@dataclass(frozen=True)
class PerBlock(Around):
    """Apply a stage to the columns of each block (each tensor of the model) by itself."""

    stage: Stage

    def __post_init__(self) -> None:
        self._close("PerBlock")

    @cached_property
    def traits(self) -> Traits:
        return Traits.around(self.inner, self.stage.traits.reduces)

    def init(self, layout: Layout) -> State:
        """One state per block."""
        return {block.name: self.stage.init(Layout((block,))) for block in layout.blocks}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        reduces = self.stage.traits.reduces
        X = updates.data.new_zeros(1 if reduces else len(updates), updates.layout.d)
        new: State = {}
        for block, columns in zip(updates.layout.blocks, updates.layout.slices, strict=True):
            part = updates.select(Layout((block,)))
            out, new[block.name] = self.stage(part, state[block.name], ctx)
            X[:, columns] = out.X
        return (updates.reduced(X) if reduces else updates.replace(X=X)), new

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (Box("per tensor", inside=self.stage.boxes),)
