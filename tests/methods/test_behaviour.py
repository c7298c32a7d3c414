"""Test what methods must do on quadratics, where the right answer is known.

Small cases: equal models, nobody in a round, what counts examples.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom import Ctx, Method, methods, training
from fedloom.core.layout import Select
from fedloom.core.stage import preceded_by
from fedloom.core.updates import Updates
from fedloom.methods.clusters.centres import rebalanced
from fedloom.methods.conflict.aggregation import adjusted
from fedloom.methods.personal.aggregation import attention, covariance
from fedloom.stages import (
    AttentionAcrossTasks,
    ChosenClusters,
    DomainWeights,
    DualShift,
    GapWeights,
    Mean,
    NormaliseSteps,
    Stage,
    TaskCovariance,
    TopMagnitude,
)
from quadratics import Quadratics

SGD: dict[str, Any] = {"optimizer": {"lr": 1e-4}}
HEAVY: dict[str, Any] = {"optimizer": {"lr": 1e-4, "momentum": 0.9}}
UNEQUAL: dict[str, Any] = {"h": [1, 1, 1], "b": [0, 1, -1], "n": [5, 3, 2], "steps": [2, 4, 8]}


class StepsOnly(training.CountedSteps):
    """a_k = tau_k although there is momentum: the common mistake."""

    def finish(self, view: Any, state: Any) -> Any:
        return {}, {"a": float(view.step)}


@pytest.mark.parametrize(
    ("method", "optimizer", "expected"),
    [
        (methods.fedavg(), SGD, -0.10519),
        (methods.fedavg(), HEAVY, -0.30585),
        (methods.fednova(), SGD, 0.10004),
        (methods.fednova(), HEAVY, 0.10009),
        (replace(methods.fednova(), local=(StepsOnly(),)), HEAVY, -0.01865),
    ],
    ids=["fedavg", "fedavg momentum", "fednova", "fednova momentum", "fednova with a = tau"],
)
def test_fixed_points_under_unequal_steps(method: Method, optimizer: Any, expected: float) -> None:
    assert Quadratics(method, **UNEQUAL, **optimizer).fixed_point() == pytest.approx(expected, abs=1e-5)


def test_fednova_counts_its_proximal_term() -> None:
    """With a proximal term of its own a_k is shorter; the weighted optimum is still met."""
    run = Quadratics(methods.fednova(mu=50.0), **UNEQUAL, **SGD)
    assert run.fixed_point() == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 3.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_k_is_how_much_each_gradient_counts(momentum: float, mu: float, nesterov: bool) -> None:
    """A client with a constant gradient g moves by -lr a_k g, whatever the optimiser: h (y - b) with h -> 0."""
    if nesterov and not momentum:
        return
    tiny = 1e-9
    optimizer = {"lr": 0.02, "momentum": momentum, "nesterov": nesterov}
    run = Quadratics(methods.fednova(mu=mu), [tiny], [-1 / tiny], steps=7, optimizer=optimizer)
    messages = run.method.extras
    assert messages == {"a"}
    seen: dict[str, float] = {}

    class Spy(NormaliseSteps):
        def __call__(self, updates: Any, state: Any, ctx: Any) -> Any:
            seen["a"], seen["moved"] = updates.extra["a"][0], float(updates.X)
            return super().__call__(updates, state, ctx)

    run.method = replace(run.method, stage=Spy() >> Mean())
    run.server["stage"] = run.method.stage.init(run.model.layout)
    run.go()
    assert seen["moved"] == pytest.approx(-0.02 * seen["a"], rel=1e-6)


def test_equal_steps_make_fednova_fedavg() -> None:
    one = Quadratics(methods.fednova(), [1, 2, 3], [0, 1, -1], [5, 3, 2], steps=3, **HEAVY).go(4)
    two = Quadratics(methods.fedavg(), [1, 2, 3], [0, 1, -1], [5, 3, 2], steps=3, **HEAVY).go(4)
    assert torch.equal(one, two)


def test_fednova_golden_values() -> None:
    X = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)
    stage = NormaliseSteps() >> Mean()
    u, _ = stage.on(X, n=[5, 3, 2], a=[2.0, 4.0, 8.0])
    torch.testing.assert_close(u[0], torch.tensor([2.375, -0.285, -0.095, 1.9], dtype=torch.float64))
    u, _ = stage.on(X, n=[5, 3, 2], a=[2.9, 9.049, 28.742049])
    expected = torch.tensor([4.539155, -0.982882, 0.052728, 3.418314], dtype=torch.float64)
    torch.testing.assert_close(u[0], expected, atol=1e-5, rtol=0)
    u, _ = Mean().on(X, n=[5, 3, 2])
    torch.testing.assert_close(u[0], torch.tensor([1.1, 0.3, -0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("tau_eff", "a", "steps", "factors"),
    [
        ("weights", [2.0, 4, 8], [1.0, 2, 3], [1.5, 0.75, 0.375]),
        ("steps", [2.0, 4, 8], [6.0, 6, 6], [3.0, 1.5, 0.75]),
        ("steps", [2.0, 2, 2], [6.0, 2, 1], [2.0, 2.0, 2.0]),
        ("steps", [6.0, 6, 6], [6.0, 6, 6], [1.0, 1.0, 1.0]),
        ("weights", [7.0, 7, 9], [1.0, 2, 3], [1.0, 1.0, 1.0]),
    ],
)
def test_fednova_multiplies_by_the_mean_count_over_the_own(
    tau_eff: Any, a: list[float], steps: list[float], factors: list[float]
) -> None:
    """The third row has weight 0, and says nothing about the mean."""
    X = np.array([[1.0, 2], [3, 4], [5, 6]])
    out, _ = NormaliseSteps(tau_eff).on(X, weight=[1.0, 1.0, 0.0], a=a, steps=steps)
    np.testing.assert_allclose(out.numpy(), X * np.array(factors)[:, None])


def test_a_client_without_steps_is_dropped() -> None:
    u, _ = (NormaliseSteps() >> Mean()).on([[1.0, 2], [9, 9]], a=[2.0, 0.0])
    assert u.tolist() == [[1.0, 2.0]]


SKEWED: dict[str, Any] = {"h": [1, 2, 4], "b": [0, 1, -1], "optimizer": {"lr": 0.05}}
FAST: dict[str, Any] = {"optimizer": {"lr": 0.2}}


def test_scaffold_finds_the_optimum() -> None:
    run = Quadratics(methods.scaffold(), steps=4, **SKEWED)
    assert float(run.go(120)) == pytest.approx(-2 / 7, abs=1e-6)
    assert float(Quadratics(methods.fedavg(), steps=4, **SKEWED).go(30)) != pytest.approx(-2 / 7, abs=1e-3)


def test_feddyn_finds_the_optimum() -> None:
    run = Quadratics(methods.feddyn(alpha=1.0), steps=10, **SKEWED | FAST)
    assert float(run.go(90)) == pytest.approx(-2 / 7, abs=1e-12)


class LinearOnly(training.Dual):
    """The public code's linear term alpha (h_k - theta) without the weight decay that hides the quadratic."""

    def grad(self, view: Any, state: Any) -> None:
        view.grad.add_(state["dual"] - view.base, alpha=self.alpha)


def test_feddyn_without_its_quadratic_ends_elsewhere() -> None:
    method = replace(methods.feddyn(alpha=1.0), local=(LinearOnly(1.0),))
    # sum(h b) / (sum h - N alpha) = -2 / 4
    assert float(Quadratics(method, steps=10, **SKEWED | FAST).go(60)) == pytest.approx(-0.5, abs=0.02)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_variates_are_mean_gradients(momentum: float) -> None:
    """Which for plain SGD is option II, (theta - theta_k) / (tau lr) in the first round."""
    run = Quadratics(methods.scaffold(), [1.0, 2.0], [1.0, -1.0], steps=3, optimizer={"lr": 0.1, "momentum": momentum})
    run.go()
    y, velocity, gradients = 0.0, 0.0, []
    for _ in range(3):
        gradients.append(1.0 * (y - 1.0))
        velocity = momentum * velocity + gradients[-1]
        y -= 0.1 * velocity
    mine = float(run.clients["c00"]["rules"]["0"]["control"])
    assert mine == pytest.approx(sum(gradients) / 3, abs=1e-12)
    if not momentum:
        assert mine == pytest.approx(-y / (3 * 0.1), abs=1e-12)


def members(clients: int, rounds: int, each: int, seed: int = 0) -> list[list[str]]:
    draw = random.Random(seed)
    return [[f"c{k:02d}" for k in draw.sample(range(clients), each)] for _ in range(rounds)]


def instance(seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    h = 0.5 + 1.5 * torch.rand(20, 2, generator=rng, dtype=torch.float64)
    return {"h": h.tolist(), "b": torch.randn(20, 2, generator=rng, dtype=torch.float64).tolist()}


def test_scaffold_under_partial_participation() -> None:
    """2 of 20 clients a round: c stays the mean of all c_k, and the error falls far below FedAvg's."""
    rounds = members(20, 75, 2)
    errors = {}
    for method in (methods.scaffold(), methods.fedavg(), methods.feddyn(alpha=1.0)):
        run = Quadratics(method, **instance(1), steps=10, optimizer={"lr": 0.1})
        run.go(60, rounds)
        late = []
        for here in rounds[60:]:
            run.go(1, [here])
            late.append(float((run.point - run.optimum).norm()))
            if method.name == "scaffold":
                c = sum(s["rules"]["0"]["control"] for s in run.clients.values()) / 20
                torch.testing.assert_close(c, run.server["stage"]["0"]["control"], atol=1e-12, rtol=0)
        errors[method.name] = sum(late) / len(late)
    assert errors["scaffold"] < errors["fedavg"] / 5
    assert errors["feddyn"] < errors["fedavg"] / 2


def test_feddyn_history_is_the_mean_of_the_clients() -> None:
    """Server h = (1/N) sum of all h_k, with absent clients; T9: absent clients keep theirs."""
    run = Quadratics(methods.feddyn(alpha=1.0), **instance(2), steps=3, optimizer={"lr": 0.1})
    before: dict[str, Any] = {}
    for here in members(20, 12, 3, seed=5):
        run.go(1, [here])
        for name, state in before.items():
            if name not in here:
                assert torch.equal(state["rules"]["0"]["dual"], run.clients[name]["rules"]["0"]["dual"])
        before = dict(run.clients)
    mean = sum(s["rules"]["0"]["dual"] for s in run.clients.values()) / 20
    torch.testing.assert_close(run.server["stage"]["dual"], mean, atol=1e-12, rtol=0)


def test_feddyn_history_with_feddea_at_the_server_is_raw() -> None:
    X = torch.tensor([[4.0, 1], [2, -1]], dtype=torch.float64)
    dea = TopMagnitude(0.5)
    _, state = preceded_by(DualShift(Mean()), dea).on(X)
    assert state["dual"].tolist() == [3.0, 0.0]
    method = methods.feddea(methods.feddyn(), rho=0.5, at="server")
    assert method.stage == DualShift(dea >> Mean())


ALL = [
    methods.fedavg(),
    methods.fedprox(mu=1.0),
    methods.scaffold(),
    methods.fednova(),
    methods.feddyn(alpha=1.0),
    methods.fedamp(scale="median"),
    methods.fedmtl(),
]


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_order_of_arrival_does_not_matter(method: Method) -> None:
    one = Quadratics(method, **instance(3), steps=2, optimizer={"lr": 0.1})
    two = Quadratics(method, **instance(3), steps=2, optimizer={"lr": 0.1})
    one.go(3)
    two.go(3, reverse=True)
    assert torch.equal(one.point, two.point)
    for name, model in one.server["personal"].items():
        assert torch.equal(model, two.server["personal"][name])


@pytest.mark.parametrize("method", [m for m in ALL if m.stage.traits.reduces], ids=lambda m: m.name)
def test_one_client_alone_finds_its_own_optimum(method: Method) -> None:
    assert float(Quadratics(method, [2.0], [3.0], steps=5, optimizer={"lr": 0.1}).go(60)) == pytest.approx(
        3.0, abs=1e-6
    )


# the coupling terms carry a gradient, equal to the closed form


def test_fedamp_is_drawn_to_the_mix() -> None:
    """With one step of rate lr from y, the move is -lr (F' + lam/alpha (y - u))."""
    run = Quadratics(methods.fedamp(lam=0.5, scale="median"), [1, 1, 1], [0, 1, 5], steps=1, optimizer={"lr": 0.1})
    run.go()
    models = dict(run.server["personal"])
    W = torch.stack([models[name] for name in run.names])
    u = attention(W, 1.0, 1.0, "median") @ W
    run.go()
    for k, name in enumerate(run.names):
        y = models[name]
        expected = y - 0.1 * ((y - run.b[k]) + 0.5 * (y - u[k]))
        torch.testing.assert_close(run.server["personal"][name], expected, atol=1e-12, rtol=0)


def test_fedmtl_has_the_gradient_of_its_regulariser() -> None:
    """Checked against automatic differentiation of lam tr(W Omega W') with Omega fixed."""
    run = Quadratics(methods.fedmtl(lam=0.3), [1, 1, 1], [[0.0, 2], [1, 1], [5, 0]], steps=1, optimizer={"lr": 0.1})
    run.go()
    W = torch.stack([run.server["personal"][name] for name in run.names]).requires_grad_()
    omega = TaskCovariance().omega(W.detach())
    (0.3 * torch.trace(W.T @ omega @ W)).backward()
    assert W.grad is not None
    assert bool(W.grad.abs().max() > 1e-3)
    expected = W.detach() - 0.1 * ((W.detach() - run.b) + W.grad)
    run.go()
    for k, name in enumerate(run.names):
        torch.testing.assert_close(run.server["personal"][name], expected[k], atol=1e-12, rtol=0)


def test_fedmtl_relates_the_models_without_their_mean() -> None:
    W = torch.tensor([[5.0, 2, 1], [5, 4, 0], [9, 2, 2], [5, 7, 1]], dtype=torch.float64)
    centre = torch.eye(4, dtype=torch.float64) - torch.full((4, 4), 1 / 4, dtype=torch.float64)
    alone = TaskCovariance(centre=False).omega(W - W.mean(0))
    torch.testing.assert_close(TaskCovariance().omega(W), centre @ alone @ centre)
    assert TaskCovariance().omega(W).sum(0).abs().max() < 1e-6  # a shift of all models costs nothing


@pytest.mark.parametrize("method", [methods.fedamp(lam=0), methods.fedmtl(lam=0)], ids=lambda m: m.name)
def test_no_coupling_is_local_training(method: Method) -> None:
    one = Quadratics(method, **instance(4), steps=3, optimizer={"lr": 0.1})
    two = Quadratics(methods.local(), **instance(4), steps=3, optimizer={"lr": 0.1})
    one.go(3)
    two.go(3)
    for name in one.names:
        assert torch.equal(one.server["personal"][name], two.clients[name]["private"])


def test_fedamp_golden_values() -> None:
    W = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]])
    expected = [[0.995947, 0.001012, 0.003041], [0.001012, 0.997478, 0.001510], [0.003041, 0.001510, 0.995450]]
    torch.testing.assert_close(attention(W, 0.5, 10.0), torch.tensor(expected).double(), atol=1e-6, rtol=0)


def test_fedamp_across_tasks_shares_decoders_but_no_heads() -> None:
    method = methods.across_tasks(methods.fedamp(lam=0.5, sigma=3.0, scale="median"))
    assert method.stage == AttentionAcrossTasks(1.0, 3.0, "median")
    assert method.local == methods.fedamp(lam=0.5).local
    assert method.private == Select(role="head")
    with pytest.raises(ValueError, match="fedamp: across-tasks replaces one mean or one attention"):
        methods.across_tasks(methods.fedamp(share="encoder"))


def test_fedamp_weights_stay_convex() -> None:
    xi = attention(torch.zeros(5, 3), 1.0, 1.0)
    assert bool((xi >= 0).all())
    torch.testing.assert_close(xi.sum(1), torch.ones(5).double())


def test_fedamp_of_two_models_by_their_only_distance() -> None:
    """The median is the one distance that there is, so xi = alpha exp(-1 / sigma) / sigma however far they are."""
    for far in (0.1, 3.0, 1e4):
        xi = attention(torch.tensor([[0.0, 0], [far, 0]]), 0.5, 2.0, "median")
        assert xi[0].tolist() == pytest.approx([1 - 0.25 * math.exp(-0.5), 0.25 * math.exp(-0.5)])
    assert attention(torch.ones(1, 3), 1.0, 1.0, "median").tolist() == [[1.0]]


def test_mocha_golden_values() -> None:
    W = torch.tensor([[1.0, 2, 0], [0, 1, 1]])
    sigma, omega = covariance((W.T @ W).double())
    expected = [[0.152660, 0.236701, -0.068619], [0.236701, 0.591752, 0.118350], [-0.068619, 0.118350, 0.255588]]
    torch.testing.assert_close(sigma, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    assert float(sigma.trace()) == pytest.approx(1)
    vectors = torch.linalg.eigh(sigma).eigenvectors[:, 1:]  # Omega is the inverse where Sigma is not singular
    torch.testing.assert_close(vectors.T @ omega @ sigma @ vectors, torch.eye(2).double(), atol=1e-6, rtol=0)


def test_mocha_without_centring_of_models_at_right_angles() -> None:
    """Of lengths 1, 2 and 5: G^(1/2) is their diagonal, with trace 8, so Omega is 8 / length and nobody is coupled."""
    models = dict(zip("abc", torch.diag(torch.tensor([1.0, 2.0, 5.0])), strict=True))
    stage = TaskCovariance(centre=False)
    torch.testing.assert_close(
        stage.omega(torch.stack([*models.values()])), torch.diag(torch.tensor([8.0, 4, 1.6])).double()
    )
    sent = stage.broadcast({}, ["c", "a", "new"], models)
    assert float(sent["c"]["relation"]) == pytest.approx(1.6)
    torch.testing.assert_close(sent["c"]["peers"], torch.zeros(3))
    assert sent["new"] == {}


def test_mocha_of_nothing() -> None:
    sigma, omega = covariance(torch.zeros(3, 3))
    torch.testing.assert_close(sigma @ omega, torch.eye(3).double())


def test_fedga_golden_values() -> None:
    before = {"a": 0.80, "b": 0.70, "c": 0.90}
    after = {"a": 0.75, "b": 0.50, "c": 0.89}
    gaps = {k: before[k] - after[k] for k in before}  # accuracies: a fall hurts
    new = adjusted(dict.fromkeys("abc", 1 / 3), gaps, 0.2 / 3)
    assert list(new.values()) == pytest.approx([0.322086, 0.368098, 0.309816], abs=1e-6)


def test_fedga_the_client_that_suffers_gains_weight() -> None:
    stage = GapWeights(relative=False) >> Mean()
    X = torch.eye(3)
    losses = {"loss_received": [1.0, 1.0, 1.0], "loss_trained": [0.5, 0.5, 0.5]}
    _, state = stage.on(X, round=1, **losses)
    u, state = stage.on(X, round=2, state=state, loss_received=[0.55, 0.7, 0.51], loss_trained=[0.4, 0.4, 0.4])
    torch.testing.assert_close(u, torch.tensor([[0.322086, 0.368098, 0.309816]]), atol=1e-6, rtol=0)
    # client c00 is absent in round 3: it keeps its weight among the others' and has no gap in round 4
    _, state = stage.on(X[1:], rows=["c1", "c2"], round=3, state=state, loss_received=[1, 1], loss_trained=[0.4, 0.4])
    weights = state["0"]["weights"]
    assert set(weights) == {"*", "c0", "c1", "c2"}
    assert sum(weights[client] for client in ("c0", "c1", "c2")) == pytest.approx(1)


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("rounds", [None, 10])
def test_fedga_as_its_formula_in_round_4(centre: bool, relative: bool, rounds: int | None) -> None:
    """a_k + (left step / n) gap_k / max |gap|: four clients of a population of five, one not there in round 3.

    The fifth, which never took part, counts in the sum.
    """
    trained, received = np.array([0.5, 2.0, 0.25]), np.array([0.75, 2.5, 0.125])
    stage = GapWeights(step=1.0, relative=relative, centre=centre, floor=0.05)
    names, start = ("a", "b", "c", "d"), np.array([0.1, 0.2, 0.3, 0.3])
    before = {name: {"round": 3, "loss": loss} for name, loss in zip("abc", trained, strict=True)}
    state = {
        "weights": {"*": 0.1, **dict(zip(names, start.tolist(), strict=True))},
        "trained": {**before, "d": {"round": 2, "loss": 0.1}},
    }
    losses = {"loss_received": [*received.tolist(), 9.0], "loss_trained": [0.1, 0.2, 0.3, 0.4]}
    updates = Updates.of(torch.eye(4), rows=names, **losses)
    out, new = stage(updates, state, Ctx(round=4, population=5, rounds=rounds))

    gaps = (received - trained) / (trained if relative else 1)
    gaps = gaps - gaps.mean() if centre else gaps
    step = (1.0 if rounds is None else 0.8) / 5  # rounds 1 and 2 of 10 are over when the gaps of round 3 come to be
    moved = np.maximum(start + step * np.array([*gaps, 0.0]) / np.abs(gaps).max(), 0.05)
    assert out.weight.tolist() == pytest.approx((moved / (moved.sum() + 0.1)).tolist(), rel=1e-12)
    assert new["weights"]["*"] == pytest.approx(0.1 / (moved.sum() + 0.1), rel=1e-12)
    assert new["trained"]["d"] == {"round": 4, "loss": 0.4}


def test_fedga_starts_equal_in_its_population_and_stops_at_the_end() -> None:
    losses = {"loss_received": [1.0, 2.0], "loss_trained": [0.0, 1.0]}
    updates = Updates.of(torch.eye(2), **losses)
    first, state = GapWeights()(updates, {}, Ctx(round=1, population=4, rounds=2))
    assert first.weight.tolist() == [0.25, 0.25]
    # The loss of 0 has no relative gap; the other's is 1, and the weights of all four clients sum to 1.
    second, later = GapWeights(step=0.4)(updates, state, Ctx(round=2, population=4, rounds=2))
    assert second.weight.tolist() == pytest.approx([0.25 / 1.1, 0.35 / 1.1])
    # One that joins now counts as much as one that was there and has no gap.
    joined = Updates.of(torch.eye(2), rows=["c0", "new"], loss_received=[0.0, 2.0], loss_trained=[0.0, 1.0])
    third, _ = GapWeights()(joined, later, Ctx(round=3, population=4, rounds=2))
    assert third.weight.tolist() == pytest.approx([0.25 / 1.1] * 2)
    # What is left of the step after 2 rounds of 2 is nothing, and never less.
    for round in (4, 5):
        state["trained"] = {client: {**kept, "round": round - 1} for client, kept in state["trained"].items()}
        last, _ = GapWeights(step=0.4)(updates, state, Ctx(round=round, population=4, rounds=2))
        assert last.weight.tolist() == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize("gaps", [{}, {"a": 0.0, "b": 0.0}])
def test_fedga_without_gaps_changes_nothing(gaps: dict[str, float]) -> None:
    assert adjusted({"a": 0.25, "b": 0.75}, gaps, 0.2) == {"a": 0.25, "b": 0.75}


def test_fedga_weights_lie_between_the_floor_and_1_before_they_are_divided_by_their_sum() -> None:
    assert adjusted({"a": 0.5, "b": 0.5}, {"a": 3.0, "b": -3.0}, 0.9, 0.25) == {"a": 0.8, "b": 0.2}
    assert adjusted({"a": 0.5}, {"a": -1.0}, 1.0) == {"a": 0.5}, "nothing would be left"


def test_personal_methods_refuse_what_would_be_lost() -> None:
    with pytest.raises(ValueError, match="would be lost"):
        methods.feddea(methods.fedamp(), rho=0.5, at="server")


@pytest.mark.parametrize(("encoder", "shape"), [({"name": "mlp"}, (5,)), ({"name": "resnet10", "width": 4}, (1, 8, 8))])
def test_separate_is_one_fedavg_for_each_task(encoder: dict[str, Any], shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    labels = {"a": 2, "b": 3}
    data = {
        who: (rng.normal(size=(20, *shape)).astype("float32"), {t: rng.integers(0, labels[t], 20) for t in tasks})
        for who, tasks in {"ann": "a", "bob": "ab", "cleo": "b"}.items()
    }

    def models(task: str, method: str, **more: Any) -> dict[str, torch.Tensor]:
        tasks = {task: labels[task]} | (labels if method == "separate" else {})  # first, so that its head begins equal
        clients = {
            who: fl.Client((x, {t: y[t] for t in y if t in tasks}), val=0, tasks=[t for t in y if t in tasks])
            for who, (x, y) in data.items()
            if set(y) & set(tasks)
        }
        federation = fl.Federation(clients, {t: fl.task(classes=n) for t, n in tasks.items()}, test=data["bob"])
        model = {**encoder, "heads": "own"}
        result = fl.run(federation, model=model, method=method, rounds=3, **more)
        module = result.model(task=task) if method == "separate" else result.model("bob")
        return {name: v for name, v in module.state_dict().items() if name.startswith(("encoder", f"heads.{task}"))}

    for task in labels:
        # a small rate, because batch norm magnifies rounding
        mine, alone = (models(task, method, batch_size=20, lr=0.001) for method in ("separate", "fedavg"))
        for name, value in alone.items():
            torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-4)


def test_attention_of_equal_models_is_what_alpha_and_sigma_say() -> None:
    """Their median distance is 0, and nothing is divided by it."""
    for scale in ("absolute", "median"):
        xi = attention(torch.ones(3, 2), 0.2, 1.0, scale)  # type: ignore[arg-type]
        expected = torch.full((3, 3), 0.2).fill_diagonal_(0.6).double()
        torch.testing.assert_close(xi.double(), expected)
    assert attention(torch.ones(1, 2), 0.2, 1.0, "median").tolist() == [[1.0]]


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_attention_by_the_median_does_not_depend_on_the_unit_of_parameters(scale: float) -> None:
    W = torch.tensor([[0.0], [1.0], [3.0]])  # squared distances 1, 4 and 9
    xi = attention(scale * W, 0.1, 2.0, "median")
    assert float(xi[0, 1]) == pytest.approx(0.1 * float(torch.tensor(-1 / 8).exp()) / 2)
    assert xi.sum(1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("weights", "stage", "counts"),
    [
        ("size", Mean(), True),
        ("declared", Mean(), True),
        ("uniform", Mean(), False),
        ("uniform", DomainWeights(classes=2, domains=2) >> Mean(), True),
    ],
)
def test_numbers_of_examples_travel_only_where_something_reads_them(weights: str, stage: Stage, counts: bool) -> None:
    assert Method(weights=weights, stage=stage).counts_examples == counts  # type: ignore[arg-type]


def test_clusters_move_no_model_in_a_round_without_rows() -> None:
    stage = ChosenClusters(2)
    nobody = Updates.of(torch.ones(1, 3)).keep([])
    state = stage.init(nobody.layout)
    out, after = stage(nobody, state, Ctx(1))
    assert out.X.tolist() == [[0, 0, 0]]
    assert after == state


def test_clients_of_no_cluster_stay_where_others_are_moved() -> None:
    for seed in range(5):
        moved = rebalanced([2, 0, 0, 0, 2], 2, 1, torch.Generator().manual_seed(seed))
        assert (moved[0], moved[4], sorted(moved[1:4])) == (2, 2, [0, 0, 1])
