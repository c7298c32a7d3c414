"""FedProto: features drawn to the clients' mean features of each class."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedproto", source="Tan et al., AAAI 2022")
def fedproto(
    *,
    lam: Annotated[float, Field(ge=0)] = 1.0,
    distance: Literal["mse", "norm"] = "mse",
    by: Literal["clients", "counts"] = "clients",
    share: Literal["everything", "nothing"] = "everything",
) -> m.Method:
    """Features are drawn to global prototypes: the clients' mean features of each class, averaged.

    Client: loss + lam mean over the batch of d(z, P_y), z = encoder features; it sends the mean z of each class over
    its last local epoch, as seen in training. Server: P_c = the mean of the prototypes of the clients that have c.

    paper    d is the 2-norm (`distance: norm`), prototypes are weighted by their numbers of examples (`by: counts`);
             only prototypes travel, so that models may differ (`share: nothing`); lam tuned
    release  d is the squared distance, averaged over the dimensions; all clients alike; lam = 1
    here     the release's, but parameters are averaged too (FedAvg), as in comparisons of global models; with `share:
             nothing` they stay with their clients. Clients are measured with their heads, not by the nearest prototype

    No term in the first round. A class that no client of a round has keeps its prototype; examples of classes without
    one do not count. For tasks with one class per example, each with its own prototypes; others are trained as in
    FedAvg. lam = 0 is FedAvg, bit for bit. Add-ons act on parameters only.
    """
    from fedloom.core.layout import EVERYTHING

    keep = stages.MeanPrototypes(by)
    return m.Method(
        name="fedproto",
        local=(training.CollectPrototypes(), training.PrototypePull(lam, distance)),
        stage=keep if share == "nothing" else keep >> stages.Mean(),
        private=EVERYTHING if share == "nothing" else None,
        buffers="local" if share == "nothing" else "mean",
    )
