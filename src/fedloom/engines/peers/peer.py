"""One peer: its state, its turns in a round, and the mixing of its own model with those of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import Raw
from fedloom.core.context import Ctx, State
from fedloom.engines.peers import messages
from fedloom.engines.peers.community import Environment, PeerContext, Trained
from fedloom.engines.peers.messages import NEW, Age, Heard
from fedloom.engines.peers.transport import Mailbox, PeerMessage
from fedloom.federation.rounds.diagnostics import sampled
from fedloom.federation.rounds.federation import BuiltFederation, Common
from fedloom.federation.rounds.messages import ALL, Message, Payload, clip_counts, rows_of
from fedloom.federation.rounds.recovery import was_lost
from fedloom.federation.rounds.server import dispatch, server_step
from fedloom.federation.rounds.worker import TrainJob
from fedloom.methods.peers.aggregation import AtPeer
from fedloom.methods.peers.graph import Graph
from fedloom.methods.peers.neighbours import recent, soft_weights


@dataclass(frozen=True, eq=False)
class Mix:
    """The models that one peer mixes in a round: its own and `chosen` ones. Others `heard` serve the penalty."""

    context: PeerContext
    federation: BuiltFederation
    graph: Graph
    own: Trained
    heard: Mapping[str, Heard]
    chosen: Sequence[str]

    def into(self, state: State, env: Environment) -> tuple[State, dict[str, Any]]:
        """Mix. Returns the peer's new state, and the fields of its record."""
        context, me = self.context, self.context.client.id
        scope, shares = context.scope(self.own.round, state["scope"]), self._shares(state["similarity"])
        alike = frozenset[str]()
        if context.fine is not None and scope == "full":
            alike = messages.close(context, self.own, {name: self.heard[name] for name in self.chosen})
        server = self._server(state["server"], scope, shares, alike, env)
        new = {**state, "server": server}
        if context.method.turn.start == "own":
            new["known"] = {**{name: self._model(name) for name in self.heard}, me: server["model"]}
        if context.config.penalty:
            new["told"] = self._pull(scope)
        total = math.fsum(shares.values())
        return new, {
            "neighbours": [*self.chosen],
            "weights": {name: share / total for name, share in shares.items()} if total else shares,
            "similarity": dict(state["similarity"]),
            "scope": scope,
            **({"close": sorted(alike)} if context.fine is not None else {}),
        }

    def _shares(self, similarity: Mapping[str, float]) -> dict[str, float]:
        """Return the weights of the own model and of the chosen ones."""
        me, config, names = self.context.client.id, self.context.config.weights, sorted(self.chosen)
        kind = config.kind
        if kind == "metropolis":
            degree = {name: len(self.graph.senders(name)) for name in (me, *names)}
            shares = {name: 1 / (1 + max(degree[me], degree[name])) for name in names}
            return {me: 1 - math.fsum(shares.values()), **shares}
        if self.context.warmup(self.own.round) is not None:
            kind = "uniform"
        if kind == "soft":
            known = {name: similarity.get(name, math.nan) for name in names}
            return soft_weights(me, known, names, include_self=config.include_self, step=config.step)
        payloads = {me: self.own.payload, **{name: self.heard[name].payload for name in names}}
        sizes = dict.fromkeys(payloads, 1.0)
        if kind == "size":
            common = replace(self.context, federation=self.federation)  # it knows whose models are mixed
            sizes = {name: clip_counts(common, p).n for name, p in payloads.items()}
        return sizes if config.include_self or not names else {**sizes, me: 0.0}

    def _server(
        self, before: State, scope: str, shares: Mapping[str, float], alike: frozenset[str], env: Environment
    ) -> State:
        """Return the state of the peer's model after `server_step`, from the one before."""
        context, method, own = self.context, self.context.method, messages.aged(self.context, self.own.payload, NEW)
        me, by_task = context.client.id, context.by_task
        inside = None if scope == "full" and context.fine is None else frozenset(context.part("encoder").names)
        assert isinstance(method.stage, AtPeer)
        stage = replace(method.stage, own=me, shares=None if by_task else shares, scope=inside, whole=alike)
        row = own if by_task else messages.as_row(context, context.federation, own, self.own.update)
        starts = {me: self.own.start, **{name: one.start for name, one in self.heard.items()}}
        method = replace(method, stage=stage, codec=method.codec if by_task else Raw())
        common = Common(method, context.layout, self.federation)
        targets = rows_of(common, sorted([me, *self.chosen]))
        now = self.own.round, context.seed, targets, len(self.graph.peers), context.rounds
        ctx = Ctx(*now, log=env.log, record=env.record, peer=me, held=context.held)
        payloads = [row, *(self.heard[name].payload for name in self.chosen)]
        server = server_step(common, payloads, before, ctx, starts if context.tells_start else None)
        if scope != "full" and own.buffers is not None:
            # buffers out of scope are not exchanged, so they stay as local training left them
            every, part = context.shared_buffers, context.buffers(scope)
            merged = every.take(server["buffers"], part)
            server = {**server, "buffers": every.put(own.buffers.clone(), part, merged)}
        return server

    def _pull(self, scope: str) -> dict[str, Tensor]:
        """Return the target of the penalty between groups in the next round: the mean of others' models, and mu."""
        context, like = self.context, self.own.start
        total, count, pull = torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like)
        inside = set(context.part(scope).names)
        for name in (name for name in self.heard if name not in self.chosen):
            have = self.federation.presence(context.shared, [(name, None)])
            for i, (block, s) in enumerate(zip(context.shared.blocks, context.shared.slices, strict=True)):
                if block.name in inside and (have is None or bool(have[0, i])):
                    total[s] += self._model(name)[s]
                    count[s] += 1
        pull[count > 0] = context.config.penalty
        return {"others": total / count.clamp(min=1), "pull": pull}

    def _model(self, name: str) -> Tensor:
        model = self.heard[name].model
        assert model is not None
        return model


def first(server: State) -> State:
    """Return one peer's state before the first round, with the state of its model as a server has it."""
    return {"server": server, "client": {}, "similarity": {}, "scope": "full", "told": {}, "known": {}}


class Peer:
    """One peer: its state, its own data, its mailbox. The data and state of other peers are never in its reach.

    Each step of a round takes the results of the steps before it. A peer whose training failed sits the round out.
    """

    def __init__(self, context: PeerContext, mailbox: Mailbox, state: State, env: Environment) -> None:
        self.context, self.mailbox, self.state, self.env = context, mailbox, state, env
        self.name = context.client.id
        self.round = 0
        self.sent: dict[tuple[str, str], int] = {}
        """(receiver, kind of message) -> bytes, where messages take time."""

    def begin(self, round: int) -> TrainJob:
        """Begin a round, and return the job of local training."""
        self.round, context, server = round, self.context, self.state["server"]
        if self.state["known"]:  # the method makes broadcasts from the models of all clients that it knows
            server = {**server, "personal": self.state["known"]}
        message = dispatch(context, server, [self.name])[self.name]
        # what the penalty between groups pulls towards, as the last mix left it
        message = replace(message, broadcast={**message.broadcast, **self.state["told"]})
        return TrainJob(self.name, round, message, self.state["client"])

    def turns(self, payload: Payload, client: State, graph: Graph) -> Iterator[None]:
        """Do a synchronous round after training; yield wherever signals, requests or models must be carried."""
        trained = self.trained(payload, client)
        sent = self.publish(trained, graph)
        yield
        asked = self.choose(trained, graph, sent)
        yield
        self.answer(trained)
        yield
        self.mix(trained, graph, asked)

    def trained(self, payload: Payload, client: State, ended: float | None = None) -> Trained | None:
        """Take over the result of local training, at the simulated time `ended`; None where training failed."""
        if not payload.finite:
            self._roll_back("local training gave nan or inf")
            return None
        server, first = self.state["server"], self.context.config.similarity.model == "received"
        start = self.context.method.server.dispatch(server["model"], server["rule"][ALL])
        before = Message(start, server["buffers"], server["integers"])
        kept = self.state["client"] if first else {}, client
        self.state = {**self.state, "client": client}
        return Trained(payload, start, self.context.update_of(payload, start), self.round, ended, before, kept)

    def publish(self, trained: Trained | None, graph: Graph) -> Mapping[str, Tensor]:
        """Send the signals by which others judge this peer to all peers that may hear it; return them."""
        if trained is None or self.round < self.context.first:
            return {}
        now = bool(messages.due(self.context, self.round))
        tensors = messages.signals(self.context, trained) if now else {}
        about = {"tasks": self.context.client.shares, "due": now}
        self._send(graph.receivers(self.name), messages.write(self.context, trained, "signal", tensors, about))
        return tensors

    def choose(self, trained: Trained | None, graph: Graph, sent: Mapping[str, Tensor]) -> dict[str, bool]:
        """Judge the senders of signals by the own ones that were `sent`, and ask some for models.

        Returns peer asked -> whether it was chosen.
        """
        candidates = frozenset(graph.senders(self.name))
        told = {message.sender: message for message in self._receive("signal") if message.sender in candidates}
        if trained is None:  # after the messages were read: unread, they would count as late in the next round
            return {}
        new: State = {"similarity": {}}
        if judged := {name: message for name, message in told.items() if message.values["due"]}:
            own = sent or messages.signals(self.context, trained)
            new = messages.judge(self.context, trained, self.state, own, judged, self.env.run)
        # where all judge anew at one instant, older similarities are out of date
        anew = bool(messages.due(self.context, self.round)) and self.context.config.mode == "synchronous"
        known = {**({} if anew else self.state["similarity"]), **new["similarity"]}
        self.state = {**self.state, **new, "similarity": known}
        if self.round < self.context.first:  # others, at their own pace, may already send
            return {}
        counting = similarity = {name: known.get(name, math.nan) for name in told}
        rate, last = self.context.config.choose.recency, self.state.get("chosen", {})
        if rate is not None:
            counting = recent(similarity, {name: self.round - when for name, when in last.items()}, rate)
        neighbours = messages.chosen(self.context, counting, self.state.get("group", ()))
        if rate is not None:
            self.state = {**self.state, "chosen": {**last, **dict.fromkeys(neighbours, self.round)}}
        asked = sorted(similarity if self.context.config.penalty else neighbours)
        self._ask(trained, asked)
        return {name: name in neighbours for name in asked}

    def answer(self, trained: Trained | None) -> None:
        """Send the model, or to peers that started from the same one the update alone, to those that asked."""
        written: dict[tuple[bool, str], PeerMessage] = {}
        for request in self._receive("request"):
            if trained is None or not self._wanted(trained, request):
                continue
            scope = str(request.values["scope"])
            same = self.context.by_task or request.values["base"] == messages.digest(self.context, trained, scope)
            if (same, scope) not in written:
                written[same, scope] = messages.model_message(self.context, trained, same, scope)
            self._send([request.sender], written[same, scope])

    def mix(self, trained: Trained | None, graph: Graph, asked: Mapping[str, bool]) -> dict[str, bool]:
        """Mix the own model and those of `asked` that arrived. Returns those of `asked` that did not."""
        arrived = {message.sender: message for message in self._receive("model") if message.sender in asked}
        if trained is None:
            return dict(asked)
        federation = messages.acquainted(self.context, arrived.values())
        heard = {name: messages.read(self.context, one, trained, self._age(one)) for name, one in arrived.items()}
        mix = Mix(self.context, federation, graph, trained, heard, [name for name in heard if asked[name]])
        before = self.state["server"]
        self.state, about = mix.into(self.state, self.env)
        # all of them at all peers would be N squared numbers
        if not sampled(self.name, 1 + max(len(graph.senders(self.name)), len(about["similarity"]))):
            about = {k: v for k, v in about.items() if k not in ("neighbours", "weights", "similarity")}
        self.env.record("peer", {"peer": self.name, **about, **self._also(heard)})
        self._keep(before)
        return {name: was_chosen for name, was_chosen in asked.items() if name not in heard}

    def _keep(self, before: State) -> None:
        """Keep the model for a later rollback, or go back to the kept one where the mix failed."""
        every, server = self.context.config.rollback, self.state["server"]
        if every is None:
            return
        if was_lost(before, server):
            self._roll_back("the mix failed")
        elif self.round % every == 0:
            self.state = {**self.state, "kept": server}

    def _roll_back(self, why: str) -> None:
        """Go back to the kept model, if there is one."""
        if kept := self.state.get("kept"):
            self.state = {**self.state, "server": kept}
            self.env.log("rolled back", {"peer": self.name, "why": why})

    def _ask(self, trained: Trained, names: Sequence[str]) -> None:
        scope = self.context.scope(self.round, self.state["scope"])
        about = {"base": messages.digest(self.context, trained, scope), "scope": scope}
        self._send(names, messages.write(self.context, trained, "request", {}, about))

    def _wanted(self, trained: Trained, request: PeerMessage) -> bool:
        """Return whether the model is new to the peer that asks for it."""
        return True

    def _age(self, message: PeerMessage) -> Age:
        """Return the age of the model in a message: in a synchronous round all are new."""
        return NEW

    def _also(self, heard: Mapping[str, Heard]) -> dict[str, Any]:
        """Return further fields of the record of a mix."""
        return {}

    def _send(self, receivers: Sequence[str], message: PeerMessage) -> None:
        for receiver in receivers:
            self.mailbox.send(receiver, message)
            if self.context.config.scenario is not None:  # otherwise messages take no time, and nobody reads this
                self.sent[receiver, message.kind] = message.nbytes
            _add(self.env.ledger.up.setdefault(self.name, {}), messages.count(self.context, message))

    def _receive(self, kind: str) -> list[PeerMessage]:
        arrived = self.mailbox.receive(self.round, kind)
        for message in arrived:
            _add(self.env.ledger.down.setdefault(self.name, {}), messages.count(self.context, message))
        return arrived


def _add(total: dict[Any, int], more: Mapping[Any, int]) -> None:
    for key, number in more.items():
        total[key] = total.get(key, 0) + number
