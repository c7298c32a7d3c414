"""Recipes in Python: objects in the place of names, and options as keywords."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.settings.section import as_plain, found
from fedloom.federation.recipes.runtime import Runtime
from fedloom.federation.recipes.schema import GIVEN, MethodSection, Recipe
from fedloom.training.config import Training

SECTIONS = ("data", "partition", "model", "method")
"""Where an object may stand in a name's place."""


def separated(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """Return a recipe's content with names in the place of objects, and the objects.

    A section is an object, or a mapping whose `name` is one. For a Method the section says what it would without it.
    """
    plain, objects = as_plain(value), {}
    for key in SECTIONS:
        section = plain.get(key)
        thing = section.get("name") if isinstance(section, Mapping) else section
        if thing is None or isinstance(thing, str | Mapping | list):
            continue
        if isinstance(thing, bool | int | float):
            raise RecipeError(f"{key}: {found(thing)} found, expected a name, a section or an object")
        more = {k: v for k, v in section.items() if k != "name"} if isinstance(section, Mapping) else {}
        objects[key] = thing, described(thing)
        mine = {"name": "fedavg"} if key == "method" else {"name": GIVEN, "what": objects[key][1]}
        plain[key] = {**mine, **more}
    return plain, objects


def described(thing: Any) -> str:
    """Return an object in a few words, which differ where data or the shape of a model differ, but not where only the
    seed of a federation's split does."""
    thing = getattr(thing, "_redrawn_of", None) or thing
    if hasattr(thing, "stage") and hasattr(thing, "name"):  # a Method
        return str(thing.name)
    dataset = getattr(thing, "dataset", thing)
    if hasattr(dataset, "fingerprint") or (hasattr(dataset, "train") and hasattr(dataset, "test")):
        digest = hashlib.sha256(dataset.train.fingerprint() + dataset.test.fingerprint())
        if (public := getattr(dataset, "public", None)) is not None:
            digest.update(public.numpy().tobytes())
        for client, model in getattr(dataset, "models", {}).items():
            digest.update(f"{client}: {model if isinstance(model, str | Mapping) else described(model)}".encode())
        return f"{dataset.name}, {len(dataset.train)} examples, {digest.hexdigest()[:8]}"
    module = getattr(thing, "module", thing)
    if hasattr(module, "state_dict") and not isinstance(module, type):
        # Layers such as nn.LazyLinear have no shape before the first input.
        tensors = module.state_dict().items()
        shapes = repr([(name, None if hasattr(t, "materialize") else tuple(t.shape)) for name, t in tensors])
        return f"{type(module).__name__}, {hashlib.sha256(shapes.encode()).hexdigest()[:8]}"
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def with_keywords(value: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's content with keywords: sections (training={...}), or keys of `training` and `runtime` alone.

    `lr` is the optimiser's. A mapping changes the keys that it names. Raises RecipeError for an unknown keyword.
    """
    result = dict(value)
    for key, given in sorted(options.items(), key=lambda option: option[0] == "lr"):
        if key == "lr":
            key, optimizer = "optimizer", (result.get("training") or {}).get("optimizer") or {}
            given = {**optimizer, "lr": given}
        if key in Recipe.model_fields:
            before = result.get(key)
            if key in SECTIONS and before is not None and not isinstance(before, Mapping):
                before = {"name": before}
            if isinstance(given, Mapping) and isinstance(before, Mapping) and "name" not in given:
                given = {**before, **given}
            result[key] = given
            continue
        home = next((n for n, model in (("training", Training), ("runtime", Runtime)) if key in model.model_fields), "")
        if not home:
            known = [*Recipe.model_fields, *Training.model_fields, *Runtime.model_fields]
            raise RecipeError(
                f"{key}: unknown option.{nearest(key, known)} Options are a recipe's sections "
                f"({', '.join(Recipe.model_fields)}), lr, and the keys of training and runtime"
            )
        if not isinstance(result.get(home) or {}, Mapping):
            raise RecipeError(f"{home}: {found(result[home])} found, expected a mapping")
        result[home] = {**(result.get(home) or {}), key: given}
    return result


def without_method(section: MethodSection) -> None:
    """Refuse a recipe that needs a Method made in Python, without one."""
    if section.python is not None and not section.is_held:
        raise RecipeError(
            f"method.python: the method was the Python object {section.python!r}, which a recipe cannot store; pass "
            "it as method= in Python (fedloom.run, fedloom.resume)"
        )


def undone(section: MethodSection, name: str) -> None:
    """Refuse keys of a recipe that a Method made in Python, of this name, would silently undo."""
    known = section.entry.params.model_fields
    given = {k: v for k, v in section.params.items() if v != known[k].get_default(call_default_factory=True)}
    common = {key: getattr(section, key) for key in ("add", "weights", "max_examples", "buffers", "codec")}
    given |= {k: v for k, v in common.items() if v}
    for key, value in given.items():
        names = ", ".join(value) if isinstance(value, dict) else value
        raise RecipeError(
            f"method.{key}: {names} found, but the Python object {name!r} replaces the recipe's method, so "
            f"this key would have no effect; leave it out (method={section.name}), and set it in Python"
        )
