"""Methods against client drift: FedOpt, FedACG, FedNova, SCAFFOLD, FedDyn and NTK-FedAvg."""

from __future__ import annotations

from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import BelowOne, NonNegative, Positive, parameters
from fedloom.methods import registry as m


@m.METHODS.register("fedopt", source="Reddi et al., ICLR 2021; momentum: Hsu et al., 2019")
def fedopt(
    *,
    optimizer: Literal["adam", "yogi", "adagrad", "momentum"] = "adam",
    step: Positive | None = None,
    b1: BelowOne | None = None,
    b2: BelowOne | None = None,
    eps: Positive | None = None,
) -> m.Method:
    """Use the mean update as a gradient for an optimiser at the server: Adam, Yogi, Adagrad, or momentum.

    u = sum_k p_k Delta_k;  m <- b1 m + (1 - b1) u;
    v <- b2 v + (1 - b2) u^2 (adam),  v - (1 - b2) u^2 sign(v - u^2) (yogi),  v + u^2 (adagrad);
    theta <- theta + step m / (sqrt(v) + eps), without bias correction, from m = 0, v = eps^2.
    momentum (FedAvgM): m <- b1 m + u;  theta <- theta + step m;  b2 and eps play no part (and are refused).

    paper    b1 0.9, and 0 for adagrad; b2 0.99; eps 1e-3 (there tau); v starts at eps^2 or above; the step is tuned for
             each task over powers of ten. FedAvgM: b1 0.9, step 1
    release  the authors' benchmark documents a start of v = 0 and eps 1e-3. Other public versions: b2 0.999, step 0.1,
             v = 0; and a "FedOpt" that is momentum 0.9 with step 0.5
    here     the paper's constants. step: 1 for momentum, else 0.01, which is ours and no more than a start for tuning.
             In the long run a coordinate whose update keeps its sign moves by step |u| / (|u| + eps) a round, so at
             most by the step, whatever the local learning rate. 0.1, a common default, is far beyond one round of
             fine-tuning pretrained weights, where |u| is 1e-3 or less (try 0.001 there). On `digits-tasks` with adam,
             0.001 is slow, 0.01 beats FedAvg and 0.1 is worse than it. Where |u| is well below eps, a step between eps
             and 2 eps is about FedAvg

    Only shared parameters are stepped: never buffers (running variances must stay positive) nor private ones. A round
    without any update changes nothing. optimizer momentum with b1 = 0, step = 1 is FedAvg, bit for bit.

    A coordinate that was never updated keeps v = eps^2, so the decoder of a rarely present task takes a large step at
    its first update: keep eps about as large as a typical |u|. Coordinates without an update, because FedDEA left them
    out or because their task is absent, still move by what is left in m.

    Adam, Yogi and Adagrad nearly cancel a constant factor on u, so only FedDEA's selection remains and 1/rho has no
    lasting effect (nor has `server-step`): report runs with and without `rescale`. With momentum the factor stays, and
    1/(1 - b1) comes on top.
    """
    if b2 is not None and optimizer in ("momentum", "adagrad"):
        raise ValueError(f"fedopt: optimizer {optimizer} does not use b2; leave it out")
    if eps is not None and optimizer == "momentum":
        raise ValueError("fedopt: optimizer momentum does not use eps; leave it out")
    if optimizer == "momentum":
        rule: m.ServerRule = m.Momentum(0.9 if b1 is None else b1, 1.0 if step is None else step)
    else:
        first = (0.0 if optimizer == "adagrad" else 0.9) if b1 is None else b1
        rule = m.Adaptive(optimizer, 0.01 if step is None else step, first, 0.99 if b2 is None else b2, eps or 1e-3)
    return m.Method(name="fedopt", server=rule)


@m.METHODS.register("fedacg", source="Kim, Kim, Han, CVPR 2024")
def fedacg(*, lam: BelowOne = 0.85, beta: NonNegative = 1e-3) -> m.Method:
    """Start clients from a lookahead, theta + lam m, and keep them near it; m is the server's momentum.

    la = theta + lam m is sent;  local loss + beta |y - la|^2;  u = mean_k Delta_k with Delta_k = y_k - la;
    m <- lam m + u;  theta <- theta + m, which is the mean of the clients' models. One vector is sent, as in FedAvg.
    theta is evaluated, not la. m = 0 at first.

    paper    lam 0.85; the quadratic term keeps local models near the lookahead
    release  lam 0.85, beta 1e-3 without a factor 1/2, uniform mean; local SGD at 0.1, decayed by 0.998 a round, weight
             decay 1e-3, gradients clipped at 10, 5 epochs
    here     the release's lam, beta and uniform mean (`method.weights: size` for examples); the local optimiser is the
             recipe's, as for every method. Buffers and private parameters take no part in the momentum. In a round
             without any update m neither moves nor decays

    lam = 0 is FedProx with mu = 2 beta and uniform weights, bit for bit; lam = 0 and beta = 0 is FedAvg with uniform
    weights.

    A constant update is multiplied by 1/(1 - lam) in the long run, 6.7 at 0.85. FedDEA's gain of 1/rho comes on top of
    that: m <- lam m + sum_k p_k T(Delta_k). Lower lam, or set `rescale: false`, before concluding anything from a run
    that diverges. Coordinates that no client chose still move by lam m.
    """
    return m.Method(name="fedacg", local=(training.Proximal(2 * beta),), server=m.Lookahead(lam), weights="uniform")


@parameters("fedloom.methods.drift.aggregation:NormaliseSteps")
class NormaliseStepsSettings:
    tau_eff: Literal["weights", "steps"] = "weights"


@m.METHODS.register("fednova", source="Wang et al., NeurIPS 2020")
def fednova(*, mu: NonNegative = 0.0, normalise: stages.NormaliseSteps) -> m.Method:
    """Normalise updates by local steps, so that clients with more steps do not pull the optimum towards them.

    u = tau_eff sum_k p_k Delta_k / a_k, tau_eff = sum_k p_k a_k, both over the rows that have a block. a_k is the sum
    of the weights with which the local gradients enter Delta_k: tau_k for plain SGD, with momentum r
    [tau - r(1-r^tau)/(1-r)]/(1-r), with a proximal term [1-(1-lr mu)^tau]/(lr mu), found for any of these together, and
    with a schedule, by running the local optimiser on unit gradients. mu > 0 adds FedProx's term.

    paper    as above
    release  with mu > 0, tau_eff = sum_k p_k tau_k (`tau_eff: steps`); both recursions at once where momentum and mu
             are set, which counts too much
    here     Adam has no exact a_k: each of its steps counts as one, scaled by the schedule. Momentum carried over from
             earlier rounds (training.keep_optimizer) is not counted. Weight decay counts as part of the loss.

    Equal a_k give FedAvg bit for bit. With FedDEA: the same before or after the division, because the selection is
    homogeneous; 1/rho does not enter a_k. Buffers are never divided. A client that took no step is dropped.
    """
    proximal = (training.Proximal(mu),) if mu else ()
    return m.Method("fednova", local=(*proximal, training.CountedSteps(mu)), stage=normalise >> stages.Mean())


@m.METHODS.register("scaffold", source="Karimireddy et al., ICML 2020")
def scaffold() -> m.Method:
    """Correct every local gradient by the control variates c - c_k.

    Client: g + c - c_k at every step; c_k+ = mean of the round's raw gradients. Server: theta+ = theta + mean_S Delta_k
    (uniform), c+ = c + (1/N) sum_S (c_k+ - c_k), N counting absent clients. c and c_k start at 0. c travels down and
    the change of c_k up, so traffic doubles both ways.

    For a task's blocks N counts the clients that train the task, because only they are corrected: with all N, the mean
    of the corrections would not be zero, and a head of one client would see a share 1/N of its gradient.

    paper    option I: full gradient at theta; option II: c_k - c + (theta - theta_k) / (tau lr), derived for plain SGD
    release  no official one; public ports divide by |S| instead of N, or apply option II under momentum
    here     the mean raw gradient, which is option II for plain SGD and also right under momentum, Adam, clipping and
             schedules. The correction covers only parameters that a client trains: c is not zero on other tasks' heads.

    With FedDEA: c_k comes from raw gradients, the selection acts on Delta_k only. Batch norm statistics are never
    corrected.
    """
    stage = stages.ControlVariates() >> stages.Mean()
    return m.Method(name="scaffold", local=(training.ControlVariate(),), stage=stage, weights="uniform")


@parameters("fedloom.methods.drift.aggregation:Dual")
class DualSettings:
    alpha: Positive = 0.01


@m.METHODS.register("feddyn", source="Acar et al., ICLR 2021")
def feddyn(rule: training.Dual) -> m.Method:
    """Add a quadratic and a linear term to the local loss, so that local optima agree with the global one.

    Client: loss + alpha <y, h_k> + (alpha/2) |y - base|^2; then h_k += theta_k - base. So -alpha h_k is the paper's
    gradient memory. Server: theta+ = mean_S theta_k + (1/N) sum over all N clients of h_j. h_k starts at 0; absent
    clients keep theirs, and count.

    paper    alpha in 0.1, 0.01, 0.001; gradients of the terms added explicitly, as here
    release  hides the quadratic in SGD's weight decay (alpha per client scaled by its data) and writes only the linear
             term: a port without that weight decay converges to another point, and AdamW's decay is no substitute
    here     alpha = 0.01, the release's example; both terms over the shared parameters

    Where clients have heads of their own tasks only, N counts for a head all clients that have it, present or absent.

    theta+ is not an average: it can leave the hull of the clients' models. It needs enough local work.

    With FedDEA h_k is always raw. The server builds its mean of the h_j from rows as they arrive: with
    `feddea: {at: edge}` these are transformed and the factor 1/rho piles up in h (use a smaller alpha); with
    `feddea: {at: server}` they are raw, and the server's mean stays the mean of the clients' h_k.
    """
    return m.Method(name="feddyn", local=(rule,), stage=stages.DualShift(stages.Mean()), weights="uniform")


@m.METHODS.register(
    "ntk-fedavg", source="NTK-FedAvg: Muhamed, Mankikar, Smith, 2024; linearisation: Ortiz-Jimenez et al., NeurIPS 2023"
)
def ntk_fedavg() -> m.Method:
    """Run FedAvg on the encoder's expansion f(x; theta_0) + J(x) (theta - theta_0) at the initial parameters.

    Features are linear in theta, so averaging the clients' encoders averages their features: models of different tasks
    interfere less than those of a network. theta <- theta + sum_k p_k Delta_k.

    paper    task vectors of linearised models are averaged, then one adapter a task where a client has several
    release  none
    here     the expansion point is the initial model in all rounds; the network is in evaluation there (no dropout,
             fixed norm statistics). Decoders and heads stay as they are and are trained as usual, so only features are
             linear. With `model.lora` the expansion is in the two factors: since B is 0 at first it is B A_0, and A
             never moves. The coefficient of task arithmetic is the add-on server-step

    Encoders of features only, no maps. A step costs about twice a plain one, more for attention (no fused kernel has
    forward mode). Composes with every add-on as FedAvg does.
    """
    from fedloom.models.changes import Linearise

    return m.Method(name="ntk-fedavg", model=(Linearise(),))
