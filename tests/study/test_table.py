"""Tables and figures of grids, with the numbers of a published table."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import RecipeError, StateError, UserError
from fedloom.study.delta import delta_m
from fedloom.study.figures import draw
from fedloom.study.grid import Cell, open_folder, recipes, save
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.formats import FORMATS, to_text
from fedloom.study.tables.metrics import all_metrics
from fedloom.study.tables.table import tabulate
from grid_support import DEA, DIRECTIONS, FEDAVG, paper_grid, write_grid, write_run
from tests_support import loaded

PROX = FEDAVG | {"semseg": 20.0}
PASCAL = {"semseg": 40.0, "normals": 20.0}


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """NYUD complete, PASCAL with one run, one refused combination and two that are missing."""
    runs = {
        ("NYUD", "FedAvg", "-", 0): FEDAVG,
        ("NYUD", "FedAvg", "+DEA", 0): DEA,
        ("NYUD", "FedProx", "-", 0): PROX,
        ("NYUD", "FedProx", "+DEA", 0): FEDAVG,
        ("PASCAL", "FedAvg", "-", 0): PASCAL,
    }
    return write_grid(tmp_path / "g", paper_grid(), runs, {"PASCAL / FedProx / +DEA": "it_would change | nothing"})


def texts(folder: Path, **options: Any) -> list[list[str]]:
    return [
        [line.label, *(entry.text for entry in line.entries)]
        for line in tabulate(*open_folder(folder), **options).lines
    ]


def test_the_published_table(paper):
    table = tabulate(*open_folder(paper))
    assert [str(column) for column in table.columns] == [
        "semseg mIoU ↑", "depth RMSE ↓", "normals mErr ↓", "edge odsF ↑", "Δ % ↑",
        "semseg mIoU ↑", "normals mErr ↓", "Δ % ↑",
    ]  # fmt: skip
    assert texts(paper) == [
        ["FedAvg", "23.05", "0.7213", "26.52", "75.19", "base", "40.00", "20.00", "base"],
        ["  +DEA", "30.78", "0.7052", "24.62", "74.77", "+10.59", "…", "…", "…"],
        ["FedProx", "20.00", "0.7213", "26.52", "75.19", "base", "…", "…", "…"],
        ["  +DEA", "23.05", "0.7213", "26.52", "75.19", "+3.81", "refused", "refused", "refused"],
    ]
    delta = table.lines[1].entries[4].estimate
    assert delta.mean == pytest.approx(10.593, abs=5e-4)
    assert delta.mean == delta_m(DEA, FEDAVG, DIRECTIONS)
    assert [[entry.best for entry in line.entries][:5] for line in table.lines] == [
        [False, False, False, True, False],
        [True, True, True, False, True],
        [False, False, False, True, False],
        [False, False, False, True, False],
    ]
    assert not any(entry.best for line in table.lines for entry in line.entries[5:])  # nothing to choose from
    assert table.notes == (
        "refused: PASCAL / FedProx / +DEA: it_would change | nothing.",
        "…: 2 of 8 runs have not finished: PASCAL / FedAvg / +DEA s0, PASCAL / FedProx s0.",
    )
    assert table.caption == (
        "test split (shared test); global model; mean over the clients with the task; seed 0; model kept at the end "
        "(round 1); in the units recorded: fractions, not percent, RMSE in metres, mErr in degrees; Δ %: mean change "
        "over the line's tasks, each seed against the same seed of the same base with '-'; 5 runs of the grid paper "
        "by fedloom 0.1.0."
    )


def test_text(paper):
    text = FORMATS["text"](tabulate(*open_folder(paper)))
    lines = text.splitlines()
    assert lines[0] == "A table"
    assert lines[2].split() == ["NYUD"] * 5 + ["PASCAL"] * 3
    assert [line.split() for line in lines[5:7]] == [
        ["FedAvg", "23.05", "0.7213", "26.52", "75.19", "base", "40.00", "20.00", "base"],
        ["+DEA", "30.78", "0.7052", "24.62", "74.77", "+10.59", "…", "…", "…"],
    ]
    assert lines[6].startswith("    +DEA")
    assert "\x1b" not in text
    assert re.search(r"\x1b\[1m *30\.78", to_text(tabulate(*open_folder(paper)), color=True))


def test_markdown(paper):
    assert FORMATS["markdown"](tabulate(*open_folder(paper))).splitlines()[:7] == [
        "**A table**",
        "",
        "| | NYUD: semseg mIoU ↑ | NYUD: depth RMSE ↓ | NYUD: normals mErr ↓ | NYUD: edge odsF ↑ | NYUD: Δ % ↑ "
        "| PASCAL: semseg mIoU ↑ | PASCAL: normals mErr ↓ | PASCAL: Δ % ↑ |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| FedAvg | 23.05 | 0.7213 | 26.52 | **75.19** | base | 40.00 | 20.00 | base |",
        "| &emsp;+DEA | **30.78** | **0.7052** | **24.62** | 74.77 | **+10.59** | … | … | … |",
        "| FedProx | 20.00 | 0.7213 | 26.52 | **75.19** | base | … | … | … |",
    ]
    assert r"it\_would change \| nothing" in FORMATS["markdown"](tabulate(*open_folder(paper)))


def test_csv(paper):
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](tabulate(*open_folder(paper))))))
    assert len(rows) == 4 * 8
    by_key = {(r["data"], r["base"], r["addon"], r["task"]): r for r in rows}
    dea = by_key["NYUD", "FedAvg", "+DEA", ""]
    assert float(dea["mean"]) == delta_m(DEA, FEDAVG, DIRECTIONS)
    assert (dea["metric"], dea["ci95_half"], dea["n"], dea["seeds"], dea["split"], dea["model"], dea["state"]) == (
        "delta_m", "", "1", "0", "test", "global", "value",
    )  # fmt: skip
    assert by_key["PASCAL", "FedProx", "+DEA", "semseg"]["state"] == "refused"
    assert by_key["PASCAL", "FedProx", "-", "semseg"]["state"] == "missing"
    assert by_key["NYUD", "FedAvg", "-", "depth"]["mean"] == "0.7213"


def test_latex(paper):
    text = FORMATS["latex"](tabulate(*open_folder(paper)))
    assert r" & \multicolumn{5}{c}{NYUD} & \multicolumn{3}{c}{PASCAL} \\" in text
    assert r"\cmidrule(lr){2-6} \cmidrule(lr){7-9}" in text
    assert r"semseg mIoU $\uparrow$ & depth RMSE $\downarrow$" in text
    assert r"\quad +DEA & \textbf{30.78} & \textbf{0.7052}" in text
    assert text.count(r"\midrule") == 2
    assert r"\ldots{}" in text
    assert r"it\_would" in text
    assert text.count("{") == text.count("}")


def test_html(paper):
    from html.parser import HTMLParser

    text = FORMATS["html"](tabulate(*open_folder(paper)))
    opened: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag not in ("script", "link", "img")
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balanced().feed(text)
    assert not opened
    assert '<th scope="colgroup" colspan="5">NYUD</th>' in text
    assert '<tr><th scope="row" class="label addon">+DEA</th><td><b>30.78</b></td>' in text
    assert '<td class="none">refused</td>' in text
    assert "<caption>A table</caption>" in text


def test_intervals_and_deltas_are_over_seeds(tmp_path):
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"B": {"method": "fedavg"}}, seeds=[0, 1, 2])
    runs = {("D", "B", "-", s): {"semseg": v} for s, v in enumerate((10.0, 20.0, 40.0))}
    runs |= {("D", "B", "+DEA", s): {"semseg": v} for s, v in enumerate((11.0, 24.0))}
    folder = write_grid(tmp_path, grid, runs)
    table = tabulate(grid, folder)
    base, dea = (line.entries for line in table.lines)
    assert base[0].estimate == Estimate.of([10.0, 20.0, 40.0])
    # 10 % and 20 %, seed by seed; the means alone would say -25 %.
    assert dea[1].estimate.mean == pytest.approx(15.0)
    assert dea[1].estimate.half == pytest.approx(12.706204736432095 * 5)
    assert [entry.text for entry in dea] == ["17.50 ± 82.59*", "+15.00 ± 63.53*"]
    assert table.notes == ("*: not all seeds.", "…: 1 of 6 runs have not finished: D / B / +DEA s2.")
    assert "over seeds 0, 1, 2" in table.caption


def test_delta_against_a_named_cell_or_none(paper):
    grid, _ = open_folder(paper)
    save(grid.model_copy(update={"delta": "FedProx/+DEA"}), paper, {})
    rows = texts(paper)
    assert [row[5] for row in rows] == ["+0.00", "+10.59", "-3.31", "base"]
    assert rows[0][8] == "…"
    save(grid.model_copy(update={"delta": "none"}), paper, {})
    assert len(texts(paper)[0]) == 1 + 6
    assert "Δ" not in tabulate(*open_folder(paper)).caption


def test_another_metric_than_the_tasks_own(paper):
    opened, folder = open_folder(paper)
    table = tabulate(opened.model_copy(update={"metric": "miou"}), folder)
    assert [column.task for column in table.columns] == ["semseg", "", "semseg", ""]
    assert [entry.text for entry in table.lines[1].entries[:2]] == ["30.78", "+33.54"]
    with pytest.raises(StateError, match=r"no task has the metric 'miuo'. Did you mean 'miou'\? Recorded: loss, merr,"):
        tabulate(opened.model_copy(update={"metric": "miuo"}), folder)


def test_bases_of_zero_are_left_out_and_said(tmp_path):
    grid = paper_grid(data={"D": {"recipe": "digits-tasks"}}, bases={"B": {"method": "fedavg"}})
    runs = {("D", "B", "-", 0): {"semseg": 0.0, "depth": 1.0}, ("D", "B", "+DEA", 0): {"semseg": 5.0, "depth": 0.5}}
    table = tabulate(grid, write_grid(tmp_path, grid, runs))
    assert table.lines[1].entries[2].text == "+50.00"
    assert table.notes == ("Δ % of D / B / +DEA leaves out semseg: 0 or undefined in the base.",)


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """Two clients with models of their own, and one model for both tasks."""
    grid = paper_grid(
        data={"NYUD": {"recipe": "digits-tasks"}},
        bases={"Local": {"method": "local"}, "FedAvg": {"method": "fedavg"}, "FedAMP": {"method": "fedprox"}},
        addons={"-": {}},
        delta="Local/-",
        show="clients",
    )
    runs = {
        ("NYUD", "Local", "-", 0): {"x": {"semseg": 10.0}, "y": {"depth": 0.5}},
        ("NYUD", "FedAvg", "-", 0): {"semseg": 20.0, "depth": 0.4},
    }
    return write_grid(tmp_path / "g", grid, runs)


def test_a_line_for_each_personal_model(clients):
    assert texts(clients) == [
        ["Local (semseg)", "10.00", "\\", "base"],
        ["Local (depth)", "\\", "0.5000", "base"],
        ["FedAvg", "20.00", "0.4000", "+60.00"],
        ["FedAMP", "…", "…", "…"],
    ]
    table = tabulate(*open_folder(clients))
    assert not any(entry.best for line in table.lines for entry in line.entries)
    assert "personal model of Local, global model of FedAvg" in table.caption
    assert r"Local (semseg) & 10.00 & \textbackslash{} & base" in FORMATS["latex"](table)
    assert "| 10.00 | \\\\ | base |" in FORMATS["markdown"](table)
    opened, folder = open_folder(clients)
    only = tabulate(opened.model_copy(update={"metric": "rmse"}), folder)
    assert [line.label for line in only.lines] == ["Local (depth)", "FedAvg", "FedAMP"]
    # Against the line of the same client, not against the mean over clients.
    shutil.rmtree(clients / "cells/NYUD/FedAvg")
    write_run(clients, Cell("NYUD", "FedAMP", "-", 0), {"x": {"semseg": 11.0}, "y": {"depth": 0.4}})
    assert texts(clients)[-2:] == [
        ["FedAMP (semseg)", "11.00", "\\", "+10.00"],
        ["FedAMP (depth)", "\\", "0.4000", "+20.00"],
    ]
    # A client's own base of 0 is said, too.
    shutil.rmtree(clients / "cells/NYUD/Local")
    write_run(clients, Cell("NYUD", "Local", "-", 0), {"x": {"semseg": 0.0}, "y": {"depth": 0.5}})
    assert [row[-1] for row in texts(clients)[-2:]] == ["nan", "+20.00"]
    note = "Δ % of NYUD / FedAMP, semseg leaves out semseg: 0 or undefined in the base."
    assert note in tabulate(*open_folder(clients)).notes


def test_clients_with_equal_tasks_keep_their_names(clients):
    values = {"x": {"semseg": 1.0}, "z": {"depth": 2.0}, "w": {"depth": 4.0}}
    write_run(clients, Cell("NYUD", "FedAMP", "-", 0), values)
    assert [row[0] for row in texts(clients)][3:] == ["FedAMP (semseg)", "FedAMP (z)", "FedAMP (w)"]


def test_what_cannot_be_tabulated(paper, tmp_path):
    grid, _ = open_folder(paper)
    with pytest.raises(StateError, match="no cell of grid paper has finished in"):
        tabulate(grid, tmp_path / "elsewhere")
    with pytest.raises(StateError, match=r"no val metrics"):
        tabulate(grid, paper, "val")
    with pytest.raises(StateError, match=r"is not a grid's folder: grid\.yaml is absent"):
        open_folder(tmp_path)
    write_run(paper, Cell("PASCAL", "FedProx", "-", 0), {"semseg": 1.0})
    with pytest.raises(StateError, match="not comparable, for the tasks differ"):
        tabulate(grid, paper)


def test_runs_that_go_on_are_missing(paper):
    write_run(paper, Cell("PASCAL", "FedProx", "-", 0), PASCAL, status="running")
    assert texts(paper)[2][6] == "…"


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
    delta, semseg, depth = made.axes
    assert [a.get_title() for a in made.axes] == ["Δ % ↑", "semseg mIoU ↑", "depth RMSE ↓"]
    line = next(
        one
        for one in semseg.lines
        if one.get_label() == "FedAvg" and len(one.get_xdata()) == 2 and one.get_marker() == "o"
    )
    assert list(line.get_xdata()) == [0.1, 1.0]
    assert list(line.get_ydata()) == [11.5, 12.5]
    over = paper_grid(figure={"name": "convergence", "tasks": ["depth"]}, addons=grid.addons, seeds=[0, 1])
    made = over.figure.entry.function(over, tmp_path, "test", **over.figure.params)
    (axes,) = made.axes
    assert [list(one.get_ydata()) for one in axes.lines][:2] == [[2.0, 1.0], [2.0, 0.9]]
    assert [one.get_label() for one in axes.lines][:2] == ["FedAvg", "FedAvg rho 0.1"]
    for name in ("f.png", "f.svg", "f.pdf"):
        draw(over, tmp_path, tmp_path / "new" / name)
        assert (tmp_path / "new" / name).stat().st_size > 1000
    with pytest.raises(UserError, match=r"f\.xyz: Format 'xyz' is not supported"):
        draw(over, tmp_path, tmp_path / "f.xyz")
    with pytest.raises(RecipeError, match=r"figure\.tasks: no task 'depht'\. Did you mean 'depth'\?"):
        draw(paper_grid(figure={"name": "convergence", "tasks": ["depht"]}), tmp_path, tmp_path / "f.png")
    with pytest.raises(RecipeError, match="has no figure"):
        draw(paper_grid(), tmp_path, tmp_path / "f.png")
    with pytest.raises(StateError, match="no cell of grid"):
        draw(over, tmp_path / "nowhere", tmp_path / "f.png")


def test_reading_grids_does_not_import_torch(paper):
    code = f"""
from fedloom.study.grid import open_folder
from fedloom.study.tables.table import tabulate
from fedloom.study.tables.formats import FORMATS
for write in FORMATS.values():
    write(tabulate(*open_folder({str(paper)!r})))
import fedloom.experiments.grid_run, fedloom.study.figures
"""
    assert not loaded(code, "torch", "matplotlib", "numpy")


def test_chosen_columns_are_what_is_shown_and_counted(paper, tmp_path):
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, columns=["depth", "semseg"])
    runs = {("NYUD", "FedAvg", "-", 0): FEDAVG, ("NYUD", "FedAvg", "+DEA", 0): DEA}
    write_grid(tmp_path / "some", grid, runs)
    assert texts(tmp_path / "some")[:2] == [
        ["FedAvg", "0.7213", "23.05", "base"],
        ["  +DEA", "0.7052", "30.78", "+17.88"],
    ]
    wrong = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, columns=["dept"])
    with pytest.raises(RecipeError, match=r"grid paper: columns: no task 'dept'\. Did you mean 'depth'\?"):
        tabulate(wrong, tmp_path / "some")


def test_wide_tables_have_data_sets_with_the_same_tasks_below_each_other(tmp_path):
    grid = paper_grid(data={name: {"recipe": "digits-tasks"} for name in ("1C", "2C_", "3C", "4C")})
    runs = {(name, "FedAvg", "-", 0): FEDAVG for name in ("1C", "2C_", "3C")} | {("2C_", "FedAvg", "+DEA", 0): DEA}
    table = tabulate(*open_folder(write_grid(tmp_path / "g", grid, runs)))
    columns, groups = table.layout
    assert [str(c) for c in columns] == ["semseg mIoU ↑", "depth RMSE ↓", "normals mErr ↓", "edge odsF ↑", "Δ % ↑"]
    assert [(name, [e.text for e in lines[1].entries]) for name, lines in groups] == [
        ("1C", ["…"] * 5),
        ("2C_", ["30.78", "0.7052", "24.62", "74.77", "+10.59"]),
        ("3C", ["…"] * 5),
    ]
    assert table.notes == (
        "No run has finished of 4C.",
        "…: 8 of 12 runs have not finished: 1C / FedAvg / +DEA s0, 1C / FedProx s0, 1C / FedProx / +DEA s0, "
        "2C_ / FedProx s0, 2C_ / FedProx / +DEA s0, 3C / FedAvg / +DEA s0 and 2 more.",
    )
    text = [line.split() for line in to_text(table).splitlines()]
    assert text[2] == ["semseg", "depth", "normals", "edge"]
    assert " ".join(text[3]) == "mIoU ↑ RMSE ↓ mErr ↓ odsF ↑ Δ % ↑"
    assert text[5] == ["1C:"]
    assert text[6] == ["FedAvg", "23.05", "0.7213", "26.52", "75.19", "base"]
    assert FORMATS["markdown"](table).splitlines()[9] == r"| *2C\_* | | | | | |"
    latex = FORMATS["latex"](table)
    assert r"\multicolumn{6}{l}{\emph{2C\_}} \\" in latex
    assert "cmidrule" not in latex
    assert FORMATS["html"](table).count('<th colspan="6" class="group">') == 3
    assert len(FORMATS["csv"](table).splitlines()) == 1 + 4 * 15  # beside each other
    rows = FORMATS["markdown"](tabulate(*open_folder(tmp_path / "g"))).splitlines()
    assert len({row.count("|") for row in rows if row.startswith("|")}) == 1


def test_average_over_tasks_and_bits(tmp_path: Path) -> None:
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, also=["average", "bits"], columns=["semseg"])
    runs = {("NYUD", "FedAvg", "-", 0): {"semseg": 20.0}, ("NYUD", "FedAvg", "+DEA", 0): {"semseg": 30.0}}
    folder = write_grid(tmp_path / "g", grid, runs)
    for path in folder.rglob("metrics.jsonl"):
        sent = [{"client": "a", "role": "encoder", "task": None, "bytes": 250_000}]
        (path.parent / "bytes.jsonl").write_text(json.dumps({"round": 1, "up": sent, "down": []}) + "\n")
    table = tabulate(grid, folder)
    assert [str(column) for column in table.columns] == ["semseg mIoU ↑", "average ↑", "Mbit up a task ↓", "Δ % ↑"]
    assert [entry.text for entry in table.lines[1].entries] == ["30.00", "30.00", "2.0000", "+50.00"]


def test_no_average_over_different_metrics(paper: Path) -> None:
    grid, folder = open_folder(paper)
    with pytest.raises(RecipeError, match="an average over tasks needs one metric, found merr, miou, odsf, rmse"):
        tabulate(grid.model_copy(update={"also": ("average",)}), folder)


def test_domains_as_columns(tmp_path: Path) -> None:
    grid = paper_grid(
        data={"D": {"recipe": "digits-domains"}}, show="domains", also=["average", "spread"], columns=None, delta="none"
    )
    values = {"a": {"semseg": 40.0}, "b": {"semseg": 60.0}, "c": {"semseg": 20.0}}
    folder = write_grid(tmp_path / "g", grid, {})
    domains = {"a": "photo", "b": "photo", "c": "sketch"}
    write_run(folder, Cell("D", "FedAvg", "-", 0), values, domains=domains)
    table = tabulate(grid, folder)
    assert [str(column) for column in table.columns] == [
        "photo mIoU ↑", "sketch mIoU ↑", "average ↑", "standard deviation ↓",
    ]  # fmt: skip
    assert [entry.text for entry in table.lines[0].entries] == ["50.00", "20.00", "35.00", "21.21"]
    assert "mean over the clients of a domain" in table.caption


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
    base, dea = ([entry.estimate.mean for entry in line.entries if entry.estimate] for line in table.lines)
    # round 2 of seed 0 and round 3 of seed 1
    assert base == pytest.approx([45.0, 40.0, (50.0 + 35.0) / 2, (math.dist([40], [60]) + 30.0) / 2 / math.sqrt(2)])
    assert dea == pytest.approx([90.0, 80.0, 85.0, 2 * base[3], 100.0])
    assert "model of each run's best round by its mean over domains on validation data (round 2 to 3)" in table.caption
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](table))))
    assert {(r["at"], r["seeds"], r["rounds"]) for r in rows} == {("best-validation", "0 1", "2 3")}

    last = tabulate(grid.model_copy(update={"at": "last"}), folder)
    assert [entry.text for entry in last.lines[0].entries[:3]] == ["10.00 ± 0.00"] * 3
    assert "model kept at the end (round 4)" in last.caption
    for path in folder.rglob("metrics.jsonl"):  # whatever test says, the choice is the same
        path.write_text(re.sub(r'"value": [0-9.]+, "split": "test"', '"value": 7.0, "split": "test"', path.read_text()))
    assert [line.rounds for line in tabulate(grid, folder).lines] == [{"D": (2, 3)}] * 2


def test_domains_of_the_model_that_early_stopping_kept(validated: Path) -> None:
    grid, folder = open_folder(validated)
    for path in folder.rglob("run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "stopped early", "final_round": 3}))
    table = tabulate(grid.model_copy(update={"at": "last"}), folder)
    assert [entry.text for entry in table.lines[0].entries[:3]] == ["50.00 ± 0.00", "20.00 ± 0.00", "35.00 ± 0.00"]
    assert "(round 3)" in table.caption


def test_best_on_validation_over_tasks(tmp_path: Path) -> None:
    grid = paper_grid(
        data={"D": {"recipe": "digits-tasks"}}, bases={"L": {"method": "local"}}, at="best-validation", show="clients"
    )
    folder = write_grid(tmp_path / "g", grid, {})
    history = of_clients(ON_TEST)
    write_run(folder, Cell("D", "L", "-", 0), history[4], history=history, val=of_clients(ON_VAL))
    table = tabulate(grid, folder)
    assert [(line.label, line.entries[0].text) for line in table.lines[:2]] == [("L (a)", "40.00"), ("L (b)", "60.00")]
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


def test_every_metric_with_ranks(tmp_path):
    grid = paper_grid(data={"NYUD": {"recipe": "digits-tasks"}}, addons={"-": {}}, seeds=[0, 1])
    numbers = {("FedAvg", 0): (0.2, 1.0), ("FedAvg", 1): (0.4, 1.0), ("FedProx", 0): (0.6, 3.0)}
    for (base, seed), (miou, loss) in numbers.items():
        path = write_run(tmp_path, Cell("NYUD", base, "-", seed), {"semseg": miou}) / "metrics.jsonl"
        line = json.loads(path.read_text())
        more = [{**entry, "metric": "loss", "value": loss} for entry in line["metrics"]]
        path.write_text(json.dumps({**line, "metrics": line["metrics"] + more}) + "\n")
    save(grid, tmp_path, {})
    sheet = all_metrics(grid, tmp_path).sheet()
    assert sheet.head[1:] == ("FedAvg", "FedProx")
    lines = {line[0]: line[1:] for line in sheet.lines}
    assert lines == {
        "NYUD: semseg (loss) ↓": ("1.0000 ± 0.0000 (1)", "3.0000 (2)"),
        "NYUD: semseg (miou) ↑": ("0.3000 ± 1.2706 (2)", "0.6000 (1)"),
    }
    rows = all_metrics(grid, tmp_path).to_csv().splitlines()
    assert len(rows) == 5
    assert "NYUD,FedProx,semseg,miou,max,0.6,,1" in rows
