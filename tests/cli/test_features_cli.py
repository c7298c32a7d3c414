"""fedloom features."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.errors import StateError
from tests_support import load_recipe

SMALL = ("method=f2dc", "data.size=8", "model.width=2", "training.rounds=1", "evaluation.splits=[test]")


def test_features(tmp_path: Path) -> None:
    recipe = load_recipe(*SMALL, "data.domains=[plain,inverted]", "partition.clients=1", recipe="f2dc/digits-embedded")
    folder = fedloom.run(recipe, tmp_path / "run").folder
    shown = CliRunner().invoke(app, ["features", str(folder), "--examples", "8"])
    assert shown.exit_code == 0, shown.output
    assert "8 test examples a domain" in shown.stdout
    assert "f2dc: accuracy in percent" in shown.stdout
    assert "0/4  f2dc: features of plain" in shown.stderr
    assert not list(tmp_path.glob("**/*.png"))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["features", str(tmp_path)])
    assert isinstance(done.exception, StateError)
    with pytest.raises(StateError, match="is not a run folder"):
        raise done.exception
