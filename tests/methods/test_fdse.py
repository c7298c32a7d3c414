"""FDSE through whole runs: what is common to clients, what is their own, and what its settings change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.methods import fdse
from fedloom.methods.fdse.rules import ERASERS
from fedloom.stages import Identity, Split
from fedloom.study.tables.results import domain_history
from tests_support import assert_same, load_recipe

Quick = Callable[..., Result]
Models = dict[str, dict[str, torch.Tensor]]
TINY = ("data.size=8", "model.width=4", "training.batch_size=16", "evaluation.splits=[test]", "training.rounds=1")
ALONE = ("data.domains=[plain]", "partition.clients={plain: 1}")
EMBEDDED: dict[str, Any] = {"recipe": "f2dc/digits-embedded"}


def models(quick: Quick, *changes: str, **options: Any) -> Models:
    return trained_models(quick(*TINY, *changes, **EMBEDDED, **options).folder)


def eraser(name: str) -> bool:
    return ".eraser.weight" in name or name.endswith(("eraser_norm.weight", "eraser_norm.bias"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_one_client_trains_as_if_alone(quick: Quick) -> None:
    # its whole model is its own row there
    alone = replace(fdse(), stage=Identity())
    changes = (*TINY, *ALONE, "training.rounds=2")
    assert_same(quick(*changes, "method=fdse", **EMBEDDED), quick(*changes, method=alone, **EMBEDDED), models_only=True)


def test_extractors_are_everybodys_and_erasers_are_not(quick: Quick) -> None:
    a, b, *_ = found = list(models(quick, "method=fdse").values())
    assert len(found) == 7
    own = {name for name in a if not torch.equal(a[name], b[name])}
    statistics = {name for name in a if "eraser_norm.running" in name}
    assert statistics <= own <= statistics | {name for name in a if eraser(name)}
    assert "encoder.stem.eraser.weight" in own  # but norm weights, of which all are near 1, become the plain mean


def test_an_absent_client_keeps_its_eraser_and_follows_the_rest(quick: Quick) -> None:
    changes = ("method=fdse", "training.participation=0.3")
    start = build(load_recipe(*TINY, *changes, **EMBEDDED)).module.state_dict()
    found = models(quick, *changes)
    kept = {c for c, m in found.items() if all(torch.equal(m[n], start[n]) for n in m if eraser(n))}
    assert 0 < len(kept) < 7
    first = next(iter(found.values()))
    shared = [n for n in first if "eraser" not in n]
    assert all(torch.equal(m[n], first[n]) for m in found.values() for n in shared)
    assert not torch.equal(first["encoder.stem.extractor.weight"], start["encoder.stem.extractor.weight"])


def test_a_large_tau_gives_all_clients_the_mean_eraser(quick: Quick) -> None:
    a, b, *_ = models(quick, "method={name: fdse, tau: 1.0e+12}").values()
    for name in filter(eraser, a):
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_a_small_tau_leaves_a_client_its_own_eraser(quick: Quick) -> None:
    """As with a split whose erasers are not mixed at all, but for rounding."""
    stage = fdse().stage
    apart = replace(fdse(), stage=replace(stage, own=Identity()))
    ours, theirs = models(quick, "method={name: fdse, tau: 1.0e-12}"), models(quick, method=apart)
    for client, model in ours.items():
        for name, tensor in model.items():
            torch.testing.assert_close(tensor, theirs[client][name], rtol=1e-3, atol=1e-4)


def test_consistency_begins_in_round_2(quick: Quick) -> None:
    off, on, release = "{name: fdse, lam: 0}", "{name: fdse, lam: 1}", "{name: fdse, lam: 1, form: release}"
    first = [next(iter(models(quick, f"method={m}").values())) for m in (off, on, release)]
    assert same(first[0], first[1])
    assert same(first[0], first[2])
    second = [next(iter(models(quick, f"method={m}", "training.rounds=2").values())) for m in (off, on, release)]
    weight = "encoder.stem.extractor.weight"
    assert len({tuple(m[weight].flatten().tolist()) for m in second}) == 3
    assert all(bool(tensor.isfinite().all()) for m in second for tensor in m.values())


@pytest.mark.parametrize("scope", ["aggregate", "local"])
def test_modules_of_f2dc_stand_behind_the_last_erased_layer(quick: Quick, scope: str) -> None:
    method = f"method={{name: fdse, add: {{feature-modules: {{scope: {scope}}}}}}}"
    a, b, *_ = models(quick, method).values()
    modules = [n for n in a if "attached" in n and a[n].is_floating_point()]
    assert any("decoupler" in n for n in modules)
    assert not [n for n in modules if "eraser" in n]
    assert all(torch.equal(a[n], b[n]) == (scope == "aggregate") for n in modules if n.endswith("weight"))
    assert torch.equal(a["encoder.stem.extractor.weight"], b["encoder.stem.extractor.weight"])
    assert not torch.equal(a["encoder.stem.eraser.weight"], b["encoder.stem.eraser.weight"])


@pytest.mark.slow
def test_clients_of_scarce_domains_profit_from_their_erasers(quick: Quick) -> None:
    changes = ("data.size=16", "training.epochs=2", "training.steps=null", "training.rounds=10", "evaluation.every=10")
    ours, theirs = (
        domain_history(quick(*changes, f"method={name}", **EMBEDDED).run).last for name in ("fdse", "fedavg")
    )
    assert ours.average > theirs.average + 0.1
    assert ours.deviation < theirs.deviation


def test_its_stage_takes_every_tensor_once() -> None:
    built = build(load_recipe(*TINY, "method=fdse", **EMBEDDED))
    layout = built.method.shared_part(built.layout)
    stage = built.method.stage
    erasers = layout.select(ERASERS)
    Split({stage.selector: stage.shared, ERASERS: stage.own}).layouts(layout)  # refuses what is taken twice or never
    assert {b.name for b in erasers.blocks} == {b.name for b in layout.blocks if eraser(b.name)}
