"""A job in a process of its own that meets a fault at one of its writes: it is killed, or the disk refuses."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, Literal

from fedloom.cli.app import message_of
from fedloom.engines import processes

KILLED, SENTENCE, TRACEBACK = -signal.SIGKILL, 2, 3
"""How a job ends, beside 0."""
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate")
_ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS}


@dataclass(frozen=True)
class Fault:
    """What happens at the write number `at` (from 1): before a file is opened for writing, synced, renamed or removed.

    kill        SIGKILL
    torn        SIGKILL, and of a file that was about to be synced only a part is there
    full        this write and all later ones fail, for the disk is full
    read-only   the same, for the file system is read-only
    no growth   from this write on the system itself lets no file grow: files can be opened, and writing to them fails
    """

    kind: Literal["kill", "torn", "full", "read-only", "no growth"]
    at: int
    seed: int = 0


def in_a_process(
    job: Callable[[], Any], folder: Path, fault: Fault | None = None, seconds: float | None = None
) -> tuple[int, str]:
    """Do a job in a child, which meets a fault at its writes below `folder`, or is killed after so many seconds.

    Returns how it ended and what it said: the number of its writes where it came to its end, or the one sentence of its
    error. An error that is none to the command line fails the test.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        code = TRACEBACK
        try:
            os.close(receiver)
            code = _work(job, os.fspath(folder), fault, sender)
        finally:
            os._exit(code)
    os.close(sender)
    killer = None if seconds is None else threading.Timer(seconds, os.kill, (child, signal.SIGKILL))
    if killer is not None:
        killer.start()
    with os.fdopen(receiver) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if killer is not None:
        killer.cancel()
        killer.join()
        _mend_server()
    assert code in (0, KILLED, SENTENCE), text
    return code, text


def _work(job: Callable[[], Any], home: str, fault: Fault | None, sender: int) -> int:
    """Return what the child does; returns its exit code."""
    _adopt_helpers()
    writes, sync = 0, os.fsync
    # what was there before this process, or was synced under another name, is on the disk for good
    there = [os.path.join(place, name) for place, _, names in os.walk(home) for name in names]
    synced: dict[str, int] = {name: os.path.getsize(name) for name in there}

    def at(path: Any, unsynced: bool = False) -> None:
        nonlocal writes
        if not isinstance(path, str | bytes | os.PathLike) or not os.fsdecode(path).startswith(home):
            return
        writes += 1
        if fault is None or writes < fault.at:
            return
        if fault.kind == "no growth":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        if fault.kind in _ERRORS:
            raise OSError(_ERRORS[fault.kind], os.strerror(_ERRORS[fault.kind]), os.fsdecode(path))
        if writes == fault.at:
            name = os.fsdecode(path)
            if fault.kind == "torn" and unsynced and os.path.isfile(name):
                os.truncate(name, random.Random(fault.seed).randint(synced.get(name, 0), os.path.getsize(name)))
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            at(arguments[0])
            if event == "os.rename":
                old, new = os.fsdecode(arguments[0]), os.fsdecode(arguments[1])
                synced[new] = synced.pop(old, 0)

    def fsync(opened: int) -> None:
        name = os.readlink(f"/proc/self/fd/{opened}")
        at(name, unsynced=True)
        sync(opened)
        synced[name] = os.path.getsize(name)

    os.fsync = fsync
    sys.addaudithook(hook)  # it cannot be removed, but the process ends
    try:
        job()
    except Exception as error:
        sentence = message_of(error)
        os.write(sender, (sentence or traceback.format_exc()).encode())
        return TRACEBACK if sentence is None else SENTENCE
    os.write(sender, str(writes).encode())
    return 0


def _mend_server() -> None:
    """Have a server of workers again, if a child was killed between calling it and asking: that ends the server too."""
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        try:
            processes.start(time.sleep, 0).join()
        except (EOFError, OSError):
            os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
            processes.prepare()


def _adopt_helpers() -> None:
    """Let this child, which multiprocessing does not know of, use the server that its parent's workers came from."""
    util._run_after_forkers()
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        server.ensure_running = lambda: None  # it would ask whether a child of this process has ended
