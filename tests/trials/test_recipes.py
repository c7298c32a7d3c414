"""Recipes as nobody would write them: refused in a sentence, or read, and then the same when written and read again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.core.settings.yaml import to_yaml
from fedloom.engines import api
from fedloom.federation.recipes.loader import HOME, dump, load, packaged
from fedloom.federation.recipes.schema import recipe_hash
from trials.hostile import STRANGE, Tally, bytes_like, command, judged, places, value_like
from trials.scale import cases

AMOUNTS = (0, 1, 2, 3, 7, 64, 1000, 10**6, 10**9, 1e-9, 0.3, 0.5, 1.0, 1e30)
NUMBERS = (*STRANGE, *AMOUNTS, "fedavg", "all", "cpu", {"name": "fedprox"})


def test_texts(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Packaged recipes with other bytes, or with other values in them."""
    tally, texts = Tally(record_property), {name: its.text.encode() for name, its in packaged(HOME).items()}
    resolved = {name: load(name).model_dump(mode="json") for name in sorted(texts)[:: cases(8, 1)]}
    file = tmp_path / "recipe.yaml"
    for number in range(cases(50, 3000)):
        rng = random.Random(number)
        name = rng.choice(sorted(resolved))
        if rng.random() < 0.5:
            file.write_bytes(bytes_like(texts[name], rng))
        else:
            file.write_text(to_yaml(value_like(resolved[name], rng, NUMBERS)))
        with tally.case(f"{number}, {name}"):
            recipe = tally.answer(judged(lambda: load(file), file))
            if recipe is not None:
                file.write_text(dump(recipe))
                assert recipe_hash(load(file)) == recipe_hash(recipe)
    tally.close()


def test_changes_on_the_command_line(record_property: Callable[[str, object], None]) -> None:
    """KEY=VALUE with any value at any key, up to a built model: nothing is trained."""
    tally = Tally(record_property)
    base = ["data.size=8", "early_stopping={patience: 2}", "peers={}"]
    value: dict[str, Any] = load("digits-tasks", base).model_dump(mode="json")
    keys = {".".join(path): held for path, held in places(value) if all(isinstance(key, str) for key in path)}
    for number in range(cases(25, 700)):
        rng = random.Random(number)
        key = rng.choice(sorted(keys))
        number_there = isinstance(keys[key], int | float)
        text = to_yaml(rng.choice(AMOUNTS if number_there and rng.random() < 0.7 else NUMBERS))
        changes = [*rng.sample(base, 2), f"{key}={text.removesuffix('...' + chr(10)).strip()}"]
        with tally.case(f"{number}, {changes}"):
            tally.answer(judged(lambda: api.plan(load("digits-tasks", changes))))  # noqa: B023
    tally.close()


def test_memory_is_estimated_before_it_is_taken(tmp_path: Path) -> None:
    for change in ("model.width=1000000", "model.hidden=2000000000", "model={name: mlp, hidden: [50000, 50000]}"):
        assert judged(lambda: command("show", "digits-tasks", change), "memory") is None  # noqa: B023
