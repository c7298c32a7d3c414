"""Prototypes, FINCH and contrastive losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedloom.methods.prototypes.maths import (
    ClusterPrototypes,
    PrototypeGenerator,
    Prototypes,
    adaptive_margin,
    aggregated,
    anchor_losses,
    anchor_margin,
    class_prototypes,
    cluster_contrast,
    cluster_prototypes,
    distances,
    finch,
    first_neighbours,
    fpl_loss,
    margin_cross_entropy,
    moved_anchors,
    nearest_gaps,
    prototype_pull,
    random_anchors,
    relaxed_contrast,
    trained_generator,
)


def t(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def y(*labels: int) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def directions(*degrees: float) -> torch.Tensor:
    """Points on circles of different sizes: FINCH looks at angles only."""
    a = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([a.cos(), a.sin()], 1) * (1 + torch.arange(len(a)))[:, None]


def test_class_prototypes_are_means_with_counts():
    p = class_prototypes(t([1, 2], [3, 4], [9, 9], [5, 5]), y(2, 2, -1, 0), 4)
    assert p.means.tolist() == [[5, 5], [0, 0], [2, 3], [0, 0]]
    assert p.counts.tolist() == [1, 0, 2, 0]
    assert p.known.tolist() == [True, False, True, False]
    empty = class_prototypes(torch.zeros(0, 2), y(), 2)
    assert not empty.known.any()


def test_aggregation_by_clients_counts_those_that_have_the_class():
    a, b, c = (
        Prototypes(t([v], [v]), t(n, m).flatten()) for v, n, m in ((1.0, [9], [1]), (4.0, [1], [0]), (7.0, [2], [0]))
    )
    assert aggregated([a, b, c], "clients").means.flatten().tolist() == pytest.approx([4, 1])
    assert aggregated([a, b, c]).means.flatten().tolist() == pytest.approx([(9 + 4 + 14) / 12, 1])


def test_prototype_pull_by_hand():
    p = Prototypes(t([0, 0], [1, 1], [9, 9]), t([3], [2], [0]).flatten())
    f, labels = t([3, 4], [1, 2], [5, 5], [6, 6]), y(0, 1, 2, -1)
    assert float(prototype_pull(f, labels, p)) == pytest.approx((9 + 16 + 0 + 1) / 4)
    assert float(prototype_pull(f, labels, p, "norm")) == pytest.approx((5 + 1) / 2)
    assert float(prototype_pull(f[2:], labels[2:], p)) == 0
    near = t([0, 0]).requires_grad_()
    prototype_pull(near, y(0), p, "norm").backward()
    assert near.grad.tolist() == [[0, 0]]


def test_distances_and_their_slope_at_zero():
    a = t([0, 0], [3, 4]).requires_grad_()
    d = distances(a, t([0, 0]))
    assert d.flatten().tolist() == pytest.approx([0, 5], abs=1e-5)
    d.sum().backward()
    assert a.grad.flatten().tolist() == pytest.approx([0, 0, 0.6, 0.8])


@pytest.mark.parametrize(
    ("degrees", "clusters"),
    [
        ([], []),
        ([10], [0]),
        ([10, 170], [0, 0]),
        ([0, 10, 90, 100, 95], [0, 0, 1, 1, 1]),
        ([0, 10, 25, 90, 91], [0, 0, 0, 1, 1]),
        ([90, 0, 91, 10], [0, 1, 0, 1]),
        # The nearest of 41 degrees is at 20, whose own nearest is at 0: a chain of links is one cluster.
        ([0, 20, 41, 200, 210], [0, 0, 0, 1, 1]),
    ],
)
def test_first_neighbours(degrees, clusters):
    assert first_neighbours(directions(*degrees)).tolist() == clusters


def test_finch_gets_coarser_and_stops_before_one_cluster():
    partitions = finch(directions(0, 2, 8, 10, 90, 92, 99, 101))
    assert [p.tolist() for p in partitions] == [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert [p.tolist() for p in finch(directions(0, 1, 3))] == [[0, 0, 0]]
    assert [p.tolist() for p in finch(directions(0, 1, 90, 91))] == [[0, 0, 1, 1]]
    assert [p.tolist() for p in finch(directions())] == [[]]


def clients() -> list[Prototypes]:
    """Class 0: two groups of two clients; class 1: one client; class 2: nobody."""
    first = directions(0, 2, 90, 92)
    return [
        Prototypes(torch.stack([first[k], t([k == 0, 3.0])[0], t([0, 0])[0]]), t([5], [float(k == 0)], [0]).flatten())
        for k in range(4)
    ]


def test_cluster_prototypes_per_class():
    clusters = cluster_prototypes(clients())
    first = directions(0, 2, 90, 92)
    assert clusters.labels.tolist() == [0, 0, 1]
    torch.testing.assert_close(clusters.points[:2], torch.stack([first[:2].mean(0), first[2:].mean(0)]))
    assert clusters.points[2].tolist() == [1, 3]
    unbiased = clusters.unbiased(3)
    torch.testing.assert_close(unbiased.means[0], first.mean(0))
    assert unbiased.known.tolist() == [True, True, False]
    nobody = cluster_prototypes([Prototypes(torch.zeros(2, 3), torch.zeros(2))])
    assert nobody.points.shape == (0, 3)


def test_fpl_loss_by_hand():
    clusters = ClusterPrototypes(t([2, 0], [0, 5], [0, -1]), y(0, 0, 1))
    f = t([3, 0], [0, 2], [7, 7])
    e = math.exp
    expected = [
        -math.log((e(2) + 1) / (e(2) + 2)),  # cosines 1, 0, 0 over T = 1/2
        -math.log(e(-2) / (1 + e(2) + e(-2))),  # class 1: cosines 0, 1, -1
    ]
    contrast = cluster_contrast(f, y(0, 1, 2), clusters, 0.5)
    assert float(contrast) == pytest.approx(sum(expected) / 2)
    pull = ((3 - 1) ** 2 + 2.5**2 + 0 + 3**2) / 4
    assert float(fpl_loss(f, y(0, 1, 2), clusters, 3, 0.5)) == pytest.approx(sum(expected) / 2 + pull)
    sharp = cluster_contrast(f.float(), y(0, 1, 2), ClusterPrototypes(clusters.points.float(), clusters.labels), 1e-3)
    assert torch.isfinite(sharp)


def test_losses_may_be_divided_by_the_whole_batch():
    """Two of four labelled examples are of a class with prototypes, a fifth has no label: half of the mean."""
    clusters = ClusterPrototypes(t([2, 0], [0, 5], [0, -1]), y(0, 0, 1))
    f, labels = t([3, 0], [0, 2], [7, 7], [1, 5], [9, 9]), y(0, 1, 2, 2, -1)
    e = math.exp
    contrast = -math.log((e(2) + 1) / (e(2) + 2)) - math.log(e(-2) / (1 + e(2) + e(-2)))
    squares = ((3 - 1) ** 2 + 2.5**2) / 2 + (0 + 3**2) / 2  # of an example, mean over its two dimensions
    assert float(cluster_contrast(f, labels, clusters, 0.5, "batch")) == pytest.approx(contrast / 4)
    assert float(fpl_loss(f, labels, clusters, 3, 0.5, "batch")) == pytest.approx((contrast + squares) / 4)
    assert float(fpl_loss(f, labels, clusters, 3, 0.5)) == pytest.approx((contrast + squares) / 2)
    p = Prototypes(t([0, 0], [1, 1], [9, 9]), t([3], [2], [0]).flatten())
    pulled, of = t([3, 4], [1, 2], [5, 5], [6, 6], [8, 8]), y(0, 1, 2, 2, -1)
    assert float(prototype_pull(pulled, of, p, over="batch")) == pytest.approx((25 / 2 + 1 / 2) / 4)
    assert float(prototype_pull(pulled, of, p, "norm", "batch")) == pytest.approx((5 + 1) / 4)
    unknown = prototype_pull(pulled[2:], of[2:], p, over="batch")
    assert float(unknown) == float(fpl_loss(f[4:], labels[4:], clusters, 3, 0.5, "batch")) == 0


def test_fpl_without_prototypes_or_negatives_is_zero():
    f = t([3, 0], [0, 2])
    none = ClusterPrototypes(torch.zeros(0, 2).double(), y())
    assert float(fpl_loss(f, y(0, 1), none, 2)) == 0
    alone = ClusterPrototypes(t([1, 1], [2, 0]), y(0, 0))
    assert float(cluster_contrast(f, y(0, 0), alone)) == pytest.approx(0)


def test_the_adaptive_margin_is_the_largest_gap():
    p = Prototypes(t([0, 0], [3, 4], [3, 5], [99, 99]), t([1], [1], [1], [0]).flatten())
    assert adaptive_margin([p]) == pytest.approx(5)
    assert adaptive_margin([p], limit=2) == 2
    one = Prototypes(t([1, 1], [0, 0]), t([1], [0]).flatten())
    assert (adaptive_margin([one]), len(nearest_gaps(one))) == (0, 0)


def test_margin_cross_entropy_by_hand():
    points = t([0, 0], [3, 4])
    loss = margin_cross_entropy(t([0, 0], [9, 9]), y(0, -1), points, margin=2)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(2 - 5)), rel=1e-5)
    assert float(margin_cross_entropy(t([0, 0]), y(-1), points)) == 0


def test_the_generator_learns_to_tell_classes_apart_and_leaves_its_start_alone():
    start = PrototypeGenerator(3, 4, seed=1)
    before = [p.detach().clone() for p in start.parameters()]
    rng = torch.Generator().manual_seed(0)
    uploaded = [
        Prototypes(3 * torch.eye(3, 4) + 0.1 * torch.randn(3, 4, generator=rng), torch.ones(3)) for _ in range(3)
    ]
    uploaded[0].counts[2] = 0
    a, b = (trained_generator(start, uploaded, epochs=100, lr=0.05, seed=5) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(before, start.parameters(), strict=True))
    assert torch.equal(a(), b())
    assert not torch.equal(a(), trained_generator(start, uploaded, epochs=100, lr=0.05, seed=6)())
    means, margin = aggregated(uploaded, "clients").means, adaptive_margin(uploaded)
    now, then = (float(margin_cross_entropy(means, y(0, 1, 2), g().detach(), margin)) for g in (a, start))
    assert now < 0.5 * then
    assert distances(means, a()).argmin(1).tolist() == [0, 1, 2]
    few, same = {"epochs": 3}, {"lr": 0.01, "batch_size": 10, "limit": 100.0, "seed": 0}
    assert torch.equal(trained_generator(start, uploaded, **few)(), trained_generator(start, uploaded, **few, **same)())
    nobody = trained_generator(start, [Prototypes(torch.zeros(3, 4), torch.zeros(3))])
    assert torch.equal(nobody(), start())


def test_a_generator_does_not_touch_the_global_stream():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    PrototypeGenerator(3, 4)
    random_anchors(3, 4)
    assert torch.equal(torch.rand(1), expected)


def test_anchors():
    anchors = random_anchors(5, 8, seed=2)
    assert anchors.shape == (5, 8)
    assert (anchors >= 0).all()
    assert torch.equal(anchors, random_anchors(5, 8, seed=2))
    assert not torch.equal(anchors, random_anchors(5, 8, seed=3))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        layers = [
            make(8) for _ in range(2) for make in (lambda d: nn.Linear(d, d), nn.BatchNorm1d, lambda d: nn.ReLU())
        ]
        assert torch.equal(anchors, nn.Sequential(*layers)(torch.randn(5, 8)))
    p = Prototypes(t([2], [4], [0]), t([1], [9], [0]).flatten())
    q = Prototypes(t([4], [0], [0]), t([5], [0], [0]).flatten())
    assert moved_anchors(t([1], [1], [1]), [p, q], momentum=0.75).flatten().tolist() == [1.5, 1.75, 1]


def test_the_anchor_margin_is_the_larger_mean_gap():
    anchors = t([0, 0], [0, 1], [0, 3])  # gaps 1, 1, 2
    assert anchor_margin(anchors) == pytest.approx(4 / 3)
    own = Prototypes(t([0, 0], [0, 7], [0, 0]), t([1], [1], [0]).flatten())
    assert anchor_margin(anchors, own) == pytest.approx(7)
    one = Prototypes(own.means, t([1], [0], [0]).flatten())
    assert anchor_margin(anchors, one) == pytest.approx(4 / 3)


def test_anchor_losses_by_hand():
    anchors, head = t([0, 0], [3, 4]), nn.Identity()
    pull, margin, calibration = anchor_losses(t([3, 0]), y(1), anchors, head, margin=1)
    assert float(pull) == pytest.approx(16 / 2)
    assert float(margin) == pytest.approx(math.log(1 + math.exp(4 + 1 - 3)))
    assert float(calibration) == pytest.approx((math.log(2) + math.log(1 + math.exp(-1))) / 2)


def test_relaxed_contrast_by_hand():
    # Class 0 at 0, 60 and 90 degrees, class 1 at 180. Positive of each: the least similar of its class.
    f = directions(0, 60, 90, 180)
    c = {d: math.cos(math.radians(d)) for d in (0, 30, 60, 90, 120, 180)}
    e = math.exp
    T = 0.5
    contrast = [
        math.log(1 + e((c[180] - c[90]) / T)),
        math.log(1 + e((c[120] - c[60]) / T)),
        math.log(1 + e((c[90] - c[90]) / T)),
        math.log(1 + (e(c[120] / T) + e(c[90] / T)) / e(1 / T)),  # alone: its own similarity, 1; two hardest negatives
    ]
    # The least similar other one reaches the threshold for the second (1/2, to the first) only.
    penalty = math.log(1 + e((c[60] - 1) / T))
    labels = y(0, 0, 0, 1)
    assert float(relaxed_contrast(f, labels, T, 0.4, weight=0)) == pytest.approx(sum(contrast) / 4)
    assert float(relaxed_contrast(f, labels, T, 0.4, weight=2)) == pytest.approx((sum(contrast) + 2 * penalty) / 4)
    assert float(relaxed_contrast(f, labels, T, 0.6)) == pytest.approx(sum(contrast) / 4)


def test_relaxed_contrast_with_more_pairs():
    f, T, e = directions(0, 60, 90, 180), 0.5, math.exp
    pairs = [[(1.0, -1.0), (0.5, -1.0), (0.0, -1.0)], [(1.0, -0.5), (0.5, -0.5), (math.sqrt(0.75), -0.5)],
             [(1.0, 0.0), (math.sqrt(0.75), 0.0), (0.0, 0.0)]]  # fmt: skip
    rows = [sum(math.log(1 + e((n - p) / T)) for p, n in row) / 3 for row in pairs]
    alone = math.log(1 + (e(-1 / T) + e(-0.5 / T) + 1) / e(1 / T))
    loss = relaxed_contrast(f, y(0, 0, 0, 1), T, 2.0, positives=3, negatives=9)
    assert float(loss) == pytest.approx((sum(rows) + alone) / 4)


@pytest.mark.parametrize("labels", [(0, 1, 2, 3), (0, 0, 0, 0), (-1, -1, -1, -1), (0, -1, 0, 1)])
def test_relaxed_contrast_is_finite_in_odd_batches(labels):
    f = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = relaxed_contrast(f, y(*labels))
    assert torch.isfinite(loss)
    if loss.requires_grad:
        loss.backward()
        assert torch.isfinite(f.grad).all()
    one = relaxed_contrast(f[:1].detach(), y(0))
    assert float(one) == pytest.approx(0, abs=1e-6)


def test_the_losses_pass_gradients_to_features_only():
    f = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    clusters = cluster_prototypes(clients())
    for loss in (
        fpl_loss(f, y(0, 1, 0, 1), clusters, 3),
        prototype_pull(f, y(0, 1, 0, 1), clusters.unbiased(3)),
        margin_cross_entropy(f, y(0, 1, 0, 1), t([0, 1], [1, 0]), 0.1),
        relaxed_contrast(f, y(0, 1, 0, 1)),
    ):
        (grad,) = torch.autograd.grad(loss, f)
        assert torch.isfinite(grad).all()
        assert grad.any()
