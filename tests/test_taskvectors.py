"""Task vectors: MaTU's unification and aggregation."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core import taskvectors as module
from fedloom.taskvectors import (
    Upload,
    aggregate_tasks,
    modulate,
    pack_mask,
    sign_similarity,
    unify,
    unpack_mask,
)

ROWS = torch.tensor([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]])
values = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e-20, -1e-20])


@st.composite
def matrices(draw: Any, least: int = 1) -> Tensor:
    T, d = draw(st.integers(least, 5)), draw(st.integers(1, 19))
    return torch.tensor(draw(st.lists(st.lists(values, min_size=d, max_size=d), min_size=T, max_size=T)))


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# Unification


def test_unify_golden_values() -> None:
    """Sums (2, 2, -3, 2): the largest of that sign."""
    vector, masks, scales = unify(ROWS)
    assert vector.tolist() == [3, 2, -4, 2]
    assert masks.int().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0]]
    assert scales.tolist() == pytest.approx([6 / 5, 5 / 2, 6 / 9])
    assert vector.dtype == scales.dtype == torch.float32
    assert masks.dtype == torch.bool
    assert modulate(vector, masks, scales)[1].tolist() == [0, 5, 0, 0]
    assert modulate(vector, masks[0], scales[0]).tolist() == pytest.approx([3.6, 0, 0, 2.4])
    assert modulate(vector, masks[0], 2.0).tolist() == [6, 0, 0, 4]


def brute(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definitions, coordinate by coordinate, in exact sums."""
    from fractions import Fraction

    T, d = X.shape
    vector, masks = torch.zeros(d), torch.zeros(T, d, dtype=torch.bool)
    for j in range(d):
        column = [Fraction(x) for x in X[:, j].tolist()]
        total = sum(column)
        sign = (total > 0) - (total < 0)
        vector[j] = float(sign * max([abs(x) for x in column if x * sign > 0], default=Fraction(0)))
        masks[:, j] = torch.tensor([x * sign > 0 for x in column])
    kept = torch.where(masks, vector.abs(), 0.0).double().sum(1)
    scales = torch.where(kept > 0, X.double().abs().sum(1) / kept, 1.0)
    return vector, masks, scales


@given(matrices())
def test_unify_is_its_definition(X: Tensor) -> None:
    X = torch.where(X.abs() < 1e-10, 0.0, X)
    vector, masks, scales = unify(X)
    for found, expected in zip((vector, masks, scales.double()), brute(X), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, check_dtype=False)


def test_what_a_mask_leaves_out_is_zero_whatever_it_was_also_in_columns_of_a_matrix() -> None:
    vector = torch.tensor([2.0, torch.inf, torch.nan, -3.0])
    masks = torch.tensor([[True, False, False, True], [True, False, False, False]])
    X = torch.full((2, 6), 9.0)
    for given_ in (masks, pack_mask(masks)):
        modulate(vector, given_, torch.tensor([0.5, 2.0]), out=X[:, 1:5])
        assert X.tolist() == [[9, 1, 0, 0, -1.5, 9], [9, 4, 0, 0, 0, 9]]


def test_masks_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 16)
    vector, masks = torch.arange(1.0, 42.0), torch.rand(3, 41) < 0.5
    scales = torch.tensor([1.0, 2.0, 0.5])
    for given_ in (masks, pack_mask(masks)):
        assert torch.equal(modulate(vector, given_, scales), scales[:, None] * masks * vector)


@given(matrices())
def test_properties_of_unification(X: Tensor) -> None:
    vector, masks, scales = unify(X)
    again = modulate(vector, masks, scales)
    size = X.double().abs().sum(1)
    some = masks.any(1)
    # sum |lambda m tau| = sum |tau_t|, except where every sign disagrees or a scale is too large for float32
    fine = some & (scales < 1e30)
    torch.testing.assert_close(again.double().abs().sum(1)[fine], size[fine], rtol=1e-5, atol=1e-30)
    assert (scales[~some] == 1).all()
    agree = (X * vector.sign()) > 0
    assert torch.equal(masks, agree)
    assert (vector.expand_as(X).abs() >= X.abs())[agree].all()
    assert torch.isfinite(scales).all()


@given(matrices(), st.randoms(use_true_random=False))
def test_the_order_of_tasks_does_not_matter(X: Tensor, chance: random.Random) -> None:
    """Also where a sum cancels up to the last digit."""
    order = list(range(len(X)))
    chance.shuffle(order)
    a, b = unify(X), unify(X[order])
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1][order], b[1])
    assert torch.equal(a[2][order], b[2])


def test_a_small_rest_of_a_sum_that_cancels_decides() -> None:
    X = torch.tensor([[1e8, 1.0, 3e38], [1.0, 1.0, 3e38], [-1e8, -2.0, -3e38], [0.0, 0.0, -3e38]])
    for order in itertools.permutations(range(4)):
        vector, _, _ = unify(X[list(order)])
        assert vector.tolist() == [1e8, 0, 0]


@given(matrices())
def test_a_single_task_comes_back_as_it_is(X: Tensor) -> None:
    x = X[:1]
    vector, masks, scales = unify(x)
    assert torch.equal(vector, x[0])
    assert torch.equal(masks, x != 0)
    assert scales.tolist() == [1]
    assert torch.equal(modulate(vector, masks, scales), x)


def test_tasks_that_share_no_coordinate_come_back_as_they_are() -> None:
    X = randn(3, 30_000)
    X *= torch.arange(30_000) % 3 == torch.arange(3)[:, None]
    vector, masks, scales = unify(X)
    assert scales.tolist() == [1, 1, 1]
    assert torch.equal(modulate(vector, masks, scales), X)


def test_zero_vectors() -> None:
    vector, masks, scales = unify(torch.tensor([[0.0, 0, 0], [1, -1, 0]]))
    assert vector.tolist() == [1, -1, 0]
    assert not masks[0].any()
    assert scales.tolist() == [1, 1]
    vector, _, scales = unify(torch.zeros(2, 3))
    assert scales.tolist() == [1, 1]
    assert not vector.signbit().any()
    assert not unify(torch.tensor([[-0.0, 1]]))[0].signbit().any()
    # what cancels exactly is left out: nothing of either task remains
    vector, masks, scales = unify(torch.tensor([[1.0], [-1.0]]))
    assert vector.tolist() == [0]
    assert scales.tolist() == [1, 1]


def test_pieces_and_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    X = randn(5, 1000)
    whole = unify(X, packed=True)
    monkeypatch.setattr(module, "_CHUNK", 8)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for rows in (X, list(X), X.t().contiguous().t()):
            for a, b in zip(whole, unify(rows, packed=True), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_other_dtypes() -> None:
    assert unify(ROWS.double())[0].dtype == torch.float64
    assert unify(ROWS.bfloat16())[0].tolist() == [3, 2, -4, 2]


@given(st.integers(0, 40), st.integers(1, 3))
def test_masks_pack_to_bits(d: int, k: int) -> None:
    mask = randn(k, d, seed=d) > 0
    packed = pack_mask(mask)
    assert packed.shape == (k, -(-d // 8))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_mask(packed, d), mask)
    assert torch.equal(unpack_mask(packed[0], d), mask[0])


def test_packed_masks_are_the_same_masks() -> None:
    X = randn(4, 10_001)
    vector, masks, scales = unify(X)
    packed = unify(X, packed=True)
    assert torch.equal(packed[1], pack_mask(masks))
    assert torch.equal(modulate(vector, packed[1], scales), modulate(vector, masks, scales))
    assert pack_mask(torch.tensor([True, False, False, False, False, False, False, True, True])).tolist() == [129, 128]


def test_where_nobody_says_how_many_examples_all_count_alike() -> None:
    def uploads(*counts: int) -> list[Upload]:
        return [Upload(row, ("a",), (n,), client=str(i)) for i, (row, n) in enumerate(zip(ROWS, counts, strict=False))]

    nothing, alike = (aggregate_tasks(uploads(*counts), kappa=0) for counts in ((0, 0), (1, 1)))
    torch.testing.assert_close(nothing.vectors, alike.vectors)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: unify(torch.zeros(3)),
        lambda: unify([]),
        lambda: unify([torch.zeros(3), torch.zeros(2)]),
        lambda: unify(torch.zeros(2, 3, dtype=torch.int64)),
        lambda: modulate(torch.zeros(9), torch.zeros(1, dtype=torch.uint8), 1.0),
        lambda: modulate(torch.zeros(9), torch.zeros(9, dtype=torch.int64), 1.0),
        lambda: unpack_mask(torch.zeros(1, dtype=torch.uint8), 9),
        lambda: sign_similarity(ROWS, zeros="some"),  # type: ignore[arg-type]
        lambda: aggregate_tasks([]),
        lambda: Upload(ROWS[0], ("a", "a"), (1, 1)),
        lambda: Upload(ROWS[0], ("a", "b"), (1, 1)),
        lambda: Upload(ROWS[0], ("a",), (-1,)),
        lambda: Upload(ROWS[0], (), ()),
        lambda: aggregate_tasks([Upload(ROWS[0], ("a",), (1,))], out=torch.zeros(2, 4)),
        lambda: aggregate_tasks([Upload(ROWS[0], ("a",), (1,))], out=torch.zeros(1, 4).double()),
        lambda: Upload(ROWS[0], ("a",), (1,), masks=torch.ones(2, 4, dtype=torch.bool), scales=torch.ones(1)),
        lambda: aggregate_tasks([Upload(ROWS[0], ("a",), (1,))], combine="mean"),  # type: ignore[arg-type]
        lambda: aggregate_tasks([Upload(ROWS[0], ("a",), (1,)), Upload(ROWS[0, :2], ("a",), (1,))]),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected|differ|go together"):
        wrong()


# Similarity


def test_sign_similarity_golden_values() -> None:
    S = sign_similarity(ROWS)
    assert [S[0, 1], S[0, 2], S[1, 2]] == pytest.approx([0.25, 0.5, 0.375])
    # 3 of 4 coordinates are not zero: a zero is half an agreement with itself, too
    assert S.diagonal().tolist() == pytest.approx([0.875, 0.875, 0.875])
    out = sign_similarity(ROWS, zeros="out")
    assert [out[0, 1], out[0, 2], out[1, 2]] == pytest.approx([0, 0.5, 1 / 3])
    assert out.diagonal().tolist() == [1, 1, 1]
    one = torch.tensor([[1.0, 0, 2], [-1, 3, 0]])  # they share a single coordinate
    assert sign_similarity(one, zeros="out").tolist() == [[1, 0], [0, 1]]
    assert sign_similarity(torch.zeros(2, 3), zeros="out").tolist() == [[0.5, 0.5], [0.5, 0.5]]


@given(matrices(), st.sampled_from(["half", "out"]))
def test_similarity_is_symmetric_and_between_0_and_1(X: Tensor, zeros: Any) -> None:
    S = sign_similarity(X, zeros)
    assert torch.equal(S, S.t())
    assert S.min() >= 0
    assert S.max() <= 1
    assert torch.equal(sign_similarity(3 * X, zeros), S)


# Aggregation


def uploads(n: int, tasks: str, d: int = 20, seed: int = 0, packed: bool = False) -> list[Upload]:
    """Clients with the given tasks, two or three each."""
    chance = random.Random(seed)
    found = []
    for i in range(n):
        mine = sorted(chance.sample(tasks, chance.randint(1, 3)))
        vector, masks, scales = unify(randn(len(mine), d, seed=100 * seed + i) + 0.3, packed=packed)
        counts = [chance.randint(0, 9) for _ in mine]
        found.append(Upload(vector, tuple(mine), tuple(counts), masks, scales, client=f"c{i}"))
    return found


def literal(
    clients: list[Upload], rho: float, kappa: int, epsilon: float, combine: str, cross: str, source: str
) -> Any:
    """Equations 3 to 7, one after the other, in float64."""
    tasks = sorted({t for u in clients for t in u.tasks})
    hat, mhats = [], []
    for t in tasks:
        holders = [(u, u.tasks.index(t)) for u in clients if t in u.tasks]
        masked = [u.masks[i] * u.vector.double() for u, i in holders]
        a = torch.stack([x.sign() for x in masked]).mean(0).abs()
        mhat = torch.where(a >= rho - 1e-12, 1.0, a)
        total = sum(u.counts[i] for u, i in holders)
        x = 0
        for (u, i), m in zip(holders, masked, strict=True):
            gamma = u.counts[i] / total if total else 1 / len(holders)
            lam = u.scales[i].double()
            x = x + gamma * lam * {"masked": m, "unified": u.vector.double(), "reconstructed": lam * m}[source]
        hat.append(mhat * x)
        mhats.append(mhat)
    S = sign_similarity(torch.stack(hat))
    new = []
    for i, _ in enumerate(tasks):
        others = [j for j in range(len(tasks)) if j != i]
        similar = sorted((j for j in others if S[i, j] > epsilon), key=lambda j: -S[i, j])[:kappa]
        chosen = {"similar": similar, "uniform": others, "none": []}[cross]
        w = {j: 1.0 if cross == "uniform" else float(S[i, j]) for j in chosen}
        if cross == "uniform" and combine != "normalized":
            w = {j: 1 / len(others) for j in others}
        tilde = sum((w[j] * mhats[i] * hat[j] for j in chosen), torch.zeros(1))
        if not chosen:
            new.append(hat[i])
        elif combine == "sum":
            new.append(hat[i] + tilde)
        elif combine == "average":
            new.append(hat[i] / 2 + tilde / sum(w.values()) / 2)
        elif combine == "half":
            new.append((hat[i] + tilde) / 2)
        else:
            new.append((hat[i] + tilde) / (1 + sum(w.values())))
    return tasks, torch.stack(new).float(), S


@pytest.mark.parametrize("cross", ["similar", "uniform", "none"])
@pytest.mark.parametrize("combine", ["normalized", "sum", "half", "average"])
@pytest.mark.parametrize("source", ["masked", "unified", "reconstructed"])
def test_aggregation_is_its_equations(combine: Any, cross: Any, source: Any) -> None:
    for seed in range(3):
        clients = uploads(6, "abcde", seed=seed)
        options = {"rho": 0.4, "kappa": 2, "epsilon": 0.5, "combine": combine, "cross": cross, "source": source}
        found = aggregate_tasks(clients, **options)
        tasks, vectors, S = literal(clients, **options)  # type: ignore[arg-type]
        assert list(found.tasks) == tasks
        torch.testing.assert_close(found.vectors, vectors)
        torch.testing.assert_close(found.similarity, S)
        assert found.vectors.dtype == torch.float32


def test_agreement_of_exactly_rho_counts_in_full() -> None:
    """Two of five, rho = 0.4: nothing may depend on how 0.4 is rounded."""
    signs = [[1, 1], [1, 1], [1, 0], [1, 0], [-1, 0]]  # agreement 3/5 and 2/5
    clients = [Upload(torch.tensor(x).float(), ("a",), (1,)) for x in signs]
    assert aggregate_tasks(clients).vectors[0].tolist() == pytest.approx([0.6, 0.4])
    assert aggregate_tasks(clients, rho=0.41).vectors[0].tolist() == pytest.approx([0.6, 0.16])
    assert aggregate_tasks(clients, rho=2).vectors[0].tolist() == pytest.approx([0.36, 0.16])


@pytest.mark.parametrize("clients", [127, 128, 300])
def test_many_clients_that_agree_or_not(clients: int) -> None:
    """Their signs are counted in whole numbers of a byte as long as those suffice. Half agree on the second number."""
    found = aggregate_tasks([Upload(torch.tensor([-1.0, i % 2]), ("a",), (1,), client=f"{i}") for i in range(clients)])
    half = clients // 2 / clients
    assert found.vectors[0].tolist() == pytest.approx([-1, half])
    found = aggregate_tasks(
        [Upload(torch.tensor([-1.0, i % 2]), ("a",), (1,), client=f"{i}") for i in range(clients)], rho=0.6
    )
    assert found.vectors[0].tolist() == pytest.approx([-1, half * half])


def test_outside_of_all_masks_is_zero() -> None:
    clients = [
        Upload(torch.tensor([1.0, 1]), ("a", "b"), (1, 1), torch.tensor([[True, False], [False, True]]), torch.ones(2))
    ]
    for source in ("masked", "unified", "reconstructed"):
        assert aggregate_tasks(clients, source=source).vectors.tolist() == [[1, 0], [0, 1]]  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_order_packing_pieces_and_threads_do_not_matter(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = aggregate_tasks(uploads(7, "abcde", d=203))
    clients = uploads(7, "abcde", d=203, packed=packed)
    monkeypatch.setattr(module, "_LEAST", 8)
    monkeypatch.setattr(module, "_MOST", 8)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        random.Random(threads).shuffle(clients)
        turned = [
            Upload(u.vector, u.tasks[::-1], u.counts[::-1], (u.masks).flip(0), u.scales.flip(0), u.client)  # type: ignore[union-attr]
            for u in clients
        ]
        for several in (clients, turned):
            found = aggregate_tasks(several)
            assert found.tasks == whole.tasks
            assert torch.equal(found.vectors, whole.vectors)
            assert torch.equal(found.similarity, whole.similarity)
            assert torch.equal(found.partners, whole.partners)
    X = torch.zeros(5, 210)
    found = aggregate_tasks(clients, out=X[:, 3:-4])
    assert torch.equal(found.vectors, whole.vectors)
    assert torch.equal(X[:, 3:-4], whole.vectors)
    assert not X[:, [0, 1, 2, -4, -3, -2, -1]].any()


def test_rows_of_a_client_and_task() -> None:
    """Reconstructed rows (client, task) give what the uploads give, for the default source."""
    clients = uploads(6, "abcd")
    rows = [
        Upload(x, (task,), (n,), client=f"{u.client}/{task}")
        for u in clients
        for x, task, n in zip(modulate(u.vector, u.masks, u.scales), u.tasks, u.counts, strict=True)  # type: ignore[arg-type]
    ]
    a, b = aggregate_tasks(clients), aggregate_tasks(rows)
    torch.testing.assert_close(a.vectors, b.vectors)
    assert torch.equal(a.similarity, b.similarity)


def test_one_client_with_one_task_is_the_identity() -> None:
    x = randn(50)
    found = aggregate_tasks([Upload(x, ("a",), (3,), *unify(x[None])[1:])])
    assert torch.equal(found.vectors, x[None])
    assert found.tasks == ("a",)
    assert found.partners.tolist() == [[0]]


def test_nobody_here_holds_it() -> None:
    found = aggregate_tasks(uploads(2, "abc"))
    assert set(found.tasks) <= set("abc")
    zero = aggregate_tasks([Upload(torch.zeros(4), ("a",), (0,)), Upload(torch.zeros(4), ("b",), (0,))])
    assert zero.vectors.tolist() == [[0.0] * 4] * 2
    assert zero.partners.tolist() == [[0, 0], [0, 0]]  # S = 0.5 is not above epsilon


def test_partners() -> None:
    base = torch.ones(10)
    near, far = base.clone(), -base
    near[0] = -1
    tasks = {"a": base, "b": base.clone(), "c": near, "d": far}
    clients = [Upload(x, (t,), (1,)) for t, x in tasks.items()]
    found = aggregate_tasks(clients, kappa=1)
    assert found.partners[0].tolist() == [0, 1, 0, 0]
    alike = [Upload(base, (t,), (1,)) for t in "abcd"]
    for kappa in (2, 3, 9):
        assert (aggregate_tasks(alike, kappa=kappa).partners > 0).sum(1).tolist() == [min(kappa, 3)] * 4
    assert found.partners[2].tolist() == pytest.approx([0.9, 0, 0, 0])  # a tie with b goes by name
    assert found.partners[3].tolist() == [0, 0, 0, 0]
    assert found.vectors[3].tolist() == far.tolist()
    assert aggregate_tasks(clients, kappa=0).partners.sum() == 0
    assert (aggregate_tasks(clients, kappa=9).partners[0] > 0).tolist() == [False, True, True, False]


def simulate(combine: str, rounds: int = 10, tasks: int = 8) -> list[float]:
    """Mean norms, relative to the start, of related task vectors over rounds without any training."""
    d = 4000
    common = randn(d, seed=1)
    vectors = {f"t{i}": 0.35 * common + randn(d, seed=2 + i) for i in range(tasks)}
    start = sum(float(x.norm()) for x in vectors.values())
    norms = []
    for _ in range(rounds):
        found = aggregate_tasks([Upload(x, (t,), (1,)) for t, x in vectors.items()], combine=combine)  # type: ignore[arg-type]
        vectors = dict(zip(found.tasks, found.vectors, strict=True))
        norms.append(sum(float(x.norm()) for x in vectors.values()) / start)
    return norms


def test_the_plain_sum_explodes_and_the_average_does_not() -> None:
    """Eight related tasks, kappa = 3: x3.8 a round, 2e5 in ten rounds; half of it a round; an average stays."""
    norms = simulate("sum")
    assert 3.5 < norms[-1] / norms[-2] <= 4
    assert norms[-1] > 1e5
    half = simulate("half")
    assert 1.75 < half[-1] / half[-2] <= 2
    steady = simulate("normalized")
    assert steady[-1] == pytest.approx(0.47, abs=0.05)
    for average in (steady, simulate("average")):
        assert average[-1] / average[-2] == pytest.approx(1, abs=0.02)
        assert max(average) <= 1


def test_a_float32_sum_with_the_wrong_sign_does_not_elect() -> None:
    """1 - 100 * 2e-8 - (1 - 1e-6) is -1e-6, but float32 loses every one of the small terms and finds +1e-6."""
    column = torch.tensor([1.0, *[-2e-8] * 100, -(1 - 1e-6)])
    assert np.cumsum(column.numpy())[-1] > 5e-7
    for x in (column, -column):
        vector, masks, _ = unify(x[:, None].expand(-1, 2).contiguous())
        assert vector.sign().tolist() == [-float(x[0])] * 2
        assert masks[0].tolist() == [False, False]
