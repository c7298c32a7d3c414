"""YAML as it is written in recipes and other settings files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from fedloom.core.errors import CONTROL, RecipeError, UserError, parsing
from fedloom.core.settings.section import M, explain, strict

LONGEST = 100
"""Digits of a whole number."""
MOST, DEEPEST = 100_000, 100
"""Values of a document, and how deep they may be nested."""
LARGEST = 10_000_000
"""Characters of a document: libyaml needs minutes, and ten times the memory, for a text of 300 MB."""


def read_section(model: type[M], file: Path, kind: type[UserError] = RecipeError) -> M:
    """Return the section that a file holds. Raises `kind`, with the key, where its values do not fit."""
    with parsing(f"{file} cannot be read"):
        value = parse(file.read_text("utf-8"), str(file))
    return section_of(model, value, str(file), kind)


def section_of(model: type[M], value: Any, where: str, kind: type[UserError] = RecipeError) -> M:
    """Return plain values as a section. Raises `kind`, with `where` and the key, where they do not fit."""
    try:
        return strict(model, value)
    except ValidationError as error:
        path, message = explain(error, model)[0]
        raise kind(f"{where}{path and ', '}{path}: {message}") from None


def checked(model: type[M], value: Any, head: str, kind: type[UserError] = RecipeError, between: str = "\n") -> M:
    """Return plain values as a section. Raises `kind` with `head` and all problems, parted by `between`."""
    try:
        return strict(model, value)
    except ValidationError as error:
        lines = [f"{path}: {message}" if path else message for path, message in explain(error, model)]
        raise kind(f"{head}{between.join(lines)}") from None


def to_yaml(value: Any) -> str:
    """Return plain values as YAML; `parse` reads equal values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse(text: str, where: str) -> Any:
    """Convert YAML to plain values, as in YAML 1.2: 010 is ten, off is text, 1e-3 is a number.

    Refused are keys that occur twice, control characters, more than `LARGEST` characters, and more than `MOST` values
    or levels than `DEEPEST` with aliases written out.
    """
    if len(text) > LARGEST:
        raise RecipeError(f"{where}: {len(text):,} characters found, expected at most {LARGEST:,}")
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        tab = "; a tab stands there: indent by spaces" if mark and text[mark.index : mark.index + 1] == "\t" else ""
        raise RecipeError(f"{where}{place}: {error.problem}{tab}") from None
    except (yaml.YAMLError, ValueError, LookupError, OverflowError) as error:
        raise RecipeError(f"{where}: {error}") from None


def _check_depth(text: str) -> None:
    """Raise MarkedYAMLError for what is too deep as it is written: libyaml's own recursion would end the process."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} deep", problem_mark=event.start_mark)


def _measure(root: yaml.Node) -> None:
    """Raise MarkedYAMLError for what is too large or too deep, or contains itself."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int, above: frozenset[int]) -> int:
        if id(node) in above or depth > DEEPEST:
            what = "contains itself" if id(node) in above else f"nested more than {DEEPEST} deep"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if id(node) not in sizes:
            if isinstance(node, yaml.ScalarNode) and CONTROL.search(node.value):  # quoted: "\e[2J"
                raise yaml.MarkedYAMLError(problem="a control character found", problem_mark=node.start_mark)
            each: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
            if isinstance(node, yaml.MappingNode):
                each = [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(size(part, depth + 1, above | {id(node)}) for part in each)
            if sizes[id(node)] > MOST:
                raise yaml.MarkedYAMLError(problem=f"more than {MOST} values", problem_mark=node.start_mark)
        return sizes[id(node)]

    size(root, 0, frozenset())


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # libyaml is ten times as fast
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}
    # no dates, bytes, sets or objects
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or str(tag).rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if len(text) > LONGEST:
            raise yaml.MarkedYAMLError(problem=f"a number of {len(text)} digits", problem_mark=node.start_mark)
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = self.construct_scalar(node).lower()
        return float(text.replace(".", "") if text.endswith(("inf", "nan")) else text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen, pairs = set(), node.value if isinstance(node, yaml.MappingNode) else ()
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            # keys become texts: 01 would be 1, and two sites one
            read = key.value if key.tag.endswith((":str", ":merge")) else json.dumps(self.construct_object(key))
            if read != key.value:
                problem = f"the key {key.value} found, which is read as {read}: put it in quotation marks"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


# PyYAML follows YAML 1.1, where 010 is 8, 1:30 is 90, off is false and 1e-3 is text. This is the core schema of YAML
# 1.2: what looks like a number is that number, only true and false are booleans, and a date is text. The dumper must
# know as well, or it would not quote such text.
_CORE = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
    "merge": (r"^(?:<<)$", ["<"]),
}
for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _first) in _CORE.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
