"""Shared fixtures. Threads are limited before torch is imported: two processes of two threads collapse on two cores."""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # tests start many interpreters; each would compile the library again

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

import fedloom
from fedloom.core.settings import trust
from fedloom.engines.api import Result
from fedloom.federation.rounds.progress import Progress
from tests_support import Quick, load_recipe

torch.set_num_threads(1)
sys.dont_write_bytecode = False
typer.main.get_command = cache(typer.main.get_command)  # nearly all of the time of most command lines
os.fsync = lambda file: None  # a run waits 20 times for the disk; what kills processes leaves the disk alone

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without looking for garbage, which takes a third of the time, and leave them alone later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is rendered once is there for all tests, and nothing is in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _no_code_is_allowed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test allows code for another one, or reads or writes the user's own configuration."""
    monkeypatch.setenv(trust.CONFIG, str(tmp_path_factory.getbasetemp() / "config"))
    monkeypatch.setenv(trust.ALLOW, "")
    monkeypatch.setattr(trust, "_allowed", set())


@pytest.fixture
def torch_stays_as_it_is() -> Iterator[None]:
    """A script that runs in this process may choose torch's default dtype and threads, and no other test sees it."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.fixture
def quick(tmp_path: Path) -> Quick:
    """Run the main recipe for a few steps, with changes: quick("method=fedprox", recipe="digits-tasks")."""
    count = iter(range(1000))

    def run(*changes: str, recipe: str = "digits-tasks", **options: Any) -> Result:
        options = {"progress": Progress(), **options}
        return fedloom.run(load_recipe(*changes, recipe=recipe), tmp_path / f"run{next(count)}", **options)

    return run
