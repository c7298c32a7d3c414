"""Read recipes (packaged, from a file, from a mapping), change them by `key.path=value`, and write them down.

Also the catalogue of the packaged recipes, with the files they need and their minutes. Free of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fedloom.core.errors import TABLES, RecipeError, ending, listed, nearest
from fedloom.core.settings import renamed
from fedloom.core.settings.registry import Registered
from fedloom.core.settings.section import Section, explain, found, strict
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import parse, to_yaml
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

HOME = files("fedloom.federation.recipes") / "packaged"
"""Where the packaged recipes are."""
EDITORS = "# yaml-language-server: $schema="
"""The first line of a recipe, which names its schema for editors."""
SEVERAL = ("benchmarks", "experiments")
"""Sections of a packaged file that has several: label -> changes of what stands outside of these sections."""
LONGEST = 20
"""The longest chain of sources that are like each other."""
_SECTION = re.compile(rf"^({'|'.join(SEVERAL)}):.*\n((?:(?:[ #].*)?\n)*)", re.MULTILINE)
_LABEL = re.compile(r"((?:^  #.*\n)*)^  ([\w-]+):", re.MULTILINE)


class Packaged(NamedTuple):
    """A packaged recipe or grid: all of a file, or one of several in it."""

    text: str
    labels: tuple[str, ...]
    """Its benchmark, or its benchmark and its experiment, in a file that has several."""
    comment: str
    """The file's comment on it: its first lines, or those above its labels."""


class Content(NamedTuple):
    """The plain content of a recipe or a grid, not checked."""

    where: str
    """The name of the source in messages."""
    value: Any
    origin: Origin
    """Where names of code in it come from."""
    benchmarks: tuple[str, ...] = ()
    """The benchmarks among which its reader may choose."""


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
    where, value, its_origin, _ = read(source, follow=origin is None)
    if origin is None:
        admit(names_typed(overrides), Origin.TYPED, where)
        origin = its_origin
    value = changed(where, value, overrides)
    admit(names_in(value), origin, where, recorded)
    return resolved(where, value, overrides)


def changed(where: str, value: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's plain content with overrides applied, not checked. Raises RecipeError for other forms."""
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {', '.join(Recipe.model_fields)}")
    if not isinstance(overrides, list | tuple) or not all(isinstance(override, str) for override in overrides):
        raise RecipeError(f"overrides={overrides!r} found, expected a list of texts, such as ['training.rounds=20']")
    for override in overrides:
        _apply(value, override)
    return value


def texts(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as KEY=VALUE, which one code path applies: JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def resolved(where: str, value: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Return the checked recipe of plain content; imports what it names. Raises RecipeError with all problems."""
    try:
        return strict(Recipe, value)
    except ValidationError as error:
        lines = [f"{path}: {message}" for path, message in explain(error, Recipe)]
        hints = [*_hints(lines, overrides), *_misplaced(value, overrides)]
        raise RecipeError("\n".join([f"{where} is not a valid recipe:", *lines, *hints])) from None


def dump(recipe: Recipe) -> str:
    """Return the recipe as YAML with every default written out; `load` reads it back to an equal recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(packaged(HOME))


def summary(name: str, home: Traversable | None = None) -> str:
    """Return the first comment line for people of a packaged recipe, or of another packaged YAML file below `home`."""
    return packaged(home or HOME)[name].comment.partition("\n")[0]


def read(
    source: str | Path | Mapping[str, Any],
    kind: str = "recipe",
    home: Traversable | None = None,
    benchmark: str | None = None,
    follow: bool = True,
    above: tuple[str, ...] = (),
) -> Content:
    """Return the plain content of a source (a name of a YAML file below `home`, a file or a mapping) and of its `like`.

    `kind` is the word for it in messages; `benchmark` chooses one of its benchmarks; without `follow` it is like
    nothing; `above` are the sources that are like it. RecipeError where one is not found, no YAML, or like itself.
    """
    home = home or HOME
    known, origin, labels = packaged(home), Origin.TYPED, tuple[str, ...]()
    source = renamed.source(source, known) if isinstance(source, str) else source
    is_packaged = isinstance(source, str) and source in known
    if isinstance(source, Mapping):
        where, value = "the mapping", deepcopy(dict(source))
    elif is_packaged:
        where, labels = str(source), known[str(source)].labels
        value = deepcopy(_parsed(known[where].text))
    else:
        where, value, origin = str(source), _in_file(Path(source), kind, known if follow else {}), Origin.FILE
    if kind == "grid" and isinstance(value, dict):
        value = renamed.grid(value)
    if not isinstance(value, dict) or not follow:
        return Content(where, value, origin)
    sections = [_labelled(where, key, value) for key in SEVERAL if is_packaged or (kind, key) == ("grid", "benchmarks")]
    benchmarks = tuple(sections[0]) if sections else ()
    labels = labels or ((benchmark,) if benchmark in benchmarks else ())
    layers = [value, *(section[label] for section, label in zip(sections, labels, strict=False))]
    if len(labels) == 2:  # what the benchmark has otherwise in this experiment
        layers.append(layers[1].pop("experiments", {}).get(labels[1], {}))
    if labels:
        layers.append({"name": "-".join((value["name"], *labels)) if "name" in value else where.replace("/", "-")})
    result: dict[str, Any] = {}
    for layer in layers:
        if "like" in layer:
            below = _liked(layer.pop("like"), where, origin, kind, home, (*above, where))
            if origin is Origin.TYPED and below.origin is Origin.FILE:
                admit(names_in(_changed({}, layer, where)), Origin.TYPED, where)
                origin = Origin.FILE
            result = below.value
        elif layer is value:
            result = value
            continue
        _changed(result, layer, where)
    return Content(where, result, origin, benchmarks)


def _labelled(where: str, key: str, value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Take a section with several out of the content that has it."""
    section = value.pop(key, None) or {}
    if not isinstance(section, dict) or not all(isinstance(changes, dict) for changes in section.values()):
        raise RecipeError(f"{where}, {key}: {found(section)} found, expected a mapping of labels to their changes")
    return section


def _liked(like: Any, where: str, origin: Origin, kind: str, home: Traversable, above: tuple[str, ...]) -> Content:
    """Read what `where` is like: a packaged one, or a file; what a file names must be in its folder or below it."""
    known = packaged(home)
    source: str | Path = renamed.source(str(like), known)
    if source not in known and where not in known:
        folder = Path(where).parent if origin is Origin.FILE else Path()
        with suppress(OSError, ValueError):  # of names that no file can have
            path = (folder / source).resolve()
            if origin is Origin.FILE and not path.is_relative_to(folder.resolve()):
                raise RecipeError(f"{where}, like: {like!r} found, expected a file in {folder} or below it")
            source = path if path.is_file() else source
    if str(source) in above or len(above) > LONGEST:
        raise RecipeError(f"{where}, like: {' -> '.join((*above, str(source)))} is circular, or too long a chain")
    if isinstance(source, str) and source not in known:
        raise RecipeError(f"{where}, like: {like!r} is neither a file nor a packaged {kind}.{nearest(source, known)}")
    return read(source, kind, home, above=above)


def _changed(value: dict[str, Any], changes: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Set dotted keys in place, as on the command line."""
    for key, thing in changes.items():
        _set(value, str(key), thing, f"{where}, {key}")
    return value


@cache
def _parsed(text: str) -> Any:
    return parse(text, "a packaged file")


def _in_file(path: Path, kind: str, known: Mapping[str, Any]) -> Any:
    """Return the plain content of a file. Raises RecipeError where it is not there or is not YAML."""
    if path.is_file():
        if ending(path) in TABLES:
            advice = f"make a recipe of it with `fedloom init {path} --labels ...`"
            raise RecipeError(f"{path} is a table, and no {kind}: {advice}")
        try:
            return parse(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: {error}") from None
    beside = map(str, path.parent.glob("*.y*ml")) if path.parent.is_dir() else ()
    hint = nearest(str(path), [*beside, *known])
    if path.is_dir():
        inside = next((path / f"{name}.yaml" for name in (kind, "recipe") if (path / f"{name}.yaml").is_file()), None)
        hint = f" It is a folder{f', with {inside}' if inside else f' without {kind}.yaml'}."
    if not known:  # of a kind without packaged ones
        raise RecipeError(f"{path}: not found, expected a YAML file.{hint}")
    raise RecipeError(
        f"no {kind} {str(path)!r}: neither a file nor a packaged {kind}.{hint} "
        f"{listed('Packaged', str(path), sorted(known))}"
    )


def names_typed(overrides: Sequence[str]) -> list[str]:
    """Return the names of code in `key.path=value` texts."""
    return list(names_in(changed("the changes", {}, overrides)))


def packaged(home: Traversable) -> Mapping[str, Packaged]:
    """Return the recipes or grids in YAML files below `home`, by name; of files in folders it begins with FOLDER/.

    A file FILE.yaml with benchmarks has FILE-BENCHMARK too, or, without a name of its own, FILE/BENCHMARK and no FILE.
    With experiments each benchmark has each of these, BENCHMARK-EXPERIMENT.
    """

    def below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Packaged]]:
        for item in folder.iterdir():
            if item.is_dir():
                yield from below(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".yaml"):
                yield from _packaged(prefix + item.name.removesuffix(".yaml"), item.read_text("utf-8"))

    if str(home) not in _FOUND:
        _FOUND[str(home)] = dict(below(home, ""))
    return _FOUND[str(home)]


_FOUND: dict[str, dict[str, Packaged]] = {}  # folder -> what `packaged` found


def _packaged(file: str, text: str) -> Iterator[tuple[str, Packaged]]:
    """Yield what a file has. Its text is looked through, for parsing all files takes half a second."""
    named = re.search(r"^name:", text, re.MULTILINE)
    if named:
        lines = [line for line in text[: text.index("\n", named.start())].splitlines() if not line.startswith(EDITORS)]
        yield file, Packaged(text, (), _comment(lines))
    sections = [[label.groups() for label in _LABEL.finditer(match[2])] for match in _SECTION.finditer(text)]
    for chosen in product(*sections) if sections else ():
        labels = tuple(label for _, label in chosen)
        about = ": ".join(_comment(lines.splitlines()) for lines, _ in chosen)
        yield f"{file}{'-' if named else '/'}{'-'.join(labels)}", Packaged(text, labels, about)


def _comment(lines: Sequence[str]) -> str:
    return "\n".join(line.strip().removeprefix("# ") for line in lines if line.strip().startswith("#"))


def _apply(value: dict[str, Any], override: str) -> None:
    """Set one key path in place, creating the mappings on the way."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise RecipeError(f"{override!r}: expected key.path=value, for example training.rounds=20")
    _set(value, path.strip(), parse(text, f"override {override!r}"), repr(override))


def _set(value: dict[str, Any], path: str, thing: Any, what: str) -> None:
    """Set a value at a dotted path in place; `what` is the change in messages."""
    keys = path.split(".")
    imported = [i for i, key in enumerate(keys) if ":" in key]
    if keys[:2] == ["method", "add"] and imported:  # the dots of package.module:name are no steps
        keys[2 : imported[0] + 1] = [".".join(keys[2 : imported[0] + 1])]
    level, is_named = value, any(issubclass(kind, Named) for kind in _kinds(Recipe.model_fields.get(keys[0])))
    for depth, key in enumerate(keys[:-1]):
        inner = level.get(key)
        if isinstance(inner, str) and depth == 0 and is_named:
            inner = {"name": inner}
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise RecipeError(f"{what}: {'.'.join(keys[: depth + 1])} is {found(inner)}, not a section")
        level[key] = inner
        level = inner
    level[keys[-1]] = thing


def _kinds(field: FieldInfo | None) -> list[type[Section]]:
    """Return the classes of the section in a field; none where it is no section."""
    kinds = () if field is None else get_args(field.annotation) or (field.annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _hints(lines: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Yield hints for changed names: the section keeps its other keys, which the new function may not know."""
    unknown = [line for line in lines if ": unknown key" in line]
    for path, _, text in (override.partition("=") for override in overrides):
        section = path.strip().removesuffix(".name")
        if section != path.strip() and any(line.startswith(f"{section}.") for line in unknown):
            yield f"({path.strip()}={text} keeps the other keys; {section}={text} replaces the whole section)"


def _misplaced(value: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[str]:
    """Yield the places of keys without a section, which are not guessed: several sections may have such a key."""
    fields = Recipe.model_fields
    for key in (key for key in value if key not in fields):
        places = [name for name, field in fields.items() if key in _keys(field, value.get(name))]
        places = places or [
            f"{name}.{inner}"
            for name, field in fields.items()
            for inner, section in _keys(field, None).items()
            if key in _keys(section, None)
        ]
        given = [override for override in overrides if re.split(r"[.=]", override, maxsplit=1)[0] == key] or [key]
        if places:
            yield f"(write {' or '.join(f'{place}.{each}' for place in places for each in given)})"


def _keys(field: FieldInfo, value: Any) -> dict[str, FieldInfo]:
    """Return the keys of the section in a field, with the parameters of what it names."""
    keys: dict[str, FieldInfo] = {}
    for kind in _kinds(field):
        keys |= kind.common() if issubclass(kind, Named) else kind.model_fields
        name = value.get("name") if isinstance(value, Mapping) else value
        if issubclass(kind, Named) and isinstance(name, str) and name in kind.registry().registered:
            keys |= kind.registry()[name].params.model_fields
    return keys


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
    """Return all packaged recipes in the order of their names."""
    entries = []
    for name, its in sorted(packaged(HOME).items()):
        recipe = load(name).model_dump(mode="json")
        measured = _MINUTES.search(its.comment)
        needs = tuple(key for section in ("data", "model") for key in _files(section, recipe[section]))
        entries.append(Entry(name, summary(name), needs, float(measured[1]) if measured else None))
    return entries


def _files(path: str, section: Mapping[str, Any]) -> Iterator[str]:
    if section.get("root"):  # what else is named is below it
        yield f"{path}.root"
        return
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _files(f"{path}.{key}", value)
        elif key in _FILES and value:
            yield f"{path}.{key}"


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
    own = "In a packaged file with several recipes: the changes of each of its {}."
    shape["properties"] |= {key: {"type": "object", "description": own.format(key)} for key in SEVERAL}
    like = "A packaged recipe, or a file in this folder or below it: it sets every key that is not set here."
    shape["properties"]["like"] = {"type": "string", "description": like}
    shape["patternProperties"] = {r"\.": {"description": "A key in a section of the recipe that `like` names."}}
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
