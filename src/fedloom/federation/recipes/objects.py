"""Recipes in Python: objects in the place of names, and options as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.settings.section import as_plain, found
from fedloom.federation.recipes.runtime import Runtime
from fedloom.federation.recipes.schema import GIVEN, MethodSection, Recipe, described
from fedloom.training.config import Training

SECTIONS = ("data", "partition", "model", "method")
"""Where an object may stand in a name's place."""


def separated(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a recipe's content with names in the place of objects, and the objects.

    A section is an object, or a mapping whose `name` is one. For a Method the section says what it would without it.
    """
    plain, objects = as_plain(value), {}
    for key in SECTIONS:
        section = plain.get(key)
        thing = section.get("name") if isinstance(section, Mapping) else section
        if thing is None or isinstance(thing, str | Mapping | list):
            continue
        if isinstance(thing, bool | int | float):
            raise RecipeError(f"{key}: {found(thing)} found, expected a name, a section or an object")
        more = {k: v for k, v in section.items() if k != "name"} if isinstance(section, Mapping) else {}
        objects[key] = thing
        mine = {"name": "fedavg"} if key == "method" else {"name": GIVEN, "what": described(thing)}
        plain[key] = {**mine, **more}
    return plain, objects


def with_keywords(value: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's content with keywords: sections (training={...}), or keys of `training` and `runtime` alone.

    `lr` is the optimiser's. A mapping changes the keys that it names. Raises RecipeError for an unknown keyword.
    """
    result = dict(value)
    for key, given in sorted(options.items(), key=lambda option: option[0] == "lr"):
        if key == "lr":
            key, optimizer = "optimizer", (result.get("training") or {}).get("optimizer") or {}
            given = {**optimizer, "lr": given}
        if key in Recipe.model_fields:
            before = result.get(key)
            if key in SECTIONS and before is not None and not isinstance(before, Mapping):
                before = {"name": before}
            if isinstance(given, Mapping) and isinstance(before, Mapping) and "name" not in given:
                given = {**before, **given}
            result[key] = given
            continue
        home = next((n for n, model in (("training", Training), ("runtime", Runtime)) if key in model.model_fields), "")
        if not home:
            known = [*Recipe.model_fields, *Training.model_fields, *Runtime.model_fields]
            raise RecipeError(
                f"{key}: unknown option.{nearest(key, known)} Options are a recipe's sections "
                f"({', '.join(Recipe.model_fields)}), lr, and the keys of training and runtime"
            )
        if not isinstance(result.get(home) or {}, Mapping):
            raise RecipeError(f"{home}: {found(result[home])} found, expected a mapping")
        result[home] = {**(result.get(home) or {}), key: given}
    return result


def without_method(section: MethodSection) -> None:
    """Refuse a recipe that needs a Method made in Python, without one."""
    if section.python is not None and not section.is_held:
        raise RecipeError(
            f"method.python: the method was the Python object {section.python!r}, which a recipe cannot store; pass "
            "it as method= in Python (fedloom.run, fedloom.resume)"
        )


def undone(section: MethodSection, name: str) -> None:
    """Refuse keys of a recipe that a Method made in Python, of this name, would silently undo."""
    known = section.entry.params.model_fields
    given = {k: v for k, v in section.params.items() if v != known[k].get_default(call_default_factory=True)}
    common = {key: getattr(section, key) for key in ("add", "weights", "max_examples", "buffers", "codec")}
    given |= {k: v for k, v in common.items() if v}
    for key, value in given.items():
        names = ", ".join(value) if isinstance(value, dict) else value
        raise RecipeError(
            f"method.{key}: {names} found, but the Python object {name!r} replaces the recipe's method, so "
            f"this key would have no effect; leave it out (method={section.name}), and set it in Python"
        )
