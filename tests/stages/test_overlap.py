"""Activated dimensions: what is recorded, and that nothing is changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom import Method
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.feddea import aggregation as module
from fedloom.methods.feddea.aggregation import agreement
from fedloom.stages import ActivatedDimensions, Heal, Mean, TopMagnitude
from tests_support import Quick, assert_same

LAYOUT = Layout(
    (
        Block("encoder.a", (4,)),
        Block("encoder.b", (6,), role="norm", part="encoder"),
        Block("heads.t", (5,), role="head", task="t"),
        Block("heads.u", (5,), role="head", task="u"),
    )
)
X = torch.tensor(
    [
        [9.0, 8, 0, 0, 1, 1, 1, 1, 1, 1, 5, 4, 0, 0, 0, 0, 0, 0, 0, 0],
        [1.0, -8, 0, 0, 1, -9, 1, 1, 1, 1, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0],
    ]
)


def look(X: Tensor, rho: float = 0.2, **beside: Any) -> dict[str, dict[str, Any]]:
    """scope -> record of one round, without the kind."""
    found: dict[str, dict[str, Any]] = {}

    def record(kind: str, fields: dict[str, Any]) -> None:
        assert kind == "activated-dimensions"
        found[fields["scope"]] = fields

    updates = Updates.of(X, layout=beside.pop("layout", LAYOUT), **beside)
    out, state = ActivatedDimensions(rho, bins=5)(updates, {}, Ctx(1, record=record))
    assert out is updates
    assert state == {}
    return found


def test_the_encoder_by_hand() -> None:
    r = look(X)["encoder"]  # the 2 largest of 10: columns 0, 1 and 1, 5
    assert r["columns"] == 10
    assert r["rows"] == ["c0", "c1"]
    assert r["blocks"] == ["encoder.a", "encoder.b"]
    assert r["parts"] == ["encoder", "encoder"]
    assert r["active"] == [[2, 0], [1, 1]]
    assert r["shared"] == [[1, 0]]
    assert r["bins"] == [[2, 0, 0, 0, 0], [1, 0, 1, 0, 0]]
    assert r["groups"] == {
        "encoder": {"overlap": [0.5], "expected": [pytest.approx(0.2)], "jaccard": [pytest.approx(1 / 3)]}
    }


def test_everything_by_hand() -> None:
    r = look(X)["all"]  # the 4 largest of 20: 0, 1, 10, 11 and 1, 5, 15 and the first of the ones
    assert r["columns"] == 20
    assert r["active"] == [[2, 0, 2, 0], [2, 1, 0, 1]]
    assert r["shared"] == [[2, 0, 0, 0]]
    assert list(r["groups"]) == ["all", "encoder", "head"]
    assert r["groups"]["all"]["overlap"] == [0.5]
    assert r["groups"]["encoder"]["overlap"] == [pytest.approx(2 * 2 / 5)]
    assert r["groups"]["head"]["overlap"] == [0]


def test_zeros_are_not_activated() -> None:
    sparse = torch.zeros(3, 20)
    sparse[0, 3] = sparse[1, 3] = 1
    r = look(sparse, rho=0.5)["encoder"]
    assert r["active"] == [[1, 0], [1, 0], [0, 0]]
    assert r["groups"]["encoder"]["overlap"] == [1, 0, 0]
    assert r["groups"]["encoder"]["jaccard"] == [1, 0, 0]


def test_absent_blocks_do_not_count() -> None:
    present = [[True, True, True, False], [True, False, False, True]]
    absent = torch.where(torch.tensor(present).repeat_interleave(torch.tensor([4, 6, 5, 5]), dim=1), X, 0.0)
    r = look(absent, present=present)["encoder"]
    assert r["active"] == [[2, 0], [1, 0]]  # 2 of 10 columns, and max(1, floor(0.2 * 4)) of 4
    assert look(absent, present=[[True] * 4, [False] * 3 + [True]])["encoder"]["active"][1] == [0, 0]


def test_scopes_that_would_say_nothing_new_are_left_out() -> None:
    assert list(look(X, layout=Layout((Block("x", (20,)),)))) == ["encoder"]
    assert list(look(X, layout=Layout((Block("x", (20,), role="head", task="t"),)))) == ["all"]
    assert list(look(X)) == ["encoder", "all"]


def test_no_rows_and_one_row() -> None:
    assert look(torch.zeros(0, 20), rows=[]) == {}
    one = look(X[:1])["encoder"]
    assert one["active"] == [[2, 0]]
    assert one["shared"] == []
    assert one["groups"]["encoder"]["overlap"] == []


def test_it_is_the_choice_of_feddea() -> None:
    rows = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    chosen = TopMagnitude(0.3).on(rows)[0] != 0
    r = look(rows, rho=0.3)["all"]
    assert r["active"] == [[int(c[s].sum()) for s in LAYOUT.slices] for c in chosen]
    both = chosen[0] & chosen[2]
    assert r["shared"][1] == [int(both[s].sum()) for s in LAYOUT.slices]


def test_independent_sets_overlap_as_expected() -> None:
    layout = Layout((Block("x", (20000,)),))
    r = look(torch.randn(2, 20000, generator=torch.Generator().manual_seed(0)), rho=0.1, layout=layout)["encoder"]
    (found,), (expected,) = r["groups"]["encoder"]["overlap"], r["groups"]["encoder"]["expected"]
    assert expected == pytest.approx(0.1)
    assert found == pytest.approx(expected, abs=0.02)


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look(X)
    monkeypatch.setattr(module, "_COLUMNS", 3)
    assert look(X) == whole


def test_agreement_of_empty_sets() -> None:
    assert agreement(5, [(0, 0, 0)]) == {"overlap": [0.0], "expected": [0.0], "jaccard": [0.0]}


def test_it_stands_before_the_rows_are_combined() -> None:
    stage = Method(stage=Heal() >> Mean()).plus(ActivatedDimensions(), at="server").stage
    assert repr(stage) == f"{Heal()!r} >> {ActivatedDimensions()!r} >> Mean()"


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_run_is_the_same_and_has_records(quick: Quick, method: str) -> None:
    plain, looked = quick(f"method={method}"), quick(f"method={{name: {method}, add: {{activated-dimensions: }}}}")
    assert_same(plain, looked, models_only=True)
    lines = [[json.loads(x) for x in (r.folder / "metrics.jsonl").read_text().splitlines()] for r in (plain, looked)]
    for a, b in zip(*lines, strict=True):
        both, records = a.pop("records", []), b.pop("records", [])  # both have the constant prediction, at the start
        records = [record for record in records if record not in both]
        assert [r["scope"] for r in records] == (["encoder", "all"] if b["round"] else [])
        for line in (a, b):
            line.pop("seconds")
            line.pop("seconds_of", None)
        assert a == b


def test_the_place_in_the_list_decides_what_is_seen(quick: Quick) -> None:
    """At the client FedDEA comes first, whatever the order; it leaves the choice as it is where it keeps more."""
    add = "add: {feddea: {rho: 0.05}, activated-dimensions: {rho: 0.1}}"
    edge = quick(f"method={{name: fedavg, {add}}}", "training.rounds=1")
    last = json.loads((edge.folder / "metrics.jsonl").read_text().splitlines()[-1])["records"][-1]
    kept = max(1, int(0.05 * last["columns"]))
    assert all(sum(row) <= kept for row in last["active"])
    assert fedloom.methods.ADDONS["activated-dimensions"].source == "FedDEA, Figure 2"
