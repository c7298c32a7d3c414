"""Names that take more than one line: no run gets them, and folders from elsewhere that have them are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.data.digits import digits
from fedloom.errors import DataError, RecipeError, StateError
from fedloom.federation.runs.reader import Run
from fedloom.methods import Method
from fedloom.study.grid import load_grid
from tests_support import load_recipe

LINES = ("a\nb", "a\tb", "a\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = ("data.size=8", "training.rounds=1", "training.steps=1", "training.epochs=null")
    return fedloom.run(load_recipe(*changes), tmp_path_factory.mktemp("runs") / "run").folder


def moved(of: dict[str, Any], name: str) -> None:
    """Give what a mapping has first another name."""
    of[name] = of.pop(next(iter(of)))


PLACES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "method": lambda info, name: info.update(method=name),
    "status": lambda info, name: info.update(status=name),
    "tasks": lambda info, name: moved(info["tasks"], name),
    "clients": lambda info, name: moved(info["clients"], name),
    "metrics": lambda info, name: next(iter(info["tasks"].values()))["metrics"].update({name: "max"}),
    "domain": lambda info, name: next(iter(info["clients"].values())).update(domain=name),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LINES)
def test_a_run_of_a_stranger(place: str, name: str, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    info = {k: v for k, v in json.loads((run / "run.json").read_text()).items() if k not in ("check", "files")}
    PLACES[place](info, name)
    (copy / "run.json").write_text(json.dumps(info))
    with pytest.raises(StateError, match=r"run\.json, .* found, expected a name in one line") as caught:
        Run.read(copy)
    assert repr(name) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", ["metric", "model", "split"])
def test_a_line_of_a_stranger(key: str, run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    info = {k: v for k, v in json.loads((run / "run.json").read_text()).items() if k not in ("check", "files")}
    (copy / "run.json").write_text(json.dumps(info))
    (copy / "state.json").unlink()
    line = json.loads((copy / "metrics.jsonl").read_text().splitlines()[-1])
    line["metrics"][0][key] = "a\nb"
    (copy / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(StateError, match=r"metrics\.jsonl, line 1, .*'a\\nb' found, expected a name in one line"):
        Run.read(copy)


@pytest.mark.parametrize("name", [*LINES, "a\x1b[2J"])
def test_no_run_gets_such_a_name(name: str) -> None:
    def score(outputs: Tensor, labels: Tensor) -> float:
        return 0.0

    with pytest.raises((ValueError, RecipeError), match="found, expected a name in one line"):
        Method(name=name)
    with pytest.raises(DataError, match="data set digits: the domain .* found, expected a name in one line"):
        replace(digits(0, size=8), domains=(name,))
    clients = {"ann": fedloom.Client((torch.zeros(4, 2), torch.zeros(4).long()))}
    with pytest.raises(RecipeError, match="expected a text that is not 'loss', in one line"):
        fedloom.Federation(clients, {"t": fedloom.task(classes=2, metrics={name: score})})
    with pytest.raises(RecipeError, match="a label is a text without '/', in one line"):
        load_grid({"name": "g", "data": {name: {"recipe": "digits-tasks"}}, "bases": {"FedAvg": {}}})
