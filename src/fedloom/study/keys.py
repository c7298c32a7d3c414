"""Keys of recipes that no comparison mentions."""

from __future__ import annotations

from fedloom.federation.recipes import schema
from fedloom.federation.recipes.runtime import FlowerSettings

QUIET = {"name", "seed", *(f"runtime.{key}" for key in schema.QUIET)}
QUIET |= {f"runtime.flower.{key}" for key in FlowerSettings.model_fields}
"""Keys that no comparison mentions, for they do not change results."""
