"""Three sites with their own data and tasks, as nodes of Flower in this process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from fedloom.engines.api import Result
from fedloom.engines.flower import client_app
from fedloom.engines.flower.at_nodes import AtNodes, ClientManager
from fedloom.engines.flower.engine import LocalGrid
from fedloom.engines.flower.node import message_tree
from fedloom.engines.flower.nodes import agreed, build_from
from fedloom.engines.flower.received import open_reply
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.messages import Message
from fedloom.federation.rounds.rounds import initial_state

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


class Server:
    """A server that asks the nodes of the three sites whatever it likes."""

    def __init__(self, homes: dict[int, dict[str, str]], *changes: str, deployed: Recipe | None = None) -> None:
        """`deployed`: the recipe that the nodes run, where it is not the server's own."""
        self.recipe, self.homes = recipe(*changes), homes
        self.grid = LocalGrid(client_app(deployed or self.recipe), homes)
        self.nodes = ClientManager(self.grid, recipe_hash(self.recipe), self.recipe.runtime.flower)
        self.nodes.wait(3, 1.0)
        there = {client: self.nodes.reports[client] for client in self.nodes.there()}
        self.built = build_from(self.recipe, agreed(there)[0])
        self.at = AtNodes(self.built, self.nodes, secrets.token_hex(8), 10.0)
        self.state = initial_state(self.built)

    def home(self, client: str) -> Path:
        """The folder of a site."""
        return next(Path(config["home"]) for config in self.homes.values() if config["home"].endswith(client))

    def restart(self) -> None:
        """Begin the nodes' processes anew."""
        self.grid.app = client_app(self.recipe)

    def ask(self, kind: str, tree: Any, round: int = 1, client: str = "clinic") -> tuple[Any, dict[str, float]]:
        """(tree, numbers) of a node's answer. Raises RefusedError with the node's words."""
        ((_, answer),) = self.nodes.ask(kind, {client: self.at._content(client, round, tree)}, 10.0)
        if isinstance(answer, Exception):
            raise answer
        return open_reply(answer, 1 << 26, client=client)

    def message(self, moved: float = 0.0) -> dict[str, Any]:
        """The server's model, with all parameters moved."""
        server = self.state["server"]
        return message_tree(Message(server["model"] + moved, server["buffers"], server["integers"]))

    def evaluate(
        self, round: int = 1, client: str = "clinic", moved: float = 0.0, job: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, float]]:
        """(tree, scores) of the global model on the test split, or of what `job` says instead."""
        task = next(iter(self.built.federation.clients[client].tasks))
        about = {"key": 0, "client": client, "split": "test", "tasks": [task], "round": round, "personal": False}
        about |= {"task": None, "costly": False, "message": self.message(moved), "state": {}}
        return self.ask("evaluate.fedloom", {"jobs": [{**about, **(job or {})}]}, round, client)

    def train(self, round: int = 1, moved: float = 0.0, evaluate_trained: bool = False) -> tuple[Any, dict[str, float]]:
        """A training of the clinic."""
        tree = {"message": self.message(moved), "state": {}, "evaluate_trained": evaluate_trained}
        return self.ask("train.fedloom", tree, round)


def configured(grid: LocalGrid, config: Mapping[str, str]) -> LocalGrid:
    """The grid, with nodes that have this run config."""
    for context in grid.contexts.values():
        context.run_config = dict(config)
    return grid


def events(folder: Path) -> list[dict[str, Any]]:
    return [e for line in (folder / "metrics.jsonl").read_text().splitlines() for e in json.loads(line)["events"]]


def trained(folder: Path) -> list[list[str]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [sorted({each["client"] for each in line["train"]}) for line in lines[1:]]
