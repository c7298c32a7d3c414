"""One habit of all commands: files go to --out, tables are JSON with --json, names are completed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.cli.shared import answer
from fedloom.federation.recipes.loader import catalogue
from fedloom.federation.runs.track import Audit
from folders_support import nyud
from folders_support import save as save_image
from grid_support import benchmark
from tests_support import load_recipe

TINY = (
    "model.width=2",
    "model.hidden=4",
    "data.size=8",
    "training.rounds=1",
    "training.steps=1",
    "training.epochs=null",
)
DIGITS = ("data.tasks=[digit]", "data.domains=[plain,inverted]")
CLAIMS = "grids: {}\nclaims: [{paper: A, claim: Better, grid: benchmarks/digits, method: FedAvg, over: Local}]\n"
LISTS: dict[str, tuple[str, ...]] = {
    "papers activated": ("{run}",),
    "flower audit": ("{audit}",),
    "study benchmark": ("{benchmark}",),
    "study claims": ("{claims}",),
    "compare": ("{run}", "{run2}"),
    "compare ": ("{benchmark}", "--metrics"),
    "data statistics": ("{table}", "--labels", "kind", "--clients", "site"),
    "data check": ("nyud", "--root", "{nyud}", "--limit", "1"),
    "doctor": (),
    "papers domains": ("{run}",),
    "papers features": ("{run}", "--examples", "4", "--images", "1", "-q"),
    "flower check": ("{app}",),
    "grid": (),
    "papers hyper": ("{run}",),
    "papers join": (
        "{matu}",
        "--task",
        "parity",
        "--data",
        "data.tasks=[digit,parity,holes]",
        "--steps=1",
        "--rounds=1",
        "-q",
    ),
    "methods": (),
    "predict": ("{export}", "{image}", "--out", "{tmp}/seen.png"),
    "study pretrain": ("digits-domains", *TINY, *DIGITS, "--epochs", "1", "--out", "{tmp}/e.safetensors", "-q"),
    "recipes": (),
    "study relatedness": ("{matu}", "--metrics", "sign", "-q"),
    "resume": ("{run}", "-q"),
    "run": ("digits-domains", *TINY, *DIGITS, "--out", "{tmp}/new", "-q"),
    "show": ("digits-domains", *TINY, *DIGITS),
    "watch": ("{run}",),
}
"""Commands that print a table or a list, with arguments for a tiny one."""
OTHERS = {
    *(
        "data preview",
        "export",
        "plot figure",
        "flower demo",
        "flower new",
        "flower provision",
        "init",
        "study merge",
        "plot picture",
    ),
    *("study atlas", "demo", "report", "study tournament", "tune"),
}


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (its name with that of its group, command) of all that help lists."""
    for name, command in (group or get_command(app)).commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return what the commands are tried on: two runs with domains, one of matu, an export, a benchmark, an app,
    data.
    """
    home = tmp_path_factory.mktemp("habit")
    (home / "claims.yaml").write_text(CLAIMS, encoding="utf-8")
    hca = ("method={name: fedhca2, add: {activated-dimensions: {}}}", *TINY, *DIGITS)
    found = {"run": fedloom.run(load_recipe(*hca, recipe="digits-domains"), home / "run").folder}
    found["run2"] = fedloom.run(load_recipe("method=local", *TINY, *DIGITS, recipe="digits-domains"), home / "b").folder
    matu = ("method=matu", *TINY, "data.tasks=[digit,holes]")
    found["matu"] = fedloom.run(load_recipe(*matu), home / "matu").folder
    benchmark(home / "benchmark")
    found["benchmark"], found["claims"] = home / "benchmark", home / "claims.yaml"
    found["nyud"], found["table"] = nyud(home), table(home)
    save_image(home / "image.png", np.zeros((8, 8, 3), np.uint8))
    found["image"] = home / "image.png"
    Audit(home / "audit.jsonl").note("join", client="ann")
    for command in (
        ("flower", "new", "digits-tasks", "--out", home / "app"),
        ("export", found["run"], "--out", home / "export", "--client", next(iter(found_clients(found["run"])))),
    ):
        done = CliRunner().invoke(app, [*map(str, command)])
        assert done.exit_code == 0, done.output
    return {**found, "app": home / "app", "export": home / "export", "audit": home / "audit.jsonl", "tmp": home}


def found_clients(run: Path) -> dict[str, Any]:
    clients: dict[str, Any] = json.loads((run / "run.json").read_text())["clients"]
    return clients


def test_every_command_is_known_here() -> None:
    assert {name for name, _ in commands()} == {name.strip() for name in LISTS} | OTHERS


def test_what_is_written_goes_to_out() -> None:
    for name, command in commands():
        for parameter in command.params:
            if "OUT" in (parameter.metavar or "") or parameter.name == "out":
                assert "--out" in parameter.opts, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", LISTS)
def test_tables_are_json_too(places: dict[str, Path], name: str) -> None:
    words = [word.format(**places) for word in LISTS[name]]
    done = CliRunner().invoke(app, [*name.split(), *words, "--json"])
    assert not isinstance(done.exception, Exception), done.output
    found = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{name}: {word}"))
    assert found


def test_what_json_does_not_have_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    answer([{"a": float("nan"), "b": [float("inf"), 1]}, {"a": Path("x")}], True, "not shown")
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [None, 1]}, {"a": "x"}]


def test_recipes_by_what_they_need(fedloom_: Any) -> None:
    free = json.loads(fedloom_("recipes", "--free", "--json")[1])
    names = {row["recipe"] for row in free}
    assert {"digits-tasks", "feddea/scenes"} <= names
    assert not {"feddea/nyud", "thesis/cifar", "matu/eight", "f2dc/pacs-real"} & names
    needs = {entry.name: entry.needs for entry in catalogue()}
    assert needs["f2dc/pacs-real"] == ("data.root",)
    assert {row["recipe"] for row in free if row["minutes"]} >= {"digits-tasks", "benchmarks/digits"}
    _, out, _ = fedloom_("recipes", "--free", "PEERS")
    assert "dfmtl-digits" in out
    assert "digits-tasks" not in out
    assert fedloom_("recipes", "nothing like it")[2].startswith("error: no packaged recipe has 'nothing like it'")


def complete(words: str, tmp_path: Path, check: str = "") -> list[str]:
    """Return what bash is offered after these words, by a new Python."""
    code = (
        f"import sys; sys.argv = ['fedloom']; from fedloom.cli.app import app\ntry: app()\nfinally: {check or 'pass'}"
    )
    env = {**os.environ, "_FEDLOOM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_names_are_completed_without_torch(tmp_path: Path) -> None:
    light = "assert 'torch' not in sys.modules, 'torch was imported'"
    assert complete("fedloom run digits-t", tmp_path, light) == ["digits-tasks"]
    assert complete("fedloom methods fedp", tmp_path, light) == ["fedper", "fedpmt", "fedproto", "fedprox"]


@pytest.mark.parametrize(
    ("before", "word", "expected"),
    [
        ([], "method=fedhca", ["method=fedhca2"]),
        ([], "method=feddea", ["method=feddea"]),
        ([], "training.rou", ["training.rounds="]),
        (["method", "="], "fedhca", ["fedhca2"]),  # as bash splits it
        ([], "seed=", []),
        ([], "no.such=", []),
    ],
)
def test_changes_are_completed(before: list[str], word: str, expected: list[str]) -> None:
    from fedloom.cli.shared import complete_change as change

    assert change(SimpleNamespace(params={"changes": before}), word) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr(
        "typer.testing._get_command", get_command.__wrapped__
    )  # commands as they are with this variable
    done = CliRunner().invoke(app, ["--show-completion", shell], prog_name="fedloom")
    assert "_FEDLOOM_COMPLETE" in done.output


def picture_folder(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        for i in range(10):
            save_image(folder / "pets" / kind / f"{i}.png", rng.integers(0, 256, (9, 8, 3)).astype(np.uint8))
    return folder / "pets"


def archive(folder: Path) -> Path:
    rng, y = np.random.default_rng(0), np.arange(60) % 3
    np.savez(folder / "p.npz", x=rng.random((60, 3, 32)).astype(np.float32), y=y, who=np.arange(60) // 20)
    return folder / "p.npz"


def table(folder: Path) -> Path:
    lines = [f"{i / 7},{i % 5},{'abc'[i % 3]},{('north', 'south')[i % 2]}" for i in range(60)]
    (folder / "t.csv").write_text("\n".join(["age,height,kind,site", *lines]) + "\n", encoding="utf-8")
    return folder / "t.csv"


@pytest.mark.parametrize(
    ("make", "options", "typed", "clients"),
    [
        (picture_folder, ("--clients", 2, "--method", "fedprox", "--rounds", 1), "", 2),
        (archive, (), "y\nwho\nlocal\n1\n", 3),
        (table, ("--labels", "kind", "--clients", "site", "--method", "fedavg", "--rounds", 1), "", 2),
    ],
)
def test_init_writes_a_recipe_that_runs(
    make: Callable[[Path], Path], options: tuple[Any, ...], typed: str, clients: int, tmp_path: Path
) -> None:
    data, out = make(tmp_path), tmp_path / "mine.yaml"
    words = ["init", str(data), *map(str, options), "--out", str(out)]
    done = CliRunner().invoke(app, words, input=typed, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    recipe = yaml.safe_load(out.read_text())
    assert recipe["name"] == "mine"
    result = fedloom.run(out, tmp_path / "run")
    assert (result.status, len(found_clients(result.folder))) == ("finished", clients)
    if make is table:
        assert recipe["data"]["inputs"] == {"age": "number", "height": "category"}
        assert {about["domain"] for about in found_clients(result.folder).values()} == {"north", "south"}


def test_init_says_what_it_cannot_use(fedloom_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--clients", 2, "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "r.yaml")
    assert "no column 'knd'. Did you mean 'kind'?" in fedloom_("init", table(tmp_path), "--labels", "knd", *given)[2]
    assert (
        "Did you mean 'fedprox'?"
        in fedloom_("init", table(tmp_path), "--labels", "kind", "--clients", 2, "--method", "fedprx", "--rounds", 1)[2]
    )
    assert (
        "--labels is not for folders of images"
        in fedloom_("init", picture_folder(tmp_path), "--labels", "x", *given)[2]
    )
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "stdin", StringIO())  # no terminal, and no lines either
    code, _, said = fedloom_("init", table(tmp_path), "--labels", "kind")
    assert code == 2
    assert "no answer found, expected an option (fedloom init --help) or a line: The column that names" in said
    assert "expected images in CLASS" in fedloom_("init", tmp_path / "empty", *given)[2]
    assert (
        "expected a folder of images, a .npz file or a table (.csv," in fedloom_("init", tmp_path / "no.txt", *given)[2]
    )
    assert not (tmp_path / "r.yaml").exists()
    (tmp_path / "r.yaml").write_text("precious")
    assert "exists already" in fedloom_("init", table(tmp_path), "--labels", "kind", *given)[2]


def images(folder: Path, *places: str, count: int = 5) -> Path:
    for number, place in enumerate(places):
        (folder / place).mkdir(parents=True)
        for i in range(count):
            save_image(folder / place / f"{i}.png", np.full((9, 8, 3), 20 * number + i, np.uint8))
    return folder


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        (
            ("dog", "cat", ".git/x", "dog/old"),
            ["classes and their images: cat (5), dog (5)", "split: 20%", "note: folders inside class folders are left"],
        ),
        (
            ("north/dog", "north/cat", "south/dog", "__MACOSX/dog"),
            [
                "sites (upper folders) and their images: north (10), south (5)",
                "classes (lower folders) and their images: cat (5), dog (10)",
                "split: 20% of the images of each class are test images (data.test_fraction)",
                "classes without an image: south (cat)",
            ],
        ),
        (
            (*(f"dog/p{i}" for i in range(6)), "cat/p7"),
            [
                "sites (upper folders) and their images: cat (5), dog (30",
                "classes (lower folders) and their images: p0 (5),",
                "split: 20%",
                "classes without an image: cat (p0, p1, p2, p3, p4 and 1 more), dog (p7)",
            ],
        ),
        (
            ("train/dog", "train/cat", "test/dog"),
            [
                "split (upper folders) and their images: test (5), train (10)",
                "classes (lower folders) and their images: cat (5), dog (10)",
                "classes without an image: test (cat)",
            ],
        ),
        (("valid", "invalid"), ["classes and their images: invalid (5), valid (5)", "split: 20%"]),
    ],
)
def test_init_prints_what_it_takes_folders_for(
    places: tuple[str, ...], lines: list[str], fedloom_: Any, tmp_path: Path
) -> None:
    data, out = images(tmp_path / "set", *places), tmp_path / "r.yaml"
    code, said, _ = fedloom_("init", data, "--clients", 1, "--method", "fedavg", "--rounds", 1, "--out", out)
    assert code == 0
    for line, begins in zip(said.splitlines()[:-1], lines, strict=True):  # the last line is the file's name
        assert line.startswith(begins)
    assert fedloom_("show", out)[0] == 0
    assert ("and 2 more" in said) == ("cat/p7" in places)


@pytest.mark.parametrize(
    ("places", "found"),
    [
        (
            ("train/dog", "val/dog", "test/dog"),
            "the folders test, train, val found, of which some are parts of a split",
        ),
        (("Train/dog", "Test/dog"), "the folders Test, Train found"),
        (("north/dog", "Validation/dog"), "the folders Validation, north found"),
        (("train", "test"), "the folders test, train found"),
        (("dog/train", "dog/val", "cat/train"), "the folders cat/train, dog/train, dog/val found"),
        (("north/train/dog", "north/test/dog"), "the folders north/test, north/train found"),
        (("north/dog", "docs"), "found no class folder with images in 'docs'"),
    ],
)
def test_init_refuses_folders_that_do_not_fit(
    places: tuple[str, ...], found: str, fedloom_: Any, tmp_path: Path
) -> None:
    data = images(tmp_path / "set", *places)
    for file in (data / "docs").glob("*"):
        file.rename(file.with_suffix(".txt"))
    code, _, said = fedloom_("init", data, "--clients", 1, "--method", "fedavg", "--rounds", 1)
    assert code == 2
    assert found in said
    assert "train/CLASS and test/CLASS" in said


def test_lines_that_need_no_torch(answers_without_torch: Callable[..., None], tmp_path: Path) -> None:
    table(tmp_path)
    answers_without_torch(
        "--help", "--version", "run --help", "grid --help", "compare --help", "plot figure --help",
        "study relatedness --help", "papers join --help", "methods", "methods fedprox", "methods --json", "recipes",
        "recipes --free --json", "recipes --schema --out s.json", "grid", "rn", "run nothing", "run digits-tasks x=1",
        "show digits-tasks training.rounds=0", "resume nothing", "compare nothing", "grid nothing", "grid g.yaml x=1",
        "study relatedness no", "papers join no --task t",
        "init t.csv --labels kind --clients 2 --method fedavg --rounds 1",
    )  # fmt: skip
    assert (tmp_path / "recipe.yaml").is_file()
