"""Measure what a GPU makes of a run, by `make bench-gpu`: the ways to use one, in turns, in seconds of a round on the
wall.

Where there is no GPU it says so and ends.

    one at a time        clients train one after another, in this process
    stacked              all clients of a round together (torch.func.vmap)
    two workers          two processes share the GPU
    bf16                 one at a time, under autocast
    each GPU             a worker on each, where there are several

FedAvg of 20 clients with 65 digits each, a small convolutional network and an MLP, images of 16 x 16 and 64 x 64,
batches of 16.
Rounds are those between the ends of round 2 and of the last one; the same on the CPU stands beside them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from _common import arguments, machine

WAYS = {
    "CPU, one at a time": (),
    "one at a time": ("runtime.device=cuda",),
    "stacked": ("runtime.device=cuda", "training.stacked=true"),
    "two workers": ("runtime.device=[cuda:0, cuda:0]", "runtime.workers=2"),
    "bf16": ("runtime.device=cuda", "training.precision=bf16"),
}
MODELS = ("{name: mlp, hidden: [256]}", "small-cnn")


def seconds(changes: tuple[str, ...], rounds: int) -> float:
    """The median round of a run."""
    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load

    ends: list[float] = []
    progress = api.Progress()
    progress.round = lambda *_: ends.append(time.perf_counter())  # type: ignore[method-assign]
    settings = (
        "partition={name: iid, clients: 20}",
        "training.batch_size=16",
        f"training.rounds={rounds}",
        "evaluation={every: 1000, predictions: false}",
    )
    with tempfile.TemporaryDirectory() as folder:
        api.run(load("digits-tasks", (*settings, *changes)), Path(folder) / "run", progress=progress)
    return statistics.median(b - a for a, b in pairwise(ends[1:]))


def main() -> None:
    import torch

    quick = arguments(__doc__).quick
    count = torch.cuda.device_count()
    if not count:
        print("no CUDA device is here, so there is nothing to measure")
        return
    ways = dict(WAYS)
    if count > 1:
        devices = ", ".join(f"cuda:{i}" for i in range(count))
        ways["each GPU"] = (f"runtime.device=[{devices}]", f"runtime.workers={count}")
    print(f"{machine()}; {count} x {torch.cuda.get_device_name()}")
    for model in MODELS:
        for size in (16, 64):
            job = (f"model={model}", f"data={{name: digits, tasks: [digit], size: {size}}}")
            for name, changes in ways.items():
                taken = min(seconds((*job, *changes), 4 if quick else 10) for _ in range(1 if quick else 3))
                print(f"{model:<28} {size:>3} x {size:<3} {name:<20} {1e3 * taken:8.1f} ms a round", flush=True)


if __name__ == "__main__":
    main()
