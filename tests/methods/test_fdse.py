"""FDSE: its consistency term, as its paper means it and as its release computes it, and whole runs.

Of runs: what is common to clients, what is their own, and what its settings change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.methods import fdse
from fedloom.methods.fdse.rules import (
    ERASERS,
    MOMENTUM,
    Consistency,
    ErasedLayer,
    averaged,
    consistency,
    gaussian_divergence,
    layer_weights,
    released_consistency,
)
from fedloom.stages import Identity, Split
from fedloom.study.results import domain_history
from fedloom.training.rules import View
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


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_divergence_by_hand() -> None:
    value = gaussian_divergence(t(1, 0), t(1, 4), t(3, 0), t(1, 1))
    assert float(value) == pytest.approx(((4) / 2 + (4 - 1 - math.log(4)) / 2) / 2)
    assert float(gaussian_divergence(t(2), t(3), t(2), t(3))) == 0
    assert torch.isfinite(gaussian_divergence(t(2), t(0), t(2), t(0)))
    p, q = torch.distributions.Normal(t(0.3), t(0.7)), torch.distributions.Normal(t(-1), t(2))
    expected = torch.distributions.kl_divergence(p, q)
    assert float(gaussian_divergence(t(0.3), t(0.49), t(-1), t(4))) == pytest.approx(float(expected))


def test_later_layers_count_more() -> None:
    same, apart = (t(0), t(1)), (t(2), t(1))
    first = consistency([same, same], [apart, same], beta=1.0)
    last = consistency([same, same], [same, apart], beta=1.0)
    assert float(first) == pytest.approx(2 / (1 + math.e))
    assert float(first + last) == pytest.approx(2)
    assert float(consistency([same, same], [same, same], beta=1.0)) == 0
    assert layer_weights(3, 0).tolist() == pytest.approx([1 / 3] * 3)


def test_the_variance_of_channels_in_the_releases_term() -> None:
    """Channels 0, 3 and 6: mean 3, variance 18 / 2. One channel has variance 0."""
    term, (m, v) = released_consistency([(t(1, 3, 0), t(1, 1, 1))], [t(0, 3, 6)], None, beta=0.0)
    assert (float(m), float(v)) == (3, 9)
    assert float(term) == pytest.approx((10 / 3 - 9) / 18 + (math.log(9) + 1 / 9) / 2)
    _, (m, v) = released_consistency([(t(1), t(1))], [t(5)], None, beta=0.0)
    assert (float(m), float(v)) == (5, 0)


def test_the_releases_term_by_hand() -> None:
    """Two layers of two channels: one mean and variance run through both."""
    term, (m, v) = released_consistency([(t(1, 3), t(1, 1)), (t(0, 0), t(1, 4))], [t(0, 2), t(4, 8)], None, beta=0.0)
    # layer 1: mean 1, variance 2; layer 2: mean 1 + 0.1 (6 - 1), variance 2 + 0.1 (8 - 2)
    first = ((1 - 1) / 4 + (9 - 1) / 4) / 2 + (math.log(2) + 1 / 2) / 2
    second = -2.25 / 5.2 + ((math.log(2.6) + 1 / 2.6) + (math.log(2.6 / 4) + 4 / 2.6)) / 4
    assert (float(m), float(v)) == pytest.approx((1.5, 2.6))
    assert float(term) == pytest.approx((first + second) / 2)
    lower, _ = released_consistency([(t(0, 0), t(1, 1))], [t(10, 10.1)], None, beta=1.0)
    assert float(lower) < 0  # it is no divergence
    again, _ = released_consistency([(t(1, 3), t(1, 1))], [t(0, 2)], (t(1).sum(), t(2).sum()), beta=1.0)
    assert float(again) == pytest.approx(first)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(ErasedLayer(nn.Conv2d(2, 2, 3, padding=1)) for _ in range(2)))


def view(net: nn.Module) -> View:
    nothing = torch.zeros(0)
    return View(nothing, nothing, nothing, (), module=net)


X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def test_there_is_no_term_before_the_statistics_have_counted_a_batch() -> None:
    net = Net()
    assert Consistency().begin(view(net), {}) == {}
    state = Consistency().begin(view(net), {})
    net.layers(X)
    assert Consistency().penalty(view(net), state) is None
    assert "received" in Consistency().begin(view(net), {})
    assert Consistency(lam=0).begin(view(net), {}) == {}


@pytest.mark.parametrize("form", ["paper", "release"])
def test_the_term_has_a_gradient_for_shared_parts_and_erasers(form: Any) -> None:
    net, rule = Net(), Consistency(2.0, 0.1, form)
    net.layers(X)
    state = rule.begin(view(net), {})
    net.layers(3 * X + 1)
    term = rule.penalty(view(net), state)
    term.backward()
    for layer in net.layers[:1]:
        for part in (layer.eraser.weight, layer.eraser_norm.weight, layer.shift):
            assert part.grad.isfinite().all()
            assert part.grad.any()
    net.layers(X)
    rule.penalty(view(net), state).backward()  # the first step's graph is gone, and nobody needs it
    assert rule.finish(view(net), state) == ({}, {})


def test_statistics_that_are_as_received_cost_nothing() -> None:
    net, rule = Net(), Consistency(1.0)
    for layer in net.layers:
        layer.norm.momentum = 1.0
    net.layers(X)
    state = rule.begin(view(net), {})
    net.layers(X)
    assert rule.penalty(view(net), state).item() == pytest.approx(0, abs=1e-6)
    net.layers(X + torch.arange(72.0).view(2, 6, 6))
    assert rule.penalty(view(net), state).item() > 1e-4


def test_moments_are_averaged_as_a_norm_layer_does() -> None:
    norm = nn.BatchNorm1d(2).double()
    norm.running_mean, norm.running_var = t(1, 2), t(3, 4)
    x = torch.randn(8, 2, dtype=torch.float64)
    norm(x)
    (mean, variance), *rest = averaged([(t(1, 2), t(3, 4))], [(x.mean(0), x.var(0))])
    assert not rest
    assert norm.momentum == MOMENTUM
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(variance, norm.running_var)
