"""Test how the updates of a round agree: the numbers are those of the matrix, and looking changes nothing."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.federation.rounds import diagnostics
from fedloom.federation.rounds.diagnostics import groups_of, look
from fedloom.stages import Mean, TopMagnitude
from tests_support import Quick, assert_same


def updates(X: Any, **more: Any) -> Updates:
    return Updates.of(X, **more)


def pairs(group: dict[str, Any], of: str, k: int) -> torch.Tensor:
    """The upper triangle as a full matrix."""
    full = torch.full((k, k), math.nan, dtype=torch.float64)
    values = iter(group[of])
    for i in range(k):
        for j in range(i + 1, k):
            value = next(values)
            full[i, j] = full[j, i] = math.nan if value is None else value
    return full


def test_numbers_worked_by_hand() -> None:
    """Three rows of norm 3 in the body; a neck with fewer columns than rows; a head of a task that z does not have."""
    blocks = (
        Block("body.0.w", (4,)),
        Block("neck.w", (2,), role="decoder"),
        Block("heads.a.w", (2,), role="head", task="a"),
    )
    X = [[1, 2, 2, 0, 1, 0, 1, 0], [2, 1, -2, 0, 0, 2, 1, 1], [0, -2, -1, 2, 3, 3, 5, 7]]
    given = updates(X, layout=Layout(blocks), rows=[("x", None), ("y", "a"), ("z", "b")])
    # in the body x + 2 z and (4, -4, 2, -3), which is orthogonal to all rows; in the neck z; in the head x + y
    row = torch.tensor([5.0, -6, 2, 1, 3, 3, 2, 1])
    out = Updates.of(torch.stack([row, row]), layout=Layout(blocks), rows=[("x", None), ("z", "b")])
    found = look(given, out)
    assert (found["rows"], found["out"]) == ([["x", None], ["y", "a"], ["z", "b"]], [["x", None], ["z", "b"]])
    assert found["shown"] == [0, 1, 2]
    body = {"cosine": [0, -0.6667, 0], "sign": [0.6667, 0, 0.5], "kept": [0.75, 0.75, 0.75]}
    neck = {"cosine": [0, 0.7071, 0.7071], "sign": [None, 1, 1], "kept": [0.5, 0.5, 1]}
    head = {"rows": [0, 1], "cosine": [0.7071, None, None], "sign": [1, None, None], "kept": [0.5, 1, None]}
    assert found["groups"] == [
        {
            "part": "encoder",
            "task": None,
            "layers": "body.0",
            "size": 4,
            "looked": 4,
            **body,
            "weights": [pytest.approx([1, 0, 2])] * 2,
            "explained": [0.3182] * 2,  # 1 - 45 / 66
        },
        {
            "part": "decoder",
            "task": None,
            "layers": "neck",
            "size": 2,
            "looked": 2,
            **neck,
            "weights": [[None] * 3] * 2,
            "explained": [None] * 2,
        },
        {
            "part": "head",
            "task": "a",
            "layers": "heads.a",
            "size": 2,
            "looked": 2,
            **head,
            "weights": [[1, 1, None], [None] * 3],
            "explained": [1, None],
        },
    ]
    at_z = look(given, out, peer="z")
    assert (at_z["peer"], at_z["shown"]) == ("z", [2, 0, 1])
    assert [group["cosine"] for group in at_z["groups"]] == [[-0.6667, 0], [0.7071, 0.7071], [None, None]]
    assert [group["sign"] for group in at_z["groups"]] == [[0, 0.5], [1, 1], [None, None]]
    assert [group.get("weights") for group in at_z["groups"]] == [g.get("weights") for g in found["groups"]]


def test_weights_of_personal_models_and_of_masked_updates() -> None:
    X = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    W = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25], [0, -0.5, 0, 1.5]]).double()
    given = updates(X)
    (group,) = look(given, given.mixed(W))["groups"]
    torch.testing.assert_close(torch.tensor(group["weights"]).double(), W, atol=1e-4, rtol=1e-3)
    masked, _ = TopMagnitude(0.3)(given, {}, Ctx(1))
    (group,) = look(masked, masked)["groups"]
    assert group["kept"] == [pytest.approx(0.3, abs=0.01)] * 4


def test_rows_of_zeros_and_rows_that_are_alike() -> None:
    x = torch.randn(30, generator=torch.Generator().manual_seed(2))
    given = updates(torch.stack([x, x, torch.zeros(30), -x]))
    out = given.reduced(x)
    (group,) = look(given, out)["groups"]
    cosine = pairs(group, "cosine", 4)
    assert float(cosine[0, 1]) == 1
    assert float(cosine[0, 3]) == -1
    assert bool(cosine[2].isnan().all())
    weights = group["weights"][0]
    assert weights[2] is None
    assert weights[0] + weights[1] - weights[3] == pytest.approx(1, abs=1e-3)
    (group,) = look(given, given.reduced(torch.zeros(30)))["groups"]
    assert group["explained"] == [None]
    given = updates(torch.stack([x, 3 * x]))
    (group,) = look(given, given.reduced(x))["groups"]
    assert group["weights"][0] == pytest.approx([1 / 2, 1 / 6], abs=1e-3), "as much of each unit row"


def test_each_part_and_task_is_a_group_and_absent_blocks_do_not_count() -> None:
    blocks = [Block(f"enc.layer{i}.w", (10,), part="encoder") for i in range(9)]
    blocks += [Block(f"head.{t}.w", (6,), role="head", task=t) for t in "ab"]
    layout = Layout(tuple(blocks))
    groups, left = groups_of(layout, 10_000)
    assert left == 0
    assert [(g.part, g.task) for g in groups] == [("encoder", None)] * 4 + [("head", "a"), ("head", "b")]
    assert torch.equal(torch.cat([g.columns for g in groups]).sort().values, torch.arange(layout.d))
    assert groups[0].layers.startswith("enc.layer0 to")
    have = torch.ones(3, 11).bool()
    have[2, 9] = False
    X = torch.randn(3, layout.d, generator=torch.Generator().manual_seed(3))
    X[2, 90:96] = 0
    given = updates(X, layout=layout, present=have)
    out, _ = Mean()(given, {}, Ctx(1))
    head = look(given, out)["groups"][4]
    assert head["rows"] == [0, 1]
    assert head["cosine"][1:] == [None, None]
    assert head["weights"] == [[0.5, 0.5, None]]
    assert head["kept"][2] is None


def test_a_large_matrix_is_looked_at_in_part() -> None:
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(400_000, generator=generator)
    X = torch.stack([base + torch.randn(400_000, generator=generator) for _ in range(6)])
    given = updates(X)
    out, _ = Mean()(given, {}, Ctx(1))
    (group,) = look(given, out)["groups"]
    assert group["looked"] == 174_762  # 2^20 / 6
    assert group["cosine"] == pytest.approx([0.5] * 15, abs=0.02)
    assert group["weights"] == [pytest.approx([1 / 6] * 6, abs=1e-4)]
    (alone,) = look(given, out, peer="c2")["groups"]
    assert alone["looked"] == 10_922  # 2^16 / 6


def test_of_many_rows_32_are_shown_from_the_first_to_the_last_and_128_are_solved() -> None:
    many = updates(torch.randn(129, 64, generator=torch.Generator().manual_seed(5)))
    own = many.rows[5][0]
    for peer, first in ((None, 0), (own, 5)):
        found = look(many, many, peer)
        (group,), shown = found["groups"], found["shown"]
        assert (shown[0], shown[-1], len(set(shown))) == (first, 128, 32)
        apart = [after - before for before, after in pairwise(shown[1:])]
        assert max(apart) - min(apart) <= 1
        x = torch.nn.functional.normalize(many.X[shown].double(), dim=1)
        cosines = x @ x.t() if peer is None else x[:1] @ x.t()
        expected = cosines[torch.ones_like(cosines).triu(1).bool()]
        torch.testing.assert_close(torch.tensor(group["cosine"]).double(), expected, atol=1e-4, rtol=1e-3)
        assert "weights" not in group
    solved = many.keep(range(128))
    assert "weights" in look(solved, solved)["groups"][0]
    few = many.keep(range(32))
    assert look(few, few)["shown"] == list(range(32))


def test_layers_are_grouped_by_their_share_of_the_columns() -> None:
    """Of five layers in four groups, the middle of a layer says which quarter of all columns it belongs to."""
    blocks = [Block(f"enc.layer{i}.w", (size,), part="encoder") for i, size in enumerate([10, 29, 10, 11, 40])]
    groups, _ = groups_of(Layout(tuple(blocks)), 10_000)
    assert [group.size for group in groups] == [39, 10, 11, 40]
    assert [group.layers for group in groups][:2] == ["enc.layer0 to enc.layer1", "enc.layer2"]


def test_tensors_of_one_layer_are_together() -> None:
    """A layer is a name up to its first number, else all but the last word of it."""
    names = ["theta", "stem.weight", "stem.bias", "blocks.0.norm1.weight", "blocks.0.attn.bias", "conv1.weight"]
    groups, _ = groups_of(Layout(tuple(Block(name, (1,), part="encoder") for name in names)), 64)
    assert [(group.layers, group.blocks) for group in groups] == [
        *(("theta", (0,)), ("stem", (1, 2)), ("blocks.0", (3, 4)), ("conv1", (5,)))
    ]


def test_columns_come_one_from_each_equal_piece_of_the_first_groups() -> None:
    """Thirteen heads of 100 columns: weights in one place of the layout and biases in another."""
    blocks = [
        Block(f"head.{i:02}.{kind}", (size,), role="head", task=f"{i:02}")
        for kind, size in (("weight", 70), ("bias", 30))
        for i in range(13)
    ]
    groups, left_out = groups_of(Layout(tuple(blocks)), 120)
    assert (len(groups), left_out) == (12, 1)
    for i, group in enumerate(groups):
        inside = torch.where(group.columns < 910, group.columns - 70 * i, group.columns - 910 - 30 * i + 70)
        assert (inside // 10).tolist() == list(range(10))
        assert (group.task, group.size) == (f"{i:02}", 100)


def test_of_many_peers_about_as_many_as_promised_look_and_always_the_same() -> None:
    def looking(population: int | None, round: int) -> list[str]:
        return [name for name in names if diagnostics.looks(name, population, round)]

    names = [f"p{i}" for i in range(1280)]
    assert looking(None, 1) == looking(64, 1) == names
    assert len(looking(65, 1)) < len(names)
    some = looking(len(names), 1)
    assert 32 < len(some) < 128
    assert looking(len(names), 5) == some
    assert [r for r in range(1, 10) if looking(None, r)] == [1, 5, 9]


def test_a_run_is_the_same_with_and_without(quick: Quick) -> None:
    with_, without = quick("method=fedamp"), quick("method=fedamp", "runtime.diagnostics=false")
    assert_same(with_, without)
    assert with_.run.info["recipe_hash"] == without.run.info["recipe_hash"]
    assert not (without.folder / "diagnostics.jsonl").exists()
    lines = [json.loads(text) for text in (with_.folder / "diagnostics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    (about,) = lines[-1]["diagnostics"]
    assert len(about["rows"]) == len(about["out"]) == len(with_.run.info["clients"])
    encoder = about["groups"][0]
    assert encoder["explained"] == pytest.approx([1] * len(about["out"]), abs=1e-3)


@pytest.mark.parametrize("changes", [("method=matu",), ("method=fedavg", "peers={}")])
def test_rows_of_tasks_and_peers(quick: Quick, changes: tuple[str, ...]) -> None:
    run = quick(*changes)
    lines = [json.loads(text) for text in (run.folder / "diagnostics.jsonl").read_text().splitlines()]
    # peers look in every fourth round
    assert [line["round"] for line in lines] == ([1] if "peers={}" in changes else [1, 2])
    looks = lines[-1]["diagnostics"]
    clients = run.run.info["clients"]
    if "peers={}" in changes:
        assert [about["peer"] for about in looks] == sorted(clients)
        for about in looks:
            assert about["rows"][about["shown"][0]][0] == about["peer"]
            assert all(len(g["cosine"]) == len(about["shown"]) - 1 for g in about["groups"])
    else:
        (about,) = looks
        assert {tuple(row) for row in about["rows"]} == {(c, t) for c, a in clients.items() for t in a["tasks"]}
        assert {row[0] for row in about["out"]} == {"*"}


def test_a_resumed_run_has_each_round_once(quick: Quick, tmp_path: Path) -> None:
    import fedloom

    run = quick()
    whole = (run.folder / "diagnostics.jsonl").read_text()
    (run.folder / "diagnostics.jsonl").write_text(whole + whole.splitlines()[-1].replace('"round": 2', '"round": 3'))
    fedloom.resume(run.folder)
    assert (run.folder / "diagnostics.jsonl").read_text() == whole
