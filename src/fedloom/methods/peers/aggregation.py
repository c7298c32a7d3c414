"""Methods that were written for a server as they run at peers (`at_peers`), and the peers' own stages and rules.

`Gossip` and `SimilarityMix` do in one place what peers do among themselves, for comparison with methods that have a
server: each row is one peer, whose model becomes a mix of its own and its neighbours' models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.combine import Around, Switch
from fedloom.core.context import Broadcast, Ctx, Fields, State
from fedloom.core.errors import RecipeError
from fedloom.core.layout import Layout
from fedloom.core.mean import ModelMix, weighted_mean
from fedloom.core.settings.section import BelowOne, Natural, NonNegative
from fedloom.core.stage import Stage, Traits, every
from fedloom.core.updates import EVERYONE, Updates
from fedloom.methods.conflict.aggregation import Rescale
from fedloom.methods.method import Method
from fedloom.methods.peers import PlateauSettings, SimilarityMixSettings, StalenessSettings
from fedloom.methods.peers.config import PeersBase, Safeguards
from fedloom.methods.peers.graph import Graph, candidates, metropolis, resolved
from fedloom.methods.peers.neighbours import soft_weights, top_k
from fedloom.methods.peers.safeguards import conflict_averse_mix
from fedloom.methods.peers.similarity import combined, gradient, overlap, task_weights
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class AtPeer(Around):
    """The aggregation `stage` at one peer, over its own row and its neighbours' rows.

    Rows are the displacements of the trained models from the peer's own start, or updates if peers send updates. Their
    weights are `shares` (client -> weight; None: the rows' own weights). Rows of others have only the blocks of `scope`
    (names; None: all). If a stage leaves a row for each client, the peer's own row is taken. Blocks that no row with a
    weight has are taken from the peer's own row. The state is that of `stage`.
    """

    heading = "at each peer, over its own row and its neighbours'"
    stage: Stage
    own: str = ""
    shares: Mapping[str, float] | None = None
    scope: Set[str] | None = None
    whole: Set[str] = frozenset()
    """Clients whose rows also count outside `scope`."""
    also: Fields = frozenset()
    """The peer's own additions to the broadcast for its local rules."""

    @cached_property
    def traits(self) -> Traits:
        """Fields of updates other than X that the stage writes end here."""
        traits = self.stage.traits
        kept = traits.writes & {"X", "groups", "tasks"}
        return replace(traits, writes=kept | traits.broadcasts | self.also, separable=False)

    def init(self, layout: Layout) -> State:
        return self.stage.init(layout)

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        return self.stage.broadcast(state, clients, models)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        mine = [i for i, (client, _) in enumerate(updates.rows) if client == self.own]
        seen = updates
        if self.shares is not None:
            shares = [self.shares[client] for client, _ in updates.rows]
            seen = updates.replace(weight=torch.tensor(shares, dtype=torch.float64))
        if "tasks" in self.stage.traits.writes:
            return self.stage(seen, state, replace(ctx, targets=tuple(updates.rows[i] for i in mine)))
        if self.scope is not None:
            seen = seen.replace(present=self._within(updates))
        out, state = self.stage(seen, state, replace(ctx, targets=((self.own, None),)))
        # as at a server, the peer's own row counts before one for everyone
        row = next((out.rows.index(key) for key in ((self.own, None), EVERYONE) if key in out.rows), None)
        x = torch.zeros_like(updates.X[0]) if row is None else out.X[row].clone()
        if mine:
            # if the others lack a block, the peer's own training must not be lost
            some = seen.weight > 0
            some[mine[0]] = False
            for s, there in zip(seen.layout.slices, seen.has[some].any(0).tolist(), strict=True):
                if not there:
                    x[s] = updates.X[mine[0], s]
        return updates.reduced(x), state

    def _within(self, updates: Updates) -> Tensor:
        """Return the presence (K x blocks): others' rows only have what is in scope."""
        names, have = updates.layout.names, updates.has.clone()
        inside = torch.tensor([name in (self.scope or ()) for name in names])
        for i, (client, _) in enumerate(updates.rows):
            if client != self.own and client not in self.whole:
                have[i] &= inside
        return have


@dataclass(frozen=True)
class ConflictAverseMix(Stage):
    """One peer's conflict-averse update with safeguards (DFMTL thesis; see `fedloom.peers.conflict_averse_mix`).

    It works on the blocks that all rows have; the other blocks get the weighted mean, or with `heads` "averse" those of
    each task the mix of the rows that have them. `ctx.targets` is the peer. The actions of the safeguards on what all
    have are recorded; the solver's weights are remembered for smoothing.
    """

    c: BelowOne = 0.4
    rescale: Rescale = "1+c^2"
    add_own: bool = False
    safeguards: Safeguards = Safeguards()
    heads: Literal["mean", "averse"] = "mean"
    traits = Traits("mix", reads={"X", "weight"}, reduces=True, presence="coupled")

    def init(self, layout: Layout) -> State:
        return {"before": {}, **({"heads": {}} if self.heads == "averse" else {})}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        out = weighted_mean(updates.replace(coef=None))
        targets = ctx.targets or ()
        if len(targets) != 1:
            raise ValueError(f"{self!r}: expected one peer as the target, found {targets}")
        own, all_have = targets[0][0], updates.has.all(0)
        if "heads" in state:
            heads = dict(state["heads"])
            for task in updates.layout.tasks:
                some = [b.task == task and not there for b, there in zip(updates.layout.blocks, all_have, strict=True)]
                part = updates.layout.having(some)
                holders = updates.has[:, some].all(1).nonzero()[:, 0].tolist()
                heads[task] = self._mixed(own, updates.keep(holders), part, heads.get(task, {}), out, ctx, common=False)
            state = {**state, "heads": heads}
        part = updates.layout.having(all_have.tolist())
        return updates.reduced(out), {**state, "before": self._mixed(own, updates, part, state["before"], out, ctx)}

    def _mixed(
        self, own: str, updates: Updates, part: Layout, before: State, out: Tensor, ctx: Ctx, common: bool = True
    ) -> State:
        """Write the mix of these rows in these blocks to `out`; return the solver's weights that are known now."""
        X = updates.layout.take(updates.X, part)
        rows = {client: x for (client, _), x in zip(updates.rows, X, strict=True)}
        if own not in rows or not part.blocks:
            return before
        mixed = conflict_averse_mix(
            own, rows, c=self.c, rescale=self.rescale, add_own=self.add_own, safeguards=self.safeguards, before=before
        )
        updates.layout.put(out, part, mixed.update)
        if common:
            ctx.record("conflict-averse", {"peer": own, "weights": mixed.weights, "acted": mixed.acted})
        if "nonfinite" in mixed.acted:  # the other safeguards act in most rounds
            ctx.log("safeguard", {"peer": own, "what": "nonfinite", "why": str(mixed.acted["nonfinite"])})
        return {**before, **mixed.weights}


@dataclass(frozen=True)
class OnGraph(Stage):
    """Base of stages on an undirected graph over clients; for `topology` and `params` see `fedloom.peers.candidates`.

    Raises RecipeError for an unknown topology and, when called, for one that is impossible with so many clients;
    ValueError for a directed graph.
    """

    topology: str = "ring"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if resolved(self.topology, self.params).get("directed"):
            raise ValueError(f"{self!r}: this needs an undirected graph; set directed: false")

    def graph(self, names: Sequence[str], ctx: Ctx, every: int = 0) -> Graph:
        """Return the graph over these clients, drawn anew every `every` rounds."""
        return candidates(self.topology, names, seed=ctx.seed, round=ctx.round, every=every, **self.params)


@dataclass(frozen=True)
class Gossip(OnGraph, ModelMix):
    """Gossip: every trained model becomes a mean of itself and its neighbours, with Metropolis weights; see `dpsgd`."""

    every: Natural = 0
    traits = Traits("matrix", reads={"X", "base"}, separable=True, presence="coupled")

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        return torch.from_numpy(metropolis(self.graph([client for client, _ in updates.rows], ctx, self.every)))


@dataclass(frozen=True)
class SimilarityMix(SimilarityMixSettings, ModelMix):
    """Every trained model becomes a mean of itself and the `top` most similar, by similarity; see `dfmtl`.

    Tasks have equal weights. Without the extra "tasks" only updates count, over the columns that the stage sees.
    """

    traits = Traits("matrix", reads={"X", "base"}, wants={"extra:tasks"}, presence="coupled")

    def matrix(self, updates: Updates, ctx: Ctx) -> Tensor:
        names = [client for client, _ in updates.rows]
        parts = {"gradient": gradient(updates.X)}
        alpha = self.alpha if "tasks" in updates.extra else 0.0
        if alpha > 0:
            held = {n: str(t).split(",") for n, t in zip(names, updates.extra["tasks"], strict=True)}
            parts["overlap"] = overlap(task_weights({n: dict.fromkeys(tasks, 1.0) for n, tasks in held.items()}))
        S = combined(parts, {"overlap": alpha, "gradient": 1 - alpha})
        how: Any = {"include_self": self.include_self, "step": self.step}
        mixes: dict[str, dict[str, float]] = {}
        for i, own in enumerate(names):
            similarity = {other: float(S[i, j]) for j, other in enumerate(names) if j != i}
            weights = soft_weights(own, similarity, top_k(similarity, self.top), **how)
            mixes[own] = {other: w for other in names if (w := weights.get(other, 0.0)) > 0}
        ctx.record("mixing", {"weights": mixes})
        return torch.tensor([[mixes[i].get(j, 0.0) for j in names] for i in names], dtype=torch.float64)


@dataclass(frozen=True)
class Staleness(StalenessSettings, Stage):
    """Multiplies each weight by (1 + s)^-a (the polynomial discount of FedAsync: Xie, Koyejo, Gupta, 2019).

    s is the row's extra "staleness": the receiver's local rounds ended since the row was made. a = 0 changes nothing.
    """

    traits = Traits(reads={"weight", "extra:staleness"}, writes={"weight"}, presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        s = torch.tensor([float(rounds) for rounds in updates.extra["staleness"]], dtype=torch.float64)
        return updates.replace(weight=updates.weight * (1 + s).pow(-self.a)), state


@dataclass(frozen=True)
class Plateau(PlateauSettings, LocalRule):
    """Multiplies a client's learning rate by `factor` after `patience` rounds without a lower validation loss."""

    validation = True

    def init(self, base: Tensor) -> State:
        return {"best": math.inf, "waited": 0, "scale": 1.0}

    def begin(self, view: View, state: State) -> State:
        loss, best = view.validate(), float(state["best"])
        better = loss < best * (1 - self.min_delta)
        waited, scale = 0 if better else int(state["waited"]) + 1, float(state["scale"])
        if waited == self.patience:
            waited, scale = 0, scale * self.factor
        view.scale *= scale
        return {"best": loss if better else best, "waited": waited, "scale": scale}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return state, {}


@dataclass(frozen=True)
class InterCluster(LocalRule):
    """Adds mu/2 |y - o|^2 to the loss, o being the mean of models of other groups: what draws groups together.

    The thesis asks for a regularisation between clusters (section 1.1) that keeps knowledge shared across tasks, and
    gives no formula. This one is ours: the proximal term of FedProx with the other groups' models as its anchor.

    The broadcast has `others` = o and `pull`: mu if there are such models, else 0. Without a broadcast nothing is done.
    """

    mu: NonNegative
    needs = frozenset({"broadcast:others", "broadcast:pull"})

    def grad(self, view: View, state: State) -> None:
        if "pull" not in view.broadcast:
            return
        for s in view.shared:
            view.grad[s].addcmul_(view.broadcast["pull"][s], view.params[s] - view.broadcast["others"][s])


def at_peers(method: Method, config: PeersBase) -> Method:
    """Return the method as it runs at peers. Raises RecipeError if it needs a server."""
    if method.shares_nothing and not method.extras:
        raise RecipeError(f"peers: {method.name} shares nothing, so peers would send nothing; choose another method")
    weighs = config.weights.kind in ("soft", "metropolis") and config.conflict_averse is None
    if weighs and "weight" not in method.stage.traits.reads:
        raise RecipeError(
            f"peers: {method.name} does not read weights, so weights of kind {config.weights.kind!r} would have "
            "no effect; set weights: {kind: uniform}"
        )
    if why := next((why for stage in every(method.stage) for why in stage.unfit(None)), None):
        raise RecipeError(f"peers: {why}")
    if method.weights == "declared":
        raise RecipeError(
            "peers: method.weights: declared found, but peers know only what other peers send; set method.max_examples"
        )
    by_task = method.task_vectors
    if method.turn.by_task and not by_task:
        raise RecipeError(f"peers: {method.name} sends one update per task to one model, which needs a server")
    for what, there in (
        ("a scope other than full", config.scope != "full" or (config.warmup and config.warmup.scope != "full")),
        ("a penalty", config.penalty > 0),
        ("metropolis or soft weights", config.weights.kind in ("metropolis", "soft")),
        ("groups by outputs", config.choose.groups is not None and config.choose.groups.fine is not None),
        ("weights without the peer itself", not config.weights.include_self),
        ("judging by anything but overlap", config.judges and set(config.similarity.signals) != {"overlap"}),
    ):
        if by_task and there:
            raise RecipeError(f"peers: {method.name} has one vector per task, which cannot be combined with {what}")
    try:
        if config.conflict_averse is not None:
            ca = config.conflict_averse
            mix = ConflictAverseMix(ca.c, ca.rescale, ca.add_own, ca.safeguards, ca.heads)
            averse = method.combined_by(mix).stage
            method = replace(
                method, stage=Switch(config.warmup.until, method.stage, averse) if config.warmup else averse
            )
        also = frozenset({"broadcast:others", "broadcast:pull"}) if config.penalty else frozenset[str]()
        if config.weights.kind in ("size", "uniform"):
            method = replace(method, weights=config.weights.kind)
        method = replace(method, stage=AtPeer(method.stage, also=also))
        return replace(method, local=(*method.local, InterCluster(config.penalty))) if config.penalty else method
    except ValueError as error:
        raise RecipeError(f"peers: {error}") from error
