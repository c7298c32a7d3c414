"""Rules for updates that conflict: PCGrad, GradVac, CAGrad, ConFIG, minimum norm, those of TorchJD, FAMO and FedGA."""

from __future__ import annotations

from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import BelowOne, NonNegative, Positive, UnitInterval, parameters
from fedloom.methods import registry as m

COMBINES = f"""Acts at the server, on all shared parameters. No state. Columns that only some clients have form a
separate problem, solved among these clients.

{m.REPLACES}"""
PROJECTS = """Acts at the server, on all shared parameters. It sends nothing more, and keeps the method's weights. The
order is drawn per client and round from the run's seed. Zero rows are skipped. One participant gives the method's own
result, bit for bit. `feddea` acts at the client, so rows are compared after it. Refused with local training, which
shares nothing."""


@parameters("fedloom.methods.conflict.aggregation:PCGrad")
class PCGradSettings:
    reduction: Literal["mean", "sum"] = "mean"


@m.ADDONS.register("pcgrad", source="PCGrad: Yu et al., NeurIPS 2020", note=PROJECTS)
def pcgrad(method: m.Method, rule: stages.PCGrad) -> m.Method:
    """Project each client's update against those it conflicts with, then combine as the method does.

    v = Delta_i;  for j != i in random order: if <v, Delta_j> < 0:  v <- v - <v, Delta_j> / |Delta_j|^2 Delta_j
    with the original Delta_j and the current v; then the method's own combination, u = sum_i p_i v_i.

    paper    on the gradients of each step; the projected gradients are summed: `reduction: sum`
    release  the TensorFlow code shuffles a copy and projects in fixed order; a widely used PyTorch port has a switch
             for the mean that cannot be turned off
    here     on a round's updates; `reduction: mean` (ours), with the method's weights, since a sum of the updates of K
             participants goes K times as far as FedAvg. `sum` multiplies each row by K before the weighted mean, which
             with equal weights is the paper's sum

    FedDEA's comparison with PCGrad publishes neither constants nor reduction; compare both. If two rows conflict, each
    becomes orthogonal to the other. Without conflict the result is that of the method, bit for bit (reduction mean).
    With personal heads the projection changes shared columns only, although heads count as part of a client's vector.
    Listed after heal, history and mask come from raw rows, and the mask is applied to projected rows; listed before
    heal, heal sees projected rows only. cagrad and min-norm come after this add-on.
    """
    return method.plus(rule, at="server")


@parameters("fedloom.methods.conflict.aggregation:GradVac")
class GradVacSettings:
    beta: UnitInterval = 0.5


@m.ADDONS.register("gradvac", source="GradVac: Wang, Tsvetkov, Firat, Cao, ICLR 2021", note=PROJECTS)
def gradvac(method: m.Method, rule: stages.GradVac) -> m.Method:
    """Turn each client's update towards those it is less aligned with than usual, then combine as the method does.

    v = Delta_i;  for j != i in random order, with c = cos(v, Delta_j) and the target t = t_ij:
    if c < t:  v <- v + |v| (t sqrt(1 - c^2) - c sqrt(1 - t^2)) / (|Delta_j| sqrt(1 - t^2)) Delta_j
    so that cos(v, Delta_j) = t;  then t_ij <- (1 - beta) t_ij + beta c, from t_ij = 0.

    With t = 0 (the first round, and `beta: 0`) it is pcgrad. The server keeps a number for each pair of clients that
    met.

    paper    on the gradients of each step, whole model, per layer or per matrix; gradients are summed
    release  none by the authors. LibMTL: beta 0.5, and targets move only where c < t; TorchJD: beta 0.5, targets move
             always
    here     on a round's updates as one vector; the mean with the method's weights in place of the sum; targets move
             always, for pairs that are both there; beta 0.5. A target counts as at most 0.99 (ours): as it nears 1, v
             grows without bound, and updates of one round can be that much alike. TorchJD has one target for each
             position in the matrix, so absent clients would mix them up
    """
    return method.plus(rule, at="server")


@parameters("fedloom.methods.conflict.aggregation:CAGrad")
class CAGradSettings:
    c: BelowOne = 0.4
    rescale: Literal["none", "1+c^2", "1+c"] = "none"


@m.ADDONS.register("cagrad", source="CAGrad: Liu et al., NeurIPS 2021", note=COMBINES)
def cagrad(method: m.Method, rule: stages.CAGrad) -> m.Method:
    """Replace the mean by the nearby direction that is best for the worst-off client.

    g_0 = sum_k p_k Delta_k,  g_w = sum_k w_k Delta_k,  phi = c |g_0|
    w* = argmin <g_w, g_0> + phi |g_w|  over w >= 0, sum w = 1;   u = (g_0 + phi g_w* / |g_w*|) / s
    which maximises min_k <Delta_k, u> over |u - g_0| <= phi; s = 1, 1+c^2 or 1+c (`rescale`).

    paper    c in [0, 1), g_0 the uniform mean, no division
    release  c 0.5 by default, 0.4 in the NYUv2 script; divides by 1+c^2 by default; SLSQP in float32 from w = 1/K with
             constants of 1e-8, which stops at the start for small updates (norms of 0.01 and less)
    here     c 0.4; g_0 with the method's weights (`weights: uniform` for the paper's); no division; w exact but for
             round-off at any scale, from the Gram matrix in float64

    c = 0 is the mean, bit for bit. Equal updates, and one participant, give (1+c)/s times the update. If g_w* vanishes
    (within a millionth of its parts), u = g_0 / s. Zero updates count in g_0 but not in w; without any update there is
    no step.
    """
    return method.combined_by(rule)


@parameters("fedloom.methods.conflict.aggregation:MinNorm")
class MinNormSettings:
    unit: bool = True


@m.ADDONS.register("min-norm", source="MGDA: Désidéri 2012; on unit rows FDSE: Wang et al., CVPR 2025", note=COMBINES)
def min_norm(method: m.Method, rule: stages.MinNorm) -> m.Method:
    """Replace the mean by the shortest convex combination of the unit updates, times their mean norm.

    r_k = Delta_k / |Delta_k|;  w* = argmin |sum_k w_k r_k| over w >= 0, sum w = 1;
    u = m sum_k w*_k r_k with m the mean of |Delta_k| over the clients.
    With `unit: false` plain MGDA: r_k = Delta_k and m = 1.

    u has a non-negative inner product with every update, and is short if updates conflict. Weights are not used.

    paper    FDSE: unit rows times the mean norm, per tensor and for its shared layers only; MGDA: rows as they are, on
             the gradients of each step
    release  FDSE: as its paper
    here     over the whole vector of shared parameters; exact but for round-off at any scale

    Equal updates give the update, opposite ones no step. Zero updates are left out, also of the mean norm. On unit rows
    FedDEA's factor 1/rho is left in the mean norm only.
    """
    return method.combined_by(rule)


@m.ADDONS.register("config", source="ConFIG: Liu, Chu, Thuerey, ICLR 2025", note=COMBINES)
def config(method: m.Method) -> m.Method:
    """Replace the mean by its projection onto the direction that has the same angle to every update.

    r_k = Delta_k / |Delta_k|;  v = pinv(R) 1, so that <r_k, v> is the same for all k;  g_0 = sum_k p_k Delta_k
    u = <g_0, v> v / |v|^2, from the Gram matrix, C = R R' and v = R' pinv(C) 1, in float64.

    paper    length sum_k <Delta_k, v> / |v|, which is K times ours for equal p_k; a momentum variant, not here
    release  the same, in the gradients' precision. TorchJD takes torch.linalg.pinv of R (K x d) with torch's default
             cut-off, d times the resolution: in float32 it drops singular values below d / 8,400,000 of the largest
    here     the mean in place of the sum, so that equal updates come back. Singular values of R below 3e-7 of the
             largest count as zero at any d; the combination is summed in float64, for coefficients of updates that
             nearly oppose each other are large and cancel

    If no direction has the same angle to all updates, v is the nearest one by least squares. Opposite updates give no
    step, and neither does a mean that points away from v. Equal updates give the update, but for round-off. Zero
    updates count in g_0 but not in v.
    """
    return method.combined_by(stages.ConFIG())


@m.ADDONS.register(
    "upgrad", source="UPGrad: Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024", note=COMBINES
)
def upgrad(method: m.Method) -> m.Method:
    """Replace the mean: project each update onto the cone of directions that conflict with no client, then average.

    C = {x : <Delta_k, x> >= 0 for all k};  u = sum_k p_k proj_C(Delta_k)
    In Gram space proj_C(Delta_k) = sum_j w_j Delta_j with w = argmin w' G w over w >= e_k (componentwise).

    u has a non-negative inner product with every update. Needs the extra `methods`, with TorchJD and its solver.

    paper    on the gradients of each step, p_k = 1/K
    release  TorchJD, which is what computes here; it adds 1e-4 of the trace to the diagonal of G
    here     p_k are the method's weights (`weights: uniform` for the paper's); 1e-12 of the trace, on G in float64
             divided by its mean diagonal, so that updates of any length have the same result up to length

    Without conflict, and with equal updates, u is the mean, but for round-off. Opposite updates give no step. Zero
    updates count in p.
    """
    return method.combined_by(stages.UPGrad())


@m.ADDONS.register("dualproj", source="DualProj: as in GEM, Lopez-Paz and Ranzato, NeurIPS 2017, eq. 11", note=COMBINES)
def dualproj(method: m.Method) -> m.Method:
    """Replace the mean by its projection onto the cone of directions that conflict with no update.

    g_0 = sum_k p_k Delta_k;  u = argmin |u - g_0| subject to <Delta_k, u> >= 0 for all k
    In Gram space u = sum_k w_k Delta_k with w = argmin w' G w over w >= p (componentwise).

    Where `upgrad` projects each update and then averages, this averages and then projects. Needs the extra `methods`.

    paper    on the gradients of a new task and of remembered ones
    release  TorchJD, which is what computes here; it adds 1e-4 of the trace to the diagonal of G
    here     p_k are the method's weights; 1e-12 of the trace, on G in float64 divided by its mean diagonal

    If the mean conflicts with no update, u is the mean, but for round-off. Opposite updates give no step. Zero updates
    count in p.
    """
    return method.combined_by(stages.DualProj())


@parameters("fedloom.methods.conflict.aggregation:AlignedMTL")
class AlignedMTLSettings:
    scale: Literal["min", "median", "rmse"] = "min"


@m.ADDONS.register("aligned-mtl", source="Aligned-MTL: Senushkin et al., CVPR 2023", note=COMBINES)
def aligned_mtl(method: m.Method, rule: stages.AlignedMTL) -> m.Method:
    """Replace the mean: give the matrix of the updates equal singular values, then average.

    G = V diag(s^2) V';  B = sigma V diag(1/s) V';  u = sum_k (B p)_k Delta_k
    over the singular values s of D that are not zero; sigma is the smallest of them (`scale: min`), the root of the
    median of s^2 (`median`) or of its mean (`rmse`).

    So the step is equally long in a direction that only one client wants. Needs the extra `methods`.

    paper    sigma is the smallest singular value, p_k = 1/K, on the gradients of each step
    release  TorchJD, which is what computes here
    here     p_k are the method's weights. One client whose update is nearly a copy of another's makes the smallest
             singular value, and so the step, very small; `scale: median` or `rmse` then helps

    With equal updates u is the update, but for round-off. Zero updates count in p.
    """
    return method.combined_by(rule)


@m.ADDONS.register(
    "imtl-g", source="IMTL-G: Liu et al., Towards Impartial Multi-Task Learning, ICLR 2021", note=COMBINES
)
def imtl_g(method: m.Method) -> m.Method:
    """Replace the mean by the combination of the updates whose projections onto all updates are equal.

    u = sum_k w_k Delta_k,  sum_k w_k = 1,  <u, Delta_k> / |Delta_k| the same for all k
    In Gram space w = pinv(G) n, divided by its sum, with n_k = |Delta_k|. Needs the extra `methods`.

    paper    a closed form for linearly independent gradients of each step
    release  TorchJD, which is what computes here; the pseudo-inverse covers dependent gradients
    here     on G in float64 divided by its mean diagonal. The method's weights play no part, and rules that set them
             (fedga) are refused too

    Coefficients may be negative, and large where one update is much longer than others that it resembles; rounds in
    which they make a model explode are judged by what came out, as with any method. Where their sum vanishes (opposite
    updates) there is no step. With equal updates u is the update, but for round-off. Zero updates are left out.
    """
    return method.combined_by(stages.IMTLG())


@parameters("fedloom.methods.conflict.aggregation:FairGrad")
class FairGradSettings:
    alpha: Positive = 1.0


@m.ADDONS.register(
    "fairgrad", source="FairGrad: Ban and Ji, ICML 2024; alpha = 1 is Nash-MTL: Navon et al., ICML 2022", note=COMBINES
)
def fairgrad(method: m.Method, rule: stages.FairGrad) -> m.Method:
    """Replace the mean by the alpha-fair combination of the updates; alpha = 1 is the bargaining solution of Nash-MTL.

    w > 0 with G w = w^(-1/alpha) (componentwise);  u = sum_k w_k Delta_k / sum_k w_k
    Then <Delta_k, u> is the larger, the smaller w_k: alpha near 0 is the plain mean, alpha = 1 proportional fairness
    (sum of log <Delta_k, u>), and alpha without bound raises the smallest <Delta_k, u>. Needs the extra `methods`.

    paper    u = sum_k w_k Delta_k, whose length hardly depends on that of the gradients: sqrt(K) for alpha = 1
    release  TorchJD, which is what computes here; Nash-MTL's release solves it by steps of a convex program, keeps w
             between steps and cuts u to length 1
    here     w is divided by its sum, so that u is an average of updates and as long as these. alpha = 1 by default
             (LibMTL's). The method's weights play no part, and rules that set them (fedga) are refused too

    With equal updates u is the update, but for round-off. Opposite updates give no step. Zero updates are left out.
    """
    return method.combined_by(rule)


@parameters("fedloom.methods.conflict.aggregation:LossWeights")
class LossWeightsSettings:
    step: NonNegative = 0.025
    decay: NonNegative = 0.01


@m.ADDONS.register("famo", source="FAMO: Liu, Feng, Stone, Liu, NeurIPS 2023")
def famo(method: m.Method, rule: stages.LossWeights) -> m.Method:
    """Weigh clients so that the logarithms of their losses fall at the same rate.

    z = softmax(xi);  the weight of client k is z_k / l_k, made to sum to 1
    delta_k = log l_k(t-1) - log l_k(t);  xi <- xi - Adam(z_k (delta_k - sum_j z_j delta_j) + decay xi_k)
    l_k(t) is the loss of the model that client k receives in round t, summed over its tasks.

    A client measures it when it receives the model, on its validation data (partition.val_fraction must give it some):
    two passes over them, and two numbers sent. The server keeps xi, the moments of Adam and the last loss of each
    client.

    paper    on the losses of each step, before and after it; a plain gradient step on xi
    release  Adam with learning rate 0.025 and weight decay 0.01; losses minus their known minima, which are 0
    here     the release's, on a round's losses; the step on xi is taken one round late, when the losses of the
             aggregated model come in, over the clients that took part in both rounds. The weights take the place of the
             method's (its number of examples). Losses below 1e-8 count as 1e-8

    Weights are inverse to losses even at step = 0: the mean of updates as if each client had trained log l_k. A client
    that reports a tiny loss gains nearly all weight, so do not use this with clients that may lie. One participant
    gives the method's own result. Refused with learned weights (fedga) and without a mean that reads weights (local
    training, mixing). feddea and pcgrad change rows, this weighs them. With heal: use `heal: {weights: multiply}` after
    it.

    Couples tasks by design: weights compare the losses of all clients.
    """
    return method.with_local(training.ValidationLosses()).plus(rule, at="server")


@parameters("fedloom.methods.conflict.aggregation:GapWeights")
class GapWeightsSettings:
    step: NonNegative = 0.2
    relative: bool = True
    centre: bool = False
    floor: BelowOne = 0.0


@m.METHODS.register("fedga", source="Zhang et al., CVPR 2023")
def fedga(rule: stages.GapWeights) -> m.Method:
    """Give more weight to clients whose loss rises by aggregation.

    gap_k = loss_k(global model) - loss_k(trained model of client k) on k's validation data;
    a_k <- a_k + (gap_k / max_j |gap_j|) step_t / K, cut to [floor, 1], made to sum to 1; step_t = step (1 - (t-1)/R).
    a_k starts at 1/K and replaces the weight by data size. The client measures the global model when it receives it,
    so no round is added, only two passes over the validation data (partition.val_fraction must give it some).

    paper    subtracts the mean gap before scaling (as known to us, not re-read): `centre: true`
    release  no centring; divides by the literal 3, its number of training domains; accuracies with the sign turned
    here     no centring; divides by the number of clients; the gap is taken relative to the trained model's loss,
             because losses of different tasks have different scales (`relative: false` for raw gaps)

    Cutting at 0 can silence a client for good: `floor` keeps some weight. Only clients that took part in two
    consecutive rounds have a gap. If all gaps are 0, nothing changes. step = 0 is FedAvg with uniform weights. With
    FedDEA the gap is that of the transformed aggregate, which clients receive. With heal: `heal: {weights: multiply}`.

    Couples tasks by design: weights compare the gaps of all clients.
    """
    return m.Method(name="fedga", local=(training.ValidationLosses(),), stage=rule >> stages.Mean(), weights="uniform")
