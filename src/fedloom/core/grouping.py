"""Values by their keys, in the order in which they come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return key -> its values."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def nested(entries: Iterable[tuple[K, L, V]]) -> dict[K, dict[L, V]]:
    """Return first key -> second key -> the last value of both."""
    return {key: dict(pairs) for key, pairs in grouped((k, (inner, value)) for k, inner, value in entries).items()}
