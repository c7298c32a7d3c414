"""FedACG: clients start from where the server's momentum will lead."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import training
from fedloom.methods import registry as m


@m.METHODS.register("fedacg", source="Kim, Kim, Han, CVPR 2024")
def fedacg(
    *,
    lam: Annotated[float, Field(ge=0, lt=1)] = 0.85,
    beta: Annotated[float, Field(ge=0)] = 1e-3,
) -> m.Method:
    """Clients start from a lookahead, theta + lam m, and are held near it; m is the server's momentum.

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
    from fedloom.server import Lookahead

    return m.Method(name="fedacg", local=(training.Proximal(2 * beta),), server=Lookahead(lam), weights="uniform")
