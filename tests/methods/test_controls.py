"""The add-ons pcgrad, cagrad, min-norm, and the two controls: what they change and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fedloom.engines.api import Result
from fedloom.methods import (
    cagrad,
    config,
    famo,
    fedavg,
    feddea,
    fedga,
    fedprox,
    local,
    min_norm,
    pcgrad,
    server_step,
    support_mean,
)
from fedloom.methods.method import Method
from fedloom.server import Plain, ServerRule
from fedloom.stages import CAGrad, Identity, Mean, MinNorm, PCGrad, SupportMean, TopMagnitude
from tests_support import assert_same

Quick = Callable[..., Result]


def test_what_each_one_is() -> None:
    base = fedavg()
    assert pcgrad(base, reduction="sum").stage == PCGrad("sum") >> Mean()
    assert cagrad(base, c=0.2, rescale="1+c").stage == CAGrad(0.2, "1+c")
    assert min_norm(base).stage == MinNorm()
    assert support_mean(base).stage == SupportMean()
    assert server_step(base, step=2.5) == replace(base, name="fedavg + server-step", server=Plain(2.5))


def test_what_follows_what() -> None:
    assert cagrad(pcgrad(fedavg())).stage == PCGrad() >> CAGrad()
    assert pcgrad(cagrad(fedavg())).stage == PCGrad() >> CAGrad()
    both = min_norm(feddea(fedprox(), rho=0.3))
    assert both.edge == TopMagnitude(0.3)
    assert both.stage == MinNorm()
    everything = server_step(support_mean(pcgrad(feddea(fedavg()))), step=3)
    name = "fedavg + feddea + pcgrad + support-mean + server-step"
    assert everything == Method(name, edge=TopMagnitude(0.5), stage=PCGrad() >> SupportMean(), server=Plain(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pcgrad(local()), r"local: PCGrad\(.*would have no effect, because everything is private"),
        (lambda: cagrad(local()), r"local: CAGrad\(.*would replace a mean, but Identity\(\) has none"),
        (lambda: min_norm(cagrad(fedavg())), r"fedavg \+ cagrad: MinNorm\(.*but CAGrad\(.*has none"),
        (lambda: support_mean(min_norm(fedavg())), r"fedavg \+ min-norm: SupportMean\(\) would replace a mean"),
        (lambda: config(min_norm(fedavg())), r"fedavg \+ min-norm: ConFIG\(\) would replace a mean"),
        (lambda: famo(fedga()), r"LossWeights\(.*overwrites it without reading it"),
        (lambda: server_step(local(), step=2), r"local: a server step would have no effect"),
        (
            lambda: server_step(server_step(fedavg(), step=2), step=2),
            r"fedavg \+ server-step: server-step replaces Plain\(step=1.0\), but the method has Plain\(step=2\)",
        ),
    ],
)
def test_refused_with_a_reason(make: Callable[[], Method], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_server_step_names_another_server_rule() -> None:
    class Other(ServerRule):
        def __repr__(self) -> str:
            return "Other()"

    with pytest.raises(ValueError, match=r"mine: server-step .* but the method has Other\(\)"):
        server_step(Method(name="mine", server=Other()), step=2)


def test_a_server_step_multiplies_the_update() -> None:
    model, update = torch.ones(3), torch.tensor([1.0, -2, 0])
    out, _ = server_step(fedavg(), step=1.5).server.apply(model, update, {})
    assert out.tolist() == [2.5, -2, 1]


@pytest.mark.parametrize(
    "change", ["method.add.server-step.step=1", "method.add.cagrad.c=0", "method.add.cagrad={c: 0, rescale: 1+c^2}"]
)
def test_equal_to_fedavg_bit_for_bit(quick: Quick, change: str) -> None:
    assert_same(quick(), quick(change))


def test_a_larger_server_step_is_not_fedavg(quick: Quick) -> None:
    with pytest.raises(AssertionError):
        assert_same(quick(), quick("method.add.server-step.step=2"), models_only=True)


def test_support_mean_is_fedavg_for_clients_with_heads_of_their_own(quick: Quick) -> None:
    own = "model.heads=own"
    assert_same(quick(own), quick(own, "method.add.support-mean={}"))
    with pytest.raises(AssertionError):
        assert_same(quick(), quick("method.add.support-mean={}"), models_only=True)


def test_stages_that_the_add_ons_put_in_do_what_the_stage_does(quick: Quick) -> None:
    for text, method in (
        ("pcgrad={reduction: sum}", pcgrad(fedavg(), reduction="sum")),
        ("cagrad={c: 0.2}", cagrad(fedavg(), c=0.2)),
        ("min-norm={unit: false}", min_norm(fedavg(), unit=False)),
    ):
        assert_same(quick(f"method.add.{text}"), quick(method=method))


def test_identity_stays_for_methods_that_keep_the_rows() -> None:
    personal = Method(name="mine", stage=Identity(), private="head")
    assert pcgrad(personal).stage == PCGrad() >> Identity()
