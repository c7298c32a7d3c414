"""Keys of recipes, as dotted paths: in which ones two recipes differ, and the value at one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.recipes import schema
from fedloom.recipes.runtime import FlowerSettings

QUIET = {"name", "seed", *(f"runtime.{key}" for key in schema.QUIET)}
QUIET |= {f"runtime.flower.{key}" for key in FlowerSettings.model_fields}
"""Keys that no comparison mentions, for they do not change results."""


def differs(path: str, one: Any, two: Any) -> list[str]:
    """Key paths of the leaves in which two plain values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return [
            key
            for name in {*one, *two}
            for key in differs(f"{path}.{name}" if path else name, one.get(name), two.get(name))
        ]
    return [] if one == two else [path]


def value_at(value: Any, path: str) -> Any:
    """The value at a key path of nested mappings, None where there is none."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
