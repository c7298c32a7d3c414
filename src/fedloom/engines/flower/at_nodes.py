"""Jobs at nodes: an executor that sends them as messages, reads the answers, and carries messages between peers."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import StateError
from fedloom.engines.flower.client_manager import ClientManager
from fedloom.engines.flower.node import identity, marker, message_tree
from fedloom.engines.flower.nodes import as_plain
from fedloom.engines.flower.received import (
    ANSWER,
    TurnResult,
    limit_of,
    number_of,
    open_reply,
    payload_of,
    result_of,
    scores_of,
    turn_of,
)
from fedloom.engines.flower.relay import TURNS, stub
from fedloom.engines.flower.wire import RefusedError, encode, reading
from fedloom.engines.peers.community import Community
from fedloom.engines.peers.rounds import community_of
from fedloom.federation.recipes.runtime import FlowerSettings
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.measure import named, wanted
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.round import Round, with_server
from fedloom.federation.rounds.worker import EvalJob, Executor, Job, TrainDone, TrainJob
from fedloom.federation.runs.reader import WITHHELD
from fedloom.training.flat import FlatModel


class AtNodes:
    """An Executor that runs jobs at their clients' nodes. A client that fails leaves no result, and a log line."""

    def __init__(self, built: Built, nodes: ClientManager, run: str, deadline: float) -> None:
        self.built, self.nodes, self.run_id, self.deadline = built, nodes, run, deadline
        self.config: FlowerSettings = built.recipe.runtime.flower
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

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

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
                    limit = (limits or {}).get(client, ANSWER)
                    tree, numbers = open_reply(answer, limit, client=client, **expected)
                    value = read(self.built, client, tree)
            except RefusedError as error:
                self.failed = f"client {client!r}, {kind}: {error}"
                self.nodes.log("answer dropped", {"client": client, "to": kind, "why": str(error)})
            else:
                yield client, value, numbers

    def _few(self, round_: int, answered: int, asked: int) -> None:
        """Raise StateError where fewer clients answered than the recipe demands."""
        least = min(self.config.min_clients, asked)
        if answered < least:
            raise StateError(
                f"round {round_}: {answered} of {asked} clients answered, expected at least {least} "
                "(runtime.flower.min_clients). "
                f"The earlier rounds are saved; `fedloom resume` continues from there. The last failure: {self.failed}"
            )

    def _train(self, jobs: Sequence[TrainJob], evaluate_trained: bool = False) -> Iterator[TrainDone]:
        if not jobs:
            return
        round_, answered = jobs[0].round, 0
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
        trained = {split: scores_of(f"trained/{split}", numbers, mine) for split in splits}
        seconds = number_of(numbers, "seconds")
        result = result_of(numbers, tasks, "losses" in self.nodes.withheld.get(client, ()))
        return TrainDone(client, payload, result, marker(round_, tasks), seconds, trained)

    def _evaluate(self, jobs: Sequence[EvalJob]) -> Iterator[tuple[int, Any]]:
        by_client: dict[str, list[EvalJob]] = {}
        for job in jobs:
            by_client.setdefault(job.client, []).append(job)
        contents = {}
        for client, mine in by_client.items():
            asked = [
                {k: value for k, value in vars(job).items() if k not in ("pool", "counted", "some")} for job in mine
            ]
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
        """Do a round of clients and a server, or of peers."""
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
        # a peer sends a few peer messages, each of at most its start and its model; some of them go to all others
        limits = {name: 8 * limit_of(self.built, name) + 64 * len(names) for name in names}
        trained = "trained" in self.built.recipe.evaluation.models
        splits = self.built.recipe.evaluation.splits if trained else ()

        def read(built: Built, client: str, tree: Any) -> TurnResult:
            return turn_of(built, self.community, client, round_, tree)

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
            results: dict[str, TurnResult] = {}
            carried: dict[str, list[tuple[str, int, Tensor]]] = {}
            for name, result, numbers in self._answers("train.peer", contents, round_, limits, read):
                results[name] = result
                for i, (receiver, data) in enumerate(result.peer_messages):
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
            there = sorted(results)
            for name in there:
                for words in results[name].events:
                    now.log("node", {"client": name, "why": words})
                for kind, fields in results[name].records:
                    now.record(kind, fields)
        self._few(round_, len(there), len(members))
        for name in there:
            now.ledger.up[name], now.ledger.down[name] = results[name].up, results[name].down
        return {**states, **{name: stub(marker(round_, federation.clients[name].tasks)) for name in there}}

    def export(self, state: State) -> dict[str, Tensor]:
        """Return the global models. The nodes write personal ones, which may have private parts."""
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
