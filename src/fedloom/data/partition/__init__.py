"""Partitioners: pure functions of (pool, seed, parameters) that return a table of clients.

Rules shared by all partitioners:

- No two clients hold the same example, unless the parameter says `shared`. An example without a label in any task
  goes to no client. Unless a partitioner says otherwise, every other example goes to exactly one client.
- A client's tasks are those that the partitioner gives it; where it gives all, those that the client has labels of.
  A task that no client holds, a client without an example and a client without a label of one of its tasks are errors.
- `val_fraction` of a client's examples (rounded, at least one, at most all but one) are set apart for validation. The
  validation part is empty only where `val_fraction` is 0 or the client has a single example. Examples are taken in one
  order that all clients share, so clients that hold the same images also validate on the same ones. Where the data
  have groups, the fraction counts groups, and the examples of one group stay together.
- The result depends on (seed, parameters, labels) and on numpy's random streams, never on torch or a global state.

Sources of the rules: NIID-Bench (class Dirichlet), MaTU (task Dirichlet), FedDEA and FedHCA2 (one task per client),
the DFMTL thesis (task weights), FedHEAL and F2DC (domain allocation).
"""

from __future__ import annotations

from fedloom.data.partition.rules import PARTITIONERS, ValFraction
from fedloom.data.partition.table import Indices, Partition, Pool, Share, class_counts, labelled

__all__ = ["PARTITIONERS", "Indices", "Partition", "Pool", "Share", "ValFraction", "class_counts", "labelled"]
