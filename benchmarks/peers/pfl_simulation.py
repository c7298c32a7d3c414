"""pfl: Apple's simulator, in one process, with its own FedAvg. It neither evaluates nor writes anything."""

import sys
from typing import Any

import torch
from job import BATCH, CLIENTS, LR, ROUNDS, Clock, network, shares
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    """The job's network, with what pfl asks a module for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what is minimised."""
        self.train()
        return cross_entropy(self.body(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Nothing is measured."""
        return {}


def main(path: str) -> None:
    torch.set_num_threads(1)
    data, clock = shares(path), Clock()

    class Tick(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            clock.tick()
            return Metrics()

        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            clock.tick()
            return False, Metrics()

    def client(user: str) -> Dataset:
        return Dataset(raw_data=list(data[int(user)]), user_id=user)

    users = FederatedDataset(client, get_user_sampler("minimize_reuse", [str(i) for i in range(CLIENTS)]))
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    before = [p.detach().clone() for p in net.parameters()]
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS, evaluation_frequency=1000, train_cohort_size=CLIENTS, val_cohort_size=0),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
        callbacks=[Tick()],
    )
    if all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)):
        raise SystemExit("pfl's clients trained nothing")
    clock.tell()


if __name__ == "__main__":
    main(sys.argv[1])
