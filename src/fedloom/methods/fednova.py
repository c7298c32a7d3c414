"""FedNova: updates normalised by how much each local gradient counts in them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fednova", source="Wang et al., NeurIPS 2020")
def fednova(*, mu: Annotated[float, Field(ge=0)] = 0.0, tau_eff: Literal["weights", "steps"] = "weights") -> m.Method:
    """Normalised averaging: clients that take more local steps do not pull the optimum to themselves.

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
    rules = (training.CountedSteps(mu),)
    return m.Method(
        name="fednova",
        local=(training.Proximal(mu), *rules) if mu else rules,
        stage=stages.NormaliseSteps(tau_eff) >> stages.Mean(),
    )
