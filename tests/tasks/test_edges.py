"""odsF and its parts: thinning, suppression across edges, matching within a distance."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from fedloom.models.tasks.edges import faded, pairs, suppress, thin
from fedloom.tasks import OdsF, PlainEdgeF

HEIGHT, WIDTH = 48, 64
DIAGONAL = math.hypot(HEIGHT, WIDTH)  # 80


def outlines(seed: int, wide: int = 0, margin: int = 8) -> torch.Tensor:
    """Boundaries of random regions, B x H x W, none near the border."""
    rng = np.random.default_rng(seed)
    field = ndimage.gaussian_filter(rng.normal(size=(2, HEIGHT, WIDTH)), (0, 4, 4))
    edges = np.stack([ndimage.binary_dilation(f > 0.02) ^ (f > 0.02) for f in field])
    if wide:
        edges = np.stack([ndimage.binary_dilation(e, iterations=wide) for e in edges])
    edges[:, :margin] = edges[:, -margin:] = edges[:, :, :margin] = edges[:, :, -margin:] = False
    return torch.from_numpy(edges.astype(np.float32))


def logits(edges: torch.Tensor, high: float = 3.0, low: float = -3.0) -> torch.Tensor:
    return torch.where(edges > 0, high, low).unsqueeze(1)


def odsf(pred: torch.Tensor, labels: torch.Tensor, max_dist: float = 0.0075, thresholds: int = 99) -> float:
    measure = OdsF(max_dist, thresholds)
    measure.update(pred, labels)
    return measure.compute()


@pytest.mark.parametrize("wide", [0, 1, 2])
@pytest.mark.parametrize(("high", "low"), [(9.0, -9.0), (1.0, 0.5), (-1.0, -2.0)])
def test_a_perfect_map_scores_one(wide, high, low):
    edges = outlines(0, wide)
    assert odsf(logits(edges, high, low), edges) == 1


def test_a_perfect_map_scores_one_at_the_border_too():
    edges = torch.zeros(1, 20, 30)
    edges[0, 0] = edges[0, :, 29] = edges[0, 10] = 1
    assert odsf(logits(edges), edges) == 1


def test_a_map_shifted_by_more_scores_low():
    columns = torch.zeros(1, HEIGHT, WIDTH)
    columns[0, 5:-5, 10:-10:12] = 1
    moved = logits(columns.roll(3, 2))
    assert odsf(moved, columns, 3.01 / DIAGONAL) == 1
    assert odsf(moved, columns, 2.99 / DIAGONAL) < 0.1
    edges = outlines(1)
    assert odsf(logits(edges.roll((4, 4), (1, 2))), edges, 1.5 / DIAGONAL) < 0.5


def test_a_prediction_counts_once():
    # Two parallel lines for one true one: all found, half of what is predicted is false.
    truth, pred = torch.zeros(1, 30, 30), torch.zeros(1, 30, 30)
    truth[0, 15] = 1
    pred[0, 13] = pred[0, 17] = 1
    assert odsf(logits(pred), truth, 3 / math.hypot(30, 30)) == pytest.approx(2 * 0.5 / 1.5)


def test_hits_are_pooled_over_images_per_threshold():
    # Image 1 is right at every threshold up to 0.9, image 2 wrong up to 0.4: at 0.5 both are right.
    line = torch.zeros(2, 20, 20)
    line[:, 10] = 1
    soft = torch.full((2, 1, 20, 20), 1e-4)
    soft[0, 0, 10], soft[1, 0, 10], soft[1, 0, 3] = 0.9, 0.6, 0.4
    assert odsf(torch.logit(soft), line) == 1
    soft[1, 0, 3] = 0.65  # now the false line outlasts the true one: P = 20/40 in image 2 up to 0.6
    assert odsf(torch.logit(soft), line) == pytest.approx(2 * 40 / (60 + 40))


def test_a_blurred_line_counts_as_a_line():
    truth = torch.zeros(1, 40, 40)
    truth[0, :, 20] = 1
    soft = torch.from_numpy(ndimage.gaussian_filter(truth[0].numpy().astype(np.float64), 1.5))
    pred = torch.logit((soft / soft.max()).clamp(1e-3, 0.999)).view(1, 1, 40, 40)
    assert odsf(pred, truth, 0.001) == 1
    plain = PlainEdgeF()
    plain.update(pred[:, :, :, 1:], truth[:, :, :-1])  # one pixel off
    assert plain.compute() < 0.7
    assert odsf(pred[:, :, :, 1:], truth[:, :, :-1], 0.02) == 1


@pytest.mark.parametrize("shape", [(20, 30), (7, 30), (12, 3), (1, 1), (2, 9)])
def test_the_border_fades_as_in_the_loops_of_the_public_code(shape):
    """E(x) and E(W - 1 - x) times x / s for x < s = min(5, W / 2, H / 2), and the same along y."""
    peaks = np.random.default_rng(1).uniform(size=shape)
    expected, (h, w) = peaks.copy(), shape
    s = min(5, w // 2, h // 2)
    for x in range(s):
        expected[:, x] *= x / s
        expected[:, w - 1 - x] *= x / s
    for y in range(s):
        expected[y] *= y / s
        expected[h - 1 - y] *= y / s
    np.testing.assert_allclose(faded(peaks), expected)


def test_a_line_beside_the_border_counts_up_to_its_faded_probability():
    """0.9 at column 2 of 20 fades to 0.9 x 2/5 = 0.36, its ends to 0: 18 of 20 pixels are hit, none is wrong."""
    truth = torch.zeros(1, 20, 20)
    truth[0, :, 2] = 1
    pred = torch.logit(torch.where(truth > 0, 0.9, 1e-4)).unsqueeze(1)
    assert odsf(pred, truth) == 1
    measure = OdsF(0.0075, protocol="seism")
    measure.update(pred, truth)
    assert measure.compute() == pytest.approx(2 * 18 / (18 + 20))
    assert measure.predicted[:36].tolist() == sorted(measure.predicted[:36].tolist(), reverse=True)
    assert measure.predicted[0] == 18
    assert not measure.predicted[36:].any()


def test_labels_from_a_half_up_are_edges():
    edges = outlines(2)
    assert odsf(logits(edges), edges * 0.5, thresholds=5) == 1
    assert odsf(logits(edges), edges * 0.49, thresholds=5) == 0


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 2.5), st.floats(0.1, 0.95))
def test_thinning_is_that_of_scikit_image(seed, blur, share):
    morphology = pytest.importorskip("skimage.morphology")
    rng = np.random.default_rng(seed)
    field = ndimage.gaussian_filter(rng.normal(size=(3, 23, 31)), (0, blur, blur))
    maps = field > np.quantile(field, share)
    before = maps.copy()
    found = thin(maps)
    assert np.array_equal(maps, before)
    assert np.array_equal(found, np.stack([morphology.thin(m) for m in maps]))


def test_more_maps_than_a_number_has_bits_are_thinned_alike():
    field = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(23, 31)), 1)
    maps = field > np.linspace(field.min(), field.max(), 130)[:, None, None]
    assert np.array_equal(thin(maps), np.concatenate([thin(one[None]) for one in maps]))
    assert thin(maps[:0]).shape == (0, 23, 31)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.5, 4.0), st.floats(0.02, 0.6))
def test_pairs_are_as_many_as_an_assignment_finds(seed, radius, share):
    rng = np.random.default_rng(seed)
    # Sets that shrink, with some pixels that go and come again, as thinned maps at rising thresholds have them.
    maps = (rng.random((9, 11)) > np.linspace(1 - share, 1, 5)[:, None, None]) ^ (rng.random((5, 9, 11)) < 0.03)
    truth = rng.random((9, 11)) < share
    assert pairs(maps, truth, radius).tolist() == [assigned(one, truth, radius) for one in maps]
    assert pairs(maps[::-1], truth, radius).tolist() == [assigned(one, truth, radius) for one in maps[::-1]]


def assigned(found, truth, radius):
    """The most one-to-one pairs within a distance, from the table of all distances."""
    a, b = np.argwhere(found), np.argwhere(truth)
    near = ((a[:, None] - b[None]) ** 2).sum(-1) <= radius**2
    return int(near[linear_sum_assignment(~near)].sum())


def by_hand(soft, labels, max_dist, thresholds):
    """(hits, predicted) per threshold and true pixels of one image, each threshold alone and by slow means."""
    morphology = pytest.importorskip("skimage.morphology")
    known = labels != 255
    line, crests = morphology.thin((labels >= 0.5) & known), np.where(known, suppress(soft), 0)
    maps = [morphology.thin(crests >= (i + 1) / (thresholds + 1)) for i in range(thresholds)]
    radius = max_dist * math.hypot(*labels.shape)
    return [assigned(m, line, radius) for m in maps], [int(m.sum()) for m in maps], int(line.sum())


def counted(soft, labels, max_dist, thresholds):
    measure = OdsF(max_dist, thresholds)
    measure.update(torch.logit(torch.from_numpy(soft))[None, None], torch.from_numpy(labels.astype(np.float32))[None])
    return measure.hits.tolist(), measure.predicted.tolist(), measure.actual


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0, 2), st.integers(1, 12), st.booleans())
def test_counts_are_those_of_each_threshold_alone(seed, blur, thresholds, coarse):
    rng = np.random.default_rng(seed)
    soft = ndimage.gaussian_filter(rng.random((17, 22)), blur)
    soft = np.interp(soft, (soft.min(), soft.max()), (0.001, 0.999))
    labels = (rng.random((17, 22)) < rng.choice([0, 0.1, 0.5])).astype(float)
    labels[5:9, 3:9] = 255
    if coarse:  # few values, so that most thresholds are alike, and one between them and 1 leaves nothing
        soft = soft.round(1).clip(0.001, 0.8)
    assert counted(soft, labels, 0.1, thresholds) == by_hand(soft, labels, 0.1, thresholds)


def test_counts_on_real_boundaries_are_those_of_each_threshold_alone():
    file = Path(__file__).parents[3] / "shared" / "data" / "bsds500.npz"
    if not file.exists():
        pytest.skip("the small BSDS500 is not here")
    with np.load(file) as arrays:
        labels, image = arrays["edge_test"][:2] >= 128, arrays["image_test"][:2].mean(-1)
    for one, picture in zip(labels, image, strict=True):
        steep = ndimage.gaussian_gradient_magnitude(picture, 1.0)
        soft = 1 / (1 + np.exp(2 - 2 * steep / steep.mean()))
        assert counted(soft, one.astype(float), 0.011, 9) == by_hand(soft, one.astype(float), 0.011, 9)


def test_suppression_leaves_flat_maps():
    assert np.array_equal(suppress(np.full((5, 7), 0.3)), np.full((5, 7), 0.3))
    one = np.full((1, 1), 0.5)
    assert np.array_equal(suppress(one), one)


def test_suppression_looks_along_the_axis_of_largest_curvature():
    """On a sum of Gaussians, whose smoothed map is known in closed form: each variance grows by 4."""
    side = np.arange(48.0)
    y, x = np.meshgrid(side, side, indexing="ij")
    rng = np.random.default_rng(3)
    soft, hessian = np.zeros((48, 48)), np.zeros((48, 48, 2, 2))
    for _ in range(6):
        centre, turn = rng.uniform(12, 36, 2), rng.uniform(0, np.pi)
        axes = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        covariance = axes @ np.diag([9.0, 60.0]) @ axes.T
        off = np.stack([y - centre[0], x - centre[1]], -1)
        soft += np.exp(-0.5 * np.einsum("hwi,ij,hwj->hw", off, np.linalg.inv(covariance), off))
        wider = np.linalg.inv(covariance + 4 * np.eye(2))
        size = np.sqrt(np.linalg.det(covariance) * np.linalg.det(wider))
        slope = off @ wider
        bump = size * np.exp(-0.5 * (slope * off).sum(-1))
        hessian += bump[..., None, None] * (slope[..., None] * slope[..., None, :] - wider)
    curved, directions = np.linalg.eigh(hessian)
    most = np.abs(curved).argmax(-1)
    dy, dx = np.moveaxis(np.take_along_axis(directions, most[..., None, None], -1)[..., 0], -1, 0)
    sampled = []
    for sign in (1, -1):
        a, b = (y + sign * dy).clip(0, 47), (x + sign * dx).clip(0, 47)
        i, j = np.floor(a).astype(int).clip(0, 46), np.floor(b).astype(int).clip(0, 46)
        p, q = a - i, b - j
        sampled.append(
            (1 - p) * ((1 - q) * soft[i, j] + q * soft[i, j + 1])
            + p * ((1 - q) * soft[i + 1, j] + q * soft[i + 1, j + 1])
        )
    margin = soft * 1.01 - np.maximum(*sampled)
    least, largest = np.moveaxis(np.sort(np.abs(curved), -1), -1, 0)
    inside = (y > 9) & (y < 38) & (x > 9) & (x < 38)
    clear = inside & (np.abs(margin) > 2e-3) & (largest - least > 0.02 * largest)
    assert clear.sum() > 0.8 * inside.sum()
    kept = suppress(soft) > 0
    assert np.array_equal(kept[clear], margin[clear] >= 0)
    assert 0.1 < kept[clear].mean() < 0.9
