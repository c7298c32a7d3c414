"""What methods record in a run, as tables and pictures: activated dimensions, hyper weights, peers' neighbours."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.engines.api import Result
from fedloom.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study.charts import thinned
from fedloom.study.figures import draw as draw_grid
from fedloom.study.grid import load_grid, recipes
from fedloom.study.papers import (
    CSV_ACTIVATED,
    CSV_WEIGHTS,
    Activated,
    HyperWeights,
    Overlaps,
    _prefixes,
    draw_overlaps,
    draw_weights,
    overlaps_of,
    used,
    weights_of,
)
from fedloom.study.report.records import purity, quality
from grid_support import TINY
from report_support import cells, drawn

Quick = Callable[..., Result]


def activated(round: int, rows: tuple[str, ...] = ("a", "b"), overlap: tuple[float, ...] = (0.5,)) -> Activated:
    return Activated(
        round,
        "encoder",
        0.2,
        10,
        rows,
        ("e.a", "e.b"),
        (4, 6),
        ((2, 0), (1, 1), (0, 2))[: len(rows)],
        ((2, 0, 0), (1, 1, 0), (0, 2, 0))[: len(rows)],
        {"encoder": {"overlap": overlap, "expected": (0.2,) * len(overlap), "jaccard": (1 / 3,) * len(overlap)}},
    )


@pytest.fixture
def sparse(quick: Quick) -> Path:
    return quick("method.add.activated-dimensions={}").folder


def test_activated_dimensions_of_a_run(sparse: Path) -> None:
    found = overlaps_of(sparse)
    assert found.rounds[0].scope == "encoder"
    assert [r.round for r in found.rounds] == [1, 2]
    assert len(found.pairs) == 10
    assert overlaps_of(sparse, "all").rounds[0].columns > found.rounds[0].columns
    agreement, shares = found.agreement(), found.shares()
    assert agreement.head[0] == "round"
    assert agreement.head[-1] == "if independent"
    assert [line[0] for line in agreement.lines] == ["1", "2"]
    total = sum(float(line[1]) for line in shares.lines)
    assert total == pytest.approx(100, abs=0.5)
    assert " > " in shares.lines[0][2]
    for text in (found.to_text(), found.to_markdown()):
        assert "digits-tasks, fedavg, seed 0: top 10 %" in text
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert tuple(rows[0]) == CSV_ACTIVATED
    of = [float(r["percent"]) for r in rows if r["quantity"] == "share" and r["a"] == "digit-0" and r["round"] == "1"]
    assert sum(of) == pytest.approx(100)
    pair = found.pairs[0]
    value = next(float(r["percent"]) for r in rows if r["quantity"] == "overlap" and (r["a"], r["b"]) == pair)
    assert value == pytest.approx(100 * found.rounds[0].by_pair[pair])


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        ("activated --scope all", "method.add.activated-dimensions={}", "if independent"),
        ("hyper", "method=fedhca2", "alpha of the encoders"),
    ],
)
def test_the_commands_of_what_runs_record(quick: Quick, tmp_path: Path, command: str, changes: str, said: str) -> None:
    ask = partial(CliRunner().invoke, app)
    name, *options = command.split()
    run = str(quick(changes).folder)
    assert said in ask([name, run, *options]).output
    for file in ("a.csv", "a.md", "a.svg", "a.png"):
        assert ask([name, run, *options, "--out", str(tmp_path / file)]).exit_code == 0
        assert (tmp_path / file).stat().st_size
    assert "a.nothing: a chart is written as" in str(ask([name, run, "--out", str(tmp_path / "a.nothing")]).exception)


def test_a_run_without_activated_dimensions(quick: Quick) -> None:
    with pytest.raises(StateError, match=r"method\.add\.activated-dimensions"):
        overlaps_of(quick("training.rounds=1").folder)


def test_a_scope_that_was_not_recorded(sparse: Path) -> None:
    with pytest.raises(StateError, match="recorded: all, encoder"):
        overlaps_of(sparse, "heads")


def test_numbers_of_a_round() -> None:
    density = [[*of.values()] for of in activated(1).density().values()]
    assert density == [pytest.approx([200 / 3, 0, 0]), pytest.approx([100 / 3, 100 / 3, 0])]
    assert activated(1).matrix() == {"a": {"a": 100, "b": 50}, "b": {"a": 50, "b": 100}}
    assert activated(1).expected == 0.2
    assert activated(1, ("a",), ()).expected == 0.2


def test_clients_that_are_absent_in_some_rounds() -> None:
    rounds = (activated(1), activated(2, ("b", "c"), (0.25,)), activated(3, ("c",), ()))
    found = Overlaps("x", rounds)
    assert found.pairs == (("a", "b"), ("b", "c"))
    assert [r.by_pair.get(("b", "c")) for r in rounds] == [None, 0.25, None]
    assert [line[1:3] for line in found.agreement().lines] == [("50.0", ""), ("", "25.0"), ("", "")]
    assert found.shares().head == ("blocks", "of all dimensions")
    assert draw_overlaps([found])["concat"]


def test_long_runs_and_deep_names_are_cut() -> None:
    assert [r.round for r in thinned([activated(i) for i in range(1, 101)], 12)] == [
        *(1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100)
    ]
    names = [f"encoder.layer{i}.{j}.weight" for i in range(4) for j in range(9)]
    assert set(_prefixes(names)) == {f"encoder.layer{i}" for i in range(4)}
    assert _prefixes(["x"]) == ["x"]


MADE = HyperWeights(
    "made, seed 0",
    (1, 2, 3),
    {"a": {1: 0.1, 2: 0.25, 3: 1.5}, "b": {1: 0.1, 3: -0.5}},
    {("a", "seg"): {"fuse": {1: 0.1, 2: 0.2}, "norm": {1: 0.1}}, ("b", "edge"): {"fuse": {1: 0.1, 3: 0.4}}},
)


def test_hyper_weights_of_a_run(quick: Quick) -> None:
    found = weights_of(quick("method=fedhca2", "training.rounds=3").folder)
    assert found.rounds == (1, 2, 3)
    assert sorted(found.alpha) == ["all-0", "digit-0", "holes-0", "large-0", "parity-0"]
    assert all(weights[1] == 0.1 != weights[3] for weights in found.alpha.values())
    assert not found.beta
    assert "digits-tasks, fedhca2, seed 0" in found.to_text()


def test_hyper_weights_as_written() -> None:
    text = MADE.to_text()
    assert "1.0000 (1.5)" in text
    assert "0.1000 > 0.2000" in text
    assert [line[0] for line in MADE.alphas().lines] == ["1", "2", "3"]
    assert MADE.alphas().lines[1] == ("2", "0.2500", "")
    assert MADE.to_markdown().count("| round |") == 1
    rows = list(csv.DictReader(io.StringIO(MADE.to_csv())))
    assert tuple(rows[0]) == CSV_WEIGHTS
    assert len(rows) == 10
    last = next(r for r in rows if r["client"] == "b" and r["round"] == "3" and r["weight"] == "alpha")
    assert (float(last["value"]), float(last["used"])) == (-0.5, used(-0.5)) == (-0.5, 0.0)


def test_the_picture_of_hyper_weights() -> None:
    alpha, beta, last = draw_weights([MADE])["concat"]
    assert drawn(alpha) == {"b": {1: 0.1, 3: 0.0}, "a": {1: 0.1, 2: 0.25, 3: 1.0}}  # as used
    assert drawn(beta)["a seg"] == {1: 0.1, 2: 0.2}
    assert cells(last) == {"a seg": {"fuse": 0.2, "norm": 0.1}, "b edge": {"fuse": 0.4}}


def test_a_run_without_hyper_weights(quick: Quick) -> None:
    with pytest.raises(StateError, match="method=fedhca2"):
        weights_of(quick("training.rounds=1").folder)


def test_the_figure_of_a_grid(tmp_path: Path) -> None:
    bases = {"FedAvg": {"method": "fedavg"}, "FedHCA2": {"method": "fedhca2"}}
    grid = load_grid({**TINY, "bases": bases, "addons": {"-": {}}, "figure": "hyper-weights"})
    for cell, recipe in recipes(grid).items():
        fedloom.run(recipe, cell.folder(tmp_path))
    draw_grid(grid, tmp_path, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    without = load_grid({**TINY, "addons": {"-": {}}, "figure": "hyper-weights"})
    with pytest.raises(StateError, match="method fedhca2"):
        draw_grid(without, tmp_path, tmp_path / "g.png")


TASKS = {"a": ["x"], "b": ["x"], "c": ["y"], "d": ["y"]}


def record(peer: str, similarity: dict[str, float], neighbours: list[str]) -> dict[str, Any]:
    return {"kind": "peer", "peer": peer, "neighbours": neighbours, "similarity": similarity}


def with_peers(*rounds: list[dict[str, Any]], tasks: dict[str, list[str]] = TASKS) -> Run:
    lines = tuple({"round": number, "records": records} for number, records in enumerate(rounds, start=1))
    return Run(Path(), {}, {"clients": {name: {"tasks": held} for name, held in tasks.items()}}, lines, ())


def found(high: set[frozenset[str]]) -> list[dict[str, Any]]:
    """All meet; the pairs in `high` are similar and choose each other."""
    records = []
    for peer in TASKS:
        similarity = {o: 0.9 if frozenset((peer, o)) in high else 0.1 for o in TASKS if o != peer}
        records.append(record(peer, similarity, [o for o in similarity if similarity[o] > 0.5]))
    return records


RIGHT = {frozenset("ab"), frozenset("cd")}
WRONG = {frozenset("ac"), frozenset("bd")}


def test_clusters_that_are_the_task_groups_have_index_one() -> None:
    values = quality(with_peers(found(RIGHT), found(RIGHT)))
    assert {name: series[2] for name, series in values.items()} == dict.fromkeys(
        ["neighbours with the same tasks", "neighbours kept", "ARI", "NMI", "purity", "clusters kept"], 1.0
    )


def test_clusters_across_the_task_groups() -> None:
    values = quality(with_peers(found(RIGHT), found(WRONG)))
    last = {name: series[2] for name, series in values.items()}
    assert last["ARI"] == pytest.approx(-0.5)
    assert last["NMI"] == pytest.approx(0, abs=1e-12)
    assert last["purity"] == 0.5
    assert last["neighbours with the same tasks"] == last["neighbours kept"] == 0
    assert last["clusters kept"] == pytest.approx(-0.5)


def test_what_cannot_be_said_is_left_out() -> None:
    assert quality(with_peers()) == {}
    assert quality(with_peers(found(RIGHT), tasks={name: ["x"] for name in TASKS})) == {}
    alone = [record(name, {}, []) for name in TASKS]
    assert quality(with_peers(alone)) == {}
    # each peer with tasks of its own: there is no group to find
    assert quality(with_peers(found(RIGHT), tasks={n: [n] for n in TASKS})) == {
        "neighbours with the same tasks": {1: 0}
    }


def test_purity() -> None:
    assert purity([0, 0, 0, 1, 1], [0, 0, 1, 1, 1]) == pytest.approx(0.8)
