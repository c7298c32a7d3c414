"""Worker processes: what they cannot load is said, at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOTEBOOK = """
from dataclasses import dataclass
import fedloom
from fedloom.stages import Mean, Stage

@dataclass(frozen=True)
class Mine(Stage):
    traits = Mean().traits

    def __call__(self, updates, state, ctx):
        return Mean()(updates, state, ctx)

changes = ["training.rounds=1", "training.epochs=1", "data.size=%d", "runtime.workers=2"]
try:
    fedloom.run("digits-tasks", overrides=changes, method=fedloom.Method(stage=Mine()))
except fedloom.errors.UserError as error:
    print(error)
"""


@pytest.mark.parametrize("size", [8, 64])
def test_a_class_of_a_notebook_is_named_and_nothing_hangs(size: int) -> None:
    """Code that is in no file, as in a notebook's cell; with 64 x 64 pixels the data are larger than a pipe holds."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK % size], capture_output=True, text=True, timeout=120, check=True
    )
    assert "a worker process cannot load the model, the method or the data: AttributeError: " in done.stdout, (
        done.stderr
    )
    assert "Mine" in done.stdout
    assert "put that into a module that can be imported, or set runtime.workers to 1" in done.stdout
