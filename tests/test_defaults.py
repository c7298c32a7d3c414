"""Defaults, ranges, traits and constants stay as defaults.yaml has them: recipes and programs leave them out.

Where one is to change, write it again with `PYTHONPATH=src:tests python -m test_defaults` and say so in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from textwrap import indent
from types import FunctionType, ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError

import fedloom
from fedloom import codecs, peers, relatedness, server, stages, tasks, taskvectors, training
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import PARTS
from fedloom.federation.recipes import schema
from fedloom.methods import ADDONS, METHODS
from fedloom.methods.peers import config
from fedloom.methods.prototypes import maths as prototypes
from fedloom.methods.robust import ATTACKS
from mutants.changes import CHUNKS

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
INNER = ("core", "federation.rounds", "methods", "models.tasks", "study.relatedness", "training")
"""Folders of which the numbers and booleans are written down too that no door shows."""
FLAGS = {"repr": True, "compare": True, "init": True, "hash": None, "kw_only": False}
"""The options of a field of a dataclass, with their usual values."""


def ranges(schema: Any) -> Any:
    """Return a part of a JSON Schema without titles and descriptions."""
    if isinstance(schema, dict):
        return {key: ranges(value) for key, value in schema.items() if key not in ("title", "description")}
    return [ranges(value) for value in schema] if isinstance(schema, list) else schema


def plain(value: Any) -> Any:
    """Return a value as YAML has it, of a dataclass the fields that are not usual; OTHER if YAML has no such value."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: (plain(getattr(value, f.name)), plain(f.default)) for f in fields(value)}
        return {name: one for name, (one, usual) in found.items() if OTHER != one != usual}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items() if plain(one) != OTHER} or OTHER
    if isinstance(value, tuple | list | set | frozenset):
        items = [plain(one) for one in (value if isinstance(value, tuple | list) else sorted(value, key=repr))]
        return OTHER if OTHER in items else items
    return value if value is None or type(value) in (bool, int, float, str) else OTHER


def hints(thing: Any) -> dict[str, Any]:
    """Return name -> annotation of a function or class; none where a name in them is for type checkers alone."""
    with suppress(NameError, TypeError, AttributeError):
        return get_type_hints(thing, include_extras=True)
    return {}


def allowed(hint: Any) -> Any:
    """Return the range that an annotation states, as JSON Schema has it; nothing if it states none."""
    if not any(get_origin(part) is Annotated for part in (hint, *get_args(hint))):
        return {}
    with suppress(PydanticUserError):
        return ranges(TypeAdapter(hint).json_schema())
    return {}


def defaults(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of parameters of a function, or of a class and its methods, and of what its body holds.

    Where an annotation states a range, the value is the range with the default. A section of a recipe is its schema.
    """
    if inspect.isclass(thing) and issubclass(thing, BaseModel):
        yield from ranges(thing.model_json_schema()["properties"]).items()
    if inspect.isclass(thing) and issubclass(thing, BaseModel | Exception):
        return
    found = {name: p.default for name, p in signature(thing).items()}
    if inspect.isclass(thing):
        body = {name: getattr(value, "__func__", value) for name, value in vars(thing).items()}
        found |= {name: value for name, value in body.items() if not name.startswith("_")}
        found["traits"] = getattr(thing, "traits", OTHER)  # perhaps those of a base class
        for name, part in body.items():
            if isinstance(part, FunctionType) and not name.startswith("__"):
                found |= {f"{name}.{key}": p.default for key, p in signature(part).items()}
        own = vars(thing).get("__dataclass_fields__", {})
        found |= {f"{name}.options": changed for name, one in own.items() if (changed := options(one))}
    stated = {name: limits for name, hint in hints(thing).items() if (limits := allowed(hint))}
    for name in (*found, *(stated.keys() - found)):
        value = plain(found.get(name, OTHER))
        if name in stated:
            yield name, stated[name] | ({} if value == OTHER else {"default": value})
        elif value != OTHER:
            yield name, value


def signature(thing: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class; none of what Python cannot tell them."""
    with suppress(ValueError):
        return inspect.signature(thing).parameters
    return {}


def options(field: Field[Any]) -> dict[str, Any]:
    """Return the options of a field that are not usual."""
    return {name: value for name, usual in FLAGS.items() if (value := getattr(field, name)) not in (usual, MISSING)}


EVERY = [*KINDS, *(f"inside {folder}" for folder in INNER)]


def described(kind: str) -> dict[str, Any]:
    """Return name -> parameter -> default, and for what a recipe has or names the range too."""
    if kind not in KINDS:
        return inner(kind.partition(" ")[2])
    home = KINDS[kind]
    if isinstance(home, Registry):
        found = {name: ranges(entry.params.model_json_schema()["properties"]) for name, entry in home.entries.items()}
    else:
        public = {name: getattr(home, name) for name in dir(home) if not name.startswith("_")}
        made = {k: v for k, v in public.items() if callable(v)}
        own = {k: v for k, v in made.items() if re.match(r"fedloom\.(?!settings)", getattr(v, "__module__", ""))}
        found = {name: dict(defaults(thing)) for name, thing in own.items()}
    return {name: about for name, about in found.items() if about}


@cache
def shown() -> set[int]:
    """Return the ids of functions and classes of the kinds above, and of those that declare parameters for them."""
    doors = [getattr(home, name) for home in KINDS.values() if isinstance(home, ModuleType) for name in dir(home)]
    named = [entry.thing for home in KINDS.values() if isinstance(home, Registry) for entry in home.entries.values()]
    return {*map(id, doors), *map(id, named), *(id(declared) for _, declared in PARTS.values())}


def inner(folder: str) -> dict[str, Any]:
    """Return module.name -> numbers and booleans, of the constants, functions and classes that no door shows."""
    home = importlib.import_module(f"fedloom.{folder}")
    names = [
        home.__name__,
        *(found.name for found in pkgutil.walk_packages(getattr(home, "__path__", ()), f"{home.__name__}.")),
    ]
    found: dict[str, Any] = {}
    for module in [importlib.import_module(name) for name in names if "settings" not in name]:
        for name, thing in list(vars(module).items()):  # a door may load more meanwhile
            about: Any = {}
            if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__:
                public = id(thing) in shown()
                about = {key: x for key, x in defaults(thing) if not (public and "." not in key) and counts(x)}
            elif re.fullmatch("_?[A-Z][A-Z0-9_]*", name) and not name.endswith((*CHUNKS, "TYPE_CHECKING")):
                about = plain(thing) if counts(plain(thing)) else {}
            if about:
                found[f"{module.__name__}.{name}".removeprefix(f"{home.__name__}.")] = about
    return found


def counts(value: Any) -> bool:
    """Return whether there is a number or boolean in a plain value."""
    if isinstance(value, Mapping | list):
        return any(map(counts, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, bool | int | float)


@pytest.fixture(scope="module")
def written() -> Any:
    return yaml.safe_load(WRITTEN.read_text("utf-8"))


@pytest.mark.parametrize("kind", EVERY)
def test_they_are_those_written_down(kind: str, written: Any) -> None:
    assert described(kind) == written[kind]


if __name__ == "__main__":
    lines = []
    for kind in EVERY:
        lines.append(f"{kind}:\n")
        for name, about in described(kind).items():
            text = yaml.safe_dump(about, default_flow_style=True, width=80).removesuffix("...\n")
            lines.append(indent(f"{name}: {text}", "  "))
    WRITTEN.write_text("".join(lines), "utf-8")
