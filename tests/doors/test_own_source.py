"""Test what a run records of its user's own source, and what happens after that source has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.core.settings.trust import ALLOW, sources
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build, build_method
from fedloom.methods import METHODS

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
SHORT = ["training.rounds=1", "training.steps=1", "training.epochs=null"]


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose method stands in one file and whose stage in another, which is returned."""
    import sys

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
