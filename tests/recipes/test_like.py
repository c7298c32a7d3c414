"""Recipes and grids that are like others, files that have several, and grids on another benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.core.settings.trust import Origin
from fedloom.core.settings.yaml import parse
from fedloom.engines.flower.terms import Offer
from fedloom.errors import RecipeError
from fedloom.federation.recipes import dump, load
from fedloom.federation.recipes.loader import names
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.study import grid as grids
from fedloom.study.grid import load_grid, recipes

KNOWN = [line.split() for line in Path(__file__).with_name("names.txt").read_text("utf-8").splitlines()]
"""The names of packaged grids and, with the hashes that they resolve to, of packaged recipes. Those of thesis/* changed
when its recipes took the similarities of the thesis' text in place of the release's, that of private-digits when stacks
became its own decision, so that methods without them can be compared on it."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(file: str, /, **value: object) -> str:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(yaml.safe_dump(value, sort_keys=False))
    return file


def test_every_name_there_ever_was_is_there_and_recipes_are_what_they_were() -> None:
    assert {line[0] for line in KNOWN if len(line) == 1} <= set(grids.names())
    every = {name: load(name) for name in names()}
    assert [recipe.name for recipe in every.values()] == [name.replace("/", "-") for name in every]
    assert [load(parse(dump(recipe), "dumped")) for recipe in every.values()] == [*every.values()]
    found = {name: recipe_hash(recipe) for name, recipe in every.items()}
    assert {**found, **{line[0]: line[1] for line in KNOWN if len(line) == 2}} == found


def test_a_recipe_like_another_changes_it_as_the_command_line_does() -> None:
    base = {"training.optimizer.lr": 0.5, "method": {"name": "fedprox", "mu": 2}, "model.width": 8, "name": "mine"}
    written("base.yaml", like="digits-tasks", **base)
    written("mine.yaml", like="base.yaml", **{"method.mu": 3, "peers": None, "training": {"rounds": 2}})
    expected = load(
        "digits-tasks", ["name=mine", "model.width=8", "method={name: fedprox, mu: 3}", "training={rounds: 2}"]
    )
    assert load("mine.yaml") == expected == load({"like": "mine.yaml"}) == load(yaml.safe_load(dump(expected)))
    assert load("mine.yaml", ["training.rounds=4"]).training.rounds == 4
    said = CliRunner().invoke(app, ["show", "mine.yaml", "--full"]).output
    assert said.startswith(dump(expected))
    assert fl.engines.api.recipe_of({"like": "mine.yaml"}, method="local").method.name == "local"


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ("mine.yaml", "-> .*mine.yaml is circular"),
        ("other.yaml", "other.yaml -> .*other.yaml is circular"),
        ("../base.yaml", r"expected a file in \. or below it"),
        ("/etc/hostname", r"expected a file in \. or below it"),
        ("out.yaml", r"expected a file in \. or below it"),
        ("digits-task", "neither a file nor a packaged recipe. Did you mean 'digits-tasks'"),
        (["digits-tasks"], "neither a file nor a packaged recipe"),
    ],
)
def test_what_a_recipe_cannot_be_like(here: Path, like: object, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written("base.yaml", like="digits-tasks")
    (here / "in").mkdir()
    monkeypatch.chdir(here / "in")
    Path("out.yaml").symlink_to("../base.yaml")
    written("other.yaml", like="mine.yaml")
    with pytest.raises(RecipeError, match=f"mine.yaml, like: .*{said}|other.yaml, like: .*{said}"):
        load(written("mine.yaml", like=like))


@pytest.mark.parametrize("like", ["a\0/b", "a\0b"])
def test_a_name_that_no_file_can_have(here: Path, like: str) -> None:
    with pytest.raises(RecipeError, match="neither a file nor a packaged recipe"):
        load({"like": like})
    with pytest.raises(RecipeError, match="mine.yaml, line 1, column 7: a control character found"):
        load(written("mine.yaml", like=like))


def test_names_of_code_in_what_a_file_is_like_are_the_files(here: Path) -> None:
    (here / "evil.py").write_text("open('owned', 'w')\n")
    written("base.yaml", like="digits-tasks", model="evil:Net")
    for source in (written("mine.yaml", like="base.yaml"), {"like": "base.yaml", "method": "timeit:timeit"}):
        with pytest.raises(RecipeError, match="evil:Net .*\nNothing was imported"):
            load(source)
    row = {"like": written("plain.yaml", like="digits-tasks"), "model": "evil:Net"}
    for recipe in ("base.yaml", row):
        with pytest.raises(RecipeError, match="evil:Net"):
            recipes(load_grid(written("g.yaml", name="g", data={"D": {"recipe": recipe}}, bases={"A": {}})))
    assert not (here / "owned").exists()


def test_what_came_from_elsewhere_is_like_nothing() -> None:
    file = Path(written("run/recipe.yaml", like="digits-tasks"))
    for origin in (Origin.FOLDER, Origin.ELSEWHERE):
        with pytest.raises(RecipeError, match="like: unknown key"):
            load(file, origin=origin)
    with pytest.raises(RecipeError, match="like: unknown key"):
        Offer.of(file).resolved()
    assert Offer.of("feddea/nyud-mini").resolved() == load("feddea/nyud-mini").at_nodes()


def test_a_grid_runs_on_a_benchmark_of_its_own_or_on_a_recipe() -> None:
    assert load_grid("feddea/table3", benchmark="digits") == load_grid("feddea/table3-digits")
    benchmarks = {"wide": {"data": {"D": {"recipe": "digits-tasks", "set": {"model.width": 32}}}, "seeds": [4]}}
    mine = {"like": "feddea/table3-digits", "name": "mine", "benchmarks": benchmarks, "columns": ["digit"]}
    wide = load_grid(written("grid.yaml", **mine), benchmark="wide")
    assert (wide.name, wide.seeds, wide.columns) == ("mine-wide", (4,), ("digit",))
    assert load_grid("grid.yaml").name == "mine"
    recipe = written("r.yaml", like="digits-tasks", **{"model.width": 4})
    grid = load_grid("feddea/table5", ["seeds=[0]"], benchmark=recipe)
    assert (grid.name, grid.columns, list(grid.data), grid.set) == ("feddea-table5-r", None, ["r"], {})
    own = load(recipe, ["seed=0"])
    for cell, one in recipes(grid).items():
        if cell.base in grid.bases:
            assert all(getattr(one, key) == getattr(own, key) for key in ("data", "partition", "model", "training"))
    assert load_grid("demo", benchmark="benchmarks/eight").name == "demo-benchmarks-eight"
    with pytest.raises(RecipeError, match="table3: no benchmark 'digit', .* Did you mean 'digits'"):
        load_grid("feddea/table3", benchmark="digit")
    with pytest.raises(RecipeError, match=r"benchmarks: \['wide'\] found, expected a mapping of labels"):
        load_grid(written("grid.yaml", **(mine | {"benchmarks": ["wide"]})), benchmark="wide")
    written("g/grid.yaml", **mine)
    assert "whose benchmark cannot change" in str(
        CliRunner().invoke(app, ["grid", "g", "--benchmark", "wide"]).exception
    )


def test_a_misspelt_file_is_told_the_one_beside_it(here: Path) -> None:
    written("patients.yaml", like="digits-tasks")
    with pytest.raises(RecipeError, match=r"no recipe 'patient\.yaml': .* Did you mean 'patients\.yaml'\?"):
        load("patient.yaml")
