"""IFCA and RR-Cluster: several models; each client takes the one that fits its data best."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("ifca", source="Ghosh et al., NeurIPS 2020")
def ifca(
    *,
    clusters: Annotated[int, Field(ge=1)] = 2,
    first: Literal["groups", "noise"] = "groups",
    noise: Annotated[float, Field(ge=0)] = 1.0,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """The server keeps C models and sends all; a client trains the one with the smallest loss on its training data.

    j_k = argmin_j F_k(theta_j), ties by index;  theta_j <- theta_j + sum_{k: j_k = j} p_k Delta_k, p_k by data size
    within the cluster. A model that no client chose stays as it is.

    paper    models start at random, so it needs several restarts or a good start; averaging of models or of gradients;
             optionally shared first layers
    release  2 to 4 clusters, 10 local steps, learning rate 0.1 (MNIST)
    here     models that start alike never part, and one network's random restarts cost too much. Round 1 is FedAvg;
             then the C models are the mean trained models of C groups of its clients (average linkage on cosine
             distance: `first: groups`), or its result plus noise of `noise` times the update's root mean square,
             drawn from the run's seed (`first: noise`). The choice is made without augmentation or dropout

    A client is measured with its cluster's model, also while it is absent; a client that never took part is measured
    with the first round's model. Different tasks are no obstacle: a client compares only its own losses. All C models
    and the client's last one are sent; C passes over the training data come before each round of training. If one model
    is the best for all, all choose it and this is FedAvg; clients with different tasks on the same images may do so:
    look at the choices. clusters = 1 is FedAvg. Batch norm statistics stay with the client. `share: encoder` leaves
    decoders and heads out, as clients with different tasks need.

    Without a server (`peers`) each peer keeps all C models and moves each with the neighbours that chose it: DFCA
    (Kirch et al., 2025), with a mean in place of its running mean. Where not every peer hears all others it takes
    `first: noise`, which is the same noise at all peers: groups are numbered by each peer for itself, so a number would
    mean another cluster at another peer, and `first: groups` is refused.

    Add-ons at the server (pcgrad, cagrad, min-norm, heal, ...) act inside each cluster, on rows relative to its model.
    With FedDEA: an update is measured from the model that the client had. So when the client changes cluster, and in
    round 2, the selection also covers the displacement from one model to the other. A server step other than 1 moves
    the clients' copies and not the C models: leave it at 1. With `privacy`: as rr-cluster with B = 1.

    Couples tasks by design: clusters are made of all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="ifca",
        local=(training.BestCluster(clusters),),
        stage=stages.ChosenClusters(clusters, first, noise),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        buffers="local",
    )


@m.METHODS.register("rr-cluster", source="RR-Cluster: Yang, Hu, Kim, Li, 2025 (arXiv 2508.06183)")
def rr_cluster(
    *,
    clusters: Annotated[int, Field(ge=1)] = 2,
    least: Annotated[int, Field(ge=1)] = 2,
    first: Literal["groups", "noise"] = "groups",
    noise: Annotated[float, Field(ge=0)] = 1.0,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """IFCA in which at least `least` clients move each model: large clusters lend clients to small ones, at random.

    j_k as in ifca; while a cluster has fewer than B = `least` participants, one drawn from those with more counts there
    theta_j <- theta_j + sum_{k counted in j} p_k Delta_k, Delta_k from the model that k chose

    So noise that hides one client of a cluster's mean need not hide one of fewer than B, at the price of updates that
    were made elsewhere. The parameters are ifca's, and so is all that is not said here.

    paper    an add-on to federated clustering with client-level differential privacy: random rebalancing of assignments
             to a minimum size B, with noise on the updates and on what clients are assigned by; read in its abstract
             and its public reviews
    release  none found
    here     with IFCA. A client is visited once, in random order from the run's seed, and moves to the smallest
             cluster. It is measured with the model that it chose. B = 2 is ours

    With `privacy` (trust: central, `first: noise`, `weights: uniform`), whose noise is z and whose clip is c:
    s_j = #{k: j_k = j} + z / sqrt(0.1) g
    theta_j <- theta_j + (sum_{k counted in j} clip(Delta_k) + z c / sqrt(0.9) g) / m_j
    Clients are lent by draws of their own, with probabilities that follow from the sizes s alone, so that a client more
    moves no other; m_j >= B is the size then expected. So the noise of a mean is at most z c / (B sqrt(0.9)), and of
    clients B holds in the mean only. Protected is what all models together tell of a client. Who uses which is not: the
    server, which is trusted, and the run folder know it. `trust: local` is refused, because clients send their choice.

    Fewer than B x clusters participants: as many clusters as can be are filled; a federation that never has as many, or
    a peer that never hears as many, is refused. B = 1 only keeps models that nobody chose from resting; where all
    clusters have B or more it is ifca, bit for bit. With FedDEA and add-ons at the server as with ifca.

    Couples tasks by design: clusters are made of all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="rr-cluster",
        local=(training.BestCluster(clusters),),
        stage=stages.ChosenClusters(clusters, first, noise, least=least),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        buffers="local",
    )
