"""The base class of recipe sections, how strictly values are read, and parameters declared once. Free of torch.

A parameter of a stage or rule is a field of a frozen dataclass: its annotation says what is allowed, `Checked` refuses
the rest, and a registered function that takes the stage or rule has the parameter as a key.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from fedloom.core.settings.problems import expected, found

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A recipe section: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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

    `paths` are module:Class of the stages or rules that inherit the fields. A registered function with an argument of
    such a class has them as keys.
    """

    def declare(cls: type[T]) -> type[T]:
        PARTS.update({path.partition(":")[2]: (path, cls) for path in paths})
        return dataclass(frozen=True, init=False, repr=False, eq=False)(cls)

    return declare


class Checked:
    """A dataclass that refuses values which the annotations of its fields do not allow."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        for name, hint in hints_of(cast(Any, type(self))).items():
            if _refused(value := getattr(self, name), hint):
                raise ValueError(f"{type(self).__name__}: {name}: {found(value)} found, expected {expected(hint)}")


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Field -> annotation, of the fields whose annotations can be resolved."""
    hints: dict[str, Any] = {}
    for field in fields(cls) if hasattr(cls, "__dataclass_fields__") else ():
        home = next(one for one in cls.__mro__ if field.name in vars(one).get("__annotations__", ()))
        try:
            hint = field.type
            hints[field.name] = eval(hint, vars(sys.modules[home.__module__])) if isinstance(hint, str) else hint
        except NameError:  # what only a type checker imports has no range
            continue
    return hints


def _refused(value: Any, hint: Any) -> bool:
    """Return whether the ranges and choices in an annotation exclude a value; its type is not looked at."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        parts = [p for entry in args[1:] for p in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return value is None or _refused(value, args[0]) or not all(_within(value, part) for part in parts)
    if origin in (Union, UnionType):
        return all(_refused(value, one) for one in args)
    if origin is dict:
        return any(_refused(one, args[1]) for one in value.values())
    return value not in args if origin is Literal else hint is NoneType and value is not None


def _within(value: Any, part: Any) -> bool:
    """Return whether a value fulfils one part of an annotation."""
    ranges = (("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt))
    finite = getattr(part, "allow_inf_nan", True) or math.isfinite(value)
    return finite and all(holds(value, getattr(part, name)) for name, holds in ranges if hasattr(part, name))
