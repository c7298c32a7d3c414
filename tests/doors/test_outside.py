"""A package outside the project, installed by pip, brings data, a model, a task, a stage and a method by name; a module
of the current folder brings a partition and a codec."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.core.settings.trust import ALLOW
from fedloom.data import DATASETS
from fedloom.federation.recipes.loader import dump, load
from fedloom.federation.rounds.build import build
from fedloom.methods import METHODS
from tests_support import assert_same

OUTSIDE = Path(__file__).with_name("outside")
RECIPE = """
name: signs
data: {name: signs, schools: 3}
partition: own
model: {name: "beacon:Net", width: 12}
method: {name: clipped, limit: 0.4, add: {"beacon:Clip": {limit: 0.3, at: server}}, codec: "here:Plain"}
tasks: {digit: {loss: "beacon:focal", metrics: {balanced: "beacon:balanced"}}}
training: {rounds: 1, steps: 2}
"""
GRID = """
name: mine
data: {Signs: {recipe: signs.yaml}}
bases: {Local: {method: local}, Clipped: {method: clipped}}
figure: convergence
seeds: [0]
set: {training.rounds: 2}
"""
HERE = '''
"""What is not installed, but in the current folder."""

from fedloom.codecs import Raw


class Plain(Raw):
    """A codec of one's own."""


def halves(pool, seed) -> dict:
    """Two clients with half of the examples each."""
    return {"left": range(0, len(pool), 2), "right": range(1, len(pool), 2)}
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages, into which pip has installed the one outside."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(OUTSIDE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    install = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder / "site"), str(source)]
    subprocess.run(install, check=True)
    return folder / "site"


@pytest.fixture
def here(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: a recipe, a grid and a module, and the package is installed."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ALLOW, "beacon,here")
    for name, text in (("signs.yaml", RECIPE), ("g.yaml", GRID), ("here.py", HERE)):
        (tmp_path / name).write_text(text)
    for registry in (METHODS, DATASETS):
        registry.__dict__.pop("announced", None)
    yield tmp_path
    for registry in (METHODS, DATASETS):
        registry.__dict__.pop("announced", None)
    for name in ("beacon", "here"):
        sys.modules.pop(name, None)


EVERYDAY = {
    "show": ("show signs.yaml", "balanced"),
    "run": ("run signs.yaml -q --out a", "balanced"),
    "run local": ("run signs.yaml -q --out b method=local", "balanced"),
    "run --from": ("run --from a -q --out c", "balanced"),
    "resume": ("resume a -q training.rounds=2", "balanced"),
    "watch": ("watch a", "round 2 of 2"),
    "compare": ("compare a b", "odd (balanced)"),
    "report": ("report a --base b", "report.html"),
    "export": ("export a --client school-1 --out bundle", "bundle"),
    "predict": ("predict bundle sign.png --out said.png", "sign.png: digit"),
    "pretrain": ("study pretrain signs.yaml --epochs 1 --out encoder.safetensors -q", "encoder.safetensors"),
    "data": ("data preview signs --out picture.png", "135 train, 45 test"),
    "run matu": ("run signs.yaml -q --out m method=matu", "balanced"),
    "relatedness": ("study relatedness m --metrics sign -q", "digit"),
    "grid": ("grid g.yaml -q --jobs 1", "2 of 2 runs are finished"),
    "compare a grid": ("compare mine", "Clipped"),
    "report of a grid": ("report grids/mine", "report.html"),
    "figure": ("plot figure mine --out bars.svg", "bars.svg"),
    "methods": ("methods", "beacon"),
    "methods, one": ("methods clipped", "FedAvg of clipped updates."),
    "methods, a stage": ("methods beacon:Clip", "limit"),
    "recipe": ("recipes --schema", "FedAvg of clipped updates."),
    "flower": ("flower new signs.yaml --out sites", "recipe.yaml"),
}
"""A command of each kind, in the order of a working day, and a word of what it says."""
ELSEWHERE = {"doctor", "init", "demo", "tune"}
"""Commands that show nothing of a package: models that lie there, lists of what is installed, questions, pictures of
dense tasks, what nodes wrote down, fedloom's own runs, a server; and what takes long, and is below."""


def said(command: str) -> str:
    """Return what a command prints; it must not fail."""
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
    return done.output


def test_everyday_commands_work_with_it(here: Path) -> None:
    import PIL.Image

    PIL.Image.fromarray(np.full((8, 8), 99, np.uint8)).save(here / "sign.png")
    for name, (command, word) in EVERYDAY.items():
        assert word in said(command), name
    assert (here / "bundle" / "export.json").is_file()
    commands: Any = get_command(app)
    everyday = {name for name, c in commands.commands.items() if not c.hidden and name != "papers"}
    assert everyday - {command.split()[0] for command, _ in EVERYDAY.values()} <= ELSEWHERE


@pytest.mark.slow
def test_it_may_be_a_test_benchmark(here: Path) -> None:
    said("grid g.yaml -q references=[constant,centralised,centralised-by-task]")
    assert "alone over constant" in CliRunner().invoke(app, ["study", "benchmark", "mine"]).output


def test_it_is_small() -> None:
    lines = [line for file in OUTSIDE.glob("*.*") for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 60


def test_a_node_of_flower_has_it_too(here: Path) -> None:
    pytest.importorskip("flwr")
    one, two = (fl.run("signs.yaml", here / name, runtime={"engine": name}) for name in ("process", "flower"))
    assert_same(one, two, models_only=True)


@pytest.mark.slow
def test_workers_and_a_cluster_have_it_too(here: Path) -> None:
    one = fl.run("signs.yaml", here / "one")
    assert_same(one, fl.run("signs.yaml", here / "two", workers=2))
    assert_same(one, fl.run("signs.yaml", here / "cluster", runtime={"engine": "cluster", "workers": 2}))


@pytest.mark.slow
def test_a_deployment_has_it_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SuperLink and three SuperNodes, which are processes of their own: they have the installed package."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    from fedloom.engines.flower.deployment import deployment, free_port, provision

    changes = ["method.codec=raw", "training.rounds=2"]
    (here / "mine.yaml").write_text(dump(load("signs.yaml", changes)))
    sites = ", ".join(f"school-{k}: {{terms: null}}" for k in range(3))
    (here / "sites.yaml").write_text(
        f"recipe: mine.yaml\naddress: 127.0.0.1\nport: {free_port()}\nsites: {{{sites}}}\n"
    )
    provision(here / "sites.yaml", here / "kits")
    with deployment(here) as place:
        for k in range(3):
            place.start(f"school-{k}")
        run = place.run(280)
    assert_same(run, fl.run("signs.yaml", here / "one", overrides=changes), models_only=True)


def test_the_folder_says_what_it_was_and_a_changed_source_is_told(here: Path) -> None:
    run = fl.run("signs.yaml", here / "a")
    info = json.loads((run.folder / "run.json").read_text())
    assert set(info["origins"]) == {
        *("signs", "beacon:Net", "clipped", "beacon:Clip", "here:Plain", "beacon:focal", "beacon:balanced"),
    }
    origin = info["origins"]["beacon:Net"]
    assert (origin["module"], origin["version"]) == ("beacon", "1.0")
    info["origins"] = {name: {**each, "source": "0" * 16} for name, each in info["origins"].items()}  # another one then
    info.pop("check")
    (run.folder / "run.json").write_text(json.dumps(info))
    fl.resume(run.folder, rounds=2)
    events = [e for line in run.run.rounds for e in line["events"] if e["event"] == "source changed"]
    assert {e["of"] for e in events} == set(info["origins"])
    assert {e["was"] for e in events} == {f"beacon, 1.0, {'0' * 16}", f"here, {'0' * 16}"}


def test_names_and_objects_are_the_same(here: Path) -> None:
    import beacon

    section = {"name": "beacon:clipped", "limit": 0.4}
    named = fl.run("signs.yaml", here / "named", method=section, overrides=["tasks={}"])
    made = beacon.signs(0)
    given = fl.run(made, here / "given", model=lambda shape: beacon.Net(shape, 12), method=beacon.clipped(limit=0.4),
                   rounds=1, steps=2)  # fmt: skip
    assert named.run.rows() == given.run.rows()
    halves = build(load("signs.yaml", ["partition=here:halves"])).partition
    assert [(s.client, len(s.index)) for s in halves.shares] == [("left", 68), ("right", 67)]
