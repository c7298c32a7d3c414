"""Validation of untrusted input: the schema and parsers for everything that a node or peer may send.

Floating-point tensors are cast before they are tested: a finite float64 may be infinite as float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core.errors import first_of, printable

_LARGEST = torch.finfo(torch.float32).max
_MANY = 1 << 53
_SHOWN = 200


@dataclass(frozen=True, eq=False)
class Sender:
    """The knowledge about a sender by which its values are judged.

    sizes    name -> number, for shapes of tensors; a name that is not there is learnt from the first tensor that has
             it, and stands for the same number in all others that came with it
    classes  number of a task's head in the model -> its classes, for the sender's tasks that have classes
    """

    sizes: dict[str, int] = field(default_factory=dict)
    classes: Mapping[int, int] = field(default_factory=dict)


class Untrusted(Protocol):
    """The requirements on one value."""

    def read(self, value: Any, sender: Sender) -> Any:
        """Return the value as it is used. Raises ValueError that says what was expected and what was found."""


def shown(value: Any) -> str:
    """Return an untrusted value, short and in one line, for an error message."""
    text = f"shape {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else _repr(value)
    return plain(text, _SHOWN)


def plain(text: str, most: int) -> str:
    """Return an untrusted text in one line without control characters, of at most about `most` characters."""
    cut = text[: most + 1]
    return printable(cut[:most], sign=" ") + (" ..." if len(cut) > most else "")


def _repr(value: Any) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN])
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > _MANY:  # it may have more digits than Python is ready to print
        return "a larger integer"
    return str(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Number(Untrusted):
    """A number from `low` to `high` that is finite as float32; `whole`: without a fraction."""

    low: float = -_LARGEST
    high: float = _LARGEST
    whole: bool = False

    def read(self, value: Any, sender: Sender) -> Any:
        kind = isinstance(value, int | float) and not isinstance(value, bool)
        if not (kind and self.low <= value <= self.high and (not self.whole or value == math.floor(value))):
            raise ValueError(
                f"expected a {'whole ' * self.whole}number from {self.low:g} to {self.high:g}, {_but(value)}"
            )
        return value


@dataclass(frozen=True)
class Text(Untrusted):
    """A printable text of at most `most` characters."""

    most: int = 200

    def read(self, value: Any, sender: Sender) -> str:
        if not (isinstance(value, str) and len(value) <= self.most and value.isprintable()):
            raise ValueError(f"expected a printable text of at most {self.most} characters, {_but(value)}")
        return value


@dataclass(frozen=True)
class Scalar(Untrusted):
    """A number or a text: what an extra is if no stage says more."""

    def read(self, value: Any, sender: Sender) -> Any:
        return Text().read(value, sender) if isinstance(value, str) else Number().read(value, sender)


@dataclass(frozen=True)
class Exactly(Untrusted):
    """One value that is known beforehand."""

    value: Any

    def read(self, value: Any, sender: Sender) -> Any:
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, self.value))
        if not (numbers or type(value) is type(self.value)) or value != self.value:
            raise ValueError(f"expected {shown(self.value)}, {_but(value)}")
        return value


@dataclass(frozen=True)
class OneOf(Untrusted):
    """One of a few values."""

    values: tuple[Any, ...]

    def read(self, value: Any, sender: Sender) -> Any:
        if not any(type(value) is type(one) and value == one for one in self.values):
            raise ValueError(f"expected {' or '.join(map(shown, self.values))}, {_but(value)}")
        return value


@dataclass(frozen=True)
class Array(Untrusted):
    """A tensor of `shape` (numbers, or names of sizes; see `Sender`) and, once it is cast, of `dtype`.

    Its kind, floating-point, integer or bool, is that of `dtype`; with `exact` so is its dtype. Its values are finite,
    and from `low` to `high`.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
    low: float | None = None
    high: float | None = None
    exact: bool = False

    def read(self, value: Any, sender: Sender) -> Tensor:
        if not isinstance(value, Tensor) or not self._fits(value, sender):
            shape = tuple(sender.sizes.get(n, n) if isinstance(n, str) else n for n in self.shape)
            raise ValueError(f"expected shape {shape} of {self.dtype}, {_but(value)}")
        cast = value.to(self.dtype)
        if not bool(torch.isfinite(cast).all()):
            raise ValueError("expected finite values")
        low, high = (cast.min(), cast.max()) if cast.numel() and self.dtype != torch.bool else (0, 0)
        if (self.low is not None and low < self.low) or (self.high is not None and high > self.high):
            raise ValueError(f"expected values from {self.low} to {self.high}, found {float(low):g} to {float(high):g}")
        return cast

    def _fits(self, value: Tensor, sender: Sender) -> bool:
        kind = value.dtype == self.dtype if self.exact else _kind(value.dtype) == _kind(self.dtype)
        if not kind or value.ndim != len(self.shape):
            return False
        for i, (size, expected) in enumerate(zip(value.shape, self.shape, strict=True)):
            if not isinstance(expected, str):
                good = size == expected
            elif i and not len(value):  # without rows it need not be as wide as others
                good = size <= sender.sizes.get(expected, 0)
            else:
                good = sender.sizes.setdefault(expected, size) == size
            if not good:
                return False
        return True


@dataclass(frozen=True)
class Each(Untrusted):
    """A list of as many values, each of its own kind."""

    values: tuple[Untrusted, ...]

    def read(self, value: Any, sender: Sender) -> list[Any]:
        if not (isinstance(value, list) and len(value) == len(self.values)):
            raise ValueError(f"expected a list of {len(self.values)}, {_but(value)}")
        return [kind.read(one, sender) for kind, one in zip(self.values, value, strict=True)]


@dataclass(frozen=True)
class Named(Untrusted):
    """A mapping with exactly these names, each with its own value."""

    fields: Mapping[str, Untrusted]

    def read(self, value: Any, sender: Sender) -> dict[str, Any]:
        names = ", ".join(self.fields) or "nothing"
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {names}, {_but(value)}")
        if value.keys() != self.fields.keys():
            listed = plain(", ".join(map(_repr, list(value)[:20])), _SHOWN)
            raise ValueError(f"expected {names}, found {listed or 'nothing'}")
        return _read(self.fields, value, sender)


@dataclass(frozen=True)
class Among(Untrusted):
    """A mapping in which each of these names that is there has its own value; with `more`, others are not looked at."""

    fields: Mapping[str, Untrusted]
    more: bool = True

    def read(self, value: Any, sender: Sender) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected names with values, {_but(value)}")
        if not self.more and (others := [name for name in value if name not in self.fields]):
            raise ValueError(f"expected no {plain(_repr(others[0]), _SHOWN)}, known are {first_of(self.fields)}")
        return _read({name: each for name, each in self.fields.items() if name in value}, value, sender)


@dataclass(frozen=True)
class Kind(Untrusted):
    """A value of a type of Python's."""

    kind: type = object

    def read(self, value: Any, sender: Sender) -> Any:
        if not isinstance(value, self.kind):
            raise ValueError(f"expected a {self.kind.__name__}, {_but(value)}")
        return value


def like(value: Any) -> Untrusted:
    """Return the requirements on what takes a value's place: its type or, of a tensor, shape and dtype, at each depth.

    None stands for anything, and what is in `Among` is known.
    """
    if isinstance(value, Among):
        return value
    if isinstance(value, Tensor):
        return Array(tuple(value.shape), value.dtype, exact=True)
    if isinstance(value, Mapping):
        return Among({name: like(each) for name, each in value.items()})
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Number()
    return Kind(object if value is None else type(value))


@dataclass(frozen=True)
class Nothing(Untrusted):
    """None."""

    def read(self, value: Any, sender: Sender) -> None:
        if value is not None:
            raise ValueError(f"expected nothing, {_but(value)}")


def _read(fields: Mapping[str, Untrusted], value: Mapping[str, Any], sender: Sender) -> dict[str, Any]:
    read = {}
    for name, each in fields.items():
        try:
            read[name] = each.read(value[name], sender)
        except ValueError as error:
            text = str(error)
            raise ValueError(f"{name}{': ' if text.startswith('expected') else '.'}{text}") from None
    return read


def _but(value: Any) -> str:
    return f"found {shown(value)}"


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "complex" if dtype.is_complex else "integer"
