"""Learning without a server: every peer has its own model, data and files, and hears of others by messages only.

A round: all train; each publishes a signal to those who may hear it, chooses neighbours by the signals that came, asks
them for their models, and mixes what comes with its own by `server_step`. Models are sent before anybody mixes, so all
mix what was there at one instant, whatever the order. A peer is a client that is its own server: the state of its model
is that of `server_init`, and any method's aggregation runs at it (see `fedloom.stages.peer.AtPeer`).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import peers as blocks
from fedloom.codecs import ByteCount, Raw
from fedloom.context import Ctx, derive_seed
from fedloom.methods.method import Method
from fedloom.peers.clock import synchronous
from fedloom.peers.graph import Graph
from fedloom.peers.scenario import Scenario
from fedloom.recipes.schema import PeersSection
from fedloom.runtime.build import Built
from fedloom.runtime.evaluation import Scores
from fedloom.runtime.executors import Executor, Job
from fedloom.runtime.federation import Client, Federation, Part
from fedloom.runtime.ledger import Ledger
from fedloom.runtime.process import Round
from fedloom.runtime.sampling import cohort
from fedloom.runtime.state import join_tree, split_tree
from fedloom.runtime.steps import (
    ALL,
    Message,
    Payload,
    blank,
    dispatch,
    load,
    rows_of,
    server_init,
    server_step,
)
from fedloom.runtime.transport import InMemory, Mailbox, Network
from fedloom.runtime.transport import Message as Letter
from fedloom.runtime.worker import EvalJob, TrainJob
from fedloom.stages.peer import AtPeer
from fedloom.stages.stage import State
from fedloom.training.features import Features
from fedloom.training.flat import FlatModel, integer_buffers
from fedloom.updates import Layout

_FEATURE_BATCHES = 50  # as in the thesis' release

_JUDGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient": blocks.gradient,
    "parameters": blocks.parameters,
    "features": blocks.features,
}

Trained = tuple[Payload, State, int]
"""What local training left: the payload, the client's new state, how many steps."""


def initial_peers(built: Built) -> State:
    """The state of a run of peers before its first round. All start from the same model."""
    initial = built.layout.flatten(built.module).detach()
    return {
        "round": 0,
        "peers": {
            name: first(built.method, built.layout, initial, integer_buffers(built.module))
            for name in built.federation.clients
        },
        "clock": 0.0,
        "early": None,
        "stopped": False,
    }


def first(method: Method, layout: Layout, initial: Tensor, integers: Mapping[str, Tensor]) -> State:
    """One peer's state before the first round; `initial` is the whole model vector."""
    return {
        "server": server_init(method, layout, initial, integers),
        "client": {},
        "similarity": {},
        "scope": "full",
        "told": {},
        "known": {},
    }


class Peer:
    """One peer: its state, its own data, its mailbox. Nobody else's data or state is ever in its reach."""

    def __init__(self, name: str, community: Community, mailbox: Mailbox, state: State) -> None:
        self.name, self.mailbox, self.state = name, mailbox, state
        self.method, self.layout, self.config = community.method, community.layout, community.config
        self.seed, self.names, self.rounds = community.seed, community.names, community.rounds
        whole = community.federation
        self.client = whole.clients[name]
        self.federation = Federation(whole.tasks, {name: self.client}, whole.unified)
        self.shared = self.method.shared_part(self.layout)
        self.origin = self.layout.parameters.take(community.initial, self.shared)
        self.by_task = self.method.rows == "client-task"
        self.round = 0
        self.ledger = Ledger()
        self.log: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
        self.record: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None

    def begin(self, round: int, ledger: Ledger, log: Any, record: Any) -> TrainJob:
        """What local training starts from."""
        self.round, self.ledger, self.log, self.record = round, ledger, log, record
        self.mailbox.log = log
        self.sent: dict[tuple[str, str], int] = {}
        self.payload: Payload | None = None
        self.graph = Graph((), frozenset())
        self.asked: tuple[str, ...] = ()
        self.chosen: tuple[str, ...] = ()
        server = self.state["server"]
        self.base = self.method.server.dispatch(server["model"], server["rule"][ALL])
        if self.state["known"]:
            server = {**server, "personal": self.state["known"]}
        message = dispatch(self.method, self.layout, self.federation, server, [self.name])[self.name]
        message = replace(message, told={**message.told, **self.state["told"]})
        return TrainJob(self.name, round, message, self.state["client"])

    def trained(self, payload: Payload, client: State) -> None:
        """Take over what local training left. A peer whose training failed sits the round out."""
        if not payload.finite:
            return
        self.payload = payload
        self.state = {**self.state, "client": client}
        rows = payload.rows
        like = blank(self.shared, self.federation, rows, torch.zeros(len(rows), self.shared.d, dtype=self.base.dtype))
        # the codec may keep rows of several tasks packed; what peers judge each other by is one model a peer
        self.update = like.X[0] if self.by_task else self.method.codec.unpack(payload.packed, like)[0]
        self.model = self.base + self.update

    def publish(self, graph: Graph, features: Callable[[Peer], Tensor] | None) -> None:
        """Send the signal by which others judge this peer to all who may hear it."""
        self.graph = graph
        if self.payload is None:
            return
        tensors = self._signals(features) if self._due else {}
        self.signals = tensors
        tasks = {task: weight for task, (_, weight) in self.client.tasks.items()}
        letter = self._letter("signal", tensors, {"tasks": tasks})
        for receiver in graph.receivers(self.name):
            self._send(receiver, letter)

    @property
    def _due(self) -> bool:
        return self.config.judges and (self.round - 1) % self.config.similarity.every == 0

    def _signals(self, features: Callable[[Peer], Tensor] | None) -> dict[str, Tensor]:
        wanted = self.config.similarity.signals
        part = blocks.shared_columns(self.shared)
        sketch = self.config.similarity.sketch
        tensors: dict[str, Tensor] = {}
        if "gradient" in wanted:
            tensors["gradient"] = self.shared.take(self.update, part)
        if "parameters" in wanted:
            tensors["parameters"] = self.shared.take(self.model - self.origin, part)
        if sketch is not None:
            short = blocks.Sketch(sketch.m, derive_seed(self.seed, "sketch"), sketch.kind)
            tensors = {name: short(vector) for name, vector in tensors.items()}
        if "features" in wanted:
            assert features is not None
            tensors["features"] = features(self)
        if "cross-loss" in wanted:
            like = blank(self.shared, self.federation, ((self.name, None),), self.model.unsqueeze(0))
            tensors["model"] = Raw().pack(like)["values"]
        return tensors

    def choose(self, evaluate: Callable[[Sequence[Job]], Iterable[Any]]) -> None:
        """Judge those whose signals came, choose among them, and ask them for their models."""
        letters = {m.sender: m for m in self._receive("signal") if m.sender in self.graph.senders(self.name)}
        if self.payload is None:
            return
        for name, letter in letters.items():
            self._meet(name, letter.values["tasks"])
        if self._due:
            similarity = self._judge(letters, evaluate)
            self.state = {**self.state, "similarity": similarity}
        similarity = {name: self.state["similarity"].get(name, math.nan) for name in sorted(letters)}
        choose = self.config.choose
        chosen = tuple(similarity)
        if choose.threshold is not None:
            chosen = blocks.similar_enough(similarity, choose.threshold)
        if choose.top is not None:
            chosen = blocks.top_k({name: similarity[name] for name in chosen}, choose.top)
        self.chosen = tuple(sorted(chosen))
        self.asked = tuple(similarity) if self.config.penalty else self.chosen
        scope = self._scope()
        request = self._letter("request", {}, {"base": self._digest(self.base, scope), "scope": scope})
        for name in self.asked:
            self._send(name, request)

    def _meet(self, name: str, tasks: Mapping[str, float]) -> None:
        """Remember what another peer says about itself."""
        known = {task.name: task for task in self.federation.tasks}
        nothing = Part(self.client.train.examples, np.zeros(0, dtype=np.int64), "unknown")
        held = {task: (known[task], weight) for task, weight in tasks.items()}
        other = Client(name, held, nothing, nothing, nothing)
        clients = {**self.federation.clients, name: other}
        self.federation = replace(self.federation, clients=dict(sorted(clients.items())))

    def _judge(
        self, letters: Mapping[str, Letter], evaluate: Callable[[Sequence[Job]], Iterable[Any]]
    ) -> dict[str, float]:
        names = sorted(letters)
        if not names:
            return {}
        config = self.config.similarity
        parts: dict[str, Tensor] = {}
        for signal in config.signals:
            if signal == "overlap":
                each = {
                    n: {t: w for t, (_, w) in self.federation.clients[n].tasks.items()} for n in (self.name, *names)
                }
                W = blocks.task_weights(each)
                at = sorted(each)
                parts[signal] = blocks.overlap(W[at.index(self.name)], W[[at.index(n) for n in names]])
            elif signal == "cross-loss":
                parts[signal] = self._cross_loss(names, letters, evaluate)
            else:
                others = torch.stack([letters[n].tensors[signal] for n in names])
                parts[signal] = _JUDGES[signal](self.signals[signal], others)
        weights = {str(name): weight for name, weight in config.signals.items()}
        S = blocks.combined(parts, weights, config.normalise)
        if self.config.scope == "adaptive":
            others = torch.stack([letters[n].tensors["gradient"] for n in names])
            agree = blocks.alignment(blocks.gradient(self.signals["gradient"], others, "cosine").tolist())
            thresholds = self.config.adaptive
            scope = blocks.next_scope(agree, self.state["scope"], thresholds.enter, thresholds.leave)
            self.state = {**self.state, "scope": scope}
        return dict(zip(names, S.tolist(), strict=True))

    def _cross_loss(
        self, names: Sequence[str], letters: Mapping[str, Letter], evaluate: Callable[[Sequence[Job]], Iterable[Any]]
    ) -> Tensor:
        """How well others' models do on this peer's validation data, with its own heads where they have none."""
        tasks = tuple(self.client.tasks)
        server = self.state["server"]
        jobs: list[Job] = []
        for i, name in enumerate(names):
            model = self._filled(letters[name].tensors["model"], name, self.shared, self.model)
            message = Message(model, server["buffers"], server["integers"])
            jobs.append(EvalJob(i, message, self.state["client"], self.name, "val", tasks, self.round))
        scores: dict[int, Scores] = dict(evaluate(jobs))
        losses = torch.tensor([[scores[i][task]["loss"] for task in tasks] for i in range(len(names))])
        weights = torch.tensor([weight for _, weight in self.client.tasks.values()])
        return blocks.cross_loss(blocks.per_task(losses, weights))

    def _filled(self, values: Tensor, name: str, part: Layout, rest: Tensor) -> Tensor:
        """Another peer's values over a part of the shared columns, in a copy of `rest` (d)."""
        mine = self.shared.take(rest, part).clone().unsqueeze(0)
        filled = Raw().unpack({"values": values}, blank(part, self.federation, ((name, None),), mine))[0]
        return self.shared.put(rest.clone(), part, filled)

    def _scope(self) -> str:
        warmup, scope = self.config.warmup, self.config.scope
        if warmup is not None and self.round < warmup.until:
            return warmup.scope
        return str(self.state["scope"]) if scope == "adaptive" else scope

    def _part(self, scope: str) -> Layout:
        return self.shared if scope == "full" else self.shared.select("encoder")

    def _digest(self, vector: Tensor, scope: str) -> str:
        values = self.shared.take(vector, self._part(scope)).contiguous()
        return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()

    def answer(self) -> None:
        """Send the model to those who asked: the update alone where they started from the same model."""
        letters: dict[tuple[bool, str], Letter] = {}
        for request in self._receive("request"):
            if self.payload is None:
                continue
            scope = str(request.values["scope"])
            key = request.values["base"] == self._digest(self.base, scope) or self.by_task, scope
            if key not in letters:
                letters[key] = self._answer(*key)
            self._send(request.sender, letters[key])

    def _answer(self, same: bool, scope: str) -> Letter:
        assert self.payload is not None
        payload, part = self.payload, self._part(scope)
        packed = payload.packed
        if not self.by_task and (not same or scope != "full"):
            values = self.shared.take(self.update if same else self.model, part).unsqueeze(0)
            like = blank(part, self.federation, (payload.row,), values)
            packed = (self.method.codec if same else Raw()).pack(like)
        buffers = payload.buffers
        if buffers is not None:
            every = self.method.shared_buffers(self.layout)
            buffers = every.take(buffers, self._buffers(scope))
        about: dict[str, Any] = {
            "n": payload.n,
            "packed": dict(packed),
            "extra": dict(payload.extra),
            "side": dict(payload.side),
            "support": payload.support,
            "buffers": buffers,
            "integers": dict(payload.integers),
            "tasks": dict(payload.tasks),
        }
        skeleton, tensors = split_tree(about)
        return self._letter("model", tensors, {"same": same, "scope": scope, "payload": skeleton})

    def _buffers(self, scope: str) -> Layout:
        every = self.method.shared_buffers(self.layout)
        return every if scope == "full" else every.select("encoder")

    def mix(self) -> None:
        """Mix the own model and those that came, from the snapshot that they all are."""
        letters = {m.sender: m for m in self._receive("model") if m.sender in self.asked}
        own = self.payload
        if own is None:
            return
        scope = self._scope()
        theirs = {name: self._read(letter) for name, letter in letters.items()}
        came = [name for name in self.chosen if name in theirs]
        shares = self._shares(own, {name: theirs[name] for name in came})
        inside = None if scope == "full" else frozenset(self._part(scope).names)
        method = self.method
        assert isinstance(method.stage, AtPeer)
        stage = replace(method.stage, own=self.name, shares=None if self.by_task else shares, scope=inside)
        method = replace(method, stage=stage, codec=method.codec if self.by_task else Raw())
        row = self._row(own, self.update, self.name)
        payloads = [own if self.by_task else row, *(theirs[name] for name in came)]
        ctx = Ctx(
            self.round,
            self.seed,
            rows_of(method, self.federation, sorted([self.name, *came])),
            len(self.names),
            self.rounds,
            log=self.log,
            record=self.record,
        )
        before = self.state["server"]
        server = server_step(method, self.layout, self.federation, payloads, before, ctx)
        if scope != "full" and own.buffers is not None:
            # what is not exchanged is as local training left it
            every, part = method.shared_buffers(self.layout), self._buffers(scope)
            merged = every.take(server["buffers"], part)
            server = {**server, "buffers": every.put(own.buffers.clone(), part, merged)}
        self.state = {**self.state, "server": server}
        if self.method.start == "own":
            models = {name: self.base + Raw().unpack(p.packed, self._like(name))[0] for name, p in theirs.items()}
            self.state["known"] = {**models, self.name: server["model"]}
        if self.config.penalty:
            self.state["told"] = self._pull({n: p for n, p in theirs.items() if n not in came}, scope)
        total = math.fsum(shares.values())
        self.record(
            "peer",
            {
                "peer": self.name,
                "neighbours": came,
                "weights": {name: share / total for name, share in shares.items()} if total else shares,
                "similarity": dict(self.state["similarity"]),
                "scope": scope,
            },
        )

    def _like(self, name: str) -> Any:
        zeros = torch.zeros(1, self.shared.d, dtype=self.base.dtype)
        return blank(self.shared, self.federation, ((name, None),), zeros)

    def _row(self, payload: Payload, way: Tensor, name: str) -> Payload:
        """A payload with the way from this peer's start to a model."""
        return replace(payload, packed=Raw().pack(self._like(name).replace(X=way.unsqueeze(0))))

    def _read(self, letter: Letter) -> Payload:
        """A neighbour's payload, seen from this peer's own start; out of scope there is nothing."""
        about = join_tree(letter.values["payload"], letter.tensors)
        payload = Payload((letter.sender, None), **about)
        if self.by_task:
            return payload
        scope = str(letter.values["scope"])
        part = self._part(scope)
        zeros = torch.zeros(1, part.d, dtype=self.base.dtype)
        like = blank(part, self.federation, (payload.row,), zeros)
        if letter.values["same"]:
            way = self.method.codec.unpack(payload.packed, like)[0]
        else:
            have = Raw().unpack(payload.packed, like)[0]
            # columns of blocks that the other has not got are not looked at by anyone
            way = have - self.shared.take(self.base, part)
        whole = self.shared.put(torch.zeros_like(self.base), part, way)
        if payload.buffers is not None and self.payload is not None and self.payload.buffers is not None:
            every = self.method.shared_buffers(self.layout)
            filled = every.put(self.payload.buffers.clone(), self._buffers(scope), payload.buffers)
            payload = replace(payload, buffers=filled)
        return self._row(payload, whole, letter.sender)

    def _shares(self, own: Payload, theirs: Mapping[str, Payload]) -> dict[str, float]:
        """Weights of the own model and of those that came."""
        config, names = self.config.weights, sorted(theirs)
        kind = config.kind
        warm = self.config.warmup is not None and self.round < self.config.warmup.until
        if kind == "soft" and not warm:
            similarity = {name: self.state["similarity"].get(name, math.nan) for name in names}
            return blocks.soft_weights(self.name, similarity, names, include_self=config.include_self, step=config.step)
        if kind == "metropolis":
            degree = {name: len(self.graph.senders(name)) for name in (self.name, *names)}
            shares = {name: 1 / (1 + max(degree[self.name], degree[name])) for name in names}
            return {self.name: 1 - math.fsum(shares.values()), **shares}
        size = kind == "size" and not warm
        shares = {name: theirs[name].n if size else 1.0 for name in names}
        return {self.name: (own.n if size else 1.0) if config.include_self or not names else 0.0, **shares}

    def _pull(self, others: Mapping[str, Payload], scope: str) -> dict[str, Tensor]:
        """What the penalty between groups asks of the next round: the mean of others' models, and mu where it acts."""
        pull, mean = torch.zeros_like(self.base), torch.zeros_like(self.base)
        count = torch.zeros_like(self.base)
        for name, payload in others.items():
            way = Raw().unpack(payload.packed, self._like(name))[0]
            have = self.federation.present(self.federation.clients[name], self.shared)
            inside = set(self._part(scope).names)
            for i, (block, s) in enumerate(zip(self.shared.blocks, self.shared.slices, strict=True)):
                if block.name in inside and (have is None or bool(have[0, i])):
                    mean[s] += self.base[s] + way[s]
                    count[s] += 1
        pull[count > 0] = self.config.penalty
        return {"others": torch.where(count > 0, mean / count.clamp(min=1), mean), "pull": pull}

    def _letter(self, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Letter:
        return Letter(kind, self.name, self.round, self.layout.hash, tensors, values)

    def _send(self, receiver: str, letter: Letter) -> None:
        self.mailbox.send(receiver, letter)
        self.sent[receiver, letter.kind] = letter.nbytes
        _add(self.ledger.up.setdefault(self.name, {}), self.count(letter))

    def _receive(self, kind: str) -> list[Letter]:
        letters = self.mailbox.receive(self.round, kind)
        for letter in letters:
            _add(self.ledger.down.setdefault(self.name, {}), self.count(letter))
        return letters

    def count(self, letter: Letter) -> ByteCount:
        """Bytes of a message's tensors by (role, task); they add up to `nbytes`."""
        if letter.kind != "model":
            return {("signal", None): letter.nbytes} if letter.nbytes else {}
        about = join_tree(letter.values["payload"], letter.tensors)
        part = self._part(letter.values["scope"])
        rows = tuple((letter.sender, task) for task in about["tasks"]) or ((letter.sender, None),)
        like = blank(part, self.federation, rows, torch.zeros(len(rows), part.d))
        codec = self.method.codec if letter.values["same"] else Raw()
        bytes_ = codec.count(about["packed"], like)
        rest = {
            ("buffer", None): [*([] if about["buffers"] is None else [about["buffers"]]), *about["integers"].values()],
        }
        for key, tensors in rest.items():
            if tensors:
                bytes_[key] = bytes_.get(key, 0) + sum(t.nbytes for t in tensors)
        if beside := letter.nbytes - sum(bytes_.values()):
            bytes_["side", None] = bytes_.get(("side", None), 0) + beside
        return bytes_


def _add(total: ByteCount, more: ByteCount) -> None:
    for key, count in more.items():
        total[key] = total.get(key, 0) + count


@dataclass(eq=False)
class Community:
    """All peers of a run in one process, and the network between them.

    `initial` are the parameters (p) that all start from. `features` gives a peer's feature statistics (2 x C), where a
    recipe wants them.
    """

    method: Method
    layout: Layout
    federation: Federation
    config: PeersSection
    seed: int
    rounds: int
    initial: Tensor
    features: Callable[[Peer], Tensor] | None = None

    def __post_init__(self) -> None:
        self.names = tuple(sorted(self.federation.clients))
        self.scenario = self.config.scenario or Scenario()
        self.scenario.check(self.names)
        self.network = Network(self.scenario.lost)

    def graph(self, round: int) -> Graph:
        """Who may hear whom in a round: everybody can work it out."""
        section = self.config.graph
        return blocks.candidates(
            section.name, self.names, seed=self.seed, round=round, every=section.every, **section.params
        )

    def round(
        self,
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
        there = {name: self._peer(name, states[name]) for name in sorted(members)}
        self.network.begin(round)
        jobs = [peer.begin(round, ledger, log, record) for peer in there.values()]
        times: dict[str, float] = {}
        for payload, state, steps in train(jobs):
            name = payload.row[0]
            there[name].trained(payload, state)
            times[name] = self.scenario.training(steps, name, round)
        time = _Time(self, times, log)
        graph = self.graph(round)
        for peer in there.values():
            peer.publish(graph, self.features)
        time.signals(there)
        for peer in there.values():
            peer.choose(evaluate)
        time.requests(there)
        for peer in there.values():
            peer.answer()
        time.models(there)
        for peer in there.values():
            peer.mix()
        for name in self.names:
            self.network.take(name)  # an absent peer hears nothing, not even later
        end = time.end(clock)
        if self.config.scenario is not None:
            record("clock", {"start": clock, "end": end})
        return {**states, **{name: peer.state for name, peer in there.items()}}, end

    def _peer(self, name: str, state: State) -> Peer:
        """A peer as its state says, whatever it did before."""
        mailbox = Mailbox(name, self.layout.hash, InMemory(self.network, name), lambda event, fields: None)
        return Peer(name, self, mailbox, state)


class _Time:
    """Simulated seconds of one round, counted from its start; what comes after the deadline is taken back."""

    def __init__(self, community: Community, training: dict[str, float], log: Any) -> None:
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
        return [(p.name, to, n) for p in peers.values() for (to, what), n in p.sent.items() if what == kind]

    def _in_time(self, sender: str, receiver: str, kind: str, at: float) -> bool:
        self.last[sender, receiver] = max(at, self.last.get((sender, receiver), 0.0))
        if self.deadline is None or at <= self.deadline:
            return True
        if self.network.cancel(sender, receiver):
            self.log("message dropped", {"peer": receiver, "what": "late", "sender": sender, "kind": kind})
        return False


def without_server(built: Built) -> Callable[[Built, Executor, State, Round], tuple[State, Sequence[str]]]:
    """How a run of peers advances by a round (see `fedloom.runtime.process.run_rounds`)."""
    config = built.recipe.peers
    assert config is not None
    recipe = built.recipe
    scratch: list[FlatModel] = []

    def features(peer: Peer) -> Tensor:
        """Channel means and deviations of the trained encoder on some of the peer's training data."""
        if not scratch:
            scratch.append(FlatModel(copy.deepcopy(built.module), built.layout))
        model = scratch[0]
        server = peer.state["server"]
        load(built.method, model, Message(peer.model, server["buffers"], server["integers"]), peer.state["client"])
        model.module.eval()
        recorder, seen, part = Features(model), [], peer.client.train
        names = tuple(peer.client.tasks)
        with torch.no_grad(), recorder.recording():
            for batch in part.index.split(recipe.training.batch_size)[:_FEATURE_BATCHES]:
                x, _ = part.examples.batch(batch, model.device, tasks=names)
                model.module(x, names)
                seen.append(recorder.now)
        return blocks.feature_statistics(torch.cat(seen))

    community = Community(
        built.method,
        built.layout,
        built.federation,
        config,
        recipe.seed,
        recipe.training.rounds,
        built.layout.flatten(built.module).detach()[: built.layout.parameters.d],
        features,
    )

    def advance(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        there = community.scenario.alive(community.names, now.number)
        here = cohort(community.names, recipe.training.participation, recipe.seed, now.number)
        members = tuple(name for name in here if name in there)

        def train(jobs: list[TrainJob]) -> Iterable[Trained]:
            for payload in now.trained(executor, jobs):
                yield payload, now.clients[payload.row[0]], now.done[-1].result.steps

        with now.ledger.phase("train and mix"):
            states, clock = community.round(
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
