"""Completion after TAB in a shell: names of recipes, grids and methods, and keys and names in KEY=VALUE. No torch."""

from __future__ import annotations

from typing import Any

import typer


def recipe(incomplete: str) -> list[str]:
    """Return packaged recipes."""
    from fedloom.federation.recipes.loader import names

    return _that_begin(incomplete, names())


def grid(incomplete: str) -> list[str]:
    """Return packaged grids, and those that ran in their default place."""
    from fedloom.study.grid import names, ran

    return _that_begin(incomplete, sorted({*names(), *ran()}))


def method(incomplete: str) -> list[str]:
    """Return methods and add-ons."""
    from fedloom.methods import ADDONS, METHODS

    return _that_begin(incomplete, [*METHODS.names, *ADDONS.names])


def dataset(incomplete: str) -> list[str]:
    """Return the names of data sets."""
    from fedloom.data import DATASETS

    return _that_begin(incomplete, DATASETS.names)


def change(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys of a recipe's sections, and after data=, partition=, model= and method= the names that may
    follow.
    """
    from fedloom.federation.recipes.schema import Named, Recipe

    before = list(ctx.params.get("changes") or ())
    key, equals, value = incomplete.partition("=")
    split = not equals and before[-1:] == ["="] and len(before) > 1  # bash takes KEY=VALUE for three words
    if split:
        key, value = before[-2], incomplete
    elif not equals:
        return _that_begin(key, _keys("", Recipe))
    field = Recipe.model_fields.get(key.removesuffix(".name"))
    section: Any = field.annotation if field is not None else None
    if not (isinstance(section, type) and issubclass(section, Named)):
        return []
    return [name if split else f"{key}={name}" for name in _that_begin(value, section.registry().names)]


def _keys(path: str, section: Any) -> list[str]:
    """Return KEY= for each key of a section, KEY.KEY= for those of sections in it."""
    from pydantic import BaseModel

    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        keys.append(f"{path}{name}=")
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += [key for key in _keys(f"{path}{name}.", inner) if not key.endswith(("params=", "name="))]
    return keys


def _that_begin(with_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(with_)]
