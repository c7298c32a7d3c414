"""`fedloom doctor`: what is installed here, and what of it works."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from fedloom.cli import shared
from fedloom.core.machine import free_memory
from fedloom.federation.recipes.runtime import cores

Finding = tuple[str, str, str]
"""(what, state, details); the state is ok, absent or a problem."""

_PATIENCE = 10.0  # seconds for two threads to find each other


def doctor(as_json: shared.Json = False) -> None:
    """Print what is installed and usable here: torch, GPUs, processes that find each other, extras, memory."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    style = {"ok": "green", "absent": "dim"}
    sections = {
        "this machine": machine,
        "torch": torch_here,
        "many processes": processes,
        "extras (pip install 'fedloom[NAME]')": extras,
    }
    rows, tables = [], []
    for title, find in sections.items():
        tables.append(Table(title, "", "", box=SIMPLE_HEAD))
        for what, state, details in find():
            rows.append({"of": title, "what": what, "state": state, "details": details})
            tables[-1].add_row(what, Text(state, style=style.get(state, "bold red")), Text(details))
    shared.answer(rows, as_json, *tables)
    if any(row["state"] not in style for row in rows):
        raise typer.Exit(1)


def machine() -> Iterator[Finding]:
    """Python, cores, memory, disk."""
    wanted = (3, 11)
    state = "ok" if sys.version_info >= wanted else f"expected at least {wanted[0]}.{wanted[1]}"
    yield "python", state, f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    from fedloom._version import __version__

    yield "fedloom", "ok", f"{__version__}, {Path(__file__).parents[1]}"
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    yield "cores", "ok", f"{cores()}{load}; keep runtime.workers x runtime.threads within them"
    if (free := free_memory()) is not None:
        yield "free memory", "ok" if free > 1 << 30 else "below 1 GiB", f"{free / 2**30:.1f} GiB"
    yield "free disk", "ok", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB in this folder"


def torch_here() -> Iterator[Finding]:
    """torch, its threads, GPUs."""
    start = time.perf_counter()
    try:
        import torch
    except (ImportError, OSError) as error:
        yield "torch", "does not load", str(error)
        return
    spent = time.perf_counter() - start
    yield "torch", "ok", f"{torch.__version__}, loaded in {spent:.1f} s"
    said = os.environ.get("OMP_NUM_THREADS", "not set")
    yield "threads", "ok", f"{torch.get_num_threads()} (OMP_NUM_THREADS {said}); a recipe's runtime.threads decides"
    if not torch.version.cuda:
        yield "CUDA", "absent", "this torch was built for CPUs"
    elif not torch.cuda.is_available():
        yield "CUDA", "absent", f"this torch was built for CUDA {torch.version.cuda}, but no GPU or driver answers"
    else:
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            yield f"cuda:{i}", "ok", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def processes() -> Iterator[Finding]:
    """What runtime.engine=cluster needs."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    if not dist.is_available():
        yield "torch.distributed", "absent", "this torch was built without it"
        return
    gloo = dist.is_gloo_available()
    yield "gloo", "ok" if gloo else "absent", "between CPUs"
    if dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no GPU answers"
        yield "NCCL", "ok" if torch.cuda.is_available() else "absent", f"between GPUs, {version}"
    else:
        yield "NCCL", "absent", "between GPUs; not in this torch"
    if gloo:
        start = time.perf_counter()
        problem = rendezvous()
        spent = f"{1000 * (time.perf_counter() - start):.0f} ms"
        yield "loopback", "ok" if problem is None else "fails", problem or f"two members met on 127.0.0.1 in {spent}"


def rendezvous() -> str | None:
    """Let two threads meet on the loopback device, as processes would, and add up; what went wrong, or None."""
    from datetime import timedelta

    import torch
    from torch import distributed

    dist: Any = distributed  # its type stubs leave out what is used here
    patience = timedelta(seconds=_PATIENCE)
    try:
        store = dist.TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        return f"no socket on 127.0.0.1: {error}"
    sums: dict[int, float] = {}
    problems: list[str] = []

    def member(rank: int) -> None:
        try:
            client = dist.TCPStore("127.0.0.1", store.port, None, False, patience)
            group = dist.ProcessGroupGloo(dist.PrefixStore("doctor", client), rank, 2, patience)
            value = torch.ones(1)
            group.allreduce([value]).wait()
            sums[rank] = float(value)
        except (RuntimeError, OSError) as error:
            problems.append(str(error).splitlines()[0])

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    if problems:
        return f"{problems[0]}; has this machine's name an address of its own? (try GLOO_SOCKET_IFNAME=lo)"
    return None if sums == {0: 2.0, 1: 2.0} else "two members did not find each other on 127.0.0.1"


def extras() -> Iterator[Finding]:
    """Optional dependencies by extra, as the package declares them."""
    try:
        required = metadata.requires("fedloom") or []
    except metadata.PackageNotFoundError:
        yield "fedloom", "not installed", "it runs from its sources, so nothing says what its extras are"
        return
    found: dict[str, list[str]] = {}
    for line in required:
        match = re.match(r"([A-Za-z0-9._-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if match and match[1] != "fedloom" and match[2] != "test":
            found.setdefault(match[2], []).append(match[1])
    for extra, packages in found.items():
        have = {name: _version(name) for name in dict.fromkeys(packages)}
        missing = [name for name, version in have.items() if version is None]
        details = ", ".join(f"{name} {version or 'absent'}" for name, version in have.items())
        yield extra, "absent" if missing else "ok", details


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
