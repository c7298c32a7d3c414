"""Gossip averaging: everybody mixes with its neighbours on a graph."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("dpsgd", source="Lian et al., NeurIPS 2017")
def dpsgd(
    *,
    topology: str = "ring",
    options: dict[str, Any] | None = None,
    every: Annotated[int, Field(ge=0)] = 0,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Every client's trained model becomes a mean of itself and its neighbours' on an undirected graph.

    w_k <- sum_j W_kj w_j with Metropolis weights W_kj = 1 / (1 + max(deg_k, deg_j)), W_kk the rest: symmetric and
    doubly stochastic, so the mean of all models stays. `topology` and `options` are as for `fedloom.peers.candidates`;
    a new graph is drawn every `every` rounds, or never for 0.

    paper    mixes the models and adds the gradient at the model before mixing, one step a round
    release  ring and random graphs on MPI, one step a round
    here     clients train as long as a recipe says, then mix (as DFedAvg, Sun et al., 2022)

    The graph covers the clients that take part in a round. On the complete graph all get the plain mean of the models.
    This computes in one place what peers do. Without a server it is `method: fedavg` with `peers: {graph: ring,
    weights: {kind: metropolis}}`. Batch norm statistics stay with the client.

    Couples tasks by design: the graph has all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="dpsgd",
        stage=stages.Gossip(topology, options or {}, every),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        weights="uniform",
        buffers="local",
    )
