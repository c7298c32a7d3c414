"""Two single-threaded workers against a plain PyTorch loop on two threads: the same federated averaging.

10 clients x 600 random grey images of 28 x 28, a CNN of two convolutions with 20,266 parameters, batches of 32, SGD,
one local epoch, 3 rounds. Every run is a process of its own, and the two kinds take turns. The loop below knows
nothing of fedloom. The ratio is the loop's seconds over the pool's; the aim is 1.4 over the training rounds.

    rounds        all training rounds; the first one holds what torch does once in a process
    warm rounds   all but the first
    process       everything, from the interpreter's start to its end, worker processes and evaluation included
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import arguments, machine, phases

CLIENTS, EXAMPLES, ROUNDS, BATCH, LR = 10, 600, 3, 32, 0.05


def loop(path: str, threads: int) -> list[float]:
    """Federated averaging by hand. Returns the seconds of each round."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with np.load(path) as arrays:
        x = torch.from_numpy(arrays["x_train"]).float().div(255).unsqueeze(1)
        y = torch.from_numpy(arrays["y_train"])
    x = (x - x.mean()) / x.std()
    shares = torch.randperm(len(x)).chunk(CLIENTS)
    data = [(x[share], y[share]) for share in shares]
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 7 * 7, 48), nn.ReLU(), nn.Linear(48, 10)),
    )
    server = {k: v.clone() for k, v in model.state_dict().items()}
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        states = []
        for inputs, labels in data:
            model.load_state_dict(server)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for batch in torch.randperm(len(inputs)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            states.append({k: v.clone() for k, v in model.state_dict().items()})
        total = sum(len(labels) for _, labels in data)
        server = {
            k: sum(len(labels) / total * state[k] for (_, labels), state in zip(data, states, strict=True))
            for k in server
        }
        seconds.append(time.perf_counter() - start)
    return seconds


def fedloom(path: str, workers: int, threads: int, channels_last: bool) -> list[float]:
    """The same with fedloom. Returns the seconds of each round, without evaluation."""
    from fedloom.engines.api import run

    recipe: dict[str, Any] = {
        "name": "pool",
        "data": {"name": "arrays", "path": path},
        "partition": {"name": "iid", "clients": CLIENTS, "val_fraction": 0.0},
        "model": {"name": "cnn", "width": 4, "hidden": 48},
        "method": "fedavg",
        "training": {
            "rounds": ROUNDS,
            "epochs": 1,
            "batch_size": BATCH,
            "channels_last": channels_last,
            "optimizer": {"name": "sgd", "lr": LR},
        },
        "runtime": {"workers": workers, "threads": threads},
        "evaluation": {"every": 1000, "splits": ["test"]},
    }
    with tempfile.TemporaryDirectory() as folder:
        run(recipe, Path(folder) / "run")
        return [spent["dispatch"] + spent["train and aggregate"] for spent in phases(Path(folder) / "run")]


def write(path: str) -> None:
    """Random images and labels; the test part is small, for only round 0 and the last round look at it."""
    import numpy as np

    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", CLIENTS * EXAMPLES), ("test", 100)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, 10, count)
    np.savez(path, **arrays)


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "loop, 2 threads": ("loop", {"threads": 2}),
    "loop, 1 thread": ("loop", {"threads": 1}),
    "pool, 2 workers x 1 thread": ("fedloom", {"workers": 2, "threads": 1, "channels_last": True}),
    "  the same, not channels_last": ("fedloom", {"workers": 2, "threads": 1, "channels_last": False}),
    "no pool, 2 threads": ("fedloom", {"workers": 1, "threads": 2, "channels_last": True}),
    "no pool, 1 thread": ("fedloom", {"workers": 1, "threads": 1, "channels_last": True}),
}


def main() -> None:
    repeats = 1 if arguments(__doc__).quick else 4
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "images.npz")
        write(path)
        for _ in range(repeats):
            for name, (kind, options) in WAYS.items():
                command = [sys.executable, __file__, "--child", kind, json.dumps({"path": path, **options})]
                start = time.perf_counter()
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                whole = time.perf_counter() - start
                seconds = json.loads(done.stdout)
                runs[name].append((sum(seconds), sum(seconds[1:]), whole))
    print(f"{machine()}; {repeats} turns: seconds, and in brackets the 2-thread loop's over these")
    # Other work on the machine only ever adds time, and to two busy cores the most: so the least is shown as well.
    for what, pick in (("median", statistics.median), ("least", min)):
        print(f"\n{what:<32} {'rounds':>14} {'warm rounds':>14} {'process':>14}")
        picked = {name: [pick(v) for v in zip(*values, strict=True)] for name, values in runs.items()}
        base = picked["loop, 2 threads"]
        for name, values in picked.items():
            print(f"{name:<32} " + " ".join(f"{v:6.2f} ({b / v:5.2f})" for v, b in zip(values, base, strict=True)))


if __name__ == "__main__":
    if "--child" in sys.argv:
        kind, options = sys.argv[2:]
        print(json.dumps({"loop": loop, "fedloom": fedloom}[kind](**json.loads(options))))
    else:
        main()
