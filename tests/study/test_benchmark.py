"""Test whether a benchmark is sensitive enough: the three rules, and the command that prints their results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import fedloom
from fedloom.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study.benchmark import falling, judge
from fedloom.study.grid import Cell, load_grid, recipes
from fedloom.study.tables.compare import compare
from fedloom.study.tables.results import at_constant
from grid_support import CONSTANT_ROW, WORSE, benchmark, paper_grid
from tests_support import load_recipe


def test_a_benchmark_that_can_judge(tmp_path: Path) -> None:
    ((verdict,), _) = judge(benchmark(tmp_path), tmp_path)
    assert verdict.over_constant == pytest.approx({"semseg": 100, "depth": 10})
    # the better of both centralised trainings, task by task
    assert verdict.over_alone == pytest.approx({"semseg": 10, "depth": 10})
    assert verdict.falling == pytest.approx(dict.fromkeys(CONSTANT_ROW, 100 * (1 - 0.898 / 0.899)))
    assert verdict.reasons == []


def test_each_rule_may_fail_alone(tmp_path: Path) -> None:
    ((verdict,), _) = judge(benchmark(tmp_path / "a", constant={"semseg": 0.196, "depth": 2.0}), tmp_path / "a")
    assert verdict.reasons == [
        "semseg: training alone is +2.0 % better than the constant prediction, expected 5 % or more"
    ]
    ((verdict,), _) = judge(
        benchmark(tmp_path / "b", centralised=WORSE, **{"centralised-by-task": WORSE}), tmp_path / "b"
    )
    assert verdict.reasons == [
        "all data in one place is -10.0 % better than training alone (mean over tasks), expected 5 % or more"
    ]
    ((verdict,), _) = judge(benchmark(tmp_path / "c", losses=(1.0, 0.9, 0.8, 0.7)), tmp_path / "c")
    assert [reason.partition(":")[0] for reason in verdict.reasons] == ["semseg", "depth"]
    assert "still falls by 12.5 % per round, expected 1 % or less" in verdict.reasons[0]
    with pytest.raises(StateError, match="NYUD: centralised has not been run; a benchmark needs Local, centralised"):
        judge(benchmark(tmp_path / "d", centralised=None), tmp_path / "d")


def test_the_fall_is_that_of_one_round(tmp_path: Path) -> None:
    """A loss that shrinks by 2 % in every round, over the last fifth of 40."""
    benchmark(tmp_path, losses=[0.98**n for n in range(40)])
    assert falling(Run.read(Cell("NYUD", "Local", "-", 0).folder(tmp_path)), "depth") == pytest.approx(2.0, abs=0.01)


def test_tasks_on_which_nobody_beats_the_trivial_answer() -> None:
    directions = {"a": "max", "b": "min", "c": "max"}
    constant = ("constant", {"a": 0.5, "b": 2.0, "c": 0.0})
    one, centralised = ("fedavg", {"a": 0.5, "b": 1.9, "c": 0.0}), ("centralised", {"a": 0.9, "b": 1.0, "c": 1.0})
    assert at_constant([constant, one, centralised], directions) == ["a"]  # without a size of c nothing is known of it
    assert at_constant([constant, one, ("local", {"a": 0.6, "b": math.nan})], directions) == []
    assert at_constant([constant, centralised], directions) == []
    assert at_constant([one, centralised], directions) == []


def test_a_comparison_marks_them_too(tmp_path: Path) -> None:
    """Four tasks of digits, on which two steps of training learn little."""
    runs = {name: fedloom.run(load_recipe(f"method={name}"), tmp_path / name) for name in ("local", "constant")}
    numbers = {n: {t: v["accuracy"] for t, v in run.run.final().values.items()} for n, run in runs.items()}
    expected = sorted(t for t, v in numbers["local"].items() if v <= numbers["constant"][t])
    found = compare([run.folder for run in runs.values()])
    assert expected
    assert list(found.excluded) == expected
    told = [numbers["constant"][t] / v - 1 for t, v in numbers["local"].items() if t not in expected]
    (delta,) = [column.delta for column in found.columns if column.delta is not None]
    assert delta.mean == pytest.approx(100 * sum(told) / len(told)) if told else math.isnan(delta.mean)
    assert compare([runs["local"].folder]).excluded == ()


def test_grids_have_references_unless_they_are_drawn() -> None:
    assert load_grid("feddea/table3-scenes").reference_rows == (
        *("centralised", "centralised-by-task", "separate", "simple", "constant"),
    )
    assert load_grid("f2dc/table1").reference_rows == ("centralised", "separate", "simple", "constant")  # of one task
    assert load_grid("feddea/rho-sweep").reference_rows == ()
    assert load_grid("feddea/table3-scenes", ["references=[]"]).reference_rows == ()


def test_references_have_no_add_on_where_every_method_has_one() -> None:
    addons = {"rho 0.5": {"method.add.feddea.rho": 0.5}, "rho 0.2": {"method.add.feddea.rho": 0.2}}
    data = {"NYUD": {"recipe": "digits-tasks"}}
    grid = paper_grid(data=data, addons=addons, references=["centralised"])
    assert grid.combinations[-2:] == (("FedProx", "rho 0.2"), ("centralised", "-"))
    assert [grid.reference(base) for base in ("FedProx", "centralised")] == [
        ("FedProx", "rho 0.5"),
        ("centralised", "-"),
    ]
    assert recipes(grid)[Cell("NYUD", "centralised", "-", 0)].method.name == "centralised"
