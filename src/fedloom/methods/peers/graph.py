"""Candidate graphs: who may hear whom in a round. Deterministic from (seed, round), free of torch.

A registered topology is a function of (sorted names, seed) to a networkx graph on their positions 0..N-1; its
keyword-only parameters are what a recipe may state. Random ones depend on networkx's or numpy's random streams.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RecipeError, nearest
from fedloom.core.lazy import need
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import Count, UnitInterval, found
from fedloom.core.settings.yaml import checked

TOPOLOGIES = Registry("topology", gives=("networkx:Graph",))
Matrix = np.ndarray[Any, np.dtype[np.float64]]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Peers (sorted) and links (sender, receiver). In an undirected graph every link has its opposite."""

    peers: tuple[str, ...]
    links: frozenset[tuple[str, str]]

    def __post_init__(self) -> None:
        if list(self.peers) != sorted(set(self.peers)):
            raise ValueError(f"peers must be sorted and distinct, found {self.peers}")
        known = set(self.peers)
        for sender, receiver in self.links:
            if sender == receiver or not {sender, receiver} <= known:
                raise ValueError(f"link {sender!r} -> {receiver!r}: expected two different peers of the graph")

    @cached_property
    def _heard(self) -> dict[str, tuple[str, ...]]:
        return _by(self.peers, ((receiver, sender) for sender, receiver in self.links))

    @cached_property
    def _told(self) -> dict[str, tuple[str, ...]]:
        return _by(self.peers, self.links)

    @cached_property
    def directed(self) -> bool:
        """Return whether some link lacks its opposite."""
        return any((b, a) not in self.links for a, b in self.links)

    def senders(self, peer: str) -> tuple[str, ...]:
        """Return the peers that a peer may hear, sorted: the candidates among which it chooses its neighbours."""
        return self._heard[peer]

    def receivers(self, peer: str) -> tuple[str, ...]:
        """Return the peers that may hear a peer, sorted."""
        return self._told[peer]


def _by(peers: Iterable[str], pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    links: dict[str, list[str]] = {peer: [] for peer in peers}
    for peer, other in pairs:
        links[peer].append(other)
    return {peer: tuple(sorted(others)) for peer, others in links.items()}


def candidates(
    name: str, peers: Sequence[str], *, seed: int = 0, round: int = 1, every: int = 0, **params: Any
) -> Graph:
    """Return the graph of a registered topology on named peers, in one round.

    `every` = 0 keeps one graph for the whole run; n draws a new one every n rounds, which count from 1. The order of
    names does not matter. Raises RecipeError for an unknown topology or parameter, and for one that does not fit.
    """
    values = resolved(name, params)
    if every < 0 or round < 0:
        raise ValueError(f"expected every >= 0 and round >= 0, found {every} and {round}")
    names = tuple(sorted(peers))
    if len(names) < 2:
        return Graph(names, frozenset())
    draw = max(round - 1, 0) // every if every else 0
    graph = TOPOLOGIES[name].make(names, derive_seed(seed, "topology", draw), **values)
    _must(isinstance(graph, _nx().Graph), f"topology {name!r}: {found(graph)} found, expected a networkx.Graph")
    at, last = dict(enumerate(names)), len(names) - 1
    for a, b in graph.edges():
        fits = a in at and b in at and a != b
        _must(fits, f"topology {name!r}: link {a!r}, {b!r} found, expected two different positions from 0 to {last}")
    links = {(at[a], at[b]) for a, b in graph.edges()}
    return Graph(names, frozenset(links if graph.is_directed() else links | {(b, a) for a, b in links}))


def resolved(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of a topology, with defaults. Raises RecipeError for wrong or unknown ones."""
    entry = TOPOLOGIES[name]
    head = f"topology {name!r}, "
    return dict(checked(entry.params, params, head, between=f"\n{head}"))


def metropolis(graph: Graph) -> Matrix:
    """Return Metropolis-Hastings weights W (N x N, in the order of `graph.peers`) for gossip averaging.

    W_ij = 1 / (1 + max(deg_i, deg_j)) for neighbours; W_ii is the rest (Xiao, Boyd and Lall, IPSN 2005). W is symmetric
    and doubly stochastic. Raises ValueError for a directed graph.
    """
    if graph.directed:
        raise ValueError("Metropolis weights need an undirected graph, found a link without its opposite")
    at = {peer: i for i, peer in enumerate(graph.peers)}
    W = np.zeros((len(at), len(at)))
    for a, b in graph.links:
        W[at[a], at[b]] = 1 / (1 + max(len(graph.senders(a)), len(graph.senders(b))))
    np.fill_diagonal(W, 1 - W.sum(1))
    return W


def _nx() -> Any:
    return need("networkx", "methods")


def _must(fits: bool, text: str) -> None:
    if not fits:
        raise RecipeError(text)


@TOPOLOGIES.register("full")
def full(peers: Names, seed: int) -> Any:
    """Link every peer to every other peer."""
    return _nx().complete_graph(len(peers))


@TOPOLOGIES.register("ring")
def ring(peers: Names, seed: int, *, hops: Count = 1, directed: bool = False) -> Any:
    """Put the peers on a circle in the order of their names, and link each to those at most `hops` away.

    `directed`: each peer hears only those before it.
    """
    n = len(peers)
    _must(hops < n, f"topology 'ring': hops must be below the number of peers, {n}, found {hops}")
    graph = _nx().empty_graph(n, _nx().DiGraph if directed else _nx().Graph)
    graph.add_edges_from((i, (i + h) % n) for i in range(n) for h in range(1, hops + 1))
    return graph


@TOPOLOGIES.register("torus")
def torus(peers: Names, seed: int, *, rows: Annotated[int, Field(ge=2)] | None = None) -> Any:
    """Build a grid that wraps around in both directions; without `rows` as square as the number of peers allows.

    Peers fill it row by row in the order of their names. The number of peers must be rows x columns with both at
    least 2; a row or column of 2 has a single link.
    """
    n = len(peers)
    if rows is None:
        rows = next((r for r in range(math.isqrt(n), 1, -1) if n % r == 0), None)
        _must(rows is not None, f"topology 'torus': {n} peers fill no grid with two rows and columns or more")
    assert rows is not None
    _must(
        n % rows == 0 and n // rows >= 2,
        f"topology 'torus': rows must divide the number of peers, {n}, and leave at least 2 columns, found {rows}",
    )
    columns = n // rows
    grid = _nx().grid_2d_graph(rows, columns, periodic=True)
    return _nx().relabel_nodes(grid, {(r, c): r * columns + c for r, c in grid})


@TOPOLOGIES.register("star")
def star(peers: Names, seed: int) -> Any:
    """Link the first peer by name to all others. These have no other links."""
    return _nx().star_graph(len(peers) - 1)


@TOPOLOGIES.register("random-k")
def random_k(peers: Names, seed: int, *, k: Count = 3, directed: bool = True) -> Any:
    """Let each peer hear k others, chosen uniformly at random (the thesis' random topology with budget k, Figure 2.1).

    `directed: false` makes each choice a link in both directions, so a peer has k or more links.
    """
    n = len(peers)
    _must(k < n, f"topology 'random-k': k must be below the number of peers, {n}, found {k}")
    rng = np.random.default_rng(seed)
    graph = _nx().empty_graph(n, _nx().DiGraph if directed else _nx().Graph)
    for i in range(n):
        others = rng.choice(n - 1, k, replace=False)
        graph.add_edges_from((int(j + (j >= i)), i) for j in others)
    return graph


@TOPOLOGIES.register("erdos-renyi", source="Erdős and Rényi, 1959; Gilbert, 1959")
def erdos_renyi(peers: Names, seed: int, *, p: UnitInterval, directed: bool = False) -> Any:
    """Link every pair with probability p, independently; the graph may have several components."""
    return _nx().gnp_random_graph(len(peers), p, seed=seed, directed=directed)


@TOPOLOGIES.register("small-world", source="Watts and Strogatz, Nature 1998")
def small_world(peers: Names, seed: int, *, k: Annotated[int, Field(ge=2)] = 4, p: UnitInterval = 0.1) -> Any:
    """Return a ring in which everybody is linked to its k nearest (k even), each link moved elsewhere with
    probability p.

    The graph is drawn until it is connected, at most 100 times.
    """
    n = len(peers)
    _must(k % 2 == 0 and k < n, f"topology 'small-world': k must be even and below the number of peers, {n}, found {k}")
    try:
        return _nx().connected_watts_strogatz_graph(n, k, p, seed=seed)
    except _nx().NetworkXError as error:
        raise RecipeError(f"topology 'small-world': n = {n}, k = {k}, p = {p}: {error}") from None


@TOPOLOGIES.register("groups")
def groups(peers: Names, seed: int, *, groups: Annotated[list[list[str]], Field(min_length=1)]) -> Any:
    """Let every peer hear the peers of its own group only.

    `groups` are lists of names, in which * stands for anything: [["digit-*", "parity-*"], ["depth-*"]]. Peers of no
    group have no link; a name that fits in two groups is an error, as is one that fits no peer.
    """
    graph, place = _nx().empty_graph(len(peers)), dict[str, int]()
    for number, names in enumerate(groups):
        for name in names:
            matches = fnmatch.filter(peers, name)
            _must(bool(matches), f"topology 'groups': no peer is called {name!r}.{nearest(name, peers)}")
            for peer in matches:
                other = place.setdefault(peer, number)
                _must(other == number, f"topology 'groups': peer {peer!r} is in groups {other + 1} and {number + 1}")
        members = [i for i, peer in enumerate(peers) if place.get(peer) == number]
        graph.add_edges_from(itertools.combinations(members, 2))
    return graph


@TOPOLOGIES.register("edge-list")
def edge_list(peers: Names, seed: int, *, file: str, directed: bool = False) -> Any:
    """Read links from a text file: two names per line (if `directed`, sender then receiver); '#' starts a comment.

    Peers that the file does not name have no links.
    """
    try:
        lines = Path(file).expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"topology 'edge-list': {file}: {error}") from None
    at = {peer: i for i, peer in enumerate(peers)}
    graph = _nx().DiGraph() if directed else _nx().Graph()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"topology 'edge-list': {file}, line {number}"
        if len(words) != 2 or words[0] == words[1]:
            raise DataError(f"{where}: expected two different names, found {line.strip()!r}")
        for word in words:
            if word not in at:
                raise DataError(f"{where}: no peer {word!r}.{nearest(word, peers)}")
        graph.add_edge(at[words[0]], at[words[1]])
    return graph
