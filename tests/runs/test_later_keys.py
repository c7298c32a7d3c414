"""Keys of a recipe that came later: when they are no change."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.federation.recipes.schema import came_later


@pytest.mark.parametrize(
    ("key", "before", "now", "expected"),
    [
        ("partition.named", {"partition": {"name": "domains"}}, {"partition": {"named": False}}, True),
        ("partition.named", {"partition": {"name": "domains"}}, {"partition": {"named": True}}, False),
        ("partition.named", {"partition": {"named": True}}, {"partition": {"named": False}}, False),
        ("partition.named", {}, {"partition": {"named": False}}, False),
        ("partition.clients", {"partition": {}}, {"partition": {"clients": 1}}, False),
        ("peers.choose.recency", {"peers": {"choose": {}}}, {"peers": {"choose": {"recency": None}}}, True),
        ("attack", {"seed": 0}, {"seed": 0, "attack": None}, True),
        ("seed", {"seed": 0}, {"seed": 1}, False),
    ],
)
def test_a_later_key_at_its_default(key: str, before: Any, now: Any, expected: bool) -> None:
    assert came_later(key, before, now) is expected
