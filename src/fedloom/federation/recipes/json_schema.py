"""JSON Schema of recipes, for editors that complete and check them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fedloom.core.settings.registry import Registered
from fedloom.federation.recipes.loader import SEVERAL
from fedloom.federation.recipes.schema import (
    AttackSection,
    DataSection,
    GraphSection,
    MethodSection,
    ModelSection,
    Named,
    PartitionSection,
    Recipe,
    registry,
)

SHIPPED = files("fedloom.federation.recipes") / "recipe.schema.json"
"""The schema with the names that the package itself has, for the packaged recipes; a test holds it to `schema`."""
IMPORTED = "^[A-Za-z_][\\w.]*:[A-Za-z_][\\w.]*$"
"""package.module:name."""


def schema() -> dict[str, Any]:
    """Return the schema of a recipe: its keys, their values, and the parameters of each registered name."""
    shape = Recipe.model_json_schema()
    defs: dict[str, Any] = shape["$defs"]
    each = registry("fedloom.methods", "ADDONS")
    addons = {entry.name: {"anyOf": [{"type": "null"}, _parameters(entry, defs)]} for entry in each}
    add = {"properties": addons, "patternProperties": {IMPORTED: {"type": "object"}}, "additionalProperties": False}
    defs["MethodSection"]["properties"]["add"] |= add
    for section in (DataSection, PartitionSection, ModelSection, MethodSection, GraphSection, AttackSection):
        defs[section.__name__] = _named(section, defs)
    own = "Of a packaged file with several recipes: the changes of each of its {}."
    shape["properties"] |= {key: {"type": "object", "description": own.format(key)} for key in SEVERAL}
    like = "A packaged recipe, or a file in this folder or below it, of which all is taken that stands not here."
    shape["properties"]["like"] = {"type": "string", "description": like}
    shape["patternProperties"] = {r"\.": {"description": "A key in a section, of what it is like."}}
    shape["anyOf"] = [{"required": keys} for keys in (shape.pop("required"), ["like"], ["benchmarks"])]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A recipe of fedloom", **shape}


def _named(section: type[Named], defs: dict[str, Any]) -> dict[str, Any]:
    """Return a name, or a mapping with a name, its parameters and the keys that the section always has."""
    own = defs[section.__name__]
    common = {}
    for key, value in own["properties"].items():
        if key not in ("name", "params"):  # stands once, for the many names that take it
            defs[f"{section.__name__}.{key}"] = value
            common[key] = {"$ref": f"#/$defs/{section.__name__}.{key}"}
    shapes = []
    for entry in section.registry():
        mine = _parameters(entry, defs)
        keys = {"name": {"const": entry.name}, **mine["properties"], **common}
        shapes.append({**mine, "properties": keys, "required": ["name", *mine.get("required", [])]})
    imported = {"type": "string", "pattern": IMPORTED}
    short = section.short()
    other = {"anyOf": [{"enum": short}, imported]} if short else imported
    shapes.append({"type": "object", "properties": {"name": other, **common}, "required": ["name"]})
    names = {"enum": section.names()}
    return {"description": own["description"], "anyOf": [{"anyOf": [names, imported]}, *shapes]}


def _parameters(entry: Registered, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a function; what they refer to joins `defs`."""
    shape = entry.params.model_json_schema()
    defs.update(shape.pop("$defs", {}))
    return {"properties": {}, **shape, "title": entry.name, "description": entry.summary}
