"""Measure what looking at the updates of a round costs (runtime.diagnostics), as a share of the round it is a part of.

Small real runs, where a round is short and the share therefore large: evaluation off, both measured in the same rounds
of one run. Then one look at matrices of several sizes beside the stage `Mean` on the same matrix, in turns: a look
does not grow with the number of columns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from _common import arguments, interleaved, machine, phases

import fedloom
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.federation.recipes import load
from fedloom.federation.rounds.diagnostics import EVERY, look
from fedloom.stages import Mean

RUNS: Mapping[str, tuple[str, ...]] = {
    "fedavg": ("method=fedavg",),
    "fedamp, a model for each client": ("method=fedamp",),
    "matu, a row for each task of a client": ("method=matu",),
    "peers, all hear all": ("method=fedavg", "peers={}"),
    "peers on a ring": ("method=fedavg", "peers={graph: ring}"),
}
MATRICES = ((4, 100_000), (20, 1_000_000), (100, 100_000), (100, 1_000_000))


def share(changes: tuple[str, ...], rounds: int) -> tuple[float, float]:
    """(seconds of a round, the share of them that goes into looking): means over rounds but the first and the last.

    Peers do not look in every round, so these are a multiple of the rounds from one look to the next.
    """
    common = (f"training.rounds={rounds}", f"evaluation.every={rounds}", "training.epochs=2")
    with tempfile.TemporaryDirectory() as home:
        fedloom.run(load("digits-tasks", (*common, *changes)), Path(home) / "run")
        spent = phases(Path(home) / "run")[1:-1]
    seconds = looking = 0.0
    for parts in spent:
        seconds += sum(s for phase, s in parts.items() if "sum over" not in phase and phase != "diagnostics")
        looking += parts.get("diagnostics", 0.0)
    return seconds / (rounds - 2), looking / seconds


def matrix(rows: int, columns: int) -> Updates:
    """Random updates of ten layers."""
    layout = Layout(tuple(Block(f"encoder.layer{i}.weight", (columns // 10,), part="encoder") for i in range(10)))
    return Updates.of(torch.randn(rows, layout.d), layout=layout)


def main() -> None:
    args = arguments(__doc__)
    torch.set_num_threads(1)
    print(machine())
    print(f"\n{'digits-tasks, 2 epochs':<40} {'a round':>10} {'looking':>9}")
    for name in [*RUNS][::4] if args.quick else RUNS:
        seconds, part = share(RUNS[name], 2 + EVERY * (1 if args.quick else 3))
        print(f"{name:<40} {1000 * seconds:>7.0f} ms {part:>9.1%}")
    print(f"\n{'rows x columns':<40} {'look':>10} {'Mean':>10}")
    for rows, columns in MATRICES[:1] if args.quick else MATRICES:
        updates = matrix(rows, columns)
        out, _ = Mean()(updates, {}, Ctx(1))
        ways = {"look": lambda u=updates, o=out: look(u, o), "mean": lambda u=updates: Mean()(u, {}, Ctx(1))}
        found = interleaved(ways, 3 if args.quick else 9)
        print(f"{f'{rows} x {columns:,}':<40} {1000 * found['look']:>7.1f} ms {1000 * found['mean']:>7.1f} ms")


if __name__ == "__main__":
    main()
