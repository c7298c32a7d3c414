"""Measure how well a server reads a client's label counts from the update of its head's bias, with and without noise.

Ten clients hold handwritten digits with shares of the classes drawn from Dirichlet(0.5), and train one epoch of FedAvg
from the initial model. The number is the correlation (Pearson) between the ten values of a client's bias update, as the
server receives it, and its numbers of training examples of the ten classes: over all clients and five seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

import torch
from _common import arguments, machine

from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.messages import blank
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.federation.rounds.worker import TrainJob, Worker

BASE = (
    "data.tasks=[digit]",
    "partition={name: class-dirichlet, clients: 10, alpha: 0.5}",
    "method.weights=uniform",
    "training.epochs=1",
)
WAYS: Mapping[str, tuple[str, ...]] = {
    "no privacy": (),
    "trust: central, noise 1": ("privacy={clip: 1, noise: 1, delta: 0.01}",),
    "trust: local, noise 1": ("privacy={clip: 1, noise: 1, delta: 0.01, trust: local}",),
}


def correlations(*changes: str) -> Iterator[float]:
    """One number per client: of its bias update in round 1 and its label counts."""
    built = build(load("digits-tasks", (*BASE, *changes)))
    federation, shared, worker = built.federation, built.shared, Worker(built.setup)
    messages = dispatch(built, initial_state(built)["server"], federation.clients)
    columns = shared.slices[shared.names.index("heads.digit.bias")]
    for name, client in federation.clients.items():
        payload = worker.train(TrainJob(name, 1, messages[name], {})).payload
        like = blank(shared, federation, payload.rows, torch.zeros(1, shared.d))
        update = built.method.codec.unpack(payload.packed, like)[0, columns].double()
        yield float(torch.corrcoef(torch.stack([update, client.class_counts]))[0, 1])


def main() -> None:
    args = arguments(__doc__)
    print(machine())
    print(f"{'':24} {'learning rate':>13} {'clients':>8} {'least':>7} {'median':>7} {'most':>7}")
    for lr in (0.01, 0.05):
        for way, changes in WAYS.items():
            found = [
                one
                for seed in range(1 if args.quick else 5)
                for one in correlations(*changes, f"seed={seed}", f"training.optimizer.lr={lr}")
            ]
            least, middle, most = min(found), statistics.median(found), max(found)
            print(f"{way:24} {lr:13} {len(found):8} {least:7.3f} {middle:7.3f} {most:7.3f}", flush=True)


if __name__ == "__main__":
    main()
