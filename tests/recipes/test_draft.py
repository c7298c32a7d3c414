"""The recipe that `fedloom init` writes for an .npz archive, and what it says of the arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.federation.recipes import load

RNG = np.random.default_rng(0)
PERSON = np.repeat(np.arange(20), 5)
X = RNG.normal(size=(100, 3, 16)).astype(np.float32)
POOL: dict[str, Any] = {
    "x": X,
    "gait": np.array(["walk", "run"])[PERSON % 2],
    "slow": np.where(PERSON < 5, -1, PERSON % 2),
    "site": np.array(["berlin", "oslo", "köln", "rome"])[PERSON // 5],
    "person": PERSON,
    "speed": RNG.normal(size=100),
    "rate": np.array(50),
}


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs `fedloom init` on arrays and returns the exit code and all that it said."""
    monkeypatch.chdir(tmp_path)

    def run(arrays: dict[str, Any], labels: str, clients: object) -> tuple[int, str]:
        np.savez("mine.npz", **arrays)
        Path("recipe.yaml").unlink(missing_ok=True)
        options = ["--labels", labels, "--clients", str(clients), "--method", "fedavg", "--rounds", "1"]
        done = CliRunner().invoke(app, ["init", "mine.npz", *options])
        return done.exit_code, f"{done.output}{done.exception or ''}"

    return run


def test_init_asks_nothing_if_labels_and_clients_are_given(init: Any) -> None:
    assert init(POOL, "gait", "site")[0] == 0
    for options in (["mine.npz", "--labels", "gait"], ["mine.npz", "--labels", "gait", "--method", "fedprox"]):
        done = CliRunner().invoke(
            app, ["init", *options, "--clients", "site", "--out", f"r{len(options)}.yaml"], input=""
        )
        assert done.exit_code == 0, done.exception
    assert (load("r3.yaml").method.name, load("r5.yaml").method.name) == ("fedavg", "fedprox")
    assert load("r3.yaml").training.rounds == 20


def test_init_says_what_it_took_the_arrays_for(init: Any) -> None:
    code, said = init(POOL, "gait,slow", "site")
    assert code == 0
    assert said.splitlines()[:6] == [
        "inputs: x, 100 x 3 x 16, taken for series (N x channels x steps or N x steps)",
        "labels: gait (2 values), slow (2 values)",
        "clients: one for each of the 4 values of site",
        "test examples: a random 20% of the examples of each class and client (data.test_fraction)",
        "not used: person, rate, speed",
        "note: person: 20 values in 100 examples; examples of one person may land in training and test; "
        "to keep them together, set data.group=person",
    ]
    planned = fedloom.plan(load("recipe.yaml", ["data.group=person"]))
    assert {row["domain"] for row in planned.clients} == {"berlin", "oslo", "köln", "rome"}


def test_init_of_two_parts(init: Any) -> None:
    cut = {"train": slice(0, 60), "test": slice(60, 100)}
    two = {f"{key}_{part}": POOL[key][rows] for part, rows in cut.items() for key in ("x", "gait", "person")}
    code, said = init({**two, "names": np.array(["a", "b"])}, "gait", 3)
    assert code == 0
    for line in ("clients: 3, at random", "test examples: keys that end in _test", "not used: person, names"):
        assert line in said.splitlines()
    assert "land in training and validation; to keep them together, set data.group=person_{split}" in said
    assert "note" not in init(two, "gait", "person")[1]


def test_init_of_whole_numbers_and_of_steps_before_channels(init: Any) -> None:
    sensor = (X * 1000).astype(np.int16)
    assert init({"x": sensor, "y": PERSON % 2}, "y", 2)[0] == 0
    assert load("recipe.yaml").data.params["signal"] == "series"
    code, said = init({"x": sensor.transpose(0, 2, 1), "y": PERSON % 2}, "y", 2)
    assert code == 0
    assert "note: series of 16 x 3 (channels x steps) found, more channels than steps: add data.axes=NTC" in said


@pytest.mark.parametrize(
    ("arrays", "labels", "message"),
    [
        (
            POOL,
            "speed",
            "'speed' can be neither a label nor name clients: real numbers are targets of a regres",
        ),
        (
            POOL,
            "rate",
            "'rate' can be neither a label nor name clients: .* one value per example, found a single",
        ),
        ({"x": X, "speed": POOL["speed"]}, "speed", "no array beside the inputs 'x' can be a label; found speed: real"),
        ({"x": X, "z": np.arange(100), "y": PERSON % 2}, "z", "100 different values in 100 examples, too many"),
        ({"x": X, "z": PERSON - 9, "y": PERSON % 2}, "z", "the value -9 found, expected integers from 0, or -1"),
        ({"x": X, "z": np.ones(9), "y": PERSON % 2}, "z", r"shape \(9,\) found, expected one value for each of 100"),
        ({"x": np.array(["a"] * 9), "y": PERSON % 2}, "y", r"that are inputs .* found x \(<U1 of shape \(9,\)\)"),
    ],
)
def test_arrays_that_are_no_labels(arrays: Any, labels: str, message: str, init: Any) -> None:
    code, said = init(arrays, labels, 2)
    assert code
    assert re.search(message, " ".join(said.split()))
