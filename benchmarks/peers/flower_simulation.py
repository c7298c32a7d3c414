"""Flower's own simulation engine, with its own FedAvg. It neither evaluates nor writes anything."""

import sys
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import CLIENTS, ROUNDS, Clock, epoch, network, shares

PATH, TOGETHER = sys.argv[1], int(sys.argv[2])
app = ClientApp()


@app.train()
def train(message: Any, context: Any) -> Any:
    """An epoch of one client."""
    torch.set_num_threads(1)
    x, y = shares(PATH)[int(context.node_config["partition-id"])]
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
        start = network().state_dict()
        result = strategy.start(grid, ArrayRecord(start), ROUNDS, evaluate_fn=lambda *_: clock.tick())
        end = result.arrays.to_torch_state_dict()
        if not any(name in end and not torch.equal(end[name], value) for name, value in start.items()):
            raise SystemExit("Flower's clients trained nothing")  # it goes on without those that fail

    cores = 2 // TOGETHER
    run_simulation(server, app, CLIENTS, backend_config={"client_resources": {"num_cpus": cores, "num_gpus": 0}})
    clock.tell()


if __name__ == "__main__":
    main()
