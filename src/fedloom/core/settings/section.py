"""Recipe sections: their base class, parameters declared once, error messages about values, client names, key paths.

A parameter of a stage or rule is a field of a frozen dataclass: its annotation says what is allowed, `Checked` refuses
the rest, and a registered function that takes the stage or rule has the parameter as a key. Free of torch.
"""

from __future__ import annotations

import json
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from hashlib import sha256
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, cast, dataclass_transform, get_args, get_origin
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from fedloom.core.errors import choices, nearest

Problem = tuple[str, str]
"""(key path, message)."""
Problems = Iterator[str | Problem]
"""Messages about a section as a whole, or about keys of it."""

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
    """Return a value as a recipe would spell it, shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_plain(value: Any) -> Any:
    """Return a number or an array of NumPy's, also in a mapping, as Python's; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: as_plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def one_of(words: Iterable[str]) -> str:
    """Return "'a', 'b' or 'c'"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def expected(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Return in words what a type annotation allows: 'a number greater than 0', "'sgd', 'adam' or 'adamw'"."""
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
        return "a mapping" if args[1] is Any else f"a mapping (each value: {expected(args[1])})"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return str(getattr(hint, "expected", f"a mapping with {', '.join(hint.model_fields)}"))
    word = WORDS.get(origin or hint, getattr(hint, "__name__", str(hint)))
    parts = [p for entry in metadata for p in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = [
        f"{text} {bound if isinstance(bound := getattr(part, name), int) else format(bound, 'g')}"
        for part in parts
        for name, text in RANGES.items()
        if getattr(part, name, None) is not None
    ]
    return f"{word} {' and '.join(limits)}" if limits else word


def carry(problems: Sequence[Problem]) -> PydanticCustomError:
    """Return an error for a validator to raise: finished problems, their paths relative to the validated field."""
    text = "; ".join(f"{path}: {message}" if path else message for path, message in problems)
    return PydanticCustomError("carried", "{text}", {"text": text, "problems": tuple(problems)})


def explain(error: ValidationError, model: type[BaseModel], also: Mapping[str, Any] | None = None) -> list[Problem]:
    """Return the problems, one per key. `also` holds keys that are allowed beside the model's fields."""
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
            key, known = str(one["loc"][-1]), sorted([*hint.model_fields, *(also or ())])
            path, message = join(path, key), f"unknown key.{choices('Allowed', key, known)}"
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
    """Return the key path of `key` below `path`; either may be empty."""
    return f"{path}.{key}" if path and key else path or key


def _walk(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[str, Any, FieldInfo | None]:
    """Return (key path, type, field) at pydantic's `loc`, without what is pydantic's own, such as a union's tag."""
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
    """Return the container or model in a union that pydantic's tag, such as 'dict[str,int]', stands for."""
    for member in members:
        origin = get_origin(member)
        if origin in (dict, list, tuple) and tag.startswith(origin.__name__):
            return member
        model = isinstance(member, type) and issubclass(member, BaseModel)
        if model and re.fullmatch(rf"(function-after\[.*, )?{member.__name__}\]?", tag):  # with a validator, or without
            return member
    return None


def _unwrapped(hint: Any) -> Any:
    """Return the type behind Annotated, and behind `| None` if one other member is left."""
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


Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
FIXED = {"fixed": True}
"""The mark of a number of a method that says how much a client trains, or on what: tuning leaves it alone."""
FixedCount = Annotated[int, Field(ge=1, json_schema_extra={**FIXED})]
FixedNatural = Annotated[int, Field(ge=0, json_schema_extra={**FIXED})]


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def _problems(self) -> Problems:
        """Yield what does not fit together."""
        yield from ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if problems := [("", each) if isinstance(each, str) else each for each in self._problems()]:
            raise carry(problems)
        return self


M = TypeVar("M", bound=BaseModel)


def strict(model: type[M], value: Any) -> M:
    """Validate as JSON: '10' or true is no integer and 1 is a number, but a list may stand for a tuple."""
    return model.model_validate_json(json.dumps(value, default=repr), strict=True)


T = TypeVar("T")
PARTS: dict[str, tuple[str, type]] = {}
"""Name of a class -> (module:Class, the class that declares its parameters)."""


@dataclass_transform(frozen_default=True)
def parameters(*paths: str) -> Callable[[type[T]], type[T]]:
    """Declare the parameters of a stage or rule apart from it, so that they are known without torch.

    `paths` are module:Class of what inherits the fields, which are keys of registered functions that take it.
    """

    def declare(cls: type[T]) -> type[T]:
        names = [path.partition(":")[2] for path in paths]
        PARTS.update({name: (path, cls) for name, path in zip(names, paths, strict=True)})
        cls.__doc__ = cls.__doc__ or f"Parameters of {', '.join(names)}."
        return dataclass(frozen=True, init=False, repr=False, eq=False)(cls)

    return declare


class Checked:
    """A dataclass that refuses values which its annotations do not allow. Its text identifies it in a method."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range, and for a parameter that the text would not show."""
        hidden = [field.name for field in _fields(type(self)) if field.init and not field.repr]
        if hidden:
            raise ValueError(
                f"{type(self).__name__}: {hidden[0]}: field(repr=False) found, expected a field that its text shows, "
                "by which a resumed run knows its method; leave repr out"
            )
        for name, hint in hints_of(cast(Any, type(self))).items():
            if _refused(value := getattr(self, name), hint):
                raise ValueError(f"{type(self).__name__}: {name}: {found(value)} found, expected {expected(hint)}")

    def __repr__(self) -> str:
        """Return the class with its attributes, as of a dataclass; Python's own text would be another in each run."""
        cls = type(self)
        own = [f"{k}={v!r}" for k, v in vars(self).items() if not isinstance(getattr(cls, k, None), cached_property)]
        return f"{cls.__qualname__}({', '.join(own)})"


def _fields(cls: Any) -> tuple[Any, ...]:
    """Return the fields of a class; none where it is no dataclass."""
    return fields(cls) if is_dataclass(cls) else ()


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Return field -> annotation, of the fields whose annotations can be resolved."""
    hints: dict[str, Any] = {}
    for field in _fields(cls):
        home = next(one for one in cls.__mro__ if field.name in vars(one).get("__annotations__", ()))
        try:
            hint = field.type
            hints[field.name] = eval(hint, vars(sys.modules[home.__module__])) if isinstance(hint, str) else hint
        except NameError:  # what only a type checker imports has no range
            continue
    return hints


def _refused(value: Any, hint: Any) -> bool:
    """Return whether an annotation's ranges, choices or `Checked` classes exclude a value; other types may be wrong."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        parts = [p for entry in args[1:] for p in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return value is None or _refused(value, args[0]) or not all(_within(value, part) for part in parts)
    if origin in (Union, UnionType):
        return all(_refused(value, one) for one in args)
    if origin is dict:
        return any(_refused(one, args[1]) for one in value.values())
    if origin is tuple and ... in args:
        return not isinstance(value, list | tuple) or any(_refused(one, args[0]) for one in value)
    if isinstance(hint, type) and issubclass(hint, Checked):
        return not isinstance(value, hint)
    return value not in args if origin is Literal else hint is NoneType and value is not None


def _within(value: Any, part: Any) -> bool:
    """Return whether a value fulfils one part of an annotation."""
    ranges = (("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt))
    try:
        finite = getattr(part, "allow_inf_nan", True) or math.isfinite(value)
        return finite and all(holds(value, getattr(part, name)) for name, holds in ranges if hasattr(part, name))
    except TypeError:  # a text is in no range
        return False


_CLIENT = re.compile(r"\w[\w .-]*")
_LONGEST = 200


def folder_name(client: str) -> str:
    """Return the name of a client's folder: letters outside ASCII are written as %XX, byte by byte. What would be
    longer than file systems allow ends in a hash."""
    whole = quote(client, safe=" ")
    if len(whole) <= _LONGEST:
        return whole
    return f"{whole[: _LONGEST - 33]}-{sha256(client.encode()).hexdigest()[:32]}"


def client_name(name: Any) -> str:
    """Return a client's name. Raises ValueError for one that cannot be the name of a folder on every system."""
    if not isinstance(name, str) or not _CLIENT.fullmatch(name):
        raise ValueError(
            f"{found(name)} found, expected a client's name: letters, digits, '_', '-', '.' and spaces, "
            "the first a letter, a digit or '_'"
        )
    if len(name) > _LONGEST:
        raise ValueError(
            f"{found(name)} found, expected a client's name of at most {_LONGEST} characters, found {len(name)}"
        )
    return name


ClientId = Annotated[str, AfterValidator(client_name)]
"""A client's name, in a recipe, in node.yaml and in what a node sends."""


def differs(path: str, one: Any, two: Any) -> list[str]:
    """Return the key paths of the leaves in which two plain values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return [key for name in {*one, *two} for key in differs(join(path, name), one.get(name), two.get(name))]
    return [] if one == two else [path]


def value_at(value: Any, path: str) -> Any:
    """Return the value at a key path of nested mappings, None where there is none."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
