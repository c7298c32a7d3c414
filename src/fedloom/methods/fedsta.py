"""FedSTA: a body for all tasks, heads and tails for clients with the same task."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("fedsta", source="FESTA: Park et al., NeurIPS 2021")
def fedsta(*, every: Annotated[int, Field(ge=1)] | None = None) -> m.Method:
    """One encoder for all tasks; decoders and heads stay personal or are averaged among clients with the same task.

    theta_enc <- theta_enc + mean_k Delta_k,enc;  every `every` rounds, for each task: theta_k,dec <- the mean of the
    trained decoders (and heads) of the participants that trained the task. `every: null` never averages them.

    paper    split learning: clients own a first part and a task's last part, the server trains the transformer body on
             their features; first and last parts of clients with the same task are averaged every so many rounds
    release  as the paper
    here     as FedHCA2's supplement adapts it: the encoder is the body and is averaged, uniformly; there is no first
             part. `every: null` (default) is that adaptation. Heads go with their decoders

    With `every: null` this is FedPer with uniform weights, and FedBABU except for its frozen heads: say so in tables.
    Decoders of a task that only one client has are never averaged, whatever `every` is. A client that is absent when
    decoders are averaged keeps its own. Encoder buffers (batch norm) are averaged. With `every` set, decoders travel in
    each round, and FedDEA's rho counts them; add-ons at the server (pcgrad, cagrad, heal, ...) act on the encoder only.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    if every is None:
        return m.Method(name="fedsta", private=ALL_BUT_ENCODER, weights="uniform")
    own = stages.Every(every, stages.PerTask(stages.SimilarGroups(1)))
    return m.Method(name="fedsta", stage=stages.PartlyShared("encoder", stages.Mean(), own), weights="uniform")
