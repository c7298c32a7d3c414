"""Metrics of dense tasks: by hand, against torchmetrics and scikit-learn where their definition is the same, and what
must not change them: batch size, order, pixels without a label."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score

import fedloom.study
from fedloom.errors import DataError
from fedloom.tasks import DepthError, MaxF, MeanIoU, NormalError, OdsF, PixelAccuracy, PlainEdgeF, delta_m

SIZE = (12, 10)
MEASURES = {
    "semseg": lambda: MeanIoU(4),
    "saliency": MaxF,
    "normals": NormalError,
    "depth": DepthError,
    "edge": PlainEdgeF,
    "ods": lambda: OdsF(0.1, thresholds=9),
}


def example(kind: str, seed: int = 0, images: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    channels = {"semseg": 4, "saliency": 2, "normals": 3}.get(kind, 1)
    pred = torch.randn(images, channels, *SIZE, generator=rng)
    ignored = torch.rand(images, *SIZE, generator=rng) < 0.2
    ignored[0] = True
    if kind == "normals":
        labels = torch.randn(images, 3, *SIZE, generator=rng)
        labels[ignored.unsqueeze(1).expand_as(labels)] = 255.0
    elif kind == "depth":
        labels = 0.5 + 9 * torch.rand(images, 1, *SIZE, generator=rng)
        labels[ignored.unsqueeze(1)] = 255.0
    else:
        labels = torch.randint(0, max(channels, 2), (images, *SIZE), generator=rng)
        labels[ignored] = 255
    return pred, labels


def measured(kind: str, pred: torch.Tensor, labels: torch.Tensor, batch: int = 100) -> dict[str, float]:
    measure = MEASURES[kind]()
    for p, y in zip(pred.split(batch), labels.split(batch), strict=True):
        measure.update(p, y)
    return measure.all()


def as_logits(classes: list[int], count: int) -> torch.Tensor:
    """Predictions 1 x count x 1 x n of the given classes."""
    return torch.nn.functional.one_hot(torch.tensor(classes), count).float().T.view(1, count, 1, -1)


# What must not change a metric.


@pytest.mark.parametrize("kind", MEASURES)
@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 7), st.randoms(use_true_random=False))
def test_batch_size_and_order_change_nothing(kind, seed, batch, random):
    pred, labels = example(kind, seed)
    order = random.sample(range(len(pred)), len(pred))
    whole = measured(kind, pred, labels)
    assert measured(kind, pred[order], labels[order], batch) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("kind", MEASURES)
def test_pixels_without_a_label_change_nothing(kind):
    pred, labels = example(kind)
    ignored = (labels.view(len(labels), -1, *SIZE)[:, :1] == 255).expand_as(pred)
    other = pred.clone()
    if kind == "ods":  # suppression looks at neighbours: whole images only
        ignored = torch.zeros_like(ignored)
        ignored[0] = True
    other[ignored] = 3.0
    assert measured(kind, other, labels) == measured(kind, pred, labels)


@pytest.mark.parametrize("kind", MEASURES)
def test_padding_with_255_changes_nothing(kind):
    pred, labels = example(kind)
    labels = labels if kind != "ods" else labels.where(labels != 255, 0)
    wide = torch.nn.functional.pad(pred, (3, 2, 1, 4), value=2.0)
    assert measured(kind, wide, torch.nn.functional.pad(labels, (3, 2, 1, 4), value=255)) == measured(
        kind, pred, labels
    )


@pytest.mark.parametrize("kind", MEASURES)
def test_without_labels_a_metric_is_nan(kind):
    pred, labels = example(kind)
    assert math.isnan(MEASURES[kind]().compute())
    assert all(math.isnan(v) for v in measured(kind, pred, torch.full_like(labels, 255)).values())


@pytest.mark.parametrize("kind", MEASURES)
def test_inputs_are_not_changed_and_layouts_do_not_matter(kind):
    pred, labels = example(kind)
    before = pred.clone(), labels.clone()
    found = measured(kind, pred, labels)
    assert torch.equal(pred, before[0])
    assert torch.equal(labels, before[1])
    if kind != "normals":
        other = labels.squeeze(1) if labels.ndim == 4 else labels.unsqueeze(1)
        assert measured(kind, pred, other) == found
    if kind not in ("normals", "depth"):
        assert measured(kind, pred, labels.where(labels != 255, -1)) == found
    assert measured(kind, pred.clone().requires_grad_(), labels) == found


@pytest.mark.parametrize("kind", MEASURES)
def test_what_a_metric_keeps_does_not_grow(kind):
    def kept(measure):
        return sum(v.numel() if isinstance(v, torch.Tensor) else 1 for v in vars(measure).values())

    measure = MEASURES[kind]()
    before = kept(measure)
    measure.update(*example(kind))
    assert kept(measure) == before


@pytest.mark.parametrize("kind", sorted(MEASURES.keys() - {"ods"}))
def test_only_counts_and_sums_go_to_the_host(kind, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.numel()) or self)
    pred, labels = (x.repeat(*(1,) * (x.ndim - 2), 4, 4) for x in example(kind))
    MEASURES[kind]().update(pred, labels)
    assert moved
    assert max(moved) < len(pred) * 16 * SIZE[0] * SIZE[1]


@pytest.mark.parametrize("kind", MEASURES)
def test_labels_of_another_size_are_an_error(kind):
    pred, labels = example(kind)
    with pytest.raises(DataError, match=r"expected labels of shape 7 x .*12 x 10, found 7 x .*12 x 9"):
        MEASURES[kind]().update(pred, labels[..., :9])


# Classes.


def test_miou_by_hand():
    # Class 0: 1 of 2; class 1: 1 of 3; class 2: 0 of 1; class 3 occurs nowhere.
    pred, labels = as_logits([0, 1, 1, 1, 3], 4), torch.tensor([[[0, 0, 1, 2, 255]]])
    skip, zero, accuracy = MeanIoU(4), MeanIoU(4, absent="zero"), PixelAccuracy(4)
    for measure in (skip, zero, accuracy):
        measure.update(pred, labels)
    assert skip.compute() == pytest.approx((1 / 2 + 1 / 3) / 3)
    assert zero.compute() == pytest.approx((1 / 2 + 1 / 3) / 4)
    assert accuracy.compute() == 2 / 4
    assert skip.all() == {"miou": skip.compute(), "pixel_accuracy": 2 / 4}


@pytest.mark.parametrize("stray", [4, 17, 254, -2])
def test_stray_classes_are_an_error(stray):
    with pytest.raises(DataError, match=f"expected labels below 4, or 255 for none, found {stray}"):
        MeanIoU(4).update(torch.zeros(1, 4, 1, 2), torch.tensor([[[0, stray]]]))


def test_a_prediction_of_other_width_is_an_error():
    with pytest.raises(DataError, match="expected a prediction of 4 channels, found 3"):
        MeanIoU(4).update(torch.zeros(1, 3, 1, 1), torch.zeros(1, 1, 1))
    with pytest.raises(DataError, match="expected a prediction of 1 channel, found 2"):
        DepthError().update(torch.zeros(1, 2, 1, 1), torch.ones(1, 1, 1))
    with pytest.raises(DataError, match="expected a prediction of 1 or 2 channels, found 3"):
        MaxF().update(torch.zeros(1, 3, 1, 1), torch.ones(1, 1, 1))


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_miou_is_that_of_scikit_learn(seed):
    pred, labels = example("semseg", seed)
    valid = labels != 255
    truth, guess = labels[valid].numpy(), pred.argmax(1)[valid].numpy()
    expected = jaccard_score(truth, guess, average="macro")
    assert measured("semseg", pred, labels)["miou"] == pytest.approx(expected)


# Depth.


def test_depth_errors_by_hand():
    measure = DepthError()
    pred = torch.tensor([1.0, 5, -3, 9, 9]).view(1, 1, 1, 5)
    measure.update(pred, torch.tensor([2.0, 4, 1, 255, 80]).view(1, 1, 1, 5))
    assert measure.compute() == pytest.approx(math.sqrt((1 + 1 + 1) / 3))
    # The ratios are 2, 1.25 and 1e9 against 1.25, 1.5625 and 1.953125.
    assert [measure.all()[k] for k in ("mae", "rel")] == pytest.approx([1, (1 / 2 + 1 / 4 + 1) / 3])
    assert [measure.all()[k] for k in ("delta1", "delta2", "delta3")] == pytest.approx([0, 1 / 3, 1 / 3])


def test_the_three_deltas_are_powers_of_1_25():
    measure = DepthError()
    ratios = torch.tensor([1.2, 1.3, 1.6, 2.1])  # against 1.25, 1.5625 and 1.953125, whichever of the two is deeper
    measure.update(torch.cat([ratios, 1 / ratios]).view(1, 1, 1, 8), torch.ones(1, 1, 1, 8))
    assert [measure.all()[k] for k in ("delta1", "delta2", "delta3")] == [0.25, 0.5, 0.75]


def test_depth_from_logarithms_is_measured_in_metres():
    _, labels = example("depth")
    plain, log = DepthError(), DepthError(log=True)
    plain.update(labels + 0.25, labels)
    log.update((labels + 0.25).log1p(), labels)
    assert plain.compute() == pytest.approx(0.25)
    assert log.all() == pytest.approx(plain.all(), rel=1e-5)


def test_unknown_kinds_are_errors():
    with pytest.raises(ValueError, match="'skip' or 'zero'"):
        MeanIoU(3, absent="nan")
    with pytest.raises(ValueError, match="max_dist: expected a number above 0"):
        OdsF(0)


# Normals.


@pytest.mark.parametrize("degrees", [0.0, 1e-4, 11.0, 22.0, 29.0, 90.0, 180 - 1e-4, 180.0])
def test_angles_are_exact_and_blind_to_length(degrees):
    a = math.radians(degrees)
    measure = NormalError()
    measure.update(
        7 * torch.tensor([math.cos(a), math.sin(a), 0.0], dtype=torch.float64).view(1, 3, 1, 1),
        0.5 * torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1),
    )
    found = measure.all()
    assert found["merr"] == pytest.approx(degrees, rel=1e-9, abs=1e-9)
    assert [found[k] for k in ("within_11_25", "within_22_5", "within_30")] == [
        float(degrees < limit) for limit in (11.25, 22.5, 30)
    ]


def test_pixels_with_a_zero_normal_do_not_count():
    measure = NormalError()
    labels = torch.zeros(1, 3, 1, 3)
    labels[0, :, 0, 0] = torch.tensor([0.0, 0, 1])
    labels[0, 1, 0, 2] = 255
    measure.update(torch.tensor([0.0, 0, 2]).view(1, 3, 1, 1).expand(1, 3, 1, 3), labels)
    assert measure.compute() == 0
    assert measure.seen == 1


# Saliency and plain edges.


def best_f(truth, score, beta2, thresholds):
    scores = []
    for t in thresholds:
        hits = ((score >= t) & (truth == 1)).sum()
        precision, recall = hits / max((score >= t).sum(), 1), hits / max((truth == 1).sum(), 1)
        scores.append((1 + beta2) * precision * recall / max(beta2 * precision + recall, 1e-12))
    return float(max(scores))


def test_maxf_by_hand():
    p = torch.tensor([0.97, 0.72, 0.63, 0.22, 0.9])
    logits = torch.stack([torch.log(1 - p), torch.log(p)]).view(1, 2, 1, 5)
    labels = torch.tensor([[[1, 0, 1, 0, 255]]])
    measure = MaxF()
    measure.update(logits, labels)
    # From 0.75 up one of two is found and right; at 0.60 both with one false.
    f = max(1.3 * 1 * 0.5 / (0.3 * 1 + 0.5), 1.3 * (2 / 3) / (0.3 * 2 / 3 + 1))
    assert measure.all() == pytest.approx({"maxf": f, "max_iou": 2 / 3})
    one = MaxF()
    one.update(logits[:, 1:] - logits[:, :1], labels)
    assert one.all() == measure.all()


def test_maxf_pools_images_and_max_iou_averages_them():
    measure = MaxF()
    # Image 1: two right. Image 2: four predicted, one right. Image 3: nothing there, nothing predicted.
    measure.update(torch.tensor([9.0, 9, -9, -9]).view(1, 1, 1, 4), torch.tensor([[[1, 1, 0, 0]]]))
    measure.update(torch.tensor([9.0, 9, 9, 9]).view(1, 1, 1, 4), torch.tensor([[[1, 0, 0, 0]]]))
    measure.update(torch.full((1, 1, 1, 4), -9.0), torch.tensor([[[0, 0, 0, 0]]]))
    assert measure.all() == pytest.approx({"maxf": 1.3 * 0.5 / (0.3 * 0.5 + 1), "max_iou": (1 + 1 / 4) / 2})


def test_a_single_pixel_counts_in_full():
    measure = MaxF()
    measure.update(torch.tensor([9.0, -9, -9]).view(1, 1, 1, 3), torch.tensor([[[1, 0, 0]]]))
    assert measure.all() == {"maxf": pytest.approx(1), "max_iou": 1}
    classes = MeanIoU(3)
    classes.update(as_logits([2, 0], 3), torch.tensor([[[2, 0]]]))
    assert classes.compute() == 1
    edges = PlainEdgeF()
    edges.update(torch.tensor([9.0, -9, -9]).view(1, 1, 1, 3), torch.tensor([[[0.5, 0.4, 0]]]))  # from a half up
    assert edges.all() == pytest.approx(dict.fromkeys(("edge_f_plain", *PlainEdgeF.AT_HALF), 1))


def test_thresholds_at_which_there_is_nothing_in_any_image_have_no_iou():
    measure = MaxF()
    measure.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2))  # false up to 0.5
    assert measure.all() == {"maxf": 0, "max_iou": 0}


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_best_f_is_that_of_its_definition(seed):
    pred, labels = example("saliency", seed)
    valid = labels != 255
    score, truth = pred.double().softmax(1)[:, 1][valid], labels[valid]
    expected = best_f(truth, score, 0.3, [k / 20 for k in range(1, 20)])
    assert measured("saliency", pred, labels)["maxf"] == pytest.approx(expected)
    pred, labels = example("edge", seed)
    valid = labels != 255
    score, truth = pred[:, 0].double().sigmoid()[valid], labels[valid]
    expected = best_f(truth, score, 1.0, [k / 100 for k in range(1, 100)])
    assert measured("edge", pred, labels)["edge_f_plain"] == pytest.approx(expected)


def test_edges_at_one_half_by_hand():
    """Of four pixels said to be edges three are, and of five edges two are missed."""
    pred = torch.tensor([2.0, 1, 0, 3, -1, -2, -3, 9]).view(1, 1, 1, 8)
    measure = PlainEdgeF()
    measure.update(pred, torch.tensor([[[1, 1, 1, 0, 1, 1, 0, 255]]]))
    found = measure.all()
    assert [found[name] for name in PlainEdgeF.AT_HALF] == pytest.approx([3 / 4, 3 / 5, 2 / 3])
    assert found["edge_f_plain"] > found["edge_f1"]
    assert all(math.isnan(value) for value in PlainEdgeF().all().values())


def test_nothing_to_find_and_nothing_found_are_zero():
    for truth, guess in ((0, -9.0), (0, 9.0), (1, -9.0)):
        for measure in (MaxF(), PlainEdgeF(), OdsF(0.1)):
            measure.update(torch.full((1, 1, 4, 4), guess), torch.full((1, 4, 4), truth))
            assert measure.compute() == 0


def test_predictions_that_are_nan_are_never_positive():
    labels = torch.tensor([[[1, 0]]])
    measure = PlainEdgeF()
    measure.update(torch.tensor([9.0, math.nan]).view(1, 1, 1, 2), labels)
    assert measure.compute() == 1


# torchmetrics.


def test_delta_m_by_hand():
    base = {"semseg": 0.4, "depth": 0.5, "edge": 0.0}
    values = {"semseg": 0.5, "depth": 0.45, "edge": 0.7}
    assert delta_m(values, base, {"semseg": "max", "depth": "min", "edge": "max"}) == pytest.approx((25 + 10) / 2)
    assert fedloom.study.delta_m is delta_m
