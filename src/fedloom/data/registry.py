"""The data sets that a recipe may name."""

from __future__ import annotations

from fedloom.settings.registry import Registry

DATASETS = Registry("data set", "fedloom.data")
"""Functions `f(seed, *, ...) -> Dataset`; their keyword-only arguments are the recipe's keys."""
