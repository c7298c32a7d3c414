"""A method as it runs under differential privacy of clients."""

from __future__ import annotations

from dataclasses import replace

from fedloom.core.errors import RecipeError
from fedloom.core.stage import Chain, Stage
from fedloom.methods.clusters.centres import ChosenClusters
from fedloom.methods.method import Method
from fedloom.methods.private.aggregation import Bounded, PrivateClusters, PrivateMean, RowNoise

KNOWN = frozenset({"domain", "tasks"})
"""Extras that the server knows of each client before the first round, and that a client cannot change."""


def private(method: Method, *, clip: float, noise: float, share: float, local: bool) -> Method:
    """Return the method with clipping as the last writer of rows at the client, and noise where the trust is.

    `noise` is in units of the clipping norm `clip`, `share` the expected part of the clients in a round; with `local`
    each client adds noise to what it sends, else the server to the sum. Raises RecipeError
    where something that depends on clients' data would not be accounted for.
    """
    known = KNOWN if local or not isinstance(_stages(method)[0], ChosenClusters) else KNOWN | {"cluster"}
    beside = [*sorted(method.extras - known), *method.auxiliary, *(("support",) if method.wants_support else ())]
    if (method.turn.pool or method.shares_nothing) and not beside:
        raise RecipeError(
            f"privacy: clients of {method.name} send nothing, so there is nothing to protect; leave privacy out"
        )
    if method.turn.by_task:
        raise RecipeError(f"privacy: {method.name} sends one row per task, so a client would count more than once")
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


def _stages(method: Method) -> tuple[Stage, ...]:
    return method.stage.stages if isinstance(method.stage, Chain) else (method.stage,)


def _noisy(method: Method, mean: PrivateMean) -> Stage:
    """Return the method's aggregation with a private mean for its plain one, which must be the first to see rows."""
    first, *after = _stages(method)
    if isinstance(first, ChosenClusters) and first.stage.replaceable and not after:
        if first.first == "groups":
            raise RecipeError(
                f"privacy: {method.name} starts with groups that it computes from the rows, so nothing bounds how "
                "much one client can move them; set method.first: noise"
            )
        return PrivateClusters(first.count, first.first, first.noise, mean, first.least)
    if not first.replaceable:
        does = {"row": "changes rows after the clip", "mix": "weights or mixes rows by their values"}
        why = does.get(first.traits.kind, "reads the columns of all rows")
        raise RecipeError(
            f"privacy: {method.name}: {first!r} {why}, so nothing bounds how much one client can move the result; "
            "expected a server that takes a mean of rows, changes of rows at the client (at: edge), or trust: local"
        )
    for stage in after:
        if fields := sorted(stage.traits.reads - {"X", "base"}):
            raise RecipeError(f"privacy: {method.name}: {stage!r} reads {fields[0]} of the rows, which has no noise")
    return Chain((mean, *after)) if after else mean
