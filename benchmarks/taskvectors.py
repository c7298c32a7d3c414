"""What MaTU's task vectors cost: T = 30 tasks, N = 30 clients, d = 1.2 million float32.

`unify` of T task vectors against torch's `copy_` of the same T x d values, into memory that is there and into fresh
memory (the result of `unify` is fresh, too). The aim is three times a memory pass.

`aggregate_tasks` (eqs. 3 to 7) of N clients that hold 3 or all 30 tasks each, with packed masks and three partners for
every task; and the whole server step, in which each client's new vectors are unified afterwards, one client at a time.

Memory: peak resident memory (VmHWM of Linux) of a process of its own, less what is resident before (the clients' N
vectors and packed masks). The aim is (T + 3) d floats and packed masks.

Times are the least of several turns.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from _common import arguments, machine

N = T = 30
TASKS = [f"t{i:02d}" for i in range(T)]
WORK = {"aggregate_tasks": False, "server step": True}


def least(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least seconds of each way, taken in turn; one turn is not counted."""
    seconds = dict.fromkeys(ways, float("inf"))
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def uploads(k: int, d: int) -> list[Any]:
    """N clients with k tasks each."""
    import torch

    from fedloom.taskvectors import Upload, unify

    common = torch.randn(d)
    found = []
    for n in range(N):
        mine = sorted(TASKS[(3 * n + i) % T] for i in range(k))
        vector, masks, scales = unify([common + torch.randn(d) for _ in range(k)], packed=True)
        found.append(Upload(vector, tuple(mine), (10,) * k, masks, scales, f"c{n:02d}"))
    return found


def step(clients: list[Any], back: bool) -> None:
    """The server's part of a round: eqs. 3 to 7, and if `back`, what each client is sent, which is not kept."""
    from fedloom.taskvectors import aggregate_tasks, unify

    new = aggregate_tasks(clients)
    assert bool(((new.partners > 0).sum(1) == 3).all())
    rows = dict(zip(new.tasks, new.vectors, strict=True))
    for client in clients if back else []:
        unify([rows[t] for t in client.tasks], packed=True)


def resident(what: str) -> int:
    """Bytes that are (VmRSS) or were at most (VmHWM) resident in this process."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def peak(k: int, d: int, back: bool, threads: int) -> float:
    """Peak memory of the server's part in units of d floats."""
    import torch

    torch.set_num_threads(threads)
    step(uploads(k, 50_000), back)  # imports and the like
    clients = uploads(k, d)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM starts anew
    before = resident("VmRSS")
    step(clients, back)
    return (resident("VmHWM") - before) / (4 * d)


def memory(d: int) -> None:
    """Print peak memories, each measured in a process of its own."""
    if not sys.platform.startswith("linux"):
        print("\nmemory: measured on Linux only")
        return
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    spawn = multiprocessing.get_context("spawn")
    print(f"\npeak memory in units of d floats; aim: T + 3 = {T + 3}")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for k in (3, T):
            for name, back in WORK.items():
                for threads in (1, 2):
                    found = pool.submit(peak, k, d, back, threads).result()
                    print(f"  {k:>2} tasks a client, {name:<15} {threads} thread(s)  {found:5.2f}", flush=True)


def main() -> None:
    quick = arguments(__doc__).quick
    import torch

    from fedloom.taskvectors import unify

    d = 200_000 if quick else 1_200_000
    repeats = 1 if quick else 5
    print(f"{machine()}; N = {N}, T = {T}, d = {d:,} float32")
    memory(d)
    X = torch.randn(T, d)
    target = torch.empty_like(X)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        seconds = least(
            {
                "copy": lambda: target.copy_(X),
                "copy, fresh": lambda: X.clone(),
                "unify": lambda: unify(X),
                "unify, packed": lambda: unify(X, packed=True),
            },
            2 * repeats,
        )
        for name, s in seconds.items():
            ratios = f"this/copy {s / seconds['copy']:5.2f}  this/fresh {s / seconds['copy, fresh']:5.2f}"
            print(f"  {name:<16} {s * 1e3:7.1f} ms  {ratios}", flush=True)
        for k in (3, T):
            clients = uploads(k, d)
            ways = {name: lambda c=clients, b=back: step(c, b) for name, back in WORK.items()}
            for name, s in least(ways, 1 if quick else 2).items():
                print(f"  {k:>2} tasks a client, {name:<16} {s * 1e3:7.0f} ms", flush=True)


if __name__ == "__main__":
    main()
