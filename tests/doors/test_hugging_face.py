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
from fedloom.core.lazy import need
from fedloom.errors import DataError

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
    with pytest.raises(
        DataError, match="'ann', train, example 0: a mapping with vector, label, size found: add the keys"
    ):
        rows(split)


class Strided:
    """As a partitioner of flwr-datasets: it is given its data set once, and gives partitions by their number."""

    num_partitions = 2

    def __init__(self) -> None:
        self.given: Any = None

    def is_dataset_assigned(self) -> bool:
        return self.given is not None

    @property
    def dataset(self) -> Any:
        return self.given

    @dataset.setter
    def dataset(self, value: Any) -> None:
        if not isinstance(value, Split):
            raise TypeError(f"of type `datasets.Dataset` but given {type(value)}")
        self.given = value

    def load_partition(self, partition_id: int) -> Any:
        return Split({name: column[partition_id :: self.num_partitions] for name, column in self.given.columns.items()})


def dealt(data: Any, partition: Any) -> fl.Federation:
    return fl.Federation(
        data=data, partition=partition, tasks={"label": fl.task(classes=3)}, inputs="vector", labels={"label": "label"}
    )


def test_a_partitioner_of_flwr_datasets_says_who_holds_what() -> None:
    given = Strided()
    given.dataset = Split(COLUMNS)
    for partition in (Strided(), given):
        fed = dealt(Split(COLUMNS), partition)
        shares = {share.client: len(share.index) for share in fed.partition().shares}
        assert shares == {"c00": 20, "c01": 20}
        inputs = fed.dataset.train.batch(torch.arange(40), torch.device("cpu"))[0]
        assert torch.equal(inputs, torch.from_numpy(np.concatenate([X[::2], X[1::2]])))


def test_a_partitioner_that_refuses_the_data_is_told() -> None:
    with pytest.raises(DataError, match=r"Federation, partition Strided: of type `datasets.Dataset` but given"):
        dealt((X, Y), Strided())


def test_a_partitioner_of_the_package_deals_a_split_of_the_package() -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    fed = dealt(of_the_package(COLUMNS), partitioners.IidPartitioner(num_partitions=4))
    assert [share.client for share in fed.partition().shares] == ["c00", "c01", "c02", "c03"]
