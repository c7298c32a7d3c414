"""The runner on one machine: the whole of a federated run, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedloom.core.codecs import ByteCount
from fedloom.core.context import Ctx, State, new_secret
from fedloom.core.errors import StateError
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient, cohort
from fedloom.federation.rounds.hostile import conspired
from fedloom.federation.rounds.measure import headline, measure, train_records, train_seconds, trained_records
from fedloom.federation.rounds.messages import Message, Payload, count_down, count_up, form, rows_of
from fedloom.federation.rounds.privacy import AGAIN, SPENT
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.recovery import again, gave_up, kept
from fedloom.federation.rounds.refusals import unmeasured
from fedloom.federation.rounds.server import dispatch, server_init, server_step
from fedloom.federation.rounds.worker import Executor, TrainDone, TrainJob
from fedloom.federation.runs.checkpoint import map_tensors
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.ledger import Ledger
from fedloom.federation.runs.reader import DIAGNOSTICS, GAVE_UP, NOTHING, described, validation_loss
from fedloom.training.flat import integer_buffers


def initial_state(built: Built) -> State:
    """The state of a run before its first round."""
    layout = built.layout
    server = server_init(built.method, layout, layout.flatten(built.module).detach(), integer_buffers(built.module))
    return {"round": 0, "server": server, "clients": {}, "early": None, "stopped": False}


def status(state: State) -> str:
    """How a run that is over ended: finished, stopped early, out of budget (SPENT), or in vain (NOTHING, GAVE_UP)."""
    if state.get("idle", 0) == state["round"] > 0:
        return NOTHING
    if gave_up(state):
        return GAVE_UP
    if state.get("spent"):
        return SPENT
    return "stopped early" if state["stopped"] else "finished"


Advance = Callable[[Built, Executor, State, "Round"], tuple[State, Sequence[str]]]
"""Training and aggregation of one round: (state after it, who took part)."""


def run_rounds(
    built: Built,
    executor: Executor,
    folder: RunFolder,
    state: State,
    progress: Progress,
    advance: Advance | None = None,
    show: Callable[[State], None] = lambda state: None,
) -> State:
    """Run from the round after `state` to the last one, with checkpoints. Returns the last state.

    Without `advance` the run has a server. `show` is given the states of which pictures are kept on the way. A run that
    gave up is tried again.
    """
    recipe = built.recipe
    evaluation = recipe.evaluation
    state = again(state) if gave_up(state) else state
    rounds, state = paid(built, state)
    if state.get("again"):
        folder.save(state)  # what this start may cost is known before anything is sent
    secret = new_secret() if built.deployed else None
    if state["round"] == 0:
        start = Round(built, 0, progress)
        for why in unmeasured(built):
            start.log("not measured", {"why": why})
        metrics = measure(built, executor, state, record=start.record)
        line = {"round": 0, "cohort": [], "train": [], "metrics": metrics, "events": start.events, **start.recorded}
        folder.write_round(line, Ledger())
        folder.save(state)
    while state["round"] < rounds and not (state["stopped"] or gave_up(state)):
        now = Round(built, state["round"] + 1, progress, secret=secret, plot=dict(state.get("attack", {})))
        last = now.number == rounds
        state, members = (advance or with_server)(built, executor, state, now)
        if now.plot:
            state = {**state, "attack": now.plot}
        with now.ledger.phase("evaluate"):
            records = trained_records(built, now.done)
            if last or now.number % evaluation.every == 0:
                records += measure(built, executor, state, evaluation.in_full(now.number, rounds), now.record)
            if not last and evaluation.pictured(now.number):
                show(state)
        state = _charged(built, state, now, last)
        state = _watch(built, folder, state, records, now)
        if members and not now.used:
            state = {**state, "idle": state.get("idle", 0) + 1}
        line = {
            "round": now.number,
            "cohort": list(members),
            "train": train_records(now.done),
            "metrics": records,
            "events": now.events,
            "seconds_of": train_seconds(now.done),
            **now.recorded,
        }
        folder.write_round(line, now.ledger)
        if last or state["stopped"] or gave_up(state) or now.number % recipe.runtime.checkpoint_every == 0:
            folder.save(state)
        progress.round(now.number, headline(built, line))
    return state


def paid(built: Built, state: State) -> tuple[int, State]:
    """How many rounds the run may have, and its state with what these cost in privacy.

    Where nodes answer, a run that goes on may release rounds again with other updates, so each time costs AGAIN more.
    """
    recipe, terms = built.recipe, built.terms
    if terms is None or recipe.privacy is None:
        if "privacy" in state:
            raise StateError("privacy: null found, but the rounds that are done were private; begin a new run")
        return recipe.training.rounds, state
    terms.agree(state)
    terms.epsilon(1)  # without an accountant the run ends here, not after its first round
    again = state.get("again", 0) + AGAIN * (built.deployed and "privacy" in state)
    state = {**state, "privacy": asdict(terms), **({"again": again} if again else {})}
    rounds = terms.last(recipe.privacy.bound, recipe.training.rounds + again) - again
    if rounds <= state["round"] < recipe.training.rounds:
        state["spent"] = True
    return rounds, state


def _charged(built: Built, state: State, now: Round, last: bool) -> State:
    """The state after a round with its cost in privacy on record."""
    terms = built.terms
    if terms is None:
        return state
    again = state.get("again", 0)
    epsilon = terms.epsilon(now.number + again)
    now.record("privacy", {"epsilon": epsilon, "delta": terms.delta})
    if last and now.number < built.recipe.training.rounds:
        now.log(SPENT, {"epsilon": epsilon, "next": terms.epsilon(now.number + again + 1)})
        return {**state, "spent": True}
    return state


def with_server(built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
    """A round of clients and a server."""
    method = built.method
    members = now.cohort()
    with now.ledger.phase("dispatch"):
        messages = dispatch(method, built.layout, built.federation, state["server"], members)
        jobs = [TrainJob(m, now.number, messages[m], state["clients"].get(m, {})) for m in members]
    ctx = now.ctx(members)
    with now.ledger.phase("train and aggregate"):
        received = now.conspired(now.payloads(executor, jobs, messages))
        server = server_step(method, built.layout, built.federation, received, state["server"], ctx)
    return now.after(state, server), members


@dataclass
class Round:
    """What one round leaves behind beside the state of the server or of the peers."""

    built: Built
    number: int
    progress: Progress
    ledger: Ledger = field(default_factory=Ledger)
    events: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    done: list[TrainDone] = field(default_factory=list)
    clients: State = field(default_factory=dict)
    secret: bytes | None = field(default=None, repr=False)
    plot: State = field(default_factory=dict)
    """What hostile clients that know all others remember together."""

    def cohort(self) -> tuple[str, ...]:
        """Who takes part at a server."""
        recipe = self.built.recipe
        alone = recipe.privacy is not None and recipe.privacy.sampling == "poisson"
        clients, key = list(self.built.federation.trainers), recipe.seed if self.secret is None else self.secret
        return cohort(clients, recipe.training.participation, key, self.number, alone)

    def ctx(self, members: Sequence[str]) -> Ctx:
        """The context of the server's stages, with these clients as participants."""
        recipe, method, federation = self.built.recipe, self.built.method, self.built.federation
        return Ctx(
            self.number,
            recipe.seed,
            rows_of(method, federation, members),
            len(rows_of(method, federation, federation.trainers)),
            recipe.training.rounds,
            log=self.log,
            record=self.record,
            secret=self.secret,
            held=federation.held,
        )

    def after(self, state: State, server: State) -> State:
        """The state after the round, from the one before and the server's new one."""
        clients = {**state["clients"], **kept(state["server"], server, self.clients)}
        return {**state, "round": self.number, "server": server, "clients": clients}

    @property
    def used(self) -> bool:
        """Whether the round was not lost, and some update that was made was not dropped."""
        events = [event for event in self.events if "peer" not in event]
        if any(event["event"] == "round lost" for event in events):
            return False
        if not self.done:
            return True
        dropped = {event["client"] for event in events if event["event"] == "update dropped" and "task" not in event}
        return not {d.client for d in self.done} <= dropped

    def log(self, event: str, fields: dict[str, Any]) -> None:
        """Log something that a person should see."""
        self.events.append({"event": event, **fields})
        self.progress.event(f"round {self.number}: {event}{described(fields)}")

    def without(self, client: str, **about: str) -> None:
        """Log that a client made no update, or none of a task."""
        why = "a hostile client sent nothing" if client in self.built.attacks else "local training gave nan or inf"
        self.log("update dropped", {"client": client, **about, "why": why})

    def record(self, kind: str, fields: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Keep a stage's record; a function in place of its fields is called here if the record is wanted."""
        if callable(fields):
            if not self.built.recipe.runtime.diagnostics:
                return
            with self.ledger.phase(DIAGNOSTICS):
                fields = fields()
        self.records.append({"kind": kind, **fields})

    @property
    def recorded(self) -> dict[str, list[dict[str, Any]]]:
        """The records, without those that have a file of their own; empty ones are left out."""
        parts: dict[str, list[dict[str, Any]]] = {"records": [], DIAGNOSTICS: []}
        for record in self.records:
            if record["kind"] == DIAGNOSTICS:
                parts[DIAGNOSTICS].append({k: v for k, v in record.items() if k != "kind"})
            else:
                parts["records"].append(record)
        return {name: records for name, records in parts.items() if records}

    def payloads(self, executor: Executor, jobs: list[TrainJob], messages: Mapping[str, Message]) -> Iterator[Payload]:
        """The clients' payloads as they finish, one at a time, so that only one is held."""
        clients = self.built.federation.clients
        counted: dict[Any, tuple[ByteCount, ByteCount]] = {}
        for payload in self.trained(executor, jobs):
            client = payload.row[0]
            if client in clients:  # what one trainer with the examples of all has goes nowhere
                message = messages[client]
                alike = (*clients[client].tasks,), form(payload), form(message)
                if alike not in counted or self.built.method.codec.varies:
                    counted[alike] = self._counted(clients[client], payload, message)
                self.ledger.up[client], self.ledger.down[client] = counted[alike]
            yield payload
            del payload  # before the next client trains

    def _counted(self, client: BuiltClient, payload: Payload, message: Message) -> tuple[ByteCount, ByteCount]:
        """Bytes up and down."""
        method, layout, federation = self.built.method, self.built.layout, self.built.federation
        up = count_up(method, layout, federation, payload)
        return up, count_down(method, layout, federation, client, message)

    def conspired(self, payloads: Iterable[Payload]) -> Iterator[Payload]:
        """The payloads with what hostile clients send that know all others (see `hostile.conspired`)."""
        built = self.built
        shared = built.method.shared_part(built.layout)
        return conspired(built.attacks, built.method, shared, built.federation, payloads, self.plot, self.log)

    def trained(self, executor: Executor, jobs: list[TrainJob]) -> Iterator[Payload]:
        """The results of local training as they finish; the clients' new states are in `clients`."""
        federation = self.built.federation
        # the longest first, so that no worker is left alone with it at the end
        jobs = sorted(jobs, key=lambda j: -len(federation.trainers[j.client].train))
        for d in executor.run(jobs, evaluate_trained="trained" in self.built.recipe.evaluation.models):
            # shared memory between processes is scarce: keep a copy
            self.clients[d.client] = map_tensors(d.state, lambda t: t.clone() if t.is_shared() else t)
            if not d.payload.finite:
                self.without(d.client)
            elif d.payload.tasks:
                for task in federation.trainers[d.client].tasks.keys() - d.payload.tasks.keys():
                    self.without(d.client, task=task)
            self.ledger.add("local training, sum over clients", d.seconds)
            self.ledger.add("waiting for data, sum over clients", d.result.waiting)
            empty = Payload(d.payload.row, d.payload.n)
            self.done.append(TrainDone(d.client, empty, d.result, {}, d.seconds, d.trained))
            self.progress.client(self.number, len(self.done), len(jobs))
            yield d.payload
            del d  # before the next client trains


@dataclass(frozen=True)
class Patience:
    """Counts evaluations without improvement (DFMTL thesis, section 6.1.3; its rule replayed on its published runs).

    An improvement is score < best - min_delta, as in the thesis' release, or, with `relative`, score < best -
    min_delta |best|, as in its Table 6.3. nan never improves, not even at first.
    """

    patience: int
    min_delta: float = 0.0
    relative: bool = False
    best: float = float("inf")
    best_round: int = 0
    waited: int = 0

    def see(self, score: float, round: int) -> Patience:
        """The state after one more score."""
        known = self.relative and self.best < float("inf")
        if score < self.best - self.min_delta * (abs(self.best) if known else 1):
            return replace(self, best=score, best_round=round, waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def stop(self) -> bool:
        """Whether patience has run out."""
        return self.waited >= self.patience


def _watch(built: Built, folder: RunFolder, state: State, records: list[dict[str, Any]], now: Round) -> State:
    """Early stopping: keep the best state, and stop when patience has run out."""
    config = built.recipe.early_stopping
    weights = {c.id: {name: w for name, (_, w) in c.tasks.items()} for c in built.federation.clients.values()}
    score = validation_loss(records, weights) if config else None
    if config is None or score is None:
        return state
    rule = Patience(config.patience, config.min_delta, config.relative, **(state["early"] or {}))
    early = rule.see(score, now.number)
    state = {
        **state,
        "early": {"best": early.best, "best_round": early.best_round, "waited": early.waited},
        "stopped": early.stop,
    }
    if early.best_round == now.number and config.restore_best:
        folder.save(state, "best")
    if early.stop:
        now.log("stopped early", {"best_round": early.best_round, "best_score": early.best})
    return state
