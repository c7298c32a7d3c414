"""Many processes on one or many machines, started by torchrun: the engine `cluster`."""

from fedloom.runtime.cluster.launch import Cluster

__all__ = ["Cluster"]
