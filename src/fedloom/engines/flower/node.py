"""A client as a node, with its data and state, and the ClientApp of Flower that answers for it.

A home folder has node.yaml and, for each run, runs/RUN/ with the client's states, bytes.jsonl and metrics.jsonl. In the
end it is a run folder of this client alone, with the models that it uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, StateError, UserError
from fedloom.core.lazy import need
from fedloom.core.untrusted import plain, shown
from fedloom.data.tables.preprocessing import Preprocessing
from fedloom.engines.flower import received
from fedloom.engines.flower.check import RECIPE
from fedloom.engines.flower.nodes import (
    AT_NODE,
    AtNode,
    NodeConfig,
    about,
    build_at,
    joining,
    own_scales,
    with_own_noise,
)
from fedloom.engines.flower.relay import TURNS, Train, TurnJob, counted, take_turn
from fedloom.engines.flower.terms import Beside, Offer, SitePolicy, agree_to_withhold, withheld
from fedloom.engines.flower.wire import (
    VERSIONS,
    RefusedError,
    checksum_of,
    decode,
    encode,
    expect,
    head_of,
    reading,
    signed,
)
from fedloom.engines.peers.peer import first
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.build import build, method_of
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import Scores
from fedloom.federation.rounds.measure import Model, Record, labels, models_for, named, records_of, train_records
from fedloom.federation.rounds.messages import Ledger, Message, count_bytes
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.worker import EvalJob, TrainDone, TrainJob, Worker, set_torch
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.recorded import digest_of
from fedloom.federation.runs.track import FILE as AUDIT
from fedloom.federation.runs.track import Audit
from fedloom.methods.method import Method
from fedloom.models.tasks.task import as_task

Numbers = dict[str, float]
_RUN = re.compile(r"[0-9a-f]{16}")
_LOG = "the node's log says more"
_UNFIT = f"the site's data or settings do not fit the run: {_LOG}"
"""The only words about an error of the site's own files that the server gets."""
MOST = 3
"""The number of different messages of one kind (training, a turn of a peer, evaluation) that a node answers in a round:
one, and two more from a server that begins the round again with other answers, or that measures what takes long."""
_STATISTICS = "statistics.json"  # the file in a node's home with what it sent of its table, with noise


@dataclass(frozen=True, eq=False)
class Bench:
    """The recipe that the nodes of one process share, and the objects built from it, built only once."""

    recipe: Recipe
    built: Built | None = None
    workers: dict[Any, tuple[Built, Worker]] = field(default_factory=dict)

    def at(self, config: NodeConfig, tasks: str, table: str) -> tuple[Built, Worker]:
        """Return the recipe built for a node, with the federation's `tasks` and `table` if nodes have own data."""
        own = config.client if config.data is not None else None
        key = own, config.device, tasks, table
        if key not in self.workers:
            set_torch(self.recipe.runtime, self.recipe.training)
            if own is None:
                built = self.built or build(self.recipe)
            else:
                with reading():
                    fitted = Preprocessing.model_validate_json(table) if table else None
                    known = tuple(as_task(t) for t in json.loads(tasks))
                built = build_at(self.recipe, config, known, fitted)
            self.workers[key] = built, Worker(built.setup, config.device)
        return self.workers[key]


@dataclass(frozen=True, eq=False)
class Node:
    """One client. `audit` records all actions; `digests` are checksums of its state files by run and round."""

    home: Path
    config: NodeConfig
    bench: Bench
    audit: Audit
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> str:
        """The client's name in the federation."""
        return self.config.client

    @cached_property
    def withheld(self) -> frozenset[Beside]:
        """The kinds of numbers that the site withholds although the recipe records them."""
        return withheld(self.config.terms, self.bench.recipe.privacy, self.config.data is not None)

    def counts(self, method: Method) -> bool:
        """Return whether it states how many examples it has: of its own only where the method reads the number."""
        return "examples" not in self.withheld and (self.config.data is None or method.counts_examples)

    def hello(self, head: Mapping[str, Any], tree: Any) -> tuple[dict[str, Any] | None, Numbers]:
        """Return the node's report; None if it takes its share of the recipe's data."""
        terms, recipe, mine = self.config.terms, self.bench.recipe, recipe_hash(self.bench.recipe)
        if head.get("recipe") != mine:
            theirs = shown(head.get("recipe"))
            why = f"recipe: the server's recipe has hash {theirs}, this node's has {mine}"
            if (other := head.get("versions")) != VERSIONS:  # they may write one recipe in two ways
                why += f"; the server has {shown(other)}, this node {VERSIONS!r}: install the same versions"
            raise RefusedError(why)
        if terms is not None:
            self.audit.note("policy", recipe=mine, terms=terms.model_dump(mode="json"))
        answer = report = None
        if (data := joining(recipe, self.config)) is not None:
            dataset, client, own = data
            if scales := own_scales(recipe, self.config, client):
                self.audit.note("statistics", recipe=mine, labels=scales)
            if own is not None:
                report = with_own_noise(own.report, recipe, self.config, self.home / _STATISTICS)
                columns = [*report.sent, *report.shares]
                self.audit.note("statistics", recipe=mine, columns=columns, minimum=report.minimum)
            answer = about(client, dataset, self.counts(method_of(recipe)), report).model_dump(mode="json")
        self.audit.note("join", recipe=mine)
        return answer, {}

    def train(self, head: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[State, Numbers]:
        """Do the client's part of a round; the new state stays at the node."""
        built, worker = self._at(head)
        round_ = head["round"]
        message, marker = received.read_message(built, self.client, tree), received.read_state(tree)
        self._begin(built, head, tree)
        with self._folder(head) as folder:
            job = TrainJob(self.client, round_, message, self._state(built, folder, marker))
            done = self._trains(worker, tree)(job)
            self._keep(built, folder, done.state, round_, marker)
            ledger = Ledger()
            ledger.up[self.client] = count_bytes(built, self.client, done.payload)
            ledger.down[self.client] = count_bytes(built, self.client, message)
            ledger.add("local training", done.seconds)
            self._note(folder, round_, train_records([done]), ledger)
        return done.payload.tree(), self._numbers(built, done)

    def peer(self, head: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[State, Numbers]:
        """Do one turn of a round of peers (see `relay`); after the last turn the new state stays at the node."""
        turn, names, peer_messages = received.read_turn(self.client, tree)
        built, worker = self._at(head)
        round_, marker = head["round"], received.read_state(tree)
        if turn == TURNS[0]:
            self._begin(built, head, tree)
        else:
            self._count(built, head, f"turn {turn}", tree)
        job, train = TurnJob(self.client, round_, turn, names, peer_messages), self._trains(worker, tree)
        with self._folder(head) as folder:
            left = take_turn(built, worker, train, folder, self._peer_state(built, folder, marker), job)
            if left.state is not None:
                self._keep(built, folder, left.state, round_, marker)
                self._note(folder, round_, left.train, left.ledger)
        answer = {
            "peer_messages": left.peer_messages,
            "records": left.records,
            "events": left.events,
            "up": counted(left.ledger.up.get(self.client, {})),
            "down": counted(left.ledger.down.get(self.client, {})),
        }
        if left.done is None:
            return answer, {}
        return answer, {**self._numbers(built, left.done), "finite": int(left.done.payload.finite)}

    def evaluate(self, head: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[State, Numbers]:
        """Measure models on this client's data, for its own metrics.jsonl, and for the server if it may have scores."""
        built, worker = self._at(head)
        jobs = received.read_jobs(built, self.client, head["round"], tree)
        names, splits = [job["name"] for job in jobs], [job["split"] for job in jobs]
        tasks = sorted({task for job in jobs for task in job["tasks"]})
        self._count(built, head, "evaluate", tree, models=names, splits=splits, tasks=tasks)
        numbers: Numbers = {}
        records: list[Record] = []
        with self._folder(head) as folder:
            for job in jobs:
                name = job.pop("name")
                job["message"], job["state"] = self._model(built, folder, job, name)
                key, scores = worker.evaluate(EvalJob(**job))
                numbers |= self._flat(str(key), scores)
                records += records_of(built.federation.clients[self.client], name, job["split"], scores, job["tasks"])
            folder.add_metrics(head["round"], records)
        return ({"withheld": True}, {}) if "scores" in self.withheld else ({}, numbers)

    def _scored(self, tree: Mapping[str, Any]) -> bool:
        """Return whether to measure the model right after training."""
        return received.wants_trained(self.bench.recipe.evaluation.models, tree) and "scores" not in self.withheld

    def _trains(self, worker: Worker, tree: Mapping[str, Any]) -> Train:
        """Return how the node trains: where it withholds `examples`, counters of batches stay as they were received."""

        def train(job: TrainJob) -> TrainDone:
            done = worker.train(job, self._scored(tree))
            if "examples" not in self.withheld:
                return done
            return replace(done, payload=replace(done.payload, integers=job.message.integers))

        return train

    def _numbers(self, built: Built, done: TrainDone) -> Numbers:
        """Return the numbers of training that travel beside the payload, without those that the site withholds."""
        result = done.result
        numbers: Numbers = {"seconds": done.seconds, "waiting": result.waiting}
        if self.counts(built.method):
            numbers |= {"steps": result.steps, "examples": result.examples}
        for task, loss in result.losses.items():
            alone = result.by_task.get(task, result)
            if "losses" not in self.withheld:
                numbers[f"loss/{task}"] = loss
            if self.counts(built.method):
                numbers |= {f"steps/{task}": alone.steps, f"examples/{task}": alone.examples}
        for split, scores in done.trained.items():
            numbers |= self._flat(f"trained/{split}", scores)
        return numbers

    def _flat(self, prefix: str, scores: Scores) -> Numbers:
        """Return scores as PREFIX/TASK/METRIC (see `received.scores_of`), without losses if the site withholds them."""
        return {
            f"{prefix}/{task}/{metric}": value
            for task, values in scores.items()
            for metric, value in values.items()
            if metric != "loss" or "losses" not in self.withheld
        }

    def export(self, head: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[State, Numbers]:
        """Write the models that this client uses, and what makes the folder one that reading and exporting take."""
        built, worker = self._at(head)
        models = received.read_models(built, self.client, tree)
        tensors: dict[str, Tensor] = {}
        with self._folder(head) as folder:
            for one in models:
                message, state = self._model(built, folder, one, one["name"])
                model = Model(one["name"], one["tasks"], message, state, one["task"])
                tensors |= named(built, worker.model, self.client, model, head["round"], one["prefix"])
            folder.save_model(tensors, labels(built, {"round": head["round"]}))
            facts = built.about
            if self.config.data is not None:
                own = built.federation.clients[self.client].tasks
                facts = {**facts, "tasks": {task: each for task, each in facts["tasks"].items() if task in own}}
                at_node = AtNode(config=self.config.model_copy(update={"terms": None}), tasks=json.loads(head["tasks"]))
                checkpoint.write_text(folder.path / AT_NODE, at_node.model_dump_json(indent=1))
            folder.close_run(built.recipe, built.dealt, facts, head["round"])
        self.audit.note("export", run=str(head["run"]), round=head["round"])
        return {}, {}

    def _begin(self, built: Built, head: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
        """Record a training before it is answered. Raises RefusedError where the site's policy forbids it."""
        splits = built.recipe.evaluation.splits if self._scored(tree) else ()
        if self.config.terms is not None:
            mine = ("train", str(head["run"]))
            begun = sum((line["what"], line.get("run")) == mine for line in self.audit.lines())
            self.config.terms.agree_to(built, head.get("clients"), begun)
        self._count(built, head, "train", tree, **({"models": ["trained"], "splits": [*splits]} if splits else {}))

    def _count(self, built: Built, head: Mapping[str, Any], what: str, tree: Any, **about: Any) -> None:
        """Record a message of a round before it is answered. Raises RefusedError where MOST of its kind were answered.

        The same message gets the same answer, so it counts once, unless noise is drawn anew for each answer.
        """
        kind = {"what": what, "run": str(head["run"]), "round": head["round"]}
        before = [line.get("asked") for line in self.audit.lines() if kind.items() <= line.items()]
        asked = checksum_of(tree)
        noised = what == "train" and built.deployed and built.terms is not None and built.terms.trust == "local"
        count = len(before) if noised else len({*before} - {asked})
        if count >= MOST:
            raise RefusedError(
                f"round {head['round']}: this node has answered {count} messages to {what}, expected at most {MOST}"
            )
        self.audit.note(**kind, asked=asked, **about)

    def _at(self, head: Mapping[str, Any]) -> tuple[Built, Worker]:
        expect(head, client=self.client, recipe=recipe_hash(self.bench.recipe))
        received.read_round(self.bench.recipe.training.rounds, head)
        self.run_folder(str(head.get("run")))
        if self.config.terms is not None:
            self.config.terms.agree(self.bench.recipe)
        built, worker = self.bench.at(self.config, str(head.get("tasks")), str(head.get("table", "")))
        expect(head, **identity(built))
        agree_to_withhold(self.withheld, built.method, built.recipe)
        if self.config.terms is not None:
            self.config.terms.agree_to(built, head.get("clients"))
        return built, worker

    def run_folder(self, run: str) -> Path:
        """Return the folder with the files of one run."""
        if not _RUN.fullmatch(run):
            raise RefusedError(f"run: expected 16 hexadecimal digits, found {run!r}")
        return self.home / "runs" / run

    def _folder(self, head: Mapping[str, Any]) -> RunFolder:
        path = self.run_folder(str(head["run"]))
        path.mkdir(parents=True, exist_ok=True)
        (path / "run.json").unlink(missing_ok=True)  # of a run that goes on; `export` writes it again
        return RunFolder(path)

    def _note(self, folder: RunFolder, round_: int, train: list[Record], ledger: Ledger) -> None:
        """Write the line of a round that this client has trained in."""
        folder.cut(round_ - 1)
        line = {"round": round_, "cohort": [self.client], "metrics": [], "train": train, "seconds": ledger.seconds}
        folder.write_round({**line, "events": []}, ledger.bytes)

    def _model(self, built: Built, folder: RunFolder, one: Mapping[str, Any], name: str) -> tuple[Message, State]:
        """Return the message and the state that a model is loaded from; at a peer both are its own."""
        if built.recipe.peers is None:
            return one["message"], self._state(built, folder, one["state"])
        state = self._peer_state(built, folder, one["state"])
        for model in models_for(built, {"peers": {self.client: state}}, self.client):
            if (model.name, model.task) == (name, one["task"]):
                return model.message, model.state
        raise RefusedError(f"client {self.client!r} has no {name} model of task {one['task']!r}")

    def _peer_state(self, built: Built, folder: RunFolder, marker: Mapping[str, Any]) -> State:
        if marker:
            return self._state(built, folder, {"node": marker["node"]})
        return first(initial_state(built)["server"])

    def _state(self, built: Built, folder: RunFolder, marker: Mapping[str, Any]) -> State:
        """Return the state that a marker stands for: the state of a round, or a task's part of it.

        Raises StateError where the site's data are no longer those of that round.
        """
        if not marker:
            return {}
        name = f"round-{marker['node']}"
        file = folder.path / f"{name}.json"
        if not file.is_file():
            raise RefusedError(f"client {self.client!r} has no state of {name} of run {folder.path.name}")
        state: State
        state, saved, _ = checkpoint.load(folder.path, name, newest=lambda head: 0)
        if saved.get("data") not in (None, _data(built)):  # None: an earlier version wrote it
            raise StateError(
                f"client {self.client!r}: its data have changed since {name} of run {folder.path.name}. Put them back, "
                "or take part in a new run: examples that were for training may now be for tests"
            )
        digest, now = self.digests.get(f"{folder.path.name}/{name}"), digest_of(file.read_text())
        if digest not in (None, now):
            raise RefusedError(f"{name} of run {folder.path.name} was changed: expected checksum {digest}, found {now}")
        if "task" in marker:
            state = state.get("tasks", {}).get(marker["task"], {})
        return state

    def _keep(self, built: Built, folder: RunFolder, state: State, round_: int, marker: Mapping[str, Any]) -> None:
        """Save the state of a round, and delete those to which the server cannot return any more."""
        name = f"round-{round_}"
        checkpoint.save(folder.path, name, state, round=round_, data=_data(built))
        run = folder.path.name
        digest = self.digests[f"{run}/{name}"] = digest_of((folder.path / f"{name}.json").read_text())
        self.audit.note("checkpoint", run=run, round=round_, digest=digest)
        recipe = self.bench.recipe
        back = 2 * (recipe.runtime.saved_every or 1) - 1  # to the last checkpoint, and to the one before it
        if recipe.early_stopping and recipe.early_stopping.restore_best:
            back += recipe.early_stopping.patience * recipe.evaluation.every
        known = int(marker.get("node", 0))
        rounds = sorted(int(p.stem.split("-")[1]) for p in folder.path.glob("round-*.json") if "." not in p.stem)
        older = [r for r in rounds if r < known]
        for old in older[: max(len(older) - back, 0)]:
            for path in folder.path.glob(f"round-{old}.*"):
                path.unlink()
            self.digests.pop(f"{run}/round-{old}", None)


def _data(built: Built) -> list[str]:
    """Return the checksums of a node's data."""
    return [built.about[key] for key in ("data_hash", "inputs_hash")]


def identity(built: Built) -> dict[str, str]:
    """Return values by which server and node check that they have the same method and model."""
    digest = hashlib.sha256(built.frozen_hash.encode())
    if built.method.task_vectors:  # vectors are differences from the initial model
        digest.update(built.layout.flatten(built.module).detach().numpy().tobytes())
    return {
        "method": hashlib.sha256(str(built.method).encode()).hexdigest()[:16],
        "layout": built.layout.hash,
        "model": digest.hexdigest()[:16],
    }


def marker(round_: int, tasks: Mapping[str, Any]) -> State:
    """Return the server's stand-in for a client's state: its round, and one marker per task if states are by task."""
    return {"node": round_, "tasks": {task: {"node": round_, "task": task} for task in tasks}}


def message_tree(message: Message) -> State:
    """Return a message as a tree; see `received.read_message`."""
    return {f.name: getattr(message, f.name) for f in fields(message)}


Answer = Callable[[Node, Mapping[str, Any], Any], tuple[Any, Mapping[str, float]]]


def client_app(recipe: Recipe | Path | str, method: Method | None = None, built: Built | None = None) -> Any:
    """Return a ClientApp whose nodes train as a recipe (a file, a packaged name, a Recipe) says.

    `home` in the node's config is the folder for its files and node.yaml, `client` its name, if node.yaml does not give
    it. `method` replaces the recipe's; `built` is the recipe built. A node agrees to the text of the recipe and of the
    run's changes before anything is resolved, built or imported.
    """
    app = need("flwr.clientapp", "flower").ClientApp()
    offers: dict[str, Offer] = {}
    benches: dict[str, Bench] = {}
    audits: dict[Path, Audit] = {}
    if built is not None:
        offers[""], benches[""] = Offer.of(built.recipe), Bench(built.recipe, built)

    def bench_of(changes: str) -> Bench:
        if changes not in benches:
            whole = offers[changes].resolved()
            benches[changes] = Bench(whole if method is None else whole.holding(method=method))
        return benches[changes]

    def answer(what: Answer) -> Callable[[Any, Any], Any]:
        def handle(message: Any, context: Any) -> Any:
            flwr = need("flwr.app", "flower")
            audit: Audit | None = None
            name = ""
            try:
                home = home_of(context.node_config)
                audit = audits.setdefault(home, Audit(home / AUDIT))
                config = config_of(home, context.node_config)
                name = f"client {config.client!r}" if what is Node.hello else ""
                changes = str(context.run_config.get("changes", ""))
                if changes not in offers:
                    offers[changes] = Offer.of(recipe, changes)
                accept(offers[changes], config.terms, audit)
                if what is Node.hello:
                    tell_other_recipe(name, home, offers[changes])
                try:
                    bench = bench_of(changes)
                except RecipeError as error:  # of the server's text alone, so the server may read it
                    raise RefusedError(str(error).replace(offers[changes].where, "the recipe")) from None
                digests = dict(context.state["fedloom"]) if "fedloom" in context.state else {}
                node = Node(home, config, bench, audit, digests)
                head = head_of(message.content)
                tree, numbers = what(node, head, decode(message.content))
                context.state["fedloom"] = flwr.ConfigRecord(digests)
                about: dict[str, Any] = {k: head[k] for k in ("run", "round", "layout") if k in head}
                if "nonce" in head:
                    about |= signed(node.home, str(head["nonce"]), node.client)
                    about["withheld"] = " ".join(sorted(node.withheld))
                content = encode(tree, {**about, "client": node.client, "versions": VERSIONS}, numbers)
            except RefusedError as error:  # it quotes what the server sent, or the site's terms
                if audit is not None:
                    audit.note("refuse", why=plain(str(error), 500))
                content = encode(None, {"error": _of(name, str(error))})
            except Exception as error:  # its text may quote a cell, a row or a path of the site: it stays here
                why = _UNFIT if isinstance(error, UserError) else f"the node failed ({type(error).__name__}): {_LOG}"
                if isinstance(error, UserError | OSError):  # such as a full disk, with the file
                    print(error, file=sys.stderr)
                else:
                    traceback.print_exc()
                with contextlib.suppress(Exception):  # the audit file may be what is wrong
                    if audit is not None:
                        audit.note("refuse", why=plain(f"{type(error).__name__}: {error}", 500))
                content = encode(
                    None, {"error": _of(name, why)} | ({} if isinstance(error, RecipeError) else {"again": True})
                )
            return flwr.Message(content, reply_to=message)

        return handle

    app.query("hello")(answer(Node.hello))
    app.query("export")(answer(Node.export))
    app.train("fedloom")(answer(Node.train))
    app.train("peer")(answer(Node.peer))
    app.evaluate("fedloom")(answer(Node.evaluate))
    return app


def _of(name: str, why: str) -> str:
    """Return why a node refuses, with its client's name: at a hello the server knows only the number of the node."""
    return why if not name or why.startswith(name) else f"{name}: {why}"


def accept(offer: Offer, terms: SitePolicy | None, audit: Audit) -> None:
    """Agree to a run by its text, and write the text down once. Raises RefusedError for a run that may not be."""
    (terms or SitePolicy()).agree_to_offer(offer)
    about = {"sha256": offer.sha256, "changes": [*offer.changes]}
    if not any(line["what"] == "recipe" and all(line.get(k) == v for k, v in about.items()) for line in audit.lines()):
        audit.note("recipe", **about, text=offer.text)


def tell_other_recipe(name: str, home: Path, offer: Offer) -> None:
    """Tell a site whose start kit, around a node's home, has another recipe.yaml than the run."""
    with contextlib.suppress(OSError):
        mine = hashlib.sha256((home.parent / RECIPE).read_bytes()).hexdigest()
        if mine != offer.sha256:
            found = f"{home.parent / RECIPE} has sha256 {mine}, the recipe of this run {offer.sha256}"
            print(f"{name}: {found}: the run's counts, and {home / AUDIT} has its text", file=sys.stderr)


def home_of(config: Mapping[str, Any]) -> Path:
    """Return the folder that a node config names. Raises RecipeError if it names none."""
    if not config.get("home"):
        raise RecipeError("node config: home is missing, expected the folder for this node's files")
    return Path(str(config["home"])).expanduser()


def config_of(home: Path, config: Mapping[str, Any]) -> NodeConfig:
    """Read node.yaml in a node's home; without it, use the node config. Raises RecipeError for no client."""
    file = home / "node.yaml"
    if file.is_file():
        return NodeConfig.read(file)
    if not config.get("client"):
        raise RecipeError(f"node config: client is missing, and {file} does not exist, which could name it")
    return NodeConfig(client=str(config["client"]), device=str(config.get("device", "cpu")))
