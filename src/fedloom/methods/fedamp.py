"""FedAMP: personal models drawn to models that resemble them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedamp", source="Huang et al., AAAI 2021")
def fedamp(
    *,
    lam: Annotated[float, Field(ge=0)] = 1.0,
    alpha: Annotated[float, Field(gt=0)] = 1.0,
    sigma: Annotated[float, Field(gt=0)] = 1.0,
    scale: Literal["absolute", "median"] = "absolute",
    start: Literal["own", "mix"] = "own",
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Each client keeps its own model w_k and is drawn to u_k, a mix of all models that weighs similar ones more.

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
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="fedamp",
        local=(training.Anchor(lam / alpha, start),),
        stage=stages.Attention(alpha, sigma, scale),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        start="own",
        buffers="local",
    )
