"""Ditto: a personal model beside the global one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom.methods import registry as m


@m.METHODS.register("ditto", source="Li, Hu, Beirami, Smith, ICML 2021")
def ditto(*, lam: Annotated[float, Field(ge=0)] = 0.1) -> m.Method:
    """FedAvg, and beside it each client trains a model of its own that is held near the global one.

    Global stream: FedAvg. Personal stream: v <- v - lr (grad F_k(v) + lam (v - theta)), theta being the model received
    in the round, for as many steps. v starts as the first received model and never leaves the client.

    paper    as above, any solver for the global stream
    release  lam 1 in its scripts, or chosen among 0.1, 1, 2 on validation data
    here     lam 0.1 (the FedHCA2 supplement). The streams share nothing but theta: optimiser, batch norm statistics and
             random numbers are apart, so the global model is FedAvg's, bit for bit. Both models are measured

    lam = 0 is local training beside FedAvg; a large lam gives the global model. Computation and client memory double.
    With FedDEA: the global stream only.
    """
    from fedloom.training.personal import Anchor
    from fedloom.training.phases import Stream

    return m.Method(name="ditto", stream=Stream((Anchor(lam),)))
