"""The peers of a run, who may hear whom, and the network between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedloom import peers as blocks
from fedloom.core.layout import Layout
from fedloom.engines.peers.transport import Network
from fedloom.methods.method import Method
from fedloom.peers.graph import Graph
from fedloom.peers.scenario import Scenario
from fedloom.recipes.schema import PeersSection
from fedloom.rounds.federation import Federation


@dataclass(eq=False)
class Community:
    """The peers of a run that are in this process, and the network between all of them.

    `initial` are the parameters (p) that all start from. `features` gives a peer's feature statistics (2 x C), where a
    recipe wants them.
    """

    method: Method
    layout: Layout
    federation: Federation
    config: PeersSection
    seed: int
    rounds: int
    initial: Tensor
    features: Callable[[Any], Tensor] | None = None
    connect: Callable[[Callable[[int, str, str, int], bool] | None], Network] = Network
    outputs: Callable[[Any, Tensor], Mapping[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        self.names = tuple(sorted(self.federation.clients))
        self.scenario = self.config.scenario or Scenario()
        self.scenario.check(self.names)
        self.network = self.connect(None if self.config.scenario is None else self.scenario.lost)
        self._drawn: tuple[int, Graph] | None = None

    def graph(self, round: int) -> Graph:
        """Who may hear whom in a round: everybody can work it out."""
        section = self.config.graph
        when = round if section.every else 1  # one graph for the whole run is drawn once
        if self._drawn is None or self._drawn[0] != when:
            graph = blocks.candidates(
                section.name, self.names, seed=self.seed, round=when, every=section.every, **section.params
            )
            self._drawn = when, graph
        return self._drawn[1]
