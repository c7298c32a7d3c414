"""One round of a run: its record, who hears of it, and how it is made with a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fedloom.core.codecs import ByteCount
from fedloom.core.context import Ctx, State
from fedloom.federation.rounds.built import Built, conspired
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.measure import train_records, train_seconds
from fedloom.federation.rounds.messages import Ledger, Message, Payload, count_bytes, form, rows_of
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.recovery import kept_states
from fedloom.federation.rounds.server import adds_up, dispatch, server_step, server_step_by_sums
from fedloom.federation.rounds.worker import Executor, TrainDone, TrainJob
from fedloom.federation.runs.reader import DIAGNOSTICS, described

SHOWN = 5
"""How many events of a kind are shown in a round; a rate at which training diverges has one per client and round."""


@dataclass
class Round:
    """The record of one round, beside the state of the server or of the peers."""

    built: Built
    number: int
    progress: Progress
    before: State = field(default_factory=dict, repr=False)
    """The state of the run before it."""
    members: Sequence[str] = ()
    """The clients that took part."""
    ledger: Ledger = field(default_factory=Ledger)
    events: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The scores that were measured after it."""
    done: list[TrainDone] = field(default_factory=list)
    clients: State = field(default_factory=dict)
    """The new states of the clients that trained."""
    secret: bytes | None = field(default=None, repr=False)
    counted: dict[Any, tuple[ByteCount, ...]] = field(default_factory=dict, repr=False)
    """Bytes up and down, by the client's tasks and the forms of its messages."""
    shown: Counter[str] = field(default_factory=Counter, repr=False)
    """The events of each kind so far."""

    @cached_property
    def plot(self) -> State:
        """The common memory of hostile clients that know all others."""
        return dict(self.before.get("attack", {}))

    def cohort(self) -> tuple[str, ...]:
        """Return the clients that take part at a server."""
        recipe, key = self.built.recipe, self.secret or self.built.recipe.seed
        alone = recipe.privacy is not None and recipe.privacy.sampling == "poisson"
        return cohort(self.built.federation.trainers, recipe.training.participation, key, self.number, alone)

    def ctx(self, members: Sequence[str]) -> Ctx:
        """Return the context of the server's stages, with these clients as participants."""
        recipe, federation = self.built.recipe, self.built.federation
        here, population = (rows_of(self.built, clients) for clients in (members, federation.trainers))
        about = self.number, recipe.seed, here, len(population), recipe.training.rounds
        return Ctx(*about, self.log, self.record, secret=self.secret, held=federation.held)

    @property
    def line(self) -> dict[str, Any]:
        """Its line in the run folder, diagnostics apart from other records because these have a file of their own."""
        looked = [{k: v for k, v in r.items() if k != "kind"} for r in self.records if r["kind"] == DIAGNOSTICS]
        records = [record for record in self.records if record["kind"] != DIAGNOSTICS]
        return {
            "round": self.number,
            "cohort": list(self.members),
            "train": train_records(self.done),
            "metrics": self.metrics,
            "events": self.events,
            **({"seconds_of": train_seconds(self.done)} if self.number else {}),
            **({"records": records} if records else {}),
            **({DIAGNOSTICS: looked} if looked else {}),
            "seconds": self.ledger.seconds,
        }

    def after(self, state: State, server: State) -> State:
        """Return the state after the round, from the one before and the server's new one."""
        return {**state, "round": self.number, "server": server, "clients": kept_states(state, server, self.clients)}

    @property
    def used(self) -> bool:
        """Return whether at least one update was applied this round; rounds without any update count as applied."""
        events = [event for event in self.events if "peer" not in event]
        if any(event["event"] == "round lost" for event in events):
            return False
        dropped = {event["client"] for event in events if event["event"] == "update dropped" and "task" not in event}
        return not self.done or not {d.client for d in self.done} <= dropped

    def log(self, event: str, fields: dict[str, Any]) -> None:
        """Log something that a person should see; of many events of a kind in a round the first few are shown."""
        self.events.append({"event": event, **fields})
        self.shown[event] += 1
        if self.shown[event] <= SHOWN:
            self.progress.event(f"round {self.number}: {event}{described(fields)}")
        elif self.shown[event] == SHOWN + 1:
            self.progress.event(f"round {self.number}: {event}: more of them are in metrics.jsonl of the run's folder")

    def without(self, client: str, **about: str) -> None:
        """Log that a client made no update, or none of a task."""
        why = "a hostile client sent nothing" if client in self.built.attacks else "local training gave nan or inf"
        self.log("update dropped", {"client": client, **about, "why": why})

    def record(self, kind: str, fields: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Keep a stage's record; a function in place of its fields is called here if the record is wanted."""
        if callable(fields) and not self.built.recipe.runtime.diagnostics:
            return
        if callable(fields):
            with self.ledger.phase(DIAGNOSTICS):
                fields = fields()
        self.records.append({"kind": kind, **fields})

    def payloads(
        self, executor: Executor, jobs: list[TrainJob], ordered: bool = False, counted: bool = True
    ) -> Iterator[Payload]:
        """Yield the clients' payloads as they finish, one at a time, so that only one is in memory.

        If `ordered`, their order does not depend on which worker is faster. The clients' new states are in `clients`.
        With `counted` the bytes of the jobs' messages and of the payloads are counted.
        """
        federation, messages = self.built.federation, {job.client: job.message for job in jobs} if counted else {}
        # the longest first, so that no worker is left alone with it at the end
        jobs = sorted(jobs, key=lambda j: -len(federation.trainers[j.client].train))
        done = executor.run(jobs, evaluate_trained="trained" in self.built.recipe.evaluation.models)
        for d in _in_order(done, jobs) if ordered else done:
            self.clients[d.client] = d.state
            if not d.payload.finite:
                self.without(d.client)
            elif d.payload.tasks:
                for task in federation.trainers[d.client].tasks.keys() - d.payload.tasks.keys():
                    self.without(d.client, task=task)
            if d.client in messages and d.client in federation.clients:
                self._count(d.client, d.payload, messages[d.client])
            self.ledger.add("local training, sum over clients", d.seconds)
            self.ledger.add("waiting for data, sum over clients", d.result.waiting)
            self.done.append(replace(d, payload=Payload(d.payload.row, d.payload.n), state={}))
            self.progress.client(self.number, len(self.done), len(jobs))
            yield d.payload
            del d  # before the next client trains

    def payloads_again(self, executor: Executor, jobs: list[TrainJob]) -> Iterator[Payload]:
        """Return the payloads of the same jobs once more, in order, where rows that were added up are needed."""
        for known in (self.done, self.clients, self.events):
            known.clear()
        return self.payloads(executor, jobs, ordered=True)

    def _count(self, client: str, payload: Payload, message: Message) -> None:
        """Count a client's bytes up and down, once for all with the same tasks and messages of the same form."""
        alike = (*self.built.federation.clients[client].tasks,), form(payload), message.form
        if alike not in self.counted or self.built.method.codec.varies:
            self.counted[alike] = tuple([count_bytes(self.built, client, sent) for sent in (payload, message)])
        self.ledger.up[client], self.ledger.down[client] = self.counted[alike]

    def conspired(self, payloads: Iterator[Payload]) -> Iterator[Payload]:
        """Return the payloads with what hostile clients send that know all others (see `built.conspired`)."""
        return conspired(self.built, self.built.attacks, payloads, self.plot, self.log)


def _in_order(done: Iterator[TrainDone], jobs: Sequence[TrainJob]) -> Iterator[TrainDone]:
    """Yield results in the order of their jobs; the executor is sent how many wait here for an earlier one."""
    waiting: dict[str, TrainDone] = {}
    for job in jobs:
        while job.client not in waiting:
            d = done.send(len(waiting) or None) if isinstance(done, Generator) else next(done)
            waiting[d.client] = d
            del d
        yield waiting.pop(job.client)
    for _ in done:  # to its end, where a pool looks at how long the round took
        pass


Advance = Callable[[Built, Executor, State, Round], tuple[State, Sequence[str]]]
"""Training and aggregation of one round: (state after it, the clients that took part)."""


def with_server(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
    """Make a round of clients and a server."""
    members = now.cohort()
    with now.ledger.phase("dispatch"):
        messages = dispatch(built, state["server"], members)
        jobs = [TrainJob(m, now.number, messages[m], state["clients"].get(m, {})) for m in members]
    with now.ledger.phase("train and aggregate"):
        ctx, step = now.ctx(members), server_step
        if executor.repeats and not built.attacks and adds_up(built, len(ctx.targets or ())):
            step = partial(server_step_by_sums, again=partial(now.payloads_again, executor, jobs))
        received = now.payloads(executor, jobs, ordered=step is not server_step)
        server = step(built, now.conspired(received) if built.attacks else received, state["server"], ctx)
    return now.after(state, server), members
