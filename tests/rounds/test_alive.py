"""What of a run is in memory at once: bytes of all tensors, in units of a model's parameters (d)."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.core.context import generator
from fedloom.federation.rounds import diagnostics, server

K, WIDTH = 5, 256


def peak(method: str, optimizer: str, folder: Path) -> float:
    """Return the bytes at the peak of a run of K clients with one task, by the record of torch's allocator."""
    x = torch.randn(K, 8, 16, generator=generator(0, "inputs"))
    clients = {f"c{i}": fl.Client((x[i], (x[i, :, 0] > 0).long())) for i in range(K)}
    net = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    d = sum(p.numel() for p in net.parameters())
    training = {
        "rounds": 3,
        "steps": 1,
        "epochs": None,
        "batch_size": 8,
        "stacked": False,
        "optimizer": {"name": optimizer},
    }
    federation = fl.Federation(clients, {"sign": fl.task(classes=2)})
    quiet = {"evaluation": {"splits": ["val"], "every": 10}, "runtime": {"checkpoint_every": 10}}
    with torch.profiler.profile(profile_memory=True) as profile:
        fl.run(federation, folder, model=net, method=method, training=training, **quiet)
    events = profile.profiler.kineto_results.events()
    record = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(size for _, size in record)) / 4 / d


@pytest.mark.parametrize(
    ("method", "optimizer", "most"),
    [
        ("fedavg", "sgd", 6.5),
        ("fedhca2", "sgd", 20.9),
        ("ditto", "sgd", 16.5),
        ("local", "sgd", 14.5),
        ("local", "adam", 16.5),
        ("matu", "sgd", 13.0),
    ],
)
def test_a_run_keeps_only_what_it_needs(
    method: str, optimizer: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are there while a client trains, and the start of one that keeps parts of the model only after it."""
    monkeypatch.setattr(server, "WHOLE", -1)  # every matrix is large
    monkeypatch.setattr(diagnostics, "VALUES", 1000)  # few of its columns are looked at, as of those of a large one
    assert peak(method, optimizer, tmp_path / "run") < most
