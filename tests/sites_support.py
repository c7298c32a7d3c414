"""Three sites with their own data and tasks, as nodes of Flower in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from fedloom.engines.api import Result
from fedloom.recipes.loader import load
from fedloom.recipes.schema import Recipe

SITES = {"clinic": ("digit",), "lab": ("even",), "office": ("digit", "even")}
RECIPE = {
    "name": "sites",
    "data": "nodes",
    "partition": "nodes",
    "model": "small-cnn",
    "method": "fedavg",
    "training": {"rounds": 3, "steps": 2, "epochs": None},
    "runtime": {"engine": "flower", "flower": {"nodes": 3, "wait": 1.0, "deadline": 10.0}},
}


Go = Callable[..., Result]
Demand = Callable[..., Path]


def recipe(*changes: str) -> Recipe:
    return load(RECIPE, changes)


def make_homes(base: Path) -> dict[int, dict[str, str]]:
    """Node configs of three nodes, each with a part of the digits and labels of its own tasks."""
    digits = load_digits()
    images, labels = (digits.images * 15).astype(np.uint8)[:, None], {"digit": digits.target}
    labels["even"] = (digits.target % 2 == 0).astype(np.int64)
    configs = {}
    for number, (site, tasks) in enumerate(SITES.items()):
        part = slice(number * 80, number * 80 + 80)
        arrays = {"x_train": images[part][:60], "x_test": images[part][60:]}
        arrays |= {
            f"{t}_{s}": labels[t][part][c] for t in tasks for s, c in (("train", np.s_[:60]), ("test", np.s_[60:]))
        }
        np.savez(base / f"{site}.npz", **arrays)
        home = base / site
        home.mkdir()
        named = {task: f"{task}_{{split}}" for task in tasks}
        data = {"name": "arrays", "path": str(base / f"{site}.npz"), "labels": named}
        (home / "node.yaml").write_text(json.dumps({"client": site, "data": data}))
        configs[100 - number] = {"home": str(home)}
    return configs


def events(folder: Path) -> list[dict[str, Any]]:
    return [e for line in (folder / "metrics.jsonl").read_text().splitlines() for e in json.loads(line)["events"]]


def trained(folder: Path) -> list[list[str]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [sorted({each["client"] for each in line["train"]}) for line in lines[1:]]
