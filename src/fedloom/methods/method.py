"""A method as data: what happens at the client (what it trains, what it keeps), on the wire and at the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from fedloom.core.codecs import Codec, Raw
from fedloom.core.context import Fields, Row, State
from fedloom.core.errors import in_one_line
from fedloom.core.layout import EMPTY, Layout, Select, Selector, as_select
from fedloom.core.mean import Mean
from fedloom.core.outline import Box, Outline, listed
from fedloom.core.server import Plain, ServerRule
from fedloom.core.settings.section import Checked, found
from fedloom.core.stage import Chain, Identity, Stage, check_closed, combined_by, preceded_by
from fedloom.core.untrusted import Scalar, Untrusted
from fedloom.training.rules import LocalRule, Phase, Tune

if TYPE_CHECKING:
    from fedloom.models.changes import ModelChange

Pooled = Literal["all", "task"]
AGES: Fields = frozenset({"extra:staleness", "extra:age"})
"""A row's age among peers that do not wait: the peer's own local rounds, and simulated seconds, since it was made."""
PROVIDED: Fields = frozenset({"extra:steps", "extra:domain", "extra:tasks", "extra:classes"}) | AGES
"""Extras that a round can provide."""
EXTRAS = {
    "a": "a number that follows from its number of training steps",
    "classes": "the number of training examples of each class, of the first task among {}",
    "cluster": "which of several received models it trained",
    "domain": "the name of its domain",
    "edges": "the numbers of its links to other sites",
    "loss_received": "the loss of the received model on its validation examples",
    "loss_trained": "the loss of the trained model on its validation examples",
    "projections": "projections of its parameters, one for each link",
    "prototype_labels": "how many training examples are behind each mean of a class",
    "prototypes": "the mean features of each class of {} (with one training example, these are its own)",
    "share": "the share of its training examples that one of several received models fits best",
    "steps": "its number of training steps",
    "tasks": "the names of its tasks",
}
"""Extra, without a number at its end -> what a site that sends it tells; {} stands for its tasks that have classes."""


@dataclass(frozen=True)
class Received(Checked):
    """A client trains the model that it received, and sends one row. The base of all other turns."""

    start: ClassVar[Literal["received", "own"]] = "received"
    by_task: ClassVar[bool] = False
    """True if a client sends a row for each of its tasks."""
    beside: ClassVar[tuple[LocalRule, ...] | None] = None
    """Rules of a model of the client's own that is trained beside the shared one, if there is one."""
    apart: ClassVar[bool] = False
    """True if each task of a client trains as a client of its own."""
    pool: ClassVar[Pooled | None] = None
    """True if one party with all examples trains in the clients' place: one model for all, or one a task."""

    @property
    def plain(self) -> bool:
        """Return whether a client trains one model, with its own examples."""
        return not self.by_task and self.beside is None and self.pool is None

    def refused(self, method: Method) -> Iterator[str]:
        """Yield why a method cannot have such turns, in sentences."""
        if method.task_vectors:
            yield f"the method has one row per client, but {method.stage} returns one row per task"

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
            yield f"clients start from their own models, but {method.stage} returns one model for all"
        elif "X" in method.stage.traits.writes or method.server != Plain():
            blame = method.stage if "X" in method.stage.traits.writes else method.server
            yield f"clients start from their own models, so the result of {blame!r} would be lost"

    def kept(self, start: Tensor, update: Tensor) -> State:
        # with the values that the server receives, so that both have the same model
        return {"own": (start + update).to("cpu")}


@dataclass(frozen=True)
class Beside(Received):
    """A client trains the received model, and then a model of its own with these rules, which is never sent.

    It starts as the first received one. Its rules get the received model as the broadcast "anchor".
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
            f"{method.stage}, which returns one row per client": not method.stage.traits.reduces,
            "tuning": method.tune is not None,
            "the client's own model": method.own_model,
            "auxiliary vectors": bool(method.auxiliary),
            "what rows started from": "base" in method.stage.traits.reads,
            "what the server broadcasts": any(rule.needs for rule in method.rules),
        }
        yield from (
            f"one row per client and task cannot be combined with {what}" for what, there in reasons.items() if there
        )

    def rows(self, client: str, tasks: Sequence[str]) -> tuple[Row, ...]:
        return tuple((client, task) for task in sorted(tasks))


@dataclass(frozen=True)
class Apart(Received):
    """Each task of a client trains as a client of its own (see `Partition.by_task`), with a model of its own."""

    apart = True


@dataclass(frozen=True)
class InOnePlace(Received):
    """No federation: the examples of all lie in one place and train one model ("all"), or one per task ("task")."""

    pool: Pooled = "all"  # type: ignore[misc]

    def refused(self, method: Method) -> Iterator[str]:
        apart = not method.stage.traits.reduces or method.private is not None or method.own_model
        if self.pool == "all" and apart:
            yield "the pooled examples of all clients train one model for all clients"
        if self.pool == "task" and not method.shares_nothing:
            yield "the pooled examples of all clients train one model per task, so clients share nothing"


@dataclass(frozen=True)
class Method(Checked):
    """A federated method. It holds data only: runners own the loops.

    model    changes of the model before the first round
    local    what local training is made of: rules that add up; phases, parts of the model that are trained one after
             another; a tuning of personal models before these are measured or saved
    edge     stage at the client, before the codec; sees one row at a time
    codec    how an update travels; with rows (client, task), also how a client's task vectors come back to it
    stage    aggregation, at the server or at the peer
    server   the server's step with the result
    private  selector of blocks that never leave a client, or None
    turn     what a client does in its turn of a round: it trains the received model (`Received`), its own of its last
             round (`Own`), one of its own beside (`Beside`), or each of its tasks alone (`EachTask`), or as a client of
             its own (`Apart`); or no client does, for all examples lie in one place (`InOnePlace`)
    weights  a row's weight before any stage: its number of examples, as the client says with each answer (size) or as
             was known before the run (declared), or 1 (uniform)
    max_examples  largest number of examples that a row may count for, whatever a client claims, or None
    public   how many training examples go to no client, because every model predicts them: the public set of a
             federation that has none of its own (`module.public`)
    buffers  float buffers such as batch norm statistics: weighted mean over the clients that trained them, kept
             local, or pooled (variance = mean of variances + variance of means)
    """

    name: str = "fedavg"
    model: tuple[ModelChange, ...] = ()
    local: tuple[LocalRule | Phase | Tune, ...] = ()
    edge: Stage = Identity()
    codec: Codec = Raw()
    stage: Stage = Mean()
    server: ServerRule = Plain()
    private: Selector | None = None
    turn: Received = Received()
    weights: Literal["size", "declared", "uniform"] = "size"
    max_examples: int | None = None
    public: int = 0
    buffers: Literal["mean", "local", "pooled"] = "mean"

    def __post_init__(self) -> None:
        """Raise ValueError for a method that could not work or would silently do nothing."""
        super().__post_init__()
        for why in self._problems():
            raise ValueError(f"{self.name}: {why}")

    def _problems(self) -> Iterator[str]:
        """Yield why the method could not work, in sentences."""
        edge, stage = self.edge.traits, self.stage.traits
        if not in_one_line(self.name):
            yield f"{self.name!r} found, expected a name in one line"
        if edge.kind != "row" or edge.reduces:
            yield f"{self.edge!r} compares rows, so it cannot run at the client (edge)"
        if not isinstance(self.edge, Identity) and self.shares_nothing:
            yield f"{self.edge!r} would have no effect, because everything is private"
        if self.shares_nothing and not isinstance(self.stage, Identity) and not stage.broadcasts:
            yield f"{self.stage} would have no effect, because everything is private"
        if lost := sorted(f for f in edge.writes - {"X"} if not f.startswith("extra:")):
            yield f"{self.edge!r} writes {lost[0]!r} at the client (edge), which the client does not send"
        yield from self.turn.refused(self)
        check_closed([self.edge, self.stage], self.name)
        if alone := sorted(f for f in edge.reads if f == "base" or f.startswith("auxiliary:")):
            yield f"{self.edge!r} reads {alone[0]!r}, which exists only at the server"
        provided = PROVIDED.union(edge.writes, *(rule.provides for rule in self.rules))
        beside = {f for f in edge.reads | stage.reads if f.startswith(("extra:", "auxiliary:"))}
        if missing := sorted(beside - provided):
            yield f"{self.stage} reads {', '.join(missing)}, which no local rule provides"
        for rule in self.rules:
            if unheard := sorted(rule.needs - stage.broadcasts):
                yield f"{rule!r} needs {', '.join(unheard)}, which no stage at the server broadcasts"

    def plus(self, stage: Stage, at: Literal["edge", "server"] = "edge") -> Method:
        """Return the method with one more stage, added to its name: 'fedavg + TopMagnitude(rho=0.3)'.

        At the client it comes after the stages there. At the server it comes just before the rows are combined, so
        after the method's own changes to the rows and after stages added earlier.
        """
        if at not in ("edge", "server"):
            raise ValueError(f"{self.name}: at={found(at)} found, expected 'edge' (at the client) or 'server'")
        if at == "edge":
            edge = stage if isinstance(self.edge, Identity) else self.edge >> stage
            return replace(self, edge=edge)._called(stage)
        if self.shares_nothing:
            raise ValueError(f"{self.name}: {stage} would have no effect, because everything is private")
        return replace(self, stage=preceded_by(self.stage, stage))._called(stage, " at the server")

    def combined_by(self, stage: Stage) -> Method:
        """Return the method with another rule in place of its mean. Raises ValueError if it has none."""
        try:
            combined = combined_by(self.stage, stage)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return replace(self, stage=combined)._called(stage)

    def with_local(self, rule: LocalRule) -> Method:
        """Return the method with one more rule of local training."""
        return replace(self, local=(*self.local, rule))._called(rule)

    def _called(self, part: Stage | LocalRule, where: str = "") -> Method:
        """Return the method with the name of a part that was added."""
        return replace(self, name=f"{self.name} + {_short(part)}{where}")

    @cached_property
    def rules(self) -> tuple[LocalRule, ...]:
        """The rules of local training."""
        return tuple(part for part in self.local if isinstance(part, LocalRule))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of local training; without any, all of the model is trained at once."""
        return tuple(part for part in self.local if isinstance(part, Phase))

    @cached_property
    def tune(self) -> Tune | None:
        """The training of a personal model before it is measured or saved, if there is one."""
        return next((part for part in self.local if isinstance(part, Tune)), None)

    @property
    def task_vectors(self) -> bool:
        """Return whether the server keeps a vector for each task, not one model."""
        return "tasks" in self.stage.traits.writes

    @property
    def own_model(self) -> bool:
        """Return whether clients keep a whole model of their own beside what they share."""
        return self.turn.beside is not None or any(rule.keeps_model for rule in self.rules)

    @property
    def shares_nothing(self) -> bool:
        """Return whether every parameter stays with its client."""
        return self.private is not None and as_select(self.private) == Select()

    @cached_property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of the auxiliary vectors that the stage reads: only these travel."""
        return tuple(
            sorted(f.removeprefix("auxiliary:") for f in self.stage.traits.reads if f.startswith("auxiliary:"))
        )

    @cached_property
    def extras(self) -> frozenset[str]:
        """Names of the extras that some stage uses: only these travel."""
        return frozenset(f.removeprefix("extra:") for f in self._used if f.startswith("extra:"))

    @cached_property
    def extra_values(self) -> dict[str, Untrusted]:
        """Return what a row's value of each extra must be, as the stages that use it declare."""
        declared = {**self.edge.traits.extras, **self.stage.traits.extras}
        return {name: declared.get(name, Scalar()) for name in sorted(self.extras)}

    @cached_property
    def wants_support(self) -> bool:
        """Return whether some stage uses the support: which blocks each row's training changed."""
        return "support" in self._used

    @cached_property
    def counts_examples(self) -> bool:
        """Return whether a weight or a stage reads how many examples a row covers; otherwise 1 travels."""
        return self.weights != "uniform" or "n" in self._used

    @cached_property
    def _used(self) -> frozenset[str]:
        """Fields of Updates that some stage reads or wants."""
        edge, stage = self.edge.traits, self.stage.traits
        return frozenset().union(edge.reads, edge.wants, stage.reads, stage.wants)

    def private_part(self, layout: Layout) -> Layout:
        """Return the parameters that stay with a client."""
        if self.private is None:
            return EMPTY
        return layout.parameters.select(as_select(self.private))

    def shared_part(self, layout: Layout) -> Layout:
        """Return the parameters that are aggregated: the columns of the matrix of updates."""
        return layout.parameters if self.private is None else layout.parameters.without(self.private_part(layout))

    def shared_buffers(self, layout: Layout) -> Layout:
        """Return float buffers that may leave a client: all but those of private modules."""
        shared = Layout(tuple(b for b in layout.buffers.blocks if b.part != "private"))
        return shared if self.private is None else shared.without(shared.select(as_select(self.private)))

    @property
    def outline(self) -> Outline:
        """Return the description of the method, place by place."""
        rules = [Box.of(rule) for rule in self.rules] or [Box("the tasks' losses only")]
        beside = [] if self.turn.beside is None else [Box("Stream", f"rules={self.turn.beside!r}")]
        more = [*map(Box.of, self.phases), *beside, *([] if self.tune is None else [Box.of(self.tune)])]
        by_task = ("one row a client and task",) if self.turn.by_task or self.turn.apart else ()
        weights = self.weights if self.max_examples is None else f"{self.weights}, at most {self.max_examples} examples"
        return Outline(
            local=(*(Box.of(change, after=" of the model") for change in self.model), *rules, *more),
            edge=self.edge.boxes,
            wire=Box.of(self.codec, f"private: {self.private or 'nothing'}", *by_task),
            server=(*self.stage.boxes, Box.of(self.server, f"weights: {weights}", f"buffers: {self.buffers}")),
            start=self.turn.start,
        )

    def __str__(self) -> str:
        outline = self.outline
        private, *by_task = outline.wire.facts
        wire = "; ".join([repr(self.codec), private, f"starts from: {outline.start} model", *by_task])
        places = {"local training": outline.local, "client, before sending": outline.edge, "server": outline.server}
        local, edge, server = (f"{place}:\n{listed(boxes)}" for place, boxes in places.items())
        return "\n".join([f"method {self.name}", local, edge, f"on the wire: {wire}", server])


def _short(part: Stage | LocalRule) -> str:
    """Return a part's class with those of its fields that are not as by default: TopMagnitude(rho=0.3)."""
    if isinstance(part, Chain):
        return " >> ".join(map(_short, part.stages))
    known: tuple[Field[Any], ...] = fields(part) if is_dataclass(part) else ()
    settings = [f"{f.name}={v!r}" for f in known if f.repr and repr(v := getattr(part, f.name)) != repr(f.default)]
    return type(part).__name__ + (f"({', '.join(settings)})" if settings else "")
