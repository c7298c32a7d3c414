"""One federated round without a runner: three clients with different tasks, one server, FedAvg with FedDEA.

Everything that a runner does is here on one screen: send the model, train, subtract, transform, aggregate, apply.
Run it with: python examples/one_round_by_hand.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedloom as fl
from fedloom.core.context import generator
from fedloom.stages import Mean, TopMagnitude

# Real handwritten digits; two tasks on the same images: which digit, and is it even?
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = {"digit": torch.tensor(digits.target), "parity": torch.tensor(digits.target) % 2}

# The clients hold disjoint images and different tasks.
order = torch.randperm(len(images), generator=generator(0, "split"))
test, parts = order[:300], order[300:].chunk(3)
clients = {"ann": (["digit"], parts[0]), "bob": (["parity"], parts[1]), "eve": (["digit", "parity"], parts[2])}


class Net(nn.Module):
    """A shared encoder and one head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(32, 10), "parity": nn.Linear(32, 2)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](self.encoder(x))


torch.manual_seed(0)
model = Net()
# The layout says which column of the matrix of updates is which parameter, and whose.
roles = {"encoder.*": "encoder", "heads.digit.*": ("head", "digit"), "heads.parity.*": ("head", "parity")}
layout = fl.Layout.from_module(model, roles)
server = layout.flatten(model).clone()


def accuracy(task: str) -> float:
    with torch.no_grad():
        return (model(images[test], task).argmax(1) == labels[task][test]).float().mean().item()


def train(tasks: list[str], index: torch.Tensor, rng: torch.Generator) -> None:
    """Two epochs of plain SGD on the client's own tasks; other heads have no gradient and stay as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for batch in index[torch.randperm(len(index), generator=rng)].split(32):
            optimizer.zero_grad(set_to_none=True)
            sum(nn.functional.cross_entropy(model(images[batch], t), labels[t][batch]) for t in tasks).backward()
            optimizer.step()


print(f"before  digit {accuracy('digit'):.3f}  parity {accuracy('parity'):.3f}")
rows = {}
for name, (tasks, index) in clients.items():
    layout.load(server, model)  # the server sends
    train(tasks, index, generator(0, "order", name))  # the client trains
    rows[name] = layout.flatten(model) - server  # new minus old

# The round as a matrix: one row a client, one column a parameter.
sizes = [len(index) for _, index in clients.values()]
updates = fl.Updates.of(torch.stack(list(rows.values())), n=sizes, layout=layout, rows=list(rows))
method = TopMagnitude(rho=0.5) >> Mean()
out, _ = method(updates, method.init(layout), fl.Ctx(round=1))
server = server + out.X[0]  # the server applies

layout.load(server, model)
print(f"after   digit {accuracy('digit'):.3f}  parity {accuracy('parity'):.3f}")
print(f"{len(rows)} rows x {layout.d} columns through {method}")
