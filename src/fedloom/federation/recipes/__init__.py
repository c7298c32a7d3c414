"""Recipes: one YAML file says everything that determines a run."""

from __future__ import annotations

from fedloom.federation.recipes.loader import dump, load, names
from fedloom.federation.recipes.schema import Recipe, recipe_hash

__all__ = ["Recipe", "dump", "load", "names", "recipe_hash"]
