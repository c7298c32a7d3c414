"""The bytes of a round that `fedloom show` plans are those of a run's second round, or the plan says how far off."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fedloom.cli.look import show
from fedloom.engines.api import plan
from fedloom.federation.recipes import load
from fedloom.federation.runs.reader import Run, human_bytes
from tests_support import Quick, load_recipe

SMALL = ("training.steps=4", "evaluation={every: 2, splits: [test]}")
LORA = "model={name: tiny-vit, width: 16, depth: 1, num_heads: 2, lora: {rank: 2}}"
FLORA = "method={name: fedavg, add: {flora: {}}}"
RANKS = "method={name: fedavg, add: {flora: {ranks: {all-0: 1, digit-0: 1}}}}"
low_rank = pytest.mark.skipif(None in (find_spec("peft"), find_spec("timm")), reason="peft or timm is not installed")

EXACT = [
    *(f"method={name}" for name in ("fedavg", "scaffold", "fedhca2", "fedrep", "fedmtl", "ifca", "fedsoft", "f2dc")),
    *(f"method={{name: {name}, add: {{feddea: {{}}}}}}" for name in ("fedavg", "matu")),
    "method={name: fedavg, codec: unified, add: {by-task: {}, feddea: {}}}",
]
BOUNDED = [
    "method=fedproto",
    *(f"method={{name: {name}, codec: sparse, add: {{feddea: {{}}}}}}" for name in ("fedavg", "matu", "ifca")),
    *(pytest.param((LORA, method), marks=low_rank) for method in (FLORA, RANKS)),
]


def second_round(quick: Quick, *changes: str) -> dict[str, int]:
    sent = {each.way: each for each in Run.read(quick(*SMALL, *changes).folder).sent if each.round == 2}
    return {way: sum(sent[way].parts.values()) for way in ("up", "down")}


@pytest.mark.parametrize("change", EXACT)
def test_bytes_are_those_of_a_run(quick: Quick, change: str) -> None:
    planned = plan(load_recipe(*SMALL, change))
    assert not planned.rough
    assert {"up": planned.bytes_up, "down": planned.bytes_down} == second_round(quick, change)


@pytest.mark.parametrize("changes", BOUNDED)
def test_where_they_are_not_the_plan_says_which_way(quick: Quick, changes: str | tuple[str, ...]) -> None:
    changes = (changes,) if isinstance(changes, str) else changes
    planned, found = plan(load_recipe(*SMALL, *changes)), second_round(quick, *changes)
    assert planned.rough
    for way, bytes_ in (("up", planned.bytes_up), ("down", planned.bytes_down)):
        match planned.rough.get(way):
            case None:
                assert bytes_ == found[way]
            case "up to":
                assert found[way] <= bytes_ < 2.5 * found[way]
            case "at least":
                assert 0.9 * found[way] < bytes_ <= found[way]


@low_rank
def test_a_smaller_rank_is_cheaper_and_the_frozen_weights_are_not_sent() -> None:
    same, less = (plan(load_recipe(*SMALL, LORA, method)) for method in (FLORA, RANKS))
    assert less.bytes_up < same.bytes_up < same.bytes_down / 3


@low_rank
def test_frozen_parameters_are_counted_apart() -> None:
    """Beside low-rank factors the whole encoder is frozen: 4 bytes for each of its parameters."""
    planned, whole = (plan(load_recipe(model)) for model in (LORA, LORA.replace(", lora: {rank: 2}", "")))
    frozen = planned.parameters["frozen"]
    assert planned.memory["frozen parameters (per worker)"] == 4 * frozen
    assert frozen == sum(whole.parameters.values()) - whole.parameters["head"]
    assert "frozen" not in whole.parameters


def test_show_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    change = "method={name: fedavg, codec: sparse}"
    show("digits-tasks", [change])
    planned = plan(load("digits-tasks", [change]))
    assert f"up to {human_bytes(planned.bytes_up)} from clients" in " ".join(capsys.readouterr().out.split())
