"""Mixing among peers: DFMTL, gossip averaging, Sheaf-FMTL, and a discount on old models."""

from __future__ import annotations

from typing import Any

from fedloom import stages, training
from fedloom.core.settings.section import (
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    UnitInterval,
    parameters,
)
from fedloom.methods import registry as m
from fedloom.methods.registry import Shared


@parameters("fedloom.methods.peers.aggregation:SimilarityMix")
class SimilarityMixSettings:
    top: Natural = 3
    alpha: UnitInterval = 0.5
    step: Share = 1.0
    include_self: bool = True


@m.METHODS.register("dfmtl", source="DFMTL thesis, Zurich, chapters 4 to 6")
def dfmtl(mix: stages.SimilarityMix, *, warmup: Count = 1, share: Shared = "everything") -> m.Method:
    """Average every client's trained model with the `top` most similar ones.

    sim(i, j) = alpha sum_t min(w_it, w_jt) + (1 - alpha) (cos(Delta_i, Delta_j) + 1) / 2 (eqs. 4.3, 4.4, 4.7),
    s_ij = max(sim, 0), s_ii = 1, w_ij = s_ij / sum over the `top` and i (eqs. 4.8 to 4.10), theta_i <- theta_i +
    step sum_j w_ij (theta_j - theta_i) (eq. 4.11). Before round `warmup` all get the plain mean (eq. 4.20).

    paper    the cosine itself, of gradients of the loss; similarities normalised by min-max or z-score; everybody mixes
             at one instant
    release  the similarity above; the own model is left out (every client is overwritten by its neighbours' mean),
             clients mix one after another in place, and the conflict-averse variants (B2, B3) scramble tensors
    here     the release's similarity in the text's mixing; `include_self: false` leaves the own model out

    A server computes here what the thesis' peers do. Cosines cover all shared parameters, and tasks count the same.
    Without a server it is `method: fedavg` with a `peers` section, which also has the text's similarities, the thesis's
    other signals, scopes, the conflict-averse mix and its safeguards: see the recipes thesis/... and dfmtl-.... `share:
    encoder` is its backbone-only scope. Batch norm statistics stay with the client.

    Couples tasks by design: neighbours are chosen among all clients.
    """
    stage = mix if warmup == 1 else stages.Switch(warmup, stages.Mean(), mix)
    return m.sharing(share, "dfmtl", stage, weights="uniform")


@m.METHODS.register("dpsgd", source="Lian et al., NeurIPS 2017")
def dpsgd(
    *, topology: str = "ring", options: dict[str, Any] | None = None, every: Natural = 0, share: Shared = "everything"
) -> m.Method:
    """Average every client's trained model with its neighbours' on an undirected graph.

    w_k <- sum_j W_kj w_j with Metropolis weights W_kj = 1 / (1 + max(deg_k, deg_j)), W_kk the rest: symmetric and
    doubly stochastic, so the mean of all models stays. `topology` and `options` are as for `fedloom.peers.candidates`;
    a new graph is drawn every `every` rounds, or never for 0.

    paper    mixes the models and adds the gradient at the model before mixing, one step a round
    release  ring and random graphs on MPI, one step a round
    here     clients train as long as a recipe says, then mix (as DFedAvg, Sun et al., 2022)

    The graph covers the clients that take part in a round. On the complete graph all get the plain mean of the models.
    A server computes here what peers do. Without a server it is `method: fedavg` with `peers: {graph: ring, weights:
    {kind: metropolis}}`. Batch norm statistics stay with the client.

    Couples tasks by design: the graph has all clients.
    """
    return m.sharing(share, "dpsgd", stages.Gossip(topology, options or {}, every), weights="uniform")


@parameters("fedloom.methods.peers.sheaf:RestrictionMaps")
class RestrictionMapsSettings:
    lam: NonNegative = 1e-3
    eta: NonNegative = 0.01
    gamma: Share = 0.01
    megabytes: Positive = 512.0


@m.METHODS.register("sheaf-fmtl", source="Ben Issaid, Vepakomma, Bennis, TMLR 2025 (arXiv 2502.01145)")
def sheaf_fmtl(
    rule: training.RestrictionMaps, *, topology: str = "full", options: dict[str, Any] | None = None
) -> m.Method:
    """Couple neighbours' models by learned linear maps; neighbours exchange only short projections.

    min over theta, P of sum_i F_i(theta_i) + lam/2 sum over links {i, j} of |P_ij theta_i - P_ji theta_j|^2; P_ij has
    d_ij x d_i numbers, d_ij = floor(gamma min(d_i, d_j)), drawn with deviation 0.01. In a local step, and after them:
    theta_i <- theta_i - lr (grad F_i(theta_i) + lam sum_j P_ij^T (P_ij theta_i - q_ji)),
    P_ij <- P_ij - eta lam (P_ij theta_i - q_ji) theta_i^T,  q_ji = the last P_ji theta_j that j sent.

    paper    as above with one gradient step per round, for models of any size. Only its abstract could be read: the
             equations are those of its release and of a second implementation, and it is not certain whether q_ji is
             sent once or twice per round
    release  one local epoch, then one step of the coupling (factor lr lam) and of the maps, client by client in place;
             gamma 0.01 to 0.3, lam 0.001 to 0.05, eta 1e-5 to 0.01, an Erdős-Rényi graph with p = 0.2
    here     the coupling is part of each local step, and all act on projections of the round before, so a link carries
             one projection each way per round. theta_i is all that client i trains, its own heads included. lam, eta
             and gamma are those of the release's command for CIFAR-10

    A client sends no parameters. It keeps gamma d^2 numbers per link: maps of more than `megabytes` are refused. With
    `model.lora` only adapters and heads count. The first round finds the clients, the second draws the maps, and the
    coupling starts in the third. `topology` and `options` are as for `fedloom.peers.candidates`, over all clients that
    have taken part. lam = 0 is local training, bit for bit, and the release's settings are close to it: maps of
    deviation 0.01 couple little (recipe sheaf/school: the mean RMSE is the same to 0.0002). Maps that shrink to 0 end
    the coupling, and eta lam |theta|^2 must stay below 2. Without a server (`peers: {weights: {kind: uniform}}`) a
    message holds the sender's projections for all of its neighbours.

    Couples tasks by design: neighbours with other tasks are coupled too.
    """
    links = stages.SheafLinks(topology, options or {})
    return m.Method("sheaf-fmtl", local=(rule,), stage=links, private=m.EVERYTHING, weights="uniform", buffers="local")


@parameters("fedloom.methods.peers.aggregation:Staleness")
class StalenessSettings:
    a: NonNegative = 0.5


@m.ADDONS.register("staleness", source="FedAsync: Xie, Koyejo, Gupta, 2019 (arXiv 1903.03934)")
def staleness(method: m.Method, rule: stages.Staleness) -> m.Method:
    """Give old models less weight: multiply every weight by (1 + s)^-a.

    s is the number of local rounds that a peer has finished since a neighbour trained its model; 0 for the peer's own
    model. Then the method divides weights by their sum.

    paper    a server mixes one model at a time: alpha (1 + s)^-a of it, the rest of its own; also constant and hinge
             discounts
    here     at every peer, over its own model and the received ones, so the peers' weights take the place of alpha

    For `peers: {mode: asynchronous}` only: elsewhere all models are of one instant, and it is refused. A method that
    reads no weights is refused too. a = 0 changes nothing.
    """
    return method.plus(rule, at="server")


@parameters("fedloom.methods.peers.aggregation:Plateau")
class PlateauSettings:
    factor: Share = 0.5
    patience: Count = 3
    min_delta: BelowOne = 0.0


@m.ADDONS.register("plateau", source="DFMTL thesis, section 4.6")
def plateau(method: m.Method, rule: training.Plateau) -> m.Method:
    """Lower a client's learning rate where its validation loss no longer falls.

    Each client measures the model that it receives, its loss summed over its tasks by their weights. Where that has not
    been below (1 - min_delta) times its least for `patience` rounds, the learning rate is multiplied by `factor` from
    then on.

    paper    "we adjust the learning rate based on validation progress", without numbers
    release  warm-up and cosine by rounds, for all clients alike
    here     as torch.optim.lr_scheduler.ReduceLROnPlateau, which waits one round more, for each client; it multiplies
             the rate that `training.schedule` gives

    Needs validation data at each client (`partition.val_fraction`). factor = 1 changes nothing.
    """
    return method.with_local(rule)
