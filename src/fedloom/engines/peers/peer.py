"""One peer: what it tells others, whom it listens to, and how it mixes their models with its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import peers as blocks
from fedloom.codecs import ByteCount, Raw
from fedloom.core.context import Ctx, State, derive_seed
from fedloom.core.layout import Layout
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.transport import Mailbox
from fedloom.engines.peers.transport import Message as Letter
from fedloom.methods.method import Method
from fedloom.peers.graph import Graph
from fedloom.rounds.evaluation import Scores
from fedloom.rounds.federation import Client, Federation, Part
from fedloom.rounds.messages import ALL, Message, Payload, blank, rows_of
from fedloom.rounds.server import dispatch, server_init, server_step
from fedloom.rounds.worker import EvalJob, Job, TrainJob
from fedloom.runs.checkpoint import join_tree, split_tree
from fedloom.runs.ledger import Ledger

Trained = tuple[Payload, State, int]
"""What local training left: the payload, the client's new state, how many steps."""

_JUDGES: dict[str, Callable[..., Tensor]] = {
    "gradient": blocks.gradient,
    "parameters": blocks.parameters,
    "features": blocks.features,
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
        self.outputs = community.outputs
        self.origin = self.layout.parameters.take(community.initial, self.shared)
        self.by_task = self.method.rows == "client-task"
        stage = self.method.stage
        # what keeps a model for each client looks at updates, as at a server; what leaves one model mixes models
        apart = not stage.traits.reduces and self.method.start == "received"
        self.tells_update = not self.by_task and (apart or "base" in stage.traits.reads)
        groups = self.config.choose.groups
        self.fine = groups is not None and groups.fine is not None
        self.tells_start = self.tells_update and ("base" in stage.traits.reads or self.config.penalty > 0 or self.fine)
        self.round = self.version = 0
        self.payload: Payload | None = None
        self.graph = Graph((), frozenset())
        self.starts: dict[str, Tensor] = {}
        self.ends: dict[str, Tensor] = {}
        self.asked: dict[str, bool] = {}
        """Of whom a model is awaited -> whether it was chosen."""
        self.sent: dict[tuple[str, str], int] = {}
        self.ledger = Ledger()
        self.log: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
        self.record: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None

    def begin(self, round: int, ledger: Ledger, log: Any, record: Any) -> TrainJob:
        """What local training starts from."""
        self.round, self.ledger, self.log, self.record = round, ledger, log, record
        self.mailbox.log = log
        server = self.state["server"]
        if self.state["known"]:
            server = {**server, "personal": self.state["known"]}
        message = dispatch(self.method, self.layout, self.federation, server, [self.name])[self.name]
        message = replace(message, broadcast={**message.broadcast, **self.state["told"]})
        return TrainJob(self.name, round, message, self.state["client"])

    def trained(self, payload: Payload, client: State) -> bool:
        """Take over what local training left. A peer whose training failed, False, sits the round out."""
        if payload.finite:
            server = self.state["server"]
            self.hold(payload, self.method.server.dispatch(server["model"], server["rule"][ALL]), self.round)
            self.state = {**self.state, "client": client}
        return payload.finite

    def hold(self, payload: Payload, base: Tensor, version: int) -> None:
        """The trained model that others are told of: what training left, where it started, in which round."""
        self.payload, self.base, self.version = payload, base, version
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
        self.features = features
        self.signals = self._signals() if self._due else {}
        letter = self._letter("signal", self.signals, {"tasks": self.client.shares, "due": self._due})
        for receiver in graph.receivers(self.name):
            self._send(receiver, letter)

    @property
    def _due(self) -> bool:
        return self.config.judges and (self.round - 1) % self.config.similarity.every == 0

    def _signals(self) -> dict[str, Tensor]:
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
            # rounding to 8 bits is far below what a sketch is wrong by; half the bytes
            tensors = {
                n: short(vector).bfloat16() if len(vector) > sketch.m else vector for n, vector in tensors.items()
            }
        if "features" in wanted:
            assert self.features is not None
            tensors["features"] = self.features(self)
        if "cross-loss" in wanted:
            like = blank(self.shared, self.federation, ((self.name, None),), self.model.unsqueeze(0))
            tensors["model"] = Raw().pack(like)["values"]
        return tensors

    def choose(self, evaluate: Callable[[Sequence[Job]], Iterable[Any]]) -> None:
        """Judge those whose signals came, choose among them, and ask them for their models."""
        candidates = frozenset(self.graph.senders(self.name))
        letters = {m.sender: m for m in self._receive("signal") if m.sender in candidates}
        if self.payload is None:
            return
        due = {name: letter for name, letter in letters.items() if letter.values["due"]}
        if due and not self.signals:
            self.signals = self._signals()
        judged = {**self._remembered(), **self._judge(due, evaluate)}
        self.state = {**self.state, "similarity": judged}
        similarity = {name: self.state["similarity"].get(name, math.nan) for name in sorted(letters)}
        chosen = self._chosen(similarity)
        asked = sorted(similarity if self.config.penalty else chosen)
        self.asked |= {name: name in chosen for name in asked}
        self._ask(asked)

    def _remembered(self) -> dict[str, float]:
        """Similarities that still count: until a round in which all judge anew."""
        return {} if self._due else self.state["similarity"]

    def _chosen(self, similarity: Mapping[str, float]) -> tuple[str, ...]:
        choose = self.config.choose
        chosen = tuple(similarity)
        if choose.groups is not None:
            chosen = tuple(name for name in chosen if name in self.state.get("group", ()))
        if choose.threshold is not None:
            chosen = blocks.similar_enough(similarity, choose.threshold)
        if choose.top is not None:
            chosen = blocks.top_k({name: similarity[name] for name in chosen}, choose.top)
        return chosen

    def _ask(self, names: Sequence[str]) -> None:
        scope = self._scope()
        request = self._letter("request", {}, {"base": self._digest(self.base, scope), "scope": scope})
        for name in names:
            self._send(name, request)

    def _meet(self, letters: Iterable[Letter]) -> None:
        """Remember what other peers say about themselves."""
        known = {task.name: task for task in self.federation.tasks}
        nothing = Part(self.client.train.examples, np.zeros(0, dtype=np.int64), "unknown")
        clients = dict(self.federation.clients)
        for letter in letters:
            if letter.sender not in clients:
                held = {task: (known[task], w * known[task].weight) for task, w in letter.values["tasks"].items()}
                clients[letter.sender] = Client(letter.sender, held, nothing, nothing, nothing)
        self.federation = replace(self.federation, clients=dict(sorted(clients.items())))

    def _judge(
        self, letters: Mapping[str, Letter], evaluate: Callable[[Sequence[Job]], Iterable[Any]]
    ) -> dict[str, float]:
        names = sorted(letters)
        if not names:
            return {}
        config, every = self.config.similarity, self.config.choose.groups is not None
        parts: dict[str, Tensor] = {}
        for signal in config.signals:
            if signal == "overlap":
                shares = {self.name: self.client.shares, **{n: letters[n].values["tasks"] for n in names}}
                W = blocks.task_weights(shares)
                at = {n: i for i, n in enumerate(sorted((self.name, *names)))}
                W = W[[at[n] for n in (self.name, *names)]]
                parts[signal] = blocks.overlap(W) if every else blocks.overlap(W[0], W[1:])
            elif signal == "cross-loss":
                parts[signal] = self._cross_loss(names, letters, evaluate)
            else:
                own, others = self.signals[signal], torch.stack([letters[n].tensors[signal] for n in names])
                judge = _JUDGES[signal]
                parts[signal] = judge(torch.cat([own[None], others])) if every else judge(own, others)
        weights = {str(name): weight for name, weight in config.signals.items()}
        S = blocks.combined(parts, weights, config.normalise)
        if every:
            self.state = {**self.state, "group": self._group((self.name, *names), S)}
            S = S[0, 1:]
        if self.config.scope == "adaptive":
            others = torch.stack([letters[n].tensors["gradient"] for n in names])
            agree = blocks.alignment(blocks.gradient(self.signals["gradient"], others, "cosine").tolist())
            thresholds = self.config.adaptive
            scope = blocks.next_scope(agree, self.state["scope"], thresholds.enter, thresholds.leave)
            self.state = {**self.state, "scope": scope}
        return dict(zip(names, S.tolist(), strict=True))

    def _group(self, names: Sequence[str], S: Tensor) -> list[str]:
        """Who is in this peer's group, by the similarities between all (N x N); who cannot be judged is in none."""
        groups = self.config.choose.groups
        assert groups is not None
        known = torch.isfinite(S[0]).nonzero().flatten().tolist()
        seed = derive_seed(self.seed, "groups") >> 32
        here = [names[i] for i in known]
        found = blocks.coarse_clusters(here, S[known][:, known], groups.low, groups.high, seed)
        return list(next((group for group in found if self.name in group), (self.name,)))

    def _close(self, came: Sequence[str]) -> frozenset[str]:
        """Who of those that came gives outputs like this peer's, on this peer's validation data."""
        groups = self.config.choose.groups
        assert groups is not None
        assert groups.fine is not None
        assert self.outputs is not None
        names = sorted([self.name, *came])
        each = [self.outputs(self, self.model if name == self.name else self.ends[name]) for name in names]
        S = torch.stack([blocks.parameters(torch.stack([o[t] for o in each])) for t in each[0]]).mean(0)
        found = blocks.fine_clusters(names, S, groups.fine)
        return frozenset(next(group for group in found if self.name in group)) - {self.name}

    def _cross_loss(
        self, names: Sequence[str], letters: Mapping[str, Letter], evaluate: Callable[[Sequence[Job]], Iterable[Any]]
    ) -> Tensor:
        """How well others' models do on this peer's validation data, with its own heads where they have none."""
        tasks = tuple(self.client.tasks)
        server = self.state["server"]
        self._meet(letters[name] for name in names)
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
            if self.payload is None or not self._newer(request):
                continue
            scope = str(request.values["scope"])
            same = self.by_task or request.values["base"] == self._digest(self.base, scope)
            key = same, scope
            if key not in letters:
                letters[key] = self._answer(*key)
            self._send(request.sender, letters[key])

    def _newer(self, request: Letter) -> bool:
        """Whether who asks has not got this model yet."""
        return True

    def _answer(self, same: bool, scope: str) -> Letter:
        assert self.payload is not None
        payload, part = self.payload, self._part(scope)
        packed = payload.packed
        update = same or self.tells_update

        def values(vector: Tensor) -> Any:
            return blank(part, self.federation, (payload.row,), self.shared.take(vector, part).unsqueeze(0))

        if not self.by_task and (not update or scope != "full"):
            packed = self.method.codec.pack(values(self.update)) if update else Raw().pack(values(self.model))
        buffers = payload.buffers
        if buffers is not None:
            every = self.method.shared_buffers(self.layout)
            buffers = every.take(buffers, self._buffers(scope))
        tree = replace(payload, packed=packed, buffers=buffers).tree()
        if not same and self.tells_start:
            tree["start"] = Raw().pack(values(self.base))["values"]
        skeleton, tensors = split_tree(tree)
        about = {"update": update, "scope": scope, "tasks": self.client.shares, "payload": skeleton}
        return self._letter("model", tensors, about)

    def _buffers(self, scope: str) -> Layout:
        every = self.method.shared_buffers(self.layout)
        return every if scope == "full" else every.select("encoder")

    def mix(self) -> None:
        """Mix the own model and those that came, from the snapshot that they all are."""
        letters = {m.sender: m for m in self._receive("model") if m.sender in self.asked}
        if self.payload is None:
            return
        own = self._aged(self.payload)
        scope = self._scope()
        self.starts, self.ends = {self.name: self.base}, {}
        theirs = {name: self._aged(self._read(letter), letter) for name, letter in letters.items()}
        came = [name for name in theirs if self.asked[name]]
        self.asked = {name: chosen for name, chosen in self.asked.items() if name not in theirs}
        shares = self._shares(own, {name: theirs[name] for name in came})
        close = self._close(came) if self.fine and scope == "full" else frozenset[str]()
        inside = None if scope == "full" and not self.fine else frozenset(self._part("encoder").names)
        method = self.method
        shared = None if self.by_task else shares
        stage = method.stage.seen_from(self.name, shared, inside, close)
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
            peer=self.name,
        )
        before = self.state["server"]
        starts = self.starts if self.tells_start else None
        server = server_step(method, self.layout, self.federation, payloads, before, ctx, starts)
        if scope != "full" and own.buffers is not None:
            # what is not exchanged is as local training left it
            every, part = method.shared_buffers(self.layout), self._buffers(scope)
            merged = every.take(server["buffers"], part)
            server = {**server, "buffers": every.put(own.buffers.clone(), part, merged)}
        self.state = {**self.state, "server": server}
        if self.method.start == "own":
            self.state["known"] = {**self.ends, self.name: server["model"]}
        if self.config.penalty:
            self.state["told"] = self._pull({n: end for n, end in self.ends.items() if n not in came}, scope)
        total = math.fsum(shares.values())
        self.record(
            "peer",
            {
                "peer": self.name,
                "neighbours": came,
                "weights": {name: share / total for name, share in shares.items()} if total else shares,
                "similarity": dict(self.state["similarity"]),
                "scope": scope,
                **({"close": sorted(close)} if self.fine else {}),
                **self._also(letters),
            },
        )

    def _aged(self, payload: Payload, letter: Letter | None = None) -> Payload:
        """A payload, the own one or what a letter brought, with its age where that is known: here all are alike."""
        return payload

    def _also(self, letters: Mapping[str, Letter]) -> dict[str, Any]:
        """What else is recorded of a mix."""
        return {}

    def _like(self, name: str) -> Any:
        zeros = torch.zeros(1, self.shared.d, dtype=self.base.dtype)
        return blank(self.shared, self.federation, ((name, None),), zeros)

    def _row(self, payload: Payload, way: Tensor, name: str) -> Payload:
        """A payload with the way from a start to a model."""
        return replace(payload, packed=Raw().pack(self._like(name).replace(X=way.unsqueeze(0))))

    def _read(self, letter: Letter) -> Payload:
        """A neighbour's payload; out of scope there is nothing.

        It is the way to its model from this peer's own start, or from the neighbour's where peers tell updates.
        """
        about = join_tree(letter.values["payload"], letter.tensors)
        start = about.pop("start", None)
        payload = Payload.of(letter.sender, about)
        if self.by_task:
            return payload
        scope = str(letter.values["scope"])
        part = self._part(scope)
        zeros = torch.zeros(1, part.d, dtype=self.base.dtype)
        like = blank(part, self.federation, (payload.row,), zeros)
        if start is not None:
            self.starts[letter.sender] = self._filled(start, letter.sender, part, self.base)
        elif self.tells_start:
            self.starts[letter.sender] = self.base
        if letter.values["update"]:
            way = self.method.codec.unpack(payload.packed, like)[0]
        else:
            have = Raw().unpack(payload.packed, like)[0]
            # columns of blocks that the other has not got are not looked at by anyone
            way = have - self.shared.take(self.base, part)
        whole = self.shared.put(torch.zeros_like(self.base), part, way)
        if self.method.start == "own" or self.config.penalty or self.fine:
            end = self.starts.get(letter.sender, self.base) + whole
            # to the bit what the other has, which a way from here and back may not be
            self.ends[letter.sender] = end if letter.values["update"] else self.shared.put(end, part, have)
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

    def _pull(self, others: Mapping[str, Tensor], scope: str) -> dict[str, Tensor]:
        """What the penalty between groups asks of the next round: the mean of others' models, and mu where it acts."""
        pull, mean = torch.zeros_like(self.base), torch.zeros_like(self.base)
        count = torch.zeros_like(self.base)
        for name, end in others.items():
            have = self.federation.present(self.federation.clients[name], self.shared)
            inside = set(self._part(scope).names)
            for i, (block, s) in enumerate(zip(self.shared.blocks, self.shared.slices, strict=True)):
                if block.name in inside and (have is None or bool(have[0, i])):
                    mean[s] += end[s]
                    count[s] += 1
        pull[count > 0] = self.config.penalty
        return {"others": torch.where(count > 0, mean / count.clamp(min=1), mean), "pull": pull}

    def _letter(self, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Letter:
        return Letter(kind, self.name, self.version, self.layout.hash, tensors, values)

    def _send(self, receiver: str, letter: Letter) -> None:
        self.mailbox.send(receiver, letter)
        if self.config.scenario is not None:  # or nothing takes time, and nobody asks
            self.sent[receiver, letter.kind] = letter.nbytes
        _add(self.ledger.up.setdefault(self.name, {}), self.count(letter))

    def _receive(self, kind: str) -> list[Letter]:
        letters = self.mailbox.receive(self.round, kind)
        if kind == "model":
            self._meet(letters)
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
        codec = self.method.codec if letter.values["update"] else Raw()
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
