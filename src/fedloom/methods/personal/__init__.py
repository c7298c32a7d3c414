"""Personal models and layers: Ditto, pFedMe, FedAMP, FedMTL, FedPer, FedRep, FedBABU and FedBN."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.core.settings.section import Count, FixedNatural, NonNegative, Positive, parameters
from fedloom.methods import registry as m
from fedloom.methods.registry import Shared


@m.METHODS.register("ditto", source="Li, Hu, Beirami, Smith, ICML 2021")
def ditto(*, lam: NonNegative = 0.1) -> m.Method:
    """Run FedAvg, and train a personal model per client, which is kept near the global one.

    Global stream: FedAvg. Personal stream: v <- v - lr (grad F_k(v) + lam (v - theta)), theta being the model received
    in the round, for as many steps. v starts as the first received model and never leaves the client.

    paper    as above, any solver for the global stream
    release  lam 1 in its scripts, or chosen among 0.1, 1, 2 on validation data
    here     lam 0.1 (the FedHCA2 supplement). The streams share nothing but theta: optimiser, batch norm statistics and
             random numbers are apart, so the global model is FedAvg's, bit for bit. Both models are measured

    lam = 0 is local training beside FedAvg; a large lam gives the global model. Computation and client memory double.
    With FedDEA: the global stream only.
    """
    return m.Method(name="ditto", turn=m.Beside((training.Anchor(lam),)))


@parameters("fedloom.methods.personal.aggregation:Envelope")
class EnvelopeSettings:
    lam: Positive = 15.0
    inner: Count = 5
    outer: Positive = 0.005


@m.METHODS.register("pfedme", source="Dinh, Tran, Nguyen, NeurIPS 2020")
def pfedme(rule: training.Envelope, *, beta: Positive = 1.0) -> m.Method:
    """Let the shared model w follow personal models theta_k = argmin F_k(theta) + (lam/2) |theta - w|^2.

    For each batch: `inner` optimiser steps on F(theta) + (lam/2) |theta - w|^2, theta starting where it was; then w <-
    w - outer lam (w - theta). Server: w+ = (1 - beta) w + beta mean_S w_k. w (global) and theta_k (personal) are
    measured.

    paper    as above
    release  lam 15, 5 inner steps at 0.09 with weight decay 0.001, outer rate 0.005, beta 1, 20 batches a round
    here     the same constants; the inner optimiser is the recipe's. Plain SGD needs learning rate x lam < 2, which is
             checked. theta_k is stored with the client: one public version never does, and measures the start

    With FedDEA: the selection acts on the update of w.
    """
    return m.Method(name="pfedme", local=(rule,), server=m.Plain(beta), weights="uniform")


@parameters("fedloom.methods.personal.aggregation:Attention")
class AttentionSettings:
    alpha: Positive = 1.0
    sigma: Positive = 1.0
    scale: Literal["absolute", "median"] = "absolute"


@m.METHODS.register("fedamp", source="Huang et al., AAAI 2021")
def fedamp(
    *,
    lam: NonNegative = 1.0,
    attention: stages.Attention,
    start: Literal["own", "mix"] = "own",
    share: Shared = "everything",
) -> m.Method:
    """Pull each client's own model w_k towards u_k, a mix of all models in which similar models weigh more.

    Server: xi_kj = alpha A'(|w_k - w_j|^2) for j != k, A'(x) = exp(-x/sigma)/sigma, xi_kk = 1 - sum_j xi_kj,
    u_k = sum_j xi_kj w_j over the latest models of all clients. Client: loss + lam/(2 alpha) |w - u_k|^2.
    Only u_k travels down. Defaults lam = alpha = sigma = 1 follow the FedHCA2 supplement.

    paper    training starts from the client's own model
    release  none by the authors; a widely used port computes the term without a gradient, so it trains locally
    here     the term has its gradient. xi_kk < 0, which the defaults give for more than two nearly equal models, is
             avoided by scaling the others' weights to sum to 1. `start: mix` begins at u_k instead.

    Squared distances of millions of parameters dwarf sigma = 1, and every client is then alone with an anchor at its
    own last model; `scale: median` divides distances by their median. `share: encoder` leaves decoders and heads out,
    which is what clients with different tasks need: others' models never trained them. lam = 0 is local training.

    Couples tasks by design: clients are drawn to all similar models.
    """
    return m.sharing(share, "fedamp", attention, training.Anchor(lam / attention.alpha, start), turn=m.Own())


@parameters("fedloom.methods.personal.aggregation:TaskCovariance")
class TaskCovarianceSettings:
    centre: bool = True
    floor: Annotated[float, Field(gt=0, lt=1)] = 1e-7


@parameters("fedloom.methods.personal.aggregation:TaskCoupling")
class TaskCouplingSettings:
    lam: NonNegative = 1e-3


@m.METHODS.register("fedmtl", source="MOCHA: Smith et al., NeurIPS 2017")
def fedmtl(rule: training.TaskCoupling, relation: stages.TaskCovariance, *, share: Shared = "everything") -> m.Method:
    """Train one model per client, coupled by a learned relation of the tasks.

    min sum_k F_k(w_k) + lam tr(W Omega W'), Sigma = Omega^-1 = (W'W)^(1/2) / tr, from the latest models of all clients.
    Client: gradient + 2 lam (Omega_kk w + v_k), the others frozen; v_k = sum_{j != k} Omega_kj w_j and Omega_kk come
    from the server, which never sends a model back. No term in the first round.

    paper    convex losses, solved in the dual by SDCA, with stragglers; Sigma starts at I/N
    release  as the paper; a widely used port for networks builds the term from detached weights: no gradient at all
    here     gradient steps on networks. `centre` (default) takes W as deviations from the clients' mean, because raw
             weights that started alike have a Gram matrix of almost rank one. Eigenvalues below `floor` times the
             largest are raised. lam = 1e-3 is ours (1e-4 .. 1e-2 are in use).

    `share: encoder` leaves decoders and heads out, as clients with different tasks need. lam = 0 is local training.

    Couples tasks by design: relations are learned between all clients.
    """
    return m.sharing(share, "fedmtl", relation, rule, turn=m.Own())


@m.METHODS.register("fedper", source="Arivazhagan et al., 2019")
def fedper(*, personal: Literal["decoders", "heads"] = "decoders", layers: tuple[str, ...] = ()) -> m.Method:
    """Run FedAvg on the base of the network; later layers train along with it, but stay at the client.

    theta_base <- theta_base + sum_k p_k Delta_k,base;  personal layers start from the common initialisation.

    paper    the classifier and the last few blocks of the base are personal; weights by data size
    release  none by the authors
    here     `personal: decoders` keeps decoders and heads, as clients with different tasks need; `personal: heads` the
             last layers only, and decoders are averaged. `layers` keeps more blocks of the encoder, as patterns on
             their names, e.g. [encoder.blocks.11.*]

    There is no global model: each client is measured with its own layers. Float buffers (batch norm) of shared layers
    are averaged, those of personal layers stay at the client. One client is local training; a model without decoders
    has the same two choices of `personal`. FedSTA without averaged decoders, with `weights: size`, is this method. With
    FedDEA, rho counts the shared parameters only.
    """
    if personal == "heads":
        if layers:
            raise ValueError(
                "fedper: `layers` needs `personal: decoders`, because with `personal: heads` the decoders are shared"
            )
        return m.Method(name="fedper", private="head")
    shared = m.Select(role="encoder", exclude=m.Select(name=tuple(layers)))
    return m.Method(name="fedper", private=m.Select(exclude=shared) if layers else m.ALL_BUT_ENCODER)


@m.METHODS.register("fedrep", source="Collins et al., ICML 2021")
def fedrep(*, head: Annotated[float, Field(gt=0, lt=1)] = 0.8) -> m.Method:
    """Train the client's own head with the encoder frozen, then the encoder with the head frozen, every round.

    Decoders and heads never leave a client; the encoder is averaged. `head` is the first phase's share of a round's
    batches; each phase has at least one.

    paper    several head epochs, then few of the representation
    release  5 local epochs, the last one for the representation (a share of 0.8); `requires_grad` is switched, which
             leaves old momentum and weight decay at work on some versions; 10 more head epochs before the final test
    here     frozen means no step, no decay, no momentum, and norm layers keep their statistics. Each phase has an
             optimiser of its own. No extra epochs before measuring: heads are trained in every round

    With FedDEA, rho counts the encoder's parameters only.
    """
    phases = (m.Phase(m.ALL_BUT_ENCODER, head), m.Phase("encoder", 1 - head))
    return m.Method(name="fedrep", local=phases, private=m.ALL_BUT_ENCODER)


@m.METHODS.register("fedbabu", source="Oh, Kim, Yun, ICLR 2022")
def fedbabu(*, tune: FixedNatural = 5) -> m.Method:
    """Keep the heads at their common initialisation; train and average the encoder.

    A client's model is measured after `tune` epochs of training the whole model on the client's data; the tuned model
    is not kept for the next round. tune = 0 measures the untrained heads.

    paper    as above; fine-tuning after federated training
    release  5 epochs of fine-tuning; heads get learning rate 0 (zeroing their gradient only would not freeze them under
             momentum or weight decay); uniform mean
    here     heads and decoders are not stepped, decayed or given momentum; uniform mean. Every evaluation tunes first,
             so evaluate seldom (evaluation.every)

    A random frozen decoder of a dense task is far harsher than a random linear classifier.
    With FedDEA, rho counts the encoder's parameters only.
    """
    tuned = (m.Tune(tune),) if tune else ()
    return m.Method("fedbabu", local=(m.Phase("encoder"), *tuned), private=m.ALL_BUT_ENCODER, weights="uniform")


@m.METHODS.register("fedbn", source="Li et al., ICLR 2021")
def fedbn(*, norms: Literal["batch", "all"] = "batch") -> m.Method:
    """Run FedAvg on everything but batch norm, whose weights and running statistics never leave a client.

    paper    every batch norm layer local
    release  finds them by the text "bn" in their names, which misses `downsample.1` in residual networks; uniform mean
    here     found by module type; uniform mean. `norms: all` also keeps layer, group and RMS norm local.

    There is no single global model: each client is measured with its own batch norm. A network without batch norm makes
    this FedAvg with uniform weights. With FedDEA, rho counts the shared parameters only.
    """
    private = m.Select(kind="batch-norm") if norms == "batch" else m.Select(role="norm")
    return m.Method(name="fedbn", private=private, buffers="local", weights="uniform")
