"""Measure what a round costs more where jobs travel as Flower's messages to nodes in this process, beside `engine:
process`.

Whole runs in turns, so that other load hits both alike; median seconds of a round of training, aggregation and
evaluation, with what nodes write to their folders. The first round is not counted.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from _common import arguments, machine, phases

import fedloom
from fedloom.federation.recipes import load

CASES = {
    "5 clients, 14 thousand parameters, FedAvg": ("training.epochs=1",),
    "5 clients, 14 thousand parameters, FedPer with AdamW's moments kept": (
        "training.epochs=1",
        "method=fedper",
        "training.optimizer={name: adamw, lr: 0.001}",
        "training.keep_optimizer=true",
    ),
    "5 clients, 1.2 million parameters, FedAvg": ("training.epochs=1", "model={name: resnet10, width: 32}"),
}


def main(repeats: int, rounds: int) -> None:
    print(machine())
    for name, changes in CASES.items():
        taken: dict[str, list[float]] = {"process": [], "flower": []}
        with tempfile.TemporaryDirectory() as base:
            for i in range(repeats):
                for engine in taken:
                    recipe = load("digits-tasks", [*changes, f"training.rounds={rounds}", f"runtime.engine={engine}"])
                    fedloom.run(recipe, Path(base) / f"{engine}{i}")
                    spent = phases(Path(base) / f"{engine}{i}")[1:]
                    taken[engine] += [each["train and aggregate"] + each["evaluate"] for each in spent]
        here, there = (statistics.median(taken[engine]) for engine in ("process", "flower"))
        print(f"{name}: process {here:.3f} s a round, flower {there:.3f} s, {there / here:.2f} times", flush=True)


if __name__ == "__main__":
    main(*((1, 3) if arguments(__doc__).quick else (3, 6)))
