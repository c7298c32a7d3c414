"""Runs of four rounds that the tests of this folder read, or copy and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedloom
from tests_support import load_recipe, stopped_after

CHANGES = ("training.rounds=4",)
PEERS = (*CHANGES, "model.heads=own", "peers={}")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return fedloom.run(load_recipe(*CHANGES), tmp_path_factory.mktemp("whole") / "run").folder


@pytest.fixture(scope="session")
def whole_peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of peers."""
    return fedloom.run(load_recipe(*PEERS), tmp_path_factory.mktemp("whole-peers") / "run").folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, stopped in its third round; for copies."""
    return stopped_after(2, tmp_path_factory.mktemp("stopped") / "run", load_recipe(*CHANGES))


@pytest.fixture
def part(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "part"))
