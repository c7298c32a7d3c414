"""FedBone, emulated: attention against past updates, then projection of conflicts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("fedbone", source="emulated, after Chen et al., JCST 2024")
def fedbone(
    *,
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    temperature: Annotated[float, Field(gt=0)] = 1.0,
) -> m.Method:
    """Emulated: updates that agree with past ones count more, conflicts are projected away, then the mean.

    a_k = softmax_k(cos(Delta_k, H) / temperature);  rows K a_k Delta_k -> PCGrad -> u = sum_k p_k rows_k;
    H <- beta H + (1 - beta) u, an exponential mean of past u. In round 1, a_k = 1/K. Decoders and heads never leave a
    client.

    paper    split learning: the server holds a large model, runs it on the clients' embeddings, rescales each task's
             gradient by attention against past ones and projects those in conflict
    release  not known to us
    here     an emulation in rounds of local training, on the updates of a shared encoder. The form of the attention
             (cosine, softmax), beta and temperature are ours: call results "FedBone (emulated)"

    One participant: its update. No conflict and equal cosines: FedAvg on the encoder. A large temperature leaves
    PCGrad on the encoder. The encoder's float buffers (batch norm) are averaged. H is at the server; nothing more is
    sent.

    With FedDEA: before the attention. Add-ons at the server (pcgrad again, heal) act after the projection; cagrad and
    min-norm take the place of the mean.

    Couples tasks by design: weights compare a client's update with the history of all.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(name="fedbone", stage=stages.HistoryAttention(beta, temperature), private=ALL_BUT_ENCODER)
