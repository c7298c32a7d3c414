"""Differential privacy of clients: a method with rows of bounded norm, and noise that hides any one of them.

The Gaussian mechanism of DP-FedAvg (McMahan, Ramage, Talwar, Zhang, ICLR 2018) with a fixed denominator. What it costs
is counted in `fedloom.federation.rounds.privacy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.errors import RecipeError
from fedloom.core.mean import block_groups
from fedloom.core.stage import Chain, Stage, Traits, in_turn
from fedloom.core.updates import Updates
from fedloom.methods.clusters.centres import ChosenClusters
from fedloom.methods.method import Method


def bounded(updates: Updates, clip: float) -> Tensor:
    """Return factors (K, float64) by which no row is longer than `clip`."""
    return clip / updates.norms.clamp(min=clip)


@dataclass(frozen=True)
class Bounded(Stage):
    """Scale each row down to a norm of at most `clip`."""

    clip: float
    traits = Traits(presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=updates.X * bounded(updates, self.clip)[:, None].to(updates.X)), state


@dataclass(frozen=True)
class RowNoise(Stage):
    """Add Gaussian noise of standard deviation noise x clip to what each row has; `Bounded` comes before it."""

    clip: float
    noise: float
    traits = Traits(presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        out = updates.X.clone()
        for k, row in enumerate(updates.rows):
            drawn = ctx.hidden("row noise", *row).normal(updates.layout.d).to(out)
            for s in updates.layout.spans(updates.part(k)):
                out[k, s] += self.noise * self.clip * drawn[s]
        return updates.replace(X=out), state


@dataclass(frozen=True)
class PrivateMean(Stage):
    """The mean of the rows, each of a norm of at most `clip`, with Gaussian noise that hides any one of them.

    u_i = (sum_k min(1, w_k / cap) min(1, clip / |X_k|) X_ki + noise clip g_i) / (share N_i), g_i standard normal.

    N_i is the number of all clients that may have coordinate i, `share` the part of them that is expected in a round:
    the divisor does not depend on who came, or it would tell. One client moves the sum by at most `clip`, whatever it
    sends. `cap` is the weight from which a row counts fully. Acts in rounds without any row too. Means of one round
    draw noise of their own by `number`.
    """

    clip: float
    noise: float
    share: float = 1.0
    cap: float = 1.0
    number: int | None = None
    traits = Traits("mix", reads={"X", "weight"}, reduces=True, hides=math.inf, presence="row", sums=True)
    robust = True

    def row_weights(self, updates: Updates) -> Tensor:
        """Return the factors of the rows in the sum (K)."""
        return bounded(updates, self.clip) * (updates.weight / self.cap).clamp(max=1)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        layout = updates.layout
        w = self.row_weights(updates)
        groups = block_groups(layout, updates.present, None)
        out = updates.summed([(a, b, w if members is None else w * members) for a, b, members in groups])
        purpose = ("noise",) if self.number is None else ("noise", self.number)
        out += self.noise * self.clip * ctx.hidden(*purpose).normal(layout.d).to(out)
        for block, s in zip(layout.blocks, layout.slices, strict=True):
            task = None if updates.present is None else block.task
            out[s] /= self.share * ctx.trainers(task, max(len(updates), 1))
        return updates.reduced(out), state


SIZES = 0.1
"""The part of a round's privacy that sizes of clusters take: noise z is worth 1/z^2, and such parts add up."""


@dataclass(frozen=True)
class PrivateClusters(ChosenClusters):
    """`ChosenClusters` whose models are moved by private means, of at least `least` clients by what is known of sizes.

    The method `rr-cluster` has the equations. A client counts in one size and one sum, by at most 1 and `clip`, so both
    together cost what one `PrivateMean` of noise z costs (composition in Gaussian differential privacy: Dong, Roth, Su,
    JRSS B 2022). Rows are clipped here, relative to the model that their client chose.
    """

    stage: PrivateMean = PrivateMean(1.0, 1.0)

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, hides=max(self.least, 1))

    def movers(self, clients: Sequence[str], chosen: Sequence[int], ctx: Ctx) -> tuple[Sequence[int], Sequence[Stage]]:
        least, z = max(self.least, 1), self.stage.noise
        drawn = ctx.hidden("sizes").normal(self.count, torch.float64)
        counts = torch.bincount(torch.tensor([j for j in chosen if j < self.count]).long(), minlength=self.count)
        sizes = (counts + z / math.sqrt(SIZES) * drawn).clamp(min=0)
        lack, spare = (least - sizes).clamp(min=0), (sizes - least).clamp(min=0)
        lent = spare * min(1.0, float(lack.sum() / spare.sum().clamp(min=1e-9)))
        got = lack * float(lent.sum() / lack.sum().clamp(min=1e-9))
        counted = list(chosen)
        for i, (client, j) in enumerate(zip(clients, chosen, strict=True)):
            goes, where = ctx.hidden("lent", client).uniform(2).tolist()
            if j < self.count and goes * float(sizes[j]) < float(lent[j]):
                counted[i] = int((got.cumsum(0) <= where * float(got.sum())).sum())
        expected = (sizes - lent + got).clamp(min=least) / ctx.trainers(None, max(len(clients), 1))
        own = replace(self.stage, noise=z / math.sqrt(1 - SIZES))
        return counted, [replace(own, share=float(expected[j]), number=j) for j in range(self.count)]


KNOWN = frozenset({"domain", "tasks"})
"""Extras that the server knows of each client before the first round, and that a client cannot change."""


def private(method: Method, *, clip: float, noise: float, share: float, local: bool) -> Method:
    """Return the method with clipping as the last writer of rows at the client, and noise where the trust is.

    `noise` is in units of the clipping norm `clip`, `share` the expected part of the clients in a round; with `local`
    each client adds noise to what it sends, else the server to the sum. Raises RecipeError
    where something that depends on clients' data would not be accounted for.
    """
    known = KNOWN if local or not isinstance(in_turn(method.stage)[0], ChosenClusters) else KNOWN | {"cluster"}
    beside = [*sorted(method.extras - known), *method.auxiliary, *(("support",) if method.wants_support else ())]
    if (method.turn.pool or method.shares_nothing) and not beside:
        raise RecipeError(
            f"privacy: clients of {method.name} send nothing, so there is nothing to protect; leave privacy out"
        )
    if method.turn.by_task:
        raise RecipeError(
            f"privacy: {method.name} sends one row per task, so a client would count more than once; fedavg sends one "
            "for all its tasks, and heads are averaged over those that have their task"
        )
    if beside:
        raise RecipeError(f"privacy: {method.name} sends {', '.join(beside)} beside the update, without noise")
    if local:
        return method.plus(Bounded(clip) >> RowNoise(clip, noise))
    if method.weights != "uniform" and method.max_examples is None:
        raise RecipeError(
            f"privacy: {method.name} weights clients by their numbers of examples, which have no bound; set "
            "method.weights: uniform, or method.max_examples"
        )
    cap = 1.0 if method.weights == "uniform" else float(method.max_examples or 1)
    mean = PrivateMean(clip, noise, share, cap)
    stage = _noisy(method, mean)
    # a change of cluster is no update, so rows of clusters are clipped where the clusters' models are known
    return replace(method if isinstance(stage, PrivateClusters) else method.plus(Bounded(clip)), stage=stage)


def _is_mean(stage: Stage) -> bool:
    """Return whether a private mean does what a stage does, but for the noise: a plain rule that only adds rows up."""
    return stage.replaceable and stage.traits.sums


def _noisy(method: Method, mean: PrivateMean) -> Stage:
    """Return the method's aggregation with a private mean for its plain one, which must be the first to see rows."""
    first, *after = in_turn(method.stage)
    if isinstance(first, ChosenClusters) and _is_mean(first.stage) and not after:
        if first.first == "groups":
            raise RecipeError(
                f"privacy: {method.name} starts with groups that it computes from the rows, so nothing bounds how "
                "much one client can move them; set method.first: noise"
            )
        return PrivateClusters(first.count, first.first, first.noise, mean, first.least)
    if not _is_mean(first):
        does = {"row": "changes rows after the clip", "mix": "weights or mixes rows by their values"}
        why = does.get(first.traits.kind, "reads the columns of all rows")
        raise RecipeError(
            f"privacy: {method.name}: {first} {why}, so nothing bounds how much one client can move the result; "
            "expected a server that takes a mean of rows, changes of rows at the client (at: edge), or trust: local"
        )
    for stage in after:
        if fields := sorted(stage.traits.reads - {"X", "base"}):
            raise RecipeError(f"privacy: {method.name}: {stage} reads {fields[0]} of the rows, which has no noise")
    return Chain((mean, *after)) if after else mean
