"""CFL: one model, until the clients of a cluster no longer agree; then two."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("cfl", source="Sattler, Müller, Samek, IEEE TNNLS 2021")
def cfl(
    *,
    eps1: Annotated[float, Field(ge=0)] | None = None,
    eps2: Annotated[float, Field(ge=0)] | None = None,
    start: Annotated[int, Field(ge=0)] = 20,
    relative: bool = True,
    linkage: Literal["single", "complete"] = "single",
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """FedAvg in every cluster; a cluster whose mean update is short, although its members' are long, is split in two.

    From round `start` + 1 on, for each cluster of more than two members:
    |sum_k p_k Delta_k| < eps1 r  and  max_k |Delta_k| > eps2 r  ->  the two parts with the smallest largest similarity
    across: the members with the largest cos(Delta_i, Delta_j) are joined first, until two parts are left (single
    linkage). r = 1, or with `relative` the mean norm of the first round's updates. Parts continue from the cluster's
    model; the round's updates are averaged within the new parts.

    paper    thresholds as above, chosen from the first rounds; parts as above; an optional test on the gap of the
             similarities
    release  eps1 0.4, eps2 1.6 (absolute), start 20, uniform weights; complete linkage on -cos (`linkage: complete`),
             whose parts may be more similar than need be; later splits return positions within the cluster as if they
             were client numbers, so they move the wrong clients
    here     `relative`, because absolute norms mean nothing under another optimiser, architecture or FedDEA: by default
             eps1 0.2, eps2 0.4 (ours); with `relative: false` those of the release. No gap test. Clusters hold client
             ids

    A cluster is split only in a round in which all its members are present (the first: all clients), so hardly ever
    under low participation. Members that are absent receive their cluster's model. A cluster of one is local training.
    Until a split this is FedAvg with uniform weights, bit for bit. Batch norm statistics stay with the client.
    `share: encoder` leaves decoders and heads out, as clients with different tasks need.

    With FedDEA: similarity and norms are computed on the sent updates, after selection. Add-ons at the server (pcgrad,
    cagrad, min-norm, heal, ...) act inside each cluster; after a split both parts inherit their state.

    Couples tasks by design: clusters are formed from whole updates, whatever their tasks.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    defaults = (0.2, 0.4) if relative else (0.4, 1.6)
    eps = [default if given is None else given for given, default in zip((eps1, eps2), defaults, strict=True)]
    return m.Method(
        name="cfl",
        stage=stages.SplittingClusters(eps[0], eps[1], start, relative, linkage),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        weights="uniform",
        buffers="local",
    )
