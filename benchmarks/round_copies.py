"""Measure what a round costs beside training, in copies of the round's matrix: 5 clients, 9.2 million parameters, 1
step each.

The real runner works in this process on one thread, with metrics lines and their fsync, without evaluation; the
checkpoint is left out, for that is written to a disk. The same forward and backward passes and plain steps in a bare
loop are taken off, and what remains is divided by one copy of K x d float32. A copy is the unit because all that a
round has to do is to bring each client's difference into one matrix (K copies of d) and to combine its rows.

Times are CPU seconds: medians over rounds, the round, the loop and the copy in one process. Memory: the peak of a
process of its own (VmHWM of Linux), less what is resident when its imports are done and its data loaded; and the peak
of what is alive, by the record of torch's allocator in a run of its own. Aims: 10 copies and 6 d for fedavg, 16 and
(2 K + 4) d for fedhca2, 30 and (2 K + 4) d for matu.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from _common import alone, arguments, machine, resident

K, TASKS = 5, ["digit"]
METHODS = {"fedavg": (10, 6), "fedhca2": (16, 2 * K + 4), "matu": (30, 2 * K + 4)}


def recipe(method: str, width: int, rounds: int) -> dict[str, Any]:
    """A network of three layers, the middle one width x width."""
    return {
        "name": "copies",
        "data": {"name": "digits", "tasks": TASKS, "size": 32},
        "partition": {"name": "iid", "clients": K},
        "model": {"name": "mlp", "hidden": [width, width]},
        "method": method,
        "training": {"rounds": rounds, "steps": 1, "epochs": None, "batch_size": 8, "optimizer": {"lr": 0.01}},
        "evaluation": {"every": 10_000, "splits": ["test"], "predictions": False},
        "runtime": {"checkpoint_every": 10_000},
    }


def rounds_of(method: str, width: int, count: int) -> tuple[list[float], float]:
    """(CPU seconds of each round but the first and the last, bytes at the peak above those before the run)."""
    import torch

    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load

    torch.set_num_threads(1)
    ends: list[float] = []
    progress = api.Progress()
    progress.round = lambda *_: ends.append(time.process_time())  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        api.run(load(recipe(method, 8, 1)), Path(folder) / "small")
        before = resident("VmRSS")
        ends.clear()
        api.run(load(recipe(method, width, count)), Path(folder) / "run", progress=progress)
    return [b - a for a, b in pairwise(ends[:-1])], resident("VmHWM") - before


def alive(method: str, width: int, count: int) -> float:
    """Bytes of all tensors at the peak of a run."""
    import torch

    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.profiler.profile(profile_memory=True) as profile:
        api.run(load(recipe(method, width, count)), Path(folder) / "run", progress=api.Progress())
    events = profile.profiler.kineto_results.events()
    record = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in record))


def bare(width: int) -> tuple[Callable[[], None], int]:
    """(K forward and backward passes and steps for each task of a client, the number of parameters)."""
    import torch
    from torch import nn

    body = nn.Sequential(nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(width, 10) for _ in TASKS])
    net = nn.ModuleList([body, heads])
    x, y = torch.randn(8, 1024), torch.zeros(8, dtype=torch.int64)

    def loop() -> None:
        for _ in range(K):
            features = body(x)
            sum(nn.functional.cross_entropy(head(features), y) for head in heads).backward()  # type: ignore[union-attr]
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.01)
                    p.grad.zero_()

    return loop, sum(p.numel() for p in net.parameters())


def seconds(way: Callable[[], object], repeats: int = 7) -> float:
    """Median CPU seconds."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        way()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def measure(method: str, width: int, count: int) -> dict[str, float]:
    """A round, the bare loop and a copy in CPU seconds, and the peak in units of d."""
    import torch

    taken, peak = rounds_of(method, width, count)
    loop, d = bare(width)
    matrix = torch.randn(K, d)
    other = torch.empty_like(matrix)
    return {
        "round": statistics.median(taken),
        "loop": seconds(loop),
        "copy": seconds(lambda: other.copy_(matrix)),
        "peak": peak / 4 / d,
        "d": d,
    }


def main() -> None:
    quick = arguments(__doc__).quick
    print(f"{machine()}; K = {K}, 1 thread, CPU seconds")
    for method, (copies, vectors) in METHODS.items():
        m = alone(measure, method, 256 if quick else 2560, 4 if quick else 8)
        lives = alone(alive, method, 256 if quick else 2560, 4) / 4 / m["d"]
        over = (m["round"] - m["loop"]) / m["copy"]
        print(
            f"{method:<8} d = {m['d']:,.0f}: a round {m['round']:.3f}, the bare loop {m['loop']:.3f}, a copy "
            f"{m['copy']:.4f}; beside the loop {over:.1f} copies (aim {copies}), at the peak {m['peak']:.1f} d, "
            f"of which alive {lives:.1f} (aim {vectors})",
            flush=True,
        )


if __name__ == "__main__":
    main()
