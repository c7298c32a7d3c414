"""The loop of rounds, the whole of a federated run whatever the engine, and the observers that may end it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from fedloom.core.context import State, new_secret
from fedloom.core.errors import StateError
from fedloom.core.untrusted import Among, Untrusted, like
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import constant_scores
from fedloom.federation.rounds.measure import SEEN, Key, headline, measure, trained_records, unmeasured
from fedloom.federation.rounds.messages import ALL
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.recovery import again, gave_up
from fedloom.federation.rounds.round import Advance, Round, with_server
from fedloom.federation.rounds.server import server_init
from fedloom.federation.rounds.worker import Executor
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import CONSTANT, GAVE_UP, NOTHING, validation_loss
from fedloom.training.flat import integer_buffers

SPENT = "stopped: privacy budget spent"
AGAIN = 2
"""Rounds that each further start of a deployment is charged for: the one that was begun when the run stopped, and the
one before it, from whose checkpoint the run goes on where the newest one is damaged."""


class Observer:
    """One of them. This one does nothing."""

    last: int = sys.maxsize
    """The last round that it allows, known once it has begun."""

    def __init__(self, built: Built, folder: RunFolder) -> None:
        self.built, self.folder = built, folder

    def begin(self, state: State) -> State:
        """Return the state with which a run starts, or goes on."""
        return state

    def after(self, state: State, now: Round) -> State:
        """Return the state after a round, which was measured; `stopped` says whether another one may follow."""
        return state


class GivingUp(Observer):
    """Ends a run that loses round after round; begun again, it tries once more."""

    def begin(self, state: State) -> State:
        return again(state) if gave_up(state) else state

    def after(self, state: State, now: Round) -> State:
        return state if now.used or not now.members else {**state, "idle": state.get("idle", 0) + 1}


class Budget(Observer):
    """Charges each round of a private run, and ends it before the round that it cannot pay."""

    def begin(self, state: State) -> State:
        """Return the state with the terms of privacy. Raises StateError where the rounds that are done had other terms.

        Where nodes answer, a run that goes on may release rounds again with other updates, so each time costs AGAIN
        more. That is saved before anything is sent.
        """
        recipe, terms = self.built.recipe, self.built.terms
        if terms is None or recipe.privacy is None:
            if "privacy" in state:
                raise StateError("privacy: null found, but the finished rounds were private; start a new run")
            return state
        terms.agree(state)
        terms.epsilon(1)  # without an accountant the run ends here, not after its first round
        more = state.get("again", 0) + AGAIN * (self.built.deployed and "privacy" in state)
        state = {**state, "privacy": asdict(terms), **({"again": more} if more else {})}
        self.last = terms.last(recipe.privacy.bound, recipe.training.rounds + more) - more
        state.pop("spent", None)  # the budget may be larger now
        if self.last <= state["round"] < recipe.training.rounds:
            state["spent"] = True
        if more:
            self.folder.save(state)
        return state

    def after(self, state: State, now: Round) -> State:
        terms, more = self.built.terms, state.get("again", 0)
        if terms is None:
            return state
        epsilon = terms.epsilon(now.number + more)
        now.record("privacy", {"epsilon": epsilon, "delta": terms.delta})
        if now.number != self.last or now.number == self.built.recipe.training.rounds:
            return state
        now.log(SPENT, {"epsilon": epsilon, "next": terms.epsilon(now.number + more + 1)})
        return {**state, "spent": True}


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
        """Return the state after one more score."""
        known = self.relative and self.best < float("inf")
        if score < self.best - self.min_delta * (abs(self.best) if known else 1):
            return replace(self, best=score, best_round=round, waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def stop(self) -> bool:
        """Return whether patience has run out."""
        return self.waited >= self.patience


class EarlyStopping(Observer):
    """Notes the best round, and ends a run when patience has run out."""

    def after(self, state: State, now: Round) -> State:
        config = self.built.recipe.early_stopping
        clients = self.built.federation.clients.values()
        weights = {c.id: {name: w for name, (_, w) in c.tasks.items()} for c in clients}
        score = validation_loss(now.metrics, weights) if config else None
        if config is None or score is None:
            return state
        rule = Patience(config.patience, config.min_delta, config.relative, **(state["early"] or {}))
        rule = rule.see(score, now.number)
        early = {"best": rule.best, "best_round": rule.best_round, "waited": rule.waited}
        state = {**state, "early": early, "stopped": rule.stop}
        if rule.stop:
            now.log("stopped early", {"best_round": rule.best_round, "best_score": rule.best})
        return state


class NoSteps(Observer):
    """Ends a run after its first round where local training makes no step: later rounds would change nothing."""

    def begin(self, state: State) -> State:
        if self.built.method.rules and not any(rule.repeat for rule in self.built.method.rules):
            self.last = 1
        return state


OBSERVERS: tuple[type[Observer], ...] = (GivingUp, Budget, EarlyStopping, NoSteps)
"""All of them, in the order in which they are asked."""


def stopped(state: State) -> str | None:
    """Return why no round may follow this state, in words; None if one may."""
    if gave_up(state):
        return GAVE_UP
    return SPENT if state.get("spent") else "stopped early" if state["stopped"] else None


def initial_state(built: Built) -> State:
    """Return the state of a run before its first round."""
    layout = built.layout
    initial, seed = layout.flatten(built.module).detach(), built.recipe.seed
    server = server_init(built.method, layout, initial, integer_buffers(built.module), seed)
    return {"round": 0, "server": server, "clients": {}, "early": None, "stopped": False}


def form_of(built: Built, first: State) -> Untrusted:
    """Return the form of the run's states, by the one before the first round, for a state that is read from a file.

    What stages and clients keep is left out: only their own code knows its form.
    """
    names = built.federation.trainers

    def server(state: State) -> State:
        if state["model"] is None:  # it is at a node
            return state
        model, memory = state["model"], state["rule"][ALL].items()
        vectors = like({name: x for name, x in memory if isinstance(x, Tensor) and x.shape == model.shape})
        rule = Among(dict.fromkeys((ALL, *names), vectors), more=False)
        personal = Among(dict.fromkeys(names, like(model)), more=False)
        return {**state, "stage": None, "rule": rule, "personal": personal}

    if "peers" in first:
        peers = {name: like({**own, "server": server(own["server"])}) for name, own in first["peers"].items()}
        return like({**first, "peers": Among(peers, more=False)})
    clients = Among(dict.fromkeys(names, like({})), more=False)
    return like({**first, "server": server(first["server"]), "clients": clients})


def status(state: State) -> str:
    """Return how a run ended: finished, `stopped` by an observer, or in vain."""
    return NOTHING if state.get("idle", 0) == state["round"] > 0 else stopped(state) or "finished"


class Saving:
    """Saves the states of a run: after every so many rounds or, with `every` None, as soon as the time since the last
    save is so long that saving takes at most SHARE of it."""

    SHARE = 0.05

    def __init__(self, folder: RunFolder, every: int | None) -> None:
        self.folder, self.every = folder, every
        self.best: State | None = None
        """The best state since the last save. It is saved just before the state that names its round."""
        self._next = 0.0  # the time from which on the next state is saved

    def save(self, state: State) -> None:
        """Save a state."""
        begun = time.monotonic()
        if self.best is not None:
            self.folder.save(self.best, "best")
            self.best = None
        self.folder.save(state)
        now = time.monotonic()
        self._next = now + (now - begun) * (1 / self.SHARE - 1)

    def due(self, round: int) -> bool:
        """Return whether the state after this round is to be saved, the same in all processes of a run."""
        if self.every is not None:
            return round % self.every == 0
        return self.folder.agreed(time.monotonic() >= self._next)


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

    The observers begin, and the initial model is measured. Then, until the last round or until an observer stops the
    run: `advance` (None: `with_server`) trains and aggregates, models are measured, `show` gets the states of which
    pictures are kept, the observers look, the round's line is written, and the state is saved.
    """
    recipe, evaluation, early = built.recipe, built.recipe.evaluation, built.recipe.early_stopping
    observers = [kind(built, folder) for kind in OBSERVERS]
    for observer in observers:
        state = observer.begin(state)
    rounds = min(recipe.training.rounds, *(observer.last for observer in observers))
    seen: dict[Key, Any] = {}
    secret = new_secret() if built.deployed else None
    saving = Saving(folder, recipe.runtime.saved_every)
    if state["round"] == 0:
        _measure_start(built, executor, folder, state, progress)
        saving.save(state)
    while state["round"] < rounds and not stopped(state):
        now = Round(built, state["round"] + 1, progress, secret=secret, before=state)
        last = now.number == rounds
        state, now.members = (advance or with_server)(built, executor, state, now)
        if now.plot:
            state = {**state, "attack": now.plot}
        with now.ledger.phase("evaluate"):
            now.metrics = trained_records(built, now.done)
            if last or now.number % evaluation.every == 0:
                full = evaluation.in_full(now.number, rounds)
                now.metrics += measure(built, executor, state, full, now.record, seen if last else None)
            if not last and evaluation.pictured(now.number):
                show(state)
        for observer in observers:
            state = observer.after(state, now)
        if early and early.restore_best and (state["early"] or {}).get("best_round") == now.number:
            saving.best = state
        line = now.line
        folder.write_round(line, now.ledger.bytes)
        if last or stopped(state) or saving.due(now.number):
            saving.save(state)
        progress.round(now.number, headline(built, line))
    return {**state, SEEN: seen} if seen else state


def _measure_start(built: Built, executor: Executor, folder: RunFolder, state: State, progress: Progress) -> None:
    """Measure the initial model, and write what is known before the first round."""
    start = Round(built, 0, progress)
    for why in unmeasured(built):
        start.log("not measured", {"why": why})
    if not built.deployed and (scores := constant_scores(built.federation)):  # empty where the data is at nodes
        start.record(CONSTANT, {"tasks": {task: list(score) for task, score in scores.items()}})
    start.metrics = measure(built, executor, state, record=start.record)
    folder.write_round(start.line, start.ledger.bytes)
