"""Personal mixes give rows away: the examples of the leak check."""

from __future__ import annotations

import pytest
import torch

from fedloom.federation.rounds.seen import leaked, mixing_of


def ring(k: int) -> torch.Tensor:
    """Each takes a third of itself and of both neighbours."""
    eye = torch.eye(k)
    return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def clusters(*sizes: int) -> torch.Tensor:
    return torch.block_diag(*(torch.full((size, size), 1 / size) for size in sizes))


@pytest.mark.parametrize(
    ("W", "rows"),
    [
        (clusters(5), []),
        (clusters(3, 3, 3), []),
        (clusters(3, 1, 2), [3]),
        (torch.eye(4), [0, 1, 2, 3]),
        *((ring(k), list(range(k))) for k in (5, 7, 8)),
        *((ring(k), []) for k in (6, 9)),
        (0.5 * torch.eye(4) + 0.5 * clusters(4), [0, 1, 2, 3]),
    ],
)
def test_whose_row_follows_from_the_mixes(W: torch.Tensor, rows: list[int]) -> None:
    assert leaked(W) == rows
    X = torch.randn(W.shape[1], 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    solved = torch.linalg.pinv(W.double()) @ (W.double() @ X)
    for i in range(len(X)):
        assert torch.allclose(solved[i], X[i]) == (i in rows)


def test_the_weights_of_a_mix_are_found_from_rows() -> None:
    X = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    found = mixing_of(X, ring(5) @ X)
    assert found is not None
    torch.testing.assert_close(found, ring(5).double(), atol=1e-5, rtol=0)
    for scale in (1e-6, 1, 1e6):
        assert mixing_of(X, scale * X.abs()) is None
    nothing = mixing_of(X, 0 * X)
    assert nothing is not None
    assert not nothing.any()
