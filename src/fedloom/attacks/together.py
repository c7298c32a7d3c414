"""Attacks of clients that know all honest updates of the round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from fedloom.attacks.attack import Attack


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Against the honest mean: -factor times it."""

    factor: float
    knows_all = True

    def together(self, own: Tensor, honest: Tensor, clients: int) -> Tensor:
        return -self.factor * honest.mean(0)


@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """mean - z std. The paper's z: s = floor(K / 2 + 1) - m more rows make m hostile ones of K a majority, and
    z = Phi^-1((K - m - s) / (K - m)) is where that many honest rows lie further away."""

    factor: float | None
    knows_all = True

    def together(self, own: Tensor, honest: Tensor, clients: int) -> Tensor:
        return honest.mean(0) - self.z(clients, clients - len(honest)) * honest.std(0, correction=0)

    def z(self, clients: int, hostile: int) -> float:
        """The factor, or the paper's; at most 3, where the hostile rows are a majority already."""
        if self.factor is not None:
            return self.factor
        needed = math.floor(clients / 2 + 1) - hostile
        share = (clients - hostile - needed) / (clients - hostile)
        return NormalDist().inv_cdf(min(max(share, 0.5), 0.9987))


@dataclass(frozen=True)
class Mimic(Attack):
    """A copy of the honest row that is furthest from the honest mean."""

    knows_all = True

    def together(self, own: Tensor, honest: Tensor, clients: int) -> Tensor:
        return honest[int((honest - honest.mean(0)).norm(dim=1).argmax())]
