"""Test what a run records of its user's own source, and what happens after that source has changed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.core.settings.trust import ALLOW, sources
from fedloom.errors import StateError
from fedloom.experiments.grid_run import Runner, prepare
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build, build_method
from fedloom.methods import METHODS
from fedloom.study.comparison import compare
from fedloom.study.grid import Grid, load_grid, recipes
from fedloom.study.results import of_grid

METHOD = """import fedloom as fl
from owned.stages import Scale

def scaled(*, by: float = 1.0) -> fl.Method:
    return fl.Method(name="scaled", stage=Scale(by) >> fl.methods.fedavg().stage)
"""
STAGE = """from dataclasses import dataclass
from fedloom.stages import Stage, Traits

@dataclass(frozen=True)
class Scale(Stage):
    by: float = 1.0
    traits = Traits("row", presence="block", separable=True)

    def __call__(self, updates, state, ctx):
        return updates.replace(X=updates.X * self.by), state
"""
PLAIN = """from fedloom.stages import Stage, Traits

class Scale(Stage):
    traits = Traits("row", presence="block", separable=True)

    def __init__(self, by):
        self.by = by

    def __call__(self, updates, state, ctx):
        return updates.replace(X=updates.X * self.by), state
"""
SHORT = ["training.rounds=1", "training.steps=1", "training.epochs=null"]


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose method stands in one file and whose stage in another, which is returned."""
    package = tmp_path / "owned"
    package.mkdir()
    (package / "__init__.py").write_text(METHOD)
    (package / "stages.py").write_text(STAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ALLOW, "owned")
    yield package / "stages.py"
    for name in ("owned", "owned.stages"):
        sys.modules.pop(name, None)


def edit(file: Path) -> None:
    """Flip the sign of the stage's updates."""
    file.write_text(file.read_text().replace("* self.by", "* -self.by"))


def origins(folder: Path) -> dict[str, Any]:
    """Return what a run recorded."""
    found: dict[str, Any] = json.loads((folder / "run.json").read_text()).get("origins", {})
    return found


def test_the_file_of_a_stage_is_recorded_beside_the_methods(owned: Path) -> None:
    run = fl.run("digits-tasks", owned.parent / "a", method="owned:scaled", overrides=SHORT)
    assert set(origins(run.folder)) == {"owned:scaled", "owned.stages:Scale"}
    edit(owned)
    fl.resume(run.folder, rounds=2)
    events = [event for line in run.run.rounds for event in line["events"] if event["event"] == "source changed"]
    assert [event["of"] for event in events] == ["owned.stages:Scale"]


def test_a_method_made_in_python_is_recorded(owned: Path) -> None:
    from owned import scaled  # type: ignore[import-not-found]

    run = fl.run("digits-tasks", owned.parent / "a", method=scaled(), overrides=SHORT)
    assert set(origins(run.folder)) == {"owned.stages:Scale"}


def test_what_is_fedlooms_or_a_librarys_is_not_recorded() -> None:
    keys = ["method=fedopt", "tasks={parity: {metric: auc}}", "model.lora={rank: 1, targets: [linear]}"]
    for name in METHODS.names:
        assert sources([build_method(load("digits-tasks", [f"method={name}"]).method)]) == {}
    assert build(load("digits-tasks", keys)).origins == {}


def own_grid() -> Grid:
    """Return a grid of one cell."""
    changes = dict(change.split("=") for change in SHORT[:2])
    base = {"method": "owned:scaled", "training.epochs": None, **{key: int(value) for key, value in changes.items()}}
    value: dict[str, Any] = {"name": "g", "data": {"D": {"recipe": "digits-tasks"}}, "bases": {"A": base}}
    return load_grid({**value, "seeds": [0], "references": [], "delta": "none"})


def test_cells_and_trials_of_other_code_are_refused_and_seeds_of_it_are_no_column(owned: Path) -> None:
    home = owned.parent.parent
    grid = own_grid()
    assert Runner().run(grid, home / "g").failed == {}
    assert Runner().run(grid, home / "g").finished == []  # unchanged code: nothing is run again
    cell = next(iter(recipes(grid)))
    before = fl.run("digits-tasks", home / "a", method="owned:scaled", overrides=SHORT)
    edit(owned)
    with pytest.raises(StateError, match=r"run with other code \(owned.stages: source \w{16}, now \w{16}\).*--out"):
        prepare(grid, home / "g")
    after = fl.run("digits-tasks", home / "b", method="owned:scaled", seed=1, overrides=SHORT)
    compared = compare([before.folder, after.folder])
    assert [list(column.runs) for column in compared.columns] == [[0], [1]]
    assert "The same recipe with different code, and so not one column: a, b." in compared.notes
    # a grid's folder from before cells of other code were refused
    shutil.copytree(after.folder, replace(cell, seed=1).folder(home / "g"))
    notes = of_grid(grid.model_copy(update={"seeds": (0, 1)}), home / "g").notes
    assert any("D / A: its code changed between the seeds" in note for note in notes), notes


def test_a_stage_that_is_no_dataclass_is_identified_by_its_attributes(owned: Path) -> None:
    owned.write_text(PLAIN)
    from owned import scaled

    folder = fl.run("digits-tasks", owned.parent.parent / "a", method=scaled(by=0.5), overrides=SHORT).folder
    assert fl.resume(folder, method=scaled(by=0.5), rounds=2).run.last_round == 2
    with pytest.raises(StateError, match=r"the method has changed"):
        fl.resume(folder, method=scaled(by=2.0), rounds=3)


def test_a_parameter_that_the_text_would_hide_is_refused(owned: Path) -> None:
    owned.write_text(
        STAGE.replace("import dataclass", "import dataclass, field").replace(
            "= 1.0", "= field(default=1.0, repr=False)"
        )
    )
    with pytest.raises(ValueError, match=r"Scale: by: field\(repr=False\) found, expected a field that its text shows"):
        import_module("owned").scaled()
