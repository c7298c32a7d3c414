"""What follows a run from round to round, keeps what it needs in the run's state, and may end the run."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

from fedloom.core.context import State
from fedloom.core.errors import StateError
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.recovery import again, gave_up
from fedloom.federation.rounds.round import Round
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import GAVE_UP, validation_loss

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
        """Return the state after a round, which was measured."""
        return state

    @staticmethod
    def stops(state: State) -> str | None:
        """Return why no round may follow, in words; None if one may."""
        return None


class Plot(Observer):
    """Remembers what hostile clients that know all others agreed on."""

    def after(self, state: State, now: Round) -> State:
        return {**state, "attack": now.plot} if now.plot else state


class GivingUp(Observer):
    """Ends a run that loses round after round; begun again, it tries once more."""

    def begin(self, state: State) -> State:
        return again(state) if gave_up(state) else state

    def after(self, state: State, now: Round) -> State:
        return state if now.used or not now.members else {**state, "idle": state.get("idle", 0) + 1}

    @staticmethod
    def stops(state: State) -> str | None:
        return GAVE_UP if gave_up(state) else None


class Budget(Observer):
    """Charges each round of a private run, and ends it before the round that it cannot pay."""

    def begin(self, state: State) -> State:
        """Raises StateError where the rounds that are done had other terms.

        Where nodes answer, a run that goes on may release rounds again with other updates, so each time costs AGAIN
        more. That is saved before anything is sent.
        """
        recipe, terms = self.built.recipe, self.built.terms
        if terms is None or recipe.privacy is None:
            if "privacy" in state:
                raise StateError("privacy: null found, but the rounds that are done were private; begin a new run")
            return state
        terms.agree(state)
        terms.epsilon(1)  # without an accountant the run ends here, not after its first round
        again = state.get("again", 0) + AGAIN * (self.built.deployed and "privacy" in state)
        state = {**state, "privacy": asdict(terms), **({"again": again} if again else {})}
        self.last = terms.last(recipe.privacy.bound, recipe.training.rounds + again) - again
        state.pop("spent", None)  # the budget may be larger now
        if self.last <= state["round"] < recipe.training.rounds:
            state["spent"] = True
        if again:
            self.folder.save(state)
        return state

    def after(self, state: State, now: Round) -> State:
        terms, again = self.built.terms, state.get("again", 0)
        if terms is None:
            return state
        epsilon = terms.epsilon(now.number + again)
        now.record("privacy", {"epsilon": epsilon, "delta": terms.delta})
        if now.number != self.last or now.number == self.built.recipe.training.rounds:
            return state
        now.log(SPENT, {"epsilon": epsilon, "next": terms.epsilon(now.number + again + 1)})
        return {**state, "spent": True}

    @staticmethod
    def stops(state: State) -> str | None:
        return SPENT if state.get("spent") else None


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


class EarlyStopping(Observer):
    """Keeps the best state, and ends a run when patience has run out."""

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
        if rule.best_round == now.number and config.restore_best:
            self.folder.save(state, "best")
        if rule.stop:
            now.log("stopped early", {"best_round": rule.best_round, "best_score": rule.best})
        return state

    @staticmethod
    def stops(state: State) -> str | None:
        return "stopped early" if state["stopped"] else None


OBSERVERS: tuple[type[Observer], ...] = (Plot, GivingUp, Budget, EarlyStopping)
"""All of them, in the order in which they are asked."""


def stopped(state: State) -> str | None:
    """Return why no round may follow this state; None if one may."""
    return next((why for kind in OBSERVERS if (why := kind.stops(state))), None)
