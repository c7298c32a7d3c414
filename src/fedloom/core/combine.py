"""Stages made of stages: for some columns, for some rows, for some rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.grouping import grouped
from fedloom.core.layout import Layout, Selector, as_select
from fedloom.core.outline import Box
from fedloom.core.settings.section import Count
from fedloom.core.stage import Stage, Traits, check_closed, inner
from fedloom.core.updates import EVERYONE, Beside, Updates, columns_here


class Inner(Stage):
    """A stage around other stages. Fields other than X that they write stay inside, so they must be read inside."""

    @cached_property
    def traits(self) -> Traits:
        return Traits.around(inner(self))

    def __post_init__(self) -> None:
        super().__post_init__()
        selector = getattr(self, "selector", None)
        for one in inner(self):
            check_closed([one], type(self).__name__ + (f"({selector!r})" if selector else ""))


class Around(Inner):
    """A stage around one other: a frozen dataclass with the field `stage`."""

    heading: ClassVar[str] = ""
    """The title of its box, in which fields may stand as `{name}`; by default the stage with its fields."""
    stage: Stage

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (Box(self.heading.format(**vars(self)), inside=self.stage.boxes),) if self.heading else super().boxes


class Aggregation(Around):
    """A stage around the one that combines the rows: stages that are added to the method go inside."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stage.traits.reduces:
            raise ValueError(f"{type(self).__name__}: {self.stage} leaves a row for each client, expected one for all")

    def at_combiner(self, change: Callable[[Stage], Stage]) -> Stage:
        return replace(self, stage=self.stage.at_combiner(change))  # type: ignore[type-var]


@dataclass(frozen=True)
class Scope(Around):
    """Apply a stage to some columns only; the others pass as they are. The stage must keep the rows."""

    heading = "in {selector!r}"
    selector: Selector
    stage: Stage

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage.traits.reduces:
            raise ValueError(
                f"Scope({self.selector!r}): {self.stage} leaves one row, but the other columns keep all rows; "
                "use Split with a stage for the rest"
            )

    def init(self, layout: Layout) -> State:
        return self.stage.init(_part(layout, self.selector, "Scope"))

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        part = updates.layout.select(as_select(self.selector))
        out, state = self.stage(updates.select(part), state, ctx)
        return updates.replace(X=updates.layout.put(updates.X.clone(), part, out.X)), state


@dataclass(frozen=True)
class Split(Inner):
    """Different stages for different columns: {selector: stage}; "*" takes what no other selector takes.

    Every block must be taken exactly once. If some parts return one row and others all rows, each row combines the
    single row with its own. A row for everyone (zero in the other columns) comes first, for absent clients.
    """

    parts: Mapping[Selector, Stage]

    def __hash__(self) -> int:
        return hash(tuple(self.parts.items()))

    @cached_property
    def traits(self) -> Traits:
        return Traits.around(inner(self), reduces=all(s.traits.reduces for s in inner(self)))

    def layouts(self, layout: Layout) -> dict[Selector, Layout]:
        """Return the columns of each part. Raises ValueError for a block that is taken twice or not at all."""
        owner: dict[str, Selector] = {}
        for selector in self.parts:
            if selector == "*":
                continue
            for name in _part(layout, selector, "Split").names:
                if name in owner:
                    raise ValueError(f"Split: block {name!r} is taken by {owner[name]!r} and by {selector!r}")
                owner[name] = selector
        rest = [b.name for b in layout.blocks if b.name not in owner]
        if rest and "*" not in self.parts:
            raise ValueError(f"Split: no selector takes block {rest[0]!r} ({len(rest)} in all); add '*' for the rest")
        owner.update(dict.fromkeys(rest, "*"))
        return {
            selector: Layout(tuple(b for b in layout.blocks if owner[b.name] == selector)) for selector in self.parts
        }

    def init(self, layout: Layout) -> State:
        """Return one state per part, by position."""
        parts = self.layouts(layout)
        return {str(i): s.init(parts[selector]) for i, (selector, s) in enumerate(self.parts.items())}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        layouts = self.layouts(updates.layout)
        results: list[tuple[Layout, Updates]] = []
        new: State = {}
        for i, (selector, stage) in enumerate(self.parts.items()):
            part = layouts[selector]
            out, new[str(i)] = stage(updates.select(part), state[str(i)], ctx)
            results.append((part, out))
        rows = next((out.rows for _, out in results if out.rows != (EVERYONE,)), (EVERYONE,))
        own = rows != (EVERYONE,)
        if own and all(out.rows == rows for _, out in results):
            return updates.replace(X=Beside(updates.layout, tuple(results))), new
        X = updates.empty(own + len(rows))
        X[:own] = 0
        for part, out in results:
            if out.rows not in (rows, (EVERYONE,)):
                raise ValueError(f"Split: parts return different rows: {rows} and {out.rows}")
            if out.rows == (EVERYONE,):
                updates.layout.put(X, part, out.X.expand(len(X), -1))
            else:
                updates.layout.put(X[1:], part, out.X)
        if not own:
            return updates.reduced(X), new
        # what is for everyone must reach absent clients too, or they would drift apart from the others
        common = updates.reduced(X[:1])
        n, weight = torch.cat([common.n, updates.n]), torch.cat([common.weight, updates.weight])
        return Updates(updates.layout, (EVERYONE, *rows), X, n, weight), new

    @property
    def boxes(self) -> tuple[Box, ...]:
        parts = enumerate(self.parts.items())
        return tuple(Box(f"in {selector!r}", inside=s.boxes, beside=i > 0) for i, (selector, s) in parts)


@dataclass(frozen=True)
class PerTask(Around):
    """Apply a stage to the columns of each task, over the rows that hold the task.

    A row holds a task if it trained the task's blocks (`support`); without `support`, if it has them. Rows that do not
    hold the task keep their values; a task that no row holds gets a zero update.
    """

    heading = "per task"
    stage: Stage

    @cached_property
    def traits(self) -> Traits:
        traits = Traits.around(inner(self), self.stage.traits.reduces)
        return replace(traits, wants=traits.wants | {"support"}, presence="block")

    def init(self, layout: Layout) -> State:
        """Return one state per task. Raises ValueError for a block that belongs to no task."""
        orphan = next((b.name for b in layout.blocks if b.task is None), None)
        if orphan is not None:
            raise ValueError(f"PerTask: block {orphan!r} belongs to no task; use Split to give it another stage")
        return {t: self.stage.init(layout.select(task=t)) for t in layout.tasks}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        rows = 1 if self.stage.traits.reduces else len(updates)
        X = updates.empty(rows).zero_() if self.stage.traits.reduces else updates.X.clone()
        new = dict(state)
        for task in updates.layout.tasks:
            part = updates.layout.select(task=task)
            mine = updates.select(part)
            holders = [i for i, held in enumerate(self._holds(mine, task)) if held]
            if not holders:
                continue
            out, new[task] = self.stage(mine.keep(holders), state[task], ctx.among(task))
            if self.stage.traits.reduces:
                updates.layout.put(X, part, out.X)
            else:
                mine_X = mine.X.clone()
                mine_X[holders] = out.X
                updates.layout.put(X, part, mine_X)
        return (updates.reduced(X) if self.stage.traits.reduces else updates.replace(X=X)), new

    @staticmethod
    def _holds(mine: Updates, task: str) -> list[bool]:
        have = mine.present if mine.support is None else mine.support
        blocks = [True] * len(mine) if have is None else have.any(dim=1).tolist()
        return [b and own in (None, task) for b, (_, own) in zip(blocks, mine.rows, strict=True)]


@dataclass(frozen=True)
class GroupBy(Around):
    """Apply a stage within groups of rows: by an extra (such as "domain"), by "task" or by "client".

    Every row receives its own group's result. State is kept per group, from the round in which it first appears.
    """

    heading = "by {key}"
    key: str
    stage: Stage

    @cached_property
    def traits(self) -> Traits:
        own = set() if self.key in ("task", "client") else {f"extra:{self.key}"}
        return replace(traits := Traits.around(inner(self)), reads=traits.reads | own)

    def _group_of(self, updates: Updates) -> list[str]:
        if self.key in ("client", "task"):
            return [str(client if self.key == "client" else task) for client, task in updates.rows]
        if self.key not in updates.extra:
            known = ", ".join(updates.extra) or "none"
            raise ValueError(f"GroupBy: the updates have no extra {self.key!r}. Extras: {known}")
        values = updates.extra[self.key]
        return [str(v) for v in (values.tolist() if isinstance(values, Tensor) else values)]

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        groups = grouped((group, i) for i, group in enumerate(self._group_of(updates)))
        X = torch.empty_like(updates.X)
        new = dict(state)
        for group, members in sorted(groups.items()):
            before = state[group] if group in state else self.stage.init(columns_here().whole(updates.layout))
            out, new[group] = self.stage(updates.keep(members), before, ctx)
            X[members] = out.X.expand(len(members), -1)
        return updates.replace(X=X), new


@dataclass(frozen=True)
class Switch(Inner):
    """`before` while round < `round`, then `after` (DFMTL thesis, eq. 4.20). Rounds count from 1."""

    round: Count
    before: Stage
    after: Stage

    @cached_property
    def traits(self) -> Traits:
        """Return traits that read extras of either stage, other fields only if both do: no round may lose a field."""
        a, b = self.before.traits, self.after.traits
        reads = (a.reads & b.reads) | {f for f in a.reads | b.reads if f == "rounds" or f.startswith("extra:")}
        return replace(Traits.around(inner(self), a.reduces and b.reduces), reads=reads)

    def init(self, layout: Layout) -> State:
        return {"before": self.before.init(layout), "after": self.after.init(layout)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        name, stage = ("before", self.before) if ctx.round < self.round else ("after", self.after)
        updates, new = stage(updates, state[name], ctx)
        return updates, {**state, name: new}

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (
            Box(f"before round {self.round}", inside=self.before.boxes),
            Box(f"from round {self.round}", inside=self.after.boxes, beside=True),
        )


def _part(layout: Layout, selector: Selector, where: str) -> Layout:
    part = layout.select(as_select(selector))
    if not part.blocks:
        roles = sorted({b.role for b in layout.blocks} | {b.part for b in layout.blocks if b.part})
        raise ValueError(f"{where}({selector!r}): no block matches; roles here: {', '.join(roles)}")
    return part


@dataclass(frozen=True)
class PerBlock(Around):
    """Apply a stage to the columns of each block (each tensor of the model) by itself, over the rows that have it.

    Rows that lack the block get no update of it; a block that no row has gets a zero update.
    """

    heading = "per tensor"
    stage: Stage

    @cached_property
    def traits(self) -> Traits:
        return replace(Traits.around(inner(self), self.stage.traits.reduces), presence="block")

    def init(self, layout: Layout) -> State:
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


@dataclass(frozen=True)
class PartlyShared(Inner):
    """`shared` makes one update of the selected columns for all clients; `own` keeps a row per client in the others.

    A Split of two parts; stages that are added to the method go into `shared`.
    """

    selector: Selector
    shared: Stage
    own: Stage

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shared.traits.reduces or self.own.traits.reduces:
            raise ValueError(
                f"PartlyShared({self.selector!r}): expected a stage that leaves one row and one that keeps all, "
                f"found {self.shared} and {self.own}"
            )

    def at_combiner(self, change: Callable[[Stage], Stage]) -> Stage:
        return replace(self, shared=self.shared.at_combiner(change))

    def init(self, layout: Layout) -> State:
        """Return both stages' states. Raises ValueError if the selector matches nothing."""
        part = _part(layout, self.selector, "PartlyShared")
        return {"shared": self.shared.init(part), "own": self.own.init(layout.without(part))}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        split = Split({as_select(self.selector): self.shared, "*": self.own})
        out, new = split(updates, {"0": state["shared"], "1": state["own"]}, ctx)
        return out, {"shared": new["0"], "own": new["1"]}

    @property
    def boxes(self) -> tuple[Box, ...]:
        return (
            Box(f"in {self.selector!r}, for everybody", inside=self.shared.boxes),
            Box("in the rest, each client's own", inside=self.own.boxes, beside=True),
        )


@dataclass(frozen=True)
class Every(Around):
    """Apply a stage that keeps the rows in every `rounds`-th round only; in other rounds rows pass as they are."""

    heading = "every {rounds} rounds"
    rounds: Count
    stage: Stage

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage.traits.reduces:
            raise ValueError(f"Every: {self.stage} leaves one row, but in other rounds all rows are kept")

    @cached_property
    def traits(self) -> Traits:
        """It reads no weights and the like, because no field may be lost in some rounds."""
        traits = Traits.around(inner(self))
        reads = {f for f in traits.reads if f in ("X", "base", "rounds") or f.startswith(("extra:", "auxiliary:"))}
        return replace(traits, reads=reads)

    def init(self, layout: Layout) -> State:
        return self.stage.init(layout)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return (updates, state) if ctx.round % self.rounds else self.stage(updates, state, ctx)
