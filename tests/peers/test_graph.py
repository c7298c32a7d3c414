"""Candidate graphs: what each topology is, that it replays, and what is impossible."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
from pydantic import ValidationError

from fedloom.core.settings.section import strict
from fedloom.core.settings.trust import allow
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes.schema import Named
from fedloom.peers import TOPOLOGIES, Graph, candidates, metropolis

SIX = [f"p{i}" for i in range(6)]
PARAMS = {
    "full": {},
    "ring": {},
    "torus": {},
    "star": {},
    "random-k": {"k": 2},
    "erdos-renyi": {"p": 0.5},
    "small-world": {"k": 2, "p": 0.3},
}
RANDOM = ("random-k", "erdos-renyi", "small-world")
every_kind = pytest.mark.parametrize("name", PARAMS)


def is_connected(graph: Graph) -> bool:
    return networkx.is_strongly_connected(networkx.DiGraph([*graph.links]))


def test_known_graphs() -> None:
    assert candidates("full", SIX).senders("p2") == ("p0", "p1", "p3", "p4", "p5")
    assert candidates("ring", SIX).senders("p0") == ("p1", "p5")
    assert candidates("ring", SIX, hops=2).senders("p0") == ("p1", "p2", "p4", "p5")
    one_way = candidates("ring", SIX, directed=True)
    assert (one_way.senders("p0"), one_way.receivers("p0")) == (("p5",), ("p1",))
    assert candidates("star", SIX).senders("p0") == tuple(SIX[1:])
    assert candidates("star", SIX).senders("p3") == ("p0",)
    # 2 rows of 3: p4 is below p1, between p3 and p5
    assert candidates("torus", SIX).senders("p4") == ("p1", "p3", "p5")
    nine = [f"p{i}" for i in range(9)]
    assert candidates("torus", nine).senders("p0") == ("p1", "p2", "p3", "p6")
    eighteen = sorted(f"p{i:02}" for i in range(18))  # 3 x 6, not 2 x 9
    assert candidates("torus", eighteen).senders("p00") == ("p01", "p05", "p06", "p12")
    assert candidates("torus", [f"p{i}" for i in range(8)], rows=4).senders("p0") == ("p1", "p2", "p6")


def test_random_graphs_are_what_they_say() -> None:
    for seed in range(5):
        picks = candidates("random-k", SIX, k=2, seed=seed)
        assert all(len(picks.senders(p)) == 2 for p in SIX)
        both = candidates("random-k", SIX, k=2, directed=False, seed=seed)
        assert not both.directed
        assert picks.links <= both.links
        assert is_connected(candidates("small-world", SIX, k=2, p=0.9, seed=seed))
    assert not candidates("erdos-renyi", SIX, p=0.0).links
    assert candidates("erdos-renyi", SIX, p=1.0) == candidates("full", SIX)
    hundred = [f"p{i:03d}" for i in range(100)]
    links = len(candidates("erdos-renyi", hundred, p=0.2).links) / 2
    assert abs(links - 990) < 4 * (4950 * 0.2 * 0.8) ** 0.5
    # Each of the others is picked alike.
    picked = [p for s in range(600) for p in candidates("random-k", SIX, k=1, seed=s).senders("p2")]
    assert sorted(set(picked)) == ["p0", "p1", "p3", "p4", "p5"]
    assert min(map(picked.count, set(picked))) > 80


@every_kind
def test_a_graph_replays_whatever_the_order_of_names(name: str) -> None:
    graph = candidates(name, SIX, seed=3, **PARAMS[name])
    assert graph == candidates(name, SIX[::-1], seed=3, **PARAMS[name])
    assert all((a, b) in graph.links and a in graph.senders(b) for a in SIX for b in graph.receivers(a))


@pytest.mark.parametrize("name", RANDOM)
def test_time_varying_graphs(name: str) -> None:
    many = [f"p{i:02d}" for i in range(20)]
    rounds = [candidates(name, many, seed=1, round=r, every=3, **PARAMS[name]) for r in range(1, 8)]
    assert rounds[0] == rounds[1] == rounds[2] != rounds[3] == rounds[5] != rounds[6]
    fixed = candidates(name, many, seed=1, round=5, **PARAMS[name])
    assert fixed == rounds[0] != candidates(name, many, seed=2, **PARAMS[name])
    assert candidates(name, many, **PARAMS[name]) == candidates(name, many, seed=0, round=1, every=1, **PARAMS[name])
    assert candidates(name, many, seed=1, round=0, every=3, **PARAMS[name]) == rounds[0]
    for wrong in ({"every": -1}, {"round": -1}):
        with pytest.raises(ValueError, match="expected every >= 0 and round >= 0"):
            candidates(name, many, **wrong, **PARAMS[name])
    assert candidates(name, many, every=1, **PARAMS[name]) == candidates(name, many, **PARAMS[name])


@every_kind
@pytest.mark.parametrize("peers", [[], ["a"]])
def test_fewer_than_two_peers_have_no_link(name: str, peers: list[str]) -> None:
    graph = candidates(name, peers, **PARAMS[name])
    assert graph == Graph(tuple(peers), frozenset())
    np.testing.assert_array_equal(metropolis(graph), np.eye(len(peers)))


def test_metropolis_weights() -> None:
    W = metropolis(candidates("ring", SIX))
    np.testing.assert_allclose(W[0], [1 / 3, 1 / 3, 0, 0, 0, 1 / 3])
    np.testing.assert_allclose(metropolis(candidates("full", SIX)), np.full((6, 6), 1 / 6))
    W = metropolis(candidates("star", ["a", "b", "c"]))
    np.testing.assert_allclose(W, [[1 / 3, 1 / 3, 1 / 3], [1 / 3, 2 / 3, 0], [1 / 3, 0, 2 / 3]])
    for seed in range(5):
        W = metropolis(candidates("erdos-renyi", SIX, p=0.4, seed=seed))
        np.testing.assert_allclose([W.sum(0), W.sum(1)], np.ones((2, 6)))
        np.testing.assert_array_equal(W, W.T)
        assert (W >= 0).all()
    with pytest.raises(ValueError, match="undirected"):
        metropolis(candidates("ring", SIX, directed=True))


def test_edge_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "links.txt"
    file.write_text("# who hears whom\na b\n\nb c  # close by\n")
    both = candidates("edge-list", ["c", "b", "a", "d"], file=str(file))
    assert (both.senders("b"), both.senders("d")) == (("a", "c"), ())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert candidates("edge-list", ["c", "b", "a", "d"], file="~/links.txt").links == both.links
    one_way = candidates("edge-list", ["a", "b", "c"], file=str(file), directed=True)
    assert (one_way.senders("b"), one_way.receivers("b")) == (("a",), ("c",))
    with pytest.raises(DataError, match=r"line 4: no peer 'c'"):
        candidates("edge-list", ["a", "b"], file=str(file))
    file.write_text("a\n")
    with pytest.raises(DataError, match="line 1: expected two different names, found 'a'"):
        candidates("edge-list", ["a", "b"], file=str(file))
    with pytest.raises(DataError, match=r"gone\.txt"):
        candidates("edge-list", ["a", "b"], file=str(tmp_path / "gone.txt"))


def test_groups() -> None:
    peers = ["digit-0", "digit-1", "large-0", "large-1", "other"]
    graph = candidates("groups", peers, groups=[["digit-*", "large-0"], ["large-1"]])
    assert graph.senders("digit-0") == ("digit-1", "large-0")
    assert graph.senders("large-1") == graph.senders("other") == ()
    with pytest.raises(RecipeError, match=r"no peer is called 'digits-\*'. Did you mean 'digit-1'"):
        candidates("groups", peers, groups=[["digits-*"]])
    with pytest.raises(RecipeError, match="peer 'digit-1' is in groups 1 and 2"):
        candidates("groups", peers, groups=[["digit-*"], ["digit-1"]])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("mesh", {}, "unknown topology 'mesh'"),
        ("ring", {"hop": 2}, "Did you mean 'hops'"),
        ("ring", {"hops": 6}, "below the number of peers, 6, found 6"),
        ("random-k", {"k": 6}, "below the number of peers, 6, found 6"),
        ("random-k", {"k": "2"}, "expected an integer"),
        ("torus", {"rows": 4}, "rows must divide the number of peers, 6"),
        ("torus", {"rows": 6}, "rows must divide the number of peers, 6, and leave at least 2 columns"),
        ("small-world", {"k": 3}, "k must be even"),
        ("small-world", {"k": 6}, "below the number of peers, 6, found 6"),
        ("erdos-renyi", {"p": 1.5}, "1.5 found"),
        ("erdos-renyi", {}, "missing"),
    ],
)
def test_impossible_parameters(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        candidates(name, SIX, **params)  # type: ignore[arg-type]


def test_a_prime_number_of_peers_fills_no_torus() -> None:
    with pytest.raises(RecipeError, match="7 peers fill no grid"):
        candidates("torus", [f"p{i}" for i in range(7)])
    with pytest.raises(RecipeError, match="rows must divide the number of peers, 7"):
        candidates("torus", [f"p{i}" for i in range(7)], rows=3)


def test_a_graph_refuses_what_is_no_link() -> None:
    for links in ({("a", "a")}, {("a", "z")}):
        with pytest.raises(ValueError, match="expected two different peers"):
            Graph(("a", "b"), frozenset(links))
    with pytest.raises(ValueError, match="sorted and distinct"):
        Graph(("b", "a"), frozenset())
    assert Graph(("a", "b"), frozenset({("a", "b")})).directed


def _numbers(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    return networkx.Graph([(0, len(peers))])


def _names(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    return networkx.Graph([(peers[0], peers[1])])


def _itself(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    return networkx.Graph([(1, 1)])


def _behind(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    return networkx.Graph([(0, -1)])


def _list(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    return [(0, 1)]  # type: ignore[return-value]


def _fails(peers: tuple[str, ...], seed: int) -> networkx.Graph:
    raise KeyError("x")


def _asks(peers: tuple[str, ...], seed: int, friends: int) -> networkx.Graph:
    raise AssertionError


def _good(peers: tuple[str, ...]) -> networkx.DiGraph:
    return networkx.DiGraph([(0, 2)])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_numbers, "link 0, 6 found, expected two different positions from 0 to 5"),
        (_names, "link 'p0', 'p1' found, expected two different positions"),
        (_itself, "link 1, 1 found, expected two different positions"),
        (_behind, "link 0, -1 found, expected two different positions"),
        (_list, "[(0, 1)] found, expected a networkx.Graph"),
        (_fails, "topology _fails: KeyError: 'x'"),
        (_asks, "expected a function with at most 2 required arguments, found 3"),
    ],
)
def test_a_topology_of_ones_own_says_what_is_wrong_with_it(function: Callable[..., Any], message: str) -> None:
    allow([__name__])
    with pytest.raises(RecipeError, match=re.escape(message)):
        candidates(f"{__name__}:{function.__name__}", SIX)


def test_a_topology_of_ones_own_need_not_take_the_seed() -> None:
    allow([__name__])
    assert candidates(f"{__name__}:_good", SIX).links == {("p0", "p2")}


def test_every_topology_has_a_page() -> None:
    assert set(TOPOLOGIES.entries) == {*PARAMS, "edge-list", "groups"}
    assert all(entry.summary for entry in TOPOLOGIES)


def test_a_recipe_section_can_name_a_topology() -> None:
    class Topology(Named):
        home = ("fedloom.methods.peers.graph", "TOPOLOGIES")
        every: int = 0

    short = strict(Topology, "ring")
    assert (short.name, short.params) == ("ring", {"hops": 1, "directed": False})
    section = strict(Topology, {"name": "random-k", "k": 2, "every": 3})
    assert strict(Topology, section.model_dump(mode="json")) == section
    graph = candidates(section.name, SIX, round=4, every=section.every, **section.params)
    assert graph == candidates("random-k", SIX, round=6, every=3, k=2)
    with pytest.raises(ValidationError, match="hop: unknown key"):
        strict(Topology, {"name": "ring", "hop": 2})
