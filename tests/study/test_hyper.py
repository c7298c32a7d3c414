"""Reading and drawing hyper weights."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.engines.api import Result
from fedloom.errors import StateError, UserError
from fedloom.study.figures import draw as draw_grid
from fedloom.study.grid import load_grid, recipes
from fedloom.study.papers.hyper_weights import CSV, HyperWeights, draw, picture, table, used
from grid_support import TINY
from report_support import cells, drawn

Quick = Callable[..., Result]
MADE = HyperWeights(
    "made, seed 0",
    (1, 2, 3),
    {"a": ((1, 0.1), (2, 0.25), (3, 1.5)), "b": ((1, 0.1), (3, -0.5))},
    {("a", "seg"): {"fuse": ((1, 0.1), (2, 0.2)), "norm": ((1, 0.1),)}, ("b", "edge"): {"fuse": ((1, 0.1), (3, 0.4))}},
)


@pytest.fixture
def run(quick: Quick) -> Path:
    return quick("method=fedhca2", "training.rounds=3").folder


def test_tables_of_a_run(run: Path) -> None:
    found = table(run)
    assert found.rounds == (1, 2, 3)
    assert sorted(found.alpha) == ["all-0", "digit-0", "holes-0", "large-0", "parity-0"]
    assert all(points[0] == (1, 0.1) for points in found.alpha.values())
    assert all(points[2][1] != 0.1 for points in found.alpha.values())
    assert not found.beta
    assert "digits-tasks, fedhca2, seed 0" in found.to_text()


def test_what_is_written() -> None:
    text = MADE.to_text()
    assert "1.0000 (1.5)" in text
    assert "0.1000 > 0.2000" in text
    assert [line[0] for line in MADE.alphas().lines] == ["1", "2", "3"]
    assert MADE.alphas().lines[1] == ("2", "0.2500", "")
    assert MADE.to_markdown().count("| round |") == 1
    rows = list(csv.DictReader(io.StringIO(MADE.to_csv())))
    assert tuple(rows[0]) == CSV
    assert len(rows) == 10
    last = next(r for r in rows if r["client"] == "b" and r["round"] == "3" and r["weight"] == "alpha")
    assert (float(last["value"]), float(last["used"])) == (-0.5, used(-0.5)) == (-0.5, 0.0)


def test_the_picture(tmp_path: Path) -> None:
    draw(MADE, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    alpha, beta, last = picture([MADE])["concat"]
    assert drawn(alpha) == {"b": {1: 0.1, 3: 0.0}, "a": {1: 0.1, 2: 0.25, 3: 1.0}}  # as used
    assert drawn(beta)["a seg"] == {1: 0.1, 2: 0.2}
    assert cells(last) == {"a seg": {"fuse": 0.2, "norm": 0.1}, "b edge": {"fuse": 0.4}}
    with pytest.raises(UserError, match=r"p\.nothing"):
        draw(MADE, tmp_path / "p.nothing")


def test_the_command(run: Path, tmp_path: Path) -> None:
    call = CliRunner().invoke
    assert "alpha of the encoders" in call(app, ["hyper", str(run)]).output
    for name in ("a.csv", "a.md", "a.svg"):
        assert call(app, ["hyper", str(run), "--out", str(tmp_path / name)]).exit_code == 0
        assert (tmp_path / name).stat().st_size


def test_a_run_without_hyper_weights(quick: Quick) -> None:
    with pytest.raises(StateError, match="method=fedhca2"):
        table(quick("training.rounds=1").folder)


def test_the_figure_of_a_grid(tmp_path: Path) -> None:
    bases = {"FedAvg": {"method": "fedavg"}, "FedHCA2": {"method": "fedhca2"}}
    grid = load_grid({**TINY, "bases": bases, "addons": {"-": {}}, "figure": "hyper-weights"})
    for cell, recipe in recipes(grid).items():
        fedloom.run(recipe, cell.folder(tmp_path))
    draw_grid(grid, tmp_path, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    without = load_grid({**TINY, "addons": {"-": {}}, "figure": "hyper-weights"})
    with pytest.raises(StateError, match="method fedhca2"):
        draw_grid(without, tmp_path, tmp_path / "g.png")
