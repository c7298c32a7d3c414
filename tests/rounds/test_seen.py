"""Who sees what: said of every run before it, from its stages' traits."""

from __future__ import annotations

import pytest

from fedloom.rounds.build import build
from fedloom.rounds.seen import told
from tests_support import load_recipe

PRIVATE = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3"
SUMS = "Mean needs sums; the server gets the rows themselves"
ALL = "the rows of all-0, digit-0, holes-0, large-0, parity-0 follow from the personal mixes of all"
CASES: list[tuple[tuple[str, ...], list[str]]] = [
    (("method=local",), []),
    (("method=fedavg",), [SUMS]),
    (("method={name: fedavg, add: {feddea: }}",), [SUMS]),
    (("method={name: fedavg, add: {multi-krum: {f: 0}}}",), [f"MultiKrum needs the Gram matrix or extras, {SUMS}"]),
    (("method={name: fedavg, add: {median: {f: 0}}}",), ["Median needs rows, Mean needs sums"]),
    (("method={name: fedavg, weights: uniform}", PRIVATE + "}"), ["PrivateMean needs sums"]),
    (("method=fedavg", PRIVATE + ", trust: local}"), ["Mean needs sums; the server gets rows with noise"]),
    (("method=fedavg", "peers={}"), ["each peer gets the rows themselves of those it hears"]),
    (("method=dfmtl",), ["SimilarityMix needs rows", ALL]),
    (("method=cfl",), ["SplittingClusters needs rows", "no row follows from the personal mixes of all"]),
    (("method=ifca",), ["ChosenClusters needs rows", "not known before the run (it looks at cluster)"]),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_it_is_said_who_sees_what(changes: tuple[str, ...], expected: list[str]) -> None:
    found = told(build(load_recipe(*changes)))
    assert len(found) == len(expected)
    for sentence, part in zip(found, expected, strict=True):
        assert sentence.startswith("who sees what: ")
        assert part in sentence
