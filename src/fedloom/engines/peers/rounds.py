"""Learning without a server: every peer has its own model, data and files, and learns of others by messages only.

In a synchronous round all peers train. Each sends a signal to the peers that may hear it, chooses neighbours by the
signals it received, asks them for their models, and mixes these with its own by `server_step`. All models are sent
before any peer mixes, so the order of peers does not matter. A peer is a client that is its own server: the state of
its model is that of `server_init`, and any method's aggregation runs at it (see `fedloom.stages.AtPeer`).

In an asynchronous run peers do not wait for each other: gossip is driven by the arrival of messages, in simulated time.
A peer trains for as long as its speed says. Then it publishes its new version, mixes the models that have arrived with
its own, chooses among the peers it has heard from since its last choice, asks them for models, and trains on. A peer
answers a request at once with its latest version, also in the middle of training. A version is a peer's trained model
before it mixes; a receiver mixes it once. All times follow from a `Scenario`, so a run replays from its seed.

A recorded round ends when as many local rounds have ended as there are peers, or after `deadline` simulated seconds.
Churn, graphs, records and checkpoints follow recorded rounds. A peer that is away in one loses its local round and the
messages to it. Learning rates, warm-up and random numbers follow a peer's own local rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fedloom.core.context import Log, State
from fedloom.core.errors import RecipeError
from fedloom.engines.peers.community import Community, Environment, PeerContext, Probe, Trained
from fedloom.engines.peers.messages import Age, Heard, write
from fedloom.engines.peers.peer import Peer, first
from fedloom.engines.peers.transport import Lost, Mailbox, Network, Newest, PeerMessage, as_tensor
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.round import Advance, Round
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.worker import Executor, TrainDone, TrainJob
from fedloom.methods.peers.graph import Graph
from fedloom.methods.peers.scenario import Events, synchronous
from fedloom.models.build import is_whole


def initial_peers(built: Built) -> State:
    """Return the state of a run of peers before its first round. All start from the same model."""
    free = built.recipe.peers is not None and built.recipe.peers.mode == "asynchronous"
    peers: State = {}
    for name in built.federation.clients:
        peers[name] = {**first(initial_state(built)["server"]), **({"pace": at_rest()} if free else {})}
    events = {"events": Events().state()} if free else {}
    return {"round": 0, "peers": peers, "clock": 0.0, **events, "early": None, "stopped": False}


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


def at_rest() -> State:
    """Return a peer's pace before its first local round.

    done      simulated times at which its local rounds ended
    running   number of the event that ends its local round; None where it is in none
    asked     peer whose model is awaited -> whether it was chosen
    seen      newest round taken of each kind and sender
    inbox     messages that have arrived and wait
    version   the model that it offers to others, with the time when it was trained
    """
    return {"done": [], "running": None, "asked": {}, "seen": {}, "inbox": [], "version": {}}


class FreePeer(Peer):
    """A peer at its own pace. `events` gives the simulated time."""

    mailbox: Newest

    def __init__(self, name: str, community: Community, events: Events, state: State, env: Environment) -> None:
        context, pace = community.context.at(name), state["pace"]
        ends = name, context.layout.hash, self._post, self._fetch
        mailbox = Newest(*ends, env.log, community.network.decode, seen=pace["seen"])
        super().__init__(context, mailbox, {k: v for k, v in state.items() if k != "pace"}, env)
        self.scenario, self.events = community.scenario, events
        self.inbox = list(pace["inbox"])
        self._sent: tuple[bytes, Tensor] = b"", as_tensor(b"")
        self.done: list[float] = list(pace["done"])
        self.running: int | None = pace["running"]
        self.asked: dict[str, bool] = dict(pace["asked"])
        self.ages: list[Age] = []
        self.latest: Trained | None = None
        if version := pace["version"]:
            payload = Payload.of(name, version["payload"])
            start = version["base"]
            update = context.update_of(payload, start)
            self.latest = Trained(payload, start, update, version["round"], version["made"])

    def saved(self) -> State:
        """Return the state from which an equal peer can be made."""
        version: State = {}
        if (latest := self.latest) is not None:
            version = {"payload": latest.payload.tree(), "base": latest.start}
            version |= {"round": latest.round, "made": latest.ended}
        pace = {"done": self.done, "running": self.running, "asked": self.asked, "seen": self.mailbox.seen}
        inbox = [as_tensor(data) for data in self.mailbox.kept()]
        return {**self.state, "pace": {**pace, "inbox": inbox, "version": version}}

    def _post(self, receiver: str, data: bytes) -> None:
        """Put a message among the events, at the time when it will arrive."""
        if data is not self._sent[0]:  # one tensor for all receivers of a message
            self._sent = data, as_tensor(data)
        delay = self.scenario.delay(PeerMessage.size(data), self.name, receiver)
        self.events.put(delay, self.name, receiver, self._sent[1])

    def _fetch(self) -> list[bytes]:
        arrived, self.inbox = self.inbox, []
        return [tensor.numpy().tobytes() for tensor in arrived]

    def start(self) -> TrainJob:
        """Begin the next local round."""
        return self.begin(len(self.done) + 1)

    def finish(self, payload: Payload, client: State, graph: Graph) -> None:
        """End a local round: publish the new version, mix the models that have arrived, and ask for others."""
        if (trained := self.trained(payload, client, self.events.now)) is not None:
            self.latest = trained
            sent = self.publish(trained, graph)
            awaited = self.mix(trained, graph, self.asked)
            self.asked = {**awaited, **self.choose(trained, graph, sent)}
        self.done.append(self.events.now)
        self.running = None

    def hear(self, data: Tensor) -> None:
        """Take a message in. A request is answered at once, also in the middle of training."""
        self.inbox.append(data)
        self.answer(self.latest)

    def _ask(self, trained: Trained, names: Sequence[str]) -> None:
        """Ask for whole models, for other peers started elsewhere, and only for versions that have not come yet."""
        have, scope = self.mailbox.seen.get("model", {}), self.context.scope(self.round, self.state["scope"])
        for name in names:
            about = {"base": None, "scope": scope, "since": have.get(name, 0)}
            self._send([name], write(self.context, trained, "request", {}, about))

    def _wanted(self, trained: Trained, request: PeerMessage) -> bool:
        return trained.round > int(request.values["since"])

    def _age(self, message: PeerMessage) -> Age:
        ended = float(message.values["made"])
        return len(self.done) - bisect_left(self.done, ended), self.events.now - ended

    def _also(self, heard: Mapping[str, Heard]) -> dict[str, Any]:
        self.ages += [one.age for one in heard.values()]
        return {
            "local round": self.round,
            "time": self.events.now,
            "staleness": {name: one.age[0] for name, one in heard.items()},
            "age": {name: one.age[1] for name, one in heard.items()},
        }


class AsynchronousRounds:
    """All peers of an asynchronous run in one process.

    `running` has results that have not ended in simulated time; they are no part of the state, for training repeats.
    """

    def __init__(self, community: Community) -> None:
        self.community = community
        self.running: dict[str, TrainDone] = {}

    def round(
        self, states: State, before: State, round: int, members: Iterable[str], env: Environment
    ) -> tuple[State, State, list[str]]:
        """Run one recorded round. Returns (states, pending events, peers that ended); `before` was pending."""
        events = Events.of(before)
        community, start = self.community, events.now
        community.network.begin(round)
        here = {name: FreePeer(name, community, events, states[name], env) for name in sorted(members)}
        # local rounds that were running when the state was saved are trained again; `start` also sets a peer's round
        jobs = [peer.start() for peer in here.values() if peer.running is not None]
        for done in env.run([job for job in jobs if job.client not in self.running]):
            self.running[done.client] = done
        graph, deadline = community.graph(round), community.context.config.deadline
        ended: list[str] = []
        idle = [peer for peer in here.values() if peer.running is None]
        while deadline is not None or len(ended) < len(here):
            if idle and events.next > events.now:  # all at once, for workers to share
                self._begin(idle, env)
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
                    done = self.running.pop(name)
                    peer.finish(done.payload, done.state, graph)
                    ended.append(name)
                    idle.append(peer)
            elif not community.scenario.lost(0, sender, name, arrival.number):
                peer.hear(arrival.item)
        env.record("clock", {"start": start, "end": events.now, "local rounds": dict(sorted(Counter(ended).items()))})
        ages = [age for peer in here.values() for age in peer.ages]
        if ages:
            behind, seconds = Counter(behind for behind, _ in ages), [s for _, s in ages]
            histogram = {str(rounds): behind[rounds] for rounds in sorted(behind)}
            about = {"mean": sum(seconds) / len(seconds), "largest": max(seconds)}
            env.record("staleness", {"models": len(ages), "local rounds": histogram, "seconds": about})
        after: State = {}
        for name, state in states.items():
            if name in here:
                after[name] = here[name].saved()
            else:  # a peer that is away loses its local round
                self.running.pop(name, None)
                after[name] = {**state, "pace": {**state["pace"], "running": None}}
        return after, events.state(), sorted(set(ended))

    def _begin(self, peers: Sequence[FreePeer], env: Environment) -> None:
        """Begin local rounds now. How long they take is known once they are done, because steps are counted."""
        by_name = {peer.name: peer for peer in peers}
        for done in env.train([peer.start() for peer in peers]):
            peer = by_name[done.client]
            self.running[peer.name] = done
            # a local round without a step lasts as long as one step: otherwise time would stand still
            seconds = self.community.scenario.training(max(done.result.steps, 1), peer.name, peer.round)
            peer.running = peer.events.put(seconds, peer.name, peer.name).number


def community_of(built: Built, connect: Callable[[Lost], Network] = Network, names: Sequence[str] = ()) -> Community:
    """Return the peers of a run, over a network of their own; `names` are all peers, where some run elsewhere.

    Raises RecipeError for signals that the model or a peer's data cannot give.
    """
    recipe, layout = built.recipe, built.layout
    assert recipe.peers is not None
    if "features" in recipe.peers.similarity.signals and is_whole(built.module):
        raise RecipeError(
            "peers: similarity features reads the output of an encoder, but the model is one module; give an encoder: "
            "fl.model(encoder, heads='linear') or fl.model(encoder, heads={task: module})"
        )
    for signal in recipe.peers.similarity.measured:
        for client in built.federation.clients.values():
            if not any(len(client.val.of(task)) for task in client.tasks):
                raise RecipeError(
                    f"peers: similarity {signal} judges models on validation data, but those of client {client.id!r} "
                    f"have no label of its tasks ({', '.join(client.tasks)}); give some, or choose another signal"
                )
    initial = layout.flatten(built.module).detach()[: layout.parameters.d]
    rounds = recipe.training.rounds
    federation = built.federation
    context = PeerContext(
        built.method, layout, federation, recipe.peers, recipe.seed, rounds, initial, Probe(built), federation.held
    )
    return Community(context, connect, tuple(names), built.graph if built.whole and not names else None)


def without_server(built: Built, connect: Callable[[Lost], Network] = Network) -> Advance:
    """Return the function that advances a run of peers by a round, over a network of their own."""
    recipe, community = built.recipe, community_of(built, connect)
    free = AsynchronousRounds(community) if community.context.config.mode == "asynchronous" else None

    def advance(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        there = community.scenario.alive(community.names, now.number)
        here = cohort(community.names, recipe.training.participation, recipe.seed, now.number)
        members = [name for name in here if name in there]

        def train(jobs: list[TrainJob]) -> Iterator[TrainDone]:
            for payload in now.conspired(now.payloads(executor, jobs, counted=False)):
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
