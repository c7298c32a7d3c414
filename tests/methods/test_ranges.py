"""What the numbers of stages, rules and measures may be: the ends of each range, and the numbers next to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fedloom import stages as s
from fedloom.core.server import Adaptive, Lookahead, Momentum
from fedloom.methods.conflict.aggregation import conflict_averse_weights
from fedloom.methods.drift.rules import Dual
from fedloom.methods.f2dc.rules import gumbel_mask
from fedloom.methods.peers.at_peers import InterCluster
from fedloom.methods.peers.graph import candidates
from fedloom.methods.peers.neighbours import next_scope, recent, soft_weights
from fedloom.methods.peers.safeguards import Safeguards
from fedloom.methods.peers.similarity import Sketch
from fedloom.tasks import OdsF
from fedloom.training import Proximal

RANGES: dict[Callable[..., Any], dict[str, str]] = {
    Adaptive: {"b1": "[0, 1)", "b2": "[0, 1)", "eps": "(0", "v0": "[0"},
    Dual: {"alpha": "(0"},
    InterCluster: {"mu": "[0"},
    Lookahead: {"lam": "[0, 1)"},
    Momentum: {"beta": "[0, 1)"},
    OdsF: {"max_dist": "(0"},
    Proximal: {"mu": "[0"},
    Safeguards: {"clip": "(0, inf)", "clip_result": "(0, inf)", "ridge": "(0, inf)", "ema": "[0, 1)"},
    partial(candidates, "ring", ["a", "b"]): {"every": "[0", "round": "[0"},
    partial(conflict_averse_weights, torch.eye(2)): {"c": "[0, 1)"},
    partial(gumbel_mask, torch.zeros(2)): {"sigma": "(0"},
    partial(next_scope, 0.5): {"enter": "[0.3, 1]"},
    partial(next_scope, 0.5, enter=0.6): {"leave": "[-1, 0.6]"},
    partial(recent, {}, {}): {"rate": "(0"},
    partial(soft_weights, "a", {}, []): {"step": "(0, 1]", "own_similarity": "[0, inf)"},
    Sketch(8).error: {"delta": "(0, 1)"},
    s.ActivatedDimensions: {"rho": "(0, 1)", "bins": "[1"},
    s.Attention: {"alpha": "(0", "sigma": "(0"},
    s.CAGrad: {"c": "[0, 1)"},
    s.CentredClip: {"f": "[0", "limit": "(0", "steps": "[1"},
    s.ChosenClusters: {"count": "[1", "noise": "[0"},
    s.ConflictAverseMix: {"c": "[0, 1)"},
    s.ConsensusMask: {"lam": "[0", "least": "[1"},
    s.CosineMix: {"tau": "(0"},
    s.DomainWeights: {"domains": "[1", "classes": "[1", "alpha": "(-inf, inf)", "beta": "(-inf, inf)"},
    s.ExactFactors: {"scale": "(0"},
    s.FairGrad: {"alpha": "(0"},
    s.GradVac: {"beta": "[0, 1]"},
    s.Heal: {"tau": "(, 1)", "beta": "[0, 1]"},
    s.HistoryAttention: {"beta": "[0, 1)", "temperature": "(0"},
    s.HyperConflictAverse: {"c": "[0, 1)", "init": "[0, 1]", "lr": "[0", "momentum": "[0, 1)", "weight_decay": "[0"},
    s.LossWeights: {"step": "[0", "decay": "[0"},
    s.MovingAnchors: {"momentum": "[0, 1]"},
    s.SimilarGroups: {"groups": "[1"},
    s.SimilarityMix: {"top": "[0", "alpha": "[0, 1]", "step": "(0, 1]"},
    s.SingleTaskModels: {"attenuation": "[0, 1]"},
    s.SoftClusters: {"count": "[1", "noise": "[0"},
    s.Staleness: {"a": "[0"},
    s.TaskLeaders: {"c": "[0, 1)", "alpha": "[0"},
    s.TaskVectors: {"rho": "[0, 1]", "epsilon": "[0, 1]", "kappa": "[0"},
    s.TopMagnitude: {"rho": "(0, 1]"},
    s.TrainedPrototypes: {"epochs": "[0", "batch_size": "[1", "lr": "(0", "limit": "[0, inf)"},
    partial(s.Every, stage=s.Identity()): {"rounds": "[1"},
    partial(s.Switch, before=s.Mean(), after=s.Mean()): {"round": "[1"},
}
CASES = [(make, name, text) for make, ranges in RANGES.items() for name, text in ranges.items()]


def ends(text: str) -> Iterator[tuple[float, bool]]:
    """Yield the ends of a range and the nearest numbers beyond or before them, and whether they belong to it."""
    low, _, high = text[1:].rstrip(")]").partition(", ")
    for end, closed, inwards in ((low, text[0] == "[", math.inf), (high, text[-1] == "]", -math.inf)):
        if end:
            value = float(end)
            yield value, closed
            yield math.nextafter(value, -inwards if closed else inwards), not closed


@pytest.mark.parametrize(("make", "name", "text"), CASES, ids=str)
def test_a_number_may_be_in_its_range_only(make: Callable[..., Any], name: str, text: str) -> None:
    for value, fits in ends(text):
        if fits:
            make(**{name: value})
        else:
            with pytest.raises(ValueError, match="expected|above"):
                make(**{name: value})
