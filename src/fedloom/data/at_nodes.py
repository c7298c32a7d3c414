"""Data that stay with the clients: each reads its own, and says at the start of a run what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from fedloom.core.errors import DataError
from fedloom.data.partition import PARTITIONERS, Pool
from fedloom.data.registry import DATASETS

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset
    from fedloom.data.partition import Partition


@DATASETS.register("nodes")
def nodes(seed: int) -> Dataset:
    """Data that stay with the nodes of a deployment; each has a node.yaml that says where (see docs/flower.md)."""
    _refuse()


@PARTITIONERS.register("nodes")
def as_held(pool: Pool, seed: int) -> Partition:
    """Nothing is dealt out: clients hold what they hold (for data: nodes)."""
    _refuse()


def _refuse() -> NoReturn:
    raise DataError("data: nodes stays where it is, so nothing can be read here: start the run with `flwr run`")
