"""YAML as it is written in recipes and other settings files."""

from __future__ import annotations

import re
from typing import Any

import yaml

from fedloom.errors import RecipeError


def to_yaml(value: Any) -> str:
    """Plain values as YAML; `parse` reads equal values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


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
    # A date in a recipe stays text.
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


# PyYAML follows YAML 1.1, where 1e-3 is text. The dumper must know as well, or it would not quote such text.
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
