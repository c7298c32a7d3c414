"""Robust rules against their definitions, computed row by row with numpy, and what they do to groups of rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedloom.core.context import Ctx
from fedloom.core.gram import gram
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.robust.aggregation import Robust, geometric_median, in_order
from fedloom.stages import (
    AtPeer,
    CentredClip,
    ClipNorms,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MinimumDiameter,
    MultiKrum,
    NearestMix,
    Stage,
    TrimmedMean,
)

Rows = NDArray[np.float64]
K, D = 9, 40
RULES: list[Robust] = [
    Krum(),
    MultiKrum(),
    MinimumDiameter(),
    NearestMix(),
    GeometricMedian(),
    CentredClip(),
    ClipNorms(),
    TrimmedMean(),
    Median(),
]
COMBINE = [rule for rule in RULES if not isinstance(rule, NearestMix | ClipNorms)]
"""Rules that leave the same row for all of a group; the others prepare rows for one."""
each = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
each_combining = pytest.mark.parametrize("rule", COMBINE, ids=lambda rule: type(rule).__name__)


def rows(k: int = K, seed: int = 0, d: int = D) -> Rows:
    return np.random.default_rng(seed).normal(size=(k, d)) + 1.0


def scores(X: Rows, f: int) -> list[float]:
    return [sum(sorted(float(((x - y) ** 2).sum()) for y in X)[: len(X) - f]) for x in X]


def krum(X: Rows, f: int) -> Rows:
    return np.tile(X[int(np.argmin(scores(X, f)))], (len(X), 1))


def multi_krum(X: Rows, f: int) -> Rows:
    return np.tile(X[np.argsort(scores(X, f))[: len(X) - f]].mean(0), (len(X), 1))


def mda(X: Rows, f: int) -> Rows:
    def diameter(chosen: tuple[int, ...]) -> float:
        return max(float(np.linalg.norm(X[i] - X[j])) for i, j in itertools.combinations(chosen, 2))

    best = min(itertools.combinations(range(len(X)), len(X) - f), key=diameter)
    return np.tile(X[[*best]].mean(0), (len(X), 1))


def nnm(X: Rows, f: int) -> Rows:
    return np.stack([X[np.argsort([((x - y) ** 2).sum() for y in X])[: len(X) - f]].mean(0) for x in X])


def clip(X: Rows, f: int) -> Rows:
    norms = np.linalg.norm(X, axis=1)
    return X * np.minimum(1, sorted(norms)[(len(X) - 1) // 2] / norms)[:, None]


def centred_clip(X: Rows, f: int) -> Rows:
    v = np.zeros(X.shape[1])
    for _ in range(5):
        far = np.linalg.norm(X - v, axis=1)
        v = v + ((X - v) * np.minimum(1, sorted(far)[(len(X) - 1) // 2] / far)[:, None]).mean(0)
    return np.tile(v, (len(X), 1))


def trimmed(X: Rows, f: int) -> Rows:
    return np.tile(np.sort(X, axis=0)[f : len(X) - f].mean(0), (len(X), 1))


GOLDEN: list[tuple[Stage, Any]] = [
    (Krum(2), krum),
    (MultiKrum(2), multi_krum),
    (MinimumDiameter(2), mda),
    (NearestMix(2), nnm),
    (ClipNorms(2), clip),
    (CentredClip(2), centred_clip),
    (TrimmedMean(2), trimmed),
    (Median(2), lambda X, f: np.tile(np.median(X, axis=0), (len(X), 1))),
]


@pytest.mark.parametrize(("rule", "expected"), GOLDEN, ids=[type(rule).__name__ for rule, _ in GOLDEN])
@pytest.mark.parametrize("k", [5, 8, 9])
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_is_its_definition(rule: Stage, expected: Any, k: int, seed: int) -> None:
    X = rows(k, seed)
    np.testing.assert_allclose(rule.on(X)[0].numpy(), expected(X, 2), rtol=1e-9, atol=1e-12)


def shortened(x: Rows, limit: float) -> Rows:
    return x / max(1.0, float(np.linalg.norm(x)) / limit)


def test_centred_clipping_with_the_limit_and_the_steps_of_its_paper() -> None:
    """Karimireddy et al., Algorithm 2: v <- v + (1/n) sum_i (m_i - v) min(1, tau / |m_i - v|), from v = 0."""
    X, v = rows(), np.zeros(D)
    for _ in range(2):
        v = v + np.mean([shortened(x - v, 3.0) for x in X], axis=0)
    found = CentredClip(limit=3.0, steps=2).on(X)[0].numpy()
    np.testing.assert_allclose(found, np.tile(v, (K, 1)), rtol=1e-9)


@pytest.mark.parametrize("own", ["c0", "c4"])
def test_a_peer_does_as_clipped_gossip(own: str) -> None:
    """He, Karimireddy, Jaggi, eq. 4: x_i <- sum_j W_ij (x_i + clip(x_j - x_i, tau)), with the peer's own weights."""
    X, w = rows(), np.random.default_rng(1).uniform(size=K)
    names = [f"c{i}" for i in range(K)]
    x = X[names.index(own)]
    limit = sorted(float(np.linalg.norm(each - x)) for each in X)[(K - 1) // 2]
    expected = np.average([x + shortened(each - x, limit) for each in X], axis=0, weights=w)
    stage = AtPeer(ClipNorms() >> Mean(), own, shares=dict(zip(names, w.tolist(), strict=True)))
    out, _ = stage(Updates.of(X), {"0": {}, "1": {}}, Ctx(1, peer=own))
    np.testing.assert_allclose(out.X[0].numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_geometric_median_has_the_least_sum_of_distances(seed: int) -> None:
    X = rows(seed=seed)
    found = GeometricMedian().on(X)[0].numpy()
    v = found[0]
    np.testing.assert_allclose(found, np.tile(v, (K, 1)), rtol=1e-12)
    # where it is no row, its unit vectors to the rows cancel
    away = X - v
    np.testing.assert_allclose((away / np.linalg.norm(away, axis=1)[:, None]).sum(0), 0, atol=1e-6)
    known = np.array([[0.0, 0], [4, 0], [4, 3], [0, 3]])  # of a rectangle: where its diagonals meet
    np.testing.assert_allclose(GeometricMedian().on(known)[0][0].numpy(), [2, 1.5], atol=1e-9)


@pytest.mark.parametrize("iterations", [0, 1, 100])
def test_the_coefficients_of_the_geometric_median_sum_to_one_after_every_step(iterations: int) -> None:
    c = geometric_median(gram(Updates.of(rows())), iterations)
    assert float(c.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((c > 0).all())


@pytest.mark.parametrize("f", [1, 2])
def test_the_same_as_byzfl(f: int) -> None:
    byzfl = pytest.importorskip("byzfl")
    X = rows()
    oracles = {
        Krum(f): byzfl.Krum(f),
        MultiKrum(f): byzfl.MultiKrum(f),
        MinimumDiameter(f): byzfl.MDA(f),
        TrimmedMean(f): byzfl.TrMean(f),
        Median(f): byzfl.Median(),
        GeometricMedian(f): byzfl.GeometricMedian(nu=1e-9, T=1000),
        CentredClip(f, limit=3, steps=4): byzfl.CenteredClipping(L=4, tau=3.0),
    }
    for rule, oracle in oracles.items():
        np.testing.assert_allclose(rule.on(X)[0][0].numpy(), oracle(X), atol=1e-5, err_msg=repr(rule))
    np.testing.assert_allclose(NearestMix(f).on(X)[0].numpy(), byzfl.NNM(f)(X), atol=1e-5)


def test_the_smallest_diameter_by_hand_and_too_many_sets_of_rows_are_refused() -> None:
    X = torch.tensor([[0.0], [1.0], [3.0], [4.0], [100.0]], dtype=torch.float64)
    assert MinimumDiameter(1).on(X)[0].flatten().tolist() == [2.0] * 5  # 0, 1, 3, 4
    assert MinimumDiameter(2).on(X)[0].flatten().tolist() == [4 / 3] * 5  # 0, 1, 3 before 1, 3, 4, as wide
    updates = Updates.of(torch.from_numpy(rows(20)))
    [why] = MinimumDiameter().unfit(updates)
    assert "would try 167,960 sets of 11 of 20 rows, expected at most 100,000: f may be up to 7 here" in why
    assert not [*MinimumDiameter(7).unfit(updates)]
    assert not [*MinimumDiameter().unfit(updates, most=15)]
    assert [*MinimumDiameter(8).unfit(updates)]


@each
def test_equal_rows_come_back(rule: Robust) -> None:
    X = torch.from_numpy(rows()[:1]).repeat(5, 1)
    torch.testing.assert_close(rule.on(X)[0], X)


@each_combining
@pytest.mark.parametrize("lie", [1e3, -10.0, 1e30, -1e30, float("nan"), float("inf")])
def test_a_minority_of_liars_moves_the_result_no_further_than_honest_rows_lie_apart(rule: Robust, lie: float) -> None:
    honest = torch.from_numpy(rows(6)).float()
    X = torch.cat([honest, torch.full((3, D), lie)])
    centre = honest.mean(0)
    apart = (honest - centre).norm(dim=1).max()
    out = rule.on(X)[0]
    assert bool(out.isfinite().all())
    assert float((out[0] - centre).norm()) <= 2 * float(apart)


def test_nearest_neighbours_first_and_then_a_rule_withstand_liars_too() -> None:
    honest = torch.from_numpy(rows(6)).float()
    out = (NearestMix() >> TrimmedMean() >> Mean()).on(torch.cat([honest, torch.full((3, D), 1e30)]))[0]
    assert float((out[0] - honest.mean(0)).norm()) <= float((honest - honest.mean(0)).norm(dim=1).max())


# groups

MINORITY = ["a"] * 6 + ["b"] * 2


def two_tasks(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of six clients of a task and two of another, the direction of the other), all honest."""
    rng = np.random.default_rng(seed)
    towards = rng.normal(size=(2, 400)) / 20
    noise = rng.normal(size=(8, 400)) / 20
    X = np.stack([towards[0]] * 6 + [towards[1]] * 2) + noise
    return torch.from_numpy(X), torch.from_numpy(towards[1])


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))


def test_rules_among_all_rows_delete_an_honest_minority_task_and_within_tasks_they_do_not() -> None:
    X, minority = two_tasks()
    mean = cosine(Mean().on(X)[0][0], minority)
    among_all = cosine((MultiKrum(2, "all") >> Mean()).on(X)[0][0], minority)
    within = cosine((MultiKrum(0) >> Mean()).on(X, tasks=MINORITY)[0][0], minority)
    assert mean > 0.2
    assert abs(among_all) < 0.1
    assert within == pytest.approx(mean, abs=1e-9)
    W = (MultiKrum(2, "all"))(Updates.of(X), {}, Ctx())[0].mixing
    assert W is not None
    assert not W[:, 6:].any(), "the minority task has weight 0"


@each
def test_groups_do_not_see_each_other(rule: Robust) -> None:
    X = torch.from_numpy(rows(10))
    tasks = ["a", "b"] * 5
    together = rule.on(X, tasks=tasks)[0]
    for task in "ab":
        members = [i for i, own in enumerate(tasks) if own == task]
        torch.testing.assert_close(together[members], rule.on(X[members])[0], rtol=1e-12, atol=1e-12)


@each
def test_a_group_with_too_few_rows_gets_no_update_and_it_is_said(rule: Robust) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    updates = Updates.of(torch.from_numpy(rows(5)), tasks=["a", "a", "a", "b", "b"])
    out, _ = rule(updates, {}, Ctx(1, log=lambda event, fields: said.append((event, fields))))
    assert out.X[:3].any()
    assert not out.X[3:].any()
    why = "2 rows found, expected at least 3"
    assert said == [("no update", {"rule": type(rule).__name__, "clients": "c3, c4", "why": why})]


@each
@pytest.mark.parametrize("f", [1, 2, 3])
def test_2f_rows_are_refused_and_2f_plus_1_are_not(rule: Robust, f: int) -> None:
    rule = type(rule)(f)
    reasons = [[*rule.unfit(Updates.of(torch.from_numpy(rows(k))))] for k in (2 * f, 2 * f + 1)]
    assert not reasons[1]
    assert f"needs at least {2 * f + 1} rows in a group, but x has {2 * f} (c0, " in reasons[0][0]


@each
@pytest.mark.parametrize(("a", "b"), [(5, 5), (2, 6)], ids=["enough", "too few"])
def test_rows_are_compared_in_the_blocks_that_they_share(rule: Robust, a: int, b: int) -> None:
    """Without groups: the head of a task among its holders, the encoder among all. A head of two holders rests."""
    blocks = (Block("encoder", (3,)), Block("heads.a", (2,), task="a"), Block("heads.b", (2,), task="b"))
    layout, X = Layout(blocks), torch.from_numpy(rows(8, d=7))
    present = torch.tensor([[True, i < a, i >= b] for i in range(8)])
    X[:, 3:5] *= present[:, 1:2]
    X[:, 5:7] *= present[:, 2:3]
    rule = type(rule)(within="all")
    out = rule.on(X, layout=layout, present=present)[0]
    for columns, some in ((slice(0, 3), slice(0, 8)), (slice(3, 5), slice(0, a)), (slice(5, 7), slice(b, 8))):
        alone = rule.on(X[some, columns])[0]
        torch.testing.assert_close(out[some, columns], alone, rtol=1e-12, atol=1e-12)
        assert bool(alone.any()) == (len(alone) > 2)
    assert not out[a:, 3:5].any()


def test_a_peer_clips_around_its_own_row_whatever_it_hears() -> None:
    X = torch.from_numpy(rows(4))
    X[1:3] = X[0] + 1.0
    X[3] = 1e30
    tasks = ["a", "a", "b", "b"]
    for rule in (ClipNorms() >> Mean(), CentredClip(steps=1) >> Mean()):
        updates = Updates.of(X, tasks=tasks)
        out, _ = AtPeer(rule, "c0")(updates, {"0": {}, "1": {}}, Ctx(1, peer="c0"))
        moved = (out.X[0] - X[0]).norm()
        assert 0 < float(moved) <= 3 / 4 * float((X[1] - X[0]).norm()) + 1e-9


def test_tasks_are_wanted_where_groups_are_formed_by_them() -> None:
    for rule in (Krum, CentredClip, Median):
        wanted = [rule(within=within).traits.wants for within in ("tasks", "all")]
        assert wanted == [{"extra:tasks"}, set()]


@pytest.mark.parametrize("count", range(1, 18))
def test_columns_are_sorted_and_nan_is_the_largest(count: int) -> None:
    X = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    X[count // 2, :7] = torch.nan
    assert torch.equal(in_order(X), X.nan_to_num(torch.inf).sort(0).values)


@pytest.mark.parametrize(("f", "robust"), [(None, True), (0, False), (1, True), (2, True)])
def test_a_rule_is_robust_if_one_row_may_be_hostile(f: int | None, robust: bool) -> None:
    assert Krum(f=f).robust == Median(f=f).robust == robust
