"""The engine `flower`: jobs go to nodes as messages, over any Grid of Flower or one in this process; its ServerApp."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, StateError, UserError
from fedloom.core.lazy import need
from fedloom.core.settings.section import Section, differs, folder_name
from fedloom.core.settings.yaml import section_of
from fedloom.data.partition import Partition
from fedloom.engines.api import Engine
from fedloom.engines.flower.at_nodes import AtNodes, ClientManager
from fedloom.engines.flower.node import client_app
from fedloom.engines.flower.nodes import REPORTS, agreed, build_again, build_from
from fedloom.engines.flower.relay import refuse, stub
from fedloom.engines.flower.terms import Offer
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.progress import progress
from fedloom.federation.rounds.round import Advance
from fedloom.federation.rounds.worker import Executor
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.recorded import json_of, recipe_in
from fedloom.federation.runs.track import FILE as AUDIT
from fedloom.federation.runs.track import Audit
from fedloom.methods.method import Method

_KEYS = "keys.json"  # the file of a run folder with the keys that clients' names belong to
_WITHOUT = "begins without some"
"""The event of a run that begins although not all nodes that it waited for have reported."""


def _at_nodes(recipe: Recipe) -> Recipe:
    """Return a recipe as nodes run it. Raises RecipeError where they cannot."""
    need("flwr.app", "flower")
    refuse(recipe)
    return recipe.at_nodes()


class Flower(Engine):
    """The engine with nodes in this process: it sends, checks and answers every message as in a deployment."""

    in_time = False
    """If true, answers have a deadline. Nodes in this process work one after another, so none is late."""

    without: Mapping[str, Any] | None = None
    """The fields of the event, where the run begins without some nodes."""

    def build(self, recipe: Recipe, partition: Partition | None = None) -> Built:
        """Build a recipe; `partition` is the saved one, when resuming. Raises RecipeError where nodes cannot run it."""
        return super().build(_at_nodes(recipe), partition)

    def initial(self, built: Built) -> State:
        """Return the server's state before the first round; clients and peers have their own."""
        state = super().initial(built)
        return state if "peers" not in state else {**state, "peers": {name: stub({}) for name in state["peers"]}}

    @contextmanager
    def start(self, built: Built, folder: RunFolder) -> Iterator[tuple[Executor, Advance | None]]:
        """Wait for the nodes and send them jobs."""
        nodes = self._nodes(built, folder)
        folder.audit = Audit(folder.path / AUDIT)
        private = built.recipe.privacy and built.recipe.privacy.model_dump(mode="json")
        folder.audit.note("policy", recipe=nodes.hash, privacy=private, keys=nodes.config.keys)
        nodes.audited(folder.audit)
        nodes.keep(folder.path / _KEYS)
        config, clients = built.recipe.runtime.flower, built.federation.clients
        self.at = AtNodes(built, nodes, _run_id(folder.path), config.deadline if self.in_time else 1e9)
        expected = min(config.nodes or len(clients), len(clients))
        self._begin(nodes, nodes.wait(expected, config.wait, clients), expected, clients)
        if self.without:
            folder.later({"event": _WITHOUT, **self.without})
        yield self.at, self.at.advance

    def _nodes(self, built: Built, folder: RunFolder) -> ClientManager:
        device = built.recipe.runtime.devices[0]
        self.homes = {client: folder.path / "nodes" / folder_name(client) for client in built.federation.clients}
        configs = {
            node: {"home": str(home), "client": client, "device": device}
            for node, (client, home) in enumerate(self.homes.items(), start=1)
        }
        grid = LocalGrid(client_app(built.recipe, built=built), configs)
        return ClientManager(grid, recipe_hash(built.recipe), built.recipe.runtime.flower, folder.path / _KEYS)

    def _begin(self, nodes: ClientManager, here: int, expected: int, known: Iterable[str] = (), out: str = "") -> None:
        """Begin with the connected nodes, and log the missing ones. Raises UserError where there are too few."""
        if here >= expected:
            return
        why = "; ".join(filter(None, [out, nodes.missing(known)]))
        if here < (least := min(nodes.config.min_clients, expected)):
            raise UserError(
                f"{here} of {expected} nodes reported within {nodes.config.wait:g} s (runtime.flower.wait), expected "
                f"at least {least} (min_clients). Connected: {', '.join(nodes.there()) or 'none'}. Absent: "
                f"{why or 'others'}"
            )
        self.without = {"here": here, "expected": expected, "why": why or "other nodes have not reported"}
        nodes.log(_WITHOUT, self.without)

    def show(self, built: Built, executor: Executor, folder: Path, state: State, final: bool = True) -> None:
        """Do nothing: test examples and their predictions stay at the nodes."""

    def export(self, built: Built, state: State) -> dict[str, Tensor]:
        """Return all models: the nodes' files are on this machine too."""
        tensors = self.at.export(state, everywhere=False)
        for home in self.homes.values():
            file = home / "runs" / self.at.run_id / "model.safetensors"
            if file.is_file():
                tensors |= load_file(file)
        return tensors


class OverGrid(Flower):
    """The engine of a ServerApp, whose nodes a Grid reaches. `folder` is the run folder."""

    in_time = True

    def __init__(self, grid: Any, folder: Path) -> None:
        self.grid, self.folder = grid, folder

    def build(self, recipe: Recipe, partition: Partition | None = None) -> Built:
        """Build a recipe. With data at the nodes, wait for these, and build the federation from their reports."""
        recipe = _at_nodes(recipe)
        self.nodes = ClientManager(self.grid, recipe_hash(recipe), recipe.runtime.flower, self.folder / _KEYS)
        if recipe.data.name != "nodes":
            return super().build(recipe, partition)
        if partition is not None:
            built, self.reports = build_again(recipe, self.folder, partition)
            return built
        config = recipe.runtime.flower
        if config.nodes is None:
            raise RecipeError(
                "runtime.flower.nodes: null found, expected the number of nodes to wait for (data: nodes)"
            )
        here = self.nodes.wait(config.nodes, config.wait)
        self.reports, left_out = agreed({client: self.nodes.reports[client] for client in self.nodes.there()})
        for client, why in left_out.items():
            self.nodes.log("client left out", {"client": client, "why": why})
        out = "; ".join(f"client {client!r}: {why}" for client, why in left_out.items())
        self._begin(self.nodes, here, config.nodes, out=out)
        return build_from(recipe, self.reports)

    def _nodes(self, built: Built, folder: RunFolder) -> ClientManager:
        if built.recipe.data.name == "nodes":
            value = {client: report.model_dump(mode="json") for client, report in self.reports.items()}
            checkpoint.write_text(folder.path / REPORTS, json.dumps(value, indent=1))
        return self.nodes

    def export(self, built: Built, state: State) -> dict[str, Tensor]:
        """Return the global models; each node has all that its client uses."""
        return self.at.export(state, everywhere=True)


def server_app(recipe: Recipe | Path | str, method: Method | None = None) -> Any:
    """Return a ServerApp that runs a recipe over nodes, or resumes the run in `folder`, a key of the run config."""
    app = need("flwr.serverapp", "flower").ServerApp()
    logging.getLogger("flwr").addFilter(_without_traceback)

    @app.main()
    def main(grid: Any, context: Any) -> None:
        from fedloom.engines import api

        whole = Offer.of(recipe, str(context.run_config.get("changes", ""))).resolved()
        folder = Path(str(context.run_config.get("folder", f"runs/{whole.name}"))).expanduser()
        engine = OverGrid(grid, folder)
        watch = progress(quiet=False)
        if (folder / "recipe.yaml").is_file():
            if method is None:
                _check_same(folder, whole)
            result = api.resume(folder, method=method, progress=watch, engine=engine)
        else:
            result = api.run(whole, folder, method=method, progress=watch, engine=engine)
        print(f"{result.table()}\n{result.status}: {result.folder}", flush=True)

    return app


def _without_traceback(record: logging.LogRecord) -> bool:
    """Make Flower log a UserError, or a full disk, which ends its ServerApp, as one sentence; any other error is a
    bug."""
    if record.exc_info and isinstance(error := record.exc_info[1], UserError | OSError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


def _check_same(folder: Path, recipe: Recipe) -> None:
    """Raise StateError where the app's recipe, with its changes, is not that of the run in a folder."""
    if keys := sorted(differs("", *(each.model_dump(mode="json") for each in (recipe_in(folder), recipe)))):
        raise StateError(
            f"{folder}: the run there began with other values of {', '.join(keys)}, which cannot change. Start the app "
            "with those, or a new run in another folder"
        )


class _Run(Section):
    """flower.json."""

    run: str = Field(pattern=r"^[0-9a-f]{16}$", description="16 hexadecimal digits")


def _run_id(folder: Path) -> str:
    """Return the name of a run in the nodes' folders: drawn once, stored in the run folder."""
    file = folder / "flower.json"
    if not file.is_file():
        checkpoint.write_text(file, json.dumps({"run": secrets.token_hex(8)}))
    return section_of(_Run, json_of(file), str(file), StateError).run


class LocalGrid:
    """A Grid whose nodes (id -> config) are calls of a ClientApp, when an answer is pulled; `silent` never answer."""

    def __init__(self, app: Any, node_configs: Mapping[int, Mapping[str, Any]]) -> None:
        _identify()
        flwr = need("flwr.app", "flower")
        self.app = app
        self.contexts = {
            node: flwr.Context(1, node, dict(config), flwr.RecordDict(), {}) for node, config in node_configs.items()
        }
        self.silent: set[int] = set()
        self._waiting: dict[str, Any] = {}
        self._numbers = count(1)

    def get_node_ids(self) -> list[int]:
        """Return the ids of the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Take messages; nodes work on them when answers are pulled."""
        new = {str(next(self._numbers)): message for message in messages}
        self._waiting |= new
        return [*new]

    def pull_messages(self, message_ids: Sequence[str]) -> list[Any]:
        """Return the next answer alone, so that no more than one is in memory."""
        for each in message_ids:
            message = self._waiting.get(each)
            if message is not None and message.metadata.dst_node_id not in self.silent:
                del self._waiting[each]
                return [self.app(message, self.contexts[message.metadata.dst_node_id])]
        return []


def _identify() -> None:
    """Set the id of a task, without which Flower from 1.41 on makes no messages outside its own processes."""
    try:
        identity: Any = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except ImportError:  # an older version
        return
    try:
        _ = identity.task_id
    except RuntimeError:
        identity.task_id = identity.run_id = identity.node_id = 1
