"""The peers of a run: what they have in common, what a round is given, who may hear whom, and the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Log
from fedloom.core.layout import Layout
from fedloom.engines.peers.probe import Probe
from fedloom.engines.peers.transport import Lost, Network
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation
from fedloom.federation.rounds.messages import Ledger, Payload, blank
from fedloom.federation.rounds.worker import Job, TrainDone, TrainJob
from fedloom.methods.method import Method
from fedloom.methods.peers.config import Warmup
from fedloom.methods.peers.graph import Graph, candidates
from fedloom.methods.peers.scenario import Scenario


@dataclass(frozen=True, eq=False)
class PeerContext:
    """What all peers of a run have in common, and the clients whose data is in reach (at a peer only itself, see `at`).

    `initial` are the parameters (p) that all start from. `probe` is what compares features and outputs of models.
    `held` is how many of all peers hold each task.
    """

    method: Method
    layout: Layout
    federation: BuiltFederation
    config: PeersSection
    seed: int
    rounds: int
    initial: Tensor
    probe: Probe | None = None
    held: Mapping[str, int] | None = None

    def at(self, name: str) -> PeerContext:
        """The same context at one peer, which has no data in reach but its own."""
        whole = self.federation
        return replace(self, federation=BuiltFederation(whole.tasks, {name: whole.clients[name]}, whole.unified))

    @cached_property
    def client(self) -> BuiltClient:
        """The peer whose context these are: the only client in reach."""
        (client,) = self.federation.clients.values()
        return client

    @cached_property
    def shared(self) -> Layout:
        """The parameters (d) that are exchanged in full scope."""
        return self.method.shared_part(self.layout)

    @cached_property
    def origin(self) -> Tensor:
        """Shared parameters (d) of the initial model."""
        return self.layout.parameters.take(self.initial, self.shared)

    @cached_property
    def by_task(self) -> bool:
        """Whether a peer has a vector for each task in place of one model."""
        return self.method.turn.by_task

    @cached_property
    def fine(self) -> float | None:
        """The threshold on outputs within a group; None where all of the model is mixed within the whole group."""
        groups = self.config.choose.groups
        return None if groups is None else groups.fine

    @cached_property
    def tells_update(self) -> bool:
        """Whether messages hold updates even to peers that started from another model.

        Methods that keep a model for each client look at updates, as at a server. Others mix models.
        """
        apart = not self.method.stage.traits.reduces and self.method.turn.start == "received"
        return not self.by_task and (apart or self._reads_start)

    @cached_property
    def tells_start(self) -> bool:
        """Whether messages also hold the model from which training started, where the receiver started elsewhere."""
        return self.tells_update and (self._reads_start or self.config.penalty > 0 or self.fine is not None)

    @property
    def _reads_start(self) -> bool:
        return "base" in self.method.stage.traits.reads

    def warmup(self, round: int) -> Warmup | None:
        """The settings of the warm-up in a round before its end; None afterwards."""
        warmup = self.config.warmup
        return warmup if warmup is not None and round < warmup.until else None

    def alone(self, round: int) -> bool:
        """Whether peers exchange nothing in a round."""
        return self.config.warmup is not None and round < self.config.warmup.alone

    def scope(self, round: int, adaptive: str) -> str:
        """What is exchanged in a round, "encoder" or "full"; `adaptive` is what the alignment of updates last said."""
        if (warmup := self.warmup(round)) is not None:
            return warmup.scope
        return adaptive if self.config.scope == "adaptive" else self.config.scope

    def part(self, scope: str) -> Layout:
        """The shared parameters in scope."""
        return self.shared if scope == "full" else self.shared.select("encoder")

    def buffers(self, scope: str) -> Layout:
        """The shared buffers in scope."""
        every = self.method.shared_buffers(self.layout)
        return every if scope == "full" else every.select("encoder")


@dataclass(frozen=True, eq=False)
class Environment:
    """What a round of peers is given.

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
    """The peers of a run and the network between them.

    `context` have in reach the peers of this process; `names` are all peers of the run, where others run elsewhere.
    """

    context: PeerContext
    connect: Callable[[Lost], Network] = Network
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.names = self.names or tuple(sorted(self.context.federation.clients))
        config = self.context.config
        self.scenario = config.scenario or Scenario()
        self.scenario.check(self.names)
        self.network = self.connect(None if config.scenario is None else self.scenario.lost)
        self._drawn: tuple[int, Graph] | None = None

    def graph(self, round: int) -> Graph:
        """Who may hear whom in a round: every peer can work it out."""
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
    update   what training did to it (d); zeros where there is a vector for each task, which `payload` has
    round    the peer's round in which it trained
    made     simulated time at which training ended, of peers that do not wait for each other
    """

    payload: Payload
    start: Tensor
    update: Tensor
    round: int
    made: float | None = None

    @staticmethod
    def of(context: PeerContext, payload: Payload, start: Tensor, round: int, made: float | None = None) -> Trained:
        """With the update out of the payload."""
        update = torch.zeros_like(start)
        if not context.by_task:  # a codec may keep the rows of several tasks packed
            like = blank(context.shared, context.federation, (payload.row,), update[None])
            update = context.method.codec.unpack(payload.packed, like)[0]
        return Trained(payload, start, update, round, made)

    @cached_property
    def model(self) -> Tensor:
        """The trained model (d)."""
        return self.start + self.update
