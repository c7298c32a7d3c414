"""A network and its peers, as a YAML file describes them, and a virtual clock. Free of torch.

Churn, loss, bandwidth and stragglers are pure functions of the scenario's seed and of what is asked, so that the
simulated seconds of rounds and messages replay bit for bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import RecipeError, nearest
from fedloom.core.settings.section import BelowOne, Count, Natural, NonNegative, Positive, Problems, Section, found
from fedloom.core.settings.yaml import checked, parse, to_yaml

Away = Annotated[
    tuple[Count, Count | None], Field(description="[first round away, round of return], the latter null for good")
]


class Presence(Section):
    """The presence of a peer: from round `joins` on, except first <= r < back for each (first, back) in `away`."""

    joins: Count = 1
    away: tuple[Away, ...] = ()

    def _problems(self) -> Problems:
        last: int | None = self.joins
        for first, back in self.away:
            if last is None or first < last or (back is not None and back <= first):
                yield (
                    f"expected ordered absences that do not overlap, none before round {self.joins}, found {self.away}"
                )
            last = back

    def there(self, round: int) -> bool:
        """Return whether the peer is present in a round (counted from 1)."""
        return round >= self.joins and not any(a <= round and (b is None or round < b) for a, b in self.away)


class Link(Section):
    """Links from `sender` to `receiver`, '*' for all; null means the scenario's value."""

    sender: str = "*"
    receiver: str = "*"
    bandwidth: Positive | None = None
    """bit/s."""
    latency: NonNegative | None = None
    """Seconds."""
    loss: BelowOne | None = None
    """Probability that a message is lost."""


class Stragglers(Section):
    """Peers that train `slowdown` times as long: each with probability `share`, drawn once or every round."""

    share: BelowOne = 0.0
    slowdown: Annotated[float, Field(ge=1)] = 5.0
    every_round: bool = False


class Scenario(Section):
    """A simulated network, replayable from its seed. Rounds count from 1; by default everything is instantaneous.

    Equal scenarios give equal results on every machine, in any order of calls.
    """

    seed: Natural = 0
    churn: dict[str, Presence] = Field(default_factory=dict)
    """Peer -> when it is there; others always are."""
    dropout: BelowOne = 0.0
    """Probability that a peer that should be there misses a round."""
    loss: BelowOne = 0.0
    """Probability that a message is lost."""
    bandwidth: Positive | None = None
    """bit/s of every link; null: no limit."""
    latency: NonNegative = 0.0
    """Seconds that a message takes in addition to those of its bytes."""
    links: tuple[Link, ...] = ()
    """Links that differ from the rest; where several fit, the last one that sets a value counts."""
    speed: Positive | None = None
    """Local steps a second; null: training takes no time."""
    speeds: dict[str, Positive] = Field(default_factory=dict)
    """Peer -> its own."""
    stragglers: Stragglers = Stragglers()

    @staticmethod
    def load(source: str | Path | Mapping[str, Any]) -> Scenario:
        """Load a scenario from a YAML file or a mapping. One RecipeError reports all problems, one per line."""
        fields = ", ".join(Scenario.model_fields)
        where = "the mapping" if isinstance(source, Mapping) else str(source)
        try:
            value = source if isinstance(source, Mapping) else parse(Path(source).read_text("utf-8"), where)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}: {error}") from None
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {fields}")
        return checked(Scenario, value, f"{where} is not a valid scenario:\n")

    def dump(self) -> str:
        """Return the scenario as YAML with every default written out; `load` reads it back to an equal scenario."""
        return to_yaml(self.model_dump(mode="json"))

    def check(self, peers: Sequence[str]) -> None:
        """Raise RecipeError if the scenario names a peer that does not exist."""
        ends = [name for link in self.links for name in (link.sender, link.receiver) if name != "*"]
        for where, names in (("churn", self.churn), ("speeds", self.speeds), ("links", ends)):
            for name in names:
                if name not in peers:
                    raise RecipeError(f"scenario.{where}: no peer {name!r}.{nearest(name, peers)}")

    def alive(self, peers: Sequence[str], round: int) -> tuple[str, ...]:
        """Return the peers that are present in a round, sorted."""
        return tuple(
            peer
            for peer in sorted(peers)
            if (peer not in self.churn or self.churn[peer].there(round))
            and not self._happens(self.dropout, "dropout", peer, round)
        )

    def lost(self, round: int, sender: str, receiver: str, attempt: int = 0) -> bool:
        """Return whether a message is lost. Each attempt to send it is drawn anew."""
        return self._happens(self._link("loss", sender, receiver), "loss", round, sender, receiver, attempt)

    def delay(self, nbytes: float, sender: str, receiver: str) -> float:
        """Return the seconds that a message takes: latency + 8 bytes / bandwidth."""
        bandwidth = self._link("bandwidth", sender, receiver)
        return float(self._link("latency", sender, receiver) + (8 * nbytes / bandwidth if bandwidth else 0.0))

    def training(self, steps: float, peer: str, round: int) -> float:
        """Return the seconds that local steps take."""
        speed = self.speeds.get(peer, self.speed)
        return 0.0 if speed is None else steps / speed * (self.stragglers.slowdown if self.slow(peer, round) else 1.0)

    def slow(self, peer: str, round: int) -> bool:
        """Return whether a peer is a straggler in a round."""
        when = (round,) if self.stragglers.every_round else ()
        return self._happens(self.stragglers.share, "straggler", peer, *when)

    def _link(self, name: str, sender: str, receiver: str) -> Any:
        value = getattr(self, name)
        for link in self.links:
            fits = link.sender in ("*", sender) and link.receiver in ("*", receiver)
            if fits and (own := getattr(link, name)) is not None:
                value = own
        return value

    def _happens(self, probability: float, *what: object) -> bool:
        return probability > 0 and derive_seed(self.seed, "scenario", *what) < probability * 2.0**63


Pair = tuple[str, str]
"""(sender, receiver)."""


@dataclass(frozen=True)
class Timing:
    """The course of a synchronous round; seconds since the start of the run.

    end       when the next round begins
    arrivals  (sender, receiver) -> the time at which the message arrived, also if late; no entry for lost ones
    late      messages that arrived after the deadline: the receivers mix without them
    slow      peers that were still training at the deadline; all of their messages are late
    """

    start: float
    end: float
    arrivals: dict[Pair, float]
    late: frozenset[Pair]
    slow: frozenset[str]


def synchronous(
    start: float, training: Mapping[str, float], transfers: Mapping[Pair, float], deadline: float | None = None
) -> Timing:
    """Return a round in which all peers train (peer -> seconds), then send (sender, receiver -> seconds), then mix.

    Links work in parallel. The round ends when all messages have arrived, or at the `deadline`. Raises ValueError for a
    negative time, for a sender that does not train, and, without a deadline, for a message that never arrives.
    """
    if deadline is not None and not deadline > 0:
        raise ValueError(f"deadline: expected a number of seconds above 0, found {deadline}")
    for what, times in (("training of", training), ("transfer", transfers)):
        for key, seconds in times.items():
            if not seconds >= 0 or (deadline is None and math.isinf(seconds)):
                raise ValueError(f"{what} {key!r}: expected finite seconds >= 0, found {seconds}")
    if unknown := sorted(sender for sender, _ in transfers if sender not in training):
        raise ValueError(f"sender {unknown[0]!r} takes no part; the participants are {', '.join(sorted(training))}")
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


@dataclass(frozen=True, order=True)
class Arrival:
    """An event at a peer: a message has arrived or, if the peer is the sender itself, its training has ended."""

    time: float
    receiver: str
    sender: str
    number: int
    """Counts the messages of a pair from 0."""
    item: Any = field(default=None, compare=False, repr=False)


class Events:
    """Asynchronous events in the order of their times: a priority queue, and the time of the event last taken.

    Events with the same time are ordered by (receiver, sender, number), not by insertion.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[Arrival] = []
        self._count: dict[Pair, int] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, after: float, sender: str, receiver: str, item: Any = None) -> Arrival:
        """Add an event of `sender` at `receiver` in `after` seconds. Raises ValueError unless finite and >= 0."""
        if not 0 <= after < math.inf:
            raise ValueError(f"{sender!r} to {receiver!r}: expected finite seconds >= 0, found {after}")
        number = self._count.get((sender, receiver), 0)
        self._count[sender, receiver] = number + 1
        arrival = Arrival(self.now + after, receiver, sender, number, item)
        heapq.heappush(self._heap, arrival)
        return arrival

    @property
    def next(self) -> float:
        """Time of the next event; infinite if there is none."""
        return self._heap[0].time if self._heap else math.inf

    def wait(self, until: float) -> None:
        """Move the clock forward to `until`. Raises ValueError if an event is earlier."""
        if until > self.next:
            raise ValueError(f"an event at {self.next} comes before {until}")
        self.now = max(self.now, until)

    def take(self) -> Arrival:
        """Remove and return the next event, and move the clock to its time. Raises IndexError if there is none."""
        if not self._heap:
            raise IndexError("no event is left")
        arrival = heapq.heappop(self._heap)
        self.now = arrival.time
        return arrival

    def state(self) -> dict[str, Any]:
        """Return everything as nested dictionaries and lists, fit for a checkpoint if the items are."""
        rows = [{**vars(arrival)} for arrival in sorted(self._heap)]
        counts = [[*pair, n] for pair, n in sorted(self._count.items())]
        return {"now": self.now, "events": rows, "counts": counts}

    @staticmethod
    def of(state: Mapping[str, Any]) -> Events:
        """Invert `state`."""
        events = Events(state["now"])
        events._count = {(sender, receiver): n for sender, receiver, n in state["counts"]}
        events._heap = [Arrival(**row) for row in state["events"]]
        heapq.heapify(events._heap)
        return events
