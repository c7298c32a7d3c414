"""Test what a server does with an aggregated update."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedloom.federation.runs import checkpoint
from fedloom.server import Adaptive, Lookahead, Momentum, Plain, ServerRule
from tests_support import Quick, assert_same, outcome, same

RULES: tuple[ServerRule, ...] = (
    Plain(0.5),
    Momentum(),
    Adaptive("adam"),
    Adaptive("yogi"),
    Adaptive("adagrad", b1=0),
    Lookahead(),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def steps(rule: ServerRule, *updates: Any, start: float = 0.0) -> list[Tensor]:
    """The model after each update."""
    vectors = [torch.tensor(u, dtype=torch.float64).reshape(-1) for u in updates]
    model = torch.full_like(vectors[0], start)
    state, models = rule.init(model), []
    for u in vectors:
        model, state = rule.apply(model, u, state)
        models.append(model)
    return models


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("adam", [0.098020, 0.143784]), ("yogi", [0.098020, 0.143590]), ("adagrad", [0.009980, 0.014614])],
)
def test_golden_values(kind: Literal["adam", "yogi", "adagrad"], expected: list[float]) -> None:
    rule = Adaptive(kind, step=0.1, b1=0.9, b2=0.99, eps=1e-3)
    assert [m.item() for m in steps(rule, 0.5, -0.2)] == pytest.approx(expected, abs=1e-6)
    assert steps(rule, 0.5) == steps(Adaptive(kind, 0.1, 0.9, 0.99, 1e-3, v0=1e-6), 0.5)


@pytest.mark.parametrize("step", [0.5, 1.0, 2.0])
def test_the_plain_rule_moves_by_step_times_the_update(step: float) -> None:
    moved, state = Plain(step).apply(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0]), {})
    assert (moved.tolist(), state) == ([1 + 4 * step, 2 - 2 * step], {})


def test_momentum() -> None:
    assert [m.item() for m in steps(Momentum(0.9, 0.5), 1, 2)] == pytest.approx([0.5, 0.5 + 0.5 * 2.9])
    assert steps(Momentum(0, 0.5), 1, 2) == steps(Plain(0.5), 1, 2)


def test_a_constant_update_is_multiplied_in_the_long_run() -> None:
    a, b = steps(Momentum(0.9), *[1.0] * 300)[-2:]
    assert (b - a).item() == pytest.approx(10)
    a, b = steps(Lookahead(0.85), *[1.0] * 300)[-2:]
    assert (b - a).item() == pytest.approx(1 / 0.15)


def test_lookahead_is_the_mean_of_what_clients_reached() -> None:
    """u is measured from the lookahead, so that the new model is lookahead + u."""
    rule = Lookahead(0.85)
    model = torch.tensor([1.0, -2.0], dtype=torch.float64)
    state = rule.init(model)
    for u in ([0.5, 1.0], [-0.25, 1.0], [0.0, 3.0]):
        sent = rule.dispatch(model, state)
        momentum = state["m"]
        model, state = rule.apply(model, update := torch.tensor(u, dtype=torch.float64), state)
        torch.testing.assert_close(model, sent + update)
        torch.testing.assert_close(state["m"], 0.85 * momentum + update)


def test_lookahead_converges_where_plain_steps_do() -> None:
    """A quadratic around 3 and one local step: measured from the model itself, momentum would count twice."""
    rule = Lookahead(0.5)
    model = torch.zeros(1)
    state = rule.init(model)
    for _ in range(100):
        model, state = rule.apply(model, 0.1 * (3 - rule.dispatch(model, state)), state)
    assert model.item() == pytest.approx(3, abs=1e-4)


@every_rule
def test_nothing_is_changed_in_place(rule: ServerRule) -> None:
    model, update = torch.randn(5), torch.randn(5)
    state = rule.apply(model, update, rule.init(model))[1]
    before = [checkpoint.map_tensors(x, torch.clone) for x in (model, update, state)]
    rule.dispatch(model, state)
    rule.apply(model, update, state)
    assert same(before, [model, update, state])


@every_rule
def test_state_is_a_checkpoint_of_vectors(rule: ServerRule, tmp_path: Any) -> None:
    model = torch.randn(5)
    state = rule.apply(model, torch.randn(5), rule.init(model))[1]
    assert all(value.shape == model.shape for value in state.values())
    checkpoint.save(tmp_path, "s", state, round=1)
    assert same(state, checkpoint.load(tmp_path, "s", lambda head: head["round"])[0])


@every_rule
def test_zero_updates_from_the_start_leave_the_model(rule: ServerRule) -> None:
    model = torch.randn(5)
    state = rule.init(model)
    for _ in range(3):
        new, state = rule.apply(model, torch.zeros(5), state)
        assert torch.equal(rule.dispatch(new, state), model)


def test_fedacg_without_lookahead_is_fedprox(quick: Quick) -> None:
    acg = quick("method={name: fedacg, lam: 0, beta: 0.05}")
    assert_same(acg, quick("method={name: fedprox, mu: 0.1, weights: uniform}"))
    nothing = quick("method={name: fedacg, lam: 0, beta: 0}")
    assert_same(nothing, quick("method={name: fedavg, weights: uniform}"))
    with pytest.raises(AssertionError):
        assert_same(acg, quick("method={name: fedacg, lam: 0.5, beta: 0.05}"))


def test_the_same_first_round_with_and_without_momentum(quick: Quick) -> None:
    """m starts at zero, so one round is FedAvg."""
    one = "training.rounds=1"
    assert_same(quick("method={name: fedopt, optimizer: momentum}", one), quick(one))
    uniform = quick("method={name: fedavg, weights: uniform}", one)
    assert_same(quick("method={name: fedacg, lam: 0.85, beta: 0}", one), uniform)


@pytest.mark.parametrize(
    "method", ["{name: fedopt, step: 1}", "{name: fedopt, optimizer: momentum, step: 100}", "{name: fedacg, beta: 0}"]
)
def test_buffers_are_never_stepped(quick: Quick, method: str) -> None:
    """After one round the clients' buffers come from the same start, so the server's step must not show in them."""
    changes = ("model={name: resnet10, width: 4}", "training.rounds=1", "method.weights=uniform")
    tensors, _ = outcome(quick(f"method={method}", *changes))
    plain, _ = outcome(quick("method=fedavg", *changes))
    buffers = [name for name in plain if "running_" in name]
    assert buffers
    for name in buffers:
        assert torch.equal(tensors[name], plain[name]), name
    assert all((tensors[name] > 0).all() for name in buffers if name.endswith("running_var"))
