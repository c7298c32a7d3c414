"""FAMO: weights under which all clients' losses fall at the same rate, from losses alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.ADDONS.register("famo", source="FAMO: Liu, Feng, Stone, Liu, NeurIPS 2023")
def famo(
    method: m.Method,
    *,
    step: Annotated[float, Field(ge=0)] = 0.025,
    decay: Annotated[float, Field(ge=0)] = 0.01,
) -> m.Method:
    """Weigh clients so that the logarithms of their losses fall at the same rate.

    z = softmax(xi);  the weight of client k is z_k / l_k, made to sum to 1
    delta_k = log l_k(t-1) - log l_k(t);  xi <- xi - Adam(z_k (delta_k - sum_j z_j delta_j) + decay xi_k)
    l_k(t) is the loss of the model that client k receives in round t, summed over its tasks.

    A client measures it when it receives the model, on its validation data (partition.val_fraction must give it some):
    two passes over them, and two numbers sent. Acts at the server; updates are not compared. State at the server: xi,
    the moments of Adam and the last loss of each client.

    paper    on the losses of each step, before and after it; a plain gradient step on xi
    release  Adam with learning rate 0.025 and weight decay 0.01; losses minus their known minima, which are 0
    here     the release's, on a round's losses; the step on xi is taken one round late, when the losses of the
             aggregated model come in, over the clients that took part in both rounds. The weights take the place of the
             method's (its number of examples). Losses below 1e-8 count as 1e-8

    Weights are inverse to losses even at step = 0: the mean of updates as if each client had trained log l_k. A client
    that claims a tiny loss gains nearly all weight, so this is not for clients that may lie. With one participant the
    result is that of the method without it. Methods with learned weights of their own (fedga) and those without a mean
    that reads weights (local training, mixing) are refused. With FedDEA and pcgrad: these change rows, this weighs
    them. With heal: use `heal: {weights: multiply}` after it.

    Couples tasks by design: weights compare the losses of all clients.
    """
    return method.with_local(training.ValidationLosses()).plus(stages.LossWeights(step, decay), at="server")
