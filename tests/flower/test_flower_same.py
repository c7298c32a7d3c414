"""The Flower engine gives the same as the process engine, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.methods import METHODS
from fedloom.runtime.api import Result
from tests_support import assert_same, load_recipe, stopped_after

pytest.importorskip("flwr")

Quick = Callable[..., Result]
FLOWER = "runtime.engine=flower"
HARD = (
    "training.rounds=3",
    "training.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",
    "training.keep_optimizer=true",
    "training.participation=0.6",
    "model.heads=own",
)


def bytes_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "bytes.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", sorted(METHODS.entries))
def test_every_method_is_the_same(quick: Quick, name: str) -> None:
    changes = (f"method={name}", *HARD)
    here, there = quick(*changes), quick(*changes, FLOWER)
    assert_same(here, there)
    assert bytes_of(here.folder) == bytes_of(there.folder)
