"""The peers of a run: their common context, the environment of a round, who may hear whom, and the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.context import Log, State
from fedloom.core.layout import Layout
from fedloom.engines.peers.transport import Lost, Network
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.client import load
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Common
from fedloom.federation.rounds.messages import Ledger, Message, Payload, blank
from fedloom.federation.rounds.worker import Job, TrainDone, TrainJob
from fedloom.methods.peers.config import Warmup
from fedloom.methods.peers.graph import Graph, candidates
from fedloom.methods.peers.scenario import Scenario
from fedloom.methods.peers.similarity import feature_statistics
from fedloom.training.flat import FeatureRecorder, FlatModel
from fedloom.training.loop import task_losses

_FEATURE_BATCHES, _OUTPUT_EXAMPLES = 50, 100  # as in the thesis' release


class Probe:
    """A model that is run as a message (parameters and buffers) and a client's state (all else) have it."""

    def __init__(self, built: Built) -> None:
        self.built, self.batch = built, built.recipe.training.batch_size

    def features(self, client: BuiltClient, message: Message, state: State) -> Tensor:
        """Return channel means and deviations (2 x C) of the encoder on some of the client's training data."""
        model, names = self._loaded(message, state), tuple(client.tasks)
        recorder, seen, part = FeatureRecorder(model), [], client.train
        with torch.no_grad(), recorder.recording():
            for batch in part.index.split(self.batch)[:_FEATURE_BATCHES]:
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                model.module(x, names)
                seen.append(recorder.now)
        return feature_statistics(torch.cat(seen))

    def gradient(self, client: BuiltClient, message: Message, state: State, part: Layout) -> Tensor:
        """Return the gradient of the client's loss (eq. 4.2) over its data, in the columns of `part`; in eval mode."""
        model = self._loaded(message, state)
        model.grad.zero_()
        for examples, names in client.train.by_labels(client.tasks):
            tasks = {name: client.tasks[name] for name in names}
            for batch in examples.index.split(self.batch):
                x, targets = examples.examples.batch(batch, model.device, tasks=names)
                loss, _ = task_losses(model.module(x, names), targets, tasks)
                (loss * (len(batch) / len(examples))).backward()
        # a copy: where the columns follow each other this is a view, and the next peer uses the same model
        return model.layout.parameters.take(model.grad, part).clone()

    def outputs(self, client: BuiltClient, message: Message, state: State) -> dict[str, Tensor]:
        """Return outputs (flat) for the client's tasks on some of its validation data."""
        model, names = self._loaded(message, state), tuple(client.tasks)
        part = client.part("val")
        batches = part.index[:_OUTPUT_EXAMPLES].split(self.batch)
        with torch.no_grad():
            inputs = (part.examples.batch(batch, model.device, tasks=names)[0] for batch in batches)
            outputs = [model.module(x, names) for x in inputs]
        return {name: torch.cat([each[name].flatten() for each in outputs]) for name in names}

    def _loaded(self, message: Message, state: State) -> FlatModel:
        load(self.built.method, self._model, message, state)
        self._model.module.eval()
        return self._model

    @cached_property
    def _model(self) -> FlatModel:
        return FlatModel.copy_of(self.built.module)


@dataclass(frozen=True, eq=False)
class PeerContext(Common):
    """The common settings of all peers, and the clients whose data is in reach (at a peer only its own, see `at`).

    `initial` are the parameters (p) that all start from, `held` how many peers hold each task.
    """

    config: PeersSection
    seed: int
    rounds: int
    initial: Tensor
    probe: Probe
    held: Mapping[str, int]

    def at(self, name: str) -> PeerContext:
        """Return the context at one peer, which has no data in reach but its own."""
        whole = self.federation
        return replace(self, federation=BuiltFederation(whole.tasks, {name: whole.clients[name]}, whole.unified))

    @cached_property
    def client(self) -> BuiltClient:
        """The peer whose context these are: the only client in reach."""
        (client,) = self.federation.clients.values()
        return client

    @cached_property
    def origin(self) -> Tensor:
        """Shared parameters (d) of the initial model."""
        return self.layout.parameters.take(self.initial, self.shared)

    @cached_property
    def by_task(self) -> bool:
        """Return whether a peer has a vector for each task in place of one model."""
        return self.method.turn.by_task

    @cached_property
    def fine(self) -> float | None:
        """The threshold on outputs within a group; None where all of the model is mixed within the whole group."""
        groups = self.config.choose.groups
        return None if groups is None else groups.fine

    @cached_property
    def tells_update(self) -> bool:
        """Return whether messages always hold updates, as in methods with a model for each client."""
        apart = not self.method.stage.traits.reduces and self.method.turn.start == "received"
        return not self.by_task and (apart or self._reads_start)

    @cached_property
    def tells_start(self) -> bool:
        """Return whether messages also hold the model that training started from, if the receiver started elsewhere."""
        return self.tells_update and (self._reads_start or self.config.penalty > 0 or self.fine is not None)

    @property
    def _reads_start(self) -> bool:
        return "base" in self.method.stage.traits.reads

    def warmup(self, round: int) -> Warmup | None:
        """Return the settings of the warm-up in a round before its end; None afterwards."""
        warmup = self.config.warmup
        return warmup if warmup is not None and round < warmup.until else None

    @cached_property
    def first(self) -> int:
        """The first round in which peers exchange anything."""
        return 1 if self.config.warmup is None else self.config.warmup.alone

    def scope(self, round: int, adaptive: str) -> str:
        """Return the scope of a round, "encoder" or "full"; `adaptive` is the last one by the alignment of updates."""
        if (warmup := self.warmup(round)) is not None:
            return warmup.scope
        return adaptive if self.config.scope == "adaptive" else self.config.scope

    def update_of(self, payload: Payload, start: Tensor) -> Tensor:
        """Return what training did to `start` (d), as the payload says; zeros where a peer has a vector per task."""
        update = torch.zeros_like(start)
        if self.by_task:  # a codec may keep the rows of several tasks packed
            return update
        like = blank(self.shared, self.federation, (payload.row,), update[None])
        return self.method.codec.unpack(payload.packed, like)[0]

    def part(self, scope: str) -> Layout:
        """Return the shared parameters in scope."""
        return self.shared if scope == "full" else self.shared.select("encoder")

    def buffers(self, scope: str) -> Layout:
        """Return the shared buffers in scope."""
        return self.shared_buffers if scope == "full" else self.shared_buffers.select("encoder")


@dataclass(frozen=True, eq=False)
class Environment:
    """The services that a round of peers uses.

    train   trains clients, as they finish; losses and seconds go into the round's records
    run     runs any jobs without a trace in the records
    ledger  where bytes are counted
    log     takes (event, fields) that a person should see
    record  takes (kind, fields) for the run's records
    """

    train: Callable[[list[TrainJob]], Iterable[TrainDone]]
    run: Callable[[Sequence[Job]], Iterable[Any]]
    ledger: Ledger
    log: Log
    record: Callable[[str, Any], None]


@dataclass(eq=False)
class Community:
    """The peers of a run (`names`) and the network between them; `context` are those of this process."""

    context: PeerContext
    connect: Callable[[Lost], Network] = Network
    names: tuple[str, ...] = ()
    first: Graph | None = None
    """The graph of round 1, where it is drawn already."""

    def __post_init__(self) -> None:
        self.names = self.names or tuple(sorted(self.context.federation.clients))
        config = self.context.config
        self.scenario = config.scenario or Scenario()
        self.network = self.connect(None if config.scenario is None else self.scenario.lost)
        self._drawn = None if self.first is None else (1, self.first)

    def graph(self, round: int) -> Graph:
        """Return who may hear whom in a round: every peer can work it out."""
        section = self.context.config.graph
        when = round if section.every else 1  # one graph for the whole run is drawn once
        if self._drawn is None or self._drawn[0] != when:
            graph = candidates(
                section.name, self.names, seed=self.context.seed, round=when, every=section.every, **section.params
            )
            self._drawn = when, graph
        return self._drawn[1]


@dataclass(frozen=True, eq=False)
class Trained:
    """A peer's model between its local training and its mixing.

    payload  what training left, packed as it would go to a server
    start    where training started (d)
    update   what training did to it (d, see `PeerContext.update_of`)
    round    the peer's round in which it trained
    before   the model that training started from, and `kept`, the client's state then ({} if no signal is of that
             model) and after training
    ended    simulated time at which training ended, of peers that do not wait for each other
    digests  scope -> `digest` of where training started, once it was worked out
    """

    payload: Payload
    start: Tensor
    update: Tensor
    round: int
    ended: float | None = None
    before: Message | None = None
    kept: tuple[State, State] = ({}, {})
    digests: dict[str, str] = field(default_factory=dict)

    @cached_property
    def model(self) -> Tensor:
        """The trained model (d)."""
        return self.start + self.update

    def as_sent(self, when: Literal["trained", "received"]) -> tuple[Message, State]:
        """Return the model after or before training, as a message, and the client's state of that moment."""
        assert self.before is not None
        before, after = self.kept
        if when == "received":
            return self.before, before
        # where each task has a model of its own, there are rows of buffers, and none belongs to `model`
        alone, sent = replace(self.before, vector=self.model), self.payload
        if sent.buffers is None or sent.buffers.ndim > 1:
            return alone, after
        return replace(alone, buffers=sent.buffers, integers=sent.integers), after
