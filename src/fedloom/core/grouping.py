"""Values by their keys, in the order in which they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return key -> its values."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def nested(entries: Iterable[tuple[Any, ...]]) -> dict[Any, Any]:
    """Return first key -> second key -> ... -> value, of entries (first key, second key, ..., value)."""
    top: dict[Any, Any] = {}
    for *above, last, value in entries:
        place = top
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return top
