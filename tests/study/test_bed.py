"""Whether a bed can judge: the three rules, and the command that prints what they find."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study.bed import falling, judge
from fedloom.study.grid import Cell, load_grid, recipes, save
from fedloom.study.references import at_trivial
from fedloom.study.tables.compare import compare
from fedloom.study.tables.table import tabulate
from grid_support import TRIVIAL, WORSE, bed, paper_grid, write_run
from tests_support import load_recipe


def test_a_bed_that_can_judge(tmp_path: Path) -> None:
    ((verdict,), _) = judge(bed(tmp_path), tmp_path)
    assert verdict.over_trivial == pytest.approx({"semseg": 100, "depth": 10})
    # the better of both joint trainings, task by task
    assert verdict.over_alone == pytest.approx({"semseg": 10, "depth": 10})
    assert verdict.falling == pytest.approx(dict.fromkeys(TRIVIAL, 100 * (1 - 0.898 / 0.899)))
    assert verdict.reasons == []


def test_each_rule_may_fail_alone(tmp_path: Path) -> None:
    ((verdict,), _) = judge(bed(tmp_path / "a", trivial={"semseg": 0.196, "depth": 2.0}), tmp_path / "a")
    assert verdict.reasons == ["semseg: training alone is +2.0 % better than the trivial answer, expected 5 % or more"]
    ((verdict,), _) = judge(bed(tmp_path / "b", joint=WORSE, **{"joint-by-task": WORSE}), tmp_path / "b")
    assert verdict.reasons == [
        "all data in one place is -10.0 % better than training alone (mean over tasks), expected 5 % or more"
    ]
    ((verdict,), _) = judge(bed(tmp_path / "c", losses=(1.0, 0.9, 0.8, 0.7)), tmp_path / "c")
    assert [reason.partition(":")[0] for reason in verdict.reasons] == ["semseg", "depth"]
    assert "still falls by 12.5 % a round, expected 1 % or less" in verdict.reasons[0]
    with pytest.raises(StateError, match="NYUD: joint has not been run; a bed is judged by Local, joint"):
        judge(bed(tmp_path / "d", joint=None), tmp_path / "d")


def test_a_task_without_validation_data_is_named(tmp_path: Path) -> None:
    nothing = {"semseg": math.nan, "depth": 1.8}
    ((verdict,), _) = judge(bed(tmp_path, Local=nothing), tmp_path)
    assert len(verdict.reasons) == 1
    assert verdict.reasons[0].startswith("no change in percent on validation data of semseg, in all seeds")
    assert CliRunner().invoke(app, ["bed", str(tmp_path)]).exit_code == 1


def test_data_sets_that_have_not_been_run_do_not_hide_the_others(tmp_path: Path) -> None:
    grid = bed(tmp_path)
    grid = grid.model_copy(update={"data": {**grid.data, "Later": grid.data["NYUD"]}})
    save(grid, tmp_path, {})
    verdicts, unjudged = judge(grid, tmp_path)
    assert [verdict.data for verdict in verdicts] == ["NYUD"]
    assert unjudged == ["Later: Local has not been run; a bed is judged by Local, joint training and trivial"]
    result = CliRunner().invoke(app, ["bed", str(tmp_path)])
    assert result.exit_code == 1
    assert "NYUD: this bed can judge" in result.output
    assert "Later: Local has not been run" in result.output


def test_the_fall_is_that_of_one_round(tmp_path: Path) -> None:
    """A loss that shrinks by 2 % in every round, over the last fifth of 40."""
    bed(tmp_path, losses=[0.98**n for n in range(40)])
    assert falling(Run.read(Cell("NYUD", "Local", "-", 0).folder(tmp_path)), "depth") == pytest.approx(2.0, abs=0.01)


def test_tasks_on_which_nobody_beats_the_trivial_answer() -> None:
    directions = {"a": "max", "b": "min", "c": "max"}
    trivial = ("trivial", {"a": 0.5, "b": 2.0, "c": 0.0})
    one, joint = ("fedavg", {"a": 0.5, "b": 1.9, "c": 0.0}), ("joint", {"a": 0.9, "b": 1.0, "c": 1.0})
    assert at_trivial([trivial, one, joint], directions) == ["a"]  # without a size of c nothing is known of it
    assert at_trivial([trivial, one, ("local", {"a": 0.6, "b": math.nan})], directions) == []
    assert at_trivial([trivial, joint], directions) == []
    assert at_trivial([one, joint], directions) == []


def test_a_table_marks_them_and_leaves_them_out(tmp_path: Path) -> None:
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, references=["trivial"], delta="FedAvg/-")
    save(grid, tmp_path, {})
    numbers = {
        ("FedAvg", "-"): {"semseg": 0.10, "depth": 2.0},
        ("FedAvg", "+DEA"): {"semseg": 0.12, "depth": 1.0},
        ("FedProx", "-"): {"semseg": 0.11, "depth": 1.0},
        ("trivial", "-"): {"semseg": 0.13, "depth": 1.9},
    }
    for (base, addon), values in numbers.items():
        write_run(tmp_path, Cell("NYUD", base, addon, 0), values)
    table = tabulate(grid, tmp_path)
    assert [str(column) for column in table.columns] == ["semseg † mIoU ↑", "depth RMSE ↓", "Δ % ↑"]
    deltas = {(line.base, line.addon): line.entries[-1].text for line in table.lines}
    assert deltas["FedAvg", "+DEA"] == deltas["FedProx", "-"] == "+50.00"
    assert deltas["trivial", "-"] == "+5.00"
    assert any("no method is better than the trivial answer on semseg" in note for note in table.notes)


def test_a_comparison_marks_them_too(tmp_path: Path) -> None:
    """Four tasks of digits, on which two steps of training learn little."""
    runs = {name: fedloom.run(load_recipe(f"method={name}"), tmp_path / name) for name in ("local", "trivial")}
    numbers = {n: {t: v["accuracy"] for t, v in run.run.final().values.items()} for n, run in runs.items()}
    expected = sorted(t for t, v in numbers["local"].items() if v <= numbers["trivial"][t])
    found = compare([run.folder for run in runs.values()])
    assert expected
    assert list(found.untold) == expected
    told = [numbers["trivial"][t] / v - 1 for t, v in numbers["local"].items() if t not in expected]
    (delta,) = [column.delta for column in found.columns if column.delta is not None]
    assert delta.mean == pytest.approx(100 * sum(told) / len(told)) if told else math.isnan(delta.mean)
    assert compare([runs["local"].folder]).untold == ()


def test_grids_have_references_unless_they_are_drawn() -> None:
    assert load_grid("feddea/table3-scenes").reference_rows == ("joint", "joint-by-task", "trivial")
    assert load_grid("f2dc/table1").reference_rows == ("joint", "trivial")  # of one task
    assert load_grid("feddea/rho-sweep").reference_rows == ()
    assert load_grid("feddea/table3-scenes", ["references=[]"]).reference_rows == ()


def test_references_have_no_add_on_where_every_method_has_one() -> None:
    addons = {"rho 0.5": {"method.add.feddea.rho": 0.5}, "rho 0.2": {"method.add.feddea.rho": 0.2}}
    data = {"NYUD": {"recipe": "digits-tasks"}}
    grid = paper_grid(data=data, addons=addons, references=["joint"])
    assert grid.combinations[-2:] == (("FedProx", "rho 0.2"), ("joint", "-"))
    assert [grid.reference(base) for base in ("FedProx", "joint")] == [("FedProx", "rho 0.5"), ("joint", "-")]
    assert recipes(grid)[Cell("NYUD", "joint", "-", 0)].method.name == "joint"


def test_the_command_says_it(tmp_path: Path) -> None:
    run = CliRunner().invoke
    bed(tmp_path / "good")
    result = run(app, ["bed", str(tmp_path / "good")])
    assert result.exit_code == 0
    assert "NYUD: this bed can judge (validation data, seeds (0,))" in result.output
    bed(tmp_path / "poor", joint=WORSE, **{"joint-by-task": WORSE})
    result = run(app, ["bed", str(tmp_path / "poor")])
    assert result.exit_code == 1
    assert "NYUD: all data in one place is -10.0 % better" in result.output
