"""Shared fixtures. Threads are limited before torch is imported: two processes of two threads collapse on two cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.runtime.api import Result

torch.set_num_threads(1)

QUICK = ("training.rounds=2", "training.steps=2", "training.epochs=null")


@pytest.fixture
def quick(tmp_path: Path) -> Callable[..., Result]:
    """Run the main recipe for a few steps, with changes: quick("method=fedprox", recipe="digits-tasks")."""
    count = iter(range(1000))

    def run(*changes: str, recipe: str = "digits-tasks", **options: Any) -> Result:
        return fedloom.run(recipe, tmp_path / f"run{next(count)}", overrides=(*QUICK, *changes), **options)

    return run


def outcome(result: Result | Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What must be equal for two runs to be the same: final tensors, and all numbers of metrics.jsonl but seconds."""
    folder = result.folder if isinstance(result, Result) else result
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "model.safetensors"), [{k: v for k, v in x.items() if k != "seconds"} for x in lines]


def assert_same(a: Result | Path, b: Result | Path, *, models_only: bool = False) -> None:
    """Bit for bit."""
    (tensors_a, lines_a), (tensors_b, lines_b) = outcome(a), outcome(b)
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        assert torch.equal(tensor, tensors_b[name]), name
    if not models_only:
        assert lines_a == lines_b
