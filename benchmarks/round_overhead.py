"""Measure what a round costs beside forward and backward passes: 20 clients, the digits, the small CNN, federated
averaging.

The real runner works in this process, with a clock around each part of it; metrics lines and the checkpoint (both with
fsync) belong to a round, and evaluation is off. After each round a bare loop does the same number of forward passes,
losses and backward passes on batches that lie ready. The overhead is what a round takes longer than this loop, as a
fraction of the round; the aim is less than 10 %. A client has 65 images, so an epoch is 3 batches (32, 32, 1).

In the list of parts, "the rest" holds the Python of the local loop and the release of the autograd graph, which the
bare loop has too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from _common import arguments, machine


class Clock:
    """Seconds by part, round by round; `bare` is called after each round, and timed."""

    def __init__(self, bare: Callable[[], None]) -> None:
        self.bare = bare
        self.seconds: dict[str, float] = defaultdict(float)
        self.rounds: list[dict[str, float]] = []
        self.start = time.perf_counter()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a clock around it."""

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return timed

    def mark(self, *_: Any) -> None:
        """A round has ended."""
        end = time.perf_counter()
        row = {**self.seconds, "round": end - self.start}
        self.bare()
        self.start = time.perf_counter()
        self.rounds.append({**row, "bare loop": self.start - end})
        self.seconds.clear()

    def parts(self) -> dict[str, float]:
        """Median milliseconds of each part, the whole round and the bare loop, without the first and the last round."""
        rows = self.rounds[1:-1]
        return {k: statistics.median(row.get(k, 0.0) for row in rows) * 1e3 for k in rows[0]}


def bare_loop(recipe: dict[str, Any]) -> Callable[[], None]:
    """Forward, loss and backward of one round's batches."""
    import torch

    from fedloom.core.context import Ctx
    from fedloom.federation.recipes.loader import load
    from fedloom.federation.rounds.build import build
    from fedloom.training.flat import FlatModel
    from fedloom.training.loop import batches, channels_last, task_losses

    built = build(load(recipe))
    model = FlatModel(built.module, built.layout)
    ready = []
    for client in built.federation.clients.values():
        for _, index in batches(client.train.index, built.recipe.training, Ctx(1, 0), client.id):
            x, targets = client.train.examples.batch(index, torch.device("cpu"))
            ready.append((channels_last(x), targets, client.tasks))

    def loop() -> None:
        model.grad.zero_()
        for x, targets, tasks in ready:
            loss, _ = task_losses(model.module(x, tuple(tasks)), targets, tasks)
            loss.backward()

    return loop


def measure(epochs: int, rounds: int, tasks: list[str], size: int) -> dict[str, float]:
    """Milliseconds by part, after running a recipe."""
    import torch

    from fedloom.data.dataset import TensorExamples
    from fedloom.engines import api
    from fedloom.federation.rounds import rounds as process
    from fedloom.federation.rounds import server as steps
    from fedloom.federation.runs.folder import RunFolder
    from fedloom.models.multitask import MultiTask
    from fedloom.stages import Mean
    from fedloom.training import loop

    recipe = {
        "name": "overhead",
        "data": {"name": "digits", "tasks": tasks, "size": size},
        "partition": {"name": "iid", "clients": 20},
        "model": "small-cnn",
        "method": "fedavg",
        "training": {"rounds": rounds, "epochs": epochs, "batch_size": 32, "optimizer": {"lr": 0.05}},
        "evaluation": {"every": 10_000, "splits": ["test"]},
    }
    torch.set_num_threads(1)
    clock = Clock(bare_loop(recipe))
    build = loop.build

    def optimizer(*args: Any) -> Any:
        made = build(*args)
        made.step = clock.around("optimiser step", made.step)
        return made

    watched: list[tuple[Any, str, str]] = [
        (MultiTask, "forward", "forward"),
        (loop, "task_losses", "loss"),
        (torch.Tensor, "backward", "backward"),
        (TensorExamples, "batch", "batch assembly"),
        (loop, "channels_last", "batch assembly"),
        (steps, "load", "load the model at the client"),
        (steps, "finish", "update and payload of the client"),
        (process, "count_up", "bytes counted"),
        (process, "count_down", "bytes counted"),
        (Mean, "__call__", "server step"),
        (RunFolder, "write_round", "metrics lines, fsync"),
        (RunFolder, "save", "checkpoint, fsync"),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(loop, "build", clock.around("optimiser made", optimizer)),
    ):
        patches = [
            mock.patch.object(owner, name, _method(clock.around(part, getattr(owner, name))))
            for owner, name, part in watched
            if hasattr(owner, name)
        ]
        for patch in patches:
            patch.start()
        progress = api.Progress()
        progress.round = clock.mark  # type: ignore[method-assign]
        try:
            api.run(recipe, Path(folder) / "run", progress=progress)
        finally:
            for patch in patches:
                patch.stop()
    return clock.parts()


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function, which becomes a method where it is put on a class."""
    return lambda *args, **options: function(*args, **options)


def main() -> None:
    quick = arguments(__doc__).quick
    print(f"{machine()}; 1 thread, batches of 32, medians over rounds")
    everything = ["digit", "parity", "large", "holes"]
    for tasks, size, epochs in ((["digit"], 16, 2), (["digit"], 16, 5), (everything, 16, 5), (["digit"], 32, 5)):
        parts = measure(epochs, 4 if quick else 12, tasks, size)
        whole, bare = parts.pop("round"), parts.pop("bare loop")
        parts["the rest"] = whole - sum(parts.values())
        print(f"\n{len(tasks)} task{'s' * (len(tasks) > 1)}, images of {size} x {size}, {epochs} local epochs")
        print(f"  a round {whole:.1f} ms, the bare loop {bare:.1f} ms, overhead {1 - bare / whole:.1%}")
        for part, ms in sorted(parts.items(), key=lambda p: -p[1]):
            print(f"    {part:<34} {ms / whole:6.1%}  {ms:7.2f} ms")


if __name__ == "__main__":
    main()
