"""FedPMT: clients with different subsets of the tasks, and a model for each single task between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("fedpmt", source="FedPMT: Xin, Li, Niu, Wu, Chen, JPDC 205, 2025")
def fedpmt(*, attenuation: Annotated[float, Field(ge=0, le=1)] = 0.5) -> m.Method:
    """The server makes a model for each task of all clients' models, and each client's model of those of its tasks.

    theta_t = sum_k a_kt n_k w_k / sum_k a_kt n_k,  a_kt = 1 where client k holds task t, else `attenuation`
    w_k <- mean of theta_t over the tasks t of client k;  a task's decoder and head: sum over its holders by n_k

    Which tasks a client holds is the partition's to say: by its surroundings, its labels or its means.

    paper    multi-task models of each client's subset of tasks; at the server, of another architecture, models of
             single tasks between them, with transformations both ways; task attenuation factors against negative
             transfer; NYUD-v2, PASCAL-Context, Cityscapes. Only its abstract and highlights could be read
    release  none found
    here     as above, with one architecture: a multi-task model is taken as each of its tasks' models, and made of
             these as their mean. The form of the factor, its value and the weights are ours

    attenuation = 1 is FedAvg, with decoders averaged among their holders alone; 0 joins clients by common tasks only,
    and with one task a client is FedAvg within each task. A client that is absent keeps its model, and one that never
    took part begins with the initial one. Encoder buffers (batch norm) stay with the client.

    With FedDEA: models are base_k + T(Delta_k). pcgrad acts on the updates before models are mixed. cagrad, min-norm
    and heal are refused, because there is no mean whose place or weights they could take.
    """
    own = stages.PerTask(stages.SimilarGroups(1))
    mix = stages.Split({"encoder": stages.SingleTaskModels(attenuation), "*": own})
    return m.Method(name="fedpmt", stage=mix, buffers="local")
