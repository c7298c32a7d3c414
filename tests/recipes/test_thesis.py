"""The packaged recipes and grids of the DFMTL thesis: the text by default, the release by name, odsF for edges."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import RecipeError
from fedloom.data import PARTITIONERS, Pool
from fedloom.federation.recipes import Recipe, load, names
from fedloom.study import grid as grids
from fedloom.study.grid import Cell, load_grid, recipes

COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
RECIPES = [name for name in names() if name.startswith("thesis/")]
GRIDS = [name for name in grids.names() if name.startswith("thesis/")]
TEXT = [name for name in RECIPES if name.startswith(("thesis/nyud-", "thesis/pascal-")) and not name.endswith("-mini")]


@cache
def cells(name: str) -> dict[Cell, Recipe]:
    return recipes(load_grid(name, ["seeds=[0]"]))


def has_edges(recipe: Recipe) -> bool:
    return recipe.data.name in ("nyud", "pascal-context") and "edge" in recipe.data.params["tasks"]


def test_edges_of_files_are_measured_by_odsf_in_every_recipe_and_cell() -> None:
    every = {name: load(name) for name in RECIPES}
    every |= {f"{name}: {cell}": recipe for name in GRIDS for cell, recipe in cells(name).items()}
    asked = {where: recipe.tasks["edge"].get("ods") for where, recipe in every.items() if has_edges(recipe)}
    assert len(asked) == 8 + 2 * (20 + 5)  # the recipes of PASCAL-Context, the cells of dense and dense-release
    assert set(asked.values()) == {True}


@pytest.mark.parametrize("name", TEXT)
def test_recipes_are_those_of_the_text(name: str) -> None:
    recipe = load(name)
    model, data, stopping = recipe.model.params, recipe.data.params, recipe.early_stopping
    assert (model["architecture"], model["decoder"]) == ("resnet18", "transposed")
    if recipe.data.name == "nyud-labeled":
        assert (data["size"], data["classes"]) == ((256, 256), 13)
    else:
        assert (data["size"], data["classes"], data["parts"]) == ((512, 512), 59, 15)
    assert stopping is not None
    assert stopping.relative
    assert (stopping.patience, stopping.min_delta) in [(8, 0.003), (10, 0.002)]
    assert (recipe.training.rounds, recipe.training.epochs, recipe.training.optimizer.name) == (50, 5, "adam")


def test_an_experiment_is_the_same_in_its_recipe_and_in_the_grid() -> None:
    grid = {(cell.data, cell.base): recipe for cell, recipe in cells("thesis/dense").items()}
    bases = {
        "single": "A1",
        "pairwise": "A2",
        "multi": "B4",
        **{name: name.upper() for name in ("b1", "b2", "b3", "c1", "c2")},
    }
    for data, where in (("NYU v2", "nyud"), ("PASCAL-Context", "pascal")):
        for name, base in bases.items():
            changes = {"name": "x", "seed": 0}
            recipe = load(f"thesis/{where}-{name}")
            assert recipe.model_copy(update=changes) == grid[data, base].model_copy(update=changes), (data, base)


def test_the_release_is_a_variant() -> None:
    for cell, recipe in cells("thesis/dense-release").items():
        model, stopping = recipe.model.params, recipe.early_stopping
        assert (model["architecture"], model["decoder"]) == ("resnet50", "thesis")
        assert recipe.data.params["size"] == (288, 384)
        assert recipe.data.params.get("parts", 6) == 6
        assert (cell.base == "constant") == (stopping is None)
        assert stopping is None or not stopping.relative
        if cell.base in ("A1", "A2", "B1", "B4", "C1", "C2"):
            assert recipe.peers is not None
            assert not recipe.peers.weights.include_self
            assert similarity(recipe) == {"gradient": "update", "scale": "unit", "cross_loss": "inverse"}
            assert recipe.peers.similarity.normalise == "none"
        if cell.base == "B1, cross-loss":
            assert recipe.peers is not None
            assert recipe.peers.similarity.scales == {"cross-loss": "min-max"}
    assert cells("thesis/dense-release").keys() == cells("thesis/dense").keys()
    for release, text in (("thesis/cifar-release", "thesis/cifar"), ("thesis/cifar-mini-release", "thesis/cifar-mini")):
        for cell, recipe in cells(release).items():
            now = recipe.training
            assert (now.epochs, now.optimizer.name, now.optimizer.lr) == (3, "sgd", 0.01)
            now = cells(text)[cell].training
            assert (now.epochs, now.optimizer.name, now.optimizer.lr) == (5, "adam", 0.001)


def test_one_key_has_the_similarities_of_the_release() -> None:
    recipe = load("thesis/cifar", ["peers.similarity.release=true"])
    assert similarity(recipe) == {"gradient": "update", "scale": "unit", "cross_loss": "inverse"}
    assert load(recipe.model_dump(mode="json")) == recipe
    for wrong in ("peers.similarity.release=yes please", "peers.similarity={release: true, signals: 3}"):
        with pytest.raises(RecipeError, match="peers.similarity"):
            load("thesis/cifar", [wrong])


def similarity(recipe: Recipe) -> dict[str, str]:
    assert recipe.peers is not None
    section = recipe.peers.similarity
    return {"gradient": section.gradient, "scale": section.scale, "cross_loss": section.cross_loss}


def test_similarities_are_those_of_the_text_in_every_grid_but_the_releases() -> None:
    """Eqs. 4.2, 4.3 and 4.6 everywhere; signals are brought to one scale where two of them are combined.

    B1 by cross-loss is B1 between two measurements: cosines as they are, without weight below 0 (eq. 4.9).
    """
    every = {f"{name}: {cell}": r for name in GRIDS if "release" not in name for cell, r in cells(name).items()}
    every |= {name: load(name) for name in RECIPES}
    for where, recipe in every.items():
        if recipe.peers is None:
            continue
        assert similarity(recipe) == {"gradient": "loss", "scale": "cosine", "cross_loss": "negative"}, where
        scale = {"cross-loss": "min-max"} if "B1, cross-loss" in where else "min-max"
        assert len(recipe.peers.similarity.signals) == 1 or recipe.peers.similarity.normalise == scale, where
        assert recipe.peers.weights.include_self


def test_phases_are_as_long_as_in_the_text() -> None:
    found = {}
    for cell, recipe in cells("thesis/phases").items():
        assert recipe.peers is not None
        warmup = recipe.peers.warmup
        found[cell.addon] = warmup and (warmup.alone - 1, warmup.until - warmup.alone, recipe.peers.rollback)
    assert found["-"] is None
    phases = {"two phases": (10, 0, None), "three phases": (5, 5, None), "four phases": (5, 5, 5)}
    assert {name: found[name] for name in phases} == phases


def test_the_quick_test_of_the_coverage_page_gives_every_task_to_somebody() -> None:
    """Three tasks and the clients of that command, in every cell: two clients with one task each would not do."""
    command = re.search(
        r"`fedloom grid (thesis/dense) --only \"NYU v2\" ([^`]*) --out quick`", COVERAGE.read_text("utf-8")
    )
    assert command
    quick = recipes(load_grid(command[1], ["seeds=[0]", *command[2].split()]))
    assert len({recipe.partition.params["weights"] for recipe in quick.values()}) == 3
    pool = Pool({task: np.zeros(30, dtype=np.int64) for task in ("semseg", "normals", "depth")})
    for recipe in quick.values():
        shares = PARTITIONERS[recipe.partition.name].make(pool, 0, **recipe.partition.params).shares
        assert len(shares) == 3


def test_the_figures_of_chapter_6_have_names() -> None:
    for name in ("thesis/dense", "thesis/dense-scenes", "thesis/dense-release"):
        wanted = {"6.1", "6.2, runs", "6.2, B1", "6.3", "6.4", "A.1", "A.2", "A.3", "A.4", "A.5"}
        assert load_grid(name).figures.keys() == wanted
