"""The command line, with the runtime replaced by one that answers at once, and start-up without torch."""

from __future__ import annotations

import atexit
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fedloom.engines
from fedloom import __version__
from fedloom.cli.app import app
from fedloom.engines import processes
from fedloom.errors import RecipeError, UserError
from fedloom.federation.recipes import Recipe, dump, load
from fedloom.federation.rounds.progress import Lines, Progress, progress
from fedloom.federation.runs.reader import Run


@dataclass
class FakeApi:
    """Writes the folder of a run of one round; `interrupt` stops it half-way."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    interrupt: bool = False

    def run(self, recipe: Recipe, folder: Path, *, progress: Any) -> Any:
        self.calls.append(("run", recipe, folder, progress))
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump(recipe))
        if progress is not None:
            progress.start(10, 0)
            progress.round(1, {"training loss": 0.5})
        if self.interrupt:
            raise KeyboardInterrupt
        return self._finish(folder, 0.5 if recipe.method.name == "fedavg" else 0.4)

    def resume(self, folder: Path, *, progress: Any, accept_changes: bool = False, overrides: Any = ()) -> Any:
        self.calls.append(("resume", folder, progress))
        return self._finish(folder, 0.5)

    def plan(self, recipe: Recipe) -> Any:
        clients = [
            {"client": "a", "tasks": {"digit": 1.0}, "domain": None, "train": 9, "val": 1, "labels": {"digit": [6, 4]}},
            {"client": "b", "tasks": {"odd": 0.5}, "domain": None, "train": 8, "val": 2, "labels": {"odd": [5, 5]}},
        ]
        return SimpleNamespace(
            method="method fedavg\nserver:\n  Mean()\n",
            parameters={"encoder": 1234},
            clients=clients,
            bytes_up=1500,
            bytes_down=3000,
            rough={},
            memory={"data": 2_000_000},
            constant={"digit": ("accuracy", 0.1)},
            notes=["mind this"],
        )

    def _finish(self, folder: Path, value: float) -> Any:
        recipe = load(folder / "recipe.yaml")
        info = {
            "method": recipe.method.name,
            "tasks": {"digit": {"kind": "classification", "primary": "accuracy", "metrics": {"accuracy": "max"}}},
            "clients": {"a": {"tasks": {"digit": 1.0}}},
            "status": "finished",
            "rounds": 1,
            "final_round": 1,
            "partition_hash": "p",
        }
        metric = {"client": "a", "task": "digit", "metric": "accuracy", "value": value, "model": "global"}
        line = {"round": 1, "metrics": [{**metric, "split": "test", "data": "shared test"}]}
        (folder / "run.json").write_text(json.dumps(info))
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        sent = {"client": "a", "role": "encoder", "task": None, "bytes": 1500}
        (folder / "bytes.jsonl").write_text(json.dumps({"round": 1, "up": [sent], "down": []}) + "\n")
        final = Run.read(folder).final
        table = f"digit accuracy {value}"
        return SimpleNamespace(folder=folder, status="finished", measured=True, table=lambda: table, final=final)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "fedloom.engines.api", fake)
    monkeypatch.setattr(fedloom.engines, "api", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def test_version_and_help(fedloom_):
    assert fedloom_("--version") == (0, f"{__version__}\n", "")
    code, out, _ = fedloom_("--help")
    assert code == 0
    assert all(name in out for name in ("run", "resume", "show", "methods", "recipes", "compare"))
    assert all(fedloom_(name, "--help")[0] == 0 for name in ("run", "resume", "show", "methods", "recipes", "compare"))


def test_run_writes_to_a_folder_of_its_own(api, fedloom_):
    code, out, err = fedloom_("run", "digits-tasks", "training.rounds=3", "method.add.feddea={}", "seed=2")
    assert code == 0
    assert out == (
        "digit accuracy 0.5\n"
        "sent by clients: 1.5 kB, sent to clients: 0 B\n"
        "finished: runs/digits-tasks-fedavg+feddea-s2\n"
    )
    assert err == "round 1/10  training loss 0.5  0:00 spent, 0:00 left\n"
    (_, recipe, folder, _) = api.calls[0]
    assert (recipe.training.rounds, recipe.seed, folder.is_dir()) == (3, 2, True)


def test_quiet_means_no_progress(api, fedloom_):
    assert fedloom_("run", "digits-tasks", "--quiet", "--out", "x")[2] == ""
    assert api.calls[0][2] == Path("x")
    assert type(api.calls[0][3]) is Progress
    assert fedloom_("resume", "x", "-q")[2] == ""


@pytest.mark.parametrize(("workers", "prepared"), [("2", 1), ("1", 0), ("auto", 0)])
def test_workers_load_torch_while_this_process_does(api, fedloom_, monkeypatch, workers, prepared):
    calls = []
    monkeypatch.setattr(processes, "prepare", lambda: calls.append(len(api.calls)))
    fedloom_("run", "digits-tasks", f"runtime.workers={workers}", "--quiet")
    assert calls == [0] * prepared  # before the run begins


def test_the_interpreter_ends_without_a_search_for_garbage(fedloom_, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    fedloom_("--version")
    assert gc.freeze in at_exit


def test_a_folder_is_never_overwritten(api, fedloom_):
    Path("x").mkdir()
    Path("x/precious").write_text("")
    code, _, err = fedloom_("run", "digits-tasks", "--out", "x")
    assert (code, err) == (2, "error: x is not empty: choose another folder with --out\n")
    fedloom_("run", "digits-tasks")
    _, _, err = fedloom_("run", "digits-tasks")
    assert "continue it with `fedloom resume runs/digits-tasks-fedavg-s0`, or choose another folder with --out" in err
    assert len(api.calls) == 1


def test_interrupted_runs_say_how_to_go_on(api, fedloom_):
    api.interrupt = True
    code, out, err = fedloom_("run", "digits-tasks", "-q")
    assert (code, out) == (130, "")
    assert err == "interrupted; continue with: fedloom resume runs/digits-tasks-fedavg-s0\n"
    api.interrupt = False
    assert fedloom_("resume", "runs/digits-tasks-fedavg-s0")[0] == 0
    assert api.calls[-1][:2] == ("resume", Path("runs/digits-tasks-fedavg-s0"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "digits-task"], "no recipe 'digits-task': neither a file nor a packaged recipe. Did you mean"),
        (["run", "digits-tasks", "training.rouds=1"], "training.rouds: unknown key. Did you mean 'rounds'?"),
        (["show", "digits-tasks", "method=fedprx"], "method.name: unknown method 'fedprx'. Did you mean 'fedprox'?"),
        (["resume", "nowhere"], "nowhere is not a run folder: recipe.yaml is absent"),
        (["methods", "fedda"], "unknown method or add-on 'fedda'. Did you mean 'feddea'?"),
        (["methods", "zzz"], "unknown method or add-on 'zzz'. Nearest of "),
        (["show", "digits-tasks", "data={tasks: [digit]}"], "data.name: missing, expected one of "),
        (["compare", "nowhere"], "nowhere: no such folder, and no grid of this name is packaged or was run"),
    ],
)
def test_mistakes_get_one_message_and_exit_code_2(api, fedloom_, args, message):
    code, out, err = fedloom_(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert not api.calls


def test_an_unknown_command_gets_one_suggestion(fedloom_):
    code, _, err = fedloom_("grids")
    assert (code, err.count("'grid'")) == (2, 1)


def test_show(api, fedloom_):
    code, out, _ = fedloom_("show", "digits-tasks", "seed=5")
    assert code == 0
    whole = fedloom_("show", "digits-tasks", "seed=5", "--full")[1]
    assert "seed: 5\n" in whole
    assert "method fedavg\nserver:\n  Mean()\n" in whole
    assert "seed: 5\n" not in out
    assert len(out.splitlines()) <= 25
    rows = [line.split() for line in out.splitlines()]
    assert ["client", "tasks", "train", "val"] in rows  # no column for the absent domains
    assert ["a", "digit", "9", "1"] in rows
    assert ["b", "odd", "0.5", "8", "2"] in rows
    assert ["b", "odd", "0.5", "8", "2", "odd", "5/5"] in [line.split() for line in whole.splitlines()]
    assert ["parameters", "encoder", "1,234"] in rows
    assert ["memory", "data", "2", "MB"] in rows
    assert ["bytes", "per", "round", "1.5", "kB", "from", "clients,", "3", "kB", "to", "clients"] in rows
    assert out.endswith("note: mind this\nevery setting: the same command with --full\n")


def test_show_lists_few_of_many_clients(api, fedloom_, monkeypatch):
    few = api.plan
    many = lambda recipe: SimpleNamespace(**{**vars(few(recipe)), "clients": few(recipe).clients * 50})  # noqa: E731
    monkeypatch.setattr(api, "plan", many)
    out = fedloom_("show", "digits-tasks")[1]
    assert "... and 93 more clients" in out
    assert len(out.splitlines()) <= 25
    assert len(fedloom_("show", "digits-tasks", "--full")[1].splitlines()) > 125


def test_recipes_begins_with_a_few(fedloom_):
    first, every = (fedloom_("recipes", *more)[1] for more in ((), ("--papers",)))
    assert len(first.splitlines()) <= 20
    assert "thesis/" not in first
    assert "thesis/nyud-mini" in every
    assert fedloom_("recipes", "--out", "s.json")[2].startswith("error: --out is only for --schema")


def test_former_names_of_commands_work_and_say_the_new_name(fedloom_):
    code, _, err = fedloom_("bed", "nothing")
    assert code == 2
    assert err.startswith("`fedloom bed` is now called `fedloom study benchmark`\nerror: ")
    assert {name for name, command in get_command(app).commands.items() if command.hidden} >= {
        "table",
        "picture",
        "audit",
    }


def test_methods_and_recipes(fedloom_):
    _, out, _ = fedloom_("methods")
    assert all(name in out for name in ("fedavg", "fedprox", "local", "feddea"))
    _, out, _ = fedloom_("methods", "feddea")
    assert "a number greater than 0 and of at most 1" in out
    assert out.endswith("Use it: fedloom run RECIPE method.add.feddea={}\n")
    assert fedloom_("methods", "local")[1].endswith("Use it: fedloom run RECIPE method=local\n")
    assert fedloom_("methods", "server-step")[1].endswith("RECIPE method.add.server-step.step=VALUE\n")  # no default
    _, out, _ = fedloom_("recipes")
    assert "Four tasks on real digits" in out


def test_compare(api, fedloom_):
    for method in ("fedavg", "local"):
        fedloom_("run", "digits-tasks", f"method={method}", "--out", method, "-q")
    runs = ("compare", "fedavg", "local", "--base", "local", "--metric", "accuracy")
    code, out, _ = fedloom_(*runs)
    assert code == 0
    assert "+25.00" in out
    assert fedloom_(*runs, "--format", "csv", "--out", "t.csv") == (0, "t.csv\n", "")
    assert fedloom_(*runs, "--format", "markdown", "--out", "t.md")[0] == 0
    assert "<td><b>0.5000</b></td>" in fedloom_(*runs, "--format", "html")[1]
    assert fedloom_(*runs, "--out", "t.txt")[1] == "t.txt\n"
    assert "Δm % against local" in Path("t.txt").read_text("utf-8")
    assert "| Δm % against local | +25.00 | base |" in Path("t.md").read_text("utf-8")
    assert "fedavg,,delta_m,max,24.99" in Path("t.csv").read_text("utf-8")
    assert fedloom_(*runs, "--format", "csv", "--out", "t.csv")[0] == 0
    for words in (runs, (*runs, "--format", "csv", "--json"), ("recipes", "--schema")):
        assert "no .csv file" in fedloom_(*words, "--out", "t.csv")[2]
        assert "fedavg,,delta_m,max,24.99" in Path("t.csv").read_text("utf-8")
    code, _, err = fedloom_("compare", "fedavg", "--out", "t.csv/t.txt")
    assert (code, err) == (2, "error: t.csv/t.txt: File exists\n")
    assert fedloom_("compare", "fedavg", "--split", "train")[0] == 2
    assert "no val metrics" in fedloom_("compare", "fedavg", "--split", "val")[2]
    for name in ("--trials", "--seed-count"):
        assert f"{name} is only for a recipe" in fedloom_(*runs, name, "2")[2]
    assert "--base: the runs of a recipe are compared with local" in fedloom_("compare", "digits-tasks", *runs[-4:])[2]


def test_a_recipe_is_compared_with_its_changes(fedloom_, monkeypatch):
    asked: list[Any] = []

    def compare(recipe, folder, seeds, **_):
        asked.append((recipe.training.rounds, recipe.model.name, folder, seeds))
        raise UserError("asked")

    monkeypatch.setattr("fedloom.experiments.compared.compare", compare)
    small = ("digits-tasks", "training.rounds=7", "model.name=cnn", "name=small")
    fedloom_("compare", *small, "--trials", "2")
    fedloom_("compare", *small, "--seed-count", "10")
    assert asked == [(7, "cnn", Path("comparisons/small"), seeds) for seeds in (None, 10)]
    assert "training.round: unknown key" in fedloom_("compare", "digits-tasks", "training.round=7")[2]
    assert "--trials is only for a recipe" in fedloom_("compare", "digits-tasks", "other", "--trials", "2")[2]


def test_lines_come_about_ten_times_in_a_run(capsys):
    lines = progress()
    assert isinstance(lines, Lines)  # stderr is no terminal here
    lines.start(40, 20)
    for number in range(21, 41):
        lines.client(number, 1, 2)
        lines.round(number, {"training loss": 0.25, "val accuracy": 0.5})
    lines.event("mind this")
    lines.stop()
    err = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0] for line in err[:-1]] == [f"round {n}/40" for n in (24, 28, 32, 36, 40)]
    assert err[-2:] == ["round 40/40  training loss 0.25  val accuracy 0.5  0:00 spent, 0:00 left", "mind this"]


def test_bars_draw_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    bars = progress()
    bars.event("before the start")
    bars.start(4, 1)
    bars.client(2, 1, 3)
    bars.round(2, {"training loss": 0.25})
    bars.event("client [a] is late")
    bars.stop()
    bars.stop()
    err = capsys.readouterr().err
    assert "2/4" in err
    assert "loss 0.25" in err
    assert "client [a] is late" in err


@pytest.mark.parametrize("text", ["", "5", "[bases]"])
def test_what_is_no_mapping_is_nothing_to_compare(text: str, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(text)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "g.yaml")])
    assert isinstance(result.exception, RecipeError)
    assert "g.yaml: " in str(result.exception)
