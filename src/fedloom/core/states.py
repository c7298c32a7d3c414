"""The values that a state may hold, as users' stages and rules return them, and whether one was changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedloom.core.errors import UserError

HOLDS = "tensors, numbers, texts, None, lists, and dictionaries whose keys are texts"
_PLAIN = {bool, int, float, str, type(None)}
"""The usual types, which are looked up faster than they are searched for by `isinstance`."""


def check_state(who: object, state: Any) -> None:
    """Refuse a state that no checkpoint could hold, of the stage or rule `who`. Nothing is copied."""
    if not isinstance(state, Mapping):
        raise UserError(f"{who!r}: the state is a {type(state).__name__}, expected a dictionary")
    try:
        _walk(state, "state")
    except TypeError as error:
        raise UserError(f"{who!r}: {error}; a state holds {HOLDS}") from None


def marks(value: Any) -> Any:
    """Return a value that is another one after a state, or a tensor in it, was changed in place. Nothing is copied."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if type(value) is dict or isinstance(value, Mapping):
        return {key: marks(each) for key, each in value.items()}
    return [marks(each) for each in value] if isinstance(value, list | tuple) else value


def _walk(value: Any, path: str) -> None:
    """Raise TypeError, with the path, for a value that does not belong into a state."""
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return
    if type(value) is dict or isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r} ({type(key).__name__}), expected a text such as str(key)")
            _walk(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _walk(each, f"{path}[{i}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{path} is a {type(value).__name__}")
