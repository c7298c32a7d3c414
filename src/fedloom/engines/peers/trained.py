"""What local training left at a peer: the version of its model that it tells others of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.engines.peers.community import Terms
from fedloom.federation.rounds.messages import Payload, blank


@dataclass(frozen=True, eq=False)
class Trained:
    """A peer's model between its local training and its mixing.

    payload  what training left, packed as it would go to a server
    start    where training started (d)
    update   what training did to it (d); zeros where there is a vector for each task, which `payload` has
    round    the peer's round in which it trained
    made     simulated time at which training ended, of peers that do not wait for each other
    """

    payload: Payload
    start: Tensor
    update: Tensor
    round: int
    made: float | None = None

    @staticmethod
    def of(terms: Terms, payload: Payload, start: Tensor, round: int, made: float | None = None) -> Trained:
        """With the update out of the payload."""
        update = torch.zeros_like(start)
        if not terms.by_task:  # a codec may keep the rows of several tasks packed
            like = blank(terms.shared, terms.federation, (payload.row,), update[None])
            update = terms.method.codec.unpack(payload.packed, like)[0]
        return Trained(payload, start, update, round, made)

    @cached_property
    def model(self) -> Tensor:
        """The trained model (d)."""
        return self.start + self.update
