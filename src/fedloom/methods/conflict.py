"""PCGrad, GradVac, CAGrad, ConFIG and the minimum-norm direction as add-ons."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("pcgrad", source="PCGrad: Yu et al., NeurIPS 2020")
def pcgrad(method: m.Method, *, reduction: Literal["mean", "sum"] = "mean") -> m.Method:
    """Project each client's update against those it conflicts with, then combine as the method does.

    v = Delta_i;  for j != i in random order: if <v, Delta_j> < 0:  v <- v - <v, Delta_j> / |Delta_j|^2 Delta_j
    with the original Delta_j and the current v; then the method's own combination, u = sum_i p_i v_i.

    Acts at the server, over everything that the method shares, on updates as they arrive there; nothing more is sent.
    No state. The order is drawn per client and round from the run's seed. The method's weights, local training and
    server optimiser stay as they are.

    paper    on the gradients of each step; the projected gradients are summed: `reduction: sum`
    release  the TensorFlow code shuffles a copy and projects in fixed order; a widely used PyTorch port has a switch
             for the mean that cannot be turned off
    here     on a round's updates; `reduction: mean` (ours): a mean with the method's weights, since a sum of updates
             goes K times as far as FedAvg, K being the participants. `sum` multiplies each row by K before the
             weighted mean, which with equal weights is the paper's sum

    The constants of FedDEA's comparison with PCGrad are not published, nor is its reduction; compare both.

    Without conflict, and with one participant, the result is that of the method without PCGrad, bit for bit (reduction
    mean). If two rows conflict, each becomes orthogonal to the other. Zero rows are skipped. Personal heads count as
    part of a client's vector, but the projection changes shared columns only.

    With FedDEA: `feddea` acts at the client, so rows are compared after it (sparse rows conflict less). Listed after
    heal: history and mask come from raw rows, and the mask is applied to projected rows; listed before heal: heal sees
    projected rows only. cagrad and min-norm come after this add-on. Local training shares nothing and is refused.
    """
    return method.plus(stages.PCGrad(reduction), at="server")


@m.ADDONS.register("gradvac", source="GradVac: Wang, Tsvetkov, Firat, Cao, ICLR 2021")
def gradvac(method: m.Method, *, beta: Annotated[float, Field(ge=0, le=1)] = 0.5) -> m.Method:
    """Turn each client's update towards those it is less aligned with than usual, then combine as the method does.

    v = Delta_i;  for j != i in random order, with c = cos(v, Delta_j) and the target t = t_ij:
    if c < t:  v <- v + |v| (t sqrt(1 - c^2) - c sqrt(1 - t^2)) / (|Delta_j| sqrt(1 - t^2)) Delta_j
    so that cos(v, Delta_j) = t;  then t_ij <- (1 - beta) t_ij + beta c, from t_ij = 0.

    With t = 0 (the first round, and `beta: 0`) it is pcgrad. Acts at the server, over everything that the method
    shares; nothing more is sent. State at the server: a number for each pair of clients that met.

    paper    on the gradients of each step, whole model, per layer or per matrix; gradients are summed
    release  none by the authors. LibMTL: beta 0.5, and targets move only where c < t; TorchJD: beta 0.5, targets move
             always
    here     on a round's updates as one vector; the mean with the method's weights in place of the sum; targets move
             always, for pairs that are both there; beta 0.5. A target counts as at most 0.99 (ours): as it nears 1, v
             grows without bound, and updates of one round, other than gradients of languages, can be that much alike.
             TorchJD's own has one target for each position in the matrix, so absent clients would mix them up

    The order is drawn per client and round from the run's seed. Zero rows are skipped. With one participant the result
    is that of the method without it, bit for bit. With FedDEA: `feddea` acts at the client, so first. With pcgrad,
    heal, cagrad: as pcgrad with these. Local training shares nothing and is refused.
    """
    return method.plus(stages.GradVac(beta), at="server")


@m.ADDONS.register("cagrad", source="CAGrad: Liu et al., NeurIPS 2021")
def cagrad(
    method: m.Method,
    *,
    c: Annotated[float, Field(ge=0, lt=1)] = 0.4,
    rescale: Literal["none", "1+c^2", "1+c"] = "none",
) -> m.Method:
    """Replace the mean by the direction near it that is best for the client it serves worst.

    g_0 = sum_k p_k Delta_k,  g_w = sum_k w_k Delta_k,  phi = c |g_0|
    w* = argmin <g_w, g_0> + phi |g_w|  over w >= 0, sum w = 1;   u = (g_0 + phi g_w* / |g_w*|) / s
    which maximises min_k <Delta_k, u> over |u - g_0| <= phi; s = 1, 1+c^2 or 1+c (`rescale`).

    Acts at the server, over everything that the method shares; nothing more is sent. No state.

    paper    c in [0, 1), g_0 the uniform mean, no division
    release  c 0.5 by default, 0.4 in the NYUv2 script; divides by 1+c^2 by default; SLSQP in float32 from w = 1/K with
             constants of 1e-8, which stops at the start for small updates (norms of 0.01 and less)
    here     c 0.4; g_0 with the method's weights (`weights: uniform` for the paper's); no division; w exact but for
             round-off at any scale, from the Gram matrix in float64

    c = 0 is the mean, bit for bit. Equal updates, and one participant, give (1+c)/s times the update. If g_w* vanishes
    (within a millionth of its parts), u = g_0 / s. Zero updates count in g_0 but not in w; without any update there is
    no step. With personal heads, columns that the same clients have form a problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad: after it. Refused with heal and any other rule that
    sets weights of coordinates, which it would not read, and with methods that have no plain mean to replace (local
    training, a mean already replaced).
    """
    return method.combined_by(stages.CAGrad(c, rescale))


@m.ADDONS.register("min-norm", source="MGDA: Désidéri 2012; on unit rows FDSE: Wang et al., CVPR 2025")
def min_norm(method: m.Method, *, unit: bool = True) -> m.Method:
    """Replace the mean by the shortest convex combination of the updates, made unit vectors and rescaled.

    r_k = Delta_k / |Delta_k|;  w* = argmin |sum_k w_k r_k| over w >= 0, sum w = 1;
    u = m sum_k w*_k r_k with m the mean of |Delta_k| over the clients.
    With `unit: false` plain MGDA: r_k = Delta_k and m = 1.

    u has a non-negative inner product with every update; it is short if updates pull apart. Acts at the server, over
    everything that the method shares; nothing more is sent. No state. The method's weights play no part.

    paper    FDSE: unit rows times the mean norm, per tensor and for its shared layers only; MGDA: rows as they are, on
             the gradients of each step
    release  FDSE: as its paper
    here     over the whole vector of shared parameters; exact but for round-off at any scale

    Equal updates, and one participant, give the update. Opposite updates give no step. Zero updates are left out, in
    the mean norm too; without any update there is no step. With personal heads, columns that the same clients have form
    a problem of their own.

    With FedDEA: `feddea` acts at the client, so first; on unit rows its factor 1/rho is left in the mean norm only.
    With pcgrad: after it. Refused with rules that set weights (heal, fedga), which it would not read, and with methods
    that have no plain mean to replace (local training, a mean already replaced).
    """
    return method.combined_by(stages.MinNorm(unit))


@m.ADDONS.register("config", source="ConFIG: Liu, Chu, Thuerey, ICLR 2025")
def config(method: m.Method) -> m.Method:
    """Replace the mean by the direction that has the same angle to every update, as long as the mean reaches along it.

    r_k = Delta_k / |Delta_k|;  v = pinv(R) 1, so that <r_k, v> is the same for all k;  g_0 = sum_k p_k Delta_k
    u = <g_0, v> v / |v|^2

    Acts at the server, over everything that the method shares; nothing more is sent. No state. It is computed from the
    Gram matrix, C = R R' and v = R' pinv(C) 1, in float64.

    paper    length sum_k <Delta_k, v> / |v|, which is K times ours for equal p_k; a momentum variant, not here
    release  the same, in the gradients' precision. TorchJD takes torch.linalg.pinv of R (K x d) with torch's default
             cut-off, d times the resolution: in float32 it drops singular values below d / 8,400,000 of the largest
    here     the mean in place of the sum, so that equal updates come back. Singular values of R below 3e-7 of the
             largest count as zero at any d; the combination is summed in float64, for coefficients of updates that
             nearly oppose each other are large and cancel

    If no direction has the same angle to all updates, v is the nearest one by least squares. Opposite updates give no
    step, and neither does a mean that points away from v. Equal updates, and one participant, give the update, but for
    round-off. Zero updates count in g_0 but not in v. If clients lack blocks, columns that the same clients have form a
    problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with heal and any
    other rule that sets weights of coordinates, and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.ConFIG())
