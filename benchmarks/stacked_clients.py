"""Stacked training of equal tiny models (torch.func.vmap) against one client at a time, in the same run.

    python benchmarks/stacked_clients.py [--quick]

20 clients of equal size (65 images of 8x8 digits), two small MLPs (64-16-10, 64-32-10) and the small CNN, batch 16; one
thread. Times are whole calls of the worker: load, train, subtract, pack.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _common import arguments, interleaved, machine

from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.federation.rounds.worker import TrainJob, Worker

MODELS = ("{name: mlp, hidden: [16]}", "{name: mlp, hidden: [32]}", "small-cnn")


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    print(f"20 clients, batch 16, one thread; {machine()}")
    for model in MODELS[:1] if quick else MODELS:
        for epochs in (1,) if quick else (1, 5):
            changes = (
                f"model={model}",
                "data={name: digits, tasks: [digit], size: 8, test_fraction: 0.199}",
                "partition={name: iid, clients: 20}",
                "training.batch_size=16",
                f"training.epochs={epochs}",
                "training.optimizer.momentum=0.9",
            )
            built = build(load("digits-tasks", changes))
            worker = Worker(built.setup)
            messages = dispatch(built, initial_state(built)["server"], built.federation.clients)
            jobs = [TrainJob(name, 1, message, {}) for name, message in messages.items()]
            ways: dict[str, Callable[[], object]] = {
                "one": lambda w=worker, j=jobs: [w.train(job) for job in j],
                "stacked": lambda w=worker, j=jobs: list(w.train_stacked(j)),
            }
            one, stacked = interleaved(ways, 9).values()
            times = f"one at a time {one * 1e3:6.1f} ms  stacked {stacked * 1e3:6.1f} ms  {one / stacked:.1f}x"
            print(f"{model:27} {epochs} epochs  {times}")


if __name__ == "__main__":
    main()
