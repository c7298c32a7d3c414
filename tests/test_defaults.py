"""Defaults, ranges and traits stay as defaults.yaml has them: recipes, run folders and programs leave them out.

Where one is to change, write it again with `PYTHONPATH=src:tests python -m test_defaults` and say so in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import fedloom
from fedloom import codecs, peers, relatedness, server, stages, tasks, taskvectors, training
from fedloom.core.settings.registry import Registry
from fedloom.core.stage import Traits
from fedloom.federation.recipes import schema
from fedloom.methods import ADDONS, METHODS
from fedloom.methods.peers import config
from fedloom.methods.prototypes import maths as prototypes
from fedloom.methods.robust.attacks import ATTACKS

WRITTEN = Path(__file__).with_name("defaults.yaml")
KINDS: dict[str, Any] = {
    "methods": METHODS,
    "add-ons": ADDONS,
    "attacks": ATTACKS,
    **{
        module.__name__: module
        for module in (
            *(fedloom, codecs, config, peers, prototypes, relatedness, schema, server, stages, tasks, taskvectors),
            training,
        )
    },
}
OTHER = "no plain value"


def ranges(schema: Any) -> Any:
    """A part of a JSON Schema without titles and descriptions."""
    if isinstance(schema, dict):
        return {key: ranges(value) for key, value in schema.items() if key not in ("title", "description")}
    return [ranges(value) for value in schema] if isinstance(schema, list) else schema


def plain(value: Any) -> Any:
    """A value as YAML has it, of traits those that are set; OTHER where YAML has no such value."""
    if isinstance(value, Traits):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return {
            name: plain(one) for name, one in found.items() if one != getattr(Traits(), name) and plain(one) != OTHER
        }
    if isinstance(value, tuple | frozenset):
        items = [plain(one) for one in (value if isinstance(value, tuple) else sorted(value))]
        return OTHER if OTHER in items else items
    return value if value is None or isinstance(value, bool | int | float | str) else OTHER


def defaults(thing: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the parameters of a function or class, and of what stands in its body; of a section, ranges."""
    if inspect.isclass(thing) and issubclass(thing, BaseModel):
        yield from ranges(thing.model_json_schema()["properties"]).items()
    if inspect.isclass(thing) and issubclass(thing, BaseModel | Exception):
        return
    found = {name: p.default for name, p in inspect.signature(thing).parameters.items()}
    if inspect.isclass(thing):
        found |= {name: value for name, value in vars(thing).items() if not name.startswith("_")}
        found["traits"] = getattr(thing, "traits", OTHER)  # perhaps those of a base class
    yield from ((name, plain(value)) for name, value in found.items() if plain(value) != OTHER)


def described(kind: str) -> dict[str, Any]:
    """Name -> parameter -> default, and for what a recipe has or names the range too."""
    home = KINDS[kind]
    if isinstance(home, Registry):
        found = {name: ranges(entry.params.model_json_schema()["properties"]) for name, entry in home.entries.items()}
    else:
        public = {name: getattr(home, name) for name in dir(home) if not name.startswith("_")}
        made = {k: v for k, v in public.items() if callable(v)}
        own = {k: v for k, v in made.items() if re.match(r"fedloom\.(?!settings)", getattr(v, "__module__", ""))}
        found = {name: dict(defaults(thing)) for name, thing in own.items()}
    return {name: about for name, about in found.items() if about}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_written_down(kind: str) -> None:
    assert described(kind) == yaml.safe_load(WRITTEN.read_text("utf-8"))[kind]


if __name__ == "__main__":
    lines = []
    for kind in KINDS:
        lines.append(f"{kind}:\n")
        for name, about in described(kind).items():
            lines.append(indent(f"{name}: {yaml.safe_dump(about, default_flow_style=True, width=80)}", "  "))
    WRITTEN.write_text("".join(lines), "utf-8")
