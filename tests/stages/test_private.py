"""Clipping and noise: no client moves the sum by more than the clip, and the noise is as large as it says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.private import SIZES, Bounded, PrivateClusters, PrivateMean, RowNoise

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
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")
    stage, nobody, a, b = PrivateMean(1.0, 1.0), rows([0.0, 0.0, 0.0]), bytes(32), bytes(31) + b"b"
    drawn = [mean(stage, nobody, seed=seed, secret=secret) for seed, secret in ((0, None), (0, a), (1, a), (0, b))]
    assert torch.equal(drawn[1], drawn[2]), "the public seed says nothing of it"
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], stage(nobody, {}, Ctx(round=2, population=5))[0].X[0])


def test_a_block_is_divided_by_the_clients_that_may_have_it() -> None:
    layout = Layout((Block("e", (1,), "float32"), Block("h", (1,), "float32", role="head", task="t")))
    present = torch.tensor([[True, True], [True, False]])
    updates = Updates.of([[1.0, 1.0], [1.0, 0.0]], layout=layout, present=present)
    torch.testing.assert_close(mean(QUIET, updates, held={"t": 2}), torch.tensor([0.4, 0.5]))


@pytest.mark.parametrize("secret", [None, bytes(32)], ids=["seed", "secret"])
def test_clients_add_their_own_noise_to_what_they_have(secret: bytes | None) -> None:
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")
    layout = Layout((Block("a", (50_000,), "float32"), Block("b", (3,), "float32")))
    present = torch.tensor([[True, False], [True, False]])
    zeros = Updates.of(torch.zeros(2, layout.d), layout=layout, present=present)
    out = RowNoise(clip=2.0, noise=3.0)(zeros, {}, Ctx(1, secret=secret))[0].X
    assert torch.equal(out[:, -3:], torch.zeros(2, 3))
    assert float(out[0, :-3].std()) == pytest.approx(6.0, rel=0.03)
    assert not torch.equal(out[0], out[1])


def clusters(chosen: list[int], X: np.ndarray[Any, Any], seed: int, z: float, least: int) -> list[torch.Tensor]:
    """Return how far three models move by rows that start from them, the third round of a federation of as many
    clients.
    """
    models = [torch.full((X.shape[1],), float(j)).double() for j in range(3)]
    stage = PrivateClusters(3, "noise", 1.0, PrivateMean(clip=2.0, noise=z), least)
    base = torch.stack([models[j] for j in chosen]) if chosen else torch.zeros(0, X.shape[1])
    updates = Updates.of(torch.tensor(X), base=base, cluster=[float(j) for j in chosen])
    state = {"models": models, "members": {}, "stages": [{}, {}, {}]}
    _, new = stage(updates, state, Ctx(3, seed, population=len(X)))
    return [after - before for after, before in zip(new["models"], models, strict=True)]


def test_a_cluster_that_nobody_is_in_moves_by_noise() -> None:
    """In about a third of the seeds nobody is lent to it. If it stayed, everybody would know that it is empty."""
    for seed in range(10):
        assert all(bool(moved.any()) for moved in clusters([0, 0, 0], np.ones((3, 4)), seed, z=0.01, least=1)), seed


@pytest.mark.parametrize("seed", range(4))
def test_clusters_move_by_private_means_over_sizes_with_noise(seed: int) -> None:
    """Against numpy, with the same draws; in some of the seeds clients are lent, and in some clusters nobody is."""
    rng, ctx, z, least = np.random.default_rng(seed), Ctx(3, seed), 1.0, 5
    chosen = [0] * 20 if seed == 3 else [0] * 19 + [1]
    X = rng.normal(size=(20, 40))
    sizes = (
        np.bincount(chosen, minlength=3)
        + z / math.sqrt(0.1) * torch.randn(3, generator=ctx.rng("sizes"), dtype=torch.float64).numpy()
    )
    sizes = np.maximum(sizes, 0)
    short, spare = np.maximum(least - sizes, 0), np.maximum(sizes - least, 0)
    moving = min(short.sum(), spare.sum())
    counted, gets = [], moving * short / max(short.sum(), 1e-9)
    for i, j in enumerate(chosen):
        lent, where = torch.rand(2, generator=ctx.rng("lent", f"c{i:02}"), dtype=torch.float64).tolist()
        leaves = lent * sizes[j] < moving * spare[j] / max(spare.sum(), 1e-9)
        to = np.searchsorted(gets.cumsum(), where * gets.sum())
        counted.append(int(to) if leaves else j)
    for j, moved in enumerate(clusters(chosen, X, seed, z, least)):
        rows = X[np.array(counted) == j]
        rows = rows * np.minimum(1, 2.0 / np.linalg.norm(rows, axis=1, keepdims=True))
        after = sizes[j] + gets[j] - moving * spare[j] / max(spare.sum(), 1e-9)
        g = torch.randn(40, generator=ctx.rng("noise", j)).double().numpy()
        np.testing.assert_allclose(moved.numpy(), (rows.sum(0) + z / math.sqrt(0.9) * 2.0 * g) / max(after, least))


def test_sizes_and_sums_of_clusters_cost_what_one_sum_does() -> None:
    dp = pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    rdp = pytest.importorskip("dp_accounting.rdp")
    z, rounds = 3.0, 10
    both = dp.ComposedDpEvent([dp.GaussianDpEvent(z / math.sqrt(SIZES)), dp.GaussianDpEvent(z / math.sqrt(1 - SIZES))])
    one = rdp.RdpAccountant().compose(dp.GaussianDpEvent(z), rounds).get_epsilon(1e-5)
    assert rdp.RdpAccountant().compose(both, rounds).get_epsilon(1e-5) == pytest.approx(one)


def test_one_client_more_moves_no_other_one_and_one_sum_by_the_clip() -> None:
    """Without noise, and with the same sizes, which the least size hides here: all sums are divided by it."""
    X = np.concatenate([np.eye(40)[:3], 1e3 * np.ones((1, 40))])
    few, more = (clusters([0, 1, 1, 0][:k], X[:k], 0, 1e-30, 20) for k in (3, 4))
    moved = [20 * (b - a) for a, b in zip(few, more, strict=True)]
    assert [float(m.norm()) for m in moved] == pytest.approx([2.0, 0.0, 0.0], abs=1e-6)
