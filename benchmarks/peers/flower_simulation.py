"""Flower's own simulation engine, with its own FedAvg. It neither evaluates nor writes anything."""

import sys
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import CLIENTS, ROUNDS, Clock, epoch, network, shares

PATH, TOGETHER = sys.argv[1], int(sys.argv[2])
data = cache(shares)
app = ClientApp()


@app.train()
def train(message: Any, context: Any) -> Any:
    """An epoch of one client."""
    torch.set_num_threads(1)
    x, y = data(PATH)[int(context.node_config["partition-id"])]
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    epoch(model, x, y)
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def main() -> None:
    clock, server = Clock(), ServerApp()

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(network().state_dict()), ROUNDS, evaluate_fn=lambda *_: clock.tick())

    cores = 2 // TOGETHER
    run_simulation(server, app, CLIENTS, backend_config={"client_resources": {"num_cpus": cores, "num_gpus": 0}})
    clock.tell()


if __name__ == "__main__":
    main()
