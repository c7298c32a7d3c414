"""Each paper's packaged recipes have the values of its text (tests/facts), and a release differs in named keys only."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.core.settings.section import value_at
from fedloom.federation.recipes import load, names
from fedloom.study.grid import load_grid, recipes

FACTS = {path.stem: yaml.safe_load(path.read_text()) for path in (Path(__file__).parents[1] / "facts").glob("*.yaml")}
RELEASES = FACTS.pop("releases")
TWINS = ("*-mini", "*-real", "*-embedded", "*scenes*", "*/digits-pairwise", "matu/[!et]*")


def of_paper(paper: str) -> list[str]:
    """The recipes on a paper's own data."""
    return [n for n in names() if n.startswith(f"{paper}/") and not any(fnmatch(n, twin) for twin in TWINS)]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path[1:]: value}
    return {key: leaf for name, part in value.items() for key, leaf in flat(part, f"{path}.{name}").items()}


@pytest.mark.parametrize("paper", FACTS)
def test_recipes_have_the_values_of_the_text(paper: str) -> None:
    used = set()
    for name in of_paper(paper):
        recipe = load(name).model_dump(mode="json")
        for pattern, values in FACTS[paper].items():
            if fnmatch(name, pattern):
                used.add(pattern)
                found = {key: value_at(recipe, key) for key in values}
                assert found == values, name
    assert used == FACTS[paper].keys()
    assert len(of_paper(paper)) >= 2


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
