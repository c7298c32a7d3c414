"""Controls: what a method has to beat before its own idea gets the credit."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("support-mean")
def support_mean(method: m.Method) -> m.Method:
    """Control: average each parameter over only those clients that trained it.

    u_i = sum_k p_k Delta_ki / sum_{k trained i} p_k, and 0 if no client trained i.

    Why: in a unified model every client holds the decoders of all tasks, but trains only its own task's. FedAvg divides
    a decoder's update by the number of all clients: with one task a client about 1/K of it is left, and decoders learn
    K times more slowly than alone. A rule that multiplies updates by a constant undoes part of that, such as FedDEA
    with 1/rho. If FedAvg with this control does as well, the constant was the reason.

    A parameter was trained if its tensor received a gradient in the round; clients report this. Parameters that
    everybody trains get the plain mean. Clients with personal heads are averaged like this anyway, so nothing changes.

    Replaces the mean, so methods without a plain mean are refused (local training, a mean already replaced by cagrad or
    min-norm). It reads the weights that other rules set. No parameters, no state; one yes or no per tensor is sent.
    """
    return method.combined_by(stages.SupportMean())


@m.ADDONS.register("server-step")
def server_step(method: m.Method, *, step: Annotated[float, Field(gt=0)]) -> m.Method:
    """Control: the method with a server step, theta <- theta + step * u.

    Why: keeping the largest coordinates and multiplying by 1/rho makes an update longer, by at least 1/sqrt(rho) (for
    Gaussian updates 6.6 times at rho 0.1, 1.9 times at 0.5), so FedDEA takes larger steps than FedAvg. Compare it with
    FedAvg and a step of 1/rho, or with the step that makes updates equally long, before crediting the selection.

    `step` has no default. 1 changes nothing, bit for bit. Buffers such as batch norm statistics are not stepped. No
    state, nothing more is sent.

    The method's server rule must be the plain one with step 1: a method with a server optimiser has a step of its own.
    Local training shares nothing and is refused.
    """
    from fedloom.server import Plain

    if method.shares_nothing:
        raise ValueError(f"{method.name}: a server step would change nothing, for everything is private")
    if method.server != Plain():
        raise ValueError(f"{method.name}: server-step takes the place of Plain(step=1.0), but it has {method.server!r}")
    return replace(method, server=Plain(step))
