"""Options of tasks in a recipe."""

from __future__ import annotations

import pytest

from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from tests_support import load_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))


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
