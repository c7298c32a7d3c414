"""Every stage goes through the same checks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fedloom import stages
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.federation.runs import checkpoint
from fedloom.stages import Stage
from stages_support import BESIDE, STAGES
from tests_support import same

# A softmax over inner products of updates depends on their size.
NOT_HOMOGENEOUS = {"hyper-cross-attention", "fedhca2"}
LAYOUT = Layout(
    (
        Block("encoder.w", (4, 3), role="encoder"),
        Block("heads.a.w", (5,), role="head", task="a"),
        Block("heads.b.w", (3,), role="head", task="b"),
    )
)
ROWS = ["c0", "c1", "c2", "c3"]

every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


def matrix(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, LAYOUT.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def beside(order: list[int]) -> dict[str, object]:
    control = torch.randn(len(ROWS) + 1, LAYOUT.d, generator=torch.Generator().manual_seed(2))
    extra = {name: [(*values, values[0])[i] for i in order] for name, values in BESIDE.items()}
    return {**extra, "auxiliary": {"control": control[order]}}


def apply(stage: Stage, X: Tensor, order: list[int] | None = None, round_: int = 1) -> Updates:
    order = order or list(range(len(X)))
    updates = Updates.of(X[order], [1.0 + i for i in order], LAYOUT, [ROWS[i] for i in order], **beside(order))
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(round=round_, seed=3))
    return out


@every_stage
def test_the_order_of_clients_does_not_matter(stage: Stage) -> None:
    a, b = apply(stage, matrix()), apply(stage, matrix(), [2, 0, 3, 1])
    assert a.rows == b.rows
    assert torch.equal(a.X, b.X)


@every_stage
def test_inputs_are_not_changed(stage: Stage) -> None:
    state = stage.init(LAYOUT)
    for round_ in (1, 2, 3):
        X = matrix(1.0 / round_).roll(round_, 0)
        updates = Updates.of(X.clone(), None, LAYOUT, ROWS, **beside([0, 1, 2, 3]))
        before = copy.deepcopy(state)
        _, after = stage(updates, state, Ctx(round_))
        assert torch.equal(updates.X, X)
        assert same(state, before)
        state = after


@every_stage
def test_state_survives_a_checkpoint(stage: Stage, tmp_path: object) -> None:
    updates = Updates.of(matrix(), None, LAYOUT, ROWS, **beside([0, 1, 2, 3]))
    state = stage.init(LAYOUT)
    for round_ in (1, 2):
        _, state = stage(updates, state, Ctx(round_))
    checkpoint.save(tmp_path, "s", state, round=2)  # type: ignore[arg-type]
    again, labels, problems = checkpoint.load(tmp_path, "s", lambda head: head["round"])  # type: ignore[arg-type]
    assert same(state, again)
    assert labels == {"round": 2}
    assert problems == []


@pytest.mark.parametrize("name", [name for name in STAGES if name not in NOT_HOMOGENEOUS])
def test_updates_scale_through(name: str) -> None:
    stage = STAGES[name]
    for scale in (1e-30, 1e-3, 1e15):
        expected = scale * apply(stage, matrix()).X
        torch.testing.assert_close(apply(stage, matrix(scale)).X, expected, rtol=1e-9, atol=0)


@every_stage
def test_repr_rebuilds_the_stage(stage: Stage) -> None:
    names = {name: getattr(stages, name) for name in stages.__all__ if name in repr(stage)}
    assert eval(repr(stage), names) == stage


@every_stage
def test_a_row_that_is_not_finite_is_left_out(stage: Stage) -> None:
    X = matrix()
    bad = torch.cat([X, torch.full((1, LAYOUT.d), float("nan"))])
    extras = {"layout": LAYOUT, "seed": 3}
    clean, _ = stage.on(X, rows=ROWS, **beside([0, 1, 2, 3]), **extras)
    mended, _ = stage.on(bad, rows=[*ROWS, "c9"], **beside([0, 1, 2, 3, 4]), **extras)
    assert torch.equal(clean, mended)
