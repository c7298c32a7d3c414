"""FedBN: batch norm stays with the client."""

from __future__ import annotations

from typing import Literal

from fedloom.methods import registry as m


@m.METHODS.register("fedbn", source="Li et al., ICLR 2021")
def fedbn(*, norms: Literal["batch", "all"] = "batch") -> m.Method:
    """FedAvg on everything but batch norm, whose weights and running statistics never leave a client.

    paper    every batch norm layer local
    release  finds them by the text "bn" in their names, which misses `downsample.1` in residual networks; uniform mean
    here     found by module type; uniform mean. `norms: all` also keeps layer, group and RMS norm local.

    There is no single global model: each client is measured with its own batch norm. A network without batch norm makes
    this FedAvg with uniform weights. With FedDEA, rho counts the shared parameters only.
    """
    from fedloom.core.layout import Select

    private = Select(kind="batch-norm") if norms == "batch" else Select(role="norm")
    return m.Method(name="fedbn", private=private, buffers="local", weights="uniform")
