"""FedHEAL's masks and weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom import Method
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.feddea import aggregation as module
from fedloom.methods.feddea.aggregation import _needed
from fedloom.stages import Heal, Identity, Mean, Stage, TopMagnitude
from tests_support import same

FIRST = [[1.0, -1, 2, 0], [-1, 1, 2, 0]]
SECOND = [[1.0, 1, -2, 0], [-2, 1, 1, 0]]


def rounds(stage: Stage, *matrices: Any, rows: list[list[str]] | None = None, population: int | None = None) -> Any:
    """The outcomes of one round after another, and the last state."""
    outs, state = [], None
    for t, X in enumerate(matrices):
        updates = Updates.of(X, rows=rows[t] if rows else None)
        state = stage.init(updates.layout) if state is None else state
        out, state = stage(updates, state, Ctx(round=t + 1, population=population))
        outs.append(out)
    return outs, state


def share(weight: Tensor) -> list[float]:
    return (weight / weight.sum()).tolist()


def test_golden_values() -> None:
    (a, b), _ = rounds(Heal(), FIRST, SECOND)
    assert a.coef.all()
    assert a.coef.dtype == torch.bool
    assert share(a.weight) == pytest.approx([0.5, 0.5])
    assert b.coef.tolist() == [[True, False, False, True], [True] * 4]
    assert share(b.weight) == pytest.approx([0.458804, 0.541196], abs=1e-6)
    assert torch.equal(b.X, torch.tensor(SECOND))
    (a, b), _ = rounds(Heal() >> Mean(), FIRST, SECOND)
    assert a.X.tolist() == [[0, 0, 2, 0]]
    assert b.X[0].tolist() == pytest.approx([-0.623589, 1, 1, 0], abs=1e-6)


def test_weights_add_up_from_one_over_the_population() -> None:
    (a, _), state = rounds(Heal(), FIRST, SECOND, population=10)
    assert a.weight.tolist() == pytest.approx([0.1 + 0.4 * 0.5] * 2)
    distance = [1, 6**0.5]
    change = [0.6 * 0.2 + 0.4 * x / sum(distance) for x in distance]
    assert [m["weight"] for m in state.values()] == pytest.approx([0.3 + x for x in change])
    assert [m["change"] for m in state.values()] == pytest.approx(change)


def test_a_share_of_exactly_tau_is_masked() -> None:
    ups = [[[1.0]]] * 3 + [[[-1.0]]] * 7
    for last, consistent in ([[1.0]], False), ([[-1.0]], True):
        assert rounds(Heal(tau=0.3), *ups, last)[0][-1].coef.tolist() == [[consistent]]
    assert rounds(Heal(tau=0.29), *ups, [[1.0]])[0][-1].coef.tolist() == [[True]]


@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.1, 0.29, 0.3, 0.5, 0.7, 0.99])
def test_the_count_that_a_share_needs(tau: float) -> None:
    for n in range(1, 201):
        count = _needed(n, tau)
        assert count / n > tau
        assert count == 0 or not (count - 1) / n > tau
    assert _needed(0, tau) == 0


def test_zeros_of_the_paper_count_with_negative_updates() -> None:
    (_, b, c), _ = rounds(Heal(), [[-1.0, 0, 1]], [[0.0, 0, 0]], [[1.0, -1, 1]])
    assert b.coef.tolist() == [[True, True, False]]
    assert c.coef.tolist() == [[False, True, True]]


def test_zeros_as_no_evidence() -> None:
    (a, b, c), state = rounds(Heal(zeros="none"), [[-1.0, 0, 1]], [[0.0, 0, 5]], [[-1.0, -1, -1]])
    assert a.coef.tolist() == [[True, False, True]]
    assert b.coef.tolist() == [[False, False, True]]
    # once down and never up; never anything; twice up
    assert c.coef.tolist() == [[True, True, False]]
    memory = state["c0"]
    assert memory["up"].tolist() == [0, 0, 2]
    assert memory["down"].tolist() == [2, 1, 1]


def test_the_decoder_of_another_task_dilutes_only_in_paper_mode() -> None:
    X = [[[2.0, 3.0], [4.0, 0.0]]] * 3
    diluted, whole = (rounds(Heal(zeros=z) >> Mean(), *X)[0][-1].X[0, 1].item() for z in ("paper", "none"))
    assert 0 < diluted < 3
    assert whole == 3


def test_a_late_joiner_starts_a_history_of_its_own() -> None:
    rows = [["a"], ["a"], ["a", "b"], ["a", "b"]]
    up, down = [1.0], [-1.0]
    (_, _, c, d), state = rounds(Heal(tau=0.5), [up], [up], [down, down], [up, down], rows=rows, population=2)
    assert c.coef.tolist() == [[False], [True]]
    assert d.coef.tolist() == [[True], [True]]
    assert state["a"]["rounds"] == 4
    assert state["b"]["rounds"] == 2
    assert c.weight[1] == pytest.approx(1 / 2 + 0.4 * 1)  # a's row is masked, so all of the distance is b's


def test_an_absent_client_is_unchanged() -> None:
    rows = [["a", "b"], ["a"]]
    _, before = rounds(Heal(), FIRST, rows=rows)
    _, after = rounds(Heal(), FIRST, SECOND[:1], rows=rows)
    assert same(before["b"], after["b"])
    assert not same(before["a"], after["a"])


@pytest.mark.parametrize("zeros", ["paper", "none"])
def test_all_masked_gives_zero_and_keeps_the_weights(zeros: Any) -> None:
    up, down = [[1.0, 2.0], [1.0, 2.0]], [[-1.0, -2.0], [-1.0, -2.0]]
    stage = Heal(zeros=zeros) >> Mean()
    (_, b), after = rounds(stage, up, down)
    _, before = rounds(stage, up)
    assert b.X.tolist() == [[0, 0]]
    for client, memory in after["0"].items():
        assert memory["rounds"] == 2
        assert memory["weight"] == before["0"][client]["weight"]


@pytest.mark.parametrize("zeros", ["paper", "none"])
def test_zero_rows_change_no_state(zeros: Any) -> None:
    _, before = rounds(Heal(zeros=zeros), FIRST)
    (_, b), after = rounds(Heal(zeros=zeros), FIRST, [[0.0] * 4] * 2)
    assert same(before, after)
    assert torch.isfinite(b.weight).all()


def test_nothing_masked_and_weights_kept_is_the_uniform_mean() -> None:
    X = [torch.randn(3, 7, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    outs, _ = rounds(Heal(tau=-1, beta=0) >> Mean(), *X)
    for out, x in zip(outs, X, strict=True):
        torch.testing.assert_close(out.X, x.mean(0, keepdim=True))


def test_absent_blocks_have_no_vote() -> None:
    layout = Layout((Block("a", (1,)), Block("b", (1,), role="head", task="b")))
    present = [[True, True], [True, False]]
    for zeros in ("paper", "none"):
        state: Any = {}
        for x in ([[1.0, 5.0], [3.0, 0.0]], [[1.0, 5.0], [3.0, 0.0]]):
            updates = Updates.of(x, layout=layout, present=present)
            out, state = (Heal(zeros=zeros) >> Mean())(updates, state or (Heal() >> Mean()).init(layout), Ctx(1))
        assert out.X[0, 1] == 5
        assert state["0"]["c1"]["up"].tolist() == [2, 0]


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    X = [torch.randn(3, 50, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for zeros in ("paper", "none"):
        whole, state = rounds(Heal(zeros=zeros), *X)
        monkeypatch.setattr(module, "_COLUMNS", 7)
        pieces, again = rounds(Heal(zeros=zeros), *X)
        monkeypatch.undo()
        assert torch.equal(whole[-1].coef, pieces[-1].coef)
        torch.testing.assert_close(whole[-1].weight, pieces[-1].weight)
        assert torch.equal(state["c0"]["up"], again["c0"]["up"])


def test_counts_grow_beyond_16_bits() -> None:
    _, state = rounds(Heal(), [[1.0]])
    state["c0"] |= {"rounds": 32767, "up": torch.tensor([32767], dtype=torch.int16)}
    before = copy.deepcopy(state)
    out, after = Heal()(Updates.of([[1.0]]), state, Ctx(1))
    assert out.coef is not None
    assert out.coef.all()
    assert after["c0"]["up"].tolist() == [32768]
    assert same(state, before)


def test_weights_can_be_multiplied() -> None:
    w, p = [0.3, 0.9], [0.25, 0.75]
    for weights in ("replace", "multiply"):
        stage = Heal(weights=weights)
        state = {
            k: {"rounds": 1, "weight": x, "change": 0.0, "up": torch.zeros(1)} for k, x in zip("ab", w, strict=True)
        }
        out, after = stage(Updates.of([[1.0], [1.0]], rows=["a", "b"], weight=p), state, Ctx(1))
        assert [m["weight"] for m in after.values()] == w  # all masked
        assert out.weight.tolist() == pytest.approx(
            [a * (b if weights == "multiply" else 1) for a, b in zip(w, p, strict=True)]
        )
    assert "weight" in Heal(weights="multiply").traits.reads
    assert "weight" not in Heal().traits.reads


def test_history_of_raw_or_of_transformed_rows() -> None:
    """FedDEA after heal: raw rows vote, transformed rows are averaged; before heal: what was left out votes as zero."""
    X = [[[2.0, 1.0]], [[2.0, 1.0]], [[1.0, 2.0]]]
    dea = TopMagnitude(0.5)
    before = Method().plus(dea, at="server").plus(Heal(), at="server").stage
    after = Method().plus(Heal(), at="server").plus(dea, at="server").stage
    assert rounds(after, *X)[0][-1].X.tolist() == [[0, 4]]
    assert rounds(before, *X)[0][-1].X.tolist() == [[0, 0]]
    none = Method().plus(dea, at="server").plus(Heal(zeros="none"), at="server").stage
    assert rounds(none, *X)[0][-1].X.tolist() == [[0, 4]]


def test_methods_without_a_weighted_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="'coef', but Identity"):
        Method(stage=Identity()).plus(Heal(), at="server")
    with pytest.raises(ValueError, match="everything is private"):
        Method(stage=Identity(), private="*").plus(Heal(), at="server")
