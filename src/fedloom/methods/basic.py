"""Local training, FedAvg and FedProx."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("local")
def local() -> m.Method:
    """Every client trains alone; nothing is sent.

    The reference of Delta_m: same optimiser and number of local epochs as the federated runs. Mixing with the
    identity matrix (`Method(stage=Identity())`) gives the same models, bit for bit.
    """
    return m.Method(name="local", stage=stages.Identity(), private="*", buffers="local")


@m.METHODS.register("fedavg", source="McMahan et al., AISTATS 2017")
def fedavg() -> m.Method:
    """Weighted mean of the clients' updates.

    u = sum_k p_k Delta_k, theta+ = theta + u, with p_k proportional to a client's examples (or uniform).

    In a unified model, in which every client holds the heads of all tasks, a head's update is divided by all
    clients although only those with the task changed it; the stage SupportMean is the control for that.
    """
    return m.Method(name="fedavg")


@m.METHODS.register("fedprox", source="Li et al., MLSys 2020")
def fedprox(*, mu: Annotated[float, Field(ge=0)] = 0.01) -> m.Method:
    """FedAvg with (mu/2) |y - theta|^2 in the local loss, theta being the model received this round.

    mu = 0.01 follows the FedHCA2 supplement; the authors of FedProx tune it over 0.001 .. 1 and name no default.
    mu = 0 is FedAvg, bit for bit. The term covers the shared parameters only.
    """
    return m.Method(name="fedprox", local=(training.Proximal(mu),))
