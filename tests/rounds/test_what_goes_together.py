"""Recipes at and beside the edge of each refusal: what goes together is built, and what does not is refused."""

from __future__ import annotations

import pytest

from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from tests_support import load_recipe

MLP = "model={name: mlp, hidden: [4]}"
STACKED = f"{MLP} | training.stacked=true"
FREE = "peers={mode: asynchronous, scenario: {speed: 1}}"
PRIVATE = "privacy={clip: 1.0, noise: 1.0, delta: 0.001} | method.weights=uniform | method.buffers=local"
ALL = "partition={name: iid, clients: 4, val_fraction: 0.2}"
IFCA = "method={name: ifca, first: %s} | peers={graph: full, weights: {kind: uniform}%s}"
UNJUDGED = "partition.val_fraction=0 | evaluation.splits=[test]"
MOVED = f"{ALL} | method={{name: rr-cluster, clusters: 2, least: 2, first: noise}}"

GOES = [
    STACKED,
    f"{STACKED} | runtime.workers=auto",
    f"{MLP} | runtime.workers=2",
    f"{MLP} | training.stacked=auto | runtime.workers=2",
    FREE,
    f"{FREE} | method.add.staleness={{}}",
    f"{FREE} | training.participation=1.0",
    "training.participation=0.5",
    f"{ALL} | model.freeze=encoder.*",
    f"{ALL} | partition.clients=40",
    PRIVATE,
    f"{PRIVATE} | method.weights=size | method.max_examples=1",
    f"{PRIVATE} | privacy.trust=local | method.weights=size",
    f"{PRIVATE} | training.participation=0.5",
    f"{PRIVATE} | runtime.checkpoint_every=2",
    f"{PRIVATE} | privacy.trust=local | peers={{weights: {{kind: uniform}}}}",
    IFCA % ("groups", ""),
    IFCA % ("groups", ", warmup: {until: 3, alone: 1}"),
    IFCA % ("noise", ", choose: {top: 1}"),
    "early_stopping.patience=1",
    "peers={similarity: {signals: {disparity: 1}}}",
    f"peers={{similarity: {{signals: {{features: 1}}}}}} | {UNJUDGED}",
    f"peers={{choose: {{groups: {{fine: null}}}}}} | {UNJUDGED}",
    "peers={choose: {groups: {fine: 0.5}}}",
    "method=fedga",
    f"method=fedavg | {UNJUDGED}",
    "method=separate",
    "method=separate | model={name: resnet10, width: 4, norm: batch}",
    "method=separate | evaluation.models=[global, personal]",
    f"{MOVED} | peers={{graph: full, weights: {{kind: uniform}}}}",
    f"{MOVED} | peers={{graph: full, weights: {{kind: uniform}}, choose: {{top: 3}}}}",
    f"{MOVED} | peers={{graph: {{name: random-k, k: 2, every: 1}}, weights: {{kind: uniform}}}}",
    f"{MOVED} | peers={{graph: ring, weights: {{kind: uniform}}}} | partition.clients=3 | method.least=1",
    MOVED,
]
REFUSED = [
    (f"{STACKED} | runtime.workers=2", "in one process, but runtime.workers is 2"),
    (f"{STACKED} | method=fedrep", "training.stacked: a stack trains one whole model, but fedrep"),
    (f"{STACKED} | method=ditto", "training.stacked: a stack trains one whole model, but ditto"),
    ("method.add.staleness={}", "reads staleness, which only asynchronous peers have"),
    (
        "method.add.staleness={} | peers={weights: {kind: uniform}}",
        "reads staleness, which only asynchronous peers have",
    ),
    (f"{FREE} | training.participation=0.9", "training.participation: 0.9 found, but asynchronous peers"),
    ("model.freeze=nothing*", "matches no parameter"),
    ("model.freeze='*'", "matches every parameter"),
    (f"{ALL} | partition.clients=4000", "partition.clients: 4000 found, but the data set has"),
    (f"{PRIVATE} | method=centralised", "send nothing, so there is nothing to protect"),
    (f"{PRIVATE} | method=separate", "separate sends one row per task"),
    (
        f"{PRIVATE} | privacy.trust=local | peers={{similarity: {{signals: {{disparity: 1}}}}}}",
        "privacy: similarity disparity",
    ),
    (IFCA % ("groups", ", choose: {top: 1}"), "peers.choose found, but"),
    (IFCA % ("groups", ", choose: {threshold: 0.5}"), "peers.choose found, but"),
    (IFCA % ("groups", ", warmup: {until: 3, alone: 2}"), "peers.warmup.alone found, but"),
    (IFCA % ("groups", ", scenario: {loss: 0.1}"), "peers.scenario found, but"),
    (f"{IFCA % ('groups', '')} | training.participation=0.5", "training.participation: 0.5 found, but"),
    (f"{IFCA % ('groups', '')} | peers.graph=ring", "peers.graph: ring found, but"),
    (
        "peers={similarity: {signals: {disparity: 1}}} | partition.val_fraction=0 | evaluation.splits=[test]",
        "peers: similarity disparity judges models on validation data",
    ),
    ("method=fedga | partition.val_fraction=0 | evaluation.splits=[test]", "measures models on validation data"),
    (f"peers={{choose: {{groups: {{fine: 0.5}}}}}} | {UNJUDGED}", "choose.groups.fine judges models on validation"),
    (f"peers={{similarity: {{signals: {{cross-loss: 1}}}}}} | {UNJUDGED}", "similarity cross-loss judges models"),
    (
        "method.add.by-task={} | model={name: resnet10, width: 4, norm: batch}",
        "fedavg + by-task trains each task alone, so running statistics cannot be shared",
    ),
    ("method=separate | evaluation.models=[global, trained]", "trains a model for each task of a client"),
    (f"{MOVED} | peers={{graph: ring, weights: {{kind: uniform}}}}", "which hears at most 2 other"),
    (
        f"{MOVED} | peers={{graph: full, weights: {{kind: uniform}}, choose: {{top: 2}}}}",
        "which hears at most 2 other",
    ),
    (f"{MOVED} | partition.clients=3", "rr-cluster"),
    ("method=centralised | peers={weights: {kind: uniform}}", "centralised"),
]


def built(changes: str) -> None:
    build(load_recipe(*changes.split(" | ")))


@pytest.mark.parametrize("changes", GOES)
def test_this_goes_together(changes: str) -> None:
    built(changes)


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[changes for changes, _ in REFUSED])
def test_this_does_not(changes: str, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        built(changes)
    assert message in str(refused.value)
