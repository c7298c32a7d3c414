"""A method as it runs under differential privacy of clients."""

from __future__ import annotations

from dataclasses import replace

from fedloom.errors import RecipeError
from fedloom.methods.method import Method
from fedloom.stages.private import Bounded, PrivateMean, RowNoise
from fedloom.stages.stage import Chain, Stage, adds_up

KNOWN = frozenset({"domain", "tasks"})
"""Extras that the server knows of each client before the first round, and that a client cannot change."""


def private(method: Method, *, clip: float, noise: float, share: float, local: bool) -> Method:
    """The method with clipping as the last writer of rows at the client, and noise where the trust is.

    `noise` is in units of the clipping norm `clip`, `share` the expected part of the clients in a round; with `local`
    each client adds noise to what it sends, else the server to the sum. Raises RecipeError
    where something that depends on clients' data would not be accounted for.
    """
    beside = [*sorted(method.extras - KNOWN), *method.auxiliary, *(("support",) if method.wants_support else ())]
    if method.pooled or method.shares_nothing:
        raise RecipeError(f"privacy: with {method.name} clients send nothing, so there is nothing to protect")
    if method.rows == "client-task":
        raise RecipeError(f"privacy: {method.name} sends a row for each task, so a client counts more than once")
    if beside:
        raise RecipeError(
            f"privacy: {method.name} sends {', '.join(beside)} beside the update, which no noise protects"
        )
    if local:
        return method.plus(Bounded(clip) >> RowNoise(clip, noise))
    if method.weights != "uniform" and method.max_examples is None:
        raise RecipeError(
            f"privacy: {method.name} weighs clients by their numbers of examples, which nothing bounds; set "
            "method.weights: uniform, or method.max_examples"
        )
    cap = 1.0 if method.weights == "uniform" else float(method.max_examples or 1)
    mean = PrivateMean(clip, noise, share, cap)
    return replace(method.plus(Bounded(clip)), stage=_noisy(method, mean))


def _noisy(method: Method, mean: PrivateMean) -> Stage:
    """The method's aggregation with a private mean in place of its plain one, which must be the first to see rows."""
    first, *after = method.stage.stages if isinstance(method.stage, Chain) else (method.stage,)
    if not adds_up(first):
        does = {"row": "changes rows behind the clip", "mix": "weighs or mixes rows by what is in them"}
        why = does.get(first.traits.kind, "looks at the columns of all rows")
        raise RecipeError(
            f"privacy: {method.name}: {first!r} {why}, so nobody knows how much one client can move the result; "
            "expected a server that takes a mean of rows, changes of rows at the client (at: edge), or trust: local"
        )
    for stage in after:
        if told := sorted(stage.traits.reads - {"X", "base"}):
            raise RecipeError(f"privacy: {method.name}: {stage!r} reads {told[0]} of the rows, which no noise protects")
    return Chain((mean, *after)) if after else mean
