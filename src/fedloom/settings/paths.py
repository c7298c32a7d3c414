"""Key paths of nested plain values: where two of them differ, and the value at one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
