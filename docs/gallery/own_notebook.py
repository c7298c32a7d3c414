"""
Your own data, model, loss and metric
=====================================

What a notebook cell looks like. Nothing is registered; download this page as a notebook and change it.
"""

import torch
from torch import nn

import fedloom as fl

torch.manual_seed(0)
x = torch.randn(600, 12)
labels = {"kind": (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 0).long(), "strength": x[:, 4] * 2 + 0.1 * torch.randn(600)}


def shard(start, tasks):
    """A hundred examples with the labels of these tasks."""
    part = slice(start, start + 100)
    return fl.Client(train=(x[part], {task: labels[task][part] for task in tasks}), tasks=tasks)


def balanced(outputs, y):
    """The mean over classes of the accuracy on each."""
    right = outputs.argmax(1) == y
    return sum(float(right[y == c].float().mean()) for c in y.unique()) / len(y.unique())


fed = fl.Federation(
    clients={"ann": shard(0, ["kind", "strength"]), "bob": shard(100, ["kind"]), "cleo": shard(200, ["strength"])},
    tasks={"kind": fl.task(classes=3, metrics={"balanced": balanced}), "strength": fl.task()},
    test=(x[300:], {task: y[300:] for task, y in labels.items()}),
)
print(fed)

# %%
# Any module as encoder; heads are made for the tasks, and each client has those of its own.

net = {"name": fl.model(nn.Sequential(nn.Linear(12, 32), nn.ReLU()), heads="linear"), "heads": "own"}
table = fl.compare(fed, model=net, methods=["local", "fedavg", fl.methods.fedprox(mu=0.1)], rounds=8, base="local")
print(table)
