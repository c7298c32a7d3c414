"""Weights by domain discrepancy: F2DC's domain-aware aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.settings.section import Count
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.f2dc import DomainWeightsSettings

Discrepancy = Literal["total", "class", "none"]


def domain_discrepancy(shares: Tensor, domains: int) -> Tensor:
    """Return d_k = sqrt(1/2 sum_c (B_k^c - 1/Q)^2) of each client (K), from its shares B_k of each class (K x C); eq.
    10.
    """
    return ((shares - 1 / domains).square().sum(1) / 2).sqrt()


def domain_aware_weights(size: Tensor, discrepancy: Tensor, alpha: float = 1.0, beta: float = 0.4) -> Tensor:
    """Return p_k = sigmoid(alpha s_k - beta d_k), divided by their sum (K); eq. 11, with s_k = n_k / N."""
    # In logarithms, because a sigmoid may underflow for all clients at once.
    return torch.softmax(torch.nn.functional.logsigmoid(alpha * size - beta * discrepancy), 0)


@dataclass(frozen=True)
class DomainWeights(DomainWeightsSettings, Stage):
    """Writes weights that grow with a client's data and fall with its domain discrepancy; see `domain-weights`.

    `classes` is C, the number of classes; by default the length of the extra `classes`, the number of examples of each
    class (C). `discrepancy` "class" reads it too; a class that nobody has counts as 1/Q. "total" is
    d_k = sqrt(C/2) |n_k/N - 1/Q|. With "none" alpha and beta have no effect.
    """

    classes: Count | None = None

    @property
    def traits(self) -> Traits:
        reads = {"n"}
        if self.discrepancy != "none" and self.domains is None:
            reads.add("extra:domain")
        if self.discrepancy == "class" or (self.discrepancy == "total" and self.classes is None):
            reads.add("extra:classes")
        return Traits("mix", reads, {"weight"}, separable=True, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        n = updates.n
        if not float(n.sum()) > 0:
            return updates, state
        size = n / n.sum()
        if self.discrepancy == "none":
            return updates.replace(weight=size), state
        known = self.domains
        if known is None:
            seen = sorted({*state.get("domains", []), *map(str, updates.extra["domain"])})
            state, known = {"domains": seen}, len(seen)
        shares = size[:, None].expand(-1, self.classes or max(1, *map(len, updates.extra["classes"]), 0))
        if self.discrepancy == "class":
            counts = torch.stack([torch.as_tensor(c).double() for c in updates.extra["classes"]])
            total = counts.sum(0)
            shares = torch.where(total > 0, counts / total.clamp(min=1), 1 / known)
        weight = domain_aware_weights(size, domain_discrepancy(shares, known), self.alpha, self.beta)
        return updates.replace(weight=weight), state
