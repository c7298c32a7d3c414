"""Calls that a newcomer gets wrong: the error names the argument, what was found and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedloom as fl
from fedloom.engines.api import recipe_of
from fedloom.errors import UserError
from fedloom.training import LocalRule, View

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
DATA = TensorDataset(X, Y)
TASKS = {"sort": fl.task(classes=3)}
TWO = {"sort": fl.task(classes=3), "odd": fl.task(classes=2)}


def federation(train: Any = DATA, tasks: Any = TASKS, test: Any = DATA, **client: Any) -> fl.Federation:
    return fl.Federation(clients={"ann": fl.Client(train, **client)}, tasks=tasks, test=test)


def run(model: Any = None, what: Any = None, **options: Any) -> fl.Result:
    model = nn.Linear(4, 3) if model is None else model
    return fl.run(federation() if what is None else what, model=model, **{"rounds": 1, "steps": 1, **options})


class Pairs(Dataset[Any]):
    """A map-style data set of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


@dataclass(frozen=True)
class Fails(LocalRule):
    """A rule with a slip."""

    def grad(self, view: View, state: Any) -> None:
        view.grad.add_(view.outputs["sorts"].mean())


class Stream(IterableDataset[Any]):
    """What has no positions."""

    def __iter__(self) -> Any:
        return iter(DATA)


class Twice(nn.Linear):
    """A model with numbers of two precisions."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))


class Broken(nn.Module):
    """A model for other inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, torch.zeros(3, 1, 3, 3))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: fl.Federation(tasks=TASKS), "Federation: expected clients= or data=, found neither"),
    "no tasks": (lambda: federation(tasks=None), r"Federation: tasks=None found, expected \{name: fl.task\(...\)\}"),
    "a number as task": (lambda: federation(tasks={"sort": 3}), r"tasks: 'sort' is 3, expected fl.task\(...\)"),
    "a list of clients": (
        lambda: fl.Federation(clients=[fl.Client(DATA)], tasks=TASKS),
        r"Federation: clients=\[Client\(tasks=None, model=None\)\] found, expected \{name: fl.Client",
    ),
    "a task of numbers that no client has": (
        lambda: run("mlp", federation((X, {"sort": Y}), {"sort": fl.task(classes=3), "dose": fl.task()}, None)),
        "no client holds the task 'dose'",
    ),
    "a loss of every output and every label": (
        lambda: federation(tasks={"dose": fl.task(loss=nn.MSELoss())}),
        r"task 'task', loss: a function that compares every output \(B x 1\) with every label \(B\) found, expected",
    ),
    "a metric of every output and every label": (
        lambda: fl.task(metrics={"mae": lambda outputs, labels: float(abs(outputs - labels).mean())}),
        r"task 'task', metric 'mae': a function that compares .*: FUNCTION\(outputs.squeeze\(1\), labels\)",
    ),
    "a loss of depths that are not paired": (lambda: fl.task(kind="depth", loss=nn.L1Loss()), "loss: a function that"),
    "data as client": (
        lambda: fl.Federation(clients={"ann": DATA}, tasks=TASKS),
        r"clients: 'ann' is TensorDataset, expected fl.Client\(...\)",
    ),
    "data without partition": (lambda: fl.Federation(data=DATA, tasks=TASKS), "data= needs partition="),
    "partition without data": (
        lambda: fl.Federation(clients={"ann": fl.Client(DATA)}, tasks=TASKS, partition="iid"),
        r"partition= is only for data=, but clients= have their own data",
    ),
    "a misspelt partition": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition="idd"),
        r"partition: unknown partition 'idd'. Did you mean 'iid'\?",
    ),
    "a partition without its key": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition="iid"),
        "partition 'iid': clients: missing, expected an integer of at least 1",
    ),
    "a position that is not there": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition=[[0, 1, 2], [24, 5]]).partition(),
        "client 'c01': position 24 found, expected 0 to 23",
    ),
    "positions twice": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition=[[0, 1, 2], [2, 3]]).partition(),
        "clients 'c00' and 'c01' both hold example 2",
    ),
    "a partition of text": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition=[["a"], [1]]).partition(),
        r"partition, client 0: \['a'\] found, expected a list of positions such as \[0, 5, 9\]",
    ),
    "an unknown task": (
        lambda: fl.Federation(clients={"ann": fl.Client(DATA, tasks=["sorts"])}, tasks=TASKS),
        r"client 'ann': unknown task 'sorts'. Did you mean 'sort'\?",
    ),
    "a task as text": (
        lambda: fl.Federation(clients={"ann": fl.Client(DATA, tasks="sort")}, tasks=TASKS),
        r"client 'ann': tasks='sort' found, expected a list of names",
    ),
    "val of everything": (lambda: federation(val=1.5), "client 'ann': val=1.5 found, expected a share from 0"),
    "an iterable": (
        lambda: federation(train=Stream()),
        "client 'ann', train: Stream found, expected a torch Dataset with a length .* has no positions to deal out",
    ),
    "a loader": (
        lambda: federation(train=DataLoader(DATA)),
        "client 'ann', train: DataLoader found, .*; of a DataLoader its data set: loader.dataset",
    ),
    "a path": (lambda: federation(train="data.csv"), "client 'ann', train: str found, expected a torch Dataset"),
    "labels too few": (
        lambda: federation(train=(X, Y[:5])),
        "client 'ann', train, task 'sort': 5 labels found, expected 24, one for each example",
    ),
    "a label too large": (
        lambda: federation(tasks={"sort": fl.task(classes=2)}),
        r"client 'ann', train, task 'sort': the label 2 found, expected 0 to 1 \(-1: no label\), for classes=2",
    ),
    "labels that are no classes": (
        lambda: federation(train=(X, Y / 2)),
        r"client 'ann', train, task 'sort': labels of torch.float32 found, expected whole numbers from 0 to 2",
    ),
    "one label for two tasks": (
        lambda: federation(train=(X, Y), tasks=TWO),
        r"client 'ann', train: one label an example found, expected \{task: label\} for sort, odd",
    ),
    "columns for other tasks": (
        lambda: federation(tasks=TWO),
        "client 'ann', train: a TensorDataset with 1 columns of labels found, expected one for each of the tasks",
    ),
    "mappings without keys": (
        lambda: federation(train=Pairs({"image": X[0], "label": 1})),
        r"client 'ann', train, example 0: a mapping with image, label found: add the keys of the input and the labels",
    ),
    "items of one part": (
        lambda: federation(train=Pairs((X[0],))),
        r"client 'ann', train, example 0: tuple found, expected \(x, y\), \(x, \{task: y\}\) or a mapping",
    ),
    "inputs and labels that are no pair": (
        lambda: fl.Federation({"ann": fl.Client(X, Y)}, TASKS),
        r"train, example 0: Tensor found, expected .* a mapping; arrays as a pair: fl.Client\(\(x, y\)\)",
    ),
    "pairs of arrays in a list": (
        lambda: fl.Federation([(X, Y)] * 9, TASKS),
        r"Federation: clients=\[\(tensor\(.{50,200} \.\.\. found, expected \{name: fl.Client",
    ),
    "other inputs at the test": (
        lambda: federation(test=(X[:, :2], Y)),
        r"Federation, test: inputs of shape \(2,\) found, but client 'ann', train has \(4,\)",
    ),
    "text as input": (
        lambda: federation(train=Pairs(("a wine", 0))),
        "client 'ann', train, example 0: an input of type str found, expected a tensor, an array or numbers",
    ),
    "classes as text": (lambda: fl.task(classes="3"), "task: classes='3' found, expected a whole number of at least 2"),
    "a loss by name": (lambda: fl.task(classes=3, loss="focal"), "loss: 'focal' found, expected a function of"),
    "a loss that is a class": (
        lambda: fl.task(classes=3, loss=nn.CrossEntropyLoss),
        r"expected a function of \(outputs, labels\) or a module such as torch.nn.CrossEntropyLoss\(\)",
    ),
    "a metric by name": (
        lambda: fl.task(classes=3, metrics={"f1": "macro"}),
        r"metrics: 'f1' is 'macro', expected a function of \(outputs, labels\), an object of torchmetrics",
    ),
    "a loss that fails": (
        lambda: run(what=federation(tasks={"sort": fl.task(classes=3, loss=lambda o, t: o @ t)})),
        r"task 'sort', loss: RuntimeError: .* \(called with outputs of shape \(\d+, 3\) and labels of shape"
        r".*; \S+test_wrong_calls.py, line \d+\)",
    ),
    "a loss that is no tensor": (
        lambda: run(what=federation(tasks={"sort": fl.task(classes=3, loss=lambda o, t: 1.0)})),
        "task 'sort', loss: 1.0 found, expected a tensor with one number",
    ),
    "a method that fails": (
        lambda: run(method=fl.methods.fedavg().with_local(Fails())),
        r"client 'ann' \(tasks sort\), round 1: 'sorts' \(KeyError in \S+test_wrong_calls.py, line \d+\)",
    ),
    "a misspelt encoder": (lambda: run("mpl"), r"model.name: unknown encoder 'mpl'. Did you mean 'mlp'\?"),
    "a number as model": (lambda: run(3), "model: 3 found, expected a name, a section or an object"),
    "an object that is no model": (
        lambda: run(object()), r"model: object found, expected a torch.nn.Module, or fl.model\(...\)"
    ),
    "a module of torch.jit": (
        lambda: run(torch.jit.script(nn.Linear(4, 3))), "a module of torch.jit found, expected the torch.nn.Module"
    ),
    "a model for other inputs": (
        lambda: run(Broken()), r"model: Broken cannot take an input of shape \(1, 4\), torch.float32: RuntimeError"
    ),
    "a model with other outputs": (
        lambda: run(nn.Linear(4, 7)),
        r"model: Linear gives shape \(1, 7\) for one example of task 'sort', expected 1 x 3",
    ),
    "one tensor for two tasks": (
        lambda: run(nn.Linear(4, 3), federation((X, {"sort": Y, "odd": Y % 2}), TWO, None)),
        r"model: Linear gives one tensor, expected \{task: outputs\} for the tasks sort, odd; or give an encoder",
    ),
    "a head that is missing": (
        lambda: run(fl.model(nn.Linear(4, 8), heads={"sorts": nn.Linear(8, 3)})),
        r"model, heads: no head for task 'sort'. Did you mean 'sorts'\? Found: sorts",
    ),
    "a role that is not": (
        lambda: run(fl.model(nn.Linear(4, 3), roles={"*": "body"})),
        r"model, roles: 'body' found for 'weight', expected 'encoder', 'decoder' or 'head', or \(role, task\)",
    ),
    "a misspelt method": (lambda: run(method="fedavgg"), r"method.name: unknown method 'fedavgg'. Did you mean"),
    "a method that is none": (lambda: run(method=object()), "method: object found, expected a function that returns a"),
    "a misspelt option": (lambda: run(round=3), r"round: unknown option. Did you mean 'rounds'\?"),
    "a wrong value": (lambda: run(rounds="ten"), "training.rounds: 'ten' found, expected an integer of at least 1"),
    "a module that is not there": (
        lambda: run("nowhere.at:all"), "model.name: 'nowhere.at:all': there is no module 'nowhere', neither"
    ),
    "a name that is not in it": (
        lambda: run("torch.nn:Linearr"), r"model.name: 'torch.nn:Linearr': torch.nn has no 'Linearr'. Did you mean 'Lin"
    ),
    "data that are none": (lambda: fl.run(DATA, model="mlp"), "run: TensorDataset found, expected a fl.Federation"),
    "a method for parts": (lambda: run(method="moon"), "model: moon uses features, .* give an encoder: fl.model"),
    "a base that is not compared": (
        lambda: fl.compare(federation(), model="mlp", methods=["local", "fedavg"], base="locl"),
        r"compare: base='locl' found. Did you mean 'local'\? Methods: local, fedavg",
    ),
    "methods as text": (
        lambda: fl.compare(federation(), model="mlp", methods="local"),
        r"compare: methods='local' found, expected a list of methods, such as \['local', 'fedavg'\]",
    ),
    "labels as text": (
        lambda: federation(train=(X, ["wine"] * 24)),
        "client 'ann', train, task 'sort': labels such as wine found, expected numbers",
    ),
    "complex labels": (
        lambda: federation((X, X[:, 0] * 1j), {"size": fl.task()}, None),
        "client 'ann', train, task 'size': labels of torch.complex64 found, expected real or whole numbers",
    ),
    "one label for all": (
        lambda: federation(train=(X, 3)),
        "client 'ann', train, task 'sort': the label 3 alone found, expected 24, one for each example",
    ),
    "one-hot labels": (
        lambda: federation(train=(X, nn.functional.one_hot(Y))),
        r"client 'ann', train, task 'sort': labels of shape \(24, 3\) found, expected one number an example",
    ),
    "labels of another task": (
        lambda: federation(train=(X, {"odd": Y})), "client 'ann', train: labels of odd found, expected those of sort"
    ),
    "a task that nobody holds": (
        lambda: run(fl.model(nn.Linear(4, 3), "linear"),
                    fl.Federation({"ann": fl.Client((X, {"sort": Y, "odd": Y % 2}), tasks=["sort"])}, TWO)),
        "no client holds the task 'odd'",
    ),
    "a task without labels": (
        lambda: run(fl.model(nn.Linear(4, 3), "linear"),
                    fl.Federation({"ann": fl.Client((X, {"sort": Y}), tasks=["sort", "odd"])}, TWO)),
        "client 'ann' has no labelled example of its task 'odd'",
    ),
    "keys of labels as text": (
        lambda: fl.Federation({"ann": fl.Client(Pairs({"x": X[0], "y": 1}))}, TASKS, inputs="x", labels="y"),
        r"Federation: labels='y' found, expected \{task: key of its label\}",
    ),
    "no examples": (
        lambda: federation(train=(X[:0], Y[:0])), r"client 'ann', train: inputs of shape \(0, 4\) found, expected N x"
    ),
    "inputs of two types": (
        lambda: fl.Federation({"ann": fl.Client((X, Y)), "bob": fl.Client(((X * 9).byte(), Y))}, TASKS),
        "client 'bob', train: inputs of torch.uint8 found, but client 'ann', train has torch.float32",
    ),
    "a name twice": (
        lambda: fl.Federation({1: fl.Client(DATA), "1": fl.Client(DATA)}, TASKS),
        "Federation, clients: expected different names, found '1' twice",
    ),
    "a name that is a path": (
        lambda: fl.Federation({"../x": fl.Client(DATA)}, TASKS),
        "Federation, clients: '../x' found, expected a client's name: letters, digits",
    ),
    "a task twice": (
        lambda: fl.Federation({"ann": fl.Client(DATA, tasks=["sort", "sort"])}, TASKS),
        r"client 'ann': tasks=\['sort', 'sort'\] found, expected 'sort' once",
    ),
    "a weight as text": (
        lambda: fl.Federation({"ann": fl.Client(DATA, tasks={"sort": "much"})}, TASKS),
        "client 'ann', task 'sort': expected a weight above 0, found 'much'",
    ),
    "val as text": (
        lambda: federation(val="10%"), "client 'ann': val='10%' found, expected a share from 0 to below 1, or data"
    ),
    "positions without clients": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition=[0, 1]).partition(),
        "partition, client 0: 0 found, expected a list of positions",
    ),
    "a partition that fails": (
        lambda: fl.Federation(data=DATA, tasks=TASKS, partition=lambda pool, seed: [][seed]).partition(),
        "partition <lambda>.*: IndexError: list index out of range",
    ),
    "a metric called loss": (
        lambda: fl.task(classes=3, metrics={"loss": lambda o, t: 0.0}),
        "metrics: the name 'loss' found, expected a text that is not 'loss'",
    ),
    "a metric of many numbers": (
        lambda: run(what=federation(tasks={"sort": fl.task(classes=3, metrics={"all": lambda o, t: o})})),
        r"task 'sort', metric 'all': .* \(called with outputs of shape \(\d+, 3\) and labels of shape",
    ),
    "a loss of whole numbers": (
        lambda: run(what=federation(tasks={"sort": fl.task(classes=3, loss=lambda o, t: (o.argmax(1) == t).sum())})),
        "task 'sort', loss: a tensor of torch.int64 without a gradient found, expected one that is computed from the",
    ),
    "a loss for other shapes": (
        lambda: run(what=federation(tasks={"sort": fl.task(classes=3, loss=nn.MSELoss())})),
        r"task 'sort', loss: .* \(called with outputs of shape \(\d+, 3\) and labels of shape",
    ),
    "a model of two precisions": (
        lambda: run(Twice()),
        "model: expected blocks of one dtype on one device, found torch.float32 on cpu, torch.float64 on cpu",
    ),
    "a model without parameters": (
        lambda: run(nn.Softmax(1), federation((X[:, :3], Y), TASKS, None)),
        "model: Softmax found, which has no parameters to train",
    ),
    "a class that needs more": (lambda: run(nn.Linear), "encoder Linear: TypeError: "),
    "a head for other features": (
        lambda: run(fl.model(nn.Linear(4, 8), heads={"sort": nn.Linear(7, 3)})),
        r"model, heads: 'sort': Linear cannot take an input of shape \(1, 8\), torch.float32: RuntimeError",
    ),
    "a model in the folder's place": (
        lambda: fl.run(federation(), nn.Linear(4, 3)),
        "run: folder=Linear.* found, expected a path; give the model as model=",
    ),
    "a function as progress": (
        lambda: fl.run(federation(), model="mlp", progress=print),
        "progress=.*print.* found, expected an object of a class that derives from .*Progress, or None",
    ),
    "an add-on as method": (
        lambda: run(method=fl.methods.feddea),
        "method feddea: expected a function with at most 0 required arguments, found 1",
    ),
    "a stage as method": (
        lambda: run(method=fl.stages.TopMagnitude(0.5)), "method: TopMagnitude found, expected a function that returns"
    ),
    "a misspelt parameter": (
        lambda: run(method={"name": "fedprox", "nu": 1.0}), "method.nu: unknown key. Allowed: .*, mu, "
    ),
    "a section misspelt within": (
        lambda: run(training={"optmizer": {"lr": 0.1}}), r"training.optmizer: unknown key. Did you mean 'optimizer'\?"
    ),
    "no seeds": (
        lambda: fl.compare(federation(), model="mlp", methods=["local"], seeds=0),
        "compare: seeds=0 found, expected the number of seeds, or a list of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_answered(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        call()


def test_numbers_of_numpy_are_numbers() -> None:
    task = fl.task(classes=np.int64(3), class_weights=np.ones(3), weight=np.float32(2))
    assert (task.classes, task.class_weights, task.weight) == (3, (1.0, 1.0, 1.0), 2.0)
    method = {"name": "fedprox", "mu": np.float32(0.5)}
    recipe = recipe_of(federation(), "mlp", method, rounds=np.int64(2), lr=np.float32(0.25), seed=np.arange(4)[3])
    assert (recipe.training.rounds, recipe.training.optimizer.lr, recipe.seed) == (2, 0.25, 3)
    assert recipe.method.params["mu"] == 0.5


def test_functions_of_numbers_that_pair_outputs_and_labels_are_taken() -> None:
    """A bias does not depend on the pairs, and one that fails is named when it runs."""
    mse = nn.functional.mse_loss
    for loss in (lambda outputs, y: mse(outputs.squeeze(1), y), lambda outputs, y: mse(outputs[:, 0], y)):
        fl.task(loss=loss, metrics={"bias": lambda outputs, y: outputs.mean() - y.mean(), "bad": lambda *_: 1 / 0})
    fl.task(kind="depth", loss=lambda outputs, y: mse(outputs.squeeze(1), y))


def test_a_resumed_run_says_what_it_lacks(tmp_path: Path) -> None:
    fed, net = federation(), nn.Linear(4, 3)
    fl.run(fed, tmp_path / "a", model=net, rounds=1, steps=1)
    with pytest.raises(UserError, match=r"data: 'federation, 24 examples, .*' is a Python object, .* as federation="):
        fl.resume(tmp_path / "a")
    with pytest.raises(UserError, match=r"model: 'Linear, .*' is a Python object, .* pass it as model="):
        fl.resume(tmp_path / "a", federation=fed)
    with pytest.raises(UserError, match="the data set has changed since the run began"):
        fl.resume(tmp_path / "a", federation=federation((X, Y.flip(0))), model=net)
    fl.run("digits-tasks", tmp_path / "b", training={"rounds": 1, "epochs": 1})
    with pytest.raises(UserError, match="the run has data: digits, so federation= has no place: leave it out"):
        fl.resume(tmp_path / "b", federation=fed)
    for key, other in (("model", {"name": net, "heads": "own"}), ("method", "fedprox")):
        with pytest.raises(UserError, match=rf"{key}\..* cannot change after the run has begun"):
            fl.resume(tmp_path / "a", **{"federation": fed, "model": net, key: other}, rounds=2)
    # the weights of the model that is given again do not count
    again = fl.resume(
        tmp_path / "a", federation=fed, model={"name": nn.Linear(4, 3), "heads": "all"}, method="fedavg", rounds=2
    )
    straight = fl.run(fed, tmp_path / "c", model=net, rounds=2, steps=1)
    assert torch.equal(again.model().weight, straight.model().weight)
    assert np.isfinite(again.run.rows()[-1]["value"])
