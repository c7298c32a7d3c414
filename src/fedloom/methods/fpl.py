"""FPL: features contrasted with clusters of the clients' prototypes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fpl", source="Huang et al., CVPR 2023")
def fpl(
    *,
    temperature: Annotated[float, Field(gt=0)] = 0.02,
    partition: Literal["last", "first"] = "last",
    over: Literal["known", "batch"] = "known",
) -> m.Method:
    """Features are drawn to the clusters of their class's prototypes, away from other classes', and to their mean.

    loss + mean over examples of -log( sum_{c in P_y} e^(cos(z, c)/T) / sum_{c in P} e^(cos(z, c)/T) ) + |z - u_y|^2,
    z = encoder features, P_y = FINCH's cluster means of the clients' prototypes of class y, u_y = the mean of P_y;
    |.|^2 is averaged over the dimensions. A client's prototype is its mean z of a class over its last local epoch, as
    seen in training. Parameters are averaged as in FedAvg.

    paper    T = 0.02; FINCH on cosine similarity, without a parameter; nothing on classes without prototypes
    release  the coarsest partition with more than one cluster; the sum over examples of classes with prototypes is
             divided by the whole batch; the port that F2DC's comparison builds on has T = 0.2
    here     the same partition; `partition: first` is the finest. The mean is over the batch's examples of classes with
             prototypes, so a batch with other classes does not weaken it; `over: batch` is the release's. Logarithms of
             sums are stable, because e^50 occurs

    No term in the first round, nor for examples of classes without prototypes. A class that no client of a round has
    keeps its clusters. For tasks with one class per example, each with its own prototypes; others are trained as in
    FedAvg. Add-ons act on parameters only.
    """
    return m.Method(
        name="fpl",
        local=(training.CollectPrototypes(), training.ClusterContrast(temperature, over)),
        stage=stages.ClusteredPrototypes(partition) >> stages.Mean(),
    )
