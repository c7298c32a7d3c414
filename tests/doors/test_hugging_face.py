"""A split of Hugging Face `datasets` as the data of clients. The package is large and no part of what tests install, so
what always runs is a stand-in with the documented interface (`features`, `column_names`, `with_format`, rows as
dictionaries, columns by name); the same test runs with the package itself where that is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.errors import DataError
from fedloom.extras import need

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0.5)
COLUMNS = {"vector": X, "label": Y, "size": X[:, 0]}


class Split:
    """As `datasets.Dataset`, as far as its documentation says how rows are read."""

    def __init__(self, columns: dict[str, Any], form: str | None = None) -> None:
        self.columns, self.form = columns, form
        self.features = {name: str(column.dtype) for name, column in columns.items()}
        self.column_names = list(columns)

    def with_format(self, form: str | None) -> Split:
        return Split(self.columns, form)

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [self[i][key] for i in range(len(self))]
        row = {name: column[key] for name, column in self.columns.items()}
        make = {None: lambda v: v.tolist(), "torch": torch.as_tensor, "numpy": lambda v: v}[self.form]
        return {name: make(value) for name, value in row.items()}


def of_the_package(columns: dict[str, Any]) -> Any:
    """A split of the package itself."""
    if find_spec("datasets") is None:
        pytest.skip("datasets is not here")
    return need("datasets", "data").Dataset.from_dict({name: column.tolist() for name, column in columns.items()})


def rows(part: Callable[[slice], Any], **keys: Any) -> list[dict[str, Any]]:
    tasks = {"sort": fl.task(classes=3), "size": fl.task()}
    clients = {"ann": fl.Client(part(slice(15))), "bob": fl.Client(part(slice(15, 30)), val=part(slice(30, 33)))}
    net = fl.model(nn.Linear(6, 4, bias=False), heads={"sort": nn.Linear(4, 3), "size": nn.Linear(4, 1)})
    with torch.no_grad():
        for number, each in enumerate(p for m in (net.module, *(net.heads or {}).values()) for p in m.parameters()):
            each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape) * (number + 1) / 5)
    fed = fl.Federation(clients, tasks, test=part(slice(33, 40)), **keys)
    return fl.run(fed, model=net, rounds=1, steps=2, batch_size=8).run.rows()


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("make", [Split, of_the_package])
def test_a_split_gives_the_numbers_of_its_arrays(make: Callable[[dict[str, Any]], Any], form: str | None) -> None:
    def split(part: slice) -> Any:
        return make({name: column[part] for name, column in COLUMNS.items()}).with_format(form)

    found = rows(split, inputs="vector", labels={"sort": "label", "size": "size"})
    assert found == rows(lambda part: (X[part], {"sort": Y[part], "size": X[part, 0]}))
    with pytest.raises(DataError, match="'ann', train, example 0: a mapping with vector, label, size found; name the"):
        rows(split)
