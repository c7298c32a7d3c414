"""A virtual clock: how long rounds and messages would take, without waiting for them. Free of torch.

Seconds are simulated. Nothing here draws a random number: what a transfer or a local training takes comes from a
`Scenario`, so times replay bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Pair = tuple[str, str]
"""(sender, receiver)."""


@dataclass(frozen=True)
class Timing:
    """How a synchronous round went; seconds since the start of the run.

    end       when the next round begins
    arrivals  (sender, receiver) -> when that message was there, also if late; no entry for lost ones
    late      messages that were not there at the deadline: the receivers mix without them
    slow      peers that were still training at the deadline; all that they send is late
    """

    start: float
    end: float
    arrivals: dict[Pair, float]
    late: frozenset[Pair]
    slow: frozenset[str]


def synchronous(
    start: float,
    training: Mapping[str, float],
    transfers: Mapping[Pair, float],
    deadline: float | None = None,
) -> Timing:
    """A round in which all peers train (peer -> seconds), then send (sender, receiver -> seconds), then mix.

    Links work side by side: one message does not wait for another. The round ends when all training and all messages
    are done, or `deadline` seconds after its start if that is earlier. On time means at the deadline or before.
    What takes infinitely long never arrives, which is an error without a deadline.

    Raises ValueError for a negative time or a sender that does not train.
    """
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline: expected a number of seconds above 0, found {deadline}")
    for what, times in (("training of", training), ("transfer", transfers)):
        for key, seconds in times.items():
            if not seconds >= 0 or (deadline is None and math.isinf(seconds)):
                raise ValueError(f"{what} {key!r}: expected finite seconds >= 0, found {seconds}")
    if unknown := sorted(sender for sender, _ in transfers if sender not in training):
        raise ValueError(f"sender {unknown[0]!r} takes no part; there are {', '.join(sorted(training))}")
    arrivals = {pair: start + training[pair[0]] + seconds for pair, seconds in sorted(transfers.items())}
    ready = {peer: start + seconds for peer, seconds in training.items()}
    done = max([start, *ready.values(), *arrivals.values()])
    end = done if deadline is None else min(done, start + deadline)
    return Timing(
        start,
        end,
        arrivals,
        frozenset(pair for pair, at in arrivals.items() if at > end),
        frozenset(peer for peer, at in ready.items() if at > end),
    )


@dataclass(frozen=True)
class Arrival:
    """An event at a peer: a message has come or, where it is the sender itself, its training has ended."""

    time: float
    receiver: str
    sender: str
    number: int
    """Counts the messages of a pair from 0."""
    item: Any = field(default=None, compare=False, repr=False)


class Events:
    """Asynchronous events in the order of their times: a priority queue, and the time of the event last taken.

    Events of the same time are ordered by (receiver, sender, number), so that it does not matter which pair's event was
    put in first.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, str, str, int, Arrival]] = []
        self._count: dict[Pair, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, after: float, sender: str, receiver: str, item: Any = None) -> Arrival:
        """An event of `sender` at `receiver` in `after` seconds. Raises ValueError unless they are finite and >= 0."""
        if not 0 <= after < math.inf:
            raise ValueError(f"{sender!r} to {receiver!r}: expected finite seconds >= 0, found {after}")
        number = self._count.get((sender, receiver), 0)
        self._count[sender, receiver] = number + 1
        arrival = Arrival(self.now + after, receiver, sender, number, item)
        self._push(arrival)
        return arrival

    @property
    def next(self) -> float:
        """Time of the next event; infinite where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def wait(self, until: float) -> None:
        """Move the clock on to `until`. Raises ValueError where an event is earlier."""
        if until > self.next:
            raise ValueError(f"an event at {self.next} comes before {until}")
        self.now = max(self.now, until)

    def take(self) -> Arrival:
        """Take the next event, and move the clock to its time. Raises IndexError where there is none."""
        if not self._heap:
            raise IndexError("no event is left")
        arrival = heapq.heappop(self._heap)[-1]
        self.now = arrival.time
        return arrival

    def state(self) -> dict[str, Any]:
        """Everything as nested dictionaries and lists, fit for a checkpoint if the items are."""
        rows = [{**vars(arrival)} for *_, arrival in sorted(self._heap, key=lambda entry: entry[:4])]
        counts = [[*pair, n] for pair, n in sorted(self._count.items())]
        return {"now": self.now, "events": rows, "counts": counts}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Events:
        """Inverse of `state`."""
        events = Events(state["now"])
        events._count = {(sender, receiver): n for sender, receiver, n in state["counts"]}
        for row in state["events"]:
            events._push(Arrival(**row))
        return events

    def _push(self, a: Arrival) -> None:
        heapq.heappush(self._heap, (a.time, a.receiver, a.sender, a.number, a))
