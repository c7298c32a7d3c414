"""Tables and figures of grids, with the numbers of a published table."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedloom.errors import RecipeError, StateError, UserError
from fedloom.study.charts import rows_of
from fedloom.study.figures import draw
from fedloom.study.grid import Cell, open_folder, recipes, save
from fedloom.study.output import Table
from fedloom.study.report.against import methods_of
from fedloom.study.results import of_grid
from fedloom.study.significance import contrasts, ranked
from fedloom.study.statistics import Estimate
from fedloom.study.table import tabulate
from grid_support import DEA, FEDAVG, paper_grid, write_grid, write_run
from report_support import panels


def test_intervals_and_deltas_are_over_seeds(tmp_path):
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"B": {"method": "fedavg"}}, seeds=[0, 1, 2])
    runs = {("D", "B", "-", s): {"semseg": v} for s, v in enumerate((10.0, 20.0, 40.0))}
    runs |= {("D", "B", "+DEA", s): {"semseg": v} for s, v in enumerate((11.0, 24.0))}
    folder = write_grid(tmp_path, grid, runs)
    table = tabulate(grid, folder)
    base, dea = table.lines
    assert base[0].estimate == Estimate.of([10.0, 20.0, 40.0])
    # 10 % and 20 %, seed by seed; the means alone would say -25 %.
    assert dea[1].estimate.mean == pytest.approx(15.0)
    assert dea[1].estimate.half == pytest.approx(12.706204736432095 * 5)
    assert [entry.text for entry in dea] == ["17.50 ± 82.59*", "+15.00 ± 63.53*"]
    assert table.notes == ("*: not all seeds.", "…: 1 of 6 runs have not finished: D / B / +DEA s2.")
    assert "over seeds 0, 1, 2" in table.caption


def test_figures(tmp_path):
    grid = paper_grid(
        addons={"-": {}, "rho 0.1": {"method.add.feddea": {"rho": 0.1}}, "rho 1": {"method.add.feddea": {"rho": 1.0}}},
        figure={"name": "sweep", "parameter": "method.add.feddea.rho"},
        seeds=[0, 1],
    )
    save(grid, tmp_path, {})
    for seed in (0, 1):
        for number, (label, rho) in enumerate({"-": None, "rho 0.1": 0.1, "rho 1": 1.0}.items()):
            values = {"semseg": 10.0 + number + seed, "depth": 1.0 - number / 10}
            history = {0: {"semseg": 1.0, "depth": 2.0}, 1: values}
            for base in ("FedAvg", "FedProx"):
                write_run(tmp_path, Cell("NYUD", base, label, seed), values, rho=rho, history=history)
    made = grid.figure.entry.function(grid, tmp_path, "test", **grid.figure.params)
    found = panels(made)
    assert list(found) == ["Δ % ↑", "semseg mIoU ↑", "depth RMSE ↓"]
    means = {(row["name"], row["x"]): row["y"] for row in rows_of(found["semseg mIoU ↑"]) if "y" in row}
    assert (means["FedAvg", 0.1], means["FedAvg", 1.0]) == (11.5, 12.5)
    over = paper_grid(figure={"name": "convergence", "tasks": ["depth"]}, addons=grid.addons, seeds=[0, 1])
    (chart,) = over.figure.entry.function(over, tmp_path, "test", **over.figure.params)["concat"]
    means = {(row["name"], row["x"]): row["y"] for row in rows_of(chart) if "y" in row}
    assert list(means.items())[:4] == [
        (("FedAvg", 0.0), 2.0), (("FedAvg", 1.0), 1.0), (("FedAvg rho 0.1", 0.0), 2.0), (("FedAvg rho 0.1", 1.0), 0.9)
    ]  # fmt: skip
    for name in ("f.png", "f.svg", "f.pdf"):
        draw(over, tmp_path, tmp_path / "new" / name)
        assert (tmp_path / "new" / name).stat().st_size > 1000
    with pytest.raises(UserError, match=r"f\.xyz: a chart is written as one of \.svg"):
        draw(over, tmp_path, tmp_path / "f.xyz")
    with pytest.raises(RecipeError, match=r"figure\.tasks: no task 'depht'\. Did you mean 'depth'\?"):
        draw(paper_grid(figure={"name": "convergence", "tasks": ["depht"]}), tmp_path, tmp_path / "f.png")
    with pytest.raises(RecipeError, match="has no figure"):
        draw(paper_grid(), tmp_path, tmp_path / "f.png")
    with pytest.raises(StateError, match="no cell of grid"):
        draw(over, tmp_path / "nowhere", tmp_path / "f.png")


OF = {"a": "photo", "b": "sketch"}
# Round -> photo, sketch. Round 1 is best on test, round 2 on validation; the early stopping of a run kept round 3.
ON_TEST = {1: (90.0, 80.0), 2: (40.0, 60.0), 3: (50.0, 20.0), 4: (10.0, 10.0)}
ON_VAL = {1: (5.0, 5.0), 2: (30.0, 50.0), 3: (39.0, 40.0), 4: (1.0, 2.0)}


def of_clients(rounds: dict[int, tuple[float, float]], factor: float = 1.0) -> dict[int, dict[str, dict[str, float]]]:
    return {r: {"a": {"semseg": factor * a}, "b": {"semseg": factor * b}} for r, (a, b) in rounds.items()}


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """Two domains over four rounds; the second seed is better on validation data one round later."""
    grid = paper_grid(
        data={"D": {"recipe": "digits-domains"}},
        bases={"FedAvg": {"method": "fedavg"}},
        show="domains",
        also=["average", "spread"],
        at="best-validation",
        seeds=[0, 1],
    )
    folder = write_grid(tmp_path / "g", grid, {})
    later = {3: (60.0, 60.0)}
    for addon, factor in (("-", 1.0), ("+DEA", 2.0)):
        for seed, on_val in ((0, ON_VAL), (1, ON_VAL | later)):
            cell = Cell("D", "FedAvg", addon, seed)
            history = of_clients(ON_TEST, factor)
            write_run(folder, cell, history[4], history=history, val=of_clients(on_val), domains=OF)
    return folder


def test_the_round_is_chosen_by_validation_scores_alone(validated: Path) -> None:
    grid, folder = open_folder(validated)
    table = tabulate(grid, folder)
    base, dea = ([entry.estimate.mean for entry in line if entry.estimate] for line in table.lines)
    # round 2 of seed 0 and round 3 of seed 1
    assert base == pytest.approx([45.0, 40.0, (50.0 + 35.0) / 2, (math.dist([40], [60]) + 30.0) / 2 / math.sqrt(2)])
    assert dea == pytest.approx([90.0, 80.0, 85.0, 2 * base[3], 100.0])
    assert "model of each run's best round by its mean over domains on validation data (round 2 to 3)" in table.caption
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert {(r["at"], r["seeds"], r["rounds"]) for r in rows} == {("best-validation", "0 1", "2 3")}

    last = tabulate(grid.model_copy(update={"at": "last"}), folder)
    assert [entry.text for entry in last.lines[0][:3]] == ["10.00 ± 0.00"] * 3
    assert "model kept at the end (round 4)" in last.caption
    for path in folder.rglob("metrics.jsonl"):  # whatever test says, the choice is the same
        path.write_text(re.sub(r'"value": [0-9.]+, "split": "test"', '"value": 7.0, "split": "test"', path.read_text()))
    again = csv.DictReader(io.StringIO(tabulate(grid, folder).to_csv()))
    assert {row["rounds"] for row in again} == {"2 3"}


def test_domains_of_the_model_that_early_stopping_kept(validated: Path) -> None:
    grid, folder = open_folder(validated)
    for path in folder.rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "stopped early", "final_round": 3}))
    table = tabulate(grid.model_copy(update={"at": "last"}), folder)
    assert [entry.text for entry in table.lines[0][:3]] == ["50.00 ± 0.00", "20.00 ± 0.00", "35.00 ± 0.00"]
    assert "(round 3)" in table.caption


def test_best_on_validation_over_tasks(tmp_path: Path) -> None:
    grid = paper_grid(
        data={"D": {"recipe": "digits-tasks"}}, bases={"L": {"method": "local"}}, at="best-validation", show="clients"
    )
    folder = write_grid(tmp_path / "g", grid, {})
    history = of_clients(ON_TEST)
    write_run(folder, Cell("D", "L", "-", 0), history[4], history=history, val=of_clients(ON_VAL))
    table = tabulate(grid, folder)
    assert [(table.label(line[0]), line[0].text) for line in table.lines[:2]] == [
        ("L (a)", "40.00"),
        ("L (b)", "60.00"),
    ]
    assert "by its mean over tasks on validation data (round 2)" in table.caption
    write_run(folder, Cell("D", "L", "+DEA", 0), FEDAVG, val={1: FEDAVG})
    with pytest.raises(RecipeError, match="at: a mean over tasks needs one metric, found merr, miou, odsf, rmse"):
        tabulate(grid, folder)


def test_no_best_round_without_validation_data(tmp_path: Path) -> None:
    grid = paper_grid(data={"D": {"recipe": "digits-domains"}}, show="domains", at="best-validation")
    folder = write_grid(tmp_path / "g", grid, {})
    write_run(folder, Cell("D", "FedAvg", "-", 0), of_clients(ON_TEST)[1], domains=OF)
    with pytest.raises(StateError, match=r"s0: at is best-validation, and .*: nothing was measured on val"):
        tabulate(grid, folder)
    shutil.rmtree(folder / "cells")
    nan = of_clients({1: (math.nan, 1.0)})
    write_run(folder, Cell("D", "FedAvg", "-", 0), of_clients(ON_TEST)[1], val=nan, domains=OF)
    with pytest.raises(StateError, match="expected a round with a number of every client on val and on test"):
        tabulate(grid, folder)
    for key, value, message in (
        ("evaluation.splits", ["test"], r"evaluation\.splits has no val"),
        ("partition.val_fraction", 0, r"partition\.val_fraction is 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipes(grid.model_copy(update={"set": {key: value}}))
    assert recipes(grid)


def test_delta_is_that_of_the_paper_and_of_its_test(tmp_path: Path) -> None:
    numbers = {"-": FEDAVG, "+DEA": DEA}
    data = {"NYUD": {"recipe": "digits-tasks"}}
    grid = paper_grid(data=data, bases={"FedAvg": {"method": "fedavg"}}, seeds=[0, 1])
    more = {("NYUD", "FedAvg", addon, 1): {t: v * 1.01 for t, v in of.items()} for addon, of in numbers.items()}
    folder = write_grid(tmp_path, grid, more | {("NYUD", "FedAvg", addon, 0): of for addon, of in numbers.items()})
    delta = tabulate(grid, folder).lines[1][-1].estimate
    assert delta is not None
    assert delta.mean == pytest.approx(10.593, abs=5e-4)
    tested = contrasts(of_grid(grid, folder)).tests[-1]
    assert (tested.row, tested.mean) == (None, pytest.approx(delta.mean, rel=1e-12))
    few = tabulate(grid.model_copy(update={"columns": ("depth", "semseg")}), folder)
    assert [entry.text for entry in few.lines[1]][-1] == "+17.88 ± 0.00"


def test_latex_compiles(tmp_path: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex")
    grid = paper_grid(data={n: {"recipe": "digits-tasks"} for n in ("A_", "B", "C")}, seeds=[0, 1])
    runs = {(d, b, "-", s): FEDAVG for d in grid.data for b in grid.bases for s in (0, 1)}
    folder = write_grid(tmp_path / "g", grid, runs, {"A_ / FedAvg / +DEA": "it_would change | nothing"})
    sides = of_grid(grid.model_copy(update={"delta": "FedAvg/-"}), folder)
    two = grid.model_copy(update={"data": {n: grid.data[n] for n in ("A_", "B")}})
    made = (tabulate(grid, folder), tabulate(two, folder), contrasts(sides), ranked(sides))
    body = "".join(one.to_latex() for one in made)
    page = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "t.tex").write_text(page)
    subprocess.run(["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True)


def test_runs_with_other_tasks_are_no_table(tmp_path: Path) -> None:
    grid = paper_grid(columns=["dept"])
    folder = write_grid(tmp_path, grid, {("NYUD", "FedAvg", "-", 0): FEDAVG})
    with pytest.raises(RecipeError, match=r"grid paper: columns: no task 'dept'\. Did you mean 'depth'\?"):
        tabulate(grid, folder)
    write_run(folder, Cell("NYUD", "FedProx", "-", 0), {"semseg": 1.0})
    with pytest.raises(StateError, match="not comparable, because the tasks differ"):
        tabulate(grid, folder)
    with pytest.raises(StateError, match="no cell of grid paper has finished in"):
        tabulate(grid, tmp_path / "elsewhere")


def test_signs_of_a_format_are_escaped() -> None:
    sheet = Table("t", ("a", "b|c"), (("x", "1"),))
    assert sheet.to_text() == "t\na  b|c\n-  ---\nx    1\n"
    assert sheet.to_markdown() == "**t**\n\n| a | b\\|c |\n|---|---:|\n| x | 1 |\n"


def test_what_was_lost_is_said_and_a_run_in_vain_has_no_verdict(tmp_path):
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"B": {"method": "fedavg"}}, seeds=[0, 1, 2])
    runs = {("D", "B", addon, s): {"semseg": 10.0 + s + at} for at, addon in enumerate(("-", "+DEA")) for s in range(3)}
    folder = write_grid(tmp_path, grid, runs)
    assert not any("lost" in note for note in tabulate(grid, folder).notes)
    for seed in (0, 2):
        run = Cell("D", "B", "+DEA", seed).folder(folder)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines[-1]["events"] = [{"event": "update dropped", "client": "a"}, {"event": "round lost"}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**info, "status": "nothing learned"}))
    said = "D / B +DEA lost updates or rounds at seeds 0, 2; at seed 0: nothing learned in the run: "
    said += "every update of every round was dropped, or every round was lost; 1 update dropped "
    said += "(a 1; no reason recorded); 1 round lost."
    results = of_grid(grid, folder)
    for notes in (tabulate(grid, folder).notes, contrasts(results).notes, ranked(results).notes):
        assert said in notes
    assert {test.verdict.in_words() for test in contrasts(results).tests} == {"cannot tell (nothing learned: B +DEA)"}
    of_page = {method.label: method.verdict and method.verdict.reason for method in methods_of(grid, results)[0]}
    assert of_page == {"B": None, "B +DEA": "nothing learned: B +DEA"}
