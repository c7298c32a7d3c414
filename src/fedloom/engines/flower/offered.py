"""A run as its sender offers it, as text: a site agrees to it before anything of it is resolved, built or imported."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.core.errors import RecipeError
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import parse, to_yaml
from fedloom.federation.recipes.loader import changed, dump, names, read, resolved
from fedloom.federation.recipes.schema import Recipe


@dataclass(frozen=True, eq=False)
class Offer:
    """The text of a recipe, and the changes of a run: `flwr run --run-config 'changes="training.rounds=5; seed=1"'`."""

    where: str
    text: str
    changes: tuple[str, ...] = ()
    made: Recipe | None = None
    """The recipe that the text was written from, where it was made in Python."""

    @staticmethod
    def of(recipe: Recipe | Path | str, changes: str = "") -> Offer:
        """Take an app's recipe (a file, a packaged name, a Recipe) and a run's changes, separated by semicolons.

        Raises RecipeError where the file cannot be read.
        """
        each = tuple(text.strip() for text in changes.split(";") if text.strip())
        if isinstance(recipe, Recipe):
            return Offer("the recipe", dump(recipe), each, recipe)
        if isinstance(recipe, str) and recipe in names():
            return Offer(recipe, to_yaml(read(recipe).value), each)
        try:
            return Offer(str(recipe), Path(recipe).read_bytes().decode("utf-8"), each)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{recipe}: {error}") from None

    @cached_property
    def sha256(self) -> str:
        """The checksum of the recipe's text, as `fedloom flower` prints it."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    @cached_property
    def content(self) -> dict[str, Any]:
        """The recipe's plain content with the changes applied. Raises RecipeError for text that is no recipe."""
        return changed(self.where, parse(self.text, self.where), self.changes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of code in it."""
        return tuple(dict.fromkeys(names_in(self.content)))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the changes change."""
        return tuple(change.partition("=")[0].strip() for change in self.changes)

    def resolved(self) -> Recipe:
        """Return the recipe as nodes run it; imports the code that it names.

        Raises RecipeError where code was not allowed: by a site's terms, by FEDLOOM_ALLOW_CODE, or by who made the
        recipe in this process.
        """
        if self.made is not None and not self.changes:
            return self.made.at_nodes()
        admit(self.names, Origin.ELSEWHERE, self.where)
        return resolved(self.where, self.content, self.changes).at_nodes()
