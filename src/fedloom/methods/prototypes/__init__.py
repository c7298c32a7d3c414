"""Prototypes and contrast of features: FedProto, FedTGP, FedSA, FPL, FedRCL and MOON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.core.settings.section import Count, Natural, NonNegative, Positive, UnitInterval, parameters
from fedloom.methods import registry as m

BY_CLASS = """The term is absent in the first round, and for classes that no client had so far. It covers tasks with one
class per example, each with its own prototypes; other tasks train as in FedAvg. Add-ons act on parameters only."""


@m.METHODS.register("fedproto", source="Tan et al., AAAI 2022", note=BY_CLASS)
def fedproto(
    *,
    lam: NonNegative = 1.0,
    distance: Literal["mse", "norm"] = "mse",
    by: Literal["clients", "counts"] = "clients",
    share: Literal["everything", "nothing"] = "everything",
) -> m.Method:
    """Pull features towards global prototypes: the average of the clients' mean features of each class.

    Client: loss + lam mean over the batch of d(z, P_y), z = encoder features; it sends the mean z of each class over
    its last local epoch, as seen in training. Server: P_c = the mean of the prototypes of the clients that have c.

    paper    d is the 2-norm (`distance: norm`), prototypes are weighted by their numbers of examples (`by: counts`);
             only prototypes travel, so that models may differ (`share: nothing`); lam tuned
    release  d is the squared distance, averaged over the dimensions; all clients alike; lam = 1
    here     the release's, but parameters are averaged too (FedAvg), as in comparisons of global models; with `share:
             nothing` they stay with their clients. Clients are measured with their heads, not by the nearest prototype

    A class that no client of a round has keeps its prototype. lam = 0 is FedAvg, bit for bit.
    """
    keep = stages.MeanPrototypes(by)
    return m.Method(
        name="fedproto",
        local=(training.CollectPrototypes(), training.PrototypePull(lam, distance)),
        stage=keep if share == "nothing" else keep >> stages.Mean(),
        private=m.EVERYTHING if share == "nothing" else None,
        buffers="local" if share == "nothing" else "mean",
    )


@m.METHODS.register("fedtgp", source="Zhang, Liu, Hua, Cao, AAAI 2024", note=BY_CLASS)
def fedtgp(
    *,
    lam: NonNegative = 1.0,
    server_epochs: Natural = 100,
    server_lr: Positive = 0.01,
    server_batch_size: Count = 10,
    limit: NonNegative = 100.0,
    over: Literal["known", "batch"] = "known",
) -> m.Method:
    """Run FedProto with global prototypes from a generator, which the server trains on the clients' prototypes.

    Client: loss + lam mean over examples of |z - P_y|^2, averaged over the dimensions. Server: P = a vector per class
    through linear, ReLU, linear; trained on the clients' prototypes (p, y) with cross entropy of the logits
    -(|p - P_c| + margin [c = y]), margin = min(largest distance of a class mean to its nearest other, limit).

    paper    1000 server epochs; limit = 100; only prototypes travel; P for all classes
    release  the same; server's learning rate = clients', batches of 10; prototypes from a pass after training; lam = 1;
             the mean over the whole batch, in which examples of classes without P are 0. A later fork takes 100 epochs
    here     100 epochs; the client's prototypes are its mean z of a class over its last local epoch, as seen in
             training. Only classes that some client had have a P, and the mean is over their examples; `over: batch` is
             the release's mean. Parameters are averaged too (FedAvg), as in comparisons of global models: FedTGP alone
             has none

    The generator is drawn from the run's seed and continues to learn from round to round; 1000 epochs with tens of
    clients and classes cost the server seconds to minutes a round. lam = 0 is FedAvg, bit for bit.
    """
    rules = training.CollectPrototypes(), training.PrototypePull(lam, over=over)
    keep = stages.TrainedPrototypes(server_epochs, server_lr, server_batch_size, limit)
    return m.Method(name="fedtgp", local=rules, stage=keep >> stages.Mean())


@parameters("fedloom.methods.prototypes.aggregation:MovingAnchors")
class MovingAnchorsSettings:
    momentum: UnitInterval = 0.9999


@m.METHODS.register("fedsa", source="Zhou et al., AAAI 2025", note=BY_CLASS)
def fedsa(
    *, lam: NonNegative = 1.0, margin: NonNegative = 1.0, calibration: NonNegative = 1.0, anchors: stages.MovingAnchors
) -> m.Method:
    """Pull features towards one anchor per class and away from others by a margin; heads must classify the anchors.

    loss + lam |z - A_y|^2 + margin CE(-(|z - A_c| + g [c = y]), y) + calibration CE(head(A), 1..C), z = encoder
    features, |.|^2 averaged over the dimensions; g = the mean distance to the nearest other among the anchors or, if
    larger, the client's own prototypes of its last round. Server: A_c <- momentum A_c + (1 - momentum) P_c,
    P_c = the mean of the prototypes (mean z of a class over the local round) of the clients that have c.

    paper    A_0 from a random network; only prototypes and anchors travel
    release  A_0 is normal noise through a random, frozen (linear, batch norm, ReLU) twice; weights 1, momentum 0.9999
    here     the same. Anchors are drawn from the run's seed once the first prototypes show their width, so there is no
             term in the first round. Parameters are averaged too (FedAvg), as in comparisons of global models

    A class that no client of a round has keeps its anchor. lam = margin = calibration = 0 is FedAvg, bit for bit.
    """
    rule = training.SemanticAnchors(pull=lam, margin=margin, calibration=calibration)
    return m.Method(name="fedsa", local=(rule,), stage=anchors >> stages.Mean())


@parameters("fedloom.methods.prototypes.aggregation:ClusteredPrototypes")
class ClusteredPrototypesSettings:
    partition: Literal["last", "first"] = "last"


@parameters("fedloom.methods.prototypes.rules:ClusterContrast")
class ClusterContrastSettings:
    temperature: Positive = 0.02
    over: Literal["known", "batch"] = "known"


@m.METHODS.register("fpl", source="Huang et al., CVPR 2023", order=("temperature", "partition", "over"), note=BY_CLASS)
def fpl(rule: training.ClusterContrast, keep: stages.ClusteredPrototypes) -> m.Method:
    """Pull features towards the clusters of their class's prototypes and their mean, and away from other classes.

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

    A class that no client of a round has keeps its clusters.
    """
    return m.Method(name="fpl", local=(training.CollectPrototypes(), rule), stage=keep >> stages.Mean())


@m.METHODS.register("fedrcl", source="Seo, Kim, Kim, Han, CVPR 2024")
def fedrcl(
    *,
    lam: NonNegative = 1.0,
    penalty: NonNegative = 1.0,
    temperature: Positive = 0.05,
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.7,
    positives: Count = 1,
    negatives: Count = 2,
    levels: tuple[str, ...] | None = None,
    over_levels: Literal["sum", "mean"] = "sum",
) -> m.Method:
    """Pull features of one class together and away from other classes; push apart pairs that are too similar.

    loss + lam sum over levels of mean over the batch of -log( e^(s_p/T) / (e^(s_p/T) + sum_n e^(s_n/T)) ) + penalty
    log(1 + sum_q e^((s_q - 1)/T)); s = cosine similarities within the batch, p = the `positives` least similar of the
    class, n = the `negatives` most similar of others, q = those p with s_q >= threshold. A level is a map's mean over
    its area. The server is FedAvg.

    paper    all pairs of the batch; features of all stages
    release  p and n as above, 1 and 2 of them; T = 0.05, threshold 0.7, stem and four stages before their last ReLU;
             the mean over levels; clients weigh the same
    here     the release's pairs; the encoder's features and its stages' outputs (resnet10: stages.0 to stages.2), after
             their ReLU. `levels` names other modules with maps; [] means the features only. The sum over levels, so
             that each weighs as much as it would alone; `over_levels: mean` is the release's and, with resnet10's four
             levels, a quarter of it. Clients weigh by size

    Large batches matter: an example without another of its class has only negatives. For tasks with one class per
    example; others are trained as in FedAvg. lam = 0 is FedAvg, bit for bit.
    """
    rule = training.RelaxedContrast(lam, penalty, temperature, threshold, positives, negatives, over_levels)
    return m.Method(name="fedrcl", model=(training.TapLevels(levels),), local=(rule,))


@parameters("fedloom.methods.prototypes.rules:ModelContrast")
class ModelContrastSettings:
    mu: NonNegative = 1.0
    temperature: Positive = 0.5


@m.METHODS.register("moon", source="Li, He, Song, CVPR 2021")
def moon(rule: training.ModelContrast) -> m.Method:
    """Pull features towards those of the received model, and away from those of the client's own last model.

    loss + mu mean over the batch of -log( e^(s_g/T) / (e^(s_g/T) + e^(s_p/T)) ), s_g = cos(z, z_global),
    s_p = cos(z, z_previous), z = encoder features. For dense tasks z is the mean of the last map over its area.

    paper    T = 0.5, mu tuned (1 by default, 5 on CIFAR-10); z behind a 2-layer projection head of its own
    release  the same; no term in a client's first round, because its pool of previous models is empty
    here     z is the encoder's output, because all methods are compared on the same network. The previous model is that
             of the client's own last participation, however long ago. Both reference models run in eval mode with their
             own buffers and without gradient.

    Costs two more encoder passes a batch, and one model of memory per client. mu = 0 is FedAvg, bit for bit. With
    FedDEA the previous model is the client's own, untransformed.
    """
    return m.Method(name="moon", local=(rule,))
