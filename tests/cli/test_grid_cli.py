"""fedloom grid, compare and plot figure, with children that answer at once."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.cli.grid import size
from fedloom.errors import StateError, UserError
from fedloom.experiments import grid_run
from fedloom.federation.recipes import Recipe, dump
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import Cell, replaced
from grid_support import TINY, paper_grid


class Child:
    """Stands for a process: `spawn` writes the folder of a finished run and leaves its messages in the pipe."""

    exitcode = 0

    def __init__(self) -> None:
        self.ran: list[Path] = []
        self.fails = self.interrupts = False

    def spawn(self, function: Any, recipe: Recipe, cell: Cell, grid_folder: Path) -> Any:
        if self.interrupts:
            raise KeyboardInterrupt
        folder = cell.folder(grid_folder)
        self.ran.append(folder)
        here, there = multiprocessing.Pipe(duplex=False)
        if self.fails and recipe.method.add:
            there.send(("failed", "no space left", 0))
            return here, self
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(dump(recipe))
        info = {
            "method": recipe.method.name,
            "tasks": {"digit": {"kind": "classification", "primary": "accuracy", "metrics": {"accuracy": "max"}}},
            "clients": {"a": {"tasks": {"digit": 1.0}}},
            "status": "finished",
            "final_round": 1,
        }
        value = 0.75 if recipe.method.add else 0.5
        metric = {"client": "a", "task": "digit", "metric": "accuracy", "value": value, "model": "global"}
        line = {"round": 1, "metrics": [{**metric, "split": "test", "data": "shared test"}]}
        (folder / "run.json").write_text(json.dumps(info))
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        for message in (("round", 0, 0), ("round", 1, 2_000_000), ("done", "finished", 3_000_000)):
            there.send(message)
        return here, self

    def ask(self, function: Any, by_name: dict[str, Recipe], *more: Any) -> Any:
        refused = {name: "it would do nothing" for name, recipe in by_name.items() if recipe.method.name == "local"}
        return refused, {grid_run._size(recipe): 123_000_000 for recipe in by_name.values()}

    def terminate(self) -> None: ...


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Child:
    fake = Child()
    monkeypatch.setattr(grid_run, "_spawn", fake.spawn)
    monkeypatch.setattr(grid_run, "_ask", fake.ask)
    monkeypatch.setattr(grid_run, "_end", lambda process: None)
    monkeypatch.chdir(tmp_path)
    Path("g.yaml").write_text("# A grid.\n" + yaml.safe_dump(TINY, sort_keys=False))
    return fake


def test_run_then_table_then_figure(child, fedloom_):
    code, out, err = fedloom_("grid", "g.yaml", "seeds=[0,1]")
    assert code == 0
    assert out == (
        "4 of 4 runs are finished; the largest run took 3 MB of memory\nits table: fedloom compare grids/tiny\n"
    )
    assert err.splitlines()[0].startswith("[1/4] Digits / FedAvg")
    assert Path("grids/tiny/cells/Digits/FedAvg/+DEA/s1/run.json").is_file()
    assert fedloom_("grid", "g.yaml", "seeds=[0,1,2]")[2].splitlines()[0] == "4 of 6 runs have finished already"
    assert len(child.ran) == 6
    code, out, _ = fedloom_("compare", "grids/tiny")
    assert code == 0
    assert "+50.00 ± 0.00" in out
    assert "\x1b" not in out
    assert fedloom_("compare", "g.yaml")[1] == out
    assert fedloom_("compare", "tiny")[1] == out
    assert "tiny: no such folder" not in fedloom_("report", "tiny")[2]
    assert "Did you mean 'tiny'?" in fedloom_("compare", "tinny")[2]
    code, out, _ = fedloom_("compare", "g.yaml", "--format", "html", "--out", "new/t.html")
    assert (code, out) == (0, "new/t.html\n")
    assert "<b>0.7500" in Path("new/t.html").read_text("utf-8")
    code, out, _ = fedloom_("compare", "g.yaml", "--metric", "loss")
    assert code == 0
    assert "loss ↓" in out
    code, _, err = fedloom_("compare", "g.yaml", "--metric", "losss")
    assert code == 2
    assert err.startswith("error: no task has the metric 'losss'. Did you mean 'loss'? Recorded: ")
    code, _, err = fedloom_("compare", "g.yaml", "--at", "best-validation")
    assert code == 2
    assert "s0: at is best-validation, and there is no validation score to choose a round by" in err
    assert fedloom_("plot", "figure", "g.yaml", "--out", "f.png")[2].startswith(
        "error: grid tiny has no figure: 'figure' is one of "
    )


def test_a_grid_goes_on_in_its_folder(child, fedloom_):
    child.interrupts = True
    code, _, err = fedloom_("grid", "g.yaml", "training.rounds=3", "-q", "--out", "here")
    assert (code, err) == (130, "interrupted; continue with: fedloom grid here\n")
    child.interrupts = False
    assert fedloom_("grid", "here", "-q")[0] == 0
    assert {path.parts[0] for path in child.ran} == {"here"}
    assert "rounds: 3" in (child.ran[0] / "recipe.yaml").read_text()


def test_failures_are_listed_and_refusals_are_not_failures(child, fedloom_):
    value = TINY | {"bases": {**TINY["bases"], "Local": {"method": "local"}}}
    Path("g.yaml").write_text(yaml.safe_dump(value, sort_keys=False))
    refusals = "refused: Digits / Local: it would do nothing\nrefused: Digits / Local / +DEA: it would do nothing\n"
    assert fedloom_("grid", "g.yaml", "-q")[::2] == (0, refusals)
    child.fails = True
    code, out, err = fedloom_("grid", "g.yaml", "-q", "--out", "other", "--jobs", "2", "--memory", "1GB")
    assert code == 1
    assert err == refusals + "failed: Digits / FedAvg / +DEA s0: no space left\n"
    assert out.startswith("1 of 2 runs are finished")  # refused ones do not count
    out = fedloom_("compare", "other")[1]
    assert "refused: Digits / Local: it would do nothing." in out
    assert "…: 1 of 2 runs have not finished: Digits / FedAvg / +DEA s0." in out


def test_dry_run_and_a_choice(child, fedloom_):
    code, out, _ = fedloom_("grid", "g.yaml", "--dry-run", "--only", "+DEA")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["Digits", "/", "FedAvg", "/", "+DEA", "1", "new", "123", "MB"] in rows
    assert out.endswith("1 runs would start, in grids/tiny\n")
    assert not Path("grids").exists()
    fedloom_("grid", "g.yaml", "--only", "+DEA", "-q")
    assert [path.parent.name for path in child.ran] == ["+DEA"]


def test_the_packaged_grids_are_listed(fedloom_):
    code, out, _ = fedloom_("grid")
    assert code == 0
    assert any(line.split()[:1] == ["feddea/table3"] and line.split()[-1] == "222" for line in out.splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grid", "feddea/tabel3"], "no grid 'feddea/tabel3': neither a file nor a packaged grid. Did you mean"),
        (["grid", "g.yaml", "training.rouds=1"], "training.rouds: unknown key. Did you mean 'rounds'?"),
        (["grid", "g.yaml", "--memory", "lots"], "--memory: 'lots' found, expected a size such as 8GB or 500MB"),
        (["grid", "g.yaml", "--only", "x"], "no label 'x' in the grid. Labels: Digits, FedAvg, -, +DEA"),
        (["compare", "g.yaml"], "has not been run in grids/tiny: run `fedloom grid g.yaml`"),
        (["compare", "."], ". is not a run folder: run.json is absent"),
        (["plot", "figure", "feddea/table3", "--out", "x.png"], "has not been run"),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(child, fedloom_, args, message):
    code, out, err = fedloom_(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert not child.ran


def test_a_replaced_section_is_told_before_anything_runs(child, fedloom_):
    code, _, err = fedloom_("grid", "g.yaml", "training={rounds: 1}", "--dry-run")
    assert code == 0
    assert err.startswith("warning: Digits / FedAvg: training replaces the whole section, so these keys")
    assert fedloom_("grid", "g.yaml", "training.rounds=1", "--dry-run")[2] == ""
    recipe = {"training": {"rounds": 2}, "evaluation": {"splits": ["val"]}, "peers": {"choose": {"top": 3}}}
    bases = {"A": {"evaluation": {"every": 2}, "peers": {"choose": "all"}}}
    (told,) = replaced(paper_grid(data={"Digits": {"recipe": recipe}}, bases=bases, references=[]))
    assert told.startswith("Digits / A: evaluation replaces the whole section, so these keys")
    assert ": evaluation.splits. To" in told


def test_a_folder_of_run_folders_says_so(tmp_path):
    for name in ("fedavg-s0", "local-s0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(
        StateError, match="run.json is absent; 2 folders in it are run folders, such as fedavg-s0: name"
    ):
        Run.read(tmp_path)
    run = tmp_path / "grid/cells/P/Local/plain/s0"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(StateError, match="1 folder in it is a run folder, such as cells/P/Local/plain/s0: name"):
        Run.read(tmp_path / "grid")


def test_sizes():
    assert [size(text) for text in ("8GB", "500 MB", "2e9", "1.5G", "7B")] == [
        8 * 10**9,
        5 * 10**8,
        2 * 10**9,
        15 * 10**8,
        7,
    ]
    for text in ("", "GB", "-1GB", "1.2.3", "8 gigabytes", "0"):
        with pytest.raises(UserError, match="--memory"):
            size(text)
