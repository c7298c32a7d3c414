"""Packaged recipes and grids have the values of each paper's text, and a release differs in named keys only.

The values are in tests/facts, one file per paper: of recipes by their key, of the `grids` their seeds and cells by
base or add-on and key, and the `defaults` of add-ons, kinds of tasks and augmentation, which stand in no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.core.settings.section import value_at
from fedloom.data.prepare import Augment
from fedloom.federation.recipes import load, names
from fedloom.methods import ADDONS
from fedloom.models.tasks.dense import KINDS
from fedloom.study.grid import load_grid, recipes

FACTS = {path.stem: yaml.safe_load(path.read_text()) for path in (Path(__file__).parents[1] / "facts").glob("*.yaml")}
RELEASES = FACTS.pop("releases")
GRIDS = {name: of for facts in FACTS.values() for name, of in facts.pop("grids", {}).items()}
DEFAULTS = {name: of for facts in FACTS.values() for name, of in facts.pop("defaults", {}).items()}
TWINS = ("*-mini", "*-real", "*-embedded", "*scenes*", "*/digits-pairwise", "matu/[!et]*")


def of_paper(paper: str) -> list[str]:
    """The recipes on a paper's own data."""
    return [n for n in names() if n.startswith(f"{paper}/") and not any(fnmatch(n, twin) for twin in TWINS)]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path[1:]: value}
    return {key: leaf for name, part in value.items() for key, leaf in flat(part, f"{path}.{name}").items()}


def stated(fact: Any, value: Any) -> bool:
    """Return whether a value is the text's, or lies between the two that the text names."""
    if isinstance(fact, Mapping) and fact.keys() == {"least", "most"}:
        return bool(fact["least"] <= value <= fact["most"])
    return bool(fact == value)


@pytest.mark.parametrize("paper", FACTS)
def test_recipes_have_the_values_of_the_text(paper: str) -> None:
    used = set()
    for name in of_paper(paper):
        recipe = load(name).model_dump(mode="json")
        for pattern, values in FACTS[paper].items():
            if fnmatch(name, pattern):
                used.add(pattern)
                found = {key: value_at(recipe, key) for key in values}
                assert [key for key, fact in values.items() if not stated(fact, found[key])] == [], (name, found)
    assert used == FACTS[paper].keys()
    assert len(of_paper(paper)) >= 2


@pytest.mark.parametrize("grid", GRIDS)
def test_cells_have_the_values_of_the_text(grid: str) -> None:
    used, facts = set(), dict(GRIDS[grid])
    assert list(load_grid(grid).seeds) == facts.pop("seeds", list(load_grid(grid).seeds))
    for cell, recipe in recipes(load_grid(grid, ["seeds=[0]"])).items():
        for base, values in facts.items():
            if fnmatch(cell.base, base) or fnmatch(cell.addon, base):
                used.add(base)
                found = {key: value_at(recipe.model_dump(mode="json"), key) for key in values}
                assert [key for key, fact in values.items() if not stated(fact, found[key])] == [], (cell, found)
    assert used == facts.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_have_the_values_of_the_text(name: str) -> None:
    if name in ADDONS:
        found = {key: ADDONS.entries[name].params.model_fields[key].default for key in DEFAULTS[name]}
    elif name == "augment":
        found = Augment().model_dump(mode="json", include=set(DEFAULTS[name]))
    else:
        found = {key: getattr(KINDS[name], key) for key in DEFAULTS[name]}
    assert found == DEFAULTS[name]


@pytest.mark.parametrize("grid", RELEASES)
def test_a_release_differs_from_the_text_in_named_keys_only(grid: str) -> None:
    release, text = (
        {cell: flat(recipe.model_dump(mode="json")) for cell, recipe in recipes(load_grid(name, ["seeds=[0]"])).items()}
        for name in (grid, RELEASES[grid]["of"])
    )
    assert release.keys() == text.keys()
    found = {
        key
        for cell, values in release.items()
        for key in values.keys() | text[cell].keys()
        if values.get(key, ...) != text[cell].get(key, ...)
    }
    named = RELEASES[grid]["keys"]
    assert not {key for key in found if not any(fnmatch(key, pattern) for pattern in named)}
    assert not [pattern for pattern in named if not any(fnmatch(key, pattern) for key in found)]
