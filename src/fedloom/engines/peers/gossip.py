"""Peers that do not wait for each other: gossip driven by the arrival of messages, in simulated time.

A peer trains for as long as its speed says. Then it tells others that it has a new version, mixes the models that have
come by then with its own, chooses among those it has heard of since its last choice, asks them, and trains on. Whoever
is asked answers at once with its latest version, also in the middle of training. A version is a peer's trained model
before it mixes; a receiver mixes it once. All times come from a `Scenario`, so a run replays from its seed.

A recorded round, on which churn, graphs, records and checkpoints go by, ends when as many local rounds have ended as
peers are there, or after `deadline` simulated seconds. A peer that is away in a round loses the local round it was in,
and what is sent to it. Learning rates, warm-up and random numbers go by a peer's own local rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.peer import Peer, Trained
from fedloom.engines.peers.transport import Message as Letter
from fedloom.engines.peers.transport import Newest
from fedloom.peers.clock import Events
from fedloom.peers.graph import Graph
from fedloom.rounds.messages import Payload
from fedloom.rounds.worker import Job, TrainJob
from fedloom.runs.ledger import Ledger

Train = Callable[[list[TrainJob]], Iterable[Trained]]
Note = Callable[[str, dict[str, Any]], None]


def at_rest() -> State:
    """A peer's pace before its first local round.

    done      simulated times at which its local rounds ended
    running   which event ends the one it is in; None where it is in none
    asked     of whom a model is awaited -> whether it was chosen
    seen      newest round taken of each kind and sender
    inbox     messages that have come and wait
    version   the model that it tells others of, with when it was made
    """
    return {"done": [], "running": None, "asked": {}, "seen": {}, "inbox": [], "version": {}}


class Wire:
    """One peer's end of the network: a Transport whose messages are events."""

    def __init__(self, name: str, community: Community, events: Events, inbox: Iterable[Tensor]) -> None:
        self.name, self.scenario, self.events = name, community.scenario, events
        self.came = list(inbox)
        self._sent: tuple[bytes, Tensor] = b"", _as_tensor(b"")

    def send(self, receiver: str, data: bytes) -> None:
        if data is not self._sent[0]:  # one tensor for all receivers of a message
            self._sent = data, _as_tensor(data)
        self.events.put(self.scenario.delay(Letter.size(data), self.name, receiver), self.name, receiver, self._sent[1])

    def receive(self) -> list[bytes]:
        came, self.came = self.came, []
        return [tensor.numpy().tobytes() for tensor in came]


def _as_tensor(data: bytes) -> Tensor:
    """Bytes as a checkpoint can hold them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


class FreePeer(Peer):
    """A peer at its own pace. `now` gives the simulated time."""

    mailbox: Newest

    def __init__(self, name: str, community: Community, events: Events, state: State) -> None:
        pace = state["pace"]
        self.wire = Wire(name, community, events, pace["inbox"])
        decode = community.network.decode
        mailbox = Newest(name, community.layout.hash, self.wire, lambda event, fields: None, decode, pace["seen"])
        super().__init__(name, community, mailbox, {k: v for k, v in state.items() if k != "pace"})
        self.events = events
        self.done: list[float] = list(pace["done"])
        self.running: int | None = pace["running"]
        self.asked = dict(pace["asked"])
        self.made = 0.0
        self.ages: list[tuple[int, float]] = []
        if version := pace["version"]:
            self.hold(Payload.of(name, version["payload"]), version["base"], version["round"])
            self.made = version["made"]

    def saved(self) -> State:
        """The state from which an equal peer can be made."""
        version: State = {}
        if self.payload is not None:
            payload = self.payload.tree()
            version = {"payload": payload, "base": self.base, "round": self.version, "made": self.made}
        pace = {
            "done": self.done,
            "running": self.running,
            "asked": self.asked,
            "seen": self.mailbox.seen,
            "inbox": [_as_tensor(data) for data in self.mailbox.kept()],
            "version": version,
        }
        return {**self.state, "pace": pace}

    def attend(self, ledger: Ledger, log: Note, record: Note) -> None:
        """A recorded round begins."""
        self.ledger, self.log, self.record = ledger, log, record
        self.mailbox.log = log

    def start(self) -> TrainJob:
        """The local round after those that have ended."""
        return self.begin(len(self.done) + 1, self.ledger, self.log, self.record)

    def end(self, payload: Payload, client: State, graph: Graph, features: Any, evaluate: Any) -> None:
        """A local round ends."""
        if self.trained(payload, client):
            self.made = self.events.now
            self.publish(graph, features)
            self.mix()
            self.choose(evaluate)
        self.done.append(self.events.now)
        self.running = None

    def hear(self, message: Tensor) -> None:
        """A message has come; a request is answered at once."""
        self.wire.came.append(message)
        self.answer()

    def _letter(self, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Letter:
        return super()._letter(kind, tensors, {**values, "made": self.made})

    def _remembered(self) -> dict[str, float]:
        return dict(self.state["similarity"])

    def _ask(self, names: Sequence[str]) -> None:
        """Ask for whole models, for whoever answers has started elsewhere, and only for what is new."""
        have = self.mailbox.seen.get("model", {})
        for name in names:
            about = {"base": None, "scope": self._scope(), "since": have.get(name, 0)}
            self._send(name, self._letter("request", {}, about))

    def _newer(self, request: Letter) -> bool:
        return self.version > int(request.values["since"])

    def _age(self, letter: Letter) -> tuple[int, float]:
        """(own local rounds that have ended, simulated seconds) since the sender's version was made."""
        made = float(letter.values["made"])
        return len(self.done) - bisect_left(self.done, made), self.events.now - made

    def _aged(self, payload: Payload, letter: Letter | None = None) -> Payload:
        behind, seconds = (0, 0.0) if letter is None else self._age(letter)
        about = {"staleness": float(behind), "age": seconds}
        rows = len(payload.tasks)
        extra = {name: [v] * rows if rows else v for name, v in about.items() if name in self.method.extras}
        return replace(payload, extra={**payload.extra, **extra})

    def _also(self, letters: Mapping[str, Letter]) -> dict[str, Any]:
        ages = {name: self._age(letter) for name, letter in letters.items()}
        self.ages += ages.values()
        return {
            "local round": self.round,
            "time": self.events.now,
            "staleness": {name: behind for name, (behind, _) in ages.items()},
            "age": {name: seconds for name, (_, seconds) in ages.items()},
        }


@dataclass(eq=False)
class Gossip:
    """All peers of an asynchronous run in one process.

    `running` is what local training that has not ended yet will leave. It is no part of the state: training is a pure
    function of a peer's state, and is done again after a resume.
    """

    community: Community
    running: dict[str, Trained] = field(default_factory=dict)

    def round(
        self,
        states: Mapping[str, State],
        before: Mapping[str, Any],
        round: int,
        members: Iterable[str],
        train: Train,
        again: Train,
        evaluate: Callable[[Sequence[Job]], Iterable[Any]],
        ledger: Ledger,
        log: Note = lambda event, fields: None,
        record: Note = lambda kind, fields: None,
    ) -> tuple[dict[str, State], dict[str, Any], list[str]]:
        """One recorded round: (states of all peers, what has not happened yet, whose local rounds have ended).

        `before` is the second of the round before. `again` trains without leaving a trace, for what had begun before
        a resume.
        """
        events = Events.of(before)
        community, start = self.community, events.now
        community.network.begin(round)
        here = {name: FreePeer(name, community, events, states[name]) for name in sorted(members)}
        for peer in here.values():
            peer.attend(ledger, log, record)
        self._catch_up(here, again)
        graph, deadline = community.graph(round), community.config.deadline
        ended: list[str] = []
        idle = [peer for peer in here.values() if peer.running is None]
        while deadline is not None or len(ended) < len(here):
            if idle and events.next > events.now:  # all at once, for workers to share
                self._begin(idle, train)
                idle = []
            if deadline is not None and events.next > start + deadline:
                events.wait(start + deadline)
                break
            arrival = events.take()
            name, sender = arrival.receiver, arrival.sender
            if name not in here:
                continue
            peer = here[name]
            if name == sender:
                if arrival.number == peer.running:
                    payload, client, _ = self.running.pop(name)
                    peer.end(payload, client, graph, community.features, evaluate)
                    ended.append(name)
                    idle.append(peer)
            elif not community.scenario.lost(0, sender, name, arrival.number):
                peer.hear(arrival.item)
        record("clock", {"start": start, "end": events.now, "local rounds": dict(sorted(Counter(ended).items()))})
        ages = [age for peer in here.values() for age in peer.ages]
        if ages:
            behind, seconds = Counter(behind for behind, _ in ages), [s for _, s in ages]
            histogram = {str(rounds): behind[rounds] for rounds in sorted(behind)}
            about = {"mean": sum(seconds) / len(seconds), "largest": max(seconds)}
            record("staleness", {"models": len(ages), "local rounds": histogram, "seconds": about})
        away = {name: _interrupted(state) for name, state in states.items() if name not in here}
        for name in away:
            self.running.pop(name, None)
        after = {**away, **{name: peer.saved() for name, peer in here.items()}}
        return {name: after[name] for name in states}, events.state(), sorted(set(ended))

    def _begin(self, peers: Iterable[FreePeer], train: Train) -> None:
        """Local rounds that begin now; how long they take is known once they are done."""
        by_name = {peer.name: peer for peer in peers}
        for trained in train([peer.start() for peer in by_name.values()]):
            payload, _, steps = trained
            peer = by_name[payload.row[0]]
            self.running[peer.name] = trained
            # one that took no step lasts as long as one step, or time would stand still
            seconds = self.community.scenario.training(max(steps, 1), peer.name, peer.round)
            peer.running = peer.events.put(seconds, peer.name, peer.name).number

    def _catch_up(self, peers: Mapping[str, FreePeer], again: Train) -> None:
        """What was being trained when the state was saved."""
        lost = [peer for peer in peers.values() if peer.running is not None]
        jobs = [peer.start() for peer in lost]  # which also tells each the number of its local round
        for trained in again([job for job in jobs if job.client not in self.running]):
            self.running[trained[0].row[0]] = trained


def _interrupted(state: State) -> State:
    return {**state, "pace": {**state["pace"], "running": None}}
