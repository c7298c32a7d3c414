"""pFedMe: personal models on the Moreau envelope of the loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom.methods import registry as m


@m.METHODS.register("pfedme", source="Dinh, Tran, Nguyen, NeurIPS 2020")
def pfedme(
    *,
    lam: Annotated[float, Field(gt=0)] = 15.0,
    inner: Annotated[int, Field(ge=1)] = 5,
    outer: Annotated[float, Field(gt=0)] = 0.005,
    beta: Annotated[float, Field(gt=0)] = 1.0,
) -> m.Method:
    """The shared model w follows personal models theta_k = argmin F_k(theta) + (lam/2) |theta - w|^2.

    For each batch: `inner` optimiser steps on F(theta) + (lam/2) |theta - w|^2, theta starting where it was; then w <-
    w - outer lam (w - theta). Server: w+ = (1 - beta) w + beta mean_S w_k. w (global) and theta_k (personal) are
    measured.

    paper    as above
    release  lam 15, 5 inner steps at 0.09 with weight decay 0.001, outer rate 0.005, beta 1, 20 batches a round
    here     the same constants; the inner optimiser is the recipe's. Plain SGD needs learning rate x lam < 2, which is
             checked. theta_k is stored with the client: one public version never does, and measures the start

    With FedDEA: the selection acts on the update of w.
    """
    from fedloom.server import Plain
    from fedloom.training.personal import Envelope

    return m.Method(name="pfedme", local=(Envelope(lam, inner, outer),), server=Plain(beta), weights="uniform")
