"""A community of quadratics: peers without a server, through real steps and real messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import Ctx, Method
from fedloom.core.context import State
from fedloom.core.settings.section import strict
from fedloom.engines.peers.community import Community, Environment, PeerContext
from fedloom.engines.peers.peer import first
from fedloom.engines.peers.rounds import AsynchronousRounds, at_rest, synchronous_round
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.messages import Ledger
from fedloom.federation.rounds.server import server_init
from fedloom.federation.rounds.worker import TrainDone
from fedloom.methods.peers.aggregation import at_peers
from fedloom.peers import Events
from quadratics import Quadratics
from tests_support import client_step


class Valleys:
    """Peers with F_k(y) = sum_i h_i (y_i - b_ki)^2 / 2. `peers` is the recipe section as a mapping."""

    def __init__(
        self,
        peers: Mapping[str, Any],
        h: Any,
        b: Any,
        method: Method | None = None,
        names: Sequence[str] | None = None,
        start: Any = None,
        **training: Any,
    ) -> None:
        self.config = strict(PeersSection, dict(peers))
        self.method = at_peers(method or Method(), self.config)
        h = [[float(h)]] * len(b) if torch.as_tensor(h).ndim == 0 else h
        q = Quadratics(self.method, h, b, **{"steps": 2, "optimizer": {"name": "sgd", "lr": 0.1}, **training})
        self.training = q.training
        if names is not None:  # the same peers under other names
            clients = {new: _named(q.federation.clients[old], new) for old, new in zip(q.names, names, strict=True)}
            q.federation = type(q.federation)(q.federation.tasks, dict(sorted(clients.items())))
            self.training = {new: q.training[old] for old, new in zip(q.names, names, strict=True)}
        self.federation, self.model = q.federation, q.model
        d = self.model.layout.d
        initial = torch.zeros(d, dtype=torch.float64) if start is None else torch.as_tensor(start).double()
        self.model.initial.copy_(initial)
        parts: tuple[Any, ...] = self.method, self.model.layout, self.federation, self.config
        self.community = Community(PeerContext(*parts, 0, 9, initial, None, None))  # no model to look into
        self.states: dict[str, State] = {
            name: first(server_init(self.method, self.model.layout, initial, {})) for name in self.federation.clients
        }
        self.clock, self.round = 0.0, 0
        self.gossip = None
        if self.config.mode == "asynchronous":
            self.gossip, self.pending = AsynchronousRounds(self.community), Events().state()
            self.states = {name: {**state, "pace": at_rest()} for name, state in self.states.items()}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.ledgers: list[Ledger] = []

    def train(self, jobs: Sequence[Any]) -> Iterable[TrainDone]:
        """Local training, in an order that nothing may depend on."""
        for job in reversed(jobs):
            client = self.federation.clients[job.client]
            ctx, training = Ctx(job.round, 0), self.training[job.client]
            payload, result, state = client_step(
                self.method, self.model, self.federation, client, job.message, job.state, ctx, training
            )
            yield TrainDone(client.id, payload, result, state, 0.0)

    def go(self, rounds: int = 1, members: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Run some rounds; the models of all peers."""
        for _ in range(rounds):
            self.round += 1
            self.ledgers.append(Ledger())
            there = self.community.scenario.alive(self.community.names, self.round)
            here = [name for name in there if members is None or name in members]

            def log(event: str, fields: dict[str, Any]) -> None:
                self.events.append((event, fields))

            def record(kind: str, fields: Any) -> None:
                if not callable(fields):
                    self.records.append((kind, fields))

            env = Environment(self.train, self.train, self.ledgers[-1], log, record)
            if self.gossip is not None:
                self.states, self.pending, _ = self.gossip.round(self.states, self.pending, self.round, here, env)
                self.clock = self.pending["now"]
                continue
            self.states, self.clock = synchronous_round(self.community, self.states, self.clock, self.round, here, env)
        return self.models

    @property
    def models(self) -> dict[str, Tensor]:
        """Of all peers."""
        return {name: state["server"]["model"] for name, state in self.states.items()}

    def recorded(self, kind: str) -> list[dict[str, Any]]:
        """Return what was recorded in all rounds."""
        return [fields for name, fields in self.records if name == kind]


def _named(client: Any, name: str) -> Any:
    return type(client)(**{**vars(client), "id": name})
