"""Who takes part in a round: a pure function of (seed, round)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedloom.core.context import generator


def drawn_of(clients: int, participation: float) -> int:
    """How many clients a round of fixed size has."""
    return max(1, int(participation * clients + 0.5))


def cohort(
    clients: Sequence[str], participation: float, seed: int | str, round: int, poisson: bool = False
) -> tuple[str, ...]:
    """The participants of a round, sorted: max(1, round(participation x clients)) of them.

    With `poisson` each client is drawn by itself with probability `participation`; there may be none.
    """
    clients = sorted(clients)
    if participation == 1:
        return tuple(clients)
    source = generator(seed, "cohort", round)
    if poisson:
        drawn = torch.rand(len(clients), generator=source, dtype=torch.float64).tolist()
        return tuple(client for client, u in zip(clients, drawn, strict=True) if u < participation)
    chosen = torch.randperm(len(clients), generator=source)[: drawn_of(len(clients), participation)].tolist()
    return tuple(clients[i] for i in sorted(chosen))
