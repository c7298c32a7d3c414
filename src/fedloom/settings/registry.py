"""Named, typed functions that a recipe may call: methods, add-ons, data sets, partitioners, encoders.

A registered function's signature is the schema of its recipe section: names, types, ranges and defaults stand in one
place. Modules that register must not import torch at module level, so that a recipe can be checked without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from fedloom.errors import RecipeError, unknown

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registered:
    """One registered function: `params` is the pydantic model of its keyword-only arguments."""

    name: str
    function: Callable[..., Any]
    params: type[BaseModel]
    summary: str
    source: str = ""


@dataclass
class Registry:
    """The named functions of one kind; `kind` is the word used in messages."""

    kind: str
    entries: dict[str, Registered] = field(default_factory=dict)

    def register(self, name: str, source: str = "") -> Callable[[F], F]:
        """Register a function under `name`. Its keyword-only parameters become recipe keys."""

        def add(function: F) -> F:
            if name in self.entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            keys = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
            # Only the keys need to resolve: positional arguments and results may be typed with torch.
            own = SimpleNamespace(__annotations__={p.name: p.annotation for p in keys})
            hints = get_type_hints(own, globalns=inspect.unwrap(function).__globals__, include_extras=True)
            fields: dict[str, Any] = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in keys}
            model = create_model(f"{self.kind}:{name}", __config__=ConfigDict(extra="forbid", strict=False), **fields)
            summary = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            self.entries[name] = Registered(name, function, model, summary, source)
            return function

        return add

    def __getitem__(self, name: str) -> Registered:
        if name not in self.entries:
            raise RecipeError(unknown(self.kind, name, sorted(self.entries)))
        return self.entries[name]

    def __iter__(self) -> Iterator[Registered]:
        return iter(self.entries[name] for name in sorted(self.entries))
