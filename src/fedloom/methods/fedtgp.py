"""FedTGP: features drawn to prototypes that the server trains to be apart."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedtgp", source="Zhang, Liu, Hua, Cao, AAAI 2024")
def fedtgp(
    *,
    lam: Annotated[float, Field(ge=0)] = 1.0,
    server_epochs: Annotated[int, Field(ge=0)] = 100,
    server_lr: Annotated[float, Field(gt=0)] = 0.01,
    server_batch_size: Annotated[int, Field(ge=1)] = 10,
    limit: Annotated[float, Field(ge=0)] = 100.0,
    over: Literal["known", "batch"] = "known",
) -> m.Method:
    """As FedProto, with global prototypes that a generator at the server learns from the clients'.

    Client: loss + lam mean over examples of |z - P_y|^2, averaged over the dimensions. Server: P = a vector per class
    through linear, ReLU, linear; trained on the clients' prototypes (p, y) with cross entropy of the logits
    -(|p - P_c| + margin [c = y]), margin = min(largest distance of a class mean to its nearest other, limit).

    paper    1000 server epochs; limit = 100; only prototypes travel; P for all classes
    release  the same; server's learning rate = clients', batches of 10; prototypes from a pass after training; lam = 1;
             the mean over the whole batch, in which examples of classes without P are 0. A later fork takes 100 epochs
    here     100 epochs; the client's prototypes are its mean z of a class over its last local epoch, as seen in
             training. Only classes that some client had have a P, and the mean is over their examples; `over: batch`
             is the release's mean. Parameters are averaged too (FedAvg), as in comparisons of global models: FedTGP
             alone has none

    The generator is drawn from the run's seed and continues to learn from round to round; 1000 epochs with tens of
    clients and classes cost the server seconds to minutes a round. No term in the first round, nor for examples of
    classes that no client had so far. For tasks with one class per example, each with its own generator; others are
    trained as in FedAvg. lam = 0 is FedAvg, bit for bit. Add-ons act on parameters only.
    """
    return m.Method(
        name="fedtgp",
        local=(training.CollectPrototypes(), training.PrototypePull(lam, over=over)),
        stage=stages.TrainedPrototypes(server_epochs, server_lr, server_batch_size, limit) >> stages.Mean(),
    )
