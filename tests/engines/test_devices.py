"""Devices: their names, memory that runs out, deterministic algorithms; and with a GPU (`make gpu`) that runs give
there what they give on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedloom
from cluster_support import start
from fedloom.engines.cluster import comm
from fedloom.errors import UserError
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.measure import groups
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.federation.rounds.worker import TrainJob, Worker, check_device, fitting
from fedloom.models.multitask import MultiTask
from fedloom.training.flat import FlatModel
from tests_support import load_recipe

DEVICE = os.environ.get("FEDLOOM_DEVICE", "cuda")
gpu = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device is here")


def test_a_device_without_a_number_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check_device("cuda") == "cuda:0"
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(comm.dist, "is_nccl_available", lambda: True)
    assert comm.Comm(0, 1).use(["cuda"]) == "cuda:0"
    assert [device.index for device in current] == [0]  # torch refuses a device without one


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no memory for the output of any model."""

    def forward(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(MultiTask, "forward", forward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.batch_size=33"], r"training.batch_size=33 \(.* 2.00 GiB.\); try training.batch_size=16$"),
        (["training.batch_size=1"], r"training.batch_size=1 \(.*\); try smaller inputs or a smaller model$"),
        (
            ["training.stacked=true", "training.batch_size=32"],
            r".* try training.batch_size=16 or training.stacked=false$",
        ),
    ],
)
def test_training_without_memory_names_the_batch_size_to_try(full: None, changes: list[str], message: str) -> None:
    built = build(load_recipe(*changes))
    worker, state = Worker(built.setup), initial_state(built)["server"]
    messages = dispatch(built, state, built.federation.clients)
    jobs = [TrainJob(name, 1, message, {}) for name, message in messages.items()]
    with pytest.raises(UserError, match=r"^(client '.*'|\d stacked clients), round 1: memory ran out with " + message):
        next(worker.train_stacked(jobs)) if "training.stacked=true" in changes else worker.train(jobs[0])


def test_memory_that_pythons_own_objects_do_not_get_is_said_alike() -> None:
    why = r"^client 'a': memory ran out with training.batch_size=8 \(.*\); try training.batch_size=4$"
    with pytest.raises(UserError, match=why), fitting("client 'a'", "training.batch_size", 8):
        raise MemoryError


def test_measuring_without_memory_names_the_batch_size_to_try(full: None) -> None:
    built = build(load_recipe("evaluation.batch_size=100"))
    job = groups(built, initial_state(built), ("test",))[0].job(0, 0)
    with pytest.raises(UserError, match=r"^measuring client '.*', round 0: memory .* try evaluation.batch_size=50$"):
        Worker(built.setup).evaluate(job)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_deterministic_algorithms_are_on_during_a_run_alone(workers: int, tmp_path: Path) -> None:
    recipe = load_recipe("runtime.deterministic=true", f"runtime.workers={workers}", "training.rounds=1")
    assert recipe_hash(recipe) != recipe_hash(load_recipe("training.rounds=1"))

    class Looking(fedloom.engines.api.Progress):
        def round(self, round: int, numbers: Any) -> None:
            self.on = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic

    progress = Looking()
    fedloom.run(recipe, tmp_path / "run", progress=progress)
    assert progress.on == (True, True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic) == (False, False)


DENSE = ("data.count=24", "data.test_count=6", "training.batch_size=4", "training.steps=2", "training.epochs=null")
RUNS = {
    "dense": ("feddea/scenes", *DENSE, "training.rounds=2"),
    "lora": (
        "digits-tasks",
        "model={name: tiny-vit, width: 16, depth: 1, num_heads: 2, lora: {rank: 2}}",
        "training.rounds=2",
    ),
    "stacked": ("digits-tasks", "model={name: mlp, hidden: [16]}", "training.stacked=true", "training.rounds=2"),
    "deterministic": ("digits-tasks", "runtime.deterministic=true", "training.rounds=2"),
    "tf32": ("digits-tasks", "model=small-cnn", "training.precision=tf32", "training.rounds=2"),
    "many workers": ("digits-tasks", "runtime.workers=auto", "training.rounds=4"),
    "two workers": ("digits-tasks", "runtime.workers=2", "training.rounds=2"),
}


def losses(folder: Path) -> list[float]:
    """Return the losses after the last round of a run."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return [record["value"] for record in last["metrics"] if record["metric"] == "loss"]


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_is_that_on_the_cpu(name: str, tmp_path: Path) -> None:
    recipe, *changes = RUNS[name]
    devices = f"[{DEVICE}, {DEVICE}]" if name == "two workers" else DEVICE
    here = fedloom.run(recipe, tmp_path / "cpu", overrides=changes)
    there = fedloom.run(recipe, tmp_path / "device", overrides=[*changes, f"runtime.device={devices}"])
    assert losses(here.folder)
    assert losses(there.folder) == pytest.approx(losses(here.folder), rel=1e-2, abs=1e-3)


@gpu
@pytest.mark.slow
@pytest.mark.parametrize("shift", range(5))
def test_batch_norm_learns_from_images_wherever_its_tensors_lie(shift: int) -> None:
    """cuDNN's kernels for images with the channels last take no tensor that begins between multiples of 16 bytes."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(shift))
            self.norm = nn.BatchNorm2d(96)

        def roles(self) -> dict[str, str]:
            return {"*": "encoder"}

    found = []
    for device in ("cpu", DEVICE):
        model = FlatModel(Network(), device=device)
        x = torch.randn(8, 96, 14, 18, generator=torch.Generator().manual_seed(0)).to(device)
        model.grad.zero_()
        model.module.norm(x.contiguous(memory_format=torch.channels_last)).square().sum().backward()  # type: ignore
        found.append(torch.cat([model.vector, model.grad]).detach().cpu())
        assert torch.backends.cudnn.enabled
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(DEVICE != "cuda" or not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.slow
def test_memory_of_the_device_that_runs_out_is_a_sentence(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3e7 / torch.cuda.get_device_properties(0).total_memory)
    try:
        changes = ["model=small-cnn", "data.size=64", "training.batch_size=256", f"runtime.device={DEVICE}"]
        with pytest.raises(UserError, match=r"memory ran out with (training|evaluation).batch_size=\d+ .*; try "):
            fedloom.run("digits-tasks", tmp_path / "run", overrides=changes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@gpu
@pytest.mark.slow
def test_a_cluster_of_one_uses_the_device(tmp_path: Path) -> None:
    changes = ("digits-tasks", "training.rounds=2")
    start(tmp_path / "cluster", {"one": (*changes, f"runtime.device={DEVICE}")}, 1)
    assert not list((tmp_path / "cluster").glob("*.error"))
    here = fedloom.run(load_recipe(*changes[1:], recipe="digits-tasks"), tmp_path / "cpu")
    assert losses(tmp_path / "cluster" / "one") == pytest.approx(losses(here.folder), rel=1e-2, abs=1e-3)
