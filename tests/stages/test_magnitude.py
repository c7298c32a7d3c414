"""FedDEA's transform: pinned values, ties, counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.core.layout import Block, Layout
from fedloom.methods.feddea import aggregation as magnitude
from fedloom.methods.feddea.aggregation import top_mask
from fedloom.stages import Mean, TopMagnitude

D = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]])


def test_pinned_rows_and_mean() -> None:
    rows, _ = TopMagnitude(0.5).on(D)
    assert rows.tolist() == [[6, 0, 0, 4], [-4, 4, 0, 0], [2, 0, -8, 0]]
    mean, _ = (TopMagnitude(0.5) >> Mean()).on(D)
    torch.testing.assert_close(mean[0], torch.tensor([1.333333, 1.333333, -2.666667, 1.333333]))


def test_rho_one_is_the_identity_bit_for_bit() -> None:
    for keep in ("largest", "smallest", "random"):
        assert torch.equal(TopMagnitude(1.0, keep).on(D)[0], D)


def test_ablations() -> None:
    assert TopMagnitude(0.5, "smallest").on(D)[0].tolist() == [[0, -2, 0, 0], [0, 0, 2, 0], [2, 0, 0, 0]]
    assert TopMagnitude(0.5, rescale=False).on(D)[0].tolist() == [[3, 0, 0, 2], [-2, 2, 0, 0], [1, 0, -4, 0]]


def test_ties_go_to_the_lowest_index() -> None:
    assert TopMagnitude(0.5, rescale=False).on(torch.ones(1, 6))[0].tolist() == [[1, 1, 1, 0, 0, 0]]
    assert TopMagnitude(0.5, rescale=False).on(torch.tensor([[1.0, -1, 2, 1]]))[0].tolist() == [[1, 0, 2, 0]]


@given(
    st.integers(1, 60), st.floats(0.001, 0.999), st.integers(0, 5), st.sampled_from(["largest", "smallest", "random"])
)
def test_exactly_the_right_number_is_kept(d: int, rho: float, levels: int, keep: str) -> None:
    x = 1 + torch.arange(d).remainder(levels + 1).float().view(1, -1)
    kept = int((TopMagnitude(rho, keep).on(x)[0] != 0).sum())  # type: ignore[arg-type]
    assert kept == max(1, int(rho * d + 1e-9))


@pytest.mark.parametrize(("rho", "kept"), [(0.29, 29), (0.57, 57), (0.001, 1)])
def test_counts_do_not_suffer_from_floating_point(rho: float, kept: int) -> None:
    assert int((TopMagnitude(rho).on(torch.arange(1.0, 101).view(1, -1))[0] != 0).sum()) == kept


def test_random_keeps_other_coordinates_for_other_clients_and_rounds_but_repeats() -> None:
    X = torch.ones(2, 50)
    stage = TopMagnitude(0.2, "random")
    first, _ = stage.on(X, round=1)
    assert torch.equal(first, stage.on(X, round=1)[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, stage.on(X, round=2)[0])
    assert not torch.equal(first, stage.on(X, round=1, seed=1)[0])


def test_random_with_rescale_is_unbiased() -> None:
    stage = TopMagnitude(0.25, "random")
    mean = torch.stack([stage.on(torch.ones(1, 40), round=r)[0] for r in range(400)]).mean()
    assert abs(float(mean) - 1) < 0.01


LAYOUT = Layout((Block("a", (4,)), Block("b", (4,)), Block("c", (2,))))
X = torch.tensor([[9.0, 8, 7, 6, 1, 2, 3, 4, 5, 5.5]])


def test_per_block_chooses_within_each_tensor() -> None:
    whole = TopMagnitude(0.5, rescale=False).on(X, layout=LAYOUT)[0]
    per_block = TopMagnitude(0.5, rescale=False, per_block=True).on(X, layout=LAYOUT)[0]
    assert whole.tolist() == [[9, 8, 7, 6, 0, 0, 0, 0, 0, 5.5]]
    assert per_block.tolist() == [[9, 8, 0, 0, 0, 0, 3, 4, 0, 5.5]]


def test_d_counts_the_blocks_that_the_row_has() -> None:
    present = [[True, False, True]]
    x = X.clone()
    x[:, 4:8] = 0
    kept = TopMagnitude(0.5, rescale=False).on(x, layout=LAYOUT, present=present)[0]
    assert kept.tolist() == [[9, 8, 7, 0, 0, 0, 0, 0, 0, 0]]


def by_sorting(x: torch.Tensor, k: int, largest: bool = True) -> torch.Tensor:
    """Return what top_mask promises, by one stable sort."""
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[x.abs().sort(descending=largest, stable=True).indices[: max(k, 0)]] = True
    return mask


@pytest.fixture(params=["sorted", "searched", "in chunks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of choosing, on short rows too."""
    if request.param != "sorted":
        monkeypatch.setattr(magnitude, "_SMALL", 0)
    if request.param == "in chunks":
        monkeypatch.setattr(magnitude, "_CHUNK", 7)
    return request.param


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.0000001, 1e-45, -1e-45, 1e-30, 65504.0, 3e38, -3e38, float("inf"), -float("inf")]


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_nan=False)), min_size=1, max_size=40),
    st.integers(-1, 42),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_top_mask_is_a_stable_sort(values: list[float], k: int, largest: bool, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    before = x.clone()
    assert torch.equal(top_mask(x, k, largest), by_sorting(x, k, largest))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [True, False])
def test_top_mask_on_long_rows(dtype: torch.dtype, largest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than one chunk: distinct values, a few levels, mostly zeros, all equal."""
    monkeypatch.setattr(magnitude, "_CHUNK", 40_000)
    d = 100_001
    noise = torch.randn(d, generator=torch.Generator().manual_seed(0))
    for x in (noise, noise.round(), noise * (noise > 0.3), torch.full((d,), -0.5)):
        x = x.to(dtype)
        for k in (1, d // 10, d // 2, d - 1):
            assert torch.equal(top_mask(x, k, largest), by_sorting(x, k, largest))


@pytest.mark.usefixtures("way")
def test_top_mask_of_columns_that_are_not_contiguous() -> None:
    X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    for x in (X[:, 1], X[::3, 2], X.t()[3]):
        assert not x.is_contiguous()
        assert torch.equal(top_mask(x, 11), by_sorting(x, 11))
    row = TopMagnitude(0.5, rescale=False).on(X.t())[0]
    for x, kept in zip(X.t(), row, strict=True):
        assert torch.equal(kept, x * by_sorting(x, 45))


@pytest.mark.usefixtures("way")
def test_what_is_dropped_is_zero_and_the_input_stays() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    out = TopMagnitude(0.25).on(x)[0]
    assert torch.equal(x, before)
    for given_, kept in zip(x, out, strict=True):
        mask = by_sorting(given_, 16)
        assert torch.equal(kept[mask], given_[mask] * 4)
        assert not kept[~mask].any()
        assert not kept[~mask].signbit().any()
