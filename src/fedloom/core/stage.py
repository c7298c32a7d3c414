"""The one extension point of aggregation: Stage, and how stages follow each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State, seeded
from fedloom.core.errors import UserError
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.settings.section import Checked
from fedloom.core.states import check_state, marks
from fedloom.core.untrusted import Untrusted
from fedloom.core.updates import EVERYONE, Updates

Kind = Literal["row", "mix", "matrix"]
_KINDS: tuple[Kind, ...] = ("row", "mix", "matrix")
Presence = Literal["block", "row", "coupled"]
_TENSORS = ("n", "weight", "coef", "base", "present", "support", "mixing")
_PRESENCES: tuple[Presence, ...] = ("block", "row", "coupled")


@dataclass(frozen=True)
class Traits:
    """The properties of a stage, for the code that places it and provides its inputs.

    `reads`, `wants` and `writes` name fields of Updates: X, n, weight, coef, base, support, extra:NAME or
    auxiliary:NAME. Beside these, `reads` may name "rounds", how many the run will have, and `writes` what else comes
    out: "broadcast:NAME", sent to clients beside the model (see `Stage.broadcast`); "tasks", new vectors of tasks, one
    for each, with the key ("*", task), from rows that are (client, task); "groups", numbers of groups of the rows that
    travel, so that all peers must find the same.
    """

    kind: Kind = "row"
    """The scope: "row" each row alone (may run at the client), "mix" the rows' Gram matrix or extras
    (output = W X), "matrix" the columns of all rows."""
    reads: Set[str] = frozenset({"X"})
    writes: Set[str] = frozenset({"X"})
    wants: Set[str] = frozenset()
    """Fields that it uses if they exist."""
    reduces: bool = False
    """K rows become one, or one per task."""
    hides: float = 0
    """Where what comes out must not tell which rows came: the fewest rows that a result may be a mean of, inf for all
    that are expected. It then acts without any row, and on blocks that no row has. 0: it may tell."""
    sums: bool = False
    """It needs no more of the rows than `Updates.summed`, once, in proportion to `Stage.row_weights`; so the server may
    add them up as they come."""
    separable: bool = False
    """Treats every column alike, with Gram matrices and sums by `fedloom.core.updates`; so columns may lie apart."""
    presence: Presence | None = None
    """The rows that move a block if rows may lack some (`Updates.present`). "block": only what the rows with it hold in
    it, so it ends where it would end in a federation of these clients alone. "row": also what these rows hold
    elsewhere, because one choice or one number of a row stems from all its blocks. "coupled": also rows that lack it,
    by design. None: the stage knows nothing of presence, and is refused where rows may lack blocks."""
    extras: Mapping[str, Untrusted] = field(default_factory=dict, hash=False)
    """The requirements on one row's value of an extra that it reads, if a node sent it: name -> `Number`, `Array` or
    the like of `fedloom.core.untrusted`. One that is not named here may be a number or a short text."""

    def __post_init__(self) -> None:
        for name in ("reads", "writes", "wants"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"Traits: {name}: expected a set of names, found the text {value!r}")
            object.__setattr__(self, name, frozenset(value))
        if self.presence not in (None, *_PRESENCES):
            raise ValueError(f"Traits: presence: expected {', '.join(_PRESENCES)} or None, found {self.presence!r}")

    @property
    def broadcasts(self) -> frozenset[str]:
        """Return the names that it broadcasts to clients, as "broadcast:NAME"."""
        return frozenset(name for name in self.writes if name.startswith("broadcast:"))

    @staticmethod
    def around(stages: Iterable[Stage], reduces: bool = False) -> Traits:
        """Return the traits of a stage that calls others on all its input. They write only X and groups outside."""
        each = [stage.traits for stage in stages]
        return Traits(
            kind=max((t.kind for t in each), key=_KINDS.index, default="row"),
            reads={"X"}.union(*(t.reads for t in each)),
            writes={"X"}.union(*(t.writes & {"groups"} for t in each)),
            wants=set().union(*(t.wants for t in each)),
            reduces=reduces,
            separable=all(t.separable for t in each),
            extras={name: value for t in each for name, value in t.extras.items()},
            presence=min((t.presence for t in each), key=(None, *reversed(_PRESENCES)).index, default="block"),
        )


class Stage(Checked):
    """One step of aggregation: (updates, state, ctx) -> (updates, state). Never changes its inputs."""

    robust: ClassVar[bool] = False
    """True if no single row, however long, moves what comes out without bound."""
    replaceable: ClassVar[bool] = False
    """True if it is a plain rule for combining rows, in whose place another may stand."""
    clients: ClassVar[Set[str]] = frozenset()
    """Names of the clients that it treats in a way of their own."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Check what stages of a user's own do at every call; the suite does that for fedloom's."""
        super().__init_subclass__(**more)
        call = vars(cls).get("__call__")
        if call is not None and not cls.__module__.startswith("fedloom.") and not hasattr(call, "__wrapped__"):
            cls.__call__ = _checking(call)  # type: ignore[method-assign]

    @cached_property
    def traits(self) -> Traits:
        """The stage's traits. A class with the same traits for all its stages says `traits = Traits(...)`."""
        return Traits()

    def __str__(self) -> str:
        """Return its name for users, who may have named the method alone and not its parameters."""
        return f"{type(self).__name__}({'...' if getattr(self, '__dataclass_fields__', None) else ''})"

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        """Yield at most `most` reasons why it cannot work with the rows of all clients (no values; None at a peer)."""
        return iter(())

    def init(self, layout: Layout) -> State:
        """Return the state before the first round."""
        return {}

    def row_weights(self, updates: Updates) -> Tensor:
        """Return how much each row counts (K, float64), from what is known of the row alone, if it only `sums`."""
        return updates.weight

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """Return inputs of these clients' local rules: vectors over the stage's columns (d), or scalars (no dimension).

        `models` are the personal models (d) that the server has, of any client.
        """
        return {client: {} for client in clients}

    def at_combiner(self, change: Callable[[Stage], Stage]) -> Stage:
        """Return this aggregation with `change` applied to the stage in it that combines the rows."""
        return change(self)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        raise NotImplementedError

    def __rshift__(self, other: Stage) -> Chain:
        return Chain((*in_turn(self), *in_turn(other)))

    def on(
        self, X: Any, n: Any = None, state: State | None = None, round: int = 0, *, seed: int = 0, **extra: Any
    ) -> tuple[Tensor, State]:
        """Run on a plain K x d matrix: (result, new state). Rows with nan or inf are dropped first.

        `weight`, `coef`, `present`, `support`, `layout` and `rows` may be given by name; any other name is an extra.
        """
        updates, _ = Updates.of(X, n, **extra).finite()
        state = self.init(updates.layout) if state is None else state
        out, state = self(updates, state, Ctx(round=round, seed=seed))
        return out.X, state

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Return the description of the stage, for `str(method)` and the report."""
        return (Box.of(self),)


@dataclass(frozen=True)
class Identity(Stage):
    """The rows, unchanged: each client gets its own update back, which is local training (mixing matrix I)."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(writes=frozenset(), separable=True, presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates, state


@dataclass(frozen=True)
class Chain(Stage):
    """Stages one after another; `a >> b` makes one."""

    stages: tuple[Stage, ...]

    @cached_property
    def traits(self) -> Traits:
        """It reads every field that a member reads and no earlier member wrote."""
        each = [stage.traits for stage in self.stages]
        reads: set[str] = set()
        written: set[str] = set()
        for one in each:
            reads |= one.reads - written
            written |= one.writes
        return replace(
            Traits.around(self.stages, reduces=any(one.reduces for one in each)),
            reads=reads,
            writes=written,
            hides=max((one.hides for one in each), default=0),
        )

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        each = [s.broadcast(state[str(i)], clients, models) for i, s in enumerate(self.stages)]
        return {client: {k: v for one in each for k, v in one[client].items()} for client in clients}

    def at_combiner(self, change: Callable[[Stage], Stage]) -> Stage:
        i = next((i for i, s in enumerate(self.stages) if s.traits.reduces), len(self.stages) - 1)
        return Chain((*self.stages[:i], *in_turn(self.stages[i].at_combiner(change)), *self.stages[i + 1 :]))

    def init(self, layout: Layout) -> State:
        return {str(i): s.init(layout) for i, s in enumerate(self.stages)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        new: State = {}
        for i, stage in enumerate(self.stages):
            updates, new[str(i)] = stage(updates, state[str(i)], ctx)
        return updates, new

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.stages))

    def __str__(self) -> str:
        return " >> ".join(map(str, self.stages))

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(box for stage in self.stages for box in stage.boxes)


def _checking(call: Callable[..., Any]) -> Callable[..., tuple[Updates, State]]:
    """Return a `__call__` that draws from torch's generator as the run's seed says, and that raises UserError where it
    changes what it was given, or its answer is not what the stage's traits say."""

    @wraps(call)
    def checked(stage: Stage, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        if not isinstance(state, Mapping):
            check_state(stage, state)
        given, before = _given(updates), marks(state)
        who = type(stage).__qualname__, ctx.peer or "", updates.rows[0][0] if updates.rows else ""
        with seeded(ctx.seed, ctx.round, "stage", *who):  # so that torch.randn repeats
            answer: Any = call(stage, updates, state, ctx)
        if changed := [name for name, mark in _given(updates).items() if mark != given[name]]:
            raise UserError(
                f"{stage!r} changed {', '.join(changed)} of its input in place: return new tensors instead, such as "
                "updates.replace(X=updates.X * 0.5) for updates.X.mul_(0.5)"
            )
        if marks(state) != before:
            raise UserError(
                f"{stage!r} changed its state in place: return a new one, with tensors and dictionaries of its own "
                "(0.5 * state['m'] for state['m'].mul_(0.5)), because a round that fails begins again from the old one"
            )
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Updates):
            found = f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__
            raise UserError(f"{stage!r} returned {found}, expected updates and state")
        out, new = answer
        if stage.traits.reduces and ctx.peer is None and any(client != EVERYONE[0] for client, _ in out.rows):
            raise UserError(
                f"{stage!r} returned rows of {len(out)} clients, but its traits say that it leaves one (reduces): "
                "expected updates.reduced(...)"
            )
        if out.layout.d != updates.layout.d:
            raise UserError(f"{stage!r} returned X with {out.layout.d} columns, expected {updates.layout.d}")
        if isinstance(X := out.given, Tensor):
            was = getattr(updates.given, "dtype", X.dtype)
            if X.dtype != was:
                raise UserError(
                    f"{stage!r} returned X of {X.dtype}, expected {was}: convert it by .to(updates.X.dtype)"
                )
            if X.requires_grad:
                raise UserError(
                    f"{stage!r} returned X that requires a gradient, expected plain numbers: call .detach()"
                )
        if new is not state or ctx.round <= 1:  # one that stays as it was is checked once
            check_state(stage, new)
        return out, new

    return checked


def _given(updates: Updates) -> dict[str, Any]:
    """Return marks of the tensors of updates, which are others after one was changed in place."""
    fields = {"X": updates.given, **{name: getattr(updates, name) for name in _TENSORS}}
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return marks({**tensors, **updates.auxiliary})


def in_turn(stage: Stage) -> tuple[Stage, ...]:
    """Return the stages of a chain, or the one stage."""
    return stage.stages if isinstance(stage, Chain) else (stage,)


def inner(stage: Stage) -> Iterator[Stage]:
    """Yield the stages that a stage is made of: those among its fields."""
    for value in vars(stage).values():
        several = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
        yield from (one for one in several if isinstance(one, Stage))


def every(stage: Stage) -> Iterator[Stage]:
    """Yield a stage and all those inside it, at any depth."""
    yield stage
    for one in inner(stage):
        yield from every(one)


def preceded_by(stage: Stage, added: Stage) -> Stage:
    """Return an aggregation with one more stage just before the rows are combined."""
    return stage.at_combiner(lambda rule: added >> rule)


def combined_by(stage: Stage, other: Stage) -> Stage:
    """Return an aggregation with another rule in place of its plain mean. Raises ValueError if it has none."""

    def replaced(rule: Stage) -> Stage:
        if not rule.replaceable:
            raise ValueError(f"{other} would replace a mean, but {rule} has none")
        return other

    return stage.at_combiner(replaced)


def check_closed(stages: Sequence[Stage], where: str) -> None:
    """Refuse a sequence of stages that would silently do nothing. Raises ValueError that names the two stages.

    A written field must be read before it is written again and before the end (X is always read at the end). After a
    stage that leaves one row, a rule that compares rows has nothing to compare.
    """
    stages = [s for stage in stages for s in in_turn(stage)]
    pending: dict[str, Stage] = {}
    reduced: Stage | None = None
    for stage in stages:
        traits = stage.traits
        if reduced is not None and (traits.kind != "row" or traits.reduces):
            raise ValueError(f"{where}: {stage} compares rows, but {reduced} before it leaves only one")
        for name in traits.reads:
            pending.pop(name, None)
        for name in sorted(traits.writes - {"X", "groups", "tasks"} - traits.broadcasts):
            if name in pending:
                raise ValueError(
                    f"{where}: {pending[name]} writes {name!r}, but {stage} overwrites it without reading it"
                )
            pending[name] = stage
        if traits.reduces:
            reduced = stage
    for name, writer in pending.items():
        after = stages[stages.index(writer) + 1 :]
        blame = f"{after[-1]} after it does not read it" if after else "nothing comes after it"
        raise ValueError(f"{where}: {writer} writes {name!r}, but {blame}, so it would have no effect")
