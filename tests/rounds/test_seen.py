"""Who sees what: said of every run before it, from its stages' traits."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path

import pytest

from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.seen import told
from tests_support import load_recipe

PRIVATE = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3"
SUMS = "Mean needs sums; the server gets the rows themselves"
ALL = "the rows of all-0, digit-0, holes-0, large-0, parity-0 follow from the personal mixes of all"
COUNTS = "tells how many examples of each class a client has, in digit, parity, large, holes (median correlation 0.99"
CASES: list[tuple[tuple[str, ...], list[str]]] = [
    (("method=local",), []),
    (("method=fedavg",), [SUMS, COUNTS]),
    (("method=fedper",), [SUMS]),
    (("method={name: fedavg, add: {feddea: }}",), [SUMS, COUNTS]),
    (
        ("method={name: fedavg, add: {multi-krum: {f: 0}}}",),
        [f"MultiKrum needs the Gram matrix or extras, {SUMS}", COUNTS],
    ),
    (("method={name: fedavg, add: {median: {f: 0}}}",), ["Median needs rows, Mean needs sums", COUNTS]),
    (
        ("method={name: fedavg, weights: uniform}", PRIVATE + "}"),
        ["PrivateMean needs sums", "clipping and noise at the server do not"],
    ),
    (("method=fedavg", PRIVATE + ", trust: local}"), ["Mean needs sums; the server gets rows with noise"]),
    (("method=fedavg", "peers={}"), ["each peer gets the rows themselves of those it hears", COUNTS]),
    (("method=dfmtl",), ["SimilarityMix needs rows", ALL, COUNTS]),
    (("method=cfl",), ["SplittingClusters needs rows", "no row follows from the personal mixes of all", COUNTS]),
    (("method=ifca",), ["ChosenClusters needs rows", "not known before the run (it looks at cluster)", COUNTS]),
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
    found = told(build(load_recipe(*changes)))
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert sentence.startswith("who sees what: ")
        assert part in sentence
