"""The dense tasks as a whole: names, weights, heads, and the way from loss to metric."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from fedloom import tasks
from fedloom.errors import DataError, RecipeError
from fedloom.models.tasks.dense import as_label, edge_bce
from fedloom.tasks import Classification, DenseTask, Depth, Edge, HumanParts, Normals, Regression, Saliency, Semseg

TASKS = [
    Semseg("semseg", 5),
    HumanParts("parts"),
    Saliency("sal"),
    Saliency("sal1", channels=1),
    Normals("normals"),
    Depth("depth"),
    Depth("log", log=True),
    Edge("edge"),
    Edge("ods", ods=True, thresholds=9),
]
each = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def labels(task: DenseTask, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    if task.label == "classes":
        return torch.randint(0, task.channels, (2, 16, 24), generator=rng)
    if task.label == "binary":
        return (torch.rand(2, 1, 16, 24, generator=rng) < 0.1).float()
    if task.label == "normals":
        return torch.nn.functional.normalize(torch.randn(2, 3, 16, 24, generator=rng), dim=1)
    return 0.5 + 9 * torch.rand(2, 1, 16, 24, generator=rng)


def perfect(task: DenseTask, target: torch.Tensor) -> torch.Tensor:
    """Return what a head would have to give for these labels."""
    if task.label == "classes":
        return torch.nn.functional.one_hot(target, task.channels).movedim(-1, 1) * 20.0
    if task.label == "binary":
        z = 20 * target - 10
        return torch.cat([-z / 2, z / 2], 1) if task.channels == 2 else z
    return target.log1p() if task.name == "log" else target


def test_default_weights_and_primary_metrics_are_those_of_the_benchmarks():
    assert {t.kind: (t.weight, t.primary, t.metrics[t.primary]) for t in TASKS[:8]} == {
        "semseg": (1, "miou", "max"),
        "human_parts": (2, "miou", "max"),
        "saliency": (5, "maxf", "max"),
        "normals": (10, "merr", "min"),
        "depth": (1, "rmse", "min"),
        "edge": (50, "edge_f_plain", "max"),
    }
    assert [t.channels for t in TASKS[1:6]] == [7, 2, 1, 3, 1]
    assert TASKS[-1].primary == "odsf"
    assert list(TASKS[-1].metrics) == ["odsf", "edge_f_plain", "edge_precision", "edge_recall", "edge_f1"]


def test_dense_tasks_say_so():
    assert all(task.dense for task in TASKS)
    assert not Classification("t", 3).dense


@each
def test_metrics_come_under_their_names(task):
    metric = task.metric()
    assert list(metric.compute()) == list(task.metrics)
    assert all(math.isnan(v) for v in metric.compute().values())
    assert task.primary in task.metrics
    assert set(task.metrics.values()) <= {"max", "min"}
    assert all(name.isidentifier() and name == name.lower() for name in (task.kind, *task.metrics))


@each
def test_a_perfect_prediction_is_measured_as_perfect(task):
    target = labels(task)
    metric = task.metric()
    metric.update(perfect(task, target), target)
    for name, value in metric.compute().items():
        wanted = 1 if task.metrics[name] == "max" else 0
        assert value == pytest.approx(wanted, abs=1e-4), name
    assert task.loss(perfect(task, target), target).item() == pytest.approx(0, abs=1e-3)


@each
def test_tasks_are_plain_data(task):
    assert pickle.loads(pickle.dumps(task)) == task
    assert replace(task, weight=3.0).weight == 3
    assert hash(task) == hash(replace(task))


def test_the_head_is_that_of_the_papers():
    head = Semseg("s", 40).head(96)
    assert head(torch.zeros(2, 96, 3, 5)).shape == (2, 40, 12, 20)
    assert [tuple(p.shape) for p in head.parameters()] == [
        *((96, 48, 2, 2), (48,), (48, 24, 2, 2), (24,)),
        *((40, 24, 1, 1), (40,)),
    ]
    assert Depth("d").head(2)(torch.zeros(1, 2, 1, 1)).shape == (1, 1, 4, 4)
    for features, half, quarter in ((1, 1, 1), (2, 1, 1), (5, 2, 1), (8, 4, 2), (11, 5, 2)):
        kernels = [tuple(v.shape) for v in Depth("d").head(features).parameters() if v.ndim == 4]
        assert kernels == [(features, half, 2, 2), (half, quarter, 2, 2), (1, quarter, 1, 1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normals("n", 1), "task 'n', channels: expected 3 for normals, found 1"),
        (lambda: Depth("d", 3), "task 'd', channels: expected 1 for depth, found 3"),
        (lambda: Saliency("s", 3), "task 's', channels: expected 1 or 2 for saliency, found 3"),
    ],
)
def test_channels_that_make_no_sense_are_errors(make, message):
    with pytest.raises(RecipeError, match=message):
        make()


def test_errors_of_labels_name_the_task():
    with pytest.raises(DataError, match="task 'semseg': expected labels below 5, or 255 for none, found 7"):
        Semseg("semseg", 5).metric().update(torch.zeros(1, 5, 1, 1), torch.full((1, 1, 1), 7))


def test_pixels_of_255_are_in_no_confusion_and_only_tasks_with_classes_have_one():
    metric = Semseg("s", 3).metric()
    metric.update(torch.eye(3).view(1, 3, 1, 3), torch.tensor([[[0, 2, 255]]]))
    assert metric.confusion.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert Depth("d").metric().confusion is None
    other = Regression("r").metric()
    assert other.confusion is None
    assert other.cheap() is other  # nothing of it takes long


def test_only_odsf_is_left_out_of_what_is_cheap():
    metrics = {task.name: task.metric() for task in TASKS}
    assert [name for name, metric in metrics.items() if metric.cheap() is not metric] == ["ods"]
    assert set(metrics["ods"].cheap().compute()) == set(metrics["ods"].compute()) - {"odsf"}


def test_absent_classes_may_count_as_zero():
    target = torch.zeros(1, 2, 2, dtype=torch.int64)
    for absent, expected in (("skip", 1.0), ("zero", 0.2)):
        metric = Semseg("s", 5, absent=absent).metric()
        metric.update(perfect(Semseg("s", 5), target), target)
        assert metric.compute()["miou"] == pytest.approx(expected)


def test_variants_of_the_losses():
    rng = torch.Generator().manual_seed(0)
    z, y = torch.randn(1, 1, 4, 4, generator=rng), torch.ones(1, 4, 4)
    y[0, 0] = 0
    thesis = Edge("e", positive_weight=10, negative_weight=1)
    assert thesis.loss(z, y) == edge_bce(z, y, 10, 1)
    assert thesis.loss(z, y) > Edge("e").loss(z, y)
    depth = torch.rand(1, 1, 4, 4, generator=rng) + 0.5
    assert Depth("d", log=True).loss(z, depth).item() == pytest.approx((z - depth.log1p()).abs().mean().item())


def test_public_names_exist():
    assert set(tasks.__all__) >= set(dir(tasks))
    assert all(getattr(tasks, name) is not None for name in tasks.__all__)


def test_a_prediction_in_the_form_of_the_label():
    output = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(as_label(Semseg("t", 3), output), output.argmax(0))
    torch.testing.assert_close(as_label(Normals("t"), output).norm(dim=0), torch.ones(2, 4))
    assert torch.equal(as_label(Depth("t"), output[:1]), output[:1])
    torch.testing.assert_close(as_label(Depth("t", log=True), output[:1]), output[:1].expm1())
    torch.testing.assert_close(as_label(Saliency("t", channels=1), output[:1]), output[:1].double().sigmoid())
    torch.testing.assert_close(as_label(Saliency("t"), output[:2]), output[:2].double().softmax(0)[1:])
