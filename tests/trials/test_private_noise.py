"""A hostile server that tries seeds to take the noise away from a private update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fedloom.core.context import Ctx, derive_seed
from fedloom.core.updates import Updates
from fedloom.methods.private import RowNoise
from trials.scale import cases

SECRET = bytes(range(32))
UPDATE = torch.linspace(-1, 1, 16)
TRIED = cases(1 << 13, 1 << 20)


def noise(secret: bytes | None) -> torch.Tensor:
    """Return what a client adds to its update, as a server sees it that knows the update."""
    row = Updates.of(UPDATE[None])
    return RowNoise(clip=1.0, noise=2.0)(row, {}, Ctx(3, secret=secret))[0].X[0] - UPDATE


def candidates(likely: int) -> Iterator[int]:
    """Seeds of torch's generator: as many as are tried, with the likely one."""
    yield likely & 0xFFFFFFFF
    yield from range(TRIED - 1)


def found(seen: torch.Tensor, likely: int) -> bool:
    """Return whether the noise is that of one of the seeds."""
    generator, drawn = torch.Generator(), torch.empty(len(seen))
    for seed in candidates(likely):
        drawn.normal_(generator=generator.manual_seed(seed))
        if torch.allclose(2.0 * drawn, seen, atol=1e-5):
            return True
    return False


def test_a_search_over_seeds_finds_no_noise_of_a_secret(record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")
    purpose = (3, "row noise", "c0", None)
    assert found(noise(None), derive_seed(0, *purpose)), "of a public seed it does"
    assert not found(noise(SECRET), derive_seed(SECRET.hex(), *purpose))  # type: ignore[arg-type]
    record_property("seeds", TRIED)
