"""Learning without a server: every peer has its own model, data and files, and learns of others by messages only.

In a synchronous round all peers train. Each sends a signal to the peers that may hear it, chooses neighbours by the
signals it received, asks them for their models, and mixes these with its own by `server_step`. All models are sent
before any peer mixes, so the order of peers does not matter. A peer is a client that is its own server: the state of
its model is that of `server_init`, and any method's aggregation runs at it (see `fedloom.stages.AtPeer`). For peers
that do not wait for each other see `fedloom.engines.peers.gossip`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedloom.core.context import Log, State
from fedloom.engines.peers.community import Community, Environment, PeerContext, Probe
from fedloom.engines.peers.gossip import AsynchronousRounds, at_rest
from fedloom.engines.peers.peer import Peer, first
from fedloom.engines.peers.transport import Lost, Mailbox, Network
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.round import Advance, Round
from fedloom.federation.rounds.worker import Executor, TrainDone, TrainJob
from fedloom.methods.peers.scenario import Events, synchronous
from fedloom.training.flat import integer_buffers


def initial_peers(built: Built) -> State:
    """Return the state of a run of peers before its first round. All start from the same model."""
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
    community: Community, states: State, clock: float, round: int, members: Iterable[str], env: Environment
) -> tuple[State, float]:
    """Run one synchronous round. Returns (states of all peers, the clock). Absent peers do nothing."""
    network, scenario = community.network, community.scenario
    network.begin(round)
    peers: dict[str, Peer] = {}
    for name in sorted(members):
        if network.here(name):
            context, ends = community.context.at(name), (partial(network.post, name), partial(network.take, name))
            mailbox = Mailbox(name, context.layout.hash, *ends, env.log, network.decode)
            peers[name] = Peer(context, mailbox, states[name], env)
    graph, turns, seconds = community.graph(round), dict[str, Iterator[None]](), dict[str, float]()
    for done in env.train([peer.begin(round) for peer in peers.values()]):
        turns[done.client] = peers[done.client].turns(done.payload, done.state, graph)
        seconds[done.client] = scenario.training(done.result.steps, done.client, round)
    time = _Time(community, network.known(seconds), env.log)
    # all peers finish a step before messages travel, so no peer hears a model that was mixed in this round
    for kind in ("signal", "request", "model"):
        for name in peers:
            next(turns[name])
        time.carry(kind, peers.values())
    for name in peers:
        next(turns[name], None)
    for name in community.names:
        network.take(name)  # an absent peer does not hear the messages of this round later, either
    end = time.end(clock)
    if community.context.config.scenario is not None:
        env.record("clock", {"start": clock, "end": end})
    return {**states, **{name: peer.state for name, peer in peers.items()}}, end


class _Time:
    """Simulated seconds of one round, counted from its start. Messages that miss the deadline are taken back."""

    def __init__(self, community: Community, training: Mapping[str, float], log: Log) -> None:
        self.scenario, self.deadline = community.scenario, community.context.config.deadline
        self.network, self.training, self.log = community.network, training, log
        self.last: dict[tuple[str, str], float] = {}
        self.chosen = dict(training)
        self.asked: dict[tuple[str, str], float] = {}

    def carry(self, kind: str, peers: Iterable[Peer]) -> None:
        """Let messages of one kind travel, and note when their receivers can act on them."""
        mine = [(p.name, to, nbytes) for p in peers for (to, what), nbytes in p.sent.items() if what == kind]
        for sender, receiver, nbytes in self.network.carry(mine):
            at = self._ready(kind, sender, receiver) + self.scenario.delay(nbytes, sender, receiver)
            self.last[sender, receiver] = max(at, self.last.get((sender, receiver), 0.0))
            if self.deadline is not None and at > self.deadline:
                if self.network.cancel(sender, receiver):
                    self.log("message dropped", {"peer": receiver, "what": "late", "sender": sender, "kind": kind})
            elif kind == "request":
                self.asked[sender, receiver] = at
            elif kind == "signal" and receiver in self.chosen:
                self.chosen[receiver] = max(self.chosen[receiver], at)

    def _ready(self, kind: str, sender: str, receiver: str) -> float:
        """Return when a message leaves: a request after the choice, a model after the request for it arrived."""
        if kind == "request":
            return self.chosen[sender]
        return max(self.training[sender], self.asked[receiver, sender]) if kind == "model" else self.training[sender]

    def end(self, start: float) -> float:
        """Return when the next round begins."""
        if not self.training:
            return start
        transfers = {pair: max(at - self.training[pair[0]], 0.0) for pair, at in self.last.items()}
        return synchronous(start, self.training, transfers, self.deadline).end


def community_of(built: Built, connect: Callable[[Lost], Network] = Network, names: Sequence[str] = ()) -> Community:
    """Return the peers of a run, over a network of their own; `names` are all peers, where some run elsewhere."""
    recipe, layout = built.recipe, built.layout
    assert recipe.peers is not None
    initial = layout.flatten(built.module).detach()[: layout.parameters.d]
    rounds = recipe.training.rounds
    federation = built.federation
    context = PeerContext(
        built.method, layout, federation, recipe.peers, recipe.seed, rounds, initial, Probe(built), federation.held
    )
    return Community(context, connect, tuple(names))


def without_server(built: Built, connect: Callable[[Lost], Network] = Network) -> Advance:
    """Return the function that advances a run of peers by a round, over a network of their own."""
    recipe, community = built.recipe, community_of(built, connect)
    free = AsynchronousRounds(community) if community.context.config.mode == "asynchronous" else None

    def advance(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        there = community.scenario.alive(community.names, now.number)
        here = cohort(community.names, recipe.training.participation, recipe.seed, now.number)
        members = [name for name in here if name in there]

        def train(jobs: list[TrainJob]) -> Iterator[TrainDone]:
            for payload in now.conspired(now.payloads(executor, jobs)):
                client = payload.row[0]
                done = next(each for each in reversed(now.done) if each.client == client)
                yield replace(done, payload=payload, state=now.clients[client])

        env = Environment(train, executor.run, now.ledger, now.log, now.record)
        with now.ledger.phase("train and mix"):
            if free is not None:
                peers, events, active = free.round(state["peers"], state["events"], now.number, members, env)
                after = {**state, "round": now.number, "peers": peers, "events": events, "clock": events["now"]}
                return after, active
            peers, clock = synchronous_round(community, state["peers"], state["clock"], now.number, members, env)
        return {**state, "round": now.number, "peers": peers, "clock": clock}, members

    return advance
