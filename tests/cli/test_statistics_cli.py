"""fedloom compare and fedloom table with --tests and --ranks."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fedloom.study.grid import Cell
from grid_support import paper_grid, write_grid

VALUES = {"FedAvg": (10.0, 12.0, 11.0), "FedProx": (12.0, 13.5, 13.0), "Other": (9.0, 12.5, 10.0)}


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    bases = {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": "fedprox"}, "Other": {"method": "local"}}
    made = paper_grid(bases=bases, addons={"-": {}}, seeds=[0, 1, 2], delta="FedAvg/-")
    cells = {("NYUD", base, "-", s): {"semseg": v} for base, vs in VALUES.items() for s, v in enumerate(vs)}
    folder = write_grid(Path("g"), made, cells)
    for data, base, addon, seed in cells:
        file = Cell(data, base, addon, seed).folder(folder) / "run.json"
        info = json.loads(file.read_text())
        file.write_text(json.dumps({**info, "partition_hash": f"p{seed}", "recipe_text": base}))
    return folder


def test_a_grid_is_tested_in_one_command(grid, fedloom_):
    code, out, _ = fedloom_("table", grid, "--tests", "--format", "csv")
    assert code == 0
    rows = {(r["method"], r["task"]): r for r in csv.DictReader(io.StringIO(out))}
    assert float(rows["FedProx", "semseg"]["gain"]) == pytest.approx((2 + 1.5 + 2) / 3)
    assert {r["base"] for r in rows.values()} == {"FedAvg"}
    _, out, _ = fedloom_("table", grid, "--tests", "--base", "Other/-", "--format", "latex", "--out", "t.tex")
    assert out == "t.tex\n"
    assert Path("t.tex").read_text("utf-8").startswith("\\begin{table}\n\\caption{A table: paired tests over seeds")
    code, _, err = fedloom_("table", grid, "--base", "Othr/-")
    assert code == 2
    assert "Did you mean 'Other/-'?" in err


def test_the_reference_of_a_plain_table_can_be_chosen(grid, fedloom_):
    _, out, _ = fedloom_("table", grid, "--base", "FedProx/-")
    assert next(line for line in out.splitlines() if line.strip().startswith("FedProx")).split()[-1] == "base"


def test_a_grid_is_ranked(grid, fedloom_):
    code, out, _ = fedloom_("table", grid, "--ranks", "seeds")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["FedProx", "FedAvg", "Other"]
    assert "k = 3 and blocks N = 3" in out
    _, out, _ = fedloom_("table", grid, "--ranks", "tasks", "--format", "html")
    assert "blocks (a task&#x27;s mean over seeds)" in out


def test_runs_are_tested_and_ranked(grid, fedloom_):
    runs = sorted(grid.glob("cells/NYUD/*/*/s*"))
    code, out, _ = fedloom_("compare", *runs, "--tests")
    assert code == 0
    assert out.splitlines()[0] == "Paired tests over seeds, against FedAvg-"
    assert "p_holm" in fedloom_("compare", *runs, "--tests", "--format", "csv")[1]
    assert "| FedProx- | semseg (miou) ↑ |" in fedloom_("compare", *runs, "--tests", "--format", "markdown")[1]
    fedloom_("compare", *runs, "--tests", "--format", "latex", "--out", "t.tex")
    assert r"\toprule" in Path("t.tex").read_text("utf-8")
    assert "critical difference" in fedloom_("compare", *runs, "--ranks", "seeds")[1]
    fedloom_("compare", *runs, "--format", "latex", "--out", "plain.tex")
    # neither is bold: their intervals meet
    assert r"semseg (miou) $\uparrow$ & 11.00 $\pm$ 2.48 & 12.83 $\pm$ 1.90" in Path("plain.tex").read_text("utf-8")


def test_clients_are_tested_where_asked_for(grid, fedloom_):
    runs = sorted(grid.glob("cells/NYUD/*/*/s*"))
    for command, title in ((("table", grid), "A table: paired"), (("compare", *runs), "Paired")):
        _, out, _ = fedloom_(*command, "--tests", "--over", "clients")
        assert out.startswith(f"{title} tests over clients, against FedAvg")
        assert "a test needs two clients with numbers of both" in out
        code, _, err = fedloom_(*command, "--over", "clients")
        assert (code, err) == (2, "error: --over says what tests pair: it needs --tests\n")


def test_ranks_are_drawn(grid, fedloom_):
    pytest.importorskip("matplotlib")
    runs = sorted(grid.glob("cells/NYUD/*/*/s*"))
    assert fedloom_("table", grid, "--ranks", "seeds", "--plot", "new/cd.svg", "--out", "t.txt")[0] == 0
    assert fedloom_("compare", *runs, "--ranks", "tasks", "--plot", "cd.png")[0] == 0
    assert "FedProx" in Path("new/cd.svg").read_text("utf-8")
    assert Path("cd.png").read_bytes().startswith(b"\x89PNG")
    for command in (("table", grid), ("compare", *runs)):
        code, _, err = fedloom_(*command, "--tests", "--plot", "x.svg")
        assert (code, err) == (2, "error: --plot draws ranks: it needs --ranks seeds or --ranks tasks\n")
        assert not Path("x.svg").exists()


def test_one_table_at_a_time(grid, fedloom_):
    for command in (("table", grid), ("compare", *sorted(grid.glob("cells/NYUD/*/*/s*")))):
        code, _, err = fedloom_(*command, "--tests", "--ranks", "seeds")
        assert (code, err) == (2, "error: --tests and --ranks are two tables: choose one\n")
