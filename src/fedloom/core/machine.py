"""The cores and free memory of this machine, checks before an allocation, and locks that end with their process."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedloom.core.errors import InUseError, UserError, line_of, of_system

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # in glibc's malloc.h


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Return the bytes that are free on the machine or within its container's limit; None if unknown."""
    amounts = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        amounts.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{x}").read_text(encoding="ascii")) for x in ("max", "current"))
        amounts.append(limit - used)
    return min(amounts, default=None)


def available_memory() -> int:
    """Return the free bytes; if unknown, all memory of the machine, or 8 GB if that is unknown too."""
    free = free_memory()
    if free is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 * 10**9 if free is None else free


def need_memory(count: float, what: str) -> None:
    """Raise UserError where something would take more bytes than there are."""
    if count > 10**6 and count > (free := available_memory()):
        raise UserError(f"{what} needs {count / 1e9:.3g} GB of memory, but only {free / 1e9:.3g} GB are free")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the machine or on an accelerator."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("allocate memory", "out of memory"))


def message_of(error: Exception) -> str | None:
    """Return one sentence for an error that the user can correct, None for a bug or an error `elsewhere`."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return of_system(error)
    if out_of_memory(error):
        return f"memory ran out: {str(error).splitlines()[0] if str(error) else 'nothing more is known'}"
    return None


def elsewhere(error: Exception) -> str | None:
    """Return one sentence for an error in the user's own code, such as a method; None if the error is in fedloom.

    If the user's code makes a call that fedloom refuses (a vector of the wrong length), the error is the user's.
    """
    line = line_of(error)
    return None if line is None else f"{line}, which is no part of fedloom: {type(error).__name__}: {error}"


def keep_memory() -> None:
    """Keep freed memory in this process, up to 2 GB at once, for the next large tensor, and search less for garbage.

    Else a round of large models spends most of its time on touching fresh pages, and a quarter of a round of 10,000
    clients is Python's search for garbage. Memory is kept on Linux (glibc) only.
    """
    if 0 < gc.get_threshold()[0] < 20_000:
        gc.set_threshold(20_000, 20)
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_MAX, 0)
            library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


LOCK = ".lock"
"""The file of a run folder that is locked while a process is at work there, and the end of other such files' names."""


@contextmanager
def locked(file: Path, what: Path) -> Iterator[None]:
    """Lock a file, which stands for `what`, for this process, where the system can. Raises InUseError."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUseError(f"{what} is in use by another process") from error
        yield
