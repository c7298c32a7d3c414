"""Draws from a secret: normal numbers as they should be, the same again from the secret, and from nothing else."""

from __future__ import annotations

import math
import sys
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedloom.core.context import Ctx, derive_seed, draws, generator, new_secret
from fedloom.core.draws import BLOCK, SecretDraws
from fedloom.errors import UserError

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def cipher() -> None:
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")


def test_a_public_seed_gives_what_torchs_generator_gives() -> None:
    """Runs in simulations stay what they were."""
    ctx = Ctx(round=3, seed=7)
    for wanted in (torch.float32, torch.float64):
        expected = torch.randn(100, generator=generator(7, 3, "noise", 1), dtype=wanted)
        assert torch.equal(ctx.hidden("noise", 1).normal(100, wanted), expected)
    expected = torch.rand(2, generator=generator(7, 3, "lent", "c1"), dtype=torch.float64)
    assert torch.equal(ctx.hidden("lent", "c1").uniform(2), expected)
    assert torch.equal(draws(7, "cohort", 3).permutation(9), torch.randperm(9, generator=generator(7, "cohort", 3)))


def test_secrets_whose_torch_seeds_collide_give_different_noise() -> None:
    """These two are the first of 400,000 secrets whose seeds agree in the 32 bits that torch uses."""
    one, other = (number.to_bytes(32, "big") for number in (28_685, 33_680))
    old = [torch.Generator().manual_seed(derive_seed(each.hex(), 1, "noise")) for each in (one, other)]  # type: ignore[arg-type]
    assert torch.equal(*(torch.randn(1000, generator=each) for each in old))
    new = [Ctx(1, secret=each).hidden("noise").normal(1000).double() for each in (one, other)]
    assert abs(float(torch.corrcoef(torch.stack(new))[0, 1])) < 4 / math.sqrt(1000)


@pytest.mark.parametrize("n", [1, 4, 5])
def test_normal_numbers_are_box_and_mullers_of_the_uniform_ones(n: int) -> None:
    half = (n + 1) // 2
    u, v = SecretDraws(SECRET, "test").uniform(2 * half).split(half)
    radius, angle = (-2 * (1 - u).log()).sqrt(), 2 * math.pi * v
    expected = torch.cat([radius * angle.cos(), radius * angle.sin()])[:n]
    torch.testing.assert_close(SecretDraws(SECRET, "test").normal(n, torch.float64), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 7, BLOCK, 3 * BLOCK + 1])
def test_normal_numbers(n: int, dtype: torch.dtype) -> None:
    """Mean, standard deviation, skewness, kurtosis and distribution within four standard errors."""
    x = SecretDraws(SECRET, "test", n).normal(n, dtype)
    assert (x.dtype, len(x), bool(x.isfinite().all())) == (dtype, n, True)
    if n < BLOCK:
        return
    x = x.double()
    assert abs(float(x.mean())) < 4 / math.sqrt(n)
    assert float(x.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * n))
    assert abs(float((x**3).mean())) < 4 * math.sqrt(15 / n)
    assert float((x**4).mean()) == pytest.approx(3, abs=4 * math.sqrt(96 / n))
    assert abs(float((x[:-1] * x[1:]).mean())) < 4 / math.sqrt(n)
    half = n // 2
    assert abs(float((x[:half] ** 2 * x[half : 2 * half] ** 2).mean()) - 1) < 4 * math.sqrt(8 / half)
    normal, below = NormalDist(), (np.arange(n) + 0.5) / n
    expected = np.array([normal.cdf(each) for each in x.sort().values[::101].tolist()])
    assert np.abs(expected - below[::101]).max() < 2 / math.sqrt(n)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_smallest_and_the_largest_draw_are_finite(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecretDraws, "uniform", lambda self, n: torch.full((n,), u, dtype=torch.float64))
    x = SecretDraws(SECRET).normal(4)
    assert bool(x.isfinite().all())
    assert float(x.abs().max()) == pytest.approx(math.sqrt(-2 * math.log1p(-u)))


def test_uniform_numbers_and_permutations() -> None:
    source = SecretDraws(SECRET, "uniform")
    u = source.uniform(100_000)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    counts = torch.histc(u, 10, 0, 1)
    assert float((counts - 10_000).square().sum() / 10_000) < 34  # chi-square with 9 degrees, one in 10^4
    orders = [tuple(source.permutation(3).tolist()) for _ in range(600)]
    assert {tuple(sorted(each)) for each in orders} == {(0, 1, 2)}
    assert len(set(orders)) == 6
    assert min(orders.count(each) for each in set(orders)) > 60


def test_the_secret_gives_the_same_again_and_goes_on_where_it_was() -> None:
    once, again = (SecretDraws(SECRET, 4, "noise") for _ in range(2))
    assert torch.equal(torch.cat([once.uniform(3), once.uniform(4)]), again.uniform(7))
    assert torch.equal(*(Ctx(4, secret=SECRET).hidden("noise").normal(50) for _ in range(2)))
    # computed from the first block of AES without counter mode: a change here would be another stream
    assert SecretDraws(SECRET, 1, "noise").uniform(2).tolist() == [0.3302216652752936, 0.6595851403508239]


def test_purposes_rounds_and_secrets_are_independent() -> None:
    first = Ctx(1, secret=SECRET)
    others = [
        first.hidden("row noise", "a", None),
        first.hidden("row noise", "a", "t"),
        first.hidden("row noise", "at", None),
        first.hidden("row noise", "a\x1ft"),
        Ctx(2, secret=SECRET).hidden("row noise", "a", None),
        Ctx(1, secret=new_secret()).hidden("row noise", "a", None),
        draws(SECRET, "row noise", 1, "a", None),
    ]
    x = torch.stack([each.normal(10_000).double() for each in others])
    apart = torch.corrcoef(x) - torch.eye(len(others))
    assert float(apart.abs().max()) < 5 / math.sqrt(10_000)


def test_a_secret_is_not_shown_and_a_short_one_is_refused() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()
    ctx = Ctx(1, secret=SECRET)
    assert repr(SECRET) not in repr(ctx)
    assert "secret" not in repr(ctx)
    with pytest.raises(ValueError, match="secret: 3 bytes found, expected 32"):
        Ctx(1, secret=b"abc").hidden("noise")
    with pytest.raises(ValueError, match="secret: 0 bytes found"):
        Ctx(1, secret=b"").hidden("noise")


def test_without_the_package_there_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(UserError, match=r"'cryptography', which is not installed: pip install 'fedloom\[privacy\]'"):
        Ctx(1, secret=SECRET).hidden("noise")
