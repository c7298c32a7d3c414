"""Local rules on prototypes: what a client collects and what its losses are, by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.errors import RecipeError
from fedloom.federation.runs import checkpoint
from fedloom.methods.prototypes.maths import anchor_losses, anchor_margin, relaxed_contrast
from fedloom.models.changes import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import MLP, ResNet
from fedloom.models.tasks.labels import Classification
from fedloom.training import (
    ClusterContrast,
    CollectPrototypes,
    LocalRule,
    PrototypePull,
    RelaxedContrast,
    SemanticAnchors,
    TapLevels,
    View,
)

# "depth" is no classification and "c" has three classes: tasks are numbered by their heads.
HEADS = nn.ModuleDict({"depth": nn.Conv2d(2, 1, 1), "c": nn.Linear(2, 3), "d": nn.Linear(2, 2)})


def t(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def batch(features: Tensor, told: Mapping[str, Tensor] | None = None, n: int = 0, **targets: Tensor) -> View:
    """The view of one step: encoder features and labels by task."""
    p = torch.zeros(1)
    heads = SimpleNamespace(heads=HEADS, encoder=SimpleNamespace(levels=[]))
    outputs = {task: torch.zeros(len(features), HEADS[task].weight.shape[0]) for task in targets}  # type: ignore[arg-type]
    view = View(p, p, p, (), broadcast=told or {}, outputs=outputs, targets=targets, losses=lambda: torch.zeros(n))
    view.module, view.features = heads, SimpleNamespace(now=features)  # type: ignore[assignment]
    return view


def told(points: Tensor, *labels: tuple[int, int]) -> dict[str, Tensor]:
    return {"prototypes": points, "prototype_labels": torch.tensor(labels, dtype=torch.int64).view(-1, 2)}


def y(*labels: int) -> Tensor:
    return torch.tensor(labels)


def collected(rule: LocalRule, state: Any, *views: View) -> tuple[Any, Tensor, Tensor]:
    """A round of these batches."""
    state = rule.begin(views[0], state)
    for view in views:
        rule.grad(view, state)
    state, provided = rule.finish(views[-1], state)
    return state, provided["prototypes"], provided["prototype_labels"]


FIRST = batch(t([9, 9], [9, 9]), c=y(0, 1), n=3)
SECOND = batch(t([2, 0], [4, 2]), c=y(2, 2), n=3)
THIRD = batch(t([8, 4]), c=y(1), n=3)


def test_prototypes_are_of_the_last_pass_over_the_data() -> None:
    state, means, labels = collected(CollectPrototypes(), {}, FIRST, SECOND, THIRD)
    assert means.tolist() == [[0, 0], [8, 4], [3, 1]]
    assert labels.tolist() == [[1, 0, 0], [1, 1, 1], [1, 2, 2]]
    assert state == {"examples": 3}
    # the number of examples is known by now
    SECOND.losses, THIRD.losses = None, None
    again, means, labels = collected(CollectPrototypes(), state, FIRST, SECOND, THIRD)
    assert again == state
    assert means.tolist() == [[0, 0], [8, 4], [3, 1]]


def test_prototypes_of_the_whole_round() -> None:
    state, means, labels = collected(CollectPrototypes(last_epoch=False), {}, FIRST, SECOND, THIRD)
    assert means.tolist() == [[9, 9], [8.5, 6.5], [3, 1]]
    assert labels[:, 2].tolist() == [1, 2, 2]
    assert state == {}


def test_unlabelled_examples_and_other_tasks_leave_no_trace() -> None:
    view = batch(t([2, 0], [4, 2], [6, 6]), c=y(-1, -1, 0), d=y(1, 0, -1), depth=torch.zeros(3, 1, 4, 4), n=3)
    _, means, labels = collected(CollectPrototypes(), {}, view)
    assert labels.tolist() == [[1, 0, 1], [1, 1, 0], [1, 2, 0], [2, 0, 1], [2, 1, 1]]
    assert means.tolist() == [[6, 6], [0, 0], [0, 0], [4, 2], [2, 0]]


RULES = [
    CollectPrototypes(),
    PrototypePull(),
    ClusterContrast(),
    SemanticAnchors(pull=1, margin=1, calibration=1),
    RelaxedContrast(),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "target", [torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64), torch.zeros(2)], ids=str
)
def test_a_client_without_a_classification_trains_as_without_the_rule(rule: LocalRule, target: Tensor) -> None:
    view = batch(t([1, 2], [3, 4]), told(t([1, 1]), (1, 0)), depth=target)
    view.losses = None
    state = rule.begin(view, rule.init(view.base))
    assert rule.penalty(view, state) is None
    rule.grad(view, state)
    state, provided = rule.finish(view, state)
    assert checkpoint.split_tree(state)
    assert {name: tuple(value.shape) for name, value in provided.items()} in (
        {},
        {"prototypes": (0, 0), "prototype_labels": (0, 3)},
    )


@pytest.mark.parametrize("rule", RULES[:-1], ids=repr)
def test_nothing_told_is_no_term(rule: LocalRule) -> None:
    view = batch(t([1, 2]), c=y(0))
    assert rule.penalty(view, rule.begin(view, {})) is None


def test_pull_is_to_the_prototypes_of_the_own_task() -> None:
    message = told(t([0, 0], [1, 1], [50, 50]), (1, 0), (1, 2), (2, 0))
    z = t([3, 4], [1, 2], [5, 5], [6, 6]).requires_grad_()
    view = batch(z, message, c=y(0, 2, 1, -1))  # class 1 has no prototype
    assert PrototypePull(2.0).penalty(view, {}).item() == pytest.approx(2 * (9 + 16 + 0 + 1) / 4)
    norm = PrototypePull(1.0, "norm").penalty(view, {})
    assert norm.item() == pytest.approx((5 + 1) / 2)
    norm.backward()
    torch.testing.assert_close(z.grad, t([0.3, 0.4], [0, 0.5], [0, 0], [0, 0]))
    both = batch(t([3, 4]), message, c=y(0), d=y(0))
    assert PrototypePull().penalty(both, {}).item() == pytest.approx(12.5 + (47**2 + 46**2) / 2)
    assert PrototypePull(0.0).penalty(view, {}) is None


def test_rules_may_divide_by_the_whole_batch() -> None:
    """One of four labelled examples is of a class with a prototype."""
    message = told(t([0, 0], [0, 2]), (1, 0), (1, 0))
    view = batch(t([3, 4], [1, 2], [5, 5], [6, 6], [7, 7]), message, c=y(0, 1, 1, 2, -1))
    for over, count in (("known", 1), ("batch", 4)):
        pull = PrototypePull(2.0, over=over).penalty(view, {})  # type: ignore[arg-type]
        assert pull.item() == pytest.approx(2 * (9 + 9) / 2 / count)  # the mean of class 0 is (0, 1)
        contrast = ClusterContrast(1.0, over).penalty(view, {})  # type: ignore[arg-type]
        assert contrast.item() == pytest.approx((9 + 9) / 2 / count)  # without negatives only the pull is left


def test_cluster_contrast_by_hand() -> None:
    message = told(t([2, 0], [0, 2], [-3, 0]), (1, 0), (1, 0), (1, 1))
    view = batch(t([1, 0]), message, c=y(0))
    own, other = math.exp(1) + 1, math.exp(-1)
    expected = -math.log(own / (own + other)) + (0 + 1) / 2  # the mean of class 0 is (1, 1)
    assert ClusterContrast(1.0).penalty(view, {}).item() == pytest.approx(expected)


def test_anchors_use_the_margin_of_the_last_round() -> None:
    anchors = t([0, 0], [1, 0])
    rule = SemanticAnchors(pull=2.0, margin=3.0, calibration=4.0)
    view = batch(t([1, 2], [9, 0]), told(anchors, (2, 0), (2, 1)), d=y(0, 1))

    def expected(margin: float) -> float:
        terms = anchor_losses(view.features.now, y(0, 1), anchors, HEADS["d"], margin)  # type: ignore[union-attr]
        return sum(weight * term.item() for weight, term in zip((2, 3, 4), terms, strict=True))

    state = rule.begin(view, {})
    assert rule.penalty(view, state).item() == pytest.approx(expected(1.0))
    rule.grad(view, state)
    state, provided = rule.finish(view, state)
    assert checkpoint.split_tree(state)
    assert provided["prototypes"].tolist() == [[1, 2], [9, 0]]
    state = rule.begin(view, state)
    assert rule.penalty(view, state).item() == pytest.approx(expected(math.sqrt(64 + 4)))
    assert anchor_margin(anchors) == 1.0
    few = batch(t([1, 2]), told(anchors[:1], (2, 0)), d=y(0))
    assert rule.penalty(few, rule.begin(few, {})) is None


def test_relaxed_contrast_adds_up_levels() -> None:
    z, level = torch.randn(6, 4), torch.randn(6, 3)
    view = batch(z, c=y(0, 0, 1, 1, 2, -1))
    labels = y(0, 0, 1, 1, 2, -1)
    alone = RelaxedContrast().penalty(view, {}).item()
    assert alone == pytest.approx(relaxed_contrast(z, labels).item())
    tap = SimpleNamespace(seen=level)
    view.module.encoder.levels.append(tap)  # type: ignore[union-attr]
    both = RelaxedContrast(0.5).penalty(view, {}).item()
    assert both == pytest.approx(0.5 * (alone + relaxed_contrast(level, labels).item()), rel=1e-5)
    assert tap.seen is None
    tap.seen = level
    mean = RelaxedContrast(0.5, over_levels="mean").penalty(view, {}).item()
    assert mean == pytest.approx(both / 2)


def resnet() -> MultiTask:
    torch.manual_seed(0)
    return MultiTask(ResNet((1, 16, 16), 2, "batch"), [Classification("c", 3)])


def test_taps_keep_the_stages_in_training_only() -> None:
    model = resnet()
    TapLevels()(model, (1, 16, 16))
    twin = copy.deepcopy(model)
    x = torch.rand(5, 1, 16, 16)
    model.eval()(x)
    assert [tap.seen for tap in model.encoder.levels] == [None] * 3  # type: ignore[union-attr]
    model.train()(x)
    assert [tuple(tap.seen.shape) for tap in model.encoder.levels] == [(5, 2), (5, 4), (5, 8)]  # type: ignore[union-attr]
    assert [tap.seen for tap in twin.encoder.levels] == [None] * 3  # type: ignore[union-attr]
    twin.train()(x)
    assert torch.equal(twin.encoder.levels[0].seen, model.encoder.levels[0].seen)  # type: ignore[union-attr, index]


def test_taps_by_name() -> None:
    model = resnet()
    TapLevels(("norm",))(model, (1, 16, 16))
    seen: list[Tensor] = []
    model.encoder.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model.train()(torch.rand(3, 1, 16, 16))
    torch.testing.assert_close(model.encoder.levels[0].seen, seen[0].mean((2, 3)))  # type: ignore[union-attr, index]
    with pytest.raises(RecipeError, match="'stages.7' is not a map of the encoder; its maps: stem, norm"):
        TapLevels(("stages.7",))(resnet(), (1, 16, 16))
    flat = MultiTask(MLP((4,), [3]), [Classification("c", 3)])
    TapLevels()(flat, (4,))
    assert flat.encoder.levels == []
    flat.encoder = Linearised(flat.encoder)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="cannot be combined"):
        TapLevels()(flat, (4,))
