"""What the packaged recipes train, what they need, and how long a run takes. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.federation.recipes.loader import HOME, load, packaged, summary

_FILES = ("path", "root", "weights", "pretrained", "start")
"""Keys of data and model that name a file, a folder or weights, which a recipe does not bring."""
_MINUTES = re.compile(r"^Minutes of one core: ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A packaged recipe."""

    name: str
    summary: str
    needs: tuple[str, ...]
    """Its keys that name files to have, in dots."""
    minutes: float | None
    """Of processor time, as measured; None where a whole run was not."""


def catalogue() -> list[Entry]:
    """All packaged recipes in the order of their names."""
    found = []
    for name, its in sorted(packaged(HOME).items()):
        recipe = load(name).model_dump(mode="json")
        measured = _MINUTES.search(its.comment)
        needs = tuple(key for section in ("data", "model") for key in _files(section, recipe[section]))
        found.append(Entry(name, summary(name), needs, float(measured[1]) if measured else None))
    return found


def _files(path: str, section: Mapping[str, Any]) -> Iterator[str]:
    if section.get("root"):  # what else is named is below it
        yield f"{path}.root"
        return
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _files(f"{path}.{key}", value)
        elif key in _FILES and value:
            yield f"{path}.{key}"
