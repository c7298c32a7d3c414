"""A package outside fedloom: wines told apart, and whether they are strong, by three laboratories."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.functional import cross_entropy

import fedloom as fl
from fedloom.codecs import Raw
from fedloom.stages import Stage, Traits


def focal(outputs, labels, gamma=2.0):
    """Cross entropy with less weight on what is easy; one loss an example."""
    loss = cross_entropy(outputs, labels, reduction="none")
    return (1 - (-loss).exp()) ** gamma * loss


def balanced(outputs, labels):
    """Mean recall over the classes that occur."""
    hits = outputs.argmax(1) == labels
    return torch.stack([hits[labels == c].float().mean() for c in labels.unique()]).mean()


def wines(seed, labs: int = 3):
    """A federation: each laboratory has every third wine; one of them knows no sort."""
    data = load_wine()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0), dtype=torch.float32)
    y = {"sort": torch.tensor(data.target), "strong": torch.tensor(data.data[:, 0] > 13).long()}
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    part = lambda i: (x[i], {task: labels[i] for task, labels in y.items()})  # noqa: E731
    clients = {
        f"lab-{k}": fl.Client(train=part(order[40:][k::labs]), val=0.2, tasks=["sort", "strong"][k == 0 :])
        for k in range(labs)
    }
    tasks = {"sort": fl.task(classes=3), "strong": fl.task(classes=2, loss=focal, metrics={"balanced": balanced})}
    return fl.Federation(clients, tasks, test=part(order[:40]))


def halves(pool, seed):
    """Two clients with half of the wines each."""
    return {"left": range(0, len(pool), 2), "right": range(1, len(pool), 2)}


class Net(nn.Module):
    """Two layers, and a head a task."""

    def __init__(self, input_shape, width: int = 8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(*input_shape, width), nn.ReLU())
        self.heads = nn.ModuleDict({"sort": nn.Linear(width, 3), "strong": nn.Linear(width, 2)})

    def forward(self, x):
        return {task: head(self.encoder(x)) for task, head in self.heads.items()}


@dataclass(frozen=True)
class Clip(Stage):
    """Scale each row down to a norm of at most `limit`."""

    limit: float = 1.0
    traits = Traits("row", presence="row")

    def __call__(self, updates, state, ctx):
        norm = updates.X.norm(dim=1, keepdim=True)
        return updates.replace(X=updates.X * (self.limit / norm.clamp(min=self.limit))), state


def clipped(*, limit: float = 0.5):
    """FedAvg of clipped updates."""
    return fl.methods.fedavg().plus(Clip(limit))


class Plain(Raw):
    """A codec of one's own."""
