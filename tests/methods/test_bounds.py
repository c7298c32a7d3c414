"""Parameters of stages and rules: their ranges, equal defaults of functions, and that they reach what uses them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from fedloom import methods, peers, server, stages, training
from fedloom.core.layout import ALL_BUT_ENCODER, EVERYTHING
from fedloom.core.settings.section import PARTS, Checked, hints_of
from fedloom.methods import METHODS
from fedloom.methods.f2dc.rules import domain_aware_weights
from fedloom.methods.peers.aggregation import InterCluster
from fedloom.methods.peers.config import (
    AdaptiveScope,
    ConflictAverse,
    GroupsSection,
    SketchSection,
    Weights,
)
from fedloom.peers import (
    TOPOLOGIES,
    Safeguards,
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


RANGES: list[tuple[Callable[..., Any], dict[str, Any], str, tuple[list[float], list[float]]]] = [
    (mask, {}, "sigma", above(0)),
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


NEEDED: dict[str, dict[str, Any]] = {
    "Anchor": {"mu": 0.1},
    "DualShift": {"stage": Mean()},
    "Every": {"rounds": 1, "stage": Identity()},
    "Switch": {"round": 1, "before": Mean(), "after": Mean()},
}
"""What has no default, where there is more than one such field."""


def declared() -> Iterator[type]:
    """The stages, rules and the like whose annotations restrict values."""
    modules = (stages, training, server, peers)
    offered = [getattr(module, name) for module in modules for name in dir(module)]
    for cls in dict.fromkeys([*(one for one in offered if inspect.isclass(one)), InterCluster]):
        if issubclass(cls, Checked) and any(map(edges, hints_of(cls).values())):
            yield cls


def edges(hint: Any) -> list[tuple[list[Any], list[Any]]]:
    """Allowed and refused values at each end of a range; of choices, one that is none."""
    if get_origin(hint) in (Union, UnionType):
        return [edge for one in get_args(hint) for edge in edges(one)]
    if get_origin(hint) is Literal:
        return [([*get_args(hint)], ["neither"])]
    if get_origin(hint) is not Annotated:
        return []
    kind, *entries = get_args(hint)
    step, found = 1 if kind is int else LITTLE, []
    for part in (part for entry in entries for part in entry.metadata):
        for name, closed, sign in (("ge", 1, 1), ("gt", 0, 1), ("le", 1, -1), ("lt", 0, -1)):
            if (end := getattr(part, name, None)) is not None:
                inside, outside = (end, end - sign * step) if closed else (end + sign * step, end)
                found.append(([inside], [outside, *([math.nan] if kind is float else [])]))
        if getattr(part, "allow_inf_nan", None) is False:
            found.append(([], [math.inf, math.nan]))
    return found


@pytest.mark.parametrize("cls", list(declared()))
def test_a_class_keeps_the_ranges_that_its_fields_declare(cls: type) -> None:
    needed = NEEDED.get(cls.__name__, {})
    for name, hint in hints_of(cls).items():
        for good, bad in edges(hint):
            for value in good:
                assert getattr(cls(**{**needed, name: value}), name) == value
            for value in bad:
                with pytest.raises(ValueError, match=f"{cls.__name__}: {name}: .* found, expected"):
                    cls(**{**needed, name: value})


def test_each_part_that_is_declared_without_torch_is_one_that_checks() -> None:
    """So the ranges of the test above are those of the recipe's keys."""
    for name, (path, block) in PARTS.items():
        module, _, cls = path.partition(":")
        made = getattr(import_module(module), cls)
        assert cls == name
        assert issubclass(made, block)
        assert issubclass(made, Checked)


def defaults(function: Callable[..., Any], *names: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in names}


def test_what_a_recipe_leaves_out_is_what_the_functions_do_by_themselves() -> None:
    mix = defaults(conflict_averse_mix, "c", "rescale", "add_own")
    assert ConflictAverse().model_dump(exclude={"safeguards", "heads"}) == mix
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


@pytest.mark.parametrize("section", [Training, Optimizer, Schedule, Safeguards, Weights, AdaptiveScope, GroupsSection])
def test_defaults_lie_in_their_own_ranges(section: type[BaseModel]) -> None:
    """Pydantic checks what is given, not what is left out."""
    assert section.model_validate(section().model_dump()) == section()


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("fednova", {"tau_eff": "steps"}, "NormaliseSteps(tau_eff='steps')"),
        ("fedtgp", {"server_lr": 0.5, "server_batch_size": 3}, "lr=0.5, batch_size=3"),
        ("fedrcl", {"penalty": 0.25}, "penalty_weight=0.25"),
        ("fedrcl", {"over_levels": "mean"}, "over_levels='mean'"),
        ("fpl", {"over": "batch"}, "ClusterContrast(temperature=0.02, over='batch')"),
        ("fedtgp", {"over": "batch"}, "distance='mse', over='batch')"),
        ("cfl", {"linkage": "complete"}, "by complete linkage"),
    ],
)
def test_a_parameter_reaches_what_uses_it(name: str, params: dict[str, object], text: str) -> None:
    assert text in str(METHODS[name].function(**params))
    assert text not in str(METHODS[name].function())


def test_what_is_not_shared_is_private() -> None:
    sharing = [entry for entry in METHODS if "share" in inspect.signature(entry.function).parameters]
    for entry in sharing:
        rest = ("nothing", EVERYTHING) if entry.name == "fedproto" else ("encoder", ALL_BUT_ENCODER)
        assert (rest[0], entry.function(share=rest[0]).private) == rest, entry.name
        assert entry.function(share="everything").private is None, entry.name
    assert len(sharing) > 9
    assert [methods.fedproto(share=share).buffers for share in ("everything", "nothing")] == ["mean", "local"]
