"""Names that recipes, grids and run folders of older versions use, and what they are called now."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from fedloom.core.errors import warn

METHODS = {"joint": "centralised", "trivial": "constant"}
ROWS = {**METHODS, "joint-by-task": "centralised-by-task"}
"""References of a grid; also labels of its cells, and the data label `bed` of tournaments and atlases."""
FOLDERS = {"centralised": "joint", "centralised-by-task": "joint-by-task", "constant": "trivial", "benchmark": "bed"}
"""Folder of a cell -> its name in grids that an older version began."""


@cache
def _say(what: str, old: str, new: str) -> None:
    warn(f"{what} {old!r} is now called {new!r}")


def current(what: str, name: str, names: Mapping[str, str] = METHODS) -> str:
    """Return today's name for `name`, and say so once where that is another one."""
    if name not in names:
        return name
    _say(what, name, names[name])
    return names[name]


def source(name: str, known: Collection[str]) -> str:
    """Return today's name of a packaged recipe or grid: beds/digits is benchmarks/digits now."""
    now = re.sub(r"^beds(?=[/-])", "benchmarks", name)
    if name in known or now not in known:
        return name
    _say("recipe or grid", name, now)
    return now


def grid(value: dict[str, Any]) -> dict[str, Any]:
    """Return the plain content of a grid with today's names of its reference rows."""
    section = dict(value)
    if isinstance(rows := section.get("references"), (list, tuple)):
        section["references"] = [current("reference", row, ROWS) if isinstance(row, str) else row for row in rows]
    if isinstance(tuned := section.get("tuned"), dict):
        section["tuned"] = {
            data: {_cell(cell): settings for cell, settings in rows.items()} if isinstance(rows, dict) else rows
            for data, rows in tuned.items()
        }
    if isinstance(delta := section.get("delta"), str):
        section["delta"] = _cell(delta)
    if "beds" in section:
        section["benchmarks"] = section.pop("beds")
    return section


def _cell(label: Any) -> Any:
    base, slash, addon = str(label).partition("/")
    return ROWS.get(base, base) + slash + addon if slash else label


def info(value: dict[str, Any]) -> dict[str, Any]:
    """Return the content of run.json with today's name of its method; the text of a method begins with its name."""
    old, plus, addons = str(value.get("method")).partition(" + ")
    if old not in METHODS:
        return value
    text = str(value.get("recipe_text", "")).replace(old, METHODS[old], 1)
    return {**value, "method": METHODS[old] + plus + addons, "recipe_text": text}


def hashed(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's section `method` under its first name, so that hashes of older runs stay."""
    first = {now: then for then, now in METHODS.items()}
    return {**method, **({"name": first[method["name"]]} if method.get("name") in first else {})}
