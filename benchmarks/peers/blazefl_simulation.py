"""BlazeFL's FedAvg, which trains clients one after another in one thread. It neither evaluates nor writes anything."""

import sys
from typing import Any

import torch
from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from job import BATCH, CLIENTS, LR, ROUNDS, Clock, network, shares
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model:
    """The job's network under any name."""

    def select_model(self, name: str) -> nn.Module:
        """Return a network with the initial values."""
        return network()


class Dealt:
    """The job's shares as BlazeFL's partitioned data."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: torch.Generator) -> DataLoader:
        """Return a client's shuffled batches."""
        return DataLoader(TensorDataset(*shares(self.path)[cid]), batch_size, shuffle=True, generator=generator)


def main(path: str) -> None:
    torch.set_num_threads(1)
    data = Dealt(path)
    shares(path)
    clock = Clock()
    server = FedAvgBaseServerHandler(Model(), "job", data, ROUNDS, CLIENTS, 1.0, "cpu", BATCH, 0)
    clients = FedAvgBaseClientTrainer(Model(), "job", data, "cpu", CLIENTS, 1, BATCH, LR, 0)
    before = [p.detach().clone() for p in server.model.parameters()]
    clock.tick()
    while not server.if_stop():
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        clock.tick()
    if all(torch.equal(a, b) for a, b in zip(before, server.model.parameters(), strict=True)):
        raise SystemExit("BlazeFL's clients trained nothing")
    clock.tell()


if __name__ == "__main__":
    main(sys.argv[1])
