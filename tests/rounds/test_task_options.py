"""Options of tasks in a recipe."""

from __future__ import annotations

import pytest

from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from fedloom.models.tasks.dense import depth_l1
from tests_support import load_recipe


def tasks_of(*changes: str):
    small = ("data.count=16", "data.test_count=2")
    return {t.name: t for t in build(load_recipe(*small, *changes, recipe="feddea/scenes")).federation.tasks}


def test_options_reach_the_tasks_loss_metrics_and_weights():
    before = tasks_of()
    after = tasks_of("tasks.depth={log: true, weight: 3}", "tasks.edge={ods: true, max_dist: 0.011}")
    assert (before["depth"].log, after["depth"].log, after["depth"].weight) == (False, True, 3)
    assert (before["edge"].primary, after["edge"].primary) == ("edge_f_plain", "odsf")
    assert after["semseg"] == before["semseg"]
    built = build(load_recipe("data.count=16", "data.test_count=2", "tasks.depth.weight=3", recipe="feddea/scenes"))
    assert built.federation.clients["depth-0"].tasks["depth"][1] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tasks.dept.log=true", "tasks.dept: unknown task. Did you mean 'depth'"),
        ("tasks.depth.lgo=true", r"tasks.depth.lgo: unknown option. Did you mean 'log'\? Options: weight, log, limit"),
        ("tasks.depth.log=maybe", "tasks.depth.log: 'maybe' found"),
        ("tasks.depth.channels=3", "tasks.depth.channels: unknown option"),
    ],
)
def test_wrong_options_are_named(change, message):
    with pytest.raises(RecipeError, match=message):
        tasks_of(change)


L1 = "fedloom.models.tasks.dense:depth_l1"


def test_a_loss_and_metrics_may_be_functions_of_modules():
    plain = tasks_of()["depth"]
    both = tasks_of(f"tasks.depth={{loss: '{L1}', metrics: {{far: '{L1}', near: ['{L1}', min]}}}}")["depth"]
    assert both.own_loss is depth_l1
    assert [(m.name, m.direction) for m in both.measured] == [("far", "max"), ("near", "min")]
    assert both.known == plain
    only_loss, only_metrics = (
        tasks_of(f"tasks.depth={{{change}}}")["depth"] for change in (f"loss: '{L1}'", f"metrics: {{far: '{L1}'}}")
    )
    assert (only_loss.own_loss, only_loss.measured) == (depth_l1, ())
    assert (only_metrics.own_loss, len(only_metrics.measured)) == (None, 1)
    assert tasks_of("tasks.depth={metrics: {}}")["depth"] == plain
    assert tasks_of("tasks.depth.metric=mae")["depth"].primary == "mae"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tasks.depth.loss=depth_l1", "tasks.depth.loss: 'depth_l1' found, expected package.module:name"),
        ("tasks.depth.loss=3", "tasks.depth.loss: 3 found, expected package.module:name"),
        (f"tasks.depth.loss=['{L1}', min, max]", r"tasks.depth.loss: \[.*\] found, expected package.module:name"),
        (
            f"tasks.depth.metrics=['{L1}']",
            r"tasks.depth.metrics: \[.*\] found, expected \{metric: package.module:name\}",
        ),
        ("tasks.depth.metrics={far: 3}", "tasks.depth.metrics.far: 3 found, expected package.module:name"),
        ("tasks.depth.metrics={far: [x, min]}", "tasks.depth.metrics.far: 'x' found, expected package.module:name"),
    ],
)
def test_wrong_names_of_losses_and_metrics_are_refused(change, message):
    with pytest.raises(RecipeError, match=message):
        tasks_of(change)
