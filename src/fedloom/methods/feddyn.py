"""FedDyn: a dynamic regulariser."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("feddyn", source="Acar et al., ICLR 2021")
def feddyn(*, alpha: Annotated[float, Field(gt=0)] = 0.01) -> m.Method:
    """A quadratic and a linear term make local optima agree with the global one.

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
    return m.Method(
        name="feddyn", local=(training.Dual(alpha),), stage=stages.DualShift(stages.Mean()), weights="uniform"
    )
