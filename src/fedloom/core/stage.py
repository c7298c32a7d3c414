"""The one extension point of aggregation: Stage, and how stages follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.foreign import Foreign
from fedloom.core.layout import Layout
from fedloom.core.outline import Box
from fedloom.core.updates import Updates

Kind = Literal["row", "mix", "matrix"]
_KINDS: tuple[Kind, ...] = ("row", "mix", "matrix")
Presence = Literal["block", "row", "coupled"]
_PRESENCES: tuple[Presence, ...] = ("block", "row", "coupled")


@dataclass(frozen=True)
class Traits:
    """What a stage is like, for code that places it and provides what it needs.

    `reads` and `writes` name fields of Updates: X, n, weight, coef, base, support, extra:NAME or auxiliary:NAME.
    """

    kind: Kind = "row"
    """What it looks at: "row" each row alone (may run at the client), "mix" the rows' Gram matrix or extras
    (output = W X), "matrix" the columns of all rows."""
    reads: Set[str] = frozenset({"X"})
    writes: Set[str] = frozenset({"X"})
    wants: Set[str] = frozenset()
    """Fields that it uses if they exist."""
    broadcasts: Set[str] = frozenset()
    """What it broadcasts to clients beside the model, as "broadcast:NAME" (see `Stage.broadcast`)."""
    reduces: bool = False
    """K rows become one; with `by_task`, rows are (client, task) and become new task vectors, one per task, with the
    key ("*", task)."""
    by_task: bool = False
    paced: bool = False
    """Whether what it does depends on how many rounds the run will have."""
    hides: bool = False
    """Whether what comes out must not tell which rows came: it acts without any, and on blocks that no row has."""
    least: int = 0
    """With `hides`: the fewest rows that a result may be a mean of; 0: all that are expected."""
    numbers: bool = False
    """Whether it groups the rows of a round and the groups' numbers travel, so that all peers must find the same."""
    separable: bool = False
    """Treats every column alike, with Gram matrices and sums by `fedloom.core.spread`; so columns may lie apart."""
    presence: Presence | None = None
    """What moves a block where rows may lack blocks (`Updates.present`). "block": only what the rows that have it hold
    in it, so it ends where it would end in a federation of these clients alone. "row": also what these rows hold
    elsewhere, because one choice or one number of a row stems from all its blocks. "coupled": also rows that lack it,
    by design. None: the stage knows nothing of presence, and is refused where rows may lack blocks."""
    extras: Mapping[str, Foreign] = field(default_factory=dict, hash=False)
    """What one row's value of an extra that it reads must be, where it comes from a node: name -> `Number`, `Array` or
    the like of `fedloom.core.foreign`. One that is not named here may be a number or a short text."""

    def __post_init__(self) -> None:
        for name in ("reads", "writes", "wants", "broadcasts"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"Traits: {name} is a set of names, found the text {value!r}")
            object.__setattr__(self, name, frozenset(value))
        if self.presence not in (None, *_PRESENCES):
            raise ValueError(f"Traits: presence is {', '.join(_PRESENCES)} or None, found {self.presence!r}")

    @staticmethod
    def around(stages: Iterable[Stage], reduces: bool = False) -> Traits:
        """Traits of a stage that calls others on all its input. Fields other than X that they write stay inside."""
        each = [stage.traits for stage in stages]
        return Traits(
            kind=max((t.kind for t in each), key=_KINDS.index, default="row"),
            reads={"X"}.union(*(t.reads for t in each)),
            wants=set().union(*(t.wants for t in each)),
            reduces=reduces,
            separable=all(t.separable for t in each),
            paced=any(t.paced for t in each),
            numbers=any(t.numbers for t in each),
            extras={name: value for t in each for name, value in t.extras.items()},
            presence=min((t.presence for t in each), key=(None, *reversed(_PRESENCES)).index, default="block"),
        )


class Stage:
    """One step of aggregation: (updates, state, ctx) -> (updates, state). Never changes its inputs."""

    def __init_subclass__(cls) -> None:
        if old := {"kind", "reads", "writes", "wants", "tells", "reduces", "by_task", "separable"} & vars(cls).keys():
            raise TypeError(f"{cls.__name__}: {', '.join(sorted(old))} must be in one value, traits = Traits(...)")

    @cached_property
    def traits(self) -> Traits:
        """The stage's traits. A class with the same traits for all its stages says `traits = Traits(...)`."""
        return Traits()

    @property
    def inner(self) -> Sequence[Stage]:
        """The stages that it is made of."""
        return ()

    @property
    def robust(self) -> bool:
        """Whether no single row, however long, moves what comes out without bound: a robust rule, or one inside."""
        return any(stage.robust for stage in self.inner)

    @property
    def clients(self) -> Set[str]:
        """Names of the clients that it treats in a way of their own."""
        return frozenset().union(*(stage.clients for stage in self.inner))

    def unaware(self) -> Iterator[Stage]:
        """The stages in it, or itself, that do not say how they treat rows that lack blocks."""
        if self.traits.presence is None:
            deeper = [found for stage in self.inner for found in stage.unaware()]
            yield from deeper or [self]

    def unfit(self, rows: Updates | None) -> Iterator[str]:
        """Why it could not work, in sentences: of the rows of all clients, without values; None at a peer."""
        for stage in self.inner:
            yield from stage.unfit(rows)

    def too_few(self, rows: int) -> Iterator[str]:
        """Why it could not work with so many rows at most, wherever it runs, in sentences."""
        for stage in self.inner:
            yield from stage.too_few(rows)

    def init(self, layout: Layout) -> State:
        """State before the first round."""
        return {}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """What the local rules of these clients need: vectors over the stage's columns (d), or scalars (no dimension).

        `models` are the personal models (d) that the server has, of any client.
        """
        return {client: {} for client in clients}

    def preceded_by(self, stage: Stage) -> Stage:
        """This aggregation with one more stage just before the rows are combined."""
        return stage >> self

    def combined_by(self, stage: Stage) -> Stage:
        """This aggregation with another rule in place of its plain mean. Raises ValueError if it has none."""
        raise ValueError(f"{stage!r} takes the place of a mean, but {self!r} has none")

    def seen_from(self, own: str, **view: Any) -> Stage:
        """This aggregation at peer `own`; `view` are fields of `AtPeer`, which alone can be placed there."""
        raise ValueError(f"{self!r} is an aggregation at a server; AtPeer(stage) is one at peers")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        raise NotImplementedError

    def __rshift__(self, other: Stage) -> Chain:
        return Chain((*_flat(self), *_flat(other)))

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
        """The stage in words, for `str(method)` and the report."""
        return (Box.of(self),)


@dataclass(frozen=True)
class Identity(Stage):
    """Every row as it is: each client gets its own update back, which is local training (mixing matrix I)."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(writes=frozenset(), separable=True, presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates, state


@dataclass(frozen=True)
class Chain(Stage):
    """Stages one after another; `a >> b` makes one."""

    stages: tuple[Stage, ...]

    @property
    def inner(self) -> Sequence[Stage]:
        return self.stages

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
            broadcasts=set().union(*(one.broadcasts for one in each)),
            by_task=any(one.by_task for one in each),
            hides=any(one.hides for one in each),
        )

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        """What all members broadcast."""
        each = [s.broadcast(state[str(i)], clients, models) for i, s in enumerate(self.stages)]
        return {client: {k: v for one in each for k, v in one[client].items()} for client in clients}

    @property
    def _combiner(self) -> int:
        """Position of the member that combines the rows: the first that leaves one row, else the last member."""
        return next((i for i, s in enumerate(self.stages) if s.traits.reduces), len(self.stages) - 1)

    def _with(self, i: int, stage: Stage) -> Chain:
        return Chain((*self.stages[:i], *_flat(stage), *self.stages[i + 1 :]))

    def preceded_by(self, stage: Stage) -> Stage:
        """With `stage` before the member that combines the rows."""
        return self._with(self._combiner, self.stages[self._combiner].preceded_by(stage))

    def combined_by(self, stage: Stage) -> Stage:
        """With `stage` in place of the member that is a plain mean."""
        return self._with(self._combiner, self.stages[self._combiner].combined_by(stage))

    def init(self, layout: Layout) -> State:
        """One state per member, by position."""
        return {str(i): s.init(layout) for i, s in enumerate(self.stages)}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        new: State = {}
        for i, stage in enumerate(self.stages):
            updates, new[str(i)] = stage(updates, state[str(i)], ctx)
        return updates, new

    def __repr__(self) -> str:
        return " >> ".join(map(repr, self.stages))

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(box for stage in self.stages for box in stage.boxes)


def _flat(stage: Stage) -> Iterator[Stage]:
    yield from stage.stages if isinstance(stage, Chain) else (stage,)


def adds_up(stage: Stage) -> bool:
    """Whether a stage is a plain mean, in whose place another rule may stand: it needs only the sum of the rows."""
    other = Identity()
    try:
        return stage.combined_by(other) is other
    except ValueError:
        return False


def check_closed(stages: Sequence[Stage], where: str) -> None:
    """Refuse a sequence of stages that would silently do nothing.

    A written field must be read before it is written again and before the end (X is always read at the end). After a
    stage that leaves one row, a rule that compares rows has nothing to compare.

    Raises ValueError that names the two stages.
    """
    stages = [s for stage in stages for s in _flat(stage)]
    pending: dict[str, Stage] = {}
    reduced: Stage | None = None
    for stage in stages:
        traits = stage.traits
        if reduced is not None and (traits.kind != "row" or traits.reduces):
            raise ValueError(f"{where}: {stage!r} compares rows, but {reduced!r} before it leaves only one")
        for name in traits.reads:
            pending.pop(name, None)
        for name in sorted(traits.writes - {"X"}):
            if name in pending:
                raise ValueError(
                    f"{where}: {pending[name]!r} writes {name!r}, but {stage!r} overwrites it without reading it"
                )
            pending[name] = stage
        if traits.reduces:
            reduced = stage
    for name, writer in pending.items():
        after = stages[stages.index(writer) + 1 :]
        blame = f"{after[-1]!r} after it does not read it" if after else "nothing comes after it"
        raise ValueError(f"{where}: {writer!r} writes {name!r}, but {blame}, so it would change nothing")
