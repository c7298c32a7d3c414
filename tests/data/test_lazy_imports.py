"""Checking a recipe must not pay for torch, nor a run for torch's compiler."""

from __future__ import annotations

import subprocess
import sys


def test_registries_are_filled_without_torch_and_a_run_needs_no_compiler():
    code = """
import sys
import fedloom.data, fedloom.models, fedloom.tasks
assert {e.name for e in fedloom.data.DATASETS} >= {"arrays", "cifar10", "digits"}
assert {e.name for e in fedloom.data.PARTITIONERS} >= {
    "class-dirichlet", "domains", "iid", "one-task", "single-and-multi", "task-dirichlet", "task-weights"}
assert {e.name for e in fedloom.models.ENCODERS} >= {"cnn", "mlp", "resnet10", "small-cnn"}
heavy = {"torch", "sklearn", "torchvision"} & set(sys.modules)
assert not heavy, heavy
from fedloom.data import Dataset, TensorExamples
from fedloom.models import MultiTask, build_model
from fedloom.tasks import Classification
assert "torch" in sys.modules
import fedloom
fedloom.run("digits-tasks", overrides=["data.size=8", "training.rounds=1", "training.epochs=null", "training.steps=1"])
assert "torch._dynamo" not in sys.modules, "it takes 2 s to load"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
