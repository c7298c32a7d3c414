"""Nodes of Flower in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.engines.api import run
from sites_support import Demand, Go, make_homes, recipe

pytest.importorskip("flwr")

from fedloom.engines.api import Result
from fedloom.engines.flower import at_nodes, client_app
from fedloom.engines.flower.engine import LocalGrid, OverGrid


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while the server waits, however busy this machine is."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(at_nodes, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Node configs of three nodes, each with a part of the digits and labels of its own tasks."""
    return make_homes(tmp_path_factory.mktemp("sites"))


@pytest.fixture
def go(homes: dict[int, dict[str, str]], tmp_path: Path) -> Go:
    """Run over a grid of the three nodes; `grid` may be changed before, by a function."""

    def run_it(*changes: str, change: Callable[[LocalGrid], object] = lambda grid: None) -> Result:
        one = recipe(*changes)
        grid = LocalGrid(client_app(one), homes)
        change(grid)
        return run(one, tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))

    return run_it


@pytest.fixture
def demand(homes: dict[int, dict[str, str]]) -> Iterator[Demand]:
    """Give the clinic's node terms, for one test."""
    home = Path(next(c["home"] for c in homes.values() if c["home"].endswith("clinic")))
    before = (home / "node.yaml").read_text()

    def change(**terms: Any) -> Path:
        (home / "node.yaml").write_text(json.dumps({**json.loads(before), "terms": terms}))
        return home

    yield change
    (home / "node.yaml").write_text(before)
