"""A hostile sender of recipes: names of code at any place of a recipe, through every door. Nothing of it may run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.core.settings.yaml import to_yaml
from fedloom.engines import api
from fedloom.experiments.export.bundle import Bundle
from fedloom.experiments.tournament import planned
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.runs.folder import RunFolder
from fedloom.study.grid import load_grid, recipes
from trials.hostile import Tally, command, judged, places
from trials.scale import cases

SECTIONS: dict[str, Any] = {
    "data.size": 8,
    "attack": "sign-flip",
    "peers": {},
    "tasks": {"digit": {"weight": 2.0}},
    "method.add": {"feddea": {"rho": 0.5}},
    "method.codec": "sparse",
}
"""More places in which a name may stand."""


def spoiled(value: Any, rng: random.Random, trick: dict[str, Any]) -> Any:
    """The recipe with the trick at one place: as a section, a name, a key, a name in a section, or in a list."""
    *above, last = rng.choice([path for path, _ in places(value)])
    holder = value
    for key in above:
        holder = holder[key]
    kind, name = rng.randrange(5), trick["name"]
    if kind == 0:
        holder[last] = trick
    elif kind == 1:
        holder[last] = name
    elif kind == 2 and isinstance(holder, dict):
        holder[name] = {k: v for k, v in trick.items() if k != "name"}
    elif kind == 3 and isinstance(holder[last], dict):
        holder[last] |= trick
    else:
        holder[last] = [name, trick]
    return value


def test_names_of_code_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """File, run folder, bundle, grid and tournament. What is accepted is built too: losses are imported only then."""
    monkeypatch.chdir(tmp_path)
    owned = tmp_path / "owned"
    (tmp_path / "evil.py").write_text(f"open({str(owned)!r}, 'w')\n\ndef fit(*a, **k):\n    pass\n")
    tricks = [
        {"name": "timeit:timeit", "setup": f"open({str(owned)!r}, 'w')", "timer": None, "number": 1},
        {"name": "evil:fit"},
        {"name": "os:system", "command": f"touch {owned}"},
        {"name": "subprocess:run", "args": ["touch", str(owned)]},
    ]
    overrides = [f"{key}={to_yaml(value).removesuffix('...' + chr(10)).strip()}" for key, value in SECTIONS.items()]
    fl.run("digits-tasks", tmp_path / "run", overrides=["training.rounds=1", "training.epochs=1", "data.size=8"])
    command("export", "run", "--out", "bundle")
    doors: dict[str, Callable[[Any], object]] = {
        "file": lambda value: api.plan(written("r.yaml", value)),
        "changed": lambda value: api.plan(written("r.yaml", value), model="mlp", rounds=1),
        "run": lambda value: build(*RunFolder.read(Path(parent("run/recipe.yaml", value)))),
        "bundle": lambda value: Bundle.read(Path(parent("bundle/recipe.yaml", value))),
        "grid": lambda value: recipes(load_grid(written("g.yaml", grid(value)))),
        "tournament": lambda value: planned(
            str(Path(written("t/tournament.yaml", benchmark(value))).parent), (), None, (), {}
        ),
    }

    def written(file: str, value: Any) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(to_yaml(value))
        return str(tmp_path / file)

    def parent(file: str, value: Any) -> str:
        return str(Path(written(file, value)).parent)

    def grid(value: Any) -> Any:
        return {"name": "g", "data": {"D": {"recipe": value}}, "bases": {"A": {}}, "seeds": [0], "references": []}

    def benchmark(value: Any) -> Any:
        return {"name": "t", "recipe": value, "methods": ["fedavg"], "tries": 2, "tuning": [1], "least": 2, "most": 3}

    tally = Tally(record_property)
    for number in range(cases(60, 3000)):
        rng = random.Random(number)
        value = load("digits-tasks", rng.sample(overrides, 3)).model_dump(mode="json")
        door, trick = rng.choice(sorted(doors)), rng.choice(tricks)
        with tally.case(f"{number}, {door}, {trick['name']}"):
            bad = spoiled(value, rng, trick)
            tally.answer(judged(lambda: doors[door](bad)))  # noqa: B023
            assert not owned.exists()
            assert "evil" not in sys.modules
    tally.close()
