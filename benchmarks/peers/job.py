"""The job that all do: FedAvg of ten clients with 600 grey images each and a small convolutional network, on a CPU.

The network has 16 and 32 channels and 29,914 parameters; the convolutions of one image are 1.02 million multiply-adds.

Free of any framework of federated learning: data, model and a client's local epoch. What a framework adds is its own.
"""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLIENTS, EXAMPLES, ROUNDS, BATCH, LR, CLASSES = 10, 600, 3, 32, 0.05, 10


def write(path: Path) -> None:
    """Random images and labels; the test part is small, for nobody shall spend time on it."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", CLIENTS * EXAMPLES), ("test", 100)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, CLASSES, count)
    np.savez(path, **arrays)


@cache
def shares(path: str) -> list[tuple[Tensor, Tensor]]:
    """Each client's images (n x 1 x 28 x 28), normalised, and labels (n)."""
    with np.load(path) as arrays:
        x = torch.from_numpy(arrays["x_train"]).float().div(255).unsqueeze(1)
        y = torch.from_numpy(arrays["y_train"])
    x = (x - x.mean()) / x.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return [(x[share], y[share]) for share in order.chunk(CLIENTS)]


def network() -> nn.Module:
    """Return the network, with the same initial values every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 48), nn.ReLU(), nn.Linear(48, CLASSES)),
    )


def epoch(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One local epoch of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


class Clock:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def tick(self, *_: Any, **__: Any) -> None:
        """A round has ended, or the first one begins: then what came before does not count."""
        self.ends.append(time.perf_counter())

    def tell(self) -> None:
        """Print the seconds of each round as JSON, as the last line."""
        print(json.dumps([b - a for a, b in zip(self.ends[-ROUNDS - 1 :], self.ends[-ROUNDS:], strict=False)]))
