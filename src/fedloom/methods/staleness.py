"""A discount on old models, for peers that do not wait for each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("staleness", source="FedAsync: Xie, Koyejo, Gupta, 2019 (arXiv 1903.03934)")
def staleness(method: m.Method, *, a: Annotated[float, Field(ge=0)] = 0.5) -> m.Method:
    """Old models count less: every weight is multiplied by (1 + s)^-a.

    s is the number of own local rounds that a peer has ended since a neighbour's model was made; 0 for its own model.
    Then the method divides weights by their sum.

    paper    a server mixes one model at a time: alpha (1 + s)^-a of it, the rest of its own; also constant and hinge
             discounts
    here     at every peer, over its own model and the received ones, so the peers' weights take the place of alpha

    For `peers: {mode: asynchronous}` only: elsewhere all models are of one instant, and it is refused. A method that
    reads no weights is refused too. a = 0 changes nothing.
    """
    return method.plus(stages.Staleness(a), at="server")
