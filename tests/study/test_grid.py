"""Grids: their files, and running them in processes of their own, all at once, one after another and after kill -9."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fedloom.federation.recipes
from fedloom.core.machine import available_memory, locked
from fedloom.data import scenes
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.experiments import grid_run
from fedloom.experiments.grid_run import Bar, CellLines, Outcome, Watch, default_jobs, prepare, progress, run_prepared
from fedloom.federation.recipes import dump, load
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.rounds.build import build_method
from fedloom.models.tasks.dense import KINDS
from fedloom.study.grid import (
    BENCHMARK,
    Cell,
    Grid,
    cells,
    load_grid,
    names,
    open_folder,
    recipes,
    replaced,
    safe,
    save,
    select,
    state_of,
    summary,
    write,
)
from grid_support import TINY
from tests_support import assert_same

AVG, DEA = Cell("Digits", "FedAvg", "-", 0), Cell("Digits", "FedAvg", "+DEA", 0)


def run(grid: Grid, folder: Path, **options: Any) -> Outcome:
    return run_prepared(prepare(grid, folder), Watch(), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells of TINY over six rounds, one after another in this process, without a grid's runner."""
    folder = tmp_path_factory.mktemp("whole")
    for cell, recipe in recipes(load_grid(TINY, ["training.rounds=6"])).items():
        fedloom.run(recipe, cell.folder(folder))
    return folder


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the cells in this process, which has torch already: a second less each time."""
    monkeypatch.setattr(grid_run, "_ask", lambda function, *arguments: function(*arguments))


def assert_equal(one: Path, other: Path) -> None:
    for cell in (AVG, DEA):
        assert_same(cell.folder(one), cell.folder(other))


# Grid files

REFUSED = {
    "feddea/table3-nyud-mini": {"NYUD-mini / FedACG / +step of 2 at the server"},
    "feddea/table3-digits": {"Digits / FedACG / +step of 2"},
}
"""Combinations that packaged grids have although the library refuses them, which their tables say."""


@pytest.mark.parametrize("name", names())
def test_packaged_grids_are_valid_in_every_cell(name: str) -> None:
    whole = load_grid(name)
    assert whole.name == name.replace("/", "-")
    assert summary(name)
    assert whole.title
    grid = whole.model_copy(update={"seeds": whole.seeds[:1]})  # seeds differ in nothing else
    resolved = recipes(grid)
    built, refused = set(), set()
    for cell, recipe in resolved.items():
        try:
            build_method(recipe.method)
            built.add(cell.combination)
        except RecipeError:
            refused.add(cell.combination)
    assert refused == REFUSED.get(name, set())
    assert len(built | refused) == sum(1 for _ in cells(grid))
    on_files = name.startswith(("feddea/", "fedhca2/")) and not name.endswith(("-scenes", "-digits"))
    for figure in filter(None, (grid.figure, *grid.figures.values())):
        assert select(grid, figure.params.get("only") or ())
        if figure.name == "convergence":
            assert all(recipe.evaluation.every == 1 for recipe in resolved.values())
            assert not on_files or all(recipe.evaluation.costly_every for recipe in resolved.values())
    for cell, recipe in resolved.items() if on_files else ():  # cells on NYUD and PASCAL judge edges by odsF
        data = recipe.data.model_dump()
        sets = {f"{key}-": value for key, value in data["sets"].items()} if data["name"] == "several" else {"": data}
        assert {one["name"] for one in sets.values()} & {"nyud", "pascal-context", "arrays"}, cell
        for prefix, one in sets.items():
            assert "edge" in (one.get("tasks") or one["dense"]), cell
            assert KINDS["edge"]("edge", **recipe.tasks[f"{prefix}edge"]).primary == "odsf", cell


ABSENT = r"(file or|the) folder .* does not exist|is( not)? in /|expected a folder .* found none|weights of .* missing"
"""What a dry run says where a data set's files, or an encoder's weights, are not there."""


@pytest.fixture(scope="module")
def quickly_rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Scenes are four, again and again: to render all of them would take minutes."""
    real, made = scenes.examples, dict[str, dict[str, np.ndarray[Any, Any]]]()

    def examples(settings: Any, numbers: range) -> dict[str, np.ndarray[Any, Any]]:
        few = made.get(repr(settings)) or made.setdefault(repr(settings), real(settings, range(4)))
        return {name: np.resize(array, (len(numbers), *array.shape[1:])) for name, array in few.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(scenes, "examples", examples)
        yield


def ends(labels: dict[str, Any]) -> dict[str, Any]:
    """The first and the last of some labels."""
    return {label: labels[label] for label in dict.fromkeys([next(iter(labels)), next(reversed(labels))])}


def start_dry(name: str, grid: Grid, folder: Path) -> None:
    """Prepare a packaged grid where no data lies: all cells would start, or it is said which files are missing."""
    known = {cell.combination for cell in cells(grid)}
    bundled = any(word in name for word in ("embedded", "scenes", "digits", "demo", "benchmarks/eight", "robust"))
    if bundled and not name.endswith("-real"):
        prepared = prepare(grid, folder / "grid")
        dense = {cell for cell, why in prepared.refused.items() if "simple cannot predict maps" in why}
        assert all(cell.endswith(" / simple") for cell in dense)
        assert set(prepared.refused) == REFUSED.get(name, set()) & known | dense
        assert {cell.combination for cell in prepared.todo} == known - set(prepared.refused)
        assert min(prepared.needs.values()) > 0
    else:
        with pytest.raises(UserError, match=ABSENT) as error:
            prepare(grid, folder / "grid")
        assert any(str(error.value).startswith(f"{cell}: ") for cell in known)
    assert not (folder / "grid").exists()


LONG = ("benchmarks/digits-real", "fedhca2/backbones-scenes", "fmtl/bench-scenes", "matu/figure5-embedded")
"""Grids that start dry each night only: half of the time of all."""


@pytest.mark.usefixtures("near", "quickly_rendered")
def test_each_benchmark_of_packaged_grids_starts_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One grid for each set of data, partitions and models: what methods need is checked where recipes are built."""
    monkeypatch.chdir(tmp_path)
    seen: set[str] = set()
    for name in names():
        grid = load_grid(name)
        sections = ({key: row.recipe.get(key) for key in BENCHMARK} for row in grid.data.values())
        if (benchmark := json.dumps([*sections], default=str)) not in seen:
            seen.add(benchmark)
            if name in LONG:
                continue
            few = {"bases": ends(grid.bases), "addons": dict([*grid.addons.items()][:1]), "seeds": grid.seeds[:1]}
            few["references"] = grid.reference_rows[:1]
            start_dry(name, grid.model_copy(update=few), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("near", "quickly_rendered")
@pytest.mark.parametrize("name", names())
def test_packaged_grids_start_dry_in_every_cell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start_dry(name, load_grid(name), tmp_path)


def test_cells_apply_changes_in_order() -> None:
    value = TINY | {
        "addons": {"-": {"training.rounds": 5}, "+DEA": {"method.add.feddea": {}, "training.rounds": 6}},
        "bases": {
            "FedAvg": {"method": "fedavg", "training.rounds": 4},
            "Prox": {"method": {"name": "fedprox", "mu": 2}},
        },
        "cells": {"Prox/+DEA": {"training.rounds": 7, "method.add.feddea.rho": 0.25}},
        "set": {"training.batch_size": 3},
    }
    by_cell = recipes(load_grid(value, ["model.width=8", "seeds=[3,1]"]))
    assert list(by_cell)[:5:4] == [Cell("Digits", "FedAvg", "-", 3), Cell("Digits", "FedAvg", "-", 1)]
    assert [r.training.rounds for r in by_cell.values()] == [5, 6, 5, 7] * 2
    assert {
        (r.training.batch_size, r.training.epochs, r.training.steps, r.model.params["width"]) for r in by_cell.values()
    } == {(3, None, 2, 8)}
    last = by_cell[Cell("Digits", "Prox", "+DEA", 1)]
    assert (last.seed, last.method.params["mu"], last.method.add["feddea"]["rho"]) == (1, 2.0, 0.25)


def test_a_data_set_may_have_some_bases_only() -> None:
    two = {"data": {"D": TINY["data"]["Digits"], "E": {"recipe": "digits-tasks", "bases": ["Local"]}}}
    grid = load_grid(
        TINY | two | {"bases": {"FedAvg": {"method": "fedavg"}, "Local": {"method": "local"}}, "addons": {"-": {}}}
    )
    assert [(cell.data, cell.base) for cell in cells(grid)] == [("D", "FedAvg"), ("D", "Local"), ("E", "Local")]
    assert [*recipes(grid)] == [*cells(grid)]
    two["data"]["E"]["bases"] = ["Locale"]
    with pytest.raises(RecipeError, match=r"data\.E\.bases: no base 'Locale'"):
        load_grid(TINY | two)


def test_recipes_are_found_beside_the_grid(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(dump(fedloom.federation.recipes.load("digits-tasks", ["training.rounds=77"])))
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(TINY | {"data": {"D": {"recipe": "mine.yaml"}}, "set": {}}))
    assert {r.training.rounds for r in recipes(load_grid(tmp_path / "grid.yaml")).values()} == {77}


def test_a_grid_like_another_has_its_keys_where_it_has_none() -> None:
    own = {"like": "thesis/k-sweep-scenes", "name": "mine", "seeds": [7], "addons": {"K 9": {"peers.choose.top": 9}}}
    grid, parent = load_grid(own), load_grid("thesis/k-sweep")
    assert (grid.name, grid.seeds, list(grid.addons)) == ("mine", (7,), ["K 9"])
    assert (grid.bases, grid.figure) == (parent.bases, parent.figure)
    assert grid.set["training.rounds"] == 10  # of the twin, which is like thesis/k-sweep itself
    assert grid.data == load_grid("thesis/k-sweep-scenes").data != parent.data
    with pytest.raises(
        RecipeError,
        match=r"like: 'thesis/k-swep' is neither a file nor a packaged grid\. Did you mean 'thesis/k-sweep'\?",
    ):
        load_grid({"like": "thesis/k-swep", "name": "mine"})


def test_labels_as_directories() -> None:
    assert safe("+DEA (a) no/x") == "+DEA_a_no_x"
    assert safe("-") == "plain"
    assert safe("..") == "plain"
    assert Cell("A b", "FedAvg", "-", 3).folder(Path("g")) == Path("g/cells/A_b/FedAvg/plain/s3")
    assert str(Cell("A b", "FedAvg", "-", 3)) == "A b / FedAvg s3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"basis": {}}, "basis: unknown key. Did you mean 'bases'? Nearest of "),
        ({"seeds": []}, "seeds: [] found"),
        ({"seeds": [1, 1]}, "seeds: [1, 1] found: a seed occurs twice"),
        ({"seeds": [-1]}, "seeds[0]: -1 found, expected an integer of at least 0"),
        ({"columns": ["a", "b", "a"]}, "columns: ['a', 'b', 'a'] found: a task occurs twice"),
        ({"family": {"FedAvg/-": []}}, "family.FedAvg/-: [] found: expected one or more cells, each once"),
        ({"family": {"FedAvg/+DEA": ["FedAvg/-"] * 2}}, "family.FedAvg/+DEA: ['FedAvg/-', 'FedAvg/-'] found: expected"),
        ({"family": {"FedAvg/-": ["FedAvg/-"]}}, "family.FedAvg/-: it is compared with itself: expected other cells"),
        ({"bases": ["local"]}, "bases: ['local'] found, expected a mapping (each value: a mapping)"),
        ({"show": "client"}, "show: 'client' found, expected 'unified', 'clients' or 'domains'. Did you mean 'clie"),
        ({"delta": "FedAvg/+DAE"}, "expected 'base', 'none' or a cell as BASE/ADDON. Did you mean 'FedAvg/+DEA'?"),
        ({"bases": {"a(": {}, "A": {}}}, "bases.A: would share its folder with 'a(': choose another"),
        ({"bases": {"a/b": {}}}, "bases.a/b: a label is a text without '/'"),
        ({"bases": {"a" * 300: {}}}, ": a label has at most 200 bytes, found 300"),
        ({"set": {"seed": 3}}, "set.seed: a cell's seed comes from 'seeds'"),
        ({"cells": {"FedAvg/+DE": {}}}, "no such cell, expected BASE/ADDON. Did you mean 'FedAvg/+DEA'?"),
        ({"figure": "sweeep"}, "figure.name: unknown figure 'sweeep'. Did you mean 'sweep'?"),
        ({"figure": "sweep"}, "figure.parameter: missing"),
        ({"data": {"D": {"recipe": "digits-task"}}}, "data.D.recipe: no recipe 'digits-task': neither a file nor"),
    ],
)  # fmt: skip
def test_bad_grids(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"^the mapping is not a valid grid:\n(.|\n)*{re.escape(message)}"):
        load_grid(TINY | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=3", "a grid has several seeds: seeds=[0,1,2]"),
        ("rounds", "expected key.path=value"),
        ("seeds=3", "seeds: 3 found, expected a list"),
    ],
)
def test_bad_changes(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_grid(TINY, [change])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"addons": {"-": {}, "+X": {"method.add.fedda": {}}}},
            "Digits / FedAvg / +X: method.add.fedda: unknown add-on",
        ),
        ({"set": {"training.rouds": 3}}, "Digits / FedAvg: training.rouds: unknown key. Did you mean 'rounds'?"),
        (
            {"addons": {"-": {}, "+X": {}}},
            "Digits / FedAvg s0 and Digits / FedAvg / +X s0: the recipe is the same in both",
        ),
    ],
)
def test_cells_that_are_no_recipes_stop_the_grid(changes: dict[str, Any], message: str) -> None:
    message = message.replace(" s0", "")
    with pytest.raises(RecipeError, match=f"^grid tiny:\n{re.escape(message)}"):
        recipes(load_grid(TINY | changes))


def test_tuning_may_give_two_cells_one_recipe() -> None:
    bases = {"Prox": {"method": "fedprox"}, "Prox 0.3": {"method": {"name": "fedprox", "mu": 0.3}}}
    tuned = {"Digits": {"Prox/-": {"method.mu": 0.3}}}
    made = recipes(load_grid(TINY | {"bases": bases, "addons": {"-": {}}, "tuned": tuned}))
    assert len({recipe_hash(recipe) for recipe in made.values()}) == len(made) / 2


def test_a_change_that_replaces_training_says_which_keys_no_longer_count() -> None:
    recipe = {**load_grid(TINY).data["Digits"].model_dump()["recipe"]}
    recipe["training"] = {"rounds": 2, "epochs": 1, "optimizer": {"name": "adam", "lr": 0.1}}

    def said(key: str, value: Any) -> list[str]:
        bases = {"A": {"method": "fedavg"}, "B": {"method": "fedprox", key: value}}
        return replaced(load_grid({"name": "g", "data": {"D": {"recipe": recipe}}, "bases": bases}))

    assert said("training", {"epochs": 2, "optimizer": {"lr": 0.01}}) == [
        "D / B: training replaces the whole section, so these keys of the recipe do not count: training.rounds, "
        "training.optimizer.name. To change one key, write it with dots, such as training.KEY: VALUE"
    ]
    assert len(said("training.optimizer", {"lr": 0.01})) == 1
    assert said("training.optimizer", {"name": "sgd", "lr": 0.01}) == said("training.optimizer.lr", 0.01) == []


def test_packaged_grids_replace_no_keys_of_training() -> None:
    assert [text for name in names() for text in replaced(load_grid(name))] == []


def test_a_recipe_is_no_grid(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(dump(load("digits-tasks")))
    with pytest.raises(RecipeError, match=r"r\.yaml is a recipe, and no grid: run it first, with `fedloom run"):
        load_grid(tmp_path / "r.yaml")


def test_missing_grids() -> None:
    with pytest.raises(RecipeError, match=r"no grid 'feddea/tabel3': neither .* Did you mean 'feddea/table3'\?"):
        load_grid("feddea/tabel3")
    with pytest.raises(StateError, match=r"has not been run in grids/feddea-table3: run `fedloom grid feddea/table3`"):
        open_folder("feddea/table3")


def test_a_grid_file_that_was_changed_after_its_grid_ran_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("g.yaml")

    def warned(changes: dict[str, Any], seconds: float) -> str:
        file.write_text(yaml.safe_dump(TINY | changes))
        ran = Path("grids/tiny/grid.yaml").stat().st_mtime
        os.utime(file, (ran + seconds, ran + seconds))
        assert open_folder("g.yaml")[0].seeds == (0,)
        return capsys.readouterr().err

    save(load_grid(TINY, ["seeds=[0]"]), Path("grids/tiny"), {})
    assert warned({"seeds": [0], "title": "new"}, -5) == ""
    assert warned({"seeds": [0]}, 5) == ""
    assert warned({"seeds": [0], "delta": "none", "title": "new"}, 5) == (
        "warning: g.yaml was changed after its grid ran (delta, title); this is the grid as it ran, from "
        "grids/tiny/grid.yaml. To use the changes: fedloom grid g.yaml\n"
    )


def test_a_choice_of_cells() -> None:
    grid = load_grid(TINY | {"bases": {"A": {"method": "fedavg"}, "B": {"method": "fedprox"}}, "seeds": [0, 1]})
    assert len(select(grid, [])) == 8
    assert {c.base for c in select(grid, ["A"])} == {"A"}
    assert len(select(grid, ["A", "B", "+DEA"])) == 4
    with pytest.raises(
        RecipeError, match=r"no label 'DEA' in the grid\. Did you mean '\+DEA'\? Labels: Digits, A, B, -, \+DEA"
    ):
        select(grid, ["DEA"])


# Running


@pytest.mark.usefixtures("near")
def test_cells_at_once_give_the_numbers_of_one_after_another(whole: Path, tmp_path: Path) -> None:
    grid = load_grid(TINY, ["training.rounds=6"])
    outcome = run(grid, tmp_path, jobs=2)
    assert sorted(map(str, outcome.finished)) == ["Digits / FedAvg / +DEA s0", "Digits / FedAvg s0"]
    assert outcome.peak > 10**8
    assert_equal(whole, tmp_path)
    # Everything is there: nothing is started, not even to look.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")}
    again = prepare(grid, tmp_path)
    assert (again.todo, set(again.states.values())) == ((), {"finished"})
    assert run_prepared(again, Watch()).finished == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")} == before
    # What was run is in the folder, also for other recipes of the same name.
    saved, folder = open_folder(tmp_path)
    assert (saved, folder) == (grid, tmp_path)
    assert recipes(saved) == recipes(grid)
    with pytest.raises(
        StateError, match=r"Digits / FedAvg s0: .* they differ in training\.batch_size, training\.rounds"
    ):
        prepare(load_grid(TINY, ["training.rounds=3", "training.batch_size=4"]), tmp_path)


def started(folder: Path) -> bool:
    return (AVG.folder(folder) / "metrics.jsonl").is_file()


def children(pid: int) -> set[int]:
    found = {int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()}
    return found | {more for child in found for more in children(child)}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for children in /proc")
@pytest.mark.usefixtures("near")
def test_kill_nine_of_the_whole_grid(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    folder = tmp_path / "g"
    command = [sys.executable, "-m", "fedloom", "grid", str(tmp_path / "grid.yaml"), "training.rounds=6", "--jobs", "1"]
    process = subprocess.Popen([*command, "--out", str(folder), "--quiet"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not started(folder):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    below = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert below
    while any(alive(pid) for pid in below):  # children go with their parent
        assert time.monotonic() < deadline
        time.sleep(0.01)
    grid = load_grid(TINY, ["training.rounds=6"])
    assert [state_of(cell, recipe, folder) for cell, recipe in recipes(grid).items()] == ["interrupted", "new"]
    torn = DEA.folder(folder)  # as a kill leaves it that comes before the recipe is written
    torn.mkdir(parents=True)
    (torn / "partition.json").write_text("{")
    run(grid, folder, jobs=2)
    assert_equal(whole, folder)


@pytest.mark.usefixtures("near")
def test_a_cell_that_another_process_runs_is_waited_for(whole: Path, tmp_path: Path) -> None:
    """One has its lock and has just begun: nothing of it is deleted, and then the cell is run."""
    grid = load_grid(TINY, ["training.rounds=6"])
    begun = AVG.folder(tmp_path)
    begun.mkdir(parents=True)
    (begun / "run.json.part").write_text("{")
    lock = ExitStack()
    lock.enter_context(locked(begun.parent / ".s0.lock", begun))

    class Heard(Watch):
        def __init__(self) -> None:
            self.said: list[str] = []

        def event(self, text: str) -> None:
            self.said.append(text)

        def put_off(self, cell: Cell) -> None:
            assert (cell, (begun / "run.json.part").is_file()) == (AVG, True)
            if DEA.folder(tmp_path).joinpath("model.safetensors").is_file():
                lock.close()

    heard = Heard()
    outcome = run_prepared(prepare(grid, tmp_path), heard, jobs=2)
    assert (set(outcome.finished), outcome.failed) == ({AVG, DEA}, {})
    assert heard.said == [f"{AVG}: another process runs this cell; this grid waits until it is free"]
    assert_equal(whole, tmp_path)


@pytest.mark.usefixtures("near")
def test_a_cell_that_another_process_has_finished_is_not_run_again(whole: Path, tmp_path: Path) -> None:
    prepared = prepare(load_grid(TINY, ["training.rounds=6"]), tmp_path)
    shutil.copytree(whole / "cells", tmp_path / "cells")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("model.safetensors")}
    with locked(AVG.folder(tmp_path) / ".lock", tmp_path):  # a run that is over may still be looked at
        outcome = run_prepared(prepared, Watch(), jobs=2)
    assert (set(outcome.finished), outcome.failed) == ({AVG, DEA}, {})
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("model.safetensors")} == before


@pytest.mark.slow
def test_two_grids_in_one_folder_share_the_work(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    command = [sys.executable, "-m", "fedloom", "grid", str(tmp_path / "grid.yaml"), "training.rounds=6", "--jobs", "2"]
    for number in range(3):
        folder = tmp_path / f"g{number}"
        both = [subprocess.Popen([*command, "--out", str(folder)], stderr=subprocess.PIPE) for _ in range(2)]
        assert [(one.communicate()[1], one.returncode)[1] for one in both] == [0, 0]
        assert_equal(whole, folder)


def test_a_file_of_a_grid_that_two_processes_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one writes between this one's writing and renaming."""
    replaced = Path.replace

    def replace_(self: Path, to: Path) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replaced)
            child = multiprocessing.get_context("fork").Process(target=write, args=(tmp_path, {"a.yaml": "theirs"}))
            child.start()
            child.join()
        assert (child.exitcode, (tmp_path / "a.yaml").read_text()) == (0, "theirs")
        return replaced(self, to)

    monkeypatch.setattr(Path, "replace", replace_)
    write(tmp_path, {"a.yaml": "mine"})
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.yaml", "mine")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_grid_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "log.txt").symlink_to("elsewhere")
    with pytest.raises(StateError, match="log.txt: a link to elsewhere found"):
        prepare(load_grid(TINY), tmp_path)


@pytest.mark.usefixtures("near")
def test_refused_and_failing_cells_do_not_stop_the_others(tmp_path: Path) -> None:
    value = TINY | {"bases": {"Local": {"method": "local"}, "FedAvg": {"method": "fedavg"}}}
    prepared = prepare(load_grid(value), tmp_path)
    reason = prepared.refused["Digits / Local / +DEA"]
    assert "would have no effect, because everything is private" in reason
    assert [str(cell) for cell in prepared.todo] == [
        "Digits / Local s0",
        "Digits / FedAvg s0",
        "Digits / FedAvg / +DEA s0",
    ]
    assert all(3e8 < need < 1e9 for need in prepared.needs.values())
    foreign = AVG.folder(tmp_path)
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    outcome = run_prepared(replace(prepared, todo=prepared.todo[:2]), Watch(), jobs=2)
    assert list(map(str, outcome.finished)) == ["Digits / Local s0"]
    assert outcome.failed == {AVG: f"{foreign} holds notes.txt, but no run"}
    assert json.loads((tmp_path / "refused.json").read_text()) == {"Digits / Local / +DEA": reason}
    assert (foreign / "notes.txt").is_file()


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"columns": ["digit", "party"]}, "grid tiny: columns: no task 'party'. Did you mean 'parity'?"),
        ({"metric": "miou"}, "no task has the metric 'miou'. Recorded: "),
        ({"show": "domains"}, "show: domains: grid tiny: expected the name of a task, found several"),
        ({"also": ["average"]}, "grid tiny: also: an average over tasks needs one metric, found accuracy,"),
    ],
)
def test_what_the_grid_cannot_show_of_its_data_is_refused_before_anything_runs(tmp_path, keys, message) -> None:
    mixed = {"tasks.parity.metric": "auc"} if "also" in keys else {}
    grid = load_grid(TINY | keys | {"set": {**TINY["set"], **mixed}})
    with pytest.raises(UserError, match=re.escape(f"Digits / FedAvg: {message}")):
        prepare(grid, tmp_path)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"columns": ["digit", "party"]}, "grid tiny: columns: no task 'party'. Did you mean 'parity'?"),
        ({"metric": "miou"}, "no task has the metric 'miou'. Recorded: "),
    ],
)
def test_what_the_grid_cannot_show_of_finished_cells_is_refused_too(whole: Path, keys, message) -> None:
    grid = load_grid(TINY | keys, ["training.rounds=6"])
    with pytest.raises(UserError, match=re.escape(f"Digits / FedAvg s0: {message}")):
        prepare(grid, whole)


@pytest.mark.usefixtures("near")
def test_data_that_is_absent_is_said_before_anything_runs(tmp_path: Path) -> None:
    grid = load_grid(
        TINY
        | {"set": {"data": {"name": "arrays", "path": "no.npz", "images": "x_{split}", "labels": {"a": "y_{split}"}}}}
    )
    with pytest.raises(UserError, match=r"^Digits / FedAvg: .*no\.npz"):
        prepare(grid, tmp_path / "g")
    assert not (tmp_path / "g").exists()


# The schedule, with children that do nothing


class Fake:
    """Stands for a child: sends what it was given, and counts how many there are at once."""

    now, most, order = 0, 0, []

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages

    def __call__(self, function: Any, recipe: Any, folder: Path, grid_folder: Path) -> Any:
        import multiprocessing

        here, there = multiprocessing.Pipe(duplex=False)
        for message in self.messages:
            there.send(message)
        there.close()
        Fake.now += 1
        Fake.most = max(Fake.most, Fake.now)
        Fake.order.append(folder)
        return here, self

    exitcode = -9

    def join(self, timeout: float = 0) -> None: ...
    def is_alive(self) -> bool:
        return False

    def terminate(self) -> None:
        Fake.order.append("terminated")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(*messages: Any) -> None:
        Fake.now, Fake.most, Fake.order = 0, 0, []
        monkeypatch.setattr(grid_run, "_spawn", Fake(list(messages)))
        monkeypatch.setattr(grid_run, "_end", lambda process: setattr(Fake, "now", Fake.now - 1))

    return use


def prepared(tmp_path: Path, need: int, seeds: int = 4) -> grid_run.Prepared:
    grid = load_grid(TINY, [f"seeds={list(range(seeds))}"])
    by_cell = recipes(grid)
    return grid_run.Prepared(
        grid, tmp_path, by_cell, dict.fromkeys(by_cell, "new"), {}, tuple(by_cell), dict.fromkeys(by_cell, need)
    )


def test_a_warning_of_several_cells_is_said_once(tmp_path: Path, fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake(("warning", "data: copies", 0), ("round", 0, 0), ("done", "finished", 0))
    run_prepared(prepared(tmp_path, 1), Watch(), 2, 10)
    assert capsys.readouterr().err.count("data: copies") == 1


@pytest.mark.parametrize(("jobs", "memory", "most"), [(3, 10_000, 3), (8, 350, 3), (8, 50, 1), (1, 10_000, 1)])
def test_the_memory_budget_is_kept_but_one_cell_always_runs(fake, tmp_path, jobs, memory, most) -> None:
    fake(("round", 0, 0), ("done", "finished", 0))
    outcome = run_prepared(prepared(tmp_path, 100), Watch(), jobs, memory)
    assert (len(outcome.finished), Fake.most) == (8, most)


def test_a_cells_real_peak_corrects_the_estimate(fake, tmp_path) -> None:
    fake(("round", 0, 400), ("round", 1, 500), ("done", "finished", 500))
    outcome = run_prepared(prepared(tmp_path, 100), Watch(), 2, 600)
    assert outcome.peak == 500
    assert Fake.most == 2  # the first two: nothing was known yet
    Fake.now, Fake.most = 0, 0
    run_prepared(prepared(tmp_path, 400), Watch(), 2, 600)
    assert Fake.most == 1


def test_a_child_that_dies_and_one_that_is_refused(fake, tmp_path) -> None:
    fake(("round", 0, 0))
    outcome = run_prepared(prepared(tmp_path, 1, 1), Watch(), 2, 10)
    assert set(outcome.failed.values()) == {
        "its process ended with exit code -9; -9 often means that memory ran out: fewer --jobs, or a smaller --memory"
    }
    fake(("refused", "no", 0))
    outcome = run_prepared(prepared(tmp_path, 1, 1), Watch(), 2, 10)
    assert (outcome.refused, outcome.failed) == ({"Digits / FedAvg": "no", "Digits / FedAvg / +DEA": "no"}, {})
    assert json.loads((tmp_path / "refused.json").read_text()) == outcome.refused


def test_an_interrupt_stops_the_children(fake, tmp_path) -> None:
    class Interrupted(Watch):
        def round(self, cell: Cell, rounds: int) -> None:
            raise KeyboardInterrupt

    fake(("round", 0, 0), ("done", "finished", 0))
    with pytest.raises(KeyboardInterrupt):
        run_prepared(prepared(tmp_path, 1), Interrupted(), 2, 10)
    assert Fake.order.count("terminated") == 2
    assert open_folder(tmp_path)[1] == tmp_path


def test_limits_by_default(tmp_path: Path) -> None:
    assert 10**8 < available_memory() < 10**14
    one = list(recipes(load_grid(TINY)).values())
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert default_jobs(one) == cpus
    assert default_jobs(list(recipes(load_grid(TINY, ["runtime.workers=1000"])).values())) == 1
    assert default_jobs(list(recipes(load_grid(TINY, ["runtime.device=cuda"])).values())) == 1
    assert state_of(AVG, one[0], tmp_path) == "new"


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def play(watch: Any) -> str:
        watch.start(2, 20)
        watch.began(AVG)
        watch.began(DEA)
        watch.round(AVG, 0)
        watch.round(DEA, 8)
        watch.round(AVG, 5)
        watch.event("mind this [x]")
        watch.ended(AVG, "finished", 61.0, 10)
        watch.ended(DEA, "failed: no", 5.0, 10)
        watch.stop()
        return capsys.readouterr().err

    assert type(progress(quiet=True)) is Watch
    assert play(progress(quiet=True)) == ""
    lines = progress()
    assert isinstance(lines, CellLines)
    assert re.fullmatch(
        r"mind this \[x\]\n\[1/2\] Digits / FedAvg s0: finished  1:01 spent, 0:0\d left\n"
        r"\[2/2\] Digits / FedAvg / \+DEA s0: failed: no  0:05 spent, 0:00 left\n",
        play(lines),
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    bar = progress()
    assert isinstance(bar, Bar)
    err = play(bar)
    assert "cells 2/2" in err
    assert "failed: no" in err


def test_a_grid_shows_the_first_event_of_each_kind_of_a_cell() -> None:
    ours, theirs = multiprocessing.Pipe()
    tell = grid_run._Tell(theirs)
    for text in ("round 1: long update: client a", "round 1: round lost", "round 2: long update: client b: x"):
        tell.event(text)
    theirs.close()
    assert [ours.recv()[1] for _ in range(2)] == ["round 1: long update: client a", "round 1: round lost"]
    with pytest.raises(EOFError):
        ours.recv()
