"""The mean of low-rank factors, and what it leaves out of the mean of their products (FedEx-LoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.updates import Updates
from fedloom.stages.conflict import shares
from fedloom.stages.mean import weighted_mean
from fedloom.stages.stage import Stage, Traits

_A, _B, _W = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"


@dataclass(frozen=True)
class ExactFactors(Stage):
    """The mean, and in each weight W beside factors A and B the residual: scale (sum_k p_k B_k A_k - Bm Am).

    A_k and B_k are a row's factors after its training (base + X), Am and Bm their means by `weight`, so that afterwards
    W + scale Bm Am is the mean of what the rows had. The products are computed in float64. A layout without such
    weights gets the mean alone. Singhal, Ponkshe, Vepakomma: FedEx-LoRA, ACL 2025.
    """

    scale: float = 1.0
    traits = Traits("matrix", reads={"X", "weight", "base"}, reduces=True, presence="block")

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"ExactFactors: expected a scale above 0, found {self.scale}")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        out, layout = weighted_mean(replace(updates, coef=None)), updates.layout
        p = shares(updates.weight.cpu())
        for layer in _layers(layout) if len(updates) else ():
            A, B = (self._trained(updates, layer + which) for which in (_A, _B))
            mean = torch.tensordot(p, B, 1) @ torch.tensordot(p, A, 1)
            residual = self.scale * (torch.einsum("k,kor,kri->oi", p, B, A) - mean)
            out[layout.slice(layer + _W)] += residual.flatten().to(out)
        return updates.reduced(out), state

    @staticmethod
    def _trained(updates: Updates, name: str) -> Tensor:
        """A block of all rows after training (K x its shape, float64)."""
        columns = updates.layout.slice(name)
        values = updates.X[:, columns].double()
        if updates.base is not None:
            values = values + updates.base[:, columns].double()
        return values.view(len(updates), *updates.layout.blocks[updates.layout.names.index(name)].shape)


def _layers(layout: Layout) -> Iterator[str]:
    """Layers that have a weight and both factors in the layout."""
    names = set(layout.names)
    yield from (w for n in layout.names if {(w := n.removesuffix(_W)) + _A, w + _B, w + _W} <= names and w != n)
