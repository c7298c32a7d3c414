"""Personal models that are drawn to each other by a matrix of relations (FedAMP, MOCHA), and the local rules of clients
that keep a model of their own: an anchor (FedAMP, Ditto), coupled tasks (MOCHA), an envelope (pFedMe).

Rows pass as they are, because every client keeps its own model; the relations are computed from the models when the
next round is sent. In a block that a client lacks its model has the initial values, which nobody trained, so all models
must have all blocks (`Traits.presence` is None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.context import Broadcast, State
from fedloom.core.gram import gram
from fedloom.core.stage import Identity, Traits
from fedloom.core.updates import Updates
from fedloom.methods.personal import AttentionSettings, EnvelopeSettings, TaskCouplingSettings, TaskCovarianceSettings
from fedloom.training.config import Optimizer
from fedloom.training.rules import LocalRule, View

_CHUNK = 1 << 20


def distances(W: Tensor) -> Tensor:
    """Return squared distances between rows (K x K, float64), column chunk by column chunk."""
    out = torch.zeros(len(W), len(W), dtype=torch.float64)
    for a in range(0, W.shape[1], _CHUNK):
        part = W[:, a : a + _CHUNK].double()
        for i in range(len(W)):
            out[i] += (part - part[i]).square().sum(dim=1)
    return out


def attention(W: Tensor, alpha: float, sigma: float, scale: Literal["absolute", "median"] = "absolute") -> Tensor:
    """Return FedAMP's message weights xi (K x K, rows sum to 1) for models W (K x d); `fedamp` has the equations."""
    D = distances(W)
    k = len(W)
    others = ~torch.eye(k, dtype=torch.bool)
    if scale == "median" and k > 1 and float(m := D[others].median()) > 0:
        D = D / m
    xi = alpha * torch.exp(-D / sigma) / sigma * others
    xi = xi / xi.sum(dim=1, keepdim=True).clamp(min=1.0)
    return xi + torch.diag(1 - xi.sum(dim=1))


def covariance(G: Tensor, floor: float = 1e-7) -> tuple[Tensor, Tensor]:
    """Return MOCHA's (Sigma, Omega) from the models' Gram matrix G (K x K): Sigma = G^(1/2) / tr, Omega its inverse.

    Eigenvalues of G below `floor` times the largest are raised to it for Omega. G = 0 gives Sigma = I/K.
    """
    k = len(G)
    values, vectors = torch.linalg.eigh(G.double())
    values = values.clamp(min=0)
    if not float(values.max()) > 0:
        return torch.eye(k, dtype=torch.float64) / k, k * torch.eye(k, dtype=torch.float64)
    root = values.sqrt()
    raised = values.clamp(min=floor * float(values.max())).sqrt()
    sigma = vectors @ torch.diag(root / root.sum()) @ vectors.T
    omega = vectors @ torch.diag(root.sum() / raised) @ vectors.T
    return sigma, omega


def _stacked(models: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
    names = sorted(models)
    return names, torch.stack([models[name] for name in names])


@dataclass(frozen=True)
class Attention(AttentionSettings, Identity):
    """Broadcasts to each client the mix u_k = sum_j xi_kj w_j of all latest models (FedAMP; see `attention`)."""

    traits = Traits(writes={"broadcast:anchor"}, separable=True)

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        sent: dict[str, Broadcast] = {client: {} for client in clients}
        if models:
            names, W = _stacked(models)
            xi = attention(W, self.alpha, self.sigma, self.scale).to(W)
            sent |= {client: {"anchor": xi[names.index(client)] @ W} for client in clients if client in models}
        return sent


@dataclass(frozen=True)
class TaskCovariance(TaskCovarianceSettings, Identity):
    """Broadcasts each client's part of tr(W Omega W'): relation = Omega_kk and peers = v_k; see `fedmtl`.

    With `centre` the direction in which centred models cannot differ is left out of Omega.
    """

    traits = Traits(writes={"broadcast:peers", "broadcast:relation"}, separable=True)

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        sent: dict[str, Broadcast] = {client: {} for client in clients}
        if not models:
            return sent
        names, W = _stacked(models)
        omega = self.omega(W).to(W)
        for client in sent.keys() & models.keys():
            k = names.index(client)
            row = omega[k].clone()
            row[k] = 0
            sent[client] = {"relation": omega[k, k], "peers": row @ W}
        return sent

    def omega(self, W: Tensor) -> Tensor:
        """Return Omega (K x K, float64) of models W (K x d)."""
        if not self.centre:
            return covariance(gram(Updates.of(W)), self.floor)[1]
        k = len(W)
        centring = torch.eye(k, dtype=torch.float64) - 1 / k
        # from distances: models are so alike that their own Gram matrix would lose the differences
        G = -0.5 * centring @ distances(W) @ centring
        return centring @ covariance(G, self.floor)[1] @ centring


@dataclass(frozen=True)
class Anchor(LocalRule):
    """Adds (mu/2) |y - u_k|^2 to the loss, u_k being the anchor: the broadcast mix of models (FedAMP), or the received
    model, for a model beside it (Ditto).

    `start` "mix" begins the round at u_k instead of the client's own model.
    """

    mu: float
    start: Literal["own", "mix"] = "own"
    needs = frozenset({"broadcast:anchor"})

    def begin(self, view: View, state: State) -> State:
        if self.start == "mix" and "anchor" in view.broadcast:
            for s in view.shared:
                view.params[s] = view.broadcast["anchor"][s]
        return state

    def grad(self, view: View, state: State) -> None:
        if self.mu == 0 or "anchor" not in view.broadcast:
            return
        for s in view.shared:
            view.grad[s].add_(view.params[s] - view.broadcast["anchor"][s], alpha=self.mu)


@dataclass(frozen=True)
class TaskCoupling(TaskCouplingSettings, LocalRule):
    """Adds the gradient 2 lam (Omega_kk y + v_k) of lam tr(W Omega W'), the other models being frozen (MOCHA)."""

    needs = frozenset({"broadcast:relation", "broadcast:peers"})

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or "peers" not in view.broadcast:
            return
        relation = float(view.broadcast["relation"])
        for s in view.shared:
            view.grad[s].add_(relation * view.params[s] + view.broadcast["peers"][s], alpha=2 * self.lam)


@dataclass(frozen=True)
class Envelope(EnvelopeSettings, LocalRule):
    """Trains theta, the minimiser of F(theta) + (lam/2) |theta - w|^2, and moves w towards it; see `pfedme`.

    The update sent is that of w; theta is the client's personal model.
    """

    @property
    def repeat(self) -> int:
        return self.inner

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the inner steps cannot be stable."""
        rate = optimizer.lr * self.lam
        if optimizer.name == "sgd" and rate >= 2:
            raise ValueError(f"pFedMe needs learning rate x lam below 2, found {optimizer.lr} x {self.lam} = {rate}")

    def begin(self, view: View, state: State) -> State:
        """Return w as received and theta as it was."""
        if "personal" in state:
            view.params.copy_(state["personal"])
        return {"w": view.base.clone()}

    def grad(self, view: View, state: State) -> None:
        if view.step and view.step % self.inner == 0:
            self._move(view, state)
        for s in view.trained:
            view.grad[s].add_(view.params[s] - state["w"][s], alpha=self.lam)

    def _move(self, view: View, state: State) -> None:
        for s in view.trained:
            state["w"][s].lerp_(view.params[s], self.outer * self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        if view.step:
            self._move(view, state)
        theta = view.params.clone()
        view.params.copy_(state["w"])
        return {"personal": theta}, {}

    def personal(self, state: State) -> Tensor | None:
        theta: Tensor = state["personal"]
        return theta
