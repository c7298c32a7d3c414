"""What a network and its peers are like, as a YAML file states it: churn, loss, bandwidth, stragglers. Free of torch.

Every question has one answer: a pure function of the scenario's seed and of what is asked, whatever was asked before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from fedloom.core.context import derive_seed
from fedloom.errors import RecipeError, nearest
from fedloom.settings.section import Count, NonNegative, Positive, Section

Share = Annotated[float, Field(ge=0, lt=1)]
Away = Annotated[
    tuple[Count, Count | None],
    Field(description="[first round away, round of return], the latter null for good"),
]


class Presence(Section):
    """When a peer is there: from round `joins` on, but for rounds first <= r < back of each (first, back) in `away`."""

    joins: Count = 1
    away: tuple[Away, ...] = ()

    @model_validator(mode="after")
    def _in_order(self) -> Presence:
        last: int | None = self.joins
        for first, back in self.away:
            if last is None or first < last or (back is not None and back <= first):
                raise ValueError(f"absences must follow each other, none before round {self.joins}, found {self.away}")
            last = back
        return self

    def there(self, round: int) -> bool:
        """Whether the peer is there in a round (from 1)."""
        return round >= self.joins and not any(a <= round and (b is None or round < b) for a, b in self.away)


class Link(Section):
    """Links from `sender` to `receiver`, '*' for all; what is null is as in the scenario."""

    sender: str = "*"
    receiver: str = "*"
    bandwidth: Positive | None = None
    """bit/s."""
    latency: NonNegative | None = None
    """Seconds."""
    loss: Share | None = None
    """Probability that a message is lost."""


class Stragglers(Section):
    """Peers that train `slowdown` times as long: each with probability `share`, for good or drawn anew every round."""

    share: Share = 0.0
    slowdown: Annotated[float, Field(ge=1)] = 5.0
    every_round: bool = False


class Scenario(Section):
    """A network that can be replayed from its seed. Rounds count from 1; without settings everything is instantaneous.

    Equal scenarios answer alike on every machine and in any order of questions.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    churn: dict[str, Presence] = Field(default_factory=dict)
    """Peer -> when it is there; others always are."""
    dropout: Share = 0.0
    """Probability that a peer that should be there misses a round."""
    loss: Share = 0.0
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
        """From a YAML file or a mapping. All problems are reported in one RecipeError, one line each."""
        from fedloom.settings.problems import explain, found
        from fedloom.settings.section import strict
        from fedloom.settings.yaml import parse

        fields = ", ".join(Scenario.model_fields)
        where = "the mapping" if isinstance(source, Mapping) else str(source)
        try:
            value = source if isinstance(source, Mapping) else parse(Path(source).read_text("utf-8"), where)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}: {error}") from None
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {fields}")
        try:
            return strict(Scenario, value)
        except ValidationError as error:
            lines = [f"{path}: {message}" for path, message in explain(error, Scenario)]
            raise RecipeError("\n".join([f"{where} is not a valid scenario:", *lines])) from None

    def dump(self) -> str:
        """As YAML with every default written out; `load` reads it back to an equal scenario."""
        from fedloom.settings.yaml import to_yaml

        return to_yaml(self.model_dump(mode="json"))

    def check(self, peers: Sequence[str]) -> None:
        """Raise RecipeError for a peer that is named here but does not exist."""
        ends = [name for link in self.links for name in (link.sender, link.receiver) if name != "*"]
        for where, names in (("churn", self.churn), ("speeds", self.speeds), ("links", ends)):
            for name in names:
                if name not in peers:
                    raise RecipeError(f"scenario.{where}: no peer {name!r}.{nearest(name, peers)}")

    def alive(self, peers: Sequence[str], round: int) -> tuple[str, ...]:
        """The peers that are there in a round, sorted."""
        return tuple(
            peer
            for peer in sorted(peers)
            if (peer not in self.churn or self.churn[peer].there(round))
            and not self._happens(self.dropout, "dropout", peer, round)
        )

    def lost(self, round: int, sender: str, receiver: str, attempt: int = 0) -> bool:
        """Whether a message is lost. Each attempt to send it again has its own answer."""
        return self._happens(self._link("loss", sender, receiver), "loss", round, sender, receiver, attempt)

    def delay(self, nbytes: float, sender: str, receiver: str) -> float:
        """Seconds that a message of so many bytes takes: latency + 8 bytes / bandwidth."""
        bandwidth = self._link("bandwidth", sender, receiver)
        return float(self._link("latency", sender, receiver) + (8 * nbytes / bandwidth if bandwidth else 0.0))

    def training(self, steps: float, peer: str, round: int) -> float:
        """Seconds that so many local steps take."""
        speed = self.speeds.get(peer, self.speed)
        return 0.0 if speed is None else steps / speed * (self.stragglers.slowdown if self.slow(peer, round) else 1.0)

    def slow(self, peer: str, round: int) -> bool:
        """Whether a peer is a straggler in a round."""
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
