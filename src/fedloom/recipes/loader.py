"""Read recipes (packaged, from a file, from a mapping), change them by `key.path=value`, and write them down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fedloom.errors import RecipeError, nearest
from fedloom.recipes.problems import explain, found
from fedloom.recipes.schema import Named, Recipe, strict

HOME = files("fedloom.recipes") / "packaged"
"""Where the packaged recipes are."""


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A checked recipe from a packaged name, a YAML file or a mapping, with `key.path=value` overrides applied.

    All problems are reported in one RecipeError, one line each.
    """
    where, value = read(source)
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {', '.join(Recipe.model_fields)}")
    for override in overrides:
        _apply(value, override)
    try:
        return strict(Recipe, value)
    except ValidationError as error:
        lines = [f"{path}: {message}" for path, message in explain(error, Recipe)]
        raise RecipeError("\n".join([f"{where} is not a valid recipe:", *lines, *_hints(lines, overrides)])) from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; `load` reads it back to an equal recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def to_yaml(value: Any) -> str:
    """Plain values as YAML that `parse` reads back to equal ones."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(packaged(HOME))


def summary(name: str, home: Traversable | None = None) -> str:
    """The first comment line of a packaged recipe, or of another packaged YAML file below `home`."""
    first = packaged(home or HOME)[name].read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def parse(text: str, where: str) -> Any:
    """YAML to plain values. Keys that occur twice are errors; 1e-3 is a number, as in YAML 1.2."""
    try:
        # A subclass of SafeLoader: nothing but plain values is ever built.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"{where}{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: {error}") from None


class _Loader(yaml.SafeLoader):
    # A date in a recipe is a text.
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


# PyYAML follows YAML 1.1, where 1e-3 is a text. The dumper must know too, or it would not quote such texts.
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read(
    source: str | Path | Mapping[str, Any], kind: str = "recipe", home: Traversable | None = None
) -> tuple[str, Any]:
    """(what to call the source in messages, its plain content, not checked).

    `source` is the name of a YAML file packaged below `home` (the recipes' by default), a file or a mapping; `kind` is
    the word for it in messages. Raises RecipeError where there is none or it is no YAML.
    """
    if isinstance(source, Mapping):
        return "the mapping", deepcopy(dict(source))
    known = packaged(home or HOME)
    if isinstance(source, str) and source in known:
        return source, parse(known[source].read_text("utf-8"), source)
    path = Path(source)
    if path.is_file():
        try:
            return str(path), parse(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: {error}") from None
    hint = nearest(str(source), known)
    if path.is_dir():
        hint = f" It is a folder; a {'run' if kind == 'recipe' else kind} folder's {kind} is {path / kind}.yaml."
    raise RecipeError(
        f"no {kind} {str(source)!r}: neither a file nor a packaged {kind}.{hint} Packaged: {', '.join(sorted(known))}"
    )


def packaged(home: Traversable) -> dict[str, Traversable]:
    """The YAML files below `home`; those in folders are called FOLDER/NAME."""

    def below(folder: Traversable, prefix: str) -> dict[str, Traversable]:
        result: dict[str, Traversable] = {}
        for item in folder.iterdir():
            if item.is_dir():
                result |= below(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".yaml"):
                result[prefix + item.name.removesuffix(".yaml")] = item
        return result

    return below(home, "")


def _apply(value: dict[str, Any], override: str) -> None:
    """Set one key path in place, creating the mappings on the way."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"{override!r}: expected key.path=value, for example training.rounds=20")
    level = value
    for depth, key in enumerate(keys[:-1]):
        inner = level.get(key)
        if isinstance(inner, str) and depth == 0 and _is_named(key):
            inner = {"name": inner}
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise RecipeError(f"{override!r}: {'.'.join(keys[: depth + 1])} is {found(inner)}, not a section")
        level[key] = inner
        level = inner
    level[keys[-1]] = parse(text, f"override {override!r}")


def _is_named(key: str) -> bool:
    field = Recipe.model_fields.get(key)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Named)


def _hints(lines: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """A changed name keeps the section's other keys, which the new function may not know."""
    hints = []
    for override in overrides:
        path, _, text = override.partition("=")
        section = path.strip().removesuffix(".name")
        if section != path.strip() and any(
            line.startswith(f"{section}.") and ": unknown key" in line for line in lines
        ):
            hints.append(f"({path.strip()}={text} keeps the other keys; {section}={text} replaces the whole section)")
    return hints
