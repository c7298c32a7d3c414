"""Sketches: linear, the same everywhere, right on average, and as wrong as the formula says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.methods.peers import similarity as module
from fedloom.peers import Sketch

every_kind = pytest.mark.parametrize("kind", ["count", "rademacher", "gaussian"])


def vectors(d: int = 300) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(d, generator=g)
    return x, x + 0.5 * torch.randn(d, generator=g)


@every_kind
def test_linear(kind: str) -> None:
    x, y = vectors()
    S = Sketch(64, 5, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(S(2 * x - y), 2 * S(x) - S(y), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(S(torch.stack([x, y])), torch.stack([S(x), S(y)]))
    assert S(x).dtype == torch.float32
    assert not S(torch.zeros(300)).any()
    assert S(torch.zeros(0, 300)).shape == (0, 64)


@every_kind
def test_the_same_on_all_peers_and_another_for_another_seed(kind: str) -> None:
    x, _ = vectors()
    assert torch.equal(Sketch(64, 5, kind)(x), Sketch(64, 5, kind)(x.clone()))  # type: ignore[arg-type]
    assert not torch.equal(Sketch(64, 5, kind)(x), Sketch(64, 6, kind)(x))  # type: ignore[arg-type]


def test_pinned() -> None:
    # Peers of different versions must agree.
    assert Sketch(4, 1)(torch.arange(1.0, 9)).tolist() == [4, -8, 5, -1]
    assert (2 * Sketch(4, 1, "rademacher")(torch.arange(1.0, 9))).tolist() == [4, 6, 24, 6]


def variance_of(x: Tensor, y: Tensor, m: int, kind: str) -> float:
    """The variance of <Sx, Sy> over seeds, as `Sketch.error` states it."""
    x, y = x.double(), y.double()
    same = 0.0 if kind == "gaussian" else 2 * float((x.square() * y.square()).sum())
    return (float(x.square().sum() * y.square().sum() + (x @ y).square()) - same) / m


@every_kind
def test_right_on_average_with_the_variance_stated(kind: str) -> None:
    x, y = vectors(40)
    truth = float(x.double() @ y.double())
    found = np.array(
        [float(a @ b) for seed in range(3000) for a, b in [Sketch(16, seed, kind)(torch.stack([x, y]))]]  # type: ignore[arg-type]
    )
    variance = variance_of(x, y, 16, kind)
    assert abs(found.mean() - truth) < 4 * math.sqrt(variance / 3000)
    assert found.var() / variance == pytest.approx(1, abs=0.2)
    size = float(x.norm() * y.norm())
    assert variance <= 2 * size**2 / 16
    for delta in (0.3, 0.1):
        assert (abs(found - truth) >= Sketch(16).error(delta) * size).mean() <= delta


def test_one_entry_each_is_exact() -> None:
    # a random sign squared is 1
    one = torch.tensor([0.0, 3.0])
    assert variance_of(one, one, 4, "count") == 0
    assert all(float(Sketch(4, seed)(one).square().sum()) == 9 for seed in range(20))
    assert Sketch(1000).error(0.05) == pytest.approx(0.2)


@every_kind
def test_chunks_and_types(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = vectors(1000)
    S = Sketch(8, 2, kind)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_CHUNK", 128)
    monkeypatch.setattr(module, "_MAP_CHUNK", 8 * 128)
    small = S(x)
    # Coordinates that are zero change nothing, in whichever chunk they are.
    head = x.clone()
    head[500:] = 0
    tail = x - head
    torch.testing.assert_close(S(head) + S(tail), small, rtol=1e-4, atol=1e-4)
    assert torch.equal(S(x.double()), small)
    assert torch.equal(S(x.clone().requires_grad_()), small)
    assert not torch.equal(S(tail.roll(1)), S(tail))


def test_one_bad_value_shows() -> None:
    x, _ = vectors()
    x[7] = math.nan
    assert int(torch.isnan(Sketch(64)(x)).sum()) == 1


def test_wide_sketches() -> None:
    x, _ = vectors()
    assert Sketch(40_000)(x).count_nonzero() > 290  # beyond 16 bits; few collisions


def test_wrong_parameters() -> None:
    for make in (
        lambda: Sketch(0),
        lambda: Sketch(4, kind="hash"),  # type: ignore[arg-type]
        lambda: Sketch(4).error(0),
        lambda: Sketch(4).error(1),
        lambda: Sketch(4)(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()
