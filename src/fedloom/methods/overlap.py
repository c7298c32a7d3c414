"""FedDEA's Figure 2 as an add-on that only records."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("activated-dimensions", source="FedDEA, Figure 2")
def activated_dimensions(
    method: m.Method,
    *,
    rho: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    bins: Annotated[int, Field(ge=1, le=4096)] = 64,
) -> m.Method:
    """Record which dimensions each update activates and how far the clients agree; changes nothing.

    A_k = the floor(rho d) largest |Delta_k|, without exact zeros; overlap of two clients = |A & B| / k, in general
    2 |A & B| / (|A| + |B|). Two sets drawn at random overlap by about rho. Once over the encoder alone, and once over
    all shared parameters. In a unified model every client is exactly zero on the decoders and heads of other tasks, so
    those parts are disjoint whatever the tasks have in common: read the encoder.

    paper    four clients with a task each train independently; the top 10 % of each update in round 1 and round 100,
             drawn along the parameters; no numbers
    release  none found
    here     counts of every round in metrics.jsonl, under "records": per block, per pair of clients, and a histogram of
             `bins` pieces along the flat vector. `fedloom activated RUN` prints tables and draws the picture; the grids
             feddea/activated-dimensions and feddea/activated-dimensions-scenes run the experiment

    It sees the rows at its place in the list: `feddea` at the client comes before it, and with the same or a larger rho
    does not change the choice, because the largest stay the largest. To look at raw rows, list it before `feddea: {at:
    server}`. Costs one look at every row and a bool per row and parameter; models are the same, bit for bit. With
    `local` there would be no rows, so updates are sent and every client gets its own back: the same models, bit for
    bit, but bytes are counted.
    """
    if method.shares_nothing:
        method = replace(method, private=None, stage=stages.Identity(), buffers="local")
    return method.plus(stages.ActivatedDimensions(rho, bins), at="server")
