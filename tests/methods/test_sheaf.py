"""Sheaf-FMTL: the steps of models and maps by literal formulas, what travels, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import fedloom as fl
from fedloom import Ctx, methods
from fedloom.core.updates import Updates
from fedloom.engines.api import Result, trained_models
from fedloom.errors import RecipeError
from fedloom.federation.runs.checkpoint import load
from fedloom.stages import SheafLinks
from fedloom.training import RestrictionMaps, View
from quadratics import Quadratics
from tests_support import assert_same

Quick = Callable[..., Result]
RING = ("method={name: sheaf-fmtl, topology: ring, gamma: 0.001, lam: 5, eta: 0.1}", "evaluation.splits=[test]")


def view_of(params: list[float], edges: list[int], projections: list[list[float]]) -> View:
    y = torch.tensor(params)
    told = pad_sequence([torch.tensor(q) for q in projections], batch_first=True, padding_value=torch.nan)
    broadcast = {"edges": torch.tensor(edges)[:, None], "projections": told}
    return View(y, torch.zeros_like(y), y.clone(), (), (slice(0, len(y)),), broadcast=broadcast)


def test_one_step_by_hand() -> None:
    """P = (1/2 -1), y = (1 2), q = 1/2: P y - q = -2, so lam P^T (P y - q) = 1/10 (-1 2).

    After training y = (2 1): P y - q = -1/2, so P <- P + eta lam 1/2 (2 1) = P + 1/100 (2 1), and P y = 0.05.
    """
    rule = RestrictionMaps(lam=0.1, eta=0.2, gamma=0.5)
    view = view_of([1.0, 2.0], [7], [[0.5]])
    state = rule.begin(view, {"links": [7, 8], "maps": torch.tensor([[[0.5, -1.0]], [[1.0, 1.0]]])})
    view.grad += 1
    rule.grad(view, state)
    torch.testing.assert_close(view.grad, torch.tensor([0.9, 1.2]))
    view.params[:] = torch.tensor([2.0, 1.0])
    kept, sent = rule.finish(view, state)
    torch.testing.assert_close(kept, {"links": [7], "maps": torch.tensor([[[0.52, -0.99]]])})
    torch.testing.assert_close(sent["projections"], torch.tensor([[0.05]]))
    assert sent["edges"].tolist() == [[7]]


def test_a_link_without_a_projection_is_drawn_and_told_but_pulls_nothing() -> None:
    rule = RestrictionMaps(gamma=0.5, lam=1.0)
    told: list[list[float]] = [[0.5], []]
    view = view_of([1.0, 2.0, 3.0, 4.0], [5, 7], told)
    state = rule.begin(view, {})
    assert [P.shape for P in state["maps"]] == [(2, 4), (2, 4)]
    assert not torch.equal(state["maps"][0], state["maps"][1])
    kept, sent = rule.finish(view, state)
    assert torch.equal(kept["maps"][1], state["maps"][1])
    moved = (kept["maps"][0] != state["maps"][0]).any(1)
    assert moved.tolist() == [True, False], "only the row of which the neighbour has its own"
    assert sent["edges"].tolist() == [[5], [7]]
    torch.testing.assert_close(sent["projections"][1], state["maps"][1] @ view.params)
    again = rule.begin(view_of([1.0, 2.0, 3.0, 4.0], [5, 7], told), {})
    assert torch.equal(again["maps"][1], state["maps"][1])


def test_maps_that_are_the_identity_pull_as_the_laplacian_of_the_graph() -> None:
    """With P = I, not learned, it is lam/2 sum |theta_i - theta_j|^2."""
    rule = RestrictionMaps(lam=0.5, eta=0.0, gamma=1.0)
    others = [[3.0, 0.0, 1.0], [-1.0, 2.0, 1.0]]
    view = view_of([1.0, 1.0, 1.0], [1, 2], others)
    state = rule.begin(view, {"links": [1, 2], "maps": torch.eye(3).expand(2, 3, 3)})
    rule.grad(view, state)
    torch.testing.assert_close(view.grad, 0.5 * sum(view.params - torch.tensor(other) for other in others))
    kept, _ = rule.finish(view, state)
    assert torch.equal(kept["maps"][0], torch.eye(3))


H, B = [[1.0, 2.0], [0.5, 1.5]], [[1.0, -2.0], [3.0, 0.5]]
LR, LAM, ETA = 0.1, 4.0, 0.05


def at_work(lam: float = LAM, steps: int = 2) -> Quadratics:
    method = methods.sheaf_fmtl(lam=lam, eta=ETA, gamma=0.5)
    return Quadratics(method, H, B, steps=steps, optimizer={"name": "sgd", "lr": LR})


def maps_of(q: Quadratics) -> list[Tensor]:
    return [q.clients[name]["rules"]["0"]["maps"][0] for name in q.names]


def test_two_peers_follow_the_formulas() -> None:
    """Seven rounds of two local steps; theta of two numbers, P of one row."""
    q = at_work()
    h, b = torch.tensor(H, dtype=torch.float64), torch.tensor(B, dtype=torch.float64)
    theta = torch.zeros(2, 2, dtype=torch.float64)
    q.go(2)
    for _ in range(2 * 2):  # nobody is known in the first round, and nothing was sent before the second
        theta = theta - LR * h * (theta - b)
    P = [100 * p for p in maps_of(q)]  # larger, so that the coupling shows
    for name, p in zip(q.names, P, strict=True):
        maps = q.clients[name]["rules"]["0"]["maps"]
        maps[0] = p
    told = [p @ theta[i] / 100 for i, p in enumerate(P)]
    for _ in range(5):
        q.go()
        for i, j in ((0, 1), (1, 0)):
            for _ in range(2):
                coupling = P[i].T @ (P[i] @ theta[i] - told[j])
                theta[i] = theta[i] - LR * (h[i] * (theta[i] - b[i]) + LAM * coupling)
            P[i] = P[i] - ETA * LAM * torch.outer(P[i] @ theta[i] - told[j], theta[i])
        told = [P[i] @ theta[i] for i in range(2)]
        for name, expected, p in zip(q.names, theta, maps_of(q), strict=True):
            torch.testing.assert_close(q.clients[name]["private"], expected)
            torch.testing.assert_close(p, P[q.names.index(name)])


def test_the_coupling_brings_projections_together() -> None:
    """The gap |P_ij theta_i - P_ji theta_j| ends below what local training leaves, and the models move for it."""
    gaps = []
    for lam in (0.0, LAM):
        q = at_work(lam)
        q.go(2)
        for name, p in zip(q.names, ([[1.0, 0.5]], [[0.5, 1.0]]), strict=True):
            maps = q.clients[name]["rules"]["0"]["maps"]
            maps[0] = torch.tensor(p, dtype=torch.float64)
        q.go(30)
        one, other = (p @ q.clients[name]["private"] for p, name in zip(maps_of(q), q.names, strict=True))
        gaps.append(float((one - other).norm()))
    assert gaps[1] < 0.2 * gaps[0]


def test_without_its_term_it_is_local_training(quick: Quick) -> None:
    assert_same(
        quick("method=local", "training.rounds=4"),
        quick("method={name: sheaf-fmtl, lam: 0, gamma: 0.001}", "training.rounds=4"),
        models_only=True,
    )


def test_the_coupling_starts_in_the_third_round(quick: Quick) -> None:
    for rounds in (2, 3):
        local, coupled = (quick(*more, f"training.rounds={rounds}") for more in (("method=local",), RING))
        if rounds == 2:
            assert_same(local, coupled, models_only=True)
        else:
            with pytest.raises(AssertionError):
                assert_same(local, coupled, models_only=True)


def test_only_projections_and_the_numbers_of_links_travel(quick: Quick) -> None:
    """Up: n, and for both neighbours on the ring m numbers and a link; clients with other tasks have other maps."""
    run = quick(*RING, "training.rounds=3", "model.heads=own")
    lines = [json.loads(line) for line in (run.folder / "bytes.jsonl").read_text().splitlines()]
    sent = [{e["client"]: (e["role"], e["bytes"]) for e in line["up"] if e["bytes"]} for line in lines if line["round"]]
    state, _, _ = load(run.folder, "state", lambda head: head["round"])
    shapes = {name: [P.shape for P in own["rules"]["0"]["maps"]] for name, own in state["clients"].items()}
    assert len({*map(str, shapes.values())}) > 1
    for client, maps in shapes.items():
        (m, d), other = maps
        assert other == (m, d)
        assert m == int(0.001 * d) > 1
        assert sent[0][client] == ("side", 8)
        assert sent[2][client] == ("side", 8 + 2 * (8 + 4 * m))


def test_a_plan_says_that_its_bytes_leave_out_the_projections() -> None:
    """Nobody has a link before the first round, so what travels later cannot be counted."""
    for method, left_out in (("sheaf-fmtl", "edges and projections"), ("fedproto", "prototypes"), ("fedavg", "")):
        notes = [n for n in fl.plan("digits-tasks", method=method).notes if n.startswith("bytes leave out")]
        assert notes == [f"bytes leave out {left_out}: their sizes are known in a run only (bytes.jsonl)"] * bool(
            left_out
        )


def test_peers_on_a_ring_equal_a_server_with_a_ring(quick: Quick) -> None:
    server = trained_models(quick(*RING, "training.rounds=4").folder)
    full = "method={name: sheaf-fmtl, gamma: 0.001, lam: 5, eta: 0.1}"
    peers = quick(full, RING[1], "training.rounds=4", "peers={graph: ring, weights: {kind: uniform}}")
    for name, model in trained_models(peers.folder).items():
        assert all(torch.equal(tensor, server[name][key]) for key, tensor in model.items()), name


def test_maps_that_are_too_large_are_refused_in_the_first_round(quick: Quick) -> None:
    with pytest.raises(RecipeError, match=r"1 maps of \d+ x \d+ numbers need .* MB at a client, but megabytes"):
        quick("method={name: sheaf-fmtl, gamma: 0.5, megabytes: 1}")


def test_a_client_cannot_send_for_links_that_are_not_its_own_nor_what_does_not_fit() -> None:
    stage, ctx = SheafLinks("full"), Ctx(seed=3)
    nobody: dict[str, Any] = {"edges": [torch.zeros(0, 1).long()] * 3, "projections": [torch.zeros(0, 0)] * 3}
    rows: dict[str, Any] = {"X": torch.zeros(3, 0), "rows": ["a", "b", "c"]}
    _, state = stage(Updates.of(**rows, **nobody), stage.init(Updates.of(**rows).layout), ctx)
    links = state["links"]
    assert links["a"]["b"] != links["b"]["a"]
    first = stage.broadcast(state, ["a", "d"], {})
    assert first["d"] == {}
    assert first["a"]["edges"].tolist() == [[links["a"]["b"]], [links["a"]["c"]]]
    assert first["a"]["projections"].shape == (2, 0)
    numbers = ([links["a"]["b"], links["a"]["c"]], [links["b"]["a"], links["c"]["a"], 5], [links["c"]["a"]])
    sent = {
        "edges": [torch.tensor(each)[:, None] for each in numbers],
        "projections": [torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[5.0], [7], [9]]), torch.ones(1, 9)],
    }
    _, state = stage(Updates.of(**rows, **sent), state, ctx)
    told = stage.broadcast(state, ["a", "b", "c"], {})
    assert told["a"]["edges"].tolist() == first["a"]["edges"].tolist()
    expected = {"a": [[5, torch.nan], [1, 1]], "b": [[1], [torch.nan]], "c": [[3, 4], [torch.nan, torch.nan]]}
    for client, projections in expected.items():
        torch.testing.assert_close(told[client]["projections"], torch.tensor(projections).float(), equal_nan=True)
    sent["projections"][1] = torch.tensor([[torch.nan], [7], [9]])
    _, state = stage(Updates.of(**rows, **sent), state, ctx)
    came = stage.broadcast(state, ["a"], {})["a"]["projections"].isfinite().sum(1)
    assert came.tolist() == [0, 2], "nan counts as nothing"
