"""Pinned values and edge cases of the means."""

from __future__ import annotations

import pytest
import torch

from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.stages import Mean, SupportMean

D = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)
TWO = Layout((Block("a", (2,)), Block("b", (2,))))


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.flatten(), torch.tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-6)


def test_plain_mean() -> None:
    close(Mean().on(D)[0], [0.666667, 0.666667, -1, 0.666667])


def test_weights_are_normalised() -> None:
    close(Mean().on(D, n=[5, 3, 2])[0], [1.1, 0.3, -0.5, 1.0])
    close(Mean().on(D, n=[1, 1, 1], weight=[0.5, 0.3, 0.2])[0], [1.1, 0.3, -0.5, 1.0])


def test_weights_that_sum_to_zero_give_no_update() -> None:
    close(Mean().on(D, n=[0, 0, 0])[0], [0, 0, 0, 0])


def test_coef_counts_per_coordinate_and_is_zero_safe() -> None:
    coef = [[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1]]
    close(Mean().on(D, n=[1, 1, 2], coef=coef)[0], [0.5, (2 + 2 * 1) / 3, 0, 0])


def test_coef_and_presence_of_three_blocks() -> None:
    layout = Layout((Block("a", (1,)), Block("b", (2,)), Block("c", (1,))))
    present = [[True, False, True], [True, True, False], [False, False, True]]
    close(Mean().on(D, layout=layout, present=present)[0], [0.5, 2, 1, 1])
    coef = torch.tensor([[0.5], [1], [1]]).expand(3, 4)
    close(Mean().on(D, layout=layout, present=present, coef=coef)[0], [(1.5 - 2) / 1.5, 2, 1, 1 / 1.5])
    close(SupportMean().on(D, coef=coef)[0], [(1.5 - 2 + 1) / 2.5, (-0.5 + 2 + 1) / 2.5, (1 - 4) / 2, 1 / 0.5])


def test_support_is_what_is_not_zero() -> None:
    close(SupportMean().on(D)[0], [0.666667, 0.666667, -1.5, 2])
    close(SupportMean().on(D, n=[1, 1, 3])[0], [(3 - 2 + 3) / 5, (-1 + 2 + 3) / 5, (1 - 12) / 4, 2])


def test_support_of_blocks_goes_before_zeros() -> None:
    support = torch.tensor([[True, True], [True, False], [False, False]])
    close(SupportMean().on(D, layout=TWO, support=support)[0], [0.5, 0.5, 0, 2])


def test_support_equals_plain_mean_where_all_trained_everything() -> None:
    X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(SupportMean().on(X)[0], Mean().on(X)[0])


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_chunks_do_not_change_the_result(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.core import mean

    whole = Mean().on(D, coef=D.abs())[0]
    monkeypatch.setattr(mean, "_CHUNK", chunk)
    assert torch.equal(Mean().on(D, coef=D.abs())[0], whole)


def test_the_result_is_for_everyone() -> None:
    out, _ = Mean()(Updates.of(D, n=[1, 2, 3]), {}, None)  # type: ignore[arg-type]
    assert out.rows == (("*", None),)
    assert out.n.tolist() == [6]
