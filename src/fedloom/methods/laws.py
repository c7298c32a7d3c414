"""The laws that stages obey, checked on a small federation: for the tests of a stage or method of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, generator
from fedloom.core.errors import UserError
from fedloom.core.layout import Block, Layout
from fedloom.core.stage import Stage, every
from fedloom.core.updates import Updates
from fedloom.methods.method import Method

ENCODER = Block("encoder.w", (4, 3), role="encoder")
HEADS = tuple(Block(f"heads.{task}.w", (size,), role="head", task=task) for task, size in {"a": 5, "b": 3}.items())
OVERLAPPING = {"c0": "a", "c1": "ab", "c2": "b", "c3": "a", "c4": "b"}
APART = {client: tasks[0] for client, tasks in OVERLAPPING.items()}
COHORTS = (("c0", "c1", "c2", "c3", "c4"), ("c0", "c2"), ("c1", "c3", "c4"), ("c2",), ("c0", "c1", "c3"))
"""The clients that take part in each round."""
Beside = Mapping[str, Mapping[str, Any]]
"""Name of an extra -> client -> its value."""
_close = partial(torch.allclose, rtol=1e-9, atol=1e-12)


def check(thing: Stage | Method, beside: Beside | None = None) -> None:
    """Check a stage, or the stages of a method, against the laws that every stage of fedloom obeys.

    Five clients hold two tasks in some rounds. The output must be finite and reproducible, not depend on the clients'
    names, be zero for zero updates, and exist without any client. Blocks that only some clients hold end as
    `Traits.presence` says. (Every call checks that the stage does not change its inputs.) `beside` are extras that the
    stage reads, for the clients c0 to c4, if they are not numbers. Raises UserError, which names all violated laws or
    the reason why the stage cannot be checked.
    """
    if not isinstance(thing, Stage | Method):
        raise UserError(
            f"fl.check: expected a stage or a method, such as Mean() or fl.methods.fedavg(), found {thing!r}"
        )
    beside = _beside(beside)
    stage = thing.edge >> thing.stage if isinstance(thing, Method) else thing
    try:
        broken = [*_broken(stage, beside)]
    except UserError:
        raise
    except Exception as error:  # a stage may fail in any way
        by_task = isinstance(thing, Method) and thing.turn.by_task
        by_task = by_task or any("tasks" in one.traits.writes for one in every(stage))
        guessed = [name for name in _names(stage, "extra") if name not in {"tasks", *beside}]
        more = ""
        if by_task:
            more = " It takes a row per client and task. fl.check has a row per client, and does not support it."
        elif guessed:
            more = (
                f" fl.check guessed these extras as numbers: {', '.join(guessed)}. Where they are something else, give "
                f"a value for each of {', '.join(OVERLAPPING)}: beside={{{guessed[0]!r}: {{'c0': ..., 'c1': ...}}}}."
            )
        failed = f"{stage!r} fails with {type(error).__name__}: {error}."
        raise UserError(f"fl.check: {failed}{more}") from error
    if broken:
        raise UserError("\n".join([f"{stage!r} breaks these laws:", *broken]))


def _beside(beside: Any) -> Beside:
    """Return the extras that a user gives. Raises UserError for anything but a value of each client."""
    if beside is None:
        return {}
    clients = ", ".join(OVERLAPPING)
    example = "beside={'domain': {'c0': 'a', 'c1': 'b', ...}}"
    if not isinstance(beside, Mapping):
        raise UserError(f"beside: expected a mapping such as {example}, found {type(beside).__name__}")
    for name, values in beside.items():
        if not isinstance(values, Mapping):
            found = type(values).__name__
            raise UserError(f"beside: {name!r}: expected a mapping such as {example}, found {found}")
        if missing := [client for client in OVERLAPPING if client not in values]:
            raise UserError(f"beside: {name!r}: no value of {', '.join(missing)} found, expected one each of {clients}")
        if unknown := [client for client in values if client not in OVERLAPPING]:
            raise UserError(f"beside: {name!r}: unknown client {unknown[0]!r}, expected the clients {clients}")
    return beside


def _names(stage: Stage, kind: str) -> list[str]:
    """Return the names of the extras ("extra"), or of the vectors beside X ("auxiliary"), that a stage reads."""
    fields = sorted(stage.traits.reads | stage.traits.wants)
    return [field.removeprefix(f"{kind}:") for field in fields if field.startswith(f"{kind}:")]


def _broken(stage: Stage, beside: Beside) -> Iterator[str]:
    """Yield a sentence for each law that is broken."""
    tell = _Federation(stage, Layout((ENCODER, *HEADS)), dict.fromkeys(OVERLAPPING, "ab"), beside)
    state, first = tell.stage.init(tell.layout), tell.rows(1, COHORTS[0])
    out, after = stage(first, state, Ctx(1, 3))
    if not bool(out.X.isfinite().all()):
        yield "finite: finite updates give some that are not finite"
    again, _ = stage(tell.rows(1, COHORTS[0]), state, Ctx(1, 3))
    repeats = torch.equal(again.X, out.X)
    if not repeats:
        yield "repeat: the same updates, state and seed give other updates; draw from `ctx.rng`"
    other, _ = stage(tell.rows(1, COHORTS[0]), stage.init(tell.layout), Ctx(1, 4))
    single = {name: vector.float() for name, vector in first.auxiliary.items()}
    stage(first.replace(X=first.X.float(), auxiliary=single), state, Ctx(1, 3))  # a run's precision
    swap = dict(zip(COHORTS[0], COHORTS[0][::-1], strict=True))
    renamed, _ = stage(tell.rows(1, COHORTS[0], swap), stage.init(tell.layout), Ctx(1, 3))
    if repeats and torch.equal(other.X, out.X) and not _alike(out, renamed, swap):
        yield "names: clients with each other's names and updates do not get each other's results"
    for round_ in (1, 5):
        zero, _ = stage(tell.rows(round_, COHORTS[0], scale=0.0), stage.init(tell.layout), Ctx(round_, 3))
        if bool(zero.X.any()):  # nan counts
            yield f"zero: updates of zeros give others in round {round_}"
            break
    if any(why for one in every(stage) for why in one.unfit(tell.rows(1, COHORTS[0]), 0)):
        return  # it says itself that it needs clients, and the next laws have rounds with one or none
    try:
        nobody, _ = stage(tell.rows(2, ()), after, Ctx(2, 3))
        if bool(nobody.X.any()):
            yield "nobody: a round without clients gives an update"
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        yield f"nobody: a round without clients fails with {type(error).__name__}: {error}"
        return
    if (law := stage.traits.presence) in ("block", "row") and "tasks" not in stage.traits.writes:
        yield from _away(stage, str(law), beside)


def _away(stage: Stage, law: str, beside: Beside) -> Iterator[str]:
    """Yield a sentence where a block ends elsewhere than in a federation of the clients that hold it."""
    held, layout = OVERLAPPING if law == "block" else APART, Layout((ENCODER, *HEADS))
    whole = _Federation(stage, layout, held, beside).run(COHORTS)
    for head in HEADS:
        mine = {client: tasks for client, tasks in held.items() if str(head.task) in tasks}
        cohorts = [[client for client in cohort if client in mine] for cohort in COHORTS]
        alone = _Federation(stage, layout, mine, beside).run(cohorts)
        columns = layout.slice(head.name)
        for number, (both, one, there) in enumerate(zip(whole, alone, cohorts, strict=True), 1):
            rows = [row for row in both.rows if row in one.rows] if there else []
            pairs = [[out.X[out.rows.index(row), columns] for out in (both, one)] for row in rows]
            if not all(_close(*pair) for pair in pairs):
                yield (
                    f"presence {law!r}: in round {number} the block of task {head.task} differs from that of a "
                    "federation of the clients with this task; see `Traits.presence`, `PerTask` and `PerBlock`"
                )
                return


class _Federation:
    """Clients that hold blocks, and send the same in a round whoever else takes part."""

    def __init__(self, stage: Stage, layout: Layout, held: Mapping[str, str], beside: Beside) -> None:
        self.stage, self.layout, self.held = stage, layout, held
        numbers = {client: 1.0 + place / 4 for place, client in enumerate(OVERLAPPING)}
        known = {**beside, "tasks": {client: ",".join(tasks) for client, tasks in held.items()}}
        self.extra = {name: known.get(name, numbers) for name in _names(stage, "extra")}
        self.vectors = _names(stage, "auxiliary")

    def rows(
        self, round_: int, clients: Sequence[str], swap: Mapping[str, str] | None = None, scale: float = 1.0
    ) -> Updates:
        """Return the updates of a round; `swap` says under whose name a client sends its own."""
        names = {client: (swap or {}).get(client, client) for client in clients}

        def drawn(what: str) -> Tensor:
            rows = [
                torch.randn(self.layout.d, generator=generator(1, round_, what, c), dtype=torch.float64) for c in names
            ]
            return scale * torch.stack(rows) if rows else torch.zeros(0, self.layout.d, dtype=torch.float64)

        present = torch.tensor([[b.task is None or b.task in self.held[c] for b in self.layout.blocks] for c in names])
        present = present.view(len(names), len(self.layout.blocks)).bool()
        sizes = torch.tensor([block.size for block in self.layout.blocks])
        shares = any(
            len(tasks) > 1 for tasks in self.held.values()
        )  # else the encoder rests, so that none share a block
        moves = present & torch.tensor([shares or block.task is not None for block in self.layout.blocks])
        return Updates.of(
            drawn("update") * moves.repeat_interleave(sizes, 1),
            [10.0 + 3 * [*OVERLAPPING].index(client) for client in names],
            self.layout,
            [*names.values()],
            present=None if bool(present.all()) else present,
            auxiliary={name: drawn(name) for name in self.vectors},
            **{name: [values[client] for client in names] for name, values in self.extra.items()},
        )

    def run(self, cohorts: Sequence[Sequence[str]]) -> list[Updates]:
        """Return what comes out in each round."""
        state, found = self.stage.init(self.layout), []
        held = {str(head.task): sum(str(head.task) in tasks for tasks in self.held.values()) for head in HEADS}
        for number, cohort in enumerate(cohorts, 1):
            ctx = Ctx(number, 3, population=len(self.held), rounds=len(cohorts), held=held)
            out, state = self.stage(self.rows(number, cohort), state, ctx)
            found.append(out)
        return found


def _alike(one: Updates, other: Updates, swap: Mapping[str, str]) -> bool:
    """Return whether each client has what the other update has under its other name."""
    for (client, task), x in zip(one.rows, one.X, strict=True):
        row = swap.get(client, client), task
        if row not in other.rows or not _close(x, other.X[other.rows.index(row)]):
            return False
    return True
