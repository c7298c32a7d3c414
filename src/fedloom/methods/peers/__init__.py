"""Mixing among peers: DFMTL, gossip averaging, and a discount on old models."""

from __future__ import annotations

from typing import Any, Literal

from fedloom import stages, training
from fedloom.core.settings.section import BelowOne, Count, Natural, NonNegative, Share, UnitInterval, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.peers.aggregation:SimilarityMix")
class SimilarityMixSettings:
    """Parameters of `SimilarityMix`."""

    top: Natural = 3
    alpha: UnitInterval = 0.5
    step: Share = 1.0
    include_self: bool = True


@m.METHODS.register("dfmtl", source="DFMTL thesis, Zurich, chapters 4 to 6")
def dfmtl(
    mix: stages.SimilarityMix, *, warmup: Count = 1, share: Literal["everything", "encoder"] = "everything"
) -> m.Method:
    """Average every client's trained model with the `top` most similar ones.

    sim(i, j) = alpha sum_t min(w_it, w_jt) + (1 - alpha) (cos(Delta_i, Delta_j) + 1) / 2 (eqs. 4.3, 4.4, 4.7),
    s_ij = max(sim, 0), s_ii = 1, w_ij = s_ij / sum over the `top` and i (eqs. 4.8 to 4.10), theta_i <- theta_i +
    step sum_j w_ij (theta_j - theta_i) (eq. 4.11). Before round `warmup` all get the plain mean (eq. 4.20).

    paper    the cosine itself, of gradients of the loss; similarities normalised by min-max or z-score; everybody mixes
             at one instant
    release  the similarity above; the own model is left out (every client is overwritten by its neighbours' mean),
             clients mix one after another in place, and the conflict-averse variants (B2, B3) scramble tensors
    here     the release's similarity in the text's mixing; `include_self: false` leaves the own model out

    This computes in one place, with clients and a server, what the thesis's peers do; cosines cover everything that is
    shared, and tasks count alike. Without a server it is `method: fedavg` with a `peers` section, which also has the
    text's similarities, the thesis's other signals, scopes, the conflict-averse mix and its safeguards: see the
    recipes thesis/... and dfmtl-.... `share: encoder` is its backbone-only scope. Batch norm statistics stay with the
    client.

    Couples tasks by design: neighbours are chosen among all clients.
    """
    return m.Method(
        name="dfmtl",
        stage=mix if warmup == 1 else stages.Switch(warmup, stages.Mean(), mix),
        private=m.ALL_BUT_ENCODER if share == "encoder" else None,
        weights="uniform",
        buffers="local",
    )


@m.METHODS.register("dpsgd", source="Lian et al., NeurIPS 2017")
def dpsgd(
    *,
    topology: str = "ring",
    options: dict[str, Any] | None = None,
    every: Natural = 0,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Average every client's trained model with its neighbours' on an undirected graph.

    w_k <- sum_j W_kj w_j with Metropolis weights W_kj = 1 / (1 + max(deg_k, deg_j)), W_kk the rest: symmetric and
    doubly stochastic, so the mean of all models stays. `topology` and `options` are as for `fedloom.peers.candidates`;
    a new graph is drawn every `every` rounds, or never for 0.

    paper    mixes the models and adds the gradient at the model before mixing, one step a round
    release  ring and random graphs on MPI, one step a round
    here     clients train as long as a recipe says, then mix (as DFedAvg, Sun et al., 2022)

    The graph covers the clients that take part in a round. On the complete graph all get the plain mean of the models.
    This computes in one place what peers do. Without a server it is `method: fedavg` with `peers: {graph: ring,
    weights: {kind: metropolis}}`. Batch norm statistics stay with the client.

    Couples tasks by design: the graph has all clients.
    """
    return m.Method(
        name="dpsgd",
        stage=stages.Gossip(topology, options or {}, every),
        private=m.ALL_BUT_ENCODER if share == "encoder" else None,
        weights="uniform",
        buffers="local",
    )


@parameters("fedloom.methods.peers.aggregation:Staleness")
class StalenessSettings:
    """Parameters of `Staleness`."""

    a: NonNegative = 0.5


@m.ADDONS.register("staleness", source="FedAsync: Xie, Koyejo, Gupta, 2019 (arXiv 1903.03934)")
def staleness(method: m.Method, rule: stages.Staleness) -> m.Method:
    """Weigh old models less: multiply every weight by (1 + s)^-a.

    s is the number of own local rounds that a peer has ended since a neighbour's model was made; 0 for its own model.
    Then the method divides weights by their sum.

    paper    a server mixes one model at a time: alpha (1 + s)^-a of it, the rest of its own; also constant and hinge
             discounts
    here     at every peer, over its own model and the received ones, so the peers' weights take the place of alpha

    For `peers: {mode: asynchronous}` only: elsewhere all models are of one instant, and it is refused. A method that
    reads no weights is refused too. a = 0 changes nothing.
    """
    return method.plus(rule, at="server")


@parameters("fedloom.methods.peers.aggregation:Plateau")
class PlateauSettings:
    """Parameters of `Plateau`."""

    factor: Share = 0.5
    patience: Count = 3
    min_delta: BelowOne = 0.0


@m.ADDONS.register("plateau", source="DFMTL thesis, section 4.6")
def plateau(method: m.Method, rule: training.Plateau) -> m.Method:
    """Lower a client's learning rate where its validation loss no longer falls.

    Each client measures the model that it receives, summed over its tasks. Where the loss has not been below
    (1 - min_delta) times its least for `patience` rounds, the learning rate is multiplied by `factor` from then on.

    paper    "we adjust the learning rate based on validation progress", without numbers
    release  warm-up and cosine by rounds, for all clients alike
    here     as torch.optim.lr_scheduler.ReduceLROnPlateau, for each client; it multiplies the rate that
             `training.schedule` gives

    Needs validation data at each client (`partition.val_fraction`). factor = 1 changes nothing.
    """
    return method.with_local(rule)
