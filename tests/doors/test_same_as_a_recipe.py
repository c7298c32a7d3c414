"""Objects in and a recipe build the same federation: results are equal bit for bit, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn import datasets
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedloom as fl
from fedloom.engines.api import Result
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.tasks import Classification

METHODS: dict[str, Any] = {
    "fedavg": fl.methods.fedavg,
    "fedhca2": fl.methods.fedhca2,
    "feddea": lambda: fl.methods.feddea(fl.methods.fedavg()),
    "matu": fl.methods.matu,
    "dfmtl": lambda: fl.methods.dfmtl(top=1, warmup=1),
}
SECTIONS: dict[str, Any] = {
    "feddea": {"name": "fedavg", "add": {"feddea": {}}},
    "dfmtl": {"name": "dfmtl", "top": 1, "warmup": 1},
}
SHORT = {"rounds": 2, "steps": 2, "batch_size": 16}
HAR = Path(__file__).parents[2].parent / "shared" / "data" / "har.npz"


def tables(name: str) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Real features and the labels of two tasks: of scikit-learn, or of the people in HAR."""
    if name == "har":
        with np.load(HAR) as data:
            x, y = data["x_train"][:600].reshape(600, -1), data["y_train"][:600].astype(np.int64)
    else:
        bunch = getattr(datasets, f"load_{name}")()
        x, y = bunch.data, bunch.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))[:400]
    x = ((x - x.mean(0)) / (x.std(0) + 1e-6))[order].astype(np.float32)
    return x, {"which": y[order] - y.min(), "odd": (y[order] - y.min()) % 2}


class Net(nn.Module):
    """As a user writes it: it knows nothing of fedloom."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"which": nn.Linear(16, classes), "odd": nn.Linear(16, 2)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.encoder(x)
        return {task: head(features) for task, head in self.heads.items()}


def as_recipe(name: str, method: str, folder: Path) -> tuple[dict[str, Any], Built]:
    """The recipe path: an archive of arrays, a partition and an encoder by name."""
    x, y = tables(name)
    cut = len(x) * 3 // 4
    file = folder / "data.npz"
    parts = {"train": slice(None, cut), "test": slice(cut, None)}
    np.savez(file, **{f"x_{k}": x[s] for k, s in parts.items()}, **{f"{t}_{k}": v[s] for t, v in y.items()
             for k, s in parts.items()})  # fmt: skip
    recipe = {
        "name": "same",
        "data": {"name": "arrays", "path": str(file), "labels": {t: f"{t}_{{split}}" for t in y}},
        "partition": {"name": "one-task", "clients_per_task": 1, "all_task_clients": 1},
        "model": {"name": "mlp", "hidden": [16]},
        "method": SECTIONS.get(method, method),
        "training": SHORT,
    }
    return recipe, build(load(recipe))


def as_objects(built: Built) -> tuple[fl.Federation, nn.Module]:
    """The same clients as data sets of their own, and the same weights in a module of one's own."""
    train, test, names = built.dataset.train, built.dataset.test, [t.name for t in built.dataset.tasks]

    def data(part: Any, positions: np.ndarray[Any, Any], tasks: Any) -> TensorDataset:
        x, y = part.batch(torch.from_numpy(positions), torch.device("cpu"))
        return TensorDataset(x, *(y[task] for task in tasks))

    federation = fl.Federation(
        clients={
            s.client: fl.Client(data(train, s.train, s.tasks), data(train, s.val, s.tasks), tasks=list(s.tasks))
            for s in reversed(built.partition.shares)
        },
        tasks={t.name: Classification(t.name, t.channels) for t in built.dataset.tasks},
        test=data(test, np.arange(len(test)), names),
    )
    net = Net(built.dataset.input_shape[0], built.dataset.tasks[0].channels)
    ours = [p for _, p in built.module.named_parameters()]
    with torch.no_grad():
        for mine, other in zip(net.parameters(), ours, strict=True):
            mine.copy_(other)
    return federation, net


def assert_equal(one: Result, other: Result) -> None:
    """Final tensors and every number that was measured."""
    a, b = (load_file(r.folder / "model.safetensors") for r in (one, other))
    b = {key.replace("net.encoder.", "layers.").replace("net.heads", "X"): v for key, v in b.items()}
    assert sorted(map(tuple, (t.shape for t in a.values()))) == sorted(map(tuple, (t.shape for t in b.values())))
    for x, y in zip(a.values(), b.values(), strict=True):
        assert torch.equal(x, y)
    assert one.run.rows() == other.run.rows()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["digits", "wine", pytest.param("har", marks=pytest.mark.slow)])
def test_objects_give_what_the_recipe_gives(name: str, method: str, tmp_path: Path) -> None:
    if name == "har" and not HAR.is_file():
        pytest.skip("the data of HAR are not here")
    recipe, built = as_recipe(name, method, tmp_path)
    federation, net = as_objects(built)
    before = [p.clone() for p in net.parameters()]
    named = fl.run(recipe, tmp_path / "named")
    given = fl.run(federation, tmp_path / "given", model=net, method=METHODS[method](), **SHORT)
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    assert_equal(named, given)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(n, m, marks=() if (n, m) == ("wine", "fedhca2") else pytest.mark.slow)
        for n in ("digits", "wine")
        for m in METHODS
    ],
)
def test_two_workers_give_what_one_gives(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # a worker process imports this module, for its Net
    federation, net = as_objects(as_recipe(name, method, tmp_path)[1])
    options: dict[str, Any] = {"model": net, "method": METHODS[method](), **SHORT}
    one, two = (fl.run(federation, tmp_path / f"{n}", workers=n, **options) for n in (1, 2))
    assert_equal(one, two)


def test_a_run_without_a_server_is_the_same_too(tmp_path: Path) -> None:
    recipe, built = as_recipe("wine", "fedavg", tmp_path)
    federation, net = as_objects(built)
    named = fl.run(recipe, tmp_path / "named", peers={"choose": {"top": 1}})
    given = fl.run(federation, tmp_path / "given", model=net, peers={"choose": {"top": 1}}, **SHORT)
    assert_equal(named, given)
