"""Best validation losses of a grid: the sheet, the losses by round, and the figures of the DFMTL thesis."""

from __future__ import annotations

import csv
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import RecipeError, StateError
from fedloom.study.charts import rows_of
from fedloom.study.figures import draw, loss_curves
from fedloom.study.grid import Cell, load_grid, save
from fedloom.study.papers import GridLosses, RunLosses, losses_of, over_rounds
from fedloom.study.results import Combination
from report_support import drawn as lines
from report_support import panels, write_files

WEIGHTS = {"a": {"x": 0.7, "y": 0.3}, "b": {"y": 1.0}}
LOSSES = {
    ("A1", 0): [2.0, 1.0, 1.4],
    ("A1", 1): [2.0, 1.6, 1.2],
    ("B1", 0): [0.9, math.nan, 5e7],
    ("B1", 1): [1.1, 3.0, math.inf],
    ("C1", 0): [math.nan, math.nan],
    ("C1", 1): [math.nan, math.nan],
}
"""(base, seed) -> the weighted loss after rounds 1, 2, ... of five."""


def write(folder: Path, cell: Cell, losses: list[float]) -> None:
    """A run in which x has twice the loss of y at client a, and both clients have the loss that is given."""
    tasks = {t: {"kind": "k", "primary": "accuracy", "metrics": {"accuracy": "max"}} for t in ("x", "y")}
    info = {
        "method": cell.base,
        "tasks": tasks,
        "clients": {c: {"tasks": w, "domain": None} for c, w in WEIGHTS.items()},
        "status": "finished" if len(losses) == 5 else "stopped early",
        "final_round": len(losses),
    }
    lines = []
    for number, loss in enumerate([9.0, *losses]):
        of = {("a", "x"): 2 * loss / 1.7, ("a", "y"): loss / 1.7, ("b", "y"): loss}
        common = {"model": "personal", "data": "own val"}
        metrics = [
            {"client": c, "task": t, "split": split, "metric": name, "value": value, **common}
            for split, name in (("val", "loss"), ("test", "accuracy"))
            for (c, t), v in of.items()
            for value in [0.5 if split == "test" else v if math.isfinite(v) else None]
        ]
        # another model's loss does not count where the personal one was measured
        metrics.append({**metrics[0], "model": "trained", "value": 0.0})
        lines.append({"round": number, "cohort": ["a", "b"], "metrics": metrics})
    write_files(cell.folder(folder), info, lines, seed=cell.seed, training={"rounds": 5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bases = ("A1", "B1", "C1")
    grid: dict[str, Any] = {
        "name": "g",
        "title": "Losses",
        "data": {"NYU": {"recipe": "digits-tasks"}},
        "bases": {base: {"training.rounds": 5, "training.epochs": at} for at, base in enumerate(bases, 1)},
        "seeds": [0, 1],
        "figures": {
            "6.1": "best-loss",
            "6.3": {"name": "losses", "only": ["B1"], "tasks": True},
            "A.2": "early-stopping",
        },
    }
    save(load_grid(grid), tmp_path, {})
    for (base, seed), losses in LOSSES.items():
        write(tmp_path, Cell("NYU", base, "-", seed), losses)
    return tmp_path


def test_the_sheet_by_hand(folder: Path) -> None:
    """The initial model (9.0) does not count; B1 is best before it diverges, C1 has no number at all."""
    found = losses_of(load_grid(folder / "grid.yaml"), folder)
    sheet = found.as_table()
    head = ("seed 0", "seed 1", "mean", "SD", "CV %", "in round", "at the end", "rounds", "configured")
    assert sheet.head == ("best validation loss", *head, "not finite from")
    spread = math.sqrt(0.02)
    assert sheet.lines == (
        ("NYU: B1", "0.9000", "1.1000", "1.0000", f"{spread:.4f}", "14.1", "1.0", "nan", "3.0", "5", "2"),
        ("NYU: A1", "1.0000", "1.2000", "1.1000", f"{spread:.4f}", "12.9", "2.5", "1.3000", "3.0", "5", ""),
        ("NYU: C1", "nan", "nan", "nan", "nan", "nan", "", "nan", "2.0", "5", "1"),
    )
    rows = list(csv.DictReader(StringIO(found.to_csv())))
    assert [row["cell"] for row in rows] == ["B1", "B1", "A1", "A1", "C1", "C1"]
    assert (float(rows[0]["best"]), rows[0]["best_round"], rows[0]["rounds"]) == (pytest.approx(0.9), "1", "3")
    assert float(rows[0]["last"]) == pytest.approx(5e7)


def test_losses_by_round_of_all_tasks_and_of_each(folder: Path) -> None:
    grid = load_grid(folder / "grid.yaml")
    found = over_rounds(grid, folder, only=["A1"])
    assert found.records().head == ("data", "cell", "seed", "round", "all", "x", "y")
    assert [line[0] for line in found.as_table().lines] == [f"NYU / A1 s0, round {n}" for n in (1, 2, 3)]
    # y is the mean of both clients
    expected = [[loss, 2 * loss / 1.7, loss * (1 + 1 / 1.7) / 2] for loss in LOSSES["A1", 0]]
    torch.testing.assert_close(torch.tensor([line[4:] for line in found.records().lines]), torch.tensor(expected))
    assert found.as_table().lines[0] == ("NYU / A1 s0, round 1", "2.0000", "2.3529", "1.5882")
    assert found.to_csv().splitlines()[1].startswith("NYU,A1,0,1,2.")
    large = over_rounds(grid, folder, only=["B1"]).as_table().lines
    assert [line[1] for line in large] == ["0.9000", "nan", "5.000e+07"]


def test_commands(folder: Path) -> None:
    ask = CliRunner().invoke
    best = ask(app.app, ["table", str(folder), "--losses", "best"])
    assert best.exit_code == 0
    assert "NYU: A1" in best.stdout
    assert ask(app.app, ["table", str(folder), "--losses", "rounds", "--format", "csv"]).stdout.startswith("data,cell")
    assert "NYU: x (accuracy)" in ask(app.app, ["table", str(folder), "--metrics"]).stdout
    for name in ("6.1", "6.3", "A.2"):
        assert (
            ask(app.app, ["figure", str(folder), "--out", str(folder / f"{name}.svg"), "--named", name]).exit_code == 0
        )
        assert (folder / f"{name}.svg").stat().st_size > 5000


def test_figures_show_the_numbers(folder: Path) -> None:
    grid = load_grid(folder / "grid.yaml")

    def drawn(name: str) -> Any:
        section = grid.figures[name]
        return section.entry.function(grid, folder, "test", **section.params)

    rows = rows_of(drawn("6.1"))
    assert {row["group"]: row["value"] for row in rows if "part" in row} == {
        "B1": pytest.approx(1.0),
        "A1": pytest.approx(1.1),
        "C1": None,
    }
    assert [row["group"] for row in rows if row.get("text") == "no finite loss"] == ["C1"]
    found = panels(drawn("6.3"))
    assert list(found) == ["NYU: all tasks", "NYU: x", "NYU: y"]
    assert found["NYU: all tasks"]["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"
    y = lines(found["NYU: all tasks"])["B1, seed 0"]
    assert len(lines(found["NYU: all tasks"])) == 2
    assert y == {1: pytest.approx(0.9), 2: None, 3: pytest.approx(5e7)}
    assert lines(found["NYU: x"])["B1, seed 0"][1] == pytest.approx(2 * 0.9 / 1.7)
    rounds, saved = map(rows_of, drawn("A.2")["concat"])
    assert sorted(row["value"] for row in rounds if row["group"] == "B1") == [1.0, 3.0, 5.0]
    assert [row["value"] for row in saved] == pytest.approx([40, 40, 60])


def test_panels_hold_lines_and_many_cells_have_their_own() -> None:
    """No panel is empty for a task that only another data set has, and five cells do not share one."""

    def of(data: str, task: str, *bases: str) -> dict[Combination, dict[int, RunLosses]]:
        one = RunLosses({1: 2.0, 2: 1.0}, {task: {1: 1.0}}, 2, 2, 1.0, 2, 1.0, None)
        return {(data, base, "-"): {0: one, 1: one} for base in bases}

    sheet = loss_curves(GridLosses("", of("n", "depth", "B1") | of("p", "edge", "B1"), (0, 1)), tasks=True)
    assert list(panels(sheet)) == ["n: all tasks", "n: depth", "p: all tasks", "p: edge"]
    assert sheet["columns"] == 2
    many = loss_curves(GridLosses("", of("n", "depth", *"ABCDE"), (0, 1)), tasks=False)
    assert {name: list(lines(of)) for name, of in panels(many).items()} == {
        f"n: all tasks, {base}": [f"{base}, seed 0", f"{base}, seed 1"] for base in "ABCDE"
    }
    assert many["resolve"]["scale"]["y"] == "shared"


def test_what_is_refused(folder: Path) -> None:
    grid = load_grid(folder / "grid.yaml")
    with pytest.raises(RecipeError, match=r"no figure '6\.9': name 6\.1, 6\.3, A\.2"):
        draw(grid, folder, folder / "f.png", named="6.9")
    with pytest.raises(RecipeError, match="no label 'B2' in the grid"):
        losses_of(grid, folder, only=["B2"])
    metrics = Cell("NYU", "A1", "-", 0).folder(folder) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"val"', '"test"'))
    with pytest.raises(StateError, match="no validation loss was measured: evaluation.splits needs val"):
        losses_of(grid, folder)
    refused = CliRunner().invoke(app.app, ["table", str(folder), "--losses", "best", "--tests"])
    based = CliRunner().invoke(app.app, ["table", str(folder), "--metrics", "--base", "A1/-"])
    assert "--losses, --metrics and --seeds show none" in str(based.exception)
    assert str(refused.exception) == "--tests and --losses are two tables: choose one"
