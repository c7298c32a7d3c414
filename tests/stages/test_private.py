"""Clipping and noise: no client moves the sum by more than the clip, and the noise is as large as it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.stages.private import Bounded, PrivateMean, RowNoise

QUIET = PrivateMean(clip=2.0, noise=1e-30)


def mean(stage: PrivateMean, updates: Updates, **ctx: object) -> torch.Tensor:
    return stage(updates, {}, Ctx(round=1, population=5, **ctx))[0].X[0]  # type: ignore[arg-type]


def rows(*X: list[float], **more: object) -> Updates:
    return Updates.of(torch.tensor(X), **more)


def test_short_rows_stay_and_long_ones_become_as_long_as_the_clip() -> None:
    out, _ = Bounded(2.0).on([[1.0, 0.0], [3e30, 4e30]])
    assert torch.equal(out[0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(out[1], torch.tensor([1.2, 1.6]))


@pytest.mark.parametrize("weight", [1.0, 7.0, 1e6])
def test_one_client_more_moves_the_sum_by_at_most_the_clip_whatever_its_weight(weight: float) -> None:
    few = rows([1.0, 0, 0], [0, 1.0, 0])
    more = rows([1.0, 0, 0], [0, 1.0, 0], [30.0, -40.0, 5.0], weight=[1.0, 1.0, weight])
    moved = 5 * (mean(QUIET, more) - mean(QUIET, few))
    assert float(moved.norm()) == pytest.approx(2.0, rel=1e-6)


def test_the_divisor_does_not_tell_who_came() -> None:
    alone, share = rows([1.0, 0, 0]), replace(QUIET, share=0.5)
    torch.testing.assert_close(mean(QUIET, alone), torch.tensor([0.2, 0, 0]))
    torch.testing.assert_close(mean(share, alone), torch.tensor([0.4, 0, 0]))


def test_noise_is_there_without_any_row_and_of_the_stated_size() -> None:
    layout = Layout((Block("x", (100_000,), "float32"),))
    nobody = Updates(layout, (), torch.zeros(0, layout.d), torch.zeros(0), torch.zeros(0))
    out = mean(PrivateMean(clip=2.0, noise=3.0, share=0.5), nobody)
    assert float(out.std()) == pytest.approx(2.0 * 3.0 / (0.5 * 5), rel=0.02)


def test_noise_differs_by_round_and_comes_from_the_secret_where_there_is_one() -> None:
    stage, nobody = PrivateMean(1.0, 1.0), rows([0.0, 0.0, 0.0])
    drawn = [
        mean(stage, nobody, seed=seed, secret=secret) for seed, secret in ((0, None), (0, "a"), (1, "a"), (0, "b"))
    ]
    assert torch.equal(drawn[1], drawn[2]), "the public seed says nothing of it"
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], stage(nobody, {}, Ctx(round=2, population=5))[0].X[0])


def test_a_block_is_divided_by_the_clients_that_may_have_it() -> None:
    layout = Layout((Block("e", (1,), "float32"), Block("h", (1,), "float32", role="head", task="t")))
    present = torch.tensor([[True, True], [True, False]])
    updates = Updates.of([[1.0, 1.0], [1.0, 0.0]], layout=layout, present=present)
    torch.testing.assert_close(mean(QUIET, updates, held={"t": 2}), torch.tensor([0.4, 0.5]))


def test_clients_add_their_own_noise_to_what_they_have() -> None:
    layout = Layout((Block("a", (50_000,), "float32"), Block("b", (3,), "float32")))
    present = torch.tensor([[True, False], [True, False]])
    zeros = Updates.of(torch.zeros(2, layout.d), layout=layout, present=present)
    out = RowNoise(clip=2.0, noise=3.0)(zeros, {}, Ctx(1))[0].X
    assert torch.equal(out[:, -3:], torch.zeros(2, 3))
    assert float(out[0, :-3].std()) == pytest.approx(6.0, rel=0.03)
    assert not torch.equal(out[0], out[1])
