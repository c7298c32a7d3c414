"""Methods with a model of the client's own: FedRep, FedBABU, Ditto, pFedMe."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedloom
from fedloom import methods
from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.stages import GroupBy, Mean
from fedloom.training import FlatModel
from fedloom.training.config import Optimizer
from fedloom.training.rules import Phase, ends
from quadratics import Quadratics
from tests_support import client_step, load_recipe

Quick = Callable[..., Result]
DECAY = "training.optimizer={name: adamw, lr: 0.01, weight_decay: 0.5}"


def one_round(*changes: str, client: str = "all-0") -> tuple[Any, Any, Any, Any]:
    """(built, model after one client's round, its starting parameters, its new state)."""
    return one_turn(*changes, client=client)[:4]


def one_turn(*changes: str, client: str, **parts: Any) -> tuple[Any, Any, Any, Any, Payload]:
    """Return what `one_round` gives, and what the client sends; `parts` replace those of the method."""
    recipe = load_recipe(*changes)
    built = build(recipe)
    method = replace(built.method, **parts)
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    message = dispatch(replace(built, method=method), initial_state(built)["server"], [client])[client]
    before = model.vector.clone()
    payload, _, state = client_step(
        method,
        model,
        built.federation,
        built.federation.clients[client],
        message,
        {},
        fedloom.Ctx(1),
        recipe.training,
    )
    return built, model, before, state, payload


def test_a_client_says_its_domain_and_its_tasks_to_stages_that_ask() -> None:
    changes = ("data.domains=[plain, inverted]", "partition={name: domains, clients: 2}")
    built = build(load_recipe(*changes))
    client = next(client for client in built.federation.clients.values() if client.domain == "inverted")
    stage = GroupBy("domain", GroupBy("tasks", Mean()))
    *_, payload = one_turn(*changes, client=client.id, stage=stage)
    assert payload.extra == {"domain": "inverted", "tasks": ",".join(sorted(client.tasks))}


def test_local_buffers_do_not_travel() -> None:
    changes = "model={name: resnet10, width: 4}"
    *_, apart = one_turn(changes, client="all-0", buffers="local")
    *_, common = one_turn(changes, client="all-0")
    assert apart.buffers is None
    assert not apart.integers
    assert common.buffers is not None
    assert common.integers


@pytest.mark.parametrize(
    ("method", "private"),
    [("{name: fedper, layers: [encoder.stages.2.*]}", "encoder.stages.2."), ("fedper", "")],
)
def test_statistics_of_private_layers_stay_with_the_client(method: str, private: str) -> None:
    built, model, _, state, payload = one_turn("model={name: resnet10, width: 4}", f"method={method}", client="all-0")
    buffers, names = built.layout.buffers, built.method.shared_buffers(built.layout).names
    kept = [name for name in buffers.names if private and name.startswith(private)]
    assert bool(kept) == bool(private)
    assert sorted([*names, *kept]) == sorted(buffers.names)
    assert (0 if payload.buffers is None else len(payload.buffers)) == built.method.shared_buffers(built.layout).d
    if kept:
        own = buffers.take(model.buffers, buffers.select(name=tuple(kept)))
        assert torch.equal(state["private_buffers"], own)


def test_fedbabu_heads_are_frozen_under_weight_decay() -> None:
    built, model, before, _ = one_round("method=fedbabu", DECAY)
    layout = built.layout
    for block, s in zip(layout.blocks, layout.slices, strict=True):
        assert torch.equal(model.vector[s], before[s]) == (block.role == "head"), block.name


def test_a_frozen_encoder_keeps_its_statistics() -> None:
    """FedRep's first phase alone: neither weights nor batch norm statistics of the encoder move."""
    changes = ("model={name: resnet10, width: 4}", "method={name: fedrep, head: 0.5}", DECAY)
    recipe = load_recipe(*changes)
    built = build(recipe)
    only = replace(built.method, local=built.method.phases[:1])
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    message = dispatch(replace(built, method=only), initial_state(built)["server"], ["all-0"])["all-0"]
    before = model.vector.clone()
    client_step(
        only, model, built.federation, built.federation.clients["all-0"], message, {}, fedloom.Ctx(1), recipe.training
    )
    for block, s in zip(built.layout.blocks, built.layout.slices, strict=True):
        in_encoder = "encoder" in (block.role, block.part)
        assert torch.equal(model.vector[s], before[s]) == in_encoder, block.name


def test_fedrep_trains_both_parts_in_a_round() -> None:
    built, model, before, _ = one_round("method=fedrep", "training.steps=5")
    for block, s in zip(built.layout.blocks, built.layout.slices, strict=True):
        assert not torch.equal(model.vector[s], before[s]), block.name


@pytest.mark.parametrize(
    ("shares", "batches", "expected"),
    [
        ((0.8, 0.2), 10, [8, 10]),
        ((0.8, 0.2), 2, [1, 2]),
        ((0.5, 0.5), 1, [1, 1]),
        ((0.01, 0.99), 5, [1, 5]),
        ((1,), 7, [7]),
        ((1, 1, 2), 8, [2, 4, 8]),
        ((8, 1, 1), 3, [1, 2, 3]),
        ((1, 1, 1), 2, [1, 2, 2]),
    ],
)
def test_every_phase_has_a_batch(shares: tuple[float, ...], batches: int, expected: list[int]) -> None:
    assert ends(tuple(Phase("*", s) for s in shares), batches) == expected


def test_fedbabu_is_tuned_before_it_is_measured(quick: Quick) -> None:
    """Tuned models differ from untuned ones, are the same each time, and nothing of the tuning is kept."""
    tuned, again, plain = (quick(f"method={{name: fedbabu, tune: {epochs}}}") for epochs in (1, 1, 0))
    a, b, c = (trained_models(r.folder) for r in (tuned, again, plain))
    assert set(a) == set(c) == {"all-0", "digit-0", "holes-0", "large-0", "parity-0"}
    head = (
        "heads.digit.weight"
        if "heads.digit.weight" in a["all-0"]
        else next(n for n in a["all-0"] if n.startswith("heads.digit"))
    )
    assert torch.equal(a["all-0"][head], b["all-0"][head])
    assert not torch.equal(a["all-0"][head], c["all-0"][head])
    assert torch.equal(c["all-0"][head], c["digit-0"][head])  # the common initialisation
    lines = [
        [json.loads(x)["train"] for x in (r.folder / "metrics.jsonl").read_text().splitlines()] for r in (tuned, plain)
    ]
    assert lines[0] == lines[1]  # training losses: the tuning left no trace


def test_ditto_leaves_fedavg_alone(quick: Quick) -> None:
    """The global stream is FedAvg's, bit for bit; personal models are there beside it and move."""
    changes = ("model={name: resnet10, width: 4}", "training.rounds=3", "training.optimizer={lr: 0.05, momentum: 0.9}")
    one, two = quick("method=ditto", *changes), quick("method=fedavg", *changes)
    ditto, fedavg = trained_models(one.folder), trained_models(two.folder)
    for name, tensor in fedavg[""].items():
        assert torch.equal(tensor, ditto[""][name]), name
    assert len(ditto) == 6
    lines = [json.loads(x) for x in (one.folder / "metrics.jsonl").read_text().splitlines()]
    models = {(m["client"], m["model"]) for m in lines[-1]["metrics"]}
    assert {("all-0", "global"), ("all-0", "personal")} <= models
    losses = [
        next(
            m["value"] for m in x["metrics"] if (m["client"], m["model"], m["metric"]) == ("all-0", "personal", "loss")
        )
        for x in lines
    ]
    assert len(set(losses)) == len(losses)


def test_dittos_own_model_begins_with_the_statistics_that_were_received() -> None:
    """Not with those that training the received model has just left."""
    *_, state, payload = one_turn("model={name: resnet10, width: 4}", "method=ditto", client="all-0")
    counters = state["personal"]["integers"]
    assert counters
    for name, batches in counters.items():
        assert torch.equal(batches, payload.integers[name]), name  # as many steps, from the same start


def test_ditto_is_held_near_the_received_model() -> None:
    """On a quadratic the personal model's rest point is (h b + lam theta) / (h + lam), theta being FedAvg's optimum."""
    run = Quadratics(methods.ditto(lam=0.5), [1, 1], [0, 4], steps=1, optimizer={"lr": 0.1})
    run.go(400)
    assert float(run.point) == pytest.approx(2.0, abs=1e-6)
    for name, b in (("c00", 0.0), ("c01", 4.0)):
        assert float(run.clients[name]["personal"]["vector"]) == pytest.approx((b + 0.5 * 2) / 1.5, abs=1e-6)


def test_ditto_without_coupling_is_local_training() -> None:
    one = Quadratics(methods.ditto(lam=0.0), [1, 2], [0, 4], steps=3, optimizer={"lr": 0.1})
    two = Quadratics(methods.local(), [1, 2], [0, 4], steps=3, optimizer={"lr": 0.1})
    one.go(5)
    two.go(5)
    for name in one.names:
        torch.testing.assert_close(one.clients[name]["personal"]["vector"], two.clients[name]["private"])


def test_pfedme_personal_models_minimise_the_envelope() -> None:
    """theta_k -> (h b + lam w) / (h + lam); w rests where the envelopes' gradients cancel."""
    method = methods.pfedme(lam=2.0, inner=30, outer=0.3)
    run = Quadratics(method, [1, 3], [0, 4], steps=1, optimizer={"lr": 0.1})
    run.go(40)
    w = float(run.point)
    for name, h, b in (("c00", 1.0, 0.0), ("c01", 3.0, 4.0)):
        assert float(run.clients[name]["personal"]["vector"]) == pytest.approx((h * b + 2 * w) / (h + 2), abs=1e-3)
    # sum_k lam (w - theta_k) = 0 with theta_k as above
    slopes = [(1.0, 0.0), (3.0, 4.0)]
    assert sum(2 * (w - (h * b + 2 * w) / (h + 2)) for h, b in slopes) == pytest.approx(0.0, abs=0.05)


def test_pfedme_refuses_steps_that_cannot_be_stable(quick: Quick) -> None:
    """Before anything is trained, so that tuning leaves such a learning rate out."""
    with pytest.raises(fedloom.errors.RecipeError, match="method: pFedMe needs learning rate x lam below 2"):
        quick("method={name: pfedme, lam: 100}")
    (rule,) = methods.pfedme(lam=4.0).rules
    rule.check(Optimizer(lr=0.49))
    rule.check(Optimizer(name="adam", lr=0.5))
    with pytest.raises(ValueError, match="below 2, found 0.5 x 4.0 = 2.0"):  # where theta swings for ever
        rule.check(Optimizer(lr=0.5))


def test_a_stack_refuses_phases(quick: Quick) -> None:
    with pytest.raises(fedloom.errors.RecipeError, match="stacked"):
        quick("method=fedrep", "training.stacked=true", "model=mlp")
