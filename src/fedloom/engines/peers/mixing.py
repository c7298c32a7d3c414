"""The mixing of a peer's own model with those of others: any method's aggregation, seen from the peer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import Raw
from fedloom.core.context import Ctx, State
from fedloom.engines.peers.community import Environment, PeerContext, Trained
from fedloom.engines.peers.judging import close
from fedloom.engines.peers.messages import NEW, Heard, aged, as_row
from fedloom.federation.rounds.federation import BuiltFederation
from fedloom.federation.rounds.messages import clip_counts, rows_of
from fedloom.federation.rounds.server import server_step
from fedloom.methods.peers.aggregation import AtPeer
from fedloom.methods.peers.graph import Graph
from fedloom.methods.peers.neighbours import soft_weights


@dataclass(frozen=True, eq=False)
class Mix:
    """The models that one peer mixes in a round: its own and, of the models that it `heard`, those of `chosen` peers.

    The other models serve the penalty. `federation` has the peer itself and the senders of the models.
    """

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
            models = {name: self._model(name) for name in self.chosen}
            alike = close(context, state, {me: self.own.model, **models})
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
            sizes = {name: clip_counts(self.context.method, self.federation, p).n for name, p in payloads.items()}
        return sizes if config.include_self or not names else {**sizes, me: 0.0}

    def _server(
        self, before: State, scope: str, shares: Mapping[str, float], alike: frozenset[str], env: Environment
    ) -> State:
        """Return the state of the peer's model after `server_step`, from the one before."""
        context, method, own = self.context, self.context.method, aged(self.context, self.own.payload, NEW)
        me, by_task = context.client.id, context.by_task
        inside = None if scope == "full" and context.fine is None else frozenset(context.part("encoder").names)
        assert isinstance(method.stage, AtPeer)
        stage = replace(method.stage, own=me, shares=None if by_task else shares, scope=inside, whole=alike)
        row = own if by_task else as_row(context, context.federation, own, self.own.update)
        starts = {me: self.own.start, **{name: one.start for name, one in self.heard.items()}}
        ctx = Ctx(
            self.own.round,
            context.seed,
            rows_of(method, self.federation, sorted([me, *self.chosen])),
            len(self.graph.peers),
            context.rounds,
            log=env.log,
            record=env.record,
            peer=me,
            held=context.held,
        )
        server = server_step(
            replace(method, stage=stage, codec=method.codec if by_task else Raw()),
            context.layout,
            self.federation,
            [row, *(self.heard[name].payload for name in self.chosen)],
            before,
            ctx,
            starts if context.tells_start else None,
        )
        if scope != "full" and own.buffers is not None:
            # buffers out of scope are not exchanged, so they stay as local training left them
            every, part = method.shared_buffers(context.layout), context.buffers(scope)
            merged = every.take(server["buffers"], part)
            server = {**server, "buffers": every.put(own.buffers.clone(), part, merged)}
        return server

    def _pull(self, scope: str) -> dict[str, Tensor]:
        """Return the target of the penalty between groups in the next round: the mean of others' models, and mu."""
        context, like = self.context, self.own.start
        total, count, pull = torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like)
        inside = set(context.part(scope).names)
        for name in (name for name in self.heard if name not in self.chosen):
            have = self.federation.present(self.federation.clients[name], context.shared)
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
