"""A method as it runs under differential privacy of clients."""

from __future__ import annotations

from dataclasses import replace

from fedloom.errors import RecipeError
from fedloom.methods.method import Method
from fedloom.recipes.privacy import Privacy
from fedloom.stages.mean import adds_up
from fedloom.stages.private import Bounded, PrivateMean, RowNoise
from fedloom.stages.stage import Chain, Stage


def private(method: Method, section: Privacy, noise: float, share: float) -> Method:
    """The method with clipping as the last writer of rows at the client, and noise where the trust is.

    `noise` is in units of the clipping norm, `share` the expected part of the clients in a round. Raises RecipeError
    where something that depends on clients' data would not be accounted for.
    """
    beside = [*sorted(method.extras), *method.auxiliary, *(("support",) if method.wants_support else ())]
    if method.pooled or method.shares_nothing:
        raise RecipeError(f"privacy: with {method.name} clients send nothing, so there is nothing to protect")
    if method.rows == "client-task":
        raise RecipeError(f"privacy: {method.name} sends a row for each task, so a client counts more than once")
    if beside:
        raise RecipeError(
            f"privacy: {method.name} sends {', '.join(beside)} beside the update, which no noise protects"
        )
    clip = Bounded(section.clip)
    if section.trust == "local":
        return method.plus(clip >> RowNoise(section.clip, noise))
    if method.weights != "uniform" and method.max_examples is None:
        raise RecipeError(
            f"privacy: {method.name} weighs clients by their numbers of examples, which nothing bounds; set "
            "method.weights: uniform, or method.max_examples"
        )
    cap = 1.0 if method.weights == "uniform" else float(method.max_examples or 1)
    mean = PrivateMean(section.clip, noise, share, cap)
    return replace(method.plus(clip), stage=_noisy(method, mean))


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
    return Chain((mean, *after)) if after else mean
