"""Weightings of TorchJD as add-ons: UPGrad, DualProj, Aligned-MTL, IMTL-G, FairGrad (extra `torchjd`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("upgrad", source="UPGrad: Quinton and Rey, Jacobian Descent for Multi-Objective Optimization, 2024")
def upgrad(method: m.Method) -> m.Method:
    """Replace the mean by the mean of the updates after each was projected onto the cone that conflicts with nobody.

    C = {x : <Delta_k, x> >= 0 for all k};  u = sum_k p_k proj_C(Delta_k)
    In Gram space proj_C(Delta_k) = sum_j w_j Delta_j with w = argmin w' G w over w >= e_k (componentwise).

    u has a non-negative inner product with every update. Acts at the server, over everything that the method shares;
    nothing more is sent. No state. Needs the extra `torchjd`, which brings TorchJD and its solver.

    paper    on the gradients of each step, p_k = 1/K
    release  TorchJD, which is what computes here; it adds 1e-4 of the trace to the diagonal of G
    here     p_k are the method's weights (`weights: uniform` for the paper's); 1e-12 of the trace, on G in float64
             divided by its mean diagonal, so that updates of any length have the same result up to length

    Without conflict, with equal updates, and with one participant, u is the mean, but for round-off. Opposite updates
    give no step. Zero updates count in p. If clients lack blocks, columns that the same clients have form a problem of
    their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with heal and any
    other rule that sets weights of coordinates, which it would not read, and with methods that have no plain mean to
    replace (local training, a mean already replaced).
    """
    return method.combined_by(stages.UPGrad())


@m.ADDONS.register("dualproj", source="DualProj: as in GEM, Lopez-Paz and Ranzato, NeurIPS 2017, eq. 11")
def dualproj(method: m.Method) -> m.Method:
    """Replace the mean by its projection onto the cone of directions that conflict with no update.

    g_0 = sum_k p_k Delta_k;  u = argmin |u - g_0| subject to <Delta_k, u> >= 0 for all k
    In Gram space u = sum_k w_k Delta_k with w = argmin w' G w over w >= p (componentwise).

    Where `upgrad` projects each update and then averages, this averages and then projects. Acts at the server, over
    everything that the method shares; nothing more is sent. No state. Needs the extra `torchjd`.

    paper    on the gradients of a new task and of remembered ones
    release  TorchJD, which is what computes here; it adds 1e-4 of the trace to the diagonal of G
    here     p_k are the method's weights; 1e-12 of the trace, on G in float64 divided by its mean diagonal

    If the mean conflicts with no update, u is the mean, but for round-off; so with equal updates and with one
    participant. Opposite updates give no step. Zero updates count in p. If clients lack blocks, columns that the same
    clients have form a problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with rules that set
    weights of coordinates (heal) and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.DualProj())


@m.ADDONS.register("aligned-mtl", source="Aligned-MTL: Senushkin et al., CVPR 2023")
def aligned_mtl(method: m.Method, *, scale: Literal["min", "median", "rmse"] = "min") -> m.Method:
    """Replace the mean by the mean of the updates after their matrix was given equal singular values.

    G = V diag(s^2) V';  B = sigma V diag(1/s) V';  u = sum_k (B p)_k Delta_k
    over the singular values s of D that are not zero; sigma is the smallest of them (`scale: min`), the root of the
    median of s^2 (`median`) or of its mean (`rmse`).

    So the step is as long along what only one client wants as along what all want. Acts at the server, over everything
    that the method shares; nothing more is sent. No state. Needs the extra `torchjd`.

    paper    sigma is the smallest singular value, p_k = 1/K, on the gradients of each step
    release  TorchJD, which is what computes here
    here     p_k are the method's weights. One client whose update is nearly a copy of another's makes the smallest
             singular value, and so the step, very small; `scale: median` or `rmse` then helps

    With equal updates and with one participant u is the update, but for round-off. Zero updates count in p. If clients
    lack blocks, columns that the same clients have form a problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with rules that set
    weights of coordinates (heal) and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.AlignedMTL(scale))


@m.ADDONS.register("imtl-g", source="IMTL-G: Liu et al., Towards Impartial Multi-Task Learning, ICLR 2021")
def imtl_g(method: m.Method) -> m.Method:
    """Replace the mean by the combination of the updates that reaches equally far along each of them.

    u = sum_k w_k Delta_k,  sum_k w_k = 1,  <u, Delta_k> / |Delta_k| the same for all k
    In Gram space w = pinv(G) n, divided by its sum, with n_k = |Delta_k|.

    Acts at the server, over everything that the method shares; nothing more is sent. No state. Needs the extra
    `torchjd`.

    paper    a closed form for linearly independent gradients of each step
    release  TorchJD, which is what computes here; the pseudo-inverse covers dependent gradients
    here     on G in float64 divided by its mean diagonal. The method's weights play no part, and rules that set
             weights (heal, fedga) are refused, for it would not read them

    Coefficients may be negative, and large where one update is much longer than others that it resembles; rounds in
    which they make a model explode are judged by what came out, as with any method. Where their sum vanishes (opposite
    updates) there is no step. With equal updates and with one participant u is the update, but for round-off. Zero
    updates are left out. If clients lack blocks, columns that the same clients have form a problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with methods that have
    no plain mean to replace.
    """
    return method.combined_by(stages.IMTLG())


@m.ADDONS.register("fairgrad", source="FairGrad: Ban and Ji, ICML 2024; alpha = 1 is Nash-MTL: Navon et al., ICML 2022")
def fairgrad(method: m.Method, *, alpha: Annotated[float, Field(gt=0)] = 1.0) -> m.Method:
    """Replace the mean by the alpha-fair combination of the updates; alpha = 1 is the bargaining solution of Nash-MTL.

    w > 0 with G w = w^(-1/alpha) (componentwise);  u = sum_k w_k Delta_k / sum_k w_k
    Then <Delta_k, u> is the larger, the smaller w_k: alpha near 0 is the plain mean, alpha = 1 proportional fairness
    (sum of log <Delta_k, u>), and alpha without bound raises the smallest <Delta_k, u>.

    Acts at the server, over everything that the method shares; nothing more is sent. No state. Needs the extra
    `torchjd`, with scipy.

    paper    u = sum_k w_k Delta_k, whose length hardly depends on that of the gradients: sqrt(K) for alpha = 1
    release  TorchJD, which is what computes here; Nash-MTL's release solves it by steps of a convex program, keeps w
             between steps and cuts u to length 1
    here     w is divided by its sum, so that u is an average of updates and as long as these. alpha = 1 by default
             (LibMTL's). The method's weights play no part, and rules that set weights (heal, fedga) are refused

    With equal updates and with one participant u is the update, but for round-off. Opposite updates give no step. Zero
    updates are left out. If clients lack blocks, columns that the same clients have form a problem of their own.

    With FedDEA: `feddea` acts at the client, so first. With pcgrad, gradvac: after them. Refused with methods that have
    no plain mean to replace.
    """
    return method.combined_by(stages.FairGrad(alpha))
