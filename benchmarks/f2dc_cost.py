"""Measure what F2DC and its rivals cost beside FedAvg (F2DC, Table 4).

Counts, for f2dc/digits-embedded's ResNet-10 with width 64 and images of 32 x 32: parameters that a client uploads in a
round, and FLOPs of one forward pass of one image in training, by torch's counter of FLOPs (without norms and other
element-wise work, and without what a method computes beside its network, such as MOON's other models).

Times and memory, with a narrower network on 16 x 16: seconds of local training in a round, summed over the clients; MB
up and down in a round, of all clients, from the run's ledger; peak resident memory of a process of its own (Linux). The
methods take turns; the least of several turns counts, and the first round of a run does not.

The paper (PACS, 10 clients, 128 x 128): F2DC takes 1.02 times FedAvg's time and 1.01 times its FLOPs, and uploads as
much, since modules stay on the client. Here they are averaged unless `scope` is identity or local, which is shown too.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from _common import alone, arguments, machine, phases, resident

LOCAL = "f2dc, scope identity"
METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "moon": {"name": "moon", "mu": 5},
    "f2dc": "f2dc",
    LOCAL: {"name": "fedavg", "add": {"feature-modules": {"scope": "identity"}, "domain-weights": {}}},
    "fedavg + heal": {"name": "fedavg", "add": {"heal": {}}},
    **{name: name for name in ("fpl", "fedtgp", "fedrcl", "fedsa")},
}
PAPER = {"f2dc": (180.67 / 176.94, 16.46 / 16.31), "fpl": (215.61 / 176.94, 19.45 / 16.31)}
"""Method -> (time, FLOPs) over FedAvg's, from Table 4."""


def recipe(method: Any, *changes: str) -> Any:
    from fedloom.federation.recipes import load

    return load("f2dc/digits-embedded", [*changes, f"method={json.dumps(method)}"])


def counts(method: Any) -> dict[str, float]:
    """Parameters up, FLOPs of one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from fedloom.federation.rounds.build import build

    built = build(recipe(method, "data.size=32", "model.width=64"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.module.train()(torch.zeros(2, *built.dataset.input_shape))
    return {
        "upload": built.method.shared_part(built.layout).parameters.d,
        "flops": counter.get_total_flops() / 2,
    }


def measured(method: Any, rounds: int, width: int) -> dict[str, float]:
    """A run's seconds of local training and MB a round, and this process's peak memory."""
    from fedloom.engines.api import run
    from fedloom.federation.runs.reader import Run

    changes = (f"training.rounds={rounds}", "training.epochs=1", f"model.width={width}", "data.size=16")
    with tempfile.TemporaryDirectory() as folder:
        made = run(recipe(method, *changes, "evaluation.every=1000", "evaluation.splits=[test]"), Path(folder) / "run")
        read = Run.read(made.folder)
        seconds = [spent["local training, sum over clients"] for spent in phases(made.folder)[1:]]
    total = read.bytes_total()
    return {
        "seconds": min(seconds),
        "up": total["up"] / rounds / 1e6,
        "down": total["down"] / rounds / 1e6,
        "peak": resident("VmHWM") / 1e6,
    }


def main() -> None:
    quick = arguments(__doc__).quick
    from fedloom.methods import METHODS as REGISTERED

    turns, rounds, width = (1, 2, 4) if quick else (3, 4, 16)
    known = {name: m for name, m in METHODS.items() if (m if isinstance(m, str) else m["name"]) in REGISTERED.entries}
    methods = dict([*known.items()][: 3 if quick else None])
    counted = {name: counts(method) for name, method in methods.items()}
    found: dict[str, dict[str, float]] = {}
    for _ in range(turns):
        for name, method in methods.items():
            new = alone(measured, method, rounds, width)
            found[name] = {key: min(value, found.get(name, new)[key]) for key, value in new.items()}
    print(f"{machine()}; counts: width 64, 32 x 32; runs: width {width}, 16 x 16, 7 clients, {turns} turn(s)")
    heads = ("method", "params up", "MFLOPs", "MB up", "MB down", "train s", "peak MB", "time x", "FLOPs x", "paper's")
    print("{:<22}{:>12}{:>9}{:>8}{:>9}{:>9}{:>9}{:>8}{:>9}  {}".format(*heads))
    base, first = counted["fedavg"], found["fedavg"]
    for name in methods:
        c, f = counted[name], found[name]
        paper = "time x{:.2f}, FLOPs x{:.2f}".format(*PAPER[name]) if name in PAPER else ""
        print(
            f"{name:<22}{int(c['upload']):>12,}{c['flops'] / 1e6:>9.1f}{f['up']:>8.2f}{f['down']:>9.2f}"
            f"{f['seconds']:>9.2f}{f['peak']:>9.0f}{f['seconds'] / first['seconds']:>8.2f}"
            f"{c['flops'] / base['flops']:>9.3f}  {paper}"
        )


if __name__ == "__main__":
    main()
