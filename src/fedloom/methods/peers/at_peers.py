"""The regulariser between groups of peers, as a local rule.

A method that was written for a server, as it runs at peers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.core.combine import Switch
from fedloom.core.context import State
from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import NonNegative
from fedloom.core.stage import every
from fedloom.methods.method import Method
from fedloom.methods.peers.aggregation import AtPeer, ConflictAverseMix
from fedloom.methods.peers.config import PeersBase
from fedloom.methods.peers.safeguards import Safeguards
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class InterCluster(LocalRule):
    """Adds mu/2 |y - o|^2 to the loss, o being the mean of models of other groups (`peers.inter_cluster_penalty`).

    The broadcast has `others` = o and `pull`, which is mu if there are such models and 0 otherwise. Without a broadcast
    the rule does nothing.
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
    if method.shares_nothing:
        raise RecipeError(f"peers: {method.name} shares nothing, so peers would send nothing; choose another method")
    weighs = config.weights.kind in ("soft", "metropolis") and config.conflict_averse is None
    if weighs and "weight" not in method.stage.traits.reads:
        raise RecipeError(
            f"peers: {method.stage!r} does not read weights, so weights of kind {config.weights.kind!r} would have "
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
            guards = Safeguards(**ca.safeguards.model_dump())
            mix = ConflictAverseMix(ca.c, ca.rescale, ca.add_own, guards)
            averse = method.combined_by(mix).stage
            method = replace(
                method,
                stage=Switch(config.warmup.until, method.stage, averse) if config.warmup else averse,
            )
        also = frozenset({"broadcast:others", "broadcast:pull"}) if config.penalty else frozenset[str]()
        if config.weights.kind in ("size", "uniform"):
            method = replace(method, weights=config.weights.kind)
        method = replace(method, stage=AtPeer(method.stage, also=also))
        return replace(method, local=(*method.local, InterCluster(config.penalty))) if config.penalty else method
    except ValueError as error:
        raise RecipeError(f"peers: {error}") from error
