"""Runs that could measure nothing are refused before they train; what cannot be measured beside the rest is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.engines.flower.nodes import NodeConfig, about, build_at, build_from
from fedloom.errors import RecipeError
from fedloom.experiments import grid_run
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.progress import Progress
from tests_support import QUICK, Quick, load_recipe

NOWHERE = "partition.val_fraction=0"


class Heard(Progress):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)


@pytest.fixture
def arrays(tmp_path: Path) -> Callable[..., fedloom.Recipe]:
    """A recipe of two tasks, `whole` and `part`; labels of these tasks and splits are missing."""

    def make(*changes: str, missing: tuple[str, ...] = ()) -> fedloom.Recipe:
        rng = np.random.default_rng(0)
        values: dict[str, Any] = {}
        for split, count in (("train", 40), ("test", 20)):
            values[f"x_{split}"] = rng.random((count, 4, 4), dtype=np.float32)
            for task in ("whole", "part"):
                labels = np.arange(count) % 2
                values[f"{task}_{split}"] = np.full(count, -1) if f"{task}_{split}" in missing else labels
        np.savez(tmp_path / "set.npz", **values)
        labels = {task: f"{task}_{{split}}" for task in ("whole", "part")}
        data = {"name": "arrays", "path": str(tmp_path / "set.npz"), "images": "x_{split}", "labels": labels}
        partition = {"name": "iid", "clients": 2, "val_fraction": 0.2}
        recipe = {"name": "t", "data": data, "partition": partition, "model": "mlp", "method": "fedavg"}
        return load(recipe, (*QUICK[1:], *changes))

    return make


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["evaluation.models=[personal]"], "evaluation.models: personal found, but fedavg .* add global"),
        (["evaluation.models=[trained]"], "evaluation.models: trained found, but fedavg .* add global"),
        (["evaluation.models=[personal, trained]"], "evaluation.models: personal, trained found, .* the global model"),
        (["method=local", "evaluation.models=[global]"], "evaluation.models: global found, but local .* personal"),
        (["method=fedper", "evaluation.models=[global, trained]"], "fedper .* personal model of each client"),
        (["method=cfl", "evaluation.models=[global]"], "cfl produces only the personal model of each client"),
        (
            ["peers={}", "evaluation.models=[trained]"],
            "evaluation.models: .*trained.* found, but peers have 'personal'",
        ),
        (["peers={}", "evaluation.models=[global]"], "evaluation.models: .*global.* found, but peers have 'personal'"),
        (["evaluation.models=[]"], r"evaluation.models: \[\] found, expected a list .* with at least 1"),
        (
            ["evaluation.splits=[]"],
            r"evaluation.splits: \[\] found, expected a list .*'val' or 'test'.* with at least 1",
        ),
        ([NOWHERE, "evaluation.splits=[val]"], "evaluation.splits: val found, but no client has val .* possible: test"),
        ([NOWHERE, "early_stopping.patience=2"], "early_stopping: no client has val examples, so there is no score"),
        (["runtime.engine=cluster", "evaluation.models=[personal]"], "evaluation.models: personal found"),
        (["runtime.engine=flower", "evaluation.models=[personal]"], "evaluation.models: personal found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_it_is_refused_before_anything_is_written(tmp_path: Path, changes: list[str], message: str) -> None:
    if "runtime.engine=flower" in changes:
        pytest.importorskip("flwr")
    with pytest.raises(RecipeError, match=message):
        fedloom.run(load_recipe(*changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match=message):
        fedloom.plan(load_recipe(*changes))


def test_a_model_that_depends_on_the_network_is_looked_for_there() -> None:
    """Running statistics that stay with clients leave no global model; without any there is one."""
    only = "evaluation.models=[global]"
    with pytest.raises(RecipeError, match="fedbn produces only the personal model"):
        build(load_recipe("method=fedbn", "model={name: resnet10, width: 4, norm: batch}", only))
    changed = load_recipe("method.buffers=local", "model={name: resnet10, width: 4, norm: group}", only)
    assert build(changed).models == ("global",)
    assert build(load_recipe("method=ditto")).models == ("global", "personal")


def test_a_grid_says_it_before_it_trains() -> None:
    by_name = {"good": load_recipe(), "bad": load_recipe("evaluation.models=[personal]")}
    refused, _ = grid_run._probe(by_name)
    assert list(refused) == ["bad"]
    assert refused["bad"].startswith("evaluation.models: personal found")


def test_labels_that_are_nowhere(arrays: Callable[..., fedloom.Recipe]) -> None:
    with pytest.raises(RecipeError, match="evaluation.splits: test found, but no test example has a label .* val$"):
        build(arrays("evaluation.splits=[test]", missing=("whole_test", "part_test")))
    nothing = arrays("partition.val_fraction=0", missing=("whole_test", "part_test"))
    with pytest.raises(RecipeError, match="no client has val examples; no test example .* no other split"):
        build(nothing)


def test_what_is_missing_beside_the_rest_is_an_event(arrays: Callable[..., fedloom.Recipe], tmp_path: Path) -> None:
    heard = Heard()
    recipe = arrays("partition.val_fraction=0", missing=("part_test",))
    gaps = ["no client has val examples", "no test example has a label of task 'part'"]
    result = fedloom.run(recipe, tmp_path / "run", progress=heard)
    assert heard.events == [f"round 0: not measured: {gap}" for gap in gaps]
    first, *_ = [json.loads(text) for text in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert first["events"] == [{"event": "not measured", "why": gap} for gap in gaps]
    notes = fedloom.plan(recipe).notes
    assert [f"not measured: {gap}" for gap in gaps] == notes[:2]
    assert "personal models are not measured: fedavg has none" in notes
    again = Heard()
    fedloom.resume(result.folder, progress=again)
    assert again.events == []


def test_nothing_is_said_where_all_is_there(quick: Quick) -> None:
    heard = Heard()
    result = quick(progress=heard)
    assert heard.events == []
    assert json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])["events"] == []


def test_a_run_without_the_test_split_shows_its_validation_numbers(quick: Quick) -> None:
    assert "own val data" in quick("evaluation.splits=[val]").table()
    assert "shared test data" in quick().table()


def test_a_server_of_nodes_looks_at_numbers_only_and_a_node_at_nothing() -> None:
    """Labels lie at the nodes, and a node may lack what others have."""
    whole = build(load_recipe())
    reports = {name: about(client, whole.dataset) for name, client in whole.federation.clients.items()}
    recipe = load_recipe("evaluation.splits=[val]")
    assert build_from(recipe, reports).models == ("global",)
    without = {n: r.model_copy(update={"sizes": r.sizes.model_copy(update={"val": 0})}) for n, r in reports.items()}
    with pytest.raises(RecipeError, match="evaluation.splits: val found, but no client has val examples"):
        build_from(recipe, without)
    data = recipe.data.model_dump(mode="json")
    config = NodeConfig.model_validate({"client": "a", "data": data, "val_fraction": 0.0})
    alone = build_at(recipe, config, whole.dataset.tasks)
    assert not len(alone.federation.clients["a"].val)
