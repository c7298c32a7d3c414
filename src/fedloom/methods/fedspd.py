"""FedSPD: a model for each cluster of examples; each client mixes them by its shares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedspd", source="FedSPD: Lin, Yagan, Joe-Wong, UAI 2025 (PMLR 286)")
def fedspd(
    *,
    clusters: Annotated[int, Field(ge=1)] = 2,
    least: Annotated[int, Field(ge=1)] = 10,
    tune: Annotated[int, Field(ge=0)] = 5,
    noise: Annotated[float, Field(ge=0)] = 1.0,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Examples, not clients, are in clusters: a client trains one of C models a round, on the examples that it fits.

    s(x) = argmin_s loss(x; c_s) for each training example x of client k;  u_ks = share of them with s(x) = s;
    client k draws s_k, trains c_s on {x: s(x) = s_k};  c_s <- mean of what those with s_k = s trained;
    k is measured with sum_s u_ks c_s after `tune` epochs on all of its examples (final phase), which are not kept

    paper    for peers: each mixes the model of s_k with neighbours that drew the same, so one model travels. Read in
             its abstract, in public summaries, and in the code that was submitted with it
    release  that code: every model is drawn by as many clients; one that fits fewer than 10 examples is given 10 of the
             largest; models begin at random, examples are dealt out at random, and the numbers of models are matched
             every 10 rounds; the final phase takes 5 times the local epochs, from half the learning rate
    here     each client draws alike among the models that fit at least `least` of its examples, or takes the one that
             fits most. Models begin as with ifca's `first: noise`, so they need no matching. At a server all are
             neighbours, and it sends all C models; peers send the one that they trained

    C passes over the training data come before each round. Every evaluation tunes; tune = 0 measures the mix. Clients
    that are absent move with the models. clusters = 1 is FedAvg with equal weights. Batch norm statistics stay with the
    client. `share: encoder` leaves decoders and heads out, as clients with different tasks need.

    Add-ons and a server step as with ifca. Couples tasks by design: clusters are made of all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER
    from fedloom.training.phases import Tune

    return m.Method(
        name="fedspd",
        local=(training.DrawnCluster(clusters, least),),
        stage=stages.ChosenClusters(clusters, "noise", noise, mixed=True),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        tune=Tune(tune) if tune else None,
        weights="uniform",
        buffers="local",
    )
