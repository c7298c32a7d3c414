"""Low-rank factors, whose products are averaged at the server (FedEx-LoRA, FLoRA); the clients' rules about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.context import Broadcast, Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.mean import shares, weighted_mean
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.lora import ExactFactorsSettings
from fedloom.models.changes import adapted_layers, factors
from fedloom.training.rules import LocalRule, View

_A, _B, _W = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"


@dataclass(frozen=True)
class ExactFactors(ExactFactorsSettings, Stage):
    """The mean, and in each weight beside factors A and B the residual of their mean product; see `fedex-lora`.

    A row's factors are those after its training (base + X). The products are computed in float64.
    """

    traits = Traits("matrix", reads={"X", "weight", "base"}, reduces=True, presence="block")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        out, layout = weighted_mean(replace(updates, coef=None)), updates.layout
        p = shares(updates.weight.cpu())
        for layer in _layers(layout) if len(updates) else ():
            A, B = (_values(updates, layer + which, trained=True) for which in (_A, _B))
            mean = torch.tensordot(p, B, 1) @ torch.tensordot(p, A, 1)
            residual = self.scale * (torch.einsum("k,kor,kri->oi", p, B, A) - mean)
            out[layout.slice(layer + _W)] += residual.flatten().to(out)
        return updates.reduced(out), state


@dataclass(frozen=True)
class FactorProducts(Stage):
    """Each row's factors A and B become what their training does to the weight W beside them: scale (B_k A_k - B A).

    B A is the product that the row started from, as a rule 0. The columns of factors are zero afterwards, so they stay
    where they are, and the products are computed in float64. Rows of all ranks are in one space then: that of W. A
    client that `ranks` names receives its number of components; all others train all. Wang et al.: FLoRA, NeurIPS 2024.
    """

    scale: float = 1.0
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)
    traits = Traits(reads={"X", "base"}, writes={"X", "broadcast:rank"}, presence="block")

    @property
    def clients(self) -> Set[str]:  # type: ignore[override]
        """The clients with their own rank."""
        return self.ranks.keys()

    def init(self, layout: Layout) -> State:
        """Return an empty state. Raises ValueError for factors that stay with the clients, and for too high a rank."""
        names = set(layout.names)
        for layer in (name.removesuffix(_W) for name in layout.names if name.endswith(_W)):
            if lacking := sorted({layer + _A, layer + _B} - names):
                raise ValueError(f"products cannot be computed where clients keep {lacking[0]}")
        most = min((layout.blocks[layout.names.index(w + _A)].shape[0] for w in _layers(layout)), default=None)
        for client, rank in self.ranks.items():
            if most is not None and rank > most:
                raise ValueError(
                    f"ranks: client {client!r} has {rank}, expected at most {most}, the rank of model.lora"
                )
        return {}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        return {c: {"rank": torch.tensor(float(self.ranks[c]))} if c in self.ranks else {} for c in clients}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        X, layout = updates.X.clone(), updates.layout
        for layer in _layers(layout):
            after, before = (
                torch.einsum("kor,kri->koi", *(_values(updates, layer + which, trained) for which in (_B, _A)))
                for trained in (True, False)
            )
            X[:, layout.slice(layer + _W)] += (self.scale * (after - before)).flatten(1).to(X)
            for which in (_A, _B):
                X[:, layout.slice(layer + which)] = 0.0
        return updates.replace(X=X), state


def _values(updates: Updates, name: str, trained: bool) -> Tensor:
    """Return a block of all rows (K x its shape, float64), before or after training."""
    columns = updates.layout.slice(name)
    values = torch.zeros_like(updates.X[:, columns]) if updates.base is None else updates.base[:, columns]
    if trained:
        values = values.double() + updates.X[:, columns]
    return values.double().view(len(updates), *updates.layout.blocks[updates.layout.names.index(name)].shape)


def _layers(layout: Layout) -> Iterator[str]:
    """Yield layers that have a weight and both factors in the layout."""
    names = set(layout.names)
    yield from (w for n in layout.names if {(w := n.removesuffix(_W)) + _A, w + _B, w + _W} <= names and w != n)


@dataclass(frozen=True)
class MergeFactors(LocalRule):
    """Merges after training, W <- W + (alpha / rank) B A in each layer with factors, and resets the factors.

    B begins as 0, so merging leaves the outputs as they are, and each round adds a product of the factors' rank.
    """

    def begin(self, view: View, state: State) -> State:
        return {"factors": [x.detach().clone() for x in _factors(view)]}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        with torch.no_grad():
            for layer in adapted_layers(view.module):
                layer.base_layer.weight += layer.get_delta_weight("default")
            for x, before in zip(_factors(view), state["factors"], strict=True):
                x.copy_(before)
        return {}, {}


@dataclass(frozen=True)
class OwnRank(LocalRule):
    """Trains only the first components of all factors, as many as the server sends; the others keep their values."""

    needs = frozenset({"broadcast:rank"})

    def begin(self, view: View, state: State) -> State:
        return {"kept": [x[where].detach().clone() for x, where in self._others(view)]}

    def grad(self, view: View, state: State) -> None:
        for x, where in self._others(view):
            assert x.grad is not None
            x.grad[where] = 0.0

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        with torch.no_grad():
            for (x, where), values in zip(self._others(view), state["kept"], strict=True):
                x[where] = values
        return {}, {}

    def moved(self, update: Updates, broadcast: Broadcast) -> Updates:
        if "rank" not in broadcast:
            return update
        X, layout, places = update.X.clone(), update.layout, _beyond(broadcast)
        for block, columns in zip(layout.blocks, layout.slices, strict=True):
            if block.name.endswith((_A, _B)):
                X[:, columns].view(len(X), *block.shape)[(slice(None), *places[block.name.endswith(_B)])] = 0
        return update.replace(X=X)

    @staticmethod
    def _others(view: View) -> list[tuple[nn.Parameter, tuple[slice, ...]]]:
        """Return each factor with where its other components are."""
        if "rank" not in view.broadcast:
            return []
        places = _beyond(view.broadcast)
        return [(x, places[i % 2]) for i, x in enumerate(_factors(view))]


def _beyond(broadcast: Mapping[str, Tensor]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return where a client's rank does not reach in the factors A (rank x inputs) and B (outputs x rank)."""
    rest = slice(int(broadcast["rank"]), None)
    return (rest,), (slice(None), rest)


def _factors(view: View) -> list[nn.Parameter]:
    return [x for layer in adapted_layers(view.module) for x in factors(layer)]
