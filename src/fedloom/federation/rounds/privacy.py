"""The privacy cost of rounds: epsilon after so many of them, the noise for a wanted epsilon, and where to stop.

Two federations are neighbours if one has one client more (Poisson sampling, add or remove one), or another client in
the place of one (a fixed number, and clients that add noise themselves: replace one). A sum of rows of norm at most
`clip` differs by clip between the former and by 2 clip between the latter, for which the noise counts half.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, StateError
from fedloom.core.lazy import need
from fedloom.federation.recipes.runtime import Privacy
from fedloom.federation.rounds.federation import drawn_of
from fedloom.training.config import Training

LEARNS = 2.0
"""Where a round's noise is longer than this many clipped updates, little is learned (docs/privacy.md has the runs)."""


@dataclass(frozen=True)
class PrivacyTerms:
    """The privacy cost of one round: the noise in units of `clip`, and how its clients are drawn."""

    noise: float
    delta: float
    accountant: str
    trust: str
    sampling: str
    clients: int
    """All clients, where always as many are drawn; else 0."""
    drawn: float
    """The number of clients drawn from them; with Poisson sampling the probability of each."""
    statistics: bool = False
    """True: all clients also send statistics once, before the first round, with the same noise."""

    def epsilon(self, rounds: int) -> float:
        """Return epsilon after so many rounds."""
        return _epsilon(self, rounds)

    def last(self, bound: float | None, rounds: int) -> int:
        """Return the last of at most `rounds` rounds that `bound` pays."""
        if bound is None or self.epsilon(rounds) <= bound:
            return rounds
        return bisect_right(range(1, rounds), bound, key=self.epsilon)

    def agree(self, state: State) -> None:
        """Raise StateError if the rounds that are done, or were begun, had other terms."""
        before, now = state.get("privacy"), asdict(self)
        before = None if before is None else {"statistics": False, **before}
        if ("privacy" in state or state["round"]) and before != now:
            changed = "no privacy" if before is None else {k: v for k, v in before.items() if v != now[k]}
            raise StateError(
                f"privacy: {now} found, but the {state['round']} finished rounds had {changed}; start a new run"
            )


def terms_of(section: Privacy, training: Training, clients: int, statistics: bool = False) -> PrivacyTerms:
    """Return the terms of a section with so many clients, and perhaps statistics. Raises RecipeError."""
    if clients > 1 and section.delta * clients >= 1:
        raise RecipeError(
            f"privacy.delta: {section.delta:g} found, expected less than one over the number of clients ({clients}): a "
            "larger delta would allow publishing all data of one client"
        )
    fixed = section.trust == "central" and section.sampling == "fixed"
    share = training.participation if section.trust == "central" else 1.0
    drawn = drawn_of(clients, share) if fixed else share
    about = section.model_dump(include={"delta", "accountant", "trust", "sampling"})
    about |= {"clients": clients if fixed else 0, "drawn": drawn, "statistics": statistics}
    noise = section.noise or _calibrated(tuple(about.items()), section.epsilon or math.inf, training.rounds)
    terms = PrivacyTerms(noise, **about)
    if section.bound is not None and terms.last(section.bound, 1) < 1:
        raise RecipeError(
            f"privacy.budget: {section.bound:g} found, but one round alone costs {terms.epsilon(1):.3g}; add more noise"
        )
    return terms


def share_of(training: Training, terms: PrivacyTerms) -> float:
    """Return the part of all clients that is expected in a round."""
    return terms.drawn / terms.clients if terms.clients else training.participation


def ratio(terms: PrivacyTerms, d: int, clients: int, share: float) -> float:
    """Return the norm of a round's noise in the expected clients' mean, over the clipping norm, for d parameters."""
    expected = share * clients
    return terms.noise * math.sqrt(d) / (expected if terms.trust == "central" else math.sqrt(expected))


def forecast(
    section: Privacy, terms: PrivacyTerms, d: int, clients: int, share: float, rounds: int, least: float = 0
) -> list[str]:
    """Return the cost of a run and whether it can learn, in sentences. `least`: the clients of the smallest cluster."""
    cost = f"epsilon {terms.epsilon(0):.4g} of it" if terms.statistics else ""
    sent = [f"privacy: the table's statistics, which all clients send once with noise, cost {cost}"] if cost else []
    size, last = ratio(terms, d, clients, share), terms.last(section.bound, rounds)
    stops = "" if last == rounds else f"; the budget of {section.bound:g} is spent after {last} rounds"
    clustered = 0 < least < math.inf
    fewer = share * clients / least if clustered else 1.0
    hopes = "this will not learn" if size * fewer > LEARNS else "this can learn"
    small = [f"privacy: in a cluster of {least} clients {fewer:.3g} times more than that: {hopes}"] if clustered else []
    return [
        f"privacy: noise multiplier {terms.noise:.4g}: epsilon {terms.epsilon(last):.4g} at delta {terms.delta:g} "
        f"after {last} rounds ({terms.accountant}){stops}",
        *sent,
        f"privacy: a round's noise is {size:.3g} times as long as a clipped update ({share * clients:g} clients "
        f"expected in a round, {d:,} shared parameters){'' if small else f': {hopes}'}",
        *small,
    ]


@lru_cache(maxsize=4096)
def _epsilon(terms: PrivacyTerms, rounds: int) -> float:
    if rounds == 0 and not terms.statistics:
        return 0.0
    dp = need("dp_accounting", "privacy")
    logging.getLogger("absl").setLevel(logging.ERROR)  # it says of each order that it leaves out that it does so
    relations = dp.NeighboringRelation
    relation = relations.REPLACE_ONE if terms.clients else relations.ADD_OR_REMOVE_ONE
    if terms.accountant == "pld":
        accountant = need("dp_accounting.pld", "privacy").PLDAccountant(relation)
    else:
        accountant = need("dp_accounting.rdp", "privacy").RdpAccountant(neighboring_relation=relation)
    if terms.statistics:  # a round of all clients
        accountant.compose(_event(replace(terms, drawn=terms.clients or 1.0)))
    if rounds:
        accountant.compose(_event(terms), rounds)
    return float(accountant.get_epsilon(terms.delta))


def _event(terms: PrivacyTerms) -> Any:
    dp = need("dp_accounting", "privacy")
    if terms.clients:
        gaussian = dp.GaussianDpEvent(terms.noise / 2)
        all_ = terms.drawn == terms.clients
        return gaussian if all_ else dp.SampledWithoutReplacementDpEvent(terms.clients, int(terms.drawn), gaussian)
    if terms.trust == "local":
        return dp.GaussianDpEvent(terms.noise / 2)
    gaussian = dp.GaussianDpEvent(terms.noise)
    return gaussian if terms.drawn == 1 else dp.PoissonSampledDpEvent(terms.drawn, gaussian)


@lru_cache(maxsize=64)
def _calibrated(about: tuple[tuple[str, Any], ...], epsilon: float, rounds: int) -> float:
    """Return the least noise, to a thousandth, of an epsilon of at most so much after so many rounds."""

    def cost(noise: float) -> float:
        return PrivacyTerms(noise, **dict(about)).epsilon(rounds)

    low, high = 0.0, 1.0
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise RecipeError(
                f"privacy.epsilon: {epsilon:g} found, which no amount of noise reaches in {rounds} rounds; raise it"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
