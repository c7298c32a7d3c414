"""Local training in parts: phases, models beside the shared one, and tuning before a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fedloom.core.layout import Selector
from fedloom.training.rules import LocalRule


@dataclass(frozen=True)
class Phase:
    """Train the selected parameters only, for a share of a round's batches. The others are frozen: no step, no decay,
    no momentum, and their norm layers keep their statistics."""

    select: Selector
    share: float = 1.0


@dataclass(frozen=True)
class Stream:
    """A model of the client's own, trained beside the shared one in every round and never sent.

    It starts as the first received model. Its rules get the broadcast "anchor", the model received in the round.
    """

    rules: tuple[LocalRule, ...] = ()


@dataclass(frozen=True)
class Tune:
    """Before a personal model is measured or saved, train the selected parameters on the client's data; the result is
    not kept for the next round."""

    epochs: int
    select: Selector = "*"


def ends(phases: tuple[Phase, ...], batches: int) -> list[int]:
    """The number of batches after which each phase ends; every phase has at least one if there are enough."""
    total = sum(p.share for p in phases)
    marks = [round(batches * share / total) for share in accumulate(p.share for p in phases)]
    for i in range(len(marks)):
        marks[i] = max(marks[i], min(i + 1, batches))
    for i in reversed(range(len(marks) - 1)):
        marks[i] = min(marks[i], max(marks[i + 1] - 1, min(i + 1, batches)))
    return marks
