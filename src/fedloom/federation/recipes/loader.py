"""Read recipes (packaged, from a file, from a mapping), change them by `key.path=value`, and write them down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from fedloom.core.errors import RecipeError, listed, nearest
from fedloom.core.settings.problems import explain, found
from fedloom.core.settings.section import Section, strict
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import parse, to_yaml
from fedloom.federation.recipes.schema import Named, Recipe

HOME = files("fedloom.federation.recipes") / "packaged"
"""Where the packaged recipes are."""
EDITORS = "# yaml-language-server: $schema="
"""How a recipe begins that tells editors its schema."""


def load(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    origin: Origin | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return a checked recipe from a packaged name, a YAML file or a mapping, with `key.path=value` overrides applied.

    `origin` says whom names of code in it come from, overrides included; `recorded` is for `trust.admit`. Without an
    origin a file's names are the file's, and all others, the overrides' too, were typed. Nothing is imported that
    `core/settings/trust.py` does not allow. All problems are reported in one RecipeError, one line each.
    """
    where, value = read(source)
    if origin is None:
        admit(names_typed(overrides), Origin.TYPED, where)
        origin = origin_of(source, HOME)
    value = changed(where, value, overrides)
    admit(names_in(value), origin, where, recorded)
    return resolved(where, value, overrides)


def changed(where: str, value: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's plain content with overrides applied in place; nothing in it is checked or imported.

    `where` names it in messages. Raises RecipeError for content that is no mapping, and for overrides of no such form.
    """
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {', '.join(Recipe.model_fields)}")
    for override in overrides:
        _apply(value, override)
    return value


def resolved(where: str, value: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Return the checked recipe of plain content, to which these overrides were applied; imports what it names.

    Raises RecipeError with all problems.
    """
    try:
        return strict(Recipe, value)
    except ValidationError as error:
        lines = [f"{path}: {message}" for path, message in explain(error, Recipe)]
        hints = [*_hints(lines, overrides), *_misplaced(value, overrides)]
        raise RecipeError("\n".join([f"{where} is not a valid recipe:", *lines, *hints])) from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; `load` reads it back to an equal recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(packaged(HOME))


def summary(name: str, home: Traversable | None = None) -> str:
    """The first comment line for people of a packaged recipe, or of another packaged YAML file below `home`."""
    lines = packaged(home or HOME)[name].read_text("utf-8").splitlines()
    first = next(line for line in lines if not line.startswith(EDITORS))
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def read(
    source: str | Path | Mapping[str, Any], kind: str = "recipe", home: Traversable | None = None
) -> tuple[str, Any]:
    """(what to call the source in messages, its plain content, not checked).

    `source` is the name of a YAML file packaged below `home` (the recipes' by default), a file or a mapping; `kind` is
    the word for it in messages. Raises RecipeError where the source is not found or is not YAML.
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
        f"no {kind} {str(source)!r}: neither a file nor a packaged {kind}.{hint} "
        f"{listed('Packaged', str(source), sorted(known))}"
    )


def origin_of(source: str | Path | Mapping[str, Any], home: Traversable) -> Origin:
    """Return where names of code in what `read` reads come from: a file, or who typed or packaged it."""
    is_file = isinstance(source, Path) or (isinstance(source, str) and source not in packaged(home))
    return Origin.FILE if is_file else Origin.TYPED


def names_typed(overrides: Sequence[str]) -> list[str]:
    """Return the names of code in `key.path=value` texts."""
    value: dict[str, Any] = {}
    for override in overrides:
        _apply(value, override)
    return list(names_in(value))


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
    imported = [i for i, key in enumerate(keys) if ":" in key]
    if keys[:2] == ["method", "add"] and imported:  # the dots of package.module:name are no steps
        keys[2 : imported[0] + 1] = [".".join(keys[2 : imported[0] + 1])]
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
    return any(issubclass(kind, Named) for kind in _kinds(key))


def _kinds(key: str) -> list[type[Section]]:
    """The classes of the section under a recipe's key; none where it is no section."""
    field = Recipe.model_fields.get(key)
    kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


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


def _misplaced(value: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """A key without its section is not guessed, for several may have one of that name."""
    for override in overrides:
        key, _, text = override.partition("=")
        places = [] if key in Recipe.model_fields else [s for s in Recipe.model_fields if key in _keys(s, value.get(s))]
        if places:
            yield f"(write {' or '.join(f'{place}.{key}={text}' for place in places)})"


def _keys(section: str, value: Any) -> set[str]:
    """The keys of a recipe's section, with the parameters of what it names."""
    keys: set[str] = set()
    for kind in _kinds(section):
        keys |= (kind.common() if issubclass(kind, Named) else kind.model_fields).keys()
        name = value.get("name") if isinstance(value, Mapping) else value
        if issubclass(kind, Named) and isinstance(name, str) and name in kind.registry().entries:
            keys |= kind.registry()[name].params.model_fields.keys()
    return keys
