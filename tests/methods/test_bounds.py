"""Parameters of stages and rules: where their ranges end, and that methods and stages have the same defaults."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from fedloom import methods, server, stages, training
from fedloom.methods import ADDONS, METHODS, Method
from fedloom.methods.f2dc.aggregation import domain_aware_weights
from fedloom.methods.peers.at_peers import InterCluster
from fedloom.methods.peers.config import (
    AdaptiveScope,
    Choose,
    ConflictAverse,
    GroupsSection,
    PeersBase,
    SafeguardsSection,
    SketchSection,
    Warmup,
    Weights,
)
from fedloom.methods.peers.scenario import Presence, Stragglers
from fedloom.peers import (
    TOPOLOGIES,
    Safeguards,
    Scenario,
    Sketch,
    coarse_clusters,
    conflict_averse_mix,
    fine_clusters,
    next_scope,
    soft_weights,
)
from fedloom.stages import Identity, Mean
from fedloom.tasks import Depth, DepthError, Edge, OdsF, PlainEdgeF, edge_bce
from fedloom.taskvectors import aggregate_tasks
from fedloom.training import Optimizer, Schedule, Training, feature_losses, gumbel_mask

LITTLE = 1e-9


def least(value: float) -> tuple[list[float], list[float]]:
    """Allowed and refused: from a value up."""
    return [value, value + LITTLE], [value - LITTLE]


def above(value: float) -> tuple[list[float], list[float]]:
    return [value + LITTLE], [value, value - LITTLE]


def whole(value: int) -> tuple[list[float], list[float]]:
    return [value, value + 1], [value - 1]


def between(
    low: float, high: float, open_low: bool = False, open_high: bool = False
) -> tuple[list[float], list[float]]:
    """From low to high, without those ends that are open."""
    good, bad = ([low + LITTLE], [low]) if open_low else ([low, low + LITTLE], [low - LITTLE])
    more, worse = ([high - LITTLE], [high]) if open_high else ([high, high - LITTLE], [high + LITTLE])
    return good + more, bad + worse


def small_world(**given: Any) -> Any:
    return TOPOLOGIES["small-world"].params(**given)


def torus(**given: Any) -> Any:
    return TOPOLOGIES["torus"].params(**given)


def scope(**given: float) -> str:
    return next_scope(0.0, **given)


def soft(**given: float) -> dict[str, float]:
    return soft_weights("a", {"b": 1.0}, ["b"], **given)


def clusters(**given: int) -> Any:
    return coarse_clusters(["a"], torch.ones(1, 1), **given)


def mask(sigma: float) -> Tensor:
    return gumbel_mask(torch.zeros(2), sigma)


ROBUST = (
    stages.Krum,
    stages.MultiKrum,
    stages.NearestMix,
    stages.GeometricMedian,
    stages.ClipNorms,
    stages.TrimmedMean,
)
RANGES: list[tuple[Callable[..., Any], dict[str, Any], str, tuple[list[float], list[float]]]] = [
    (stages.TaskVectors, {}, "rho", between(0, 1)),
    (stages.TaskVectors, {}, "epsilon", between(0, 1)),
    (stages.TaskVectors, {}, "kappa", whole(0)),
    (stages.ChosenClusters, {}, "count", whole(1)),
    (stages.ChosenClusters, {}, "noise", least(0)),
    (stages.SoftClusters, {}, "count", whole(1)),
    (stages.SimilarityMix, {}, "top", whole(0)),
    (stages.SimilarityMix, {}, "alpha", between(0, 1)),
    (stages.SimilarityMix, {}, "step", between(0, 1, open_low=True)),
    (stages.HistoryAttention, {}, "beta", between(0, 1, open_high=True)),
    (stages.HistoryAttention, {}, "temperature", above(0)),
    (stages.Heal, {}, "tau", ([-2, 0, 1 - LITTLE], [1, 1.5])),
    (stages.Heal, {}, "beta", between(0, 1)),
    (stages.TaskLeaders, {}, "c", between(0, 1, open_high=True)),
    (stages.TaskLeaders, {}, "alpha", least(0)),
    (stages.Staleness, {}, "a", least(0)),
    (stages.Every, {"stage": Identity()}, "rounds", whole(1)),
    (stages.Switch, {"before": Mean(), "after": Mean()}, "round", whole(1)),
    (stages.ActivatedDimensions, {}, "rho", between(0, 1, open_low=True, open_high=True)),
    (stages.ActivatedDimensions, {}, "bins", whole(1)),
    (stages.SimilarGroups, {}, "groups", whole(1)),
    (stages.ConflictAverseMix, {}, "c", between(0, 1, open_high=True)),
    (stages.CAGrad, {}, "c", between(0, 1, open_high=True)),
    (stages.GradVac, {}, "beta", between(0, 1)),
    (stages.FairGrad, {}, "alpha", above(0)),
    (stages.AttentionAcrossTasks, {}, "alpha", above(0)),
    (stages.AttentionAcrossTasks, {}, "sigma", above(0)),
    (stages.ConsensusMask, {}, "lam", least(0)),
    (stages.ConsensusMask, {}, "least", whole(1)),
    (stages.ExactFactors, {}, "scale", above(0)),
    (stages.LossWeights, {}, "step", least(0)),
    (stages.LossWeights, {}, "decay", least(0)),
    (stages.SingleTaskModels, {}, "attenuation", between(0, 1)),
    (stages.SoftClusters, {}, "noise", least(0)),
    (stages.HyperCrossAttention, {}, "init", between(0, 1)),
    (stages.HyperCrossAttention, {}, "lr", least(0)),
    (stages.HyperCrossAttention, {}, "weight_decay", least(0)),
    (stages.HyperCrossAttention, {}, "momentum", between(0, 1, open_high=True)),
    *((rule, {}, "f", whole(0)) for rule in ROBUST),
    (stages.CentredClip, {}, "limit", above(0)),
    (stages.CentredClip, {}, "steps", whole(1)),
    (stages.DomainWeights, {}, "classes", whole(1)),
    (stages.DomainWeights, {}, "domains", whole(1)),
    (stages.DomainWeights, {}, "alpha", ([-3, 0], [math.inf, -math.inf])),
    (stages.DomainWeights, {}, "beta", ([-3, 0], [math.inf, -math.inf])),
    (stages.TrainedPrototypes, {}, "epochs", whole(0)),
    (stages.TrainedPrototypes, {}, "batch_size", whole(1)),
    (stages.TrainedPrototypes, {}, "lr", above(0)),
    (stages.TrainedPrototypes, {}, "limit", ([0, 1e9], [-LITTLE, math.inf])),
    (stages.MovingAnchors, {}, "momentum", between(0, 1)),
    (stages.HyperConflictAverse, {}, "init", between(0, 1)),
    (stages.HyperConflictAverse, {}, "lr", least(0)),
    (stages.HyperConflictAverse, {}, "weight_decay", least(0)),
    (stages.HyperConflictAverse, {}, "momentum", between(0, 1, open_high=True)),
    (stages.HyperConflictAverse, {}, "c", between(0, 1, open_high=True)),
    (stages.TopMagnitude, {}, "rho", between(0, 1, open_low=True)),
    (stages.Attention, {}, "alpha", above(0)),
    (stages.Attention, {}, "sigma", above(0)),
    (stages.CosineMix, {}, "tau", above(0)),
    (training.Proximal, {}, "mu", least(0)),
    (InterCluster, {}, "mu", least(0)),
    (Safeguards, {}, "clip", ([LITTLE, 1e9], [0, -1, math.inf])),
    (Safeguards, {}, "clip_result", ([LITTLE, 1e9], [0, -1, math.inf])),
    (Safeguards, {}, "ridge", ([LITTLE, 1e9], [0, -1, math.inf])),
    (Safeguards, {}, "ema", between(0, 1, open_high=True)),
    (Sketch, {}, "m", whole(1)),
    (server.Momentum, {}, "beta", between(0, 1, open_high=True)),
    (server.Lookahead, {}, "lam", between(0, 1, open_high=True)),
    (server.Adaptive, {"kind": "adam"}, "b1", between(0, 1, open_high=True)),
    (server.Adaptive, {"kind": "adam"}, "b2", between(0, 1, open_high=True)),
    (server.Adaptive, {"kind": "adam"}, "eps", above(0)),
    (server.Adaptive, {"kind": "adam"}, "v0", least(0)),
    (training.Dual, {}, "alpha", above(0)),
    (mask, {}, "sigma", above(0)),
    (Optimizer, {}, "momentum", between(0, 1, open_high=True)),
    (Schedule, {}, "warmup_start", between(0, 1)),
    (Schedule, {}, "floor", between(0, 1)),
    (Schedule, {}, "gamma", between(0, 1, open_low=True)),
    (Training, {}, "participation", between(0, 1, open_low=True)),
    (Choose, {}, "top", whole(0)),
    (GroupsSection, {}, "low", whole(2)),
    (GroupsSection, {"low": 2}, "high", whole(2)),
    (GroupsSection, {}, "fine", between(0, 1)),
    (Weights, {}, "step", between(0, 1, open_low=True)),
    (SafeguardsSection, {}, "ema", between(0, 1, open_high=True)),
    (ConflictAverse, {}, "c", between(0, 1, open_high=True)),
    (AdaptiveScope, {"leave": -1}, "enter", between(-1, 1)),
    (AdaptiveScope, {"enter": 1}, "leave", between(-1, 1)),
    (Scenario, {}, "seed", whole(0)),
    (Scenario, {}, "dropout", between(0, 1, open_high=True)),
    (Scenario, {}, "loss", between(0, 1, open_high=True)),
    (Stragglers, {}, "share", between(0, 1, open_high=True)),
    (Stragglers, {}, "slowdown", least(1)),
    (small_world, {}, "k", whole(2)),
    (small_world, {}, "p", between(0, 1)),
    (torus, {}, "rows", whole(2)),
    (scope, {"leave": -1}, "enter", between(-1, 1)),
    (scope, {"enter": 1}, "leave", between(-1, 1)),
    (soft, {}, "step", between(0, 1, open_low=True)),
    (clusters, {}, "low", whole(2)),
    (clusters, {"low": 3}, "high", whole(3)),
]


@pytest.mark.parametrize(
    ("make", "given", "name", "values"), RANGES, ids=[f"{make.__name__}.{name}" for make, _, name, _ in RANGES]
)
def test_every_range_ends_where_it_says(
    make: Callable[..., Any], given: dict[str, Any], name: str, values: tuple[list[float], list[float]]
) -> None:
    good, bad = values
    for value in good:
        make(**given, **{name: value})
    for value in [*bad, *([math.nan] if any(isinstance(v, float) for v in bad) else [])]:
        with pytest.raises(ValueError, match=name.rstrip("s")):
            make(**given, **{name: value})


# Methods that set what the stage or rule alone would do in another way.
OTHERWISE = {
    ("ties", "TopMagnitude"): {"rescale"},
    ("dare", "TopMagnitude"): {"keep"},
    ("colnet", "Safeguards"): {"clip", "ridge", "ema"},
    ("fedpmt", "SimilarGroups"): {"groups"},
    ("fedproto", "MeanPrototypes"): {"by"},
    ("fedrep", "Phase"): {"share"},
    ("fedspd", "ChosenClusters"): {"first", "mixed"},
    ("rr-cluster", "ChosenClusters"): {"least"},
}


def parts(value: Any) -> Iterator[Any]:
    """All stages, rules and the like that a method is made of."""
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))
    elif isinstance(value, tuple | list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from parts(one)


@pytest.mark.parametrize("name", [*METHODS.entries, *(name for name in ADDONS.entries if name != "server-step")])
def test_the_defaults_of_a_method_are_those_of_its_stages(name: str) -> None:
    """Both are documented, and a person who builds the method by hand must get the same."""
    if name in METHODS.entries:
        method = METHODS.entries[name].function()
    else:
        method = ADDONS.entries[name].function(methods.fedavg())
    for part in parts(method):
        if isinstance(part, Method):
            continue
        other = {
            field.name
            for field in dataclasses.fields(part)
            if isinstance(field.default, int | float | str) and getattr(part, field.name) != field.default
        }
        assert other == OTHERWISE.get((name, type(part).__name__), set()), part


def defaults(function: Callable[..., Any], *names: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in names}


def test_what_a_recipe_leaves_out_is_what_the_functions_do_by_themselves() -> None:
    mix = defaults(conflict_averse_mix, "c", "rescale", "add_own")
    assert SafeguardsSection().model_dump() == dataclasses.asdict(Safeguards())
    assert ConflictAverse().model_dump(exclude={"safeguards"}) == mix
    assert defaults(stages.ConflictAverseMix, "c", "rescale", "add_own") == mix
    assert AdaptiveScope().model_dump() == defaults(next_scope, "enter", "leave")
    assert GroupsSection().model_dump() == {
        **defaults(coarse_clusters, "low", "high"),
        "fine": defaults(fine_clusters, "threshold")["threshold"],
    }
    assert Weights().model_dump(exclude={"kind"}) == defaults(soft_weights, "step", "include_self")
    assert defaults(stages.SimilarityMix, "step", "include_self") == defaults(soft_weights, "step", "include_self")
    assert SketchSection().model_dump() == defaults(Sketch, "m", "kind")
    assert Optimizer().model_dump(include={"betas", "eps"}) == defaults(torch.optim.Adam, "betas", "eps")


def test_classes_and_their_functions_have_the_same_defaults() -> None:
    assert OdsF().max_dist == Edge("e").max_dist
    assert len(OdsF().levels) == len(PlainEdgeF().levels) == Edge("e").thresholds
    assert defaults(edge_bce, "positive_weight") == defaults(Edge, "positive_weight")
    assert defaults(DepthError, "limit", "log") == defaults(Depth, "limit", "log")
    assert defaults(domain_aware_weights, "alpha", "beta") == defaults(stages.DomainWeights, "alpha", "beta")
    fusion = ("rho", "kappa", "epsilon", "combine", "cross", "source")
    assert defaults(aggregate_tasks, *fusion) == defaults(stages.TaskVectors, *fusion)
    losses = ("tau", "lambda1", "lambda2")
    assert defaults(feature_losses, *losses) == defaults(training.FeatureModules, *losses)


LEFT_OUT: list[tuple[BaseModel, BaseModel]] = [
    (
        Training(),
        Training(
            rounds=10, epochs=None, steps=None, batch_size=32, clip_norm=None, keep_optimizer=False, participation=1,
            precision="fp32", stacked=False,
        ),
    ),
    (Optimizer(), Optimizer(name="sgd", lr=0.05, momentum=0, nesterov=False, weight_decay=0, fused=False)),
    (Schedule(), Schedule(name="constant", warmup=0, warmup_start=0, floor=0, step_every=30, gamma=0.1)),
    (Scenario(), Scenario(seed=0, dropout=0, loss=0, bandwidth=None, latency=0, speed=None)),
    (Scenario().stragglers, Stragglers(share=0, slowdown=5, every_round=False)),
    (Presence(), Presence(joins=1, away=())),
    (PeersBase(), PeersBase(similarity={"signals": {"gradient": 1}, "every": 1}, scope="full", penalty=0)),
    (Warmup(until=3), Warmup(until=3, scope="encoder", alone=1)),
]  # fmt: skip


@pytest.mark.parametrize(("short", "long"), LEFT_OUT, ids=[type(short).__name__ for short, _ in LEFT_OUT])
def test_defaults_of_recipe_sections(short: BaseModel, long: BaseModel) -> None:
    """Recipes that are written down leave them out, and must go on meaning the same."""
    assert type(short).model_validate(short.model_dump()) == long


@pytest.mark.parametrize(
    "section", [Training, Optimizer, Schedule, SafeguardsSection, Weights, AdaptiveScope, GroupsSection]
)
def test_defaults_lie_in_their_own_ranges(section: type[BaseModel]) -> None:
    """Pydantic checks what is given, not what is left out."""
    assert section.model_validate(section().model_dump()) == section()
