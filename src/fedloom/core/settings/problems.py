"""Turn a pydantic error into lines a user can act on: key path, value found, what is allowed, nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fedloom.core.errors import choices, nearest

Problem = tuple[str, str]
"""(key path, message)."""

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    dict: "a mapping",
    NoneType: "null",
}
RANGES = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def found(value: Any) -> str:
    """A value as a recipe would spell it, shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_of(words: Iterable[str]) -> str:
    """'a', 'b' or 'c'."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def unknown_key(key: str, allowed: Iterable[str]) -> str:
    """The message for a key that is not in `allowed`."""
    allowed = sorted(allowed)
    return f"unknown key.{choices('Allowed', key, allowed)}"


def expected(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """What a type annotation allows, in words: 'a number greater than 0', "'sgd', 'adam' or 'adamw'"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return expected(args[0], (*metadata, *args[1:]))
    if origin in (Union, UnionType):
        return " or ".join(expected(arg) for arg in args)
    if origin is Literal:
        return one_of(map(found, args))
    if origin in (tuple, list):
        length = f" of {len(args)}" if origin is tuple and ... not in args else ""
        items = dict.fromkeys(expected(arg) for arg in args if arg is not ...)
        return f"a list{length} (each item: {' or '.join(items)})"
    if origin is dict:
        return f"a mapping (each value: {expected(args[1])})"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return str(getattr(hint, "expected", f"a mapping with {', '.join(hint.model_fields)}"))
    word = WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))
    parts = [p for entry in metadata for p in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = [
        f"{text} {getattr(part, name):g}"
        for part in parts
        for name, text in RANGES.items()
        if getattr(part, name, None) is not None
    ]
    return f"{word} {' and '.join(limits)}" if limits else word


def carry(problems: Sequence[Problem]) -> PydanticCustomError:
    """An error for a validator to raise: finished problems, their paths relative to the field it validates."""
    text = "; ".join(f"{path}: {message}" if path else message for path, message in problems)
    return PydanticCustomError("carried", "{text}", {"text": text, "problems": tuple(problems)})


def explain(error: ValidationError, model: type[BaseModel], also: Mapping[str, Any] | None = None) -> list[Problem]:
    """Everything that is wrong, one problem a key. `also` holds keys that are allowed beside the model's fields."""
    result: dict[str, str] = {}
    for one in error.errors(include_url=False):
        kind, value = one["type"], one["input"]
        path, hint, field = _walk(model, one["loc"])
        if kind == "carried":
            for inner, message in one["ctx"]["problems"]:
                result.setdefault(join(path, inner), message)
            continue
        allowed = (field.description if field else None) or expected(hint, [field] if field else [])
        if kind == "extra_forbidden":
            key = str(one["loc"][-1])
            path, message = join(path, key), unknown_key(key, [*hint.model_fields, *(also or ())])
        elif kind == "missing":
            message = f"missing, expected {allowed}"
        elif kind == "value_error":
            message = str(one["ctx"]["error"])
        elif kind == "literal_error" and isinstance(value, str):
            message = f"{found(value)} found, expected {allowed}.{nearest(value, map(str, get_args(_unwrapped(hint))))}"
            message = message.removesuffix(".")
        elif kind == "too_short":
            message = f"{found(value)} found, expected {allowed} with at least {one['ctx']['min_length']}"
        elif kind.endswith(("_type", "_parsing", "pattern_mismatch")) or kind in OUT_OF_RANGE:
            message = f"{found(value)} found, expected {allowed}"
        else:
            message = f"{found(value)} found. {one['msg']}"
        result.setdefault(path, message)
    # A union reports what is wrong for each of its members: keep what was said about the member that nearly fits.
    inside = {path for path in result if any(other.startswith((f"{path}.", f"{path}[")) for other in result)}
    return [(path, message) for path, message in result.items() if path not in inside]


def join(path: str, key: str) -> str:
    """Key path of `key` below `path`; either may be empty."""
    return f"{path}.{key}" if path and key else path or key


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[str, Any, FieldInfo | None]:
    """(key path, type, field) at pydantic's `loc`, as far as the types can be followed.

    What cannot be followed is pydantic's own: the tag of a union's member, or the unknown key itself.
    """
    path: str = ""
    hint: Any = model
    field: FieldInfo | None = None
    for part in loc:
        inner = _unwrapped(hint)
        origin, args = get_origin(inner), get_args(inner)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            hint = inner
            if part not in inner.model_fields:
                break
            field = inner.model_fields[str(part)]
            # A section may hold parameters in a field of their own (`inline`); in a recipe they are keys like others.
            if part != getattr(inner, "inline", None):
                path = join(path, str(part))
            hint = field.annotation
        elif origin in (tuple, list) and isinstance(part, int):
            fixed = origin is tuple and ... not in args
            path, hint, field = f"{path}[{part}]", args[part] if fixed else args[0], None
        elif origin is dict:
            key = str(part)
            # what would not look like a key in a path, or is too long for one, is quoted
            path = join(path, key) if re.fullmatch(r"\w[\w.+/ -]{,59}", key) else f"{path}[{found(key)}]"
            hint, field = args[1], None
        elif origin in (Union, UnionType) and (member := _member(args, str(part))):
            hint = member
        else:
            break
    return path, hint, field


def _member(members: Sequence[Any], tag: str) -> Any:
    """The member of a union that pydantic's tag, such as 'dict[str,int]', stands for, if it is a container or model."""
    for member in members:
        origin = get_origin(member)
        if origin in (dict, list, tuple) and tag.startswith(origin.__name__):
            return member
        if isinstance(member, type) and issubclass(member, BaseModel) and tag == member.__name__:
            return member
    return None


def _unwrapped(hint: Any) -> Any:
    """The type behind Annotated, and behind `| None` where one other member is left."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType):
            rest = [arg for arg in get_args(hint) if arg is not NoneType]
            if len(rest) != 1:
                return hint
            hint = rest[0]
        else:
            return hint
