"""Worker processes: what a notebook defines travels to them, or is refused; they share a server with torch loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.engines import processes
from fedloom.engines.api import Result
from fedloom.errors import UserError
from fedloom.server import Plain
from fedloom.stages import Mean
from tests_support import assert_same

SCRIPT = """
import fedloom
from fedloom.stages import Mean

class Mine(Mean):
    pass

changes = ["training.rounds=1", "training.steps=1", "training.epochs=null", "data.size=8"]
print(fedloom.run("digits-tasks", overrides=changes, workers=2, method=fedloom.Method(stage=Mine())).status)
"""


def local_method() -> fedloom.Method:
    """A method whose stage no other process can import."""

    class Mine(Mean):
        """The mean."""

    return fedloom.Method(stage=Mine())


def test_a_class_of_a_notebook_travels_to_worker_processes(quick: Callable[..., Result]) -> None:
    assert_same(quick(method=local_method()), quick("runtime.workers=2", method=local_method()))


def test_without_cloudpickle_it_is_refused_with_what_to_do(
    quick: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match=r"Mine is defined in a notebook, .*fedloom\[notebook\].* runtime.workers to 1"):
        quick("runtime.workers=2", method=local_method())


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Worker processes do not run it again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert done.stdout == "finished\n", done.stderr


def test_what_cannot_be_copied_is_refused(quick: Callable[..., Result]) -> None:
    method = replace(fedloom.methods.fedavg(), server=Locked())
    with pytest.raises(UserError, match=r"cannot be sent to a worker process: TypeError: cannot pickle '_thread.lock'"):
        quick("runtime.workers=2", method=method)


@dataclass(frozen=True)
class Locked(Plain):
    """A server rule with a lock."""

    lock: Any = field(default_factory=threading.Lock)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child imports this module, for what it is to do."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


def _look(pipe: Connection) -> None:
    masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pipe.send((dict(os.environ), os.getppid(), masked, time.process_time()))


def _answer() -> Any:
    here, there = Pipe(duplex=False)
    child = processes.start(_look, there)
    there.close()
    answer = here.recv()
    child.join()
    assert child.exitcode == 0
    return answer


def test_children_share_a_server_and_see_the_environment_of_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has loaded torch, and may have begun before. They do not hear of Ctrl-C."""
    processes.prepare()
    begun = forkserver._forkserver._forkserver_pid
    monkeypatch.setenv("FEDLOOM_BEFORE", "1")
    first, server, masked, spent = _answer()
    assert first["FEDLOOM_BEFORE"] == "1"
    assert masked
    monkeypatch.delenv("FEDLOOM_BEFORE")
    monkeypatch.setenv("FEDLOOM_AFTER", "2")  # the server has long begun
    second, again, _, _ = _answer()
    assert "FEDLOOM_BEFORE" not in second
    assert second["FEDLOOM_AFTER"] == "2"
    if sys.platform == "linux":  # elsewhere every child is a new interpreter
        assert begun == server == again != os.getpid()
        assert spent < 0.5, "it imported what the server has already"
