"""fedloom activated, hyper and domains, each on a real run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import fedloom

TINY = ("training.epochs=null", "training.steps=1", "training.rounds=2", "evaluation.every=1", "model.width=4")
RUNS = {
    "activated": ("digits-tasks", "method.add.activated-dimensions={}"),
    "hyper": ("digits-tasks", "method=fedhca2"),
    "domains": ("f2dc/digits-embedded", "method=fedavg", "partition.clients={plain: 1, inverted: 2}"),
}
SHOWS = {
    "activated": ("digit-0", "overlap"),
    "hyper": ("alpha", "digit-0"),
    "domains": ("plain", "inverted", "average"),
}


@pytest.mark.parametrize("command", RUNS)
def test_a_run_as_text_numbers_and_picture(command: str, fedloom_, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe, *changes = RUNS[command]
    run = fedloom.run(recipe, tmp_path / "run", overrides=[*TINY, *changes]).folder
    code, out, _ = fedloom_(command, run)
    assert code == 0
    assert all(word in out for word in SHOWS[command]), out
    for name in ("o.csv", "o.md", "o.png"):
        assert fedloom_(command, run, tmp_path / name)[:2] == (0, f"{tmp_path / name}\n")
    rows = list(csv.reader(io.StringIO((tmp_path / "o.csv").read_text())))
    assert len(rows) > 2
    assert all(len(row) == len(rows[0]) for row in rows)
    assert (tmp_path / "o.md").read_text().count("\n|") > 2
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", RUNS)
def test_a_run_without_such_records(command: str, fedloom_, tmp_path: Path) -> None:
    run = fedloom.run("digits-tasks", tmp_path / "run", overrides=[*TINY]).folder
    code, out, err = fedloom_(command, run)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
