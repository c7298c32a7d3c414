"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedloom.core.context import generator


def cohort(clients: Sequence[str], participation: float, seed: int, round: int) -> tuple[str, ...]:
    """The participants of a round, sorted: max(1, round(participation x clients)), a pure function of (seed, round)."""
    clients = sorted(clients)
    if participation == 1:
        return tuple(clients)
    size = max(1, int(participation * len(clients) + 0.5))
    chosen = torch.randperm(len(clients), generator=generator(seed, "cohort", round))[:size].tolist()
    return tuple(clients[i] for i in sorted(chosen))
