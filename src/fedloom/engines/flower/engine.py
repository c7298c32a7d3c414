"""The engine `flower`: jobs go to nodes as messages, over any Grid of Flower, or over one in this process; and the
ServerApp that runs it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, StateError, UserError
from fedloom.core.lazy import need
from fedloom.core.settings.section import Section, explain, folder_name, strict
from fedloom.data.partition import Partition
from fedloom.engines.engine import Engine
from fedloom.engines.flower.client import client_app
from fedloom.engines.flower.client_manager import ClientManager
from fedloom.engines.flower.local import LocalGrid
from fedloom.engines.flower.node import identity, marker, message_tree
from fedloom.engines.flower.nodes import NodeReport, agreed, as_plain, build_from
from fedloom.engines.flower.offered import Offer
from fedloom.engines.flower.received import (
    ANSWER,
    Told,
    limit_of,
    open_reply,
    payload_of,
    result_of,
    scores_of,
    seconds_of,
    told_by,
)
from fedloom.engines.flower.relay import TURNS, refuse, stub
from fedloom.engines.flower.wire import RefusedError, encode, reading
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.rounds import community_of
from fedloom.federation.recipes.runtime import FlowerSettings
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.measure import labels, named, wanted
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.progress import progress
from fedloom.federation.rounds.round import Advance, Round, with_server
from fedloom.federation.rounds.worker import EvalJob, Executor, Job, TrainDone, TrainJob
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.audit import FILE as AUDIT
from fedloom.federation.runs.audit import Audit
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import WITHHELD
from fedloom.federation.runs.recorded import json_of
from fedloom.methods.method import Method
from fedloom.training.flat import FlatModel

_KEYS = "keys.json"
"""The file of a run folder with the keys that clients' names belong to."""
_WITHOUT = "begins without some"
"""The event of a run that begins although not all nodes that it waited for have reported."""


class AtNodes:
    """Runs jobs at the nodes of their clients: an Executor. A client that fails leaves no result, and a log line."""

    def __init__(self, built: Built, nodes: ClientManager, run: str, deadline: float) -> None:
        self.built, self.nodes, self.run_id, self.deadline = built, nodes, run, deadline
        self.config: FlowerSettings = built.recipe.runtime.flower
        own_data = built.recipe.data.name == "nodes"
        self.head = {
            "run": run,
            "recipe": nodes.hash,
            "tasks": json.dumps([as_plain(t) for t in built.federation.tasks] if own_data else None),
            "codec": type(built.method.codec).__name__,
            "clients": len(built.federation.clients),
            **identity(built),
        }
        self.tasks = {task.name: task for task in built.federation.tasks}
        self.failed = "none"

    @cached_property
    def community(self) -> Community:
        """The peers whose peer messages are carried."""
        return community_of(self.built)

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Results as they arrive. Raises StateError if too few clients of a round of training answer."""
        clients = {node: client for client, node in self.nodes.ids.items()}
        for node in self.nodes.late():
            self.nodes.log("late answer dropped", {"client": clients.get(node, f"at node {node}")})
        self.nodes.meet(self.built.federation.clients)
        yield from self._train([job for job in jobs if isinstance(job, TrainJob)], **options)
        yield from self._evaluate([job for job in jobs if isinstance(job, EvalJob)])

    def close(self) -> None:
        """Nothing to give back."""

    def _content(self, client: str, round: int, tree: Any) -> Any:
        return encode(tree, {**self.head, "client": client, "round": round})

    def _answers(
        self,
        kind: str,
        contents: Mapping[str, Any],
        round: int,
        limits: Mapping[str, int] | None = None,
        read: Callable[[Built, str, Any], Any] = lambda built, client, tree: tree,
    ) -> Generator[tuple[str, Any, dict[str, float]]]:
        """(client, result of `read` on its tree, numbers) of good answers; the others are logged."""
        expected = {"run": self.run_id, "round": round, "layout": self.head["layout"]}
        for client, answer in self.nodes.ask(kind, contents, self.deadline):
            try:
                with reading():
                    if isinstance(answer, RefusedError):
                        raise answer
                    limit = (limits or {}).get(client, ANSWER)
                    tree, numbers = open_reply(answer, limit, client=client, **expected)
                    value = read(self.built, client, tree)
            except RefusedError as error:
                self.failed = f"client {client!r}, {kind}: {error}"
                self.nodes.log("answer dropped", {"client": client, "to": kind, "why": str(error)})
            else:
                yield client, value, numbers

    def _few(self, round_: int, came: int, asked: int) -> None:
        least = min(self.config.min_clients, asked)
        if came < least:
            raise StateError(
                f"round {round_}: {came} of {asked} clients answered, but runtime.flower.min_clients asks for {least}. "
                f"The rounds before it are saved; resume continues from there. The last that failed: {self.failed}"
            )

    def _train(self, jobs: Sequence[TrainJob], evaluate_trained: bool = False) -> Iterator[TrainDone]:
        if not jobs:
            return
        round_, came = jobs[0].round, 0
        contents = {
            job.client: self._content(
                job.client,
                round_,
                {"message": message_tree(job.message), "state": job.state, "evaluate_trained": evaluate_trained},
            )
            for job in jobs
        }
        limits = {client: limit_of(self.built, client) for client in contents}
        splits = self.built.recipe.evaluation.splits if evaluate_trained else ()
        enough = self.config.enough or len(jobs)
        with closing(self._answers("train.fedloom", contents, round_, limits, payload_of)) as answers:
            for client, payload, numbers in answers:
                came += 1
                enough -= payload.finite
                yield self._done(client, payload, round_, numbers, splits)
                if not enough and came < len(jobs):
                    self.nodes.log("enough answers", {"came": came, "asked": len(jobs)})
                    break
        self._few(round_, came, len(jobs))

    def _done(
        self, client: str, payload: Payload, round_: int, numbers: Mapping[str, float], splits: Sequence[str]
    ) -> TrainDone:
        tasks = self.built.federation.clients[client].tasks
        mine = {name: self.tasks[name] for name in tasks}
        trained = {split: scores_of(f"trained/{split}", numbers, mine) for split in splits}
        seconds = seconds_of(numbers, "seconds")
        result = result_of(numbers, tasks, "losses" in self.nodes.withheld.get(client, ()))
        return TrainDone(client, payload, result, marker(round_, tasks), seconds, trained)

    def _evaluate(self, jobs: Sequence[EvalJob]) -> Iterator[tuple[int, Any]]:
        by_client: dict[str, list[EvalJob]] = {}
        for job in jobs:
            by_client.setdefault(job.client, []).append(job)
        contents = {}
        for client, mine in by_client.items():
            asked = [{k: value for k, value in vars(job).items() if k != "pool"} for job in mine]
            trees = [{**each, "message": message_tree(job.message)} for each, job in zip(asked, mine, strict=True)]
            contents[client] = self._content(client, mine[0].round, {"jobs": trees})
        if not contents:
            return
        for client, tree, numbers in self._answers("evaluate.fedloom", contents, jobs[0].round):
            withheld = isinstance(tree, Mapping) and tree.get("withheld") is True
            for job in by_client[client]:
                known = {name: self.tasks[name] for name in job.tasks}
                yield job.key, {} if withheld else scores_of(str(job.key), numbers, known)

    def advance(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        """A round of clients and a server, or of peers."""
        self.nodes.log = now.log
        after = self._round(built, executor, state, now)
        quiet = [done.client for done in now.done if "losses" in self.nodes.withheld.get(done.client, ())]
        if quiet:
            now.record(WITHHELD, {"what": "losses", "clients": sorted(quiet)})
        return after

    def _round(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        if built.recipe.peers is None:
            return with_server(built, executor, state, now)
        self.nodes.meet(built.federation.clients)
        names = sorted(built.federation.clients)
        members = cohort(names, built.recipe.training.participation, built.recipe.seed, now.number)
        with now.ledger.phase("train and mix"):
            peers = self._peers(state["peers"], names, members, now)
        return {**state, "round": now.number, "peers": peers}, members

    def _peers(self, states: State, names: list[str], members: Sequence[str], now: Round) -> State:
        """Carry messages between peers, turn by turn; a peer that does not answer is out for the rest of the round."""
        federation, round_ = self.built.federation, now.number
        there, peer_messages = list(members), dict[str, list[Tensor]]()
        # a peer sends a few peer messages, each of at most its start and its model; to some of them all others listen
        limits = {name: 8 * limit_of(self.built, name) + 64 * len(names) for name in names}
        trained = "trained" in self.built.recipe.evaluation.models
        splits = self.built.recipe.evaluation.splits if trained else ()

        def read(built: Built, client: str, tree: Any) -> Told:
            return told_by(built, self.community, client, round_, tree)

        for turn in TURNS:
            contents = {
                name: self._content(
                    name,
                    round_,
                    {
                        "turn": turn,
                        "names": names,
                        "peer_messages": peer_messages.get(name, []),
                        "state": states[name]["client"],
                        "evaluate_trained": trained,
                    },
                )
                for name in there
            }
            came: dict[str, Told] = {}
            carried: dict[str, list[tuple[str, int, Tensor]]] = {}
            for name, told, numbers in self._answers("train.peer", contents, round_, limits, read):
                came[name] = told
                for i, (receiver, data) in enumerate(told.peer_messages):
                    carried.setdefault(receiver, []).append((name, i, data))
                if turn == TURNS[0]:
                    now.done.append(self._done(name, Payload((name, None), 0.0), round_, numbers, splits))
                    now.ledger.add("local training, sum over clients", now.done[-1].seconds)
                    if not numbers.get("finite"):
                        now.without(name)
                    now.progress.client(round_, len(now.done), len(members))
            peer_messages = {
                name: [data for *_, data in sorted(each, key=lambda e: e[:2])] for name, each in carried.items()
            }
            there = sorted(came)
            for name in there:
                for words in came[name].events:
                    now.log("node", {"client": name, "why": words})
                for kind, fields in came[name].records:
                    now.record(kind, fields)
        self._few(round_, len(there), len(members))
        for name in there:
            now.ledger.up[name], now.ledger.down[name] = came[name].up, came[name].down
        return {**states, **{name: stub(marker(round_, federation.clients[name].tasks)) for name in there}}

    def export(self, state: State) -> dict[str, Tensor]:
        """The global models. The nodes write personal ones, which may have private parts."""
        built = self.built
        model, tensors = FlatModel.copy_of(built.module), dict[str, Tensor]()
        own: dict[str, list[State]] = {}
        for prefix, (client, one) in wanted(built, state).items():
            if one.name == "global":
                tensors |= named(built, model, client, one, state["round"], prefix)
            else:
                own.setdefault(client, []).append({**vars(one), "message": message_tree(one.message), "prefix": prefix})
        contents = {client: self._content(client, state["round"], {"models": each}) for client, each in own.items()}
        for _ in self._answers("query.export", contents, state["round"]):
            pass
        return tensors


class Flower(Engine):
    """Nodes in this process: every message is made, sent, checked and answered as in a deployment."""

    without: Mapping[str, Any] | None = None
    """The fields of the event, where the run begins without some nodes."""

    def build(self, recipe: Recipe, partition: Partition | None = None) -> Built:
        """As in one process. Raises RecipeError for settings that nodes cannot follow."""
        need("flwr.app", "flower")
        recipe = recipe.at_nodes()
        if recipe.training.stacked:
            raise RecipeError("training.stacked: nodes train one client each, so nothing can be stacked")
        refuse(recipe.peers)
        if recipe.peers is not None and recipe.runtime.flower.enough is not None:
            raise RecipeError(
                "runtime.flower.enough: peers wait for each other's peer messages; it is for runs with a server"
            )
        return self._build(recipe, partition)

    def initial(self, built: Built) -> State:
        """The server's state before the first round; clients and peers have their own."""
        state = super().initial(built)
        return state if "peers" not in state else {**state, "peers": {name: stub({}) for name in state["peers"]}}

    def _build(self, recipe: Recipe, partition: Partition | None) -> Built:
        return super().build(recipe, partition)

    @contextmanager
    def start(self, built: Built, folder: RunFolder) -> Iterator[tuple[Executor, Advance | None]]:
        """Wait for the nodes and send them jobs."""
        nodes = self._nodes(built, folder)
        folder.audit = Audit(folder.path / AUDIT)
        private = built.recipe.privacy and built.recipe.privacy.model_dump(mode="json")
        folder.audit.note("policy", recipe=nodes.hash, privacy=private, keys=nodes.listed)
        nodes.audited(folder.audit)
        nodes.keep(folder.path / _KEYS)
        self.at = AtNodes(built, nodes, _run_id(folder.path), self._deadline(built))
        self._wait(built)
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

    def _deadline(self, built: Built) -> float:
        return 1e9  # nodes work one after another, so none is late

    def _wait(self, built: Built) -> None:
        config, clients = built.recipe.runtime.flower, built.federation.clients
        wanted = min(config.nodes or len(clients), len(clients))
        self._begin(self.at.nodes, self.at.nodes.wait(wanted, config.wait, clients), wanted, config, clients)

    def _begin(
        self,
        nodes: ClientManager,
        here: int,
        wanted: int,
        config: FlowerSettings,
        known: Iterable[str] = (),
        out: str = "",
    ) -> None:
        """Begin with the nodes that are here, and log who is missing. Raises UserError where there are too few."""
        if here >= wanted:
            return
        why = "; ".join(filter(None, [out, nodes.missing(known)]))
        if here < (least := min(config.min_clients, wanted)):
            raise UserError(
                f"{here} of {wanted} nodes reported within {config.wait:g} s (runtime.flower.wait); expected at least "
                f"{least} (min_clients). There: {', '.join(nodes.there()) or 'none'}. Not there: {why or 'others'}"
            )
        self.without = {"here": here, "expected": wanted, "why": why or "other nodes have not reported"}
        nodes.log(_WITHOUT, self.without)

    def show(self, built: Built, executor: Executor, folder: Path, state: State, final: bool = True) -> None:
        """Does nothing: test examples and their predictions stay at the nodes."""

    def export(self, built: Built, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
        """All models: the nodes' files are on this machine too."""
        tensors = self.at.export(state)
        for home in self.homes.values():
            file = home / "runs" / self.at.run_id / "model.safetensors"
            if file.is_file():
                tensors |= load_file(file)
        return tensors, labels(built, state)


class OverGrid(Flower):
    """Nodes that a Grid reaches: the engine of a ServerApp. `folder` is the run folder."""

    def __init__(self, grid: Any, folder: Path) -> None:
        self.grid, self.folder = grid, folder

    def _build(self, recipe: Recipe, partition: Partition | None) -> Built:
        """With data at the nodes: wait for the nodes, and make the federation from their reports."""
        self.nodes = ClientManager(self.grid, recipe_hash(recipe), recipe.runtime.flower, self.folder / _KEYS)
        if recipe.data.name != "nodes":
            return super()._build(recipe, partition)
        file = self.folder / "nodes.json"
        if partition is not None:
            try:
                value = dict(json_of(file))
                self.reports = {client: NodeReport.read(report, client) for client, report in value.items()}
            except (OSError, TypeError, ValueError, UserError) as error:
                raise StateError(f"{file} cannot be read: {error}") from error
            return build_from(recipe, self.reports, partition)
        config = recipe.runtime.flower
        if config.nodes is None:
            raise RecipeError("runtime.flower.nodes: null found, expected how many nodes to wait for (data: nodes)")
        found = self.nodes.wait(config.nodes, config.wait)
        self.reports, left_out = agreed({client: self.nodes.reports[client] for client in self.nodes.there()})
        for client, why in left_out.items():
            self.nodes.log("client left out", {"client": client, "why": why})
        out = "; ".join(f"client {client!r}: {why}" for client, why in left_out.items())
        self._begin(self.nodes, found, config.nodes, config, out=out)
        return build_from(recipe, self.reports)

    def _nodes(self, built: Built, folder: RunFolder) -> ClientManager:
        if built.recipe.data.name == "nodes":
            value = {client: report.model_dump(mode="json") for client, report in self.reports.items()}
            checkpoint.write_text(folder.path / "nodes.json", json.dumps(value, indent=1))
        return self.nodes

    def _deadline(self, built: Built) -> float:
        return built.recipe.runtime.flower.deadline

    def export(self, built: Built, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The global models; each node has its client's own models."""
        return self.at.export(state), labels(built, state)


def server_app(recipe: Recipe | Path | str, method: Method | None = None) -> Any:
    """A ServerApp that runs a recipe over the nodes, or resumes its run if the run folder exists already.

    `folder` in the run config is the run folder.
    """
    app = need("flwr.serverapp", "flower").ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        from fedloom.engines import api

        whole = Offer.of(recipe, str(context.run_config.get("changes", ""))).resolved()
        folder = Path(str(context.run_config.get("folder", f"runs/{whole.name}"))).expanduser()
        engine = OverGrid(grid, folder)
        watch = progress(quiet=False)
        if (folder / "recipe.yaml").is_file():
            result = api.resume(folder, method=method, progress=watch, engine=engine)
        else:
            result = api.run(whole, folder, method=method, progress=watch, engine=engine)
        print(f"{result.table()}\n{result.status}: {result.folder}", flush=True)

    return app


class _Run(Section):
    """flower.json."""

    run: str = Field(pattern=r"^[0-9a-f]{16}$", description="16 hexadecimal digits")


def _run_id(folder: Path) -> str:
    """The name of a run in the nodes' folders: drawn once, kept in the run folder."""
    file = folder / "flower.json"
    if not file.is_file():
        checkpoint.write_text(file, json.dumps({"run": secrets.token_hex(8)}))
    try:
        return strict(_Run, json_of(file)).run
    except ValidationError as error:
        raise StateError(f"{file}, {'; '.join(map(': '.join, explain(error, _Run)))}") from None
