"""The data sets that a recipe may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedloom.core.errors import RecipeError
from fedloom.core.settings.registry import Registered, Registry

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

DATASETS = Registry("data set", "fedloom.data", ("fedloom.data.dataset:Dataset", "fedloom.data.own:Federation"))
"""Functions `f(seed, *, ...) -> Dataset`, or Federation; their keyword-only arguments are the recipe's keys."""


def loaded(entry: Registered, seed: int, params: Mapping[str, Any]) -> Dataset:
    """The data set that a function of the registry gives; of a Federation, the one in it.

    Raises RecipeError where it gives something else.
    """
    from fedloom.data.dataset import Dataset

    made = entry.make(seed, **params)
    made = getattr(made, "dataset", made)
    if not isinstance(made, Dataset):
        raise RecipeError(
            f"data: {entry.name} gives {type(made).__name__}, expected a fedloom.Federation or a fedloom.data.Dataset"
        )
    return made
