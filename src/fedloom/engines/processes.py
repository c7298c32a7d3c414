"""Child processes. Torch and fedloom are loaded once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

LOADED = ("fedloom.engines.api",)
"""Modules that the server of all children imports, and torch with them. None starts a thread or touches a GPU."""

SAFE_PATH = "PYTHONSAFEPATH"
"""The environment variable of Python's option -P."""


def context() -> BaseContext:
    """Return the context in which children start: forks of a server of one thread that has imported `LOADED`.

    On other systems than Linux libraries do not survive a fork, so there every child is a new interpreter.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(LOADED))
    return server


def prepare(*also: str) -> None:
    """Start the server of all children, which imports `LOADED` and more while this process does something else."""
    if sys.platform == "linux":
        multiprocessing.get_context("forkserver").set_forkserver_preload([*LOADED, *also])
        with _safe_path(), _undisturbed(), _no_main():
            forkserver.ensure_running()


def start(function: Callable[..., None], *arguments: Any, daemon: bool = False) -> BaseProcess:
    """Start a child that runs a function of a module, in this process's environment. It ignores Ctrl-C."""
    process = context().Process(target=_begin, args=(dict(os.environ), function, *arguments), daemon=daemon)  # type: ignore[attr-defined]
    with _safe_path(), _undisturbed(), _no_main():
        process.start()
    return process


def end(process: BaseProcess, patience: float = 5) -> None:
    """Wait for a child to end, and kill it after so many seconds."""
    process.join(timeout=patience)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Start interpreters that do not look into the current folder first, where a file could be called like a module
    of Python. Children get this process's sys.path later."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]
        os.environ |= {} if before is None else {SAFE_PATH: before}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait. A process that starts meanwhile never receives it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the child's start would start this tracker, which clears the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _no_main() -> Iterator[None]:
    """Start processes that do not run the main script again: what it needs of it comes by value."""
    main, blank = sys.modules["__main__"], ModuleType("__main__")
    blank.__spec__ = None
    sys.modules["__main__"] = blank
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin(environment: Mapping[str, str], function: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()  # the server has that of the moment at which it began
    os.environ.update(environment)
    function(*arguments)
