"""PCGrad, CAGrad, the minimum-norm direction, plain cases of GradVac and ConFIG: pinned values and what must hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.context import Ctx, derive_seed
from fedloom.core.gram import min_norm
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.conflict.aggregation import pcgrad_coefficients
from fedloom.stages import CAGrad, ConFIG, GradVac, Mean, MinNorm, PCGrad, Stage

D = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], dtype=torch.float64)
AGREE = torch.tensor([[1.0, 2, 0], [2, 1, 0.1], [1, 1, 0]])
COMBINERS = [
    *(PCGrad() >> Mean(), PCGrad("sum") >> Mean(), GradVac() >> Mean()),
    *(CAGrad(), CAGrad(rescale="1+c^2"), ConFIG(), MinNorm(), MinNorm(False)),
]

every_combiner = pytest.mark.parametrize("stage", COMBINERS, ids=repr)


def close(found: Tensor, expected: list[float] | list[list[float]] | Tensor, digits: int = 6) -> None:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.6 * 10**-digits)


def random_rows(seed: int, k: int, d: int = 20) -> Tensor:
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Pinned values


def test_cagrad() -> None:
    close(CAGrad(0.4).on(D)[0][0], [0.259327, 1.074007, -0.796330, 0.666667])
    close(CAGrad(0.4, "1+c^2").on(D)[0][0], [0.223557, 0.925868, -0.686491, 0.574713])
    close(CAGrad(0.4, "1+c").on(D)[0][0], CAGrad(0.4).on(D)[0][0] / 1.4)


def test_min_norm_on_unit_rows() -> None:
    G = D @ D.t()
    norms = G.diagonal().sqrt()
    w = min_norm(G) * norms / norms.mean()
    close(w, [0.382809, 0.430738, 0.186453])
    close(w / norms @ D, [0.063719, 0.228796, -0.032210, 0.204620])
    close(MinNorm().on(D)[0][0], [0.233303, 0.837721, -0.117936, 0.749203])


# PCGrad


def by_definition(X: Tensor, orders: list[list[int]]) -> Tensor:
    out = X.clone()
    for i, order in enumerate(orders):
        for j in order:
            if j != i and X[j].any() and (inner := out[i] @ X[j]) < 0:
                out[i] -= inner / (X[j] @ X[j]) * X[j]
    return out


@given(st.integers(0, 1000), st.integers(2, 7), st.integers(1, 9))
def test_pcgrad_is_its_definition(seed: int, k: int, d: int) -> None:
    X = random_rows(seed, k, d)
    X[seed % k] *= seed % 2
    out, _ = PCGrad().on(X, seed=seed)
    draws = [[derive_seed(seed, 0, "pcgrad", f"c{i}", None, f"c{j}", None) for j in range(k)] for i in range(k)]
    orders = [sorted(range(k), key=draw.__getitem__) for draw in draws]
    torch.testing.assert_close(out, by_definition(X, orders), rtol=1e-9, atol=1e-9)


def test_the_order_is_random_and_repeats() -> None:
    orders = {tuple(PCGrad().on(D, seed=s)[0].flatten().tolist()) for s in range(20)}
    possible = {
        tuple((pcgrad_coefficients(D @ D.t(), o) @ D).flatten().tolist())
        for o in itertools.product(itertools.permutations(range(3)), repeat=3)
    }
    assert len(orders) > 1
    assert orders <= possible
    assert torch.equal(PCGrad().on(D, seed=4, round=2)[0], PCGrad().on(D, seed=4, round=2)[0])
    assert len({tuple(PCGrad().on(D, round=r)[0].flatten().tolist()) for r in range(20)}) > 1


def test_rows_without_conflict_come_back_bit_for_bit() -> None:
    updates = Updates.of(AGREE)
    out, _ = PCGrad()(updates, {}, Ctx(1))
    assert out is updates
    # Only the first two conflict; the third is orthogonal to both.
    X = torch.tensor([[1.1, 0.3, 0, 0], [-1.3, 0.2, 0, 0], [0, 0, 0.7, 0.1]])
    assert torch.equal(PCGrad().on(X)[0][2], X[2])


def test_sum_is_k_times_the_mean() -> None:
    n = [1.0, 2, 5]
    mean, total = ((PCGrad(r) >> Mean()).on(D, n=n, seed=3)[0] for r in ("mean", "sum"))
    torch.testing.assert_close(total, 3 * mean)
    rows, _ = PCGrad().on(D, seed=3)
    torch.testing.assert_close((PCGrad("sum") >> Mean()).on(D, seed=3)[0][0], rows.sum(dim=0))


def test_projections_after_projections_see_the_rows_as_they_are_by_then() -> None:
    first, _ = PCGrad()(Updates.of(D), {}, Ctx(1))
    again, _ = PCGrad()(first, {}, Ctx(1))
    expected, _ = PCGrad()(Updates.of(first.X), {}, Ctx(1))
    torch.testing.assert_close(again.X, expected.X)


# CAGrad and the minimum norm


@pytest.mark.parametrize("rescale", ["none", "1+c^2", "1+c"])
def test_c_0_is_the_mean_bit_for_bit(rescale: str) -> None:
    X = random_rows(0, 5).float()
    n = [1.0, 2, 3, 4, 5]
    assert torch.equal(CAGrad(0.0, rescale).on(X, n=n)[0], Mean().on(X, n=n)[0])  # type: ignore[arg-type]


@given(st.integers(0, 500), st.integers(1, 8), st.sampled_from([0.1, 0.4, 0.9]))
def test_cagrad_stays_near_the_mean_and_helps_the_worst_off(seed: int, k: int, c: float) -> None:
    X = random_rows(seed, k, 30)
    n = [1.0 + i for i in range(k)]
    u, mean = CAGrad(c).on(X, n=n)[0][0], Mean().on(X, n=n)[0][0]
    assert float((u - mean).norm()) == pytest.approx(c * float(mean.norm()))
    assert float((X @ u).min()) >= float((X @ mean).min()) - 1e-9


def test_equal_rows() -> None:
    X = D[:1].repeat(3, 1)
    for c, rescale, factor in ((0.4, "none", 1.4), (0.4, "1+c", 1), (0.5, "1+c^2", 1.2)):
        torch.testing.assert_close(CAGrad(c, rescale).on(X, n=[1, 2, 4])[0], factor * X[:1])  # type: ignore[arg-type]
    torch.testing.assert_close(MinNorm().on(X)[0], X[:1])
    torch.testing.assert_close(MinNorm(False).on(X)[0], X[:1])
    assert torch.equal(PCGrad().on(X)[0], X)


@pytest.mark.parametrize("seed", range(5))
def test_one_row(seed: int) -> None:
    X = random_rows(seed, 1).float()
    for stage in (CAGrad(0.0), CAGrad(0.3, "1+c"), MinNorm(), MinNorm(False), PCGrad(), PCGrad("sum")):
        assert torch.equal(stage.on(X, n=[7])[0], X), stage
    assert torch.equal(CAGrad(0.4).on(X, n=[7])[0], 1.4 * X)


@every_combiner
def test_weights_of_zero_are_no_update_for_rules_that_read_them(stage: Stage) -> None:
    out, _ = stage.on(D, n=[0, 0, 0])
    assert torch.isfinite(out).all()
    assert bool(out.any()) == isinstance(stage, MinNorm)


def test_opposite_rows() -> None:
    X = torch.stack([D[0], -D[0]]).float()
    assert float(CAGrad().on(X)[0].abs().max()) == 0
    assert float(MinNorm().on(X)[0].abs().max()) == 0
    assert float(PCGrad().on(X)[0].abs().max()) <= 1e-6
    # Not equally many examples: the second row is harmed as little as the ball around the mean allows.
    torch.testing.assert_close(CAGrad(0.4).on(X, n=[3, 1])[0][0], 0.6 * X[0] / 2)


def test_zero_rows_count_in_the_mean_of_cagrad_only() -> None:
    X = torch.cat([D, torch.zeros(1, 4, dtype=torch.float64)])
    torch.testing.assert_close(CAGrad().on(X)[0], 0.75 * CAGrad().on(D)[0])
    torch.testing.assert_close(MinNorm().on(X)[0], MinNorm().on(D)[0])
    torch.testing.assert_close(MinNorm(False).on(X)[0], MinNorm(False).on(D)[0])


def test_min_norm_ignores_weights_and_cagrad_reads_them() -> None:
    assert torch.equal(MinNorm().on(D, n=[1, 2, 3])[0], MinNorm().on(D)[0])
    assert not torch.equal(CAGrad().on(D, n=[1, 2, 3])[0], CAGrad().on(D)[0])


def test_unit_rows_give_a_short_update_the_same_say() -> None:
    X = torch.tensor([[1.0, 0.0], [0.0, 1e-3]])
    torch.testing.assert_close(MinNorm().on(X)[0][0], torch.tensor([0.5, 0.5]) * 0.5005)
    u, _ = MinNorm(False).on(X)
    assert float(u[0].norm()) <= 1e-3


# Clients with blocks of their own

LAYOUT = Layout(
    (
        Block("heads.a", (2,), role="head", task="a"),
        Block("encoder", (4,), role="encoder"),
        Block("heads.b", (3,), role="head", task="b"),
        Block("heads.c", (1,), role="head", task="c"),
    )
)
PRESENT = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]).bool()


def with_own_heads() -> Tensor:
    X = random_rows(8, 3, LAYOUT.d)
    for row, have in zip(X, PRESENT, strict=True):
        for s, here in zip(LAYOUT.slices, have.tolist(), strict=True):
            row[s] *= here
    return X


@pytest.mark.parametrize("stage", [CAGrad(), CAGrad(0.7, "1+c^2"), MinNorm(), MinNorm(False)], ids=repr)
def test_columns_that_the_same_rows_have_are_solved_by_themselves(stage: Stage) -> None:
    X, n = with_own_heads(), torch.tensor([1.0, 2.0, 3.0])
    u = stage.on(X, n=n, layout=LAYOUT, present=PRESENT)[0][0]
    for s, members in ((slice(0, 2), [0, 1]), (slice(2, 6), [0, 1, 2]), (slice(6, 9), [2])):
        torch.testing.assert_close(u[s], stage.on(X[members][:, s], n=n[members])[0][0])
    assert not u[9:].any()  # nobody is there


def test_presence_of_everything_is_no_presence() -> None:
    everything = torch.ones(3, 4).bool()
    X = random_rows(8, 3, LAYOUT.d)
    for stage in COMBINERS:
        torch.testing.assert_close(stage.on(X, layout=LAYOUT, present=everything)[0], stage.on(X, layout=LAYOUT)[0])


# Composition


@every_combiner
def test_a_mixing_before_is_read(stage: Stage) -> None:
    W = random_rows(1, 3, 3)
    mixed, _ = stage(Updates.of(D).mixed(W), stage.init(Layout(())), Ctx(1))
    plain, _ = stage(Updates.of(W @ D), stage.init(Layout(())), Ctx(1))
    torch.testing.assert_close(mixed.X, plain.X)


def test_nothing_of_size_k_by_d_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the mixed rows nor a float64 copy."""

    def fail(self: Updates) -> Tensor:
        raise AssertionError("X was worked out")

    updates = Updates.of(random_rows(0, 4).float())
    monkeypatch.setattr(Updates, "X", property(fail))
    for stage in COMBINERS:
        stage(updates, stage.init(Layout(())), Ctx(1))


def test_rows_of_zeros_neither_turn_nor_are_turned_to() -> None:
    X = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 1.0]])
    out, state = GradVac().on(X)
    without, _ = GradVac().on(X[[0, 2]], rows=["c0", "c2"])
    assert not out[1].any()
    torch.testing.assert_close(out[[0, 2]], without)
    assert {(a, b) for a, others in state["cosines"].items() for b in others} == {("c0", "c2"), ("c2", "c0")}
