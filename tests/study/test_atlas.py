"""The conflict atlas: every pair once, which gains are significant, and whether cosines of one seed predict the gains
of others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import RecipeError
from fedloom.experiments.atlas import Atlas, atlas_grid, clients_of, draw, matchings
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.study.grid import recipes

TASKS = ("a", "b", "c", "d", "e")
AFFINITY = {frozenset(pair): 2.0 * n - 9 for n, pair in enumerate(itertools.combinations(TASKS, 2))}


@pytest.mark.parametrize("count", [3, 4, 7, 8])
def test_every_pair_is_in_one_matching_and_every_task_in_each(count: int) -> None:
    tasks = [f"t{n}" for n in range(count)]
    found = matchings(tasks)
    pairs = [group for groups in found for group in groups if len(group) == 2]
    assert sorted(pairs) == sorted(itertools.combinations(sorted(tasks), 2))
    for groups in found:
        assert sorted(task for group in groups for task in group) == sorted(tasks)


def atlas(cosine_of: Any, noise: float = 0.1) -> Atlas:
    """Three seeds of five tasks whose gains are AFFINITY; the cosine of a pair is what `cosine_of` makes of that."""
    rng = np.random.default_rng(1)
    changes, M = np.full((3, 5, 5), np.nan), np.eye(5)
    for i, j in itertools.permutations(range(5), 2):
        affinity = AFFINITY[frozenset((TASKS[i], TASKS[j]))]
        changes[:, i, j] = affinity + noise * rng.normal(size=3)
        M[i, j] = cosine_of(affinity)
    late, known = np.ones((3, 5, 5)), np.stack([M] * 3)
    cosines = {"conv1": {1: known, 2: known.copy(), 10: late}, "conv2": {1: late, 2: late, 10: late}}
    return Atlas("who", TASKS, (0, 1, 2), changes, np.ones((3, 5)), cosines, 10)


def test_cosines_that_order_pairs_as_gains_do_foretell_them() -> None:
    made = atlas(lambda gain: gain / 20)
    value, p = made.rank_correlation("conv1")
    assert (value, p) == (pytest.approx(1.0), pytest.approx(1 / 120))
    assert made.rank_correlation("conv1", (0.8, 1.0)) == pytest.approx(
        (np.nan, np.nan), nan_ok=True
    )  # all cosines are alike
    assert atlas(lambda gain: -gain / 20).rank_correlation("conv1")[0] == pytest.approx(-1.0)
    assert atlas(lambda gain: -gain / 20).rank_correlation("conv1")[1] == 1.0
    assert "(significant)" in made.notes[1]


@pytest.mark.parametrize("what", ["a cosine", "a change"])
def test_a_pair_without_a_number_is_left_out_and_named(what: str) -> None:
    made = atlas(lambda gain: gain / 20)
    whole = made.overall
    if what == "a cosine":
        for M in made.cosines["conv1"].values():
            M[1, 0, 3] = M[1, 3, 0] = np.nan
    else:
        made.changes[1, 0, 3] = np.nan
    short = replace(made)
    assert short.left_out == ("a and d",)
    assert short.rank_correlation("conv1")[0] == pytest.approx(1.0)
    assert short.overall == pytest.approx(whole, abs=0.02)
    assert short.notes[-1] == "Left out, because not every seed has a number: a and d."
    assert len(short.as_table().lines) == (20 if what == "a cosine" else 19)
    assert replace(atlas(lambda gain: gain)).left_out == ()


def test_cosines_of_a_seed_are_held_against_the_other_seeds() -> None:
    made = atlas(lambda gain: gain / 20)
    # a seed whose own gains are all turned round still foretells the others
    made.changes[0] *= -1
    assert made.rank_correlation("conv1")[0] < 1


def test_a_line_says_who_helps_and_who_hurts() -> None:
    sheet = atlas(lambda gain: 0.0).as_table()
    assert len(sheet.lines) == 20
    words = {(task, other): verdict for task, other, _, _, verdict, _ in sheet.lines}
    assert {words["d", "e"], words["e", "d"]} == {"helps"}
    assert {words["a", "b"], words["b", "a"]} == {"hurts"}
    noisy = atlas(lambda gain: 0.0, noise=100.0).as_table()
    assert {line[4] for line in noisy.lines} == {"not significant"}


def test_what_is_written(tmp_path: Path) -> None:
    made = atlas(lambda gain: gain / 20)
    assert made.to_csv().splitlines()[0] == "task,with,seed,change"
    assert len(made.to_csv().splitlines()) == 1 + 20 * 3
    assert len(made.cosine_records().rows()) == 3 * 2 * 3 * 15
    draw(made, tmp_path / "atlas.svg")
    assert (tmp_path / "atlas.svg").stat().st_size > 5000


def test_the_runs_differ_in_who_hears_whom_alone() -> None:
    clients = {"digit": ["digit-0"], "parity": ["parity-0"], "large": ["large-0"], "holes": ["holes-0"]}
    grid = atlas_grid("x", load("benchmarks/digits").model_dump(mode="json"), clients, 2)
    found = {cell.base: recipe for cell, recipe in recipes(grid).items() if cell.seed == 0}
    assert list(found) == ["together", "own task", "everyone", "pairs 1", "pairs 2", "pairs 3"]
    assert found["together"].peers is None
    groups = {base: recipe.peers.graph.params.get("groups") for base, recipe in found.items() if recipe.peers}
    assert groups["own task"] == [["digit-0"], ["parity-0"], ["large-0"], ["holes-0"]]
    assert sorted(len(group) for group in groups["pairs 2"]) == [2, 2]
    same = {recipe.model_copy(update={"peers": None}).model_dump_json() for recipe in found.values()}
    assert len(same) == 1
    with pytest.raises(RecipeError, match="at least three tasks, found digit, parity"):
        atlas_grid("x", load("benchmarks/digits").model_dump(mode="json"), dict(list(clients.items())[:2]), 2)


def test_clients_with_several_tasks_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"client 'c00' holds .*: an atlas compares single tasks"):
        clients_of(build(load("benchmarks/digits", ["partition={name: iid, clients: 2}"])))


@pytest.mark.slow
def test_an_atlas_is_made_and_goes_on(tmp_path: Path) -> None:
    small = ("training.rounds=2", "training.epochs=1", "partition.clients_per_task=1")
    for _ in range(2):
        done = CliRunner().invoke(
            app, ["study", "atlas", "benchmarks/digits", *small, "--seeds", "2", "-q", "--out", str(tmp_path)]
        )
        assert done.exit_code == 0, done.output
    assert len((tmp_path / "atlas.csv").read_text().splitlines()) == 1 + 12 * 2
    assert "Do early cosines predict gains?" in (tmp_path / "atlas.md").read_text()
    assert (tmp_path / "atlas.svg").stat().st_size > 5000
