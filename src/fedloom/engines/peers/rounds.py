"""Learning without a server: every peer has its own model, data and files, and hears of others by messages only.

A synchronous round: all train; each publishes a signal to those who may hear it, chooses neighbours by the signals that
came, asks them for their models, and mixes what comes with its own by `server_step`. Models are sent before anybody
mixes, so all mix what was there at one instant, whatever the order. A peer is a client that is its own server: the
state of its model is that of `server_init`, and any method's aggregation runs at it (see `fedloom.stages.AtPeer`). For
peers that do not wait for each other see `fedloom.engines.peers.gossip`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import peers as blocks
from fedloom.core.context import State
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.gossip import Gossip, at_rest
from fedloom.engines.peers.peer import Peer, Trained, first
from fedloom.engines.peers.transport import InMemory, Mailbox, Network
from fedloom.peers.clock import Events, synchronous
from fedloom.rounds.built import Built
from fedloom.rounds.loading import load
from fedloom.rounds.messages import Message
from fedloom.rounds.rounds import Round
from fedloom.rounds.sampling import cohort
from fedloom.rounds.worker import Executor, Job, TrainJob
from fedloom.runs.ledger import Ledger
from fedloom.training.features import FeatureRecorder
from fedloom.training.flat import FlatModel, integer_buffers

_FEATURE_BATCHES, _OUTPUT_EXAMPLES = 50, 100  # as in the thesis' release


def initial_peers(built: Built) -> State:
    """The state of a run of peers before its first round. All start from the same model."""
    initial = built.layout.flatten(built.module).detach()
    free = built.recipe.peers is not None and built.recipe.peers.mode == "asynchronous"
    return {
        "round": 0,
        "peers": {
            name: {
                **first(built.method, built.layout, initial, integer_buffers(built.module)),
                **({"pace": at_rest()} if free else {}),
            }
            for name in built.federation.clients
        },
        "clock": 0.0,
        **({"events": Events().state()} if free else {}),
        "early": None,
        "stopped": False,
    }


def synchronous_round(
    community: Community,
    states: Mapping[str, State],
    clock: float,
    round: int,
    members: Iterable[str],
    train: Callable[[list[TrainJob]], Iterable[Trained]],
    evaluate: Callable[[Sequence[Job]], Iterable[Any]],
    ledger: Ledger,
    log: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
    record: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
) -> tuple[dict[str, State], float]:
    """One synchronous round: (states of all peers, the clock) after it. Absent peers do nothing."""
    there = {name: _peer(community, name, states[name]) for name in sorted(members) if community.network.here(name)}
    community.network.begin(round)
    jobs = [peer.begin(round, ledger, log, record) for peer in there.values()]
    times: dict[str, float] = {}
    for payload, state, steps in train(jobs):
        name = payload.row[0]
        there[name].trained(payload, state)
        times[name] = community.scenario.training(steps, name, round)
    time = _Time(community, community.network.known(times), log)
    graph = community.graph(round)
    for peer in there.values():
        peer.publish(graph, community.features)
    time.signals(there)
    for peer in there.values():
        peer.choose(evaluate)
    time.requests(there)
    for peer in there.values():
        peer.answer()
    time.models(there)
    for peer in there.values():
        peer.mix()
    for name in community.names:
        community.network.take(name)  # an absent peer hears nothing, not even later
    end = time.end(clock)
    if community.config.scenario is not None:
        record("clock", {"start": clock, "end": end})
    return {**states, **{name: peer.state for name, peer in there.items()}}, end


def _peer(community: Community, name: str, state: State) -> Peer:
    """A peer as its state says, whatever it did before."""
    wire, decode = InMemory(community.network, name), community.network.decode
    mailbox = Mailbox(name, community.layout.hash, wire, lambda event, fields: None, decode)
    return Peer(name, community, mailbox, state)


class _Time:
    """Simulated seconds of one round, counted from its start; what comes after the deadline is taken back."""

    def __init__(self, community: Community, training: Mapping[str, float], log: Any) -> None:
        self.scenario, self.deadline = community.scenario, community.config.deadline
        self.network, self.training, self.log = community.network, training, log
        self.last: dict[tuple[str, str], float] = {}
        self.chosen = dict(training)
        self.asked: dict[tuple[str, str], float] = {}

    def signals(self, peers: Mapping[str, Peer]) -> None:
        for sender, receiver, nbytes in self._sent(peers, "signal"):
            at = self.training[sender] + self.scenario.delay(nbytes, sender, receiver)
            if self._in_time(sender, receiver, "signal", at) and receiver in self.chosen:
                self.chosen[receiver] = max(self.chosen[receiver], at)

    def requests(self, peers: Mapping[str, Peer]) -> None:
        for sender, receiver, nbytes in self._sent(peers, "request"):
            at = self.chosen[sender] + self.scenario.delay(nbytes, sender, receiver)
            if self._in_time(sender, receiver, "request", at):
                self.asked[sender, receiver] = at

    def models(self, peers: Mapping[str, Peer]) -> None:
        for sender, receiver, nbytes in self._sent(peers, "model"):
            ready = max(self.training[sender], self.asked[receiver, sender])
            self._in_time(sender, receiver, "model", ready + self.scenario.delay(nbytes, sender, receiver))

    def end(self, start: float) -> float:
        """When the next round begins."""
        if not self.training:
            return start
        transfers = {pair: max(at - self.training[pair[0]], 0.0) for pair, at in self.last.items()}
        return synchronous(start, self.training, transfers, self.deadline).end

    def _sent(self, peers: Mapping[str, Peer], kind: str) -> list[tuple[str, str, int]]:
        mine = [(p.name, to, n) for p in peers.values() for (to, what), n in p.sent.items() if what == kind]
        return self.network.carry(mine)

    def _in_time(self, sender: str, receiver: str, kind: str, at: float) -> bool:
        self.last[sender, receiver] = max(at, self.last.get((sender, receiver), 0.0))
        if self.deadline is None or at <= self.deadline:
            return True
        if self.network.cancel(sender, receiver):
            self.log("message dropped", {"peer": receiver, "what": "late", "sender": sender, "kind": kind})
        return False


def community_of(
    built: Built, connect: Callable[[Callable[[int, str, str, int], bool] | None], Network] = Network
) -> Community:
    """The peers of a run, over a network of their own."""
    config = built.recipe.peers
    assert config is not None
    recipe = built.recipe
    scratch: list[FlatModel] = []

    def loaded(peer: Peer, vector: Tensor) -> FlatModel:
        """The network with a peer's shared parameters, and the rest as the peer has it."""
        if not scratch:
            scratch.append(FlatModel(copy.deepcopy(built.module), built.layout))
        server = peer.state["server"]
        load(built.method, scratch[0], Message(vector, server["buffers"], server["integers"]), peer.state["client"])
        scratch[0].module.eval()
        return scratch[0]

    def features(peer: Peer) -> Tensor:
        """Channel means and deviations of the trained encoder on some of the peer's training data."""
        model = loaded(peer, peer.model)
        recorder, seen, part = FeatureRecorder(model), [], peer.client.train
        names = tuple(peer.client.tasks)
        with torch.no_grad(), recorder.recording():
            for batch in part.index.split(recipe.training.batch_size)[:_FEATURE_BATCHES]:
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                model.module(x, names)
                seen.append(recorder.now)
        return blocks.feature_statistics(torch.cat(seen))

    def outputs(peer: Peer, vector: Tensor) -> dict[str, Tensor]:
        """A model's outputs (flat) for the peer's tasks on some of its validation data."""
        model, part, names = loaded(peer, vector), peer.client.part("val"), tuple(peer.client.tasks)
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        with torch.no_grad():
            for batch in part.index[:_OUTPUT_EXAMPLES].split(recipe.training.batch_size):
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                for name, output in model.module(x, names).items():
                    found[name].append(output.flatten())
        return {name: torch.cat(each) for name, each in found.items()}

    return Community(
        built.method,
        built.layout,
        built.federation,
        config,
        recipe.seed,
        recipe.training.rounds,
        built.layout.flatten(built.module).detach()[: built.layout.parameters.d],
        features,
        connect,
        outputs,
    )


def without_server(
    built: Built, connect: Callable[[Callable[[int, str, str, int], bool] | None], Network] = Network
) -> Callable[[Built, Executor, State, Round], tuple[State, Sequence[str]]]:
    """How a run of peers advances by a round (see `fedloom.rounds.rounds.run_rounds`) over a network of their own."""
    recipe, community = built.recipe, community_of(built, connect)
    gossip = Gossip(community) if community.config.mode == "asynchronous" else None

    def advance(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        there = community.scenario.alive(community.names, now.number)
        here = cohort(community.names, recipe.training.participation, recipe.seed, now.number)
        members = tuple(name for name in here if name in there)

        def train(jobs: list[TrainJob]) -> Iterable[Trained]:
            for payload in now.trained(executor, jobs):
                yield payload, now.clients[payload.row[0]], now.done[-1].result.steps

        if gossip is not None:
            with now.ledger.phase("train and mix"):
                states, events, active = gossip.round(
                    state["peers"],
                    state["events"],
                    now.number,
                    members,
                    train,
                    lambda jobs: ((d.payload, d.state, d.result.steps) for d in executor.run(jobs)),
                    executor.run,
                    now.ledger,
                    now.log,
                    now.record,
                )
            return {
                **state,
                "round": now.number,
                "peers": states,
                "events": events,
                "clock": events["now"],
            }, active
        with now.ledger.phase("train and mix"):
            states, clock = synchronous_round(
                community,
                state["peers"],
                state["clock"],
                now.number,
                members,
                train,
                executor.run,
                now.ledger,
                now.log,
                now.record,
            )
        return {**state, "round": now.number, "peers": states, "clock": clock}, members

    return advance
