"""The server's side of nodes: the client manager, which knows who is connected and asks them, and the executor.

The executor sends jobs as messages, reads the answers, and carries messages between peers.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from fedloom.core.context import Log, State
from fedloom.core.errors import StateError
from fedloom.core.grouping import grouped
from fedloom.core.lazy import need
from fedloom.core.settings.section import ClientId, client_name
from fedloom.core.untrusted import plain
from fedloom.engines.flower import received
from fedloom.engines.flower.node import identity, marker, message_tree
from fedloom.engines.flower.nodes import NodeReport, agreed
from fedloom.engines.flower.relay import TURNS, stub
from fedloom.engines.flower.terms import Beside
from fedloom.engines.flower.wire import VERSIONS, FailedError, RefusedError, encode, key_of, reading, said, size_of
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.rounds import community_of
from fedloom.federation.recipes.runtime import FlowerSettings
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.measure import named, used
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.round import Round, with_server
from fedloom.federation.rounds.worker import EvalJob, Executor, Job, TrainDone, TrainJob
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.reader import WITHHELD, described
from fedloom.federation.runs.track import Audit
from fedloom.models.tasks.task import as_plain
from fedloom.training.flat import FlatModel

_POLL = 0.05, 1.0  # seconds between two looks for answers: at first, and at most
_LOOK = 5.0  # seconds between two looks at who is connected, while answers are awaited
_STUCK = 60.0  # seconds for which an answer may be impossible to fetch before it is given up
_JOIN = 60.0  # seconds within which a node must say who it is
_AGAIN = 30.0, 300.0
"""Seconds after which it is asked once more: where it did not say it, and where it was refused."""
_HELLO = 1 << 18  # most bytes of a hello
_KEPT = TypeAdapter(frozenset[Beside])


class ClientManager:
    """The nodes of the run of a recipe, named by its hash; `file` has the keys of a resumed run's clients."""

    def __init__(self, grid: Any, recipe: str, config: FlowerSettings, file: Path | None = None) -> None:
        self.grid, self.hash, self.config = grid, recipe, config
        self.keys = {**_read(file), **config.keys}
        self._file: Path | None = None
        self.ids: dict[str, int] = {}  # client -> the id of its node, which Flower draws anew
        self.reports: dict[str, NodeReport | None] = {}
        self.withheld: dict[str, frozenset[Beside]] = {}
        """Client -> the kinds of numbers that its node withholds."""
        self.noted: list[tuple[str, dict[str, Any]]] = []  # events from before there was an audit file
        self.note: Log = lambda what, about: self.noted.append((what, about))
        self._seen: set[str] = set()
        self.log: Log = self._say
        self._refused: dict[int, float] = {}  # node -> when to ask it again
        self._why: dict[int, str] = {}  # node -> why it was refused last
        self._open: dict[str, int] = {}  # number of a message that nobody waits for any more -> its node

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        """Log what happens before the first round."""
        print(f"{event}{described(fields)}")
        self.note(event, fields)

    def audited(self, audit: Audit) -> None:
        """Record from now on who joins and leaves; also record the events until now."""
        self.note = lambda what, about: audit.note(what, **about)
        for what, about in self.noted:
            self.note(what, about)

    def keep(self, file: Path) -> None:
        """Write the keys that names belong to into a file, now and whenever there is a new one."""
        self._file = file
        checkpoint.write_text(file, json.dumps(self.keys, indent=1))

    def there(self) -> dict[str, int]:
        """Return the clients whose nodes are connected, with the nodes' ids."""
        now = set(self.grid.get_node_ids())
        here = {client: node for client, node in sorted(self.ids.items()) if node in now}
        for client in sorted(self._seen - here.keys()):
            self.note("leave", {"client": client})
        self._seen = set(here)
        return here

    def meet(self, known: Iterable[str] | None = None, seconds: float = _JOIN) -> None:
        """Ask nodes that are new who they are. A client counts once, and only if it is among those `known`."""
        here, now = set(self.grid.get_node_ids()), time.monotonic()
        self._refused = {node: at for node, at in self._refused.items() if at > now}
        new = sorted(here - set(self.ids.values()) - self._refused.keys())
        nonces = {node: secrets.token_hex(16) for node in new}
        about = {"recipe": self.hash, "versions": VERSIONS}
        contents = {node: encode(None, {**about, "nonce": nonce}) for node, nonce in nonces.items()}
        for node, answer in self._exchange("query.hello", contents, seconds, {}) if new else ():
            try:
                with reading():
                    self._greet(node, answer, nonces[node], here, known)
            except RefusedError as error:
                silent = isinstance(answer, RefusedError)
                if not silent or node not in self._why:  # what it said once tells more than that it says nothing now
                    self._why[node] = str(error)
                self.log("node refused", {"node": node, "why": str(error)})
                self._refused[node] = time.monotonic() + _AGAIN[not silent]
            else:
                self._why.pop(node, None)

    def _greet(self, node: int, answer: Any, nonce: str, here: set[int], known: Iterable[str] | None) -> None:
        """Register a node by its hello. Raises RefusedError, or any other error, for an unfit one."""
        if isinstance(answer, RefusedError):
            raise answer
        tree, _ = received.open_reply(answer, _HELLO)
        client = client_name(answer["meta"]["client"])
        if known is not None and client not in known:
            raise RefusedError(f"client {client!r} does not belong to this run")
        key = key_of(answer["meta"], nonce, client)
        if self.keys.get(client, key) != key:
            first = "runtime.flower.keys lists" if client in self.config.keys else "a node of this name first showed"
            raise RefusedError(f"client {client!r}: {first} the key {self.keys[client]}, found {key}")
        if self.ids.get(client) in here:
            raise RefusedError(f"client {client!r} is already connected, as node {self.ids[client]}")
        report = None if tree is None else NodeReport.read(tree, client)
        withheld = _KEPT.validate_python(str(answer["meta"].get("withheld", "")).split())
        self.ids[client], self.reports[client] = node, report
        self.note("join", {"client": client, "key": key})
        if withheld and self.withheld.get(client) != withheld:
            self.log("node withholds", {"client": client, "numbers": ", ".join(sorted(withheld))})
        self.withheld[client] = withheld
        if (stated := answer["meta"].get("versions")) != VERSIONS:
            why = f'{said(stated)}, expected "{VERSIONS}" as at the server; results may differ, so install the same'
            self.log("other versions", {"client": client, "why": why})
        if client not in self.keys:
            self.keys[client] = key
            if self._file is not None:
                self.keep(self._file)

    def wait(self, count: int, seconds: float, known: Iterable[str] | None = None) -> int:
        """Wait for `count` clients whose reports agree, at most for `seconds`. Returns how many there are."""
        end, patience, told = time.monotonic() + seconds, _JOIN, ""
        while True:
            began = time.monotonic()
            self.meet(known, min(max(end - began, 1.0), patience))
            # a node on a slow machine must not be asked anew before it answers
            if time.monotonic() - began >= patience:
                patience *= 2
            reports = {client: self.reports[client] for client in self.there()}
            agreeing = len(agreed(reports)[0]) if known is None else len(reports)
            if agreeing >= count or time.monotonic() >= end:
                return agreeing
            if (missing := self.missing(known or ()) or "others") != told:
                told = missing
                about = {"here": agreeing, "expected": count, "seconds": round(end - time.monotonic()), "why": missing}
                print(f"waits for nodes{described(about)}", flush=True)
            time.sleep(_POLL[1])

    def missing(self, known: Iterable[str] = ()) -> str:
        """Return who is not here, and why: nodes that were refused, and clients, `known` or listed, without a node."""
        silent = sorted({*known, *self.config.keys} - self.there().keys())
        refused = [f"at node {node}: {why}" for node, why in sorted(self._why.items())]
        # a node that was refused under a client's name tells about that client
        nobody = [name for name in silent if not any(f"client {name!r}" in why for why in self._why.values())]
        return "; ".join([*refused, *(f"client {name!r}: no node has registered as this client" for name in nobody)])

    def ask(self, kind: str, contents: Mapping[str, Any], seconds: float) -> Iterator[tuple[str, Any]]:
        """Yield (client, answer) as answers arrive; a RefusedError stands for a missing answer."""
        there = self.there()
        for client in contents.keys() - there.keys():
            yield client, RefusedError("its node is not connected")
        clients = {there[client]: client for client in contents if client in there}
        messages = {node: contents[client] for node, client in clients.items()}
        waiting: dict[str, int] = {}
        try:
            for node, answer in self._exchange(kind, messages, seconds, waiting, self.config.retries):
                yield clients[node], answer
        finally:
            self._open |= waiting

    def late(self) -> list[int]:
        """Return the nodes whose answers arrived after nobody waited for them any more; the answers are dropped."""
        here = set(self.grid.get_node_ids())
        nodes: list[int] = []
        for number, node in [*self._open.items()]:
            if node in here and (arrived := self._fetch({number: node}, {})):
                del self._open[number]
                nodes += [node for _, answer in arrived if not isinstance(answer, FailedError)]
        return nodes

    def _exchange(
        self, kind: str, contents: Mapping[int, Any], seconds: float, waiting: dict[str, int], retries: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """Yield (node, answer) as they arrive; ask again after a passing failure. `waiting`: number -> node."""
        left, to_send = dict.fromkeys(contents, retries), list(contents)
        end, pause, stuck = time.monotonic() + seconds, _POLL[0], dict[str, float]()
        look = time.monotonic() + _LOOK
        while True:
            arrived = self._send(kind, {node: contents[node] for node in to_send}, end - time.monotonic(), waiting)
            to_send = []
            arrived += self._fetch(waiting, stuck)
            if time.monotonic() >= look:
                here, look = set(self.grid.get_node_ids()), time.monotonic() + _LOOK
                gone = [each for each, node in waiting.items() if node not in here]
                self._open |= {each: waiting[each] for each in gone}
                arrived += [(waiting.pop(each), RefusedError("its node has disconnected")) for each in gone]
            for node, answer in arrived:
                if isinstance(answer, FailedError) and left[node] > 0 and time.monotonic() + _POLL[1] < end:
                    left[node] -= 1
                    to_send.append(node)
                else:
                    yield node, answer
            if not to_send and not waiting:
                return
            if time.monotonic() >= end and not to_send:
                break
            if to_send or not arrived:
                time.sleep(_POLL[1] if to_send else pause)
            pause = _POLL[0] if arrived else min(2 * pause, _POLL[1])
        for node in waiting.values():
            yield node, RefusedError(f"no answer within {seconds:g} s")

    def _send(
        self, kind: str, contents: Mapping[int, Any], seconds: float, waiting: dict[str, int]
    ) -> list[tuple[int, Any]]:
        """Send messages; their numbers are added to `waiting`. Returns (node, why) of those that could not be sent."""
        if not contents:
            return []
        flwr = need("flwr.app", "flower")
        messages = [flwr.Message(content, node, kind, ttl=max(seconds, 1.0)) for node, content in contents.items()]
        try:
            pushed = list(self.grid.push_messages(messages))
        except Exception as error:  # the link to the SuperLink: Flower has tried it several times
            why = FailedError(f"the message could not be sent: {plain(str(error), 200)}")
            return [(node, why) for node in contents]
        numbers = dict(zip(contents, [*pushed, *[None] * (len(contents) - len(pushed))], strict=True))
        waiting.update({str(each): node for node, each in numbers.items() if each})
        return [(node, FailedError("the message could not be sent")) for node, each in numbers.items() if not each]

    def _fetch(self, waiting: dict[str, int], stuck: dict[str, float]) -> list[tuple[int, Any]]:
        """Return (node, answer) that arrived, and take them out of `waiting`; one that is broken blocks none."""
        if not waiting:
            return []
        arrived: list[tuple[int, Any]] = []
        try:
            messages = list(self.grid.pull_messages(list(waiting)))
        except Exception:
            messages = []
            for each in list(waiting):
                try:
                    messages += self.grid.pull_messages([each])
                    stuck.pop(each, None)
                except Exception as error:
                    if time.monotonic() - stuck.setdefault(each, time.monotonic()) > _STUCK:
                        why = f"its answer cannot be fetched: {plain(str(error), 200)}"
                        arrived.append((waiting.pop(each), RefusedError(why)))
        nodes = {node: each for each, node in waiting.items()}
        for message in messages:
            about = message.metadata
            # Flower's own errors come from the SuperLink, answers from the node that was asked
            each = about.reply_to_message_id if message.has_error() else ""
            each = each if each in waiting else nodes.get(about.src_node_id, "")
            if each in waiting:
                arrived.append((waiting.pop(each), _content(message)))
        return arrived


def _content(message: Any) -> Any:
    """Return the content of an answer, or the error that explains why there is none."""
    if message.has_error():
        return FailedError(said(message.error.reason, f"Flower's error {message.error.code}:"))
    try:
        with reading():
            if size_of(message.content) <= _HELLO and message.content["meta"].get("again") is True:
                return FailedError(said(message.content["meta"].get("error")))
    except RefusedError as error:
        return error
    return message.content


def _read(file: Path | None) -> dict[str, str]:
    """Read the keys in a file; none where there is no file. Raises StateError for a damaged file."""
    if file is None or not file.is_file():
        return {}
    try:
        return TypeAdapter(dict[ClientId, str]).validate_json(file.read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"{file} cannot be read: {error}") from error


class AtNodes(Executor):
    """An Executor that runs jobs at their clients' nodes. A client that fails leaves no result, and a log line."""

    def __init__(self, built: Built, nodes: ClientManager, run: str, deadline: float) -> None:
        self.built, self.nodes, self.run_id, self.deadline = built, nodes, run, deadline
        own_data = built.recipe.data.name == "nodes"
        self.head = {
            "run": run,
            "recipe": nodes.hash,
            "tasks": json.dumps([as_plain(t) for t in built.federation.tasks] if own_data else None),
            "table": built.dataset.table.model_dump_json() if own_data and built.dataset.table is not None else "",
            "codec": type(built.method.codec).__name__,
            "clients": len(built.federation.clients),
            **identity(built),
        }
        self.tasks = {task.name: task for task in built.federation.tasks}
        self.failed = "none"

    @cached_property
    def community(self) -> Community:
        """The peers between which this server carries messages."""
        return community_of(self.built)

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results as they arrive. Raises StateError if too few clients answer in a round of training."""
        clients = {node: client for client, node in self.nodes.ids.items()}
        for node in self.nodes.late():
            self.nodes.log("late answer dropped", {"client": clients.get(node, f"at node {node}")})
        self.nodes.meet(self.built.federation.clients)
        yield from self._train([job for job in jobs if isinstance(job, TrainJob)], **options)
        yield from self._evaluate([job for job in jobs if isinstance(job, EvalJob)])

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
        """Yield (client, result of `read` on its tree, numbers) of good answers; log the others."""
        expected = {"run": self.run_id, "round": round, "layout": self.head["layout"]}
        for client, answer in self.nodes.ask(kind, contents, self.deadline):
            try:
                with reading():
                    if isinstance(answer, RefusedError):
                        raise answer
                    limit = (limits or {}).get(client, received.ANSWER)
                    tree, numbers = received.open_reply(answer, limit, client=client, **expected)
                    value = read(self.built, client, tree)
            except RefusedError as error:
                self.failed = f"client {client!r}, {kind}: {error}"
                self.nodes.log("answer dropped", {"client": client, "to": kind, "why": str(error)})
            else:
                yield client, value, numbers

    def _few(self, round_: int, answered: int, asked: int) -> None:
        """Raise StateError where fewer clients answered than the recipe demands."""
        least = min(self.nodes.config.min_clients, asked)
        if answered < least:
            raise StateError(
                f"round {round_}: {answered} of {asked} clients answered, expected at least {least} "
                "(runtime.flower.min_clients). "
                f"The earlier rounds are saved; start the run again to continue. The last failure: {self.failed}"
            )

    def _train(self, jobs: Sequence[TrainJob], evaluate_trained: bool = False) -> Iterator[TrainDone]:
        if not jobs:
            return
        round_, answered = jobs[0].round, 0
        contents = {}
        for job in jobs:
            own = {"message": message_tree(job.message), "state": job.state, "evaluate_trained": evaluate_trained}
            contents[job.client] = self._content(job.client, round_, own)
        limits = {client: received.limit_of(self.built, client) for client in contents}
        splits = self.built.recipe.evaluation.splits if evaluate_trained else ()
        enough = self.nodes.config.enough or len(jobs)
        with closing(self._answers("train.fedloom", contents, round_, limits, received.payload_of)) as answers:
            for client, payload, numbers in answers:
                answered += 1
                enough -= payload.finite
                yield self._done(client, payload, round_, numbers, splits)
                if not enough and answered < len(jobs):
                    self.nodes.log("enough answers", {"came": answered, "asked": len(jobs)})
                    break
        self._few(round_, answered, len(jobs))

    def _done(
        self, client: str, payload: Payload, round_: int, numbers: Mapping[str, float], splits: Sequence[str]
    ) -> TrainDone:
        tasks = self.built.federation.clients[client].tasks
        mine = {name: self.tasks[name] for name in tasks}
        trained = {split: received.scores_of(f"trained/{split}", numbers, mine) for split in splits}
        seconds = received.number_of(numbers, "seconds")
        result = received.result_of(numbers, tasks, "losses" in self.nodes.withheld.get(client, ()))
        return TrainDone(client, payload, result, marker(round_, tasks), seconds, trained)

    def _evaluate(self, jobs: Sequence[EvalJob]) -> Iterator[tuple[int, Any]]:
        by_client = grouped((job.client, job) for job in jobs)
        contents = {}
        for client, mine in by_client.items():
            trees = [{**vars(job), "message": message_tree(job.message)} for job in mine]
            asked = [{k: v for k, v in tree.items() if k not in ("pool", "counted", "some")} for tree in trees]
            contents[client] = self._content(client, mine[0].round, {"jobs": asked})
        if not contents:
            return
        for client, tree, numbers in self._answers("evaluate.fedloom", contents, jobs[0].round):
            withheld = isinstance(tree, Mapping) and tree.get("withheld") is True
            for job in by_client[client]:
                known = {name: self.tasks[name] for name in job.tasks}
                yield job.key, {} if withheld else received.scores_of(str(job.key), numbers, known)

    def advance(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        """Do a round of clients and a server, or of peers."""
        self.nodes.log = now.log
        if built.recipe.peers is None:
            after = with_server(built, executor, state, now)
        else:
            self.nodes.meet(built.federation.clients)
            names, participation = sorted(built.federation.clients), built.recipe.training.participation
            members = cohort(names, participation, built.recipe.seed, now.number)
            with now.ledger.phase("train and mix"):
                peers = self._peers(state["peers"], names, members, now)
            after = {**state, "round": now.number, "peers": peers}, members
        quiet = [done.client for done in now.done if "losses" in self.nodes.withheld.get(done.client, ())]
        if quiet:
            now.record(WITHHELD, {"what": "losses", "clients": sorted(quiet)})
        return after

    def _peers(self, states: State, names: list[str], members: Sequence[str], now: Round) -> State:
        """Carry messages between peers, turn by turn; a peer that does not answer is out for the rest of the round."""
        federation, round_ = self.built.federation, now.number
        there, peer_messages = list(members), dict[str, list[Tensor]]()
        # a peer sends a few peer messages, each of at most its start and its model; some of them go to all others
        limits = {name: 8 * received.limit_of(self.built, name) + 64 * len(names) for name in names}
        trained = "trained" in self.built.recipe.evaluation.models
        splits = self.built.recipe.evaluation.splits if trained else ()

        def read(built: Built, client: str, tree: Any) -> received.TurnResult:
            return received.turn_of(built, self.community, client, round_, tree)

        for turn in TURNS:
            contents = {}
            for name in there:
                own = {"peer_messages": peer_messages.get(name, []), "state": states[name]["client"]}
                every = {"turn": turn, "names": names, "evaluate_trained": trained}
                contents[name] = self._content(name, round_, every | own)
            results: dict[str, received.TurnResult] = {}
            for name, result, numbers in self._answers("train.peer", contents, round_, limits, read):
                results[name] = result
                if turn == TURNS[0]:
                    now.done.append(self._done(name, Payload((name, None), 0.0), round_, numbers, splits))
                    now.ledger.add("local training, sum over clients", now.done[-1].seconds)
                    if not numbers.get("finite"):
                        now.without(name)
                    now.progress.client(round_, len(now.done), len(members))
            there = sorted(results)
            peer_messages = grouped(sent for name in there for sent in results[name].peer_messages)
            for name in there:
                for words in results[name].events:
                    now.log("node", {"client": name, "why": words})
                for kind, fields in results[name].records:
                    now.record(kind, fields)
        self._few(round_, len(there), len(members))
        for name in there:
            now.ledger.up[name], now.ledger.down[name] = results[name].up, results[name].down
        return {**states, **{name: stub(marker(round_, federation.clients[name].tasks)) for name in there}}

    def export(self, state: State, everywhere: bool) -> dict[str, Tensor]:
        """Return the global models. The nodes write their clients' own, which may have private parts, and with
        `everywhere` the global ones that these use."""
        built = self.built
        model, tensors = FlatModel.copy_of(built.module), dict[str, Tensor]()
        contents, written = {}, set[str]()
        for client in built.federation.clients:
            models: list[State] = []
            for prefix, one in used(built, state, client).items():
                if one.name == "global" and prefix not in written:
                    written.add(prefix)
                    tensors |= named(built, model, client, one, state["round"], prefix)
                if everywhere or one.name != "global":
                    models.append({**vars(one), "message": message_tree(one.message), "prefix": prefix})
            if models:
                contents[client] = self._content(client, state["round"], {"models": models})
        for _ in self._answers("query.export", contents, state["round"]):
            pass
        return tensors
