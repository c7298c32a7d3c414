"""Data sets, and rules that deal them out to clients. Importing this package does not import torch."""

from fedloom._lazy import lazy
from fedloom.data import (  # noqa: F401  (registers the data sets)
    arrays,
    at_nodes,
    cifar,
    class_folders,
    digits,
    domain_folders,
    domains,
    hdf5,
    many,
    nyud,
    pascal_context,
    scenes,
    several,
    tables,
)
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share
from fedloom.data.registry import DATASETS

__all__ = ["DATASETS", "PARTITIONERS", "Dataset", "Examples", "Partition", "Pool", "Share", "TensorExamples"]

__getattr__, __dir__ = lazy("fedloom.data", {"dataset": "Dataset Examples TensorExamples"})
