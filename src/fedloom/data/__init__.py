"""Data sets, and rules that partition them among clients. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy
from fedloom.data import arrays, class_folders, combine, digits, nyud, pascal_context, scenes, texts  # noqa: F401  (registers them)
from fedloom.data.partition import PARTITIONERS as PARTITIONERS
from fedloom.data.partition import Partition as Partition
from fedloom.data.partition import Pool as Pool
from fedloom.data.partition import Share as Share
from fedloom.data.prepare import DATASETS as DATASETS
from fedloom.data.tables import images as _images  # noqa: F401
from fedloom.data.tables import table as _table  # noqa: F401

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset as Dataset
    from fedloom.data.dataset import Examples as Examples
    from fedloom.data.dataset import TensorExamples as TensorExamples
    from fedloom.data.own import Client as Client
    from fedloom.data.own import Federation as Federation
    from fedloom.models.signal import Signal as Signal

__getattr__, __dir__ = lazy(__name__)
