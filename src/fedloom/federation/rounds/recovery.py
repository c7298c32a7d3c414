"""Rounds that fail: which state may take the place of another, which rows are to blame, and when a run gives up.

Nobody knows what a method does to its updates, so the result of a round is judged, not its updates. A round fails
where a model, or what the stages, the server rule or the buffers hold, is not finite; where a model's norm is more than
GROWTH times what it, or the model for all, was before and more than UPDATES usual updates; and where a model, or the
server rule's memory, is more than FAR times what the model was before (than 1 where that was smaller). A usual update
is the median of the norms of a round's updates that are not zero, and the median of that over the round and the last
REMEMBERED ones.

The state is then the one before, and the round is done again without the rows to blame: those of more than BLAMED usual
updates. If that fails too, or no row is to blame, the round is lost. After TRIES lost rounds in a row a run stops.

Values beside an update go into sums too, and nobody knows where these will act. So a row is dropped where an
auxiliary vector or the buffers are not finite in the model's precision, or where one of them, or a tensor among its
extras, is more than FAR times the median of the round's rows.

A round that does not fail may still be one that a single row moved far. A row of more than LONG usual updates is logged
where no robust rule bounds what it does to others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fedloom.core.context import Ctx, Row, State
from fedloom.core.stage import Stage, every
from fedloom.core.updates import Updates, columns_here, row_norms
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.runs.checkpoint import tensors_in

GROWTH, UPDATES, BLAMED, FAR = 10.0, 1e3, 1e2, 1e6
REMEMBERED, TRIES = 10, 3
LONG, FEW = 50.0, 3
"""Fewer than FEW rows do not say what is usual."""

Step = Callable[[Updates, Sequence[Payload], Ctx, bool], State]
"""The state after a round of these rows, from their payloads; True if nobody will need the rows after it."""
Agree = Callable[[str | None], str | None]
"""Makes the reason that one process found known to all: the first of their reasons."""


def gave_up(state: State) -> bool:
    """Return whether a run with a server has lost so many rounds in a row that it stops. Peers always go on."""
    return "server" in state and bool(_recent(state["server"])["lost"] >= TRIES)


def was_lost(before: State, server: State) -> bool:
    """Return whether the round between two states of a server, or of a peer's model, was lost."""
    return bool(_recent(server)["lost"] > _recent(before)["lost"])


def kept_states(before: State, server: State, clients: State) -> State:
    """Return the clients' states after a round: new where the update was used, else those of before it.

    A client whose update was dropped must train next time as if this round had not been: else its control variate or
    personal model would have moved, and the server's not.
    """
    without = clients if was_lost(before["server"], server) else _recent(server).get("without", ())
    return {**before["clients"], **{client: state for client, state in clients.items() if client not in without}}


def again(state: State) -> State:
    """Return the state of a run that gave up, to try once more."""
    return {**state, "server": {**state["server"], "recent": {**_recent(state["server"]), "lost": 0}}}


def _recent(server: State) -> State:
    return cast(State, server.get("recent", {"updates": [], "lost": 0}))


def usable(updates: Updates, received: Sequence[Payload], ctx: Ctx) -> tuple[Updates, dict[Row, float]]:
    """Return the rows that may be used, and their norms; log the others."""
    sizes = dict(zip(updates.rows, updates.norms.tolist(), strict=True))
    bad = {row: "not finite after the client's stages" for row, size in sizes.items() if not math.isfinite(size)}
    for what, beside in _beside(updates, received):
        known = usual([size for row, size in beside.items() if row not in bad])
        for row, size in beside.items():
            if row not in bad and not size <= FAR * known:
                text = f"of norm {size:.3g}, while {known:.3g} is usual" if math.isfinite(size) else "not finite"
                bad[row] = f"{what} {text}"
    if not bad:
        return updates, sizes
    own = any(client == ctx.peer for client, _ in bad)  # nobody mixes without a model of its own
    left = updates.keep([] if own else [i for i, row in enumerate(updates.rows) if row not in bad])
    for row, why in bad.items():  # after `keep`, which may ask for the rows
        ctx.log("update dropped", {**_at(ctx, row), "why": why})
    return left, {row: sizes[row] for row in left.rows}


def usual(sizes: Iterable[float]) -> float:
    """Return the lower median of the sizes that are finite and not zero, which honest clients decide; 0 without any."""
    return statistics.median_low([size for size in sizes if 0 < size < math.inf] or [0.0])


def reject_outliers(
    updates: Updates,
    sizes: Mapping[Row, float],
    received: Sequence[Payload],
    state: State,
    ctx: Ctx,
    step: Step,
    stage: Stage,
    agree: Agree = lambda why: why,
) -> State:
    """Return the state after `step`, where it may take the place of `state`, if need be without the rows to blame.

    A failed attempt leaves no entries; at a peer its own row is never to blame. `stage` is the one in `step`.
    """
    recent, now = _recent(state), usual(sizes.values())
    known = usual([*recent["updates"], now])
    blamed = {row for row, size in sizes.items() if size > BLAMED * known and row[0] != ctx.peer}

    def attempt(updates: Updates, last: bool) -> tuple[State, str | None, set[str]]:
        # what stages say waits until the attempt is judged: a round that is done again says it once
        waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        log, record = (lambda *what, to=to: waiting.append((to, what)) for to in (ctx.log, ctx.record))
        clients = {client for client, _ in updates.rows}
        new = step(updates, [p for p in received if p.row[0] in clients], replace(ctx, log=log, record=record), last)
        why = agree(_wrong(new, state, known))
        for to, what in waiting if why is None else ():
            to(*what)
        return new, why, clients

    new, why, clients = attempt(updates, last=len(blamed) in (0, len(updates)))
    if why is not None:
        some = 0 < len(blamed) < len(updates)
        left = updates.keep([i for i, row in enumerate(updates.rows) if row not in blamed]) if some else updates
        ctx.log("round rolled back", {**_at(ctx), "why": why})
        if not some:
            return lost(state, ctx, "all rows are to blame" if blamed else "no row is to blame")
        for row in (row for row in updates.rows if row in blamed):
            because = f"of norm {sizes[row]:.3g}, while {known:.3g} is usual, in a round that failed"
            ctx.log("update dropped", {**_at(ctx, row), "why": because})
        updates = left
        new, why, clients = attempt(updates, last=True)
        if why is not None:
            return lost(state, ctx, why)
        # the blamed rows must not move what is usual, or the next ones of their size would pass
        now = usual(sizes[row] for row in updates.rows)
    if len(sizes) >= FEW and max(sizes.values()) > LONG * known and _exposed(stage):
        _name_long({row: sizes.get(row, 0.0) for row in updates.rows}, known, now, ctx)
    without = sorted({p.row[0] for p in received} - clients)
    return {**new, "recent": {"updates": [*recent["updates"], now][-REMEMBERED:], "lost": 0, "without": without}}


def _name_long(sizes: Mapping[Row, float], known: float, now: float, ctx: Ctx) -> None:
    """Log the updates that are much longer than is usual; where most are, training diverges and nobody is to blame."""
    if now > LONG * known:
        because = f"the usual norm {now:.3g} is {now / known:.0f} times that of the rounds before"
        ctx.log("updates grow", {**_at(ctx), "why": f"{because}: training diverges; try a smaller learning rate"})
    for row, size in sizes.items():
        if size > LONG * max(known, now) and row[0] != ctx.peer:
            because = f"its norm {size:.3g} is {size / known:.0f} times the usual {known:.3g}"
            todo = "no robust rule bounds it: add one, such as method.add.clip={} (docs/robust.md)"
            ctx.log("long update", {**_at(ctx, row), "why": f"{because}, and {todo}"})


def _exposed(stage: Stage) -> bool:
    """Return whether a single row may move the models of others without bound."""
    return not any(one.robust for one in every(stage)) and (stage.traits.reduces or stage.traits.kind != "row")


def lost(state: State, ctx: Ctx, why: str) -> State:
    """Return the state before a lost round, which counts it."""
    recent = _recent(state)
    ctx.log("round lost", {**_at(ctx), "why": why})
    return {**state, "recent": {**recent, "lost": recent["lost"] + 1}}


def nothing_received(state: State, ctx: Ctx) -> State:
    """Return the state before a round without any usable row. The round is lost if it had several clients."""
    clients = {client for client, _ in ctx.targets or ()}
    if len(clients) < 2 or ctx.peer is not None:
        return state
    why = f"none of {len(clients)} clients has a usable update: check the model, the learning rate and the data"
    return lost(state, ctx, why)


def _wrong(new: State, before: State, known: float) -> str | None:
    """Return why a state may not take the place of the one before; None if it may."""
    start = _size(before["model"])
    for what, model, then in _models(new, before):
        size = _size(model)
        if not math.isfinite(size):
            return f"{what} would have nan or inf"
        # both bounds: a small model may grow a lot by honest updates, and a large one moves far by a small factor
        if size > GROWTH * start:
            was = max(start, _size(then))
            usually = max(GROWTH * was, UPDATES * known) or math.inf  # of a model of 0 whose updates are secret
            if size > usually or size > FAR * max(was, 1.0):
                return f"{what} would grow from norm {was:.3g} to {size:.3g}, with updates of {known:.3g}"
    memory = [one for name, one in new["rule"].items() if one and one is not before["rule"].get(name)]
    buffers = new.get("task_buffers") or new["buffers"]
    trees = {"the state of stages": new["stage"], "the memory of the server rule": memory, "buffers": buffers}
    for what, tree in ((what, tree) for what, tree in trees.items() if tree is not None and len(tree)):
        sizes = (_size(x) for x in tensors_in(tree) if x.is_floating_point())
        largest = max(sizes, key=lambda size: (math.isnan(size), size), default=0.0)
        if not math.isfinite(largest):
            return f"{what} would have nan or inf"
        if tree is memory and largest > FAR * max(start, known, 1.0):
            return f"{what} would be of norm {largest:.3g}, with a model of {start:.3g} and updates of {known:.3g}"
    return None


def _models(new: State, before: State) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield models and task vectors that are not those of the state before: (what, now, before)."""
    if new["model"] is not before["model"]:
        yield "the model", new["model"], before["model"]
    for kind, word in (("personal", "model of client"), ("tasks", "vector of task")):
        for name, now in new.get(kind, {}).items():
            then = before[kind].get(name, before["model"])
            if now is not then:
                yield f"the {word} {name!r}", now, then


def _beside(updates: Updates, received: Sequence[Payload]) -> Iterator[tuple[str, dict[Row, float]]]:
    """Yield the values that rows have beside X, by name, with their norm for each row that has them."""
    for name, matrix in updates.auxiliary.items():
        norms = columns_here().total(row_norms(matrix).square()).sqrt()  # its columns may lie in several processes
        yield f"auxiliary {name}", dict(zip(updates.rows, norms.tolist(), strict=True))
    for name, values in updates.extra.items():
        real = {  # what is not finite in an extra is for the stage that reads it
            row: _size(value.nan_to_num(0, 0, 0))
            for row, value in zip(updates.rows, values, strict=True)
            if isinstance(value, Tensor) and value.ndim and value.is_floating_point()
        }
        yield f"extra {name}", real
    if any(p.buffers is not None for p in received):
        yield "buffers", {p.row: _size(p.buffers) for p in received if p.buffers is not None}


def _size(x: Tensor) -> float:
    return float(row_norms(x.reshape(1, -1)))


def _at(ctx: Ctx, row: Row | None = None) -> dict[str, str]:
    """Return where something happened, for an event: at which peer, and to the update of which client and task."""
    about = {} if ctx.peer is None else {"peer": ctx.peer}
    if row is not None:
        about |= {"client": row[0]} if row[1] is None else {"client": row[0], "task": row[1]}
    return about
