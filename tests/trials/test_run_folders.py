"""Damaged run folders: every command that reads them says so in a sentence, or shows what is shown of the whole one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import fedloom
from fedloom.study.grid import load_grid, recipes
from fedloom.study.grid import save as save_grid
from tests_support import assert_same, load_recipe, stopped_after
from trials.hostile import Tally, bytes_like, command, judged, text_like
from trials.scale import cases

SMALL = ("data.size=8", "training.rounds=2")
RUNS = {
    "server": ("method={name: fedhca2, add: {}}", "model.heads=own"),
    "peers": ("model.heads=own", "peers={}"),
    "diagnosed": ("method={name: fedprox, add: {feddea: {rho: 0.5}}}", "runtime.checkpoint_every=2"),
}
READERS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", "{run}", "{whole}", "--format", "csv", "--out", "{out}/numbers.csv"),
    "compare tests": ("compare", "{run}", "{whole}", "--tests", "--over", "clients"),
    "watch": ("watch", "{run}", "--once"),
    "hyper": ("hyper", "{run}"),
    "domains": ("domains", "{run}", "--task", "digit"),
    "report": ("report", "{run}", "--base", "{whole}", "--out", "{out}/page.html"),
    "export": ("export", "{run}", "--client", "digit-0", "--out", "{out}/export"),
    "show": ("show", "{run}/recipe.yaml"),
    "resume": ("resume", "{run}", "--quiet"),
}
SLOW = ("report", "export", "show", "resume")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole runs, and one that was stopped."""
    base = tmp_path_factory.mktemp("runs")
    found = {name: fedloom.run(load_recipe(*SMALL, *changes), base / name).folder for name, changes in RUNS.items()}
    found["stopped"] = stopped_after(1, base / "stopped", load_recipe(*SMALL, *RUNS["server"]))
    return found


def shown(reader: str, run: Path, whole: Path, out: Path) -> str | None:
    """Return what a command shows of a run, without the seconds; None where it refuses."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    arguments = [word.format(run=run, whole=whole, out=out) for word in READERS[reader]]
    text = judged(lambda: command(*arguments), run, whole)
    numbers = out / "numbers.csv"
    return numbers.read_text() if numbers.is_file() else text


GRID = {
    "name": "tiny",
    "data": {"digits": {"recipe": "digits-tasks"}},
    "bases": {"FedAvg": {}, "Local": {"method": "local"}},
    "references": [],
    "seeds": [0],
    "set": {"data.size": 8, "training.rounds": 2, "training.steps": 2, "training.epochs": None},
}
GRID_READERS = {
    "table": ("table", "{grid}", "--format", "csv"),
    "metrics": ("table", "{grid}", "--metrics", "--format", "csv"),
    "losses": ("table", "{grid}", "--losses", "rounds", "--format", "csv"),
    "tests": ("table", "{grid}", "--tests", "--over", "clients", "--base", "Local/-"),
    "report": ("report", "{grid}", "--out", "{out}/page.html"),
    "again": ("grid", "{grid}", "--dry-run", "--quiet"),
}


def damaged(run: Path, rng: random.Random) -> str:
    """Damage or delete one file of a run folder; returns its name."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    file = rng.choice([path for path in files if path.suffix in (".json", ".jsonl", ".yaml")] + files)
    if rng.random() < 0.05:
        file.unlink()
    elif file.suffix in (".json", ".jsonl"):
        file.write_bytes(text_like(file.read_text(), rng))
    else:
        file.write_bytes(bytes_like(file.read_bytes(), rng))
    return str(file.relative_to(run))


def test_a_damaged_run_folder(
    runs: dict[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    whole = {
        (reader, name): shown(reader, runs[name], runs["server"], tmp_path / "out")
        for name in runs
        for reader in READERS
        if reader not in SLOW
    }
    run, out, tally = tmp_path / "damaged", tmp_path / "out", Tally(record_property)
    for number in range(cases(8, 500)):
        rng = random.Random(number)
        name = rng.choice(list(runs))
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(runs[name], run)
        file = damaged(run, rng)
        readers = rng.sample([reader for reader in READERS if reader not in SLOW], 2)
        readers += [rng.choice(SLOW)] if rng.random() < 0.25 else []
        for reader in readers:
            with tally.case(f"{number}, {reader} of {name} with another {file}"):
                text = tally.answer(shown(reader, run, runs["server"], out))
                if text is not None and name != "stopped":
                    if reader == "resume":
                        assert_same(runs[name], run, models_only=True)
                    elif reader not in SLOW:
                        assert text.replace(str(run), "") == whole[reader, name].replace(str(runs[name]), "")
    tally.close()


def test_a_damaged_grid(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    whole, grid, out = tmp_path / "whole", tmp_path / "damaged", tmp_path / "out"
    opened = load_grid(GRID)
    save_grid(opened, whole, {})
    for cell, recipe in recipes(opened).items():
        fedloom.run(recipe, cell.folder(whole))
    tables = ("table", "metrics", "losses", "tests")
    right = {reader: command(*(word.format(grid=whole) for word in GRID_READERS[reader])) for reader in tables}
    tally = Tally(record_property)
    for number in range(cases(8, 300)):
        rng = random.Random(number)
        for folder in (grid, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, grid)
        out.mkdir()
        file = damaged(grid, rng)
        for reader in rng.sample(list(GRID_READERS), 2):
            words = [word.format(grid=grid, out=out) for word in GRID_READERS[reader]]
            with tally.case(f"{number}, {reader} with another {file}"):
                text = tally.answer(judged(lambda: command(*words), grid))  # noqa: B023
                gone = not (grid / file).exists()  # then a cell is missing, as the table says
                if text is not None and reader in right and not gone and file.startswith("cells"):
                    lines = text.replace(str(grid), "").splitlines()  # a file may name its tasks in another order
                    assert sorted(lines) == sorted(right[reader].replace(str(whole), "").splitlines())
    tally.close()


def test_a_damaged_export(
    runs: dict[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    whole, copy, picture = tmp_path / "whole", tmp_path / "damaged", tmp_path / "image.png"
    command("export", runs["diagnosed"], "--out", whole)
    Image.new("L", (8, 8), 90).save(picture)
    tally = Tally(record_property)
    for number in range(cases(8, 300)):
        rng = random.Random(number)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        file = damaged(copy, rng)
        with tally.case(f"{number}, another {file}"):
            tally.answer(judged(lambda: command("predict", copy, picture, "--out", tmp_path / "out.png"), copy))
    tally.close()
