"""Test who sees what: said of every run before it, from its stages' traits."""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import Method
from fedloom.core.stage import Stage, Traits
from fedloom.federation.rounds import seen
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.seen import visibility
from fedloom.stages import Mean
from tests_support import load_recipe

PRIVATE = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3"
SEES = "the server sees individual updates; of these "
SUMS = f"{SEES}Mean needs only their sum"
ALL = "the personal mixes together reveal the updates of all-0, digit-0, holes-0, large-0, parity-0:"
COUNTS = "reveals how many examples of each class a client has, in digit, parity, large, holes (median correlation 0.99"
CASES: list[tuple[tuple[str, ...], list[str]]] = [
    (("method=local",), []),
    (("method=sheaf-fmtl",), ["the server sees no updates, but edges and projections of the clients"]),
    (
        ("method=sheaf-fmtl", "peers={weights: {kind: uniform}}"),
        ["each peer sees no updates, but edges and projections of the clients"],
    ),
    (("method=fedavg",), [SUMS, COUNTS]),
    (("method=fedper",), [SUMS]),
    (("method={name: fedavg, add: {feddea: }}",), [SUMS, COUNTS]),
    (
        ("method={name: fedavg, add: {multi-krum: {f: 0}}}",),
        [f"{SEES}MultiKrum needs their inner products or extras, Mean needs only their sum", COUNTS],
    ),
    (
        ("method={name: fedavg, add: {median: {f: 0}}}",),
        ["Median needs each of them, Mean needs only their sum", COUNTS],
    ),
    (
        ("method={name: fedavg, weights: uniform}", PRIVATE + "}"),
        ["PrivateMean needs only their sum", "clipping and noise at the server do not"],
    ),
    (
        ("method=fedavg", PRIVATE + ", trust: local}"),
        ["individual updates, with noise; of these Mean needs only their sum"],
    ),
    (("method=fedavg", "peers={}"), ["each peer sees individual updates of the peers it hears", COUNTS]),
    (("method=dfmtl",), ["SimilarityMix needs each of them", ALL, COUNTS]),
    (
        ("method=cfl",),
        ["SplittingClusters needs each of them", "the personal mixes together reveal no single update", COUNTS],
    ),
    (("method=ifca",), ["ChosenClusters needs each of them", "not known before the run (it reads cluster)", COUNTS]),
]


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [((), 0.95, 1.0), ((PRIVATE + "}",), 0.95, 1.0), ((PRIVATE + ", trust: local}",), -0.5, 0.5)],
    ids=["no privacy", "central", "local"],
)
def test_label_counts_follow_from_the_update_of_a_heads_bias(
    changes: tuple[str, ...], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that `fedloom show` and the threat model state; only noise at the clients hides them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    counts = importlib.import_module("label_counts")
    assert least <= statistics.median(counts.correlations(*changes)) <= most


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_it_is_said_who_sees_what(changes: tuple[str, ...], expected: list[str]) -> None:
    found = visibility(build(load_recipe(*changes)))
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert sentence.startswith("who sees what: ")
        assert part in sentence


@dataclass(frozen=True)
class Pairs(Stage):
    """The first two rows become their mean, others stay. Keeps what it was given."""

    given: list[Any] = field(default_factory=list)
    traits = Traits("mix", reads={"X", "base", "extra:steps", "extra:domain", "extra:tasks"}, presence="block")

    def __call__(self, updates: Any, state: Any, ctx: Any) -> Any:
        self.given.append((updates, ctx))
        W = torch.eye(len(updates)).double()
        W[:2, :2] = 0.5
        return updates.mixed(W), state


def test_rows_are_tried_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads lack each other's client, whose zeros hide nothing; the last head's bias is too short to tell."""
    built = build(load_recipe("model.heads=own"))
    stage = Pairs()
    built = replace(built, method=Method(stage=stage))
    _, found, counts = visibility(built)
    # all-0 is brought together with digit-0, which has no other head than its own
    assert "the personal mixes together reveal the updates of all-0, holes-0, large-0, parity-0:" in found
    ((updates, ctx),) = stage.given
    assert (ctx.round, len(ctx.targets)) == (1, 5)
    assert not updates.base.any()
    assert updates.extra == {
        "steps": [1.0] * 5,
        "domain": [""] * 5,
        "tasks": ["digit,holes,large,parity", "digit", "holes", "large", "parity"],
    }
    for row, tasks in zip(updates.X, updates.extra["tasks"], strict=True):
        for block, s in zip(updates.layout.blocks, updates.layout.slices, strict=True):
            assert bool(row[s].all()) == bool(row[s].any()) == (block.task is None or block.task in tasks.split(","))
    monkeypatch.setattr(seen, "LARGEST", 5 * built.layout.d)
    assert visibility(built)[1] == found
    monkeypatch.setattr(seen, "LARGEST", 5 * built.layout.d - 1)
    assert "not known before the run (the model is too large)" in visibility(built)[1]


def test_domains_are_known_before_the_run() -> None:
    built = build(load_recipe(recipe="digits-domains"))
    stage = Pairs()
    visibility(replace(built, method=Method(stage=stage)))
    ((updates, _),) = stage.given
    domains = [built.federation.client(client).domain for client, _ in updates.rows]
    assert all(domains)
    assert updates.extra["domain"] == domains


def test_what_comes_after_the_rows_were_combined_needs_nothing_of_them() -> None:
    built = build(load_recipe())
    first, *_ = visibility(replace(built, method=Method(stage=Mean() >> Stage())))
    assert first == f"who sees what: {SUMS}"
