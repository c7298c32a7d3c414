"""Who holds what: pure functions of (pool, seed, parameters) that return a table of clients.

Sources of the rules: NIID-Bench (class Dirichlet), MaTU (task Dirichlet), FedDEA and FedHCA2 (one task per client),
the DFMTL thesis (task weights), FedHEAL and F2DC (domain allocation).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.registry import Registry

PARTITIONERS = Registry("partition")
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Pool:
    """What a partitioner may look at: labels and domains, never inputs. Index i is the i-th train example."""

    labels: Mapping[str, np.ndarray[Any, Any]]
    """Task name -> labels (N) of the train part; the order of the tasks is the data set's."""
    domain: np.ndarray[Any, Any] | None = None
    domains: tuple[str, ...] = ()
    """Names of the values of `domain`."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.labels)

    def __len__(self) -> int:
        return len(next(iter(self.labels.values())))


@dataclass(frozen=True, eq=False)
class Share:
    """One client's share: its tasks with loss weights, and its positions in the train part (sorted)."""

    client: str
    tasks: Mapping[str, float]
    train: Indices
    val: Indices
    domain: str | None = None


@dataclass(frozen=True, eq=False)
class Partition:
    """The table of all clients, sorted by client id."""

    shares: tuple[Share, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON value: clients with tasks, domain and indices, and the hash of all that."""
        clients = [
            {
                "client": s.client,
                "tasks": dict(s.tasks),
                "domain": s.domain,
                "train": s.train.tolist(),
                "val": s.val.tolist(),
            }
            for s in self.shares
        ]
        return {"hash": self.hash, "clients": clients}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Partition:
        """Rebuild a partition from `to_json`."""
        return Partition(
            tuple(
                Share(
                    c["client"],
                    c["tasks"],
                    np.asarray(c["train"], np.int64),
                    np.asarray(c["val"], np.int64),
                    c["domain"],
                )
                for c in value["clients"]
            )
        )

    @property
    def hash(self) -> str:
        """16 hexadecimal digits that change with any client, task, weight, domain or index."""
        digest = hashlib.sha256()
        for s in self.shares:
            digest.update(json.dumps([s.client, sorted(s.tasks.items()), s.domain]).encode())
            for part in (s.train, s.val):
                digest.update(len(part).to_bytes(8, "little") + part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]
