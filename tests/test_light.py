"""A fresh Python loads torch only where it is needed, and torch's compiler not even for a run."""

from __future__ import annotations

from pathlib import Path

from fedloom.federation.recipes.loader import names
from grid_support import FEDAVG, paper_grid, write_grid
from tests_support import loaded

COMMANDS = """
import fedloom.cli.app  # for every press of TAB
only("pydantic", "yaml")
"""
TABLES = """
from fedloom.study import open_folder, tabulate
table = tabulate(*open_folder({folder!r}))
for kind in ("text", "markdown", "latex", "html", "csv", "json"):
    getattr(table, f"to_{{kind}}")()
import fedloom.experiments.grid_run, fedloom.study.figures, fedloom.study.papers
only("torch", "vl_convert", "numpy", "pandas", "scipy")
"""
LISTS = """
import fedloom, fedloom.methods, fedloom.relatedness, fedloom.stages, fedloom.tasks
import fedloom.data, fedloom.models
fedloom.tasks.delta_m
from fedloom.peers import Events, Scenario, candidates
candidates("random-k", ["a", "b"], k=1)
Scenario.load({"loss": 0.1}).lost(1, "a", "b")
assert {e.name for e in fedloom.data.DATASETS} >= {"arrays", "cifar10", "digits"}
assert {e.name for e in fedloom.data.PARTITIONERS} >= {
    "class-dirichlet", "domains", "iid", "one-task", "single-and-multi", "task-dirichlet", "task-weights"}
assert {e.name for e in fedloom.models.ENCODERS} >= {"cnn", "mlp", "resnet10", "small-cnn"}
import fedloom.cli.look, fedloom.study.report
only("torch", "vl_convert")
"""
RECIPES = """
from fedloom.errors import RecipeError
from fedloom.federation.recipes import load
for name in {names!r}:
    load(name)
    try:
        load(name, ["training.rouds=1"])
    except RecipeError:
        pass
only("torch", "sklearn", "scipy", "torchvision")
"""
RUN = """
from fedloom.data import Dataset, TensorExamples
from fedloom.models import MultiTask, build_model
from fedloom.tasks import Classification
assert "torch" in sys.modules
fedloom.run("digits-tasks", overrides=["data.size=8", "training.rounds=1", "training.epochs=null", "training.steps=1"])
"""
ONLY = """
import sys
def only(*heavy):
    found = {*heavy} & {*sys.modules}
    assert not found, found
"""


def test_what_needs_no_torch_and_what_no_compiler(tmp_path: Path) -> None:
    folder = write_grid(tmp_path, paper_grid(), {("NYUD", "FedAvg", "-", 0): FEDAVG})
    parts = (ONLY, COMMANDS, TABLES.format(folder=str(folder)), LISTS, RECIPES.format(names=names()), RUN)
    assert not loaded("".join(parts), "torch._dynamo"), "it takes 2 s of CPU"
