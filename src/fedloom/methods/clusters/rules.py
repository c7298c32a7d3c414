"""Local rules of clients that receive several models: take the best (IFCA), one at random (FedSPD), be drawn to all of
them (FedSoft)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Fields, State
from fedloom.training.rules import LocalRule, View


def cluster_losses(view: View, count: int) -> Tensor:
    """Return loss of each training example under each broadcast model (count x n); `view.params` stays as it was."""
    assert view.losses is not None
    own = view.params.clone()
    losses = []
    for j in range(count):
        take(view, j)
        losses.append(view.losses())
    view.params.copy_(own)
    return torch.stack(losses).nan_to_num(nan=float("inf"))


def take(view: View, j: int) -> None:
    """Put broadcast model `j` in the place of the shared parameters."""
    for s in view.shared:
        view.params[s] = view.broadcast[f"cluster{j}"][s]


@dataclass(frozen=True)
class BestCluster(LocalRule):
    """Starts from the broadcast model with the smallest loss on the client's training data; sends its number (IFCA).

    Among equal losses the first counts. Blocks that are not shared stay the client's. Sends -1 if there were no models.
    """

    count: int = 2
    provides = frozenset({"extra:cluster"})

    @property
    def needs(self) -> Fields:
        return frozenset(f"broadcast:cluster{j}" for j in range(self.count))

    def begin(self, view: View, state: State) -> State:
        """Choose a model and start from it."""
        if "cluster0" not in view.broadcast:
            return {"cluster": -1}
        j = int(cluster_losses(view, self.count).mean(dim=1).argmin())
        take(view, j)
        return {"cluster": j}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the choice; nothing is kept."""
        return {}, {"cluster": float(state["cluster"])}


@dataclass(frozen=True)
class DrawnCluster(LocalRule):
    """Trains one broadcast model, another one in each round, on the examples that it fits best of all models (FedSPD).

    Drawn are, alike, those that fit at least `least` of the client's training examples best, or else the one that fits
    most. Sends its number, and the share of the examples that each model fits best. Without models it trains on all
    examples and sends -1, with equal shares.
    """

    count: int = 2
    least: int = 10

    @property
    def needs(self) -> Fields:
        return frozenset(f"broadcast:cluster{j}" for j in range(self.count))

    @property
    def provides(self) -> Fields:
        return frozenset({"extra:cluster"}.union(f"extra:share{j}" for j in range(self.count)))

    def begin(self, view: View, state: State) -> State:
        """Tell the examples apart, draw a model, and start from it."""
        if "cluster0" not in view.broadcast:
            return {"cluster": -1, "shares": [1 / self.count] * self.count}
        best = cluster_losses(view, self.count).argmin(dim=0)
        won = torch.bincount(best, minlength=self.count)
        fit = (won >= self.least).nonzero().flatten().tolist() or [int(won.argmax())]
        j = fit[int(torch.randint(len(fit), ()))]  # local training has its own stream of random numbers
        take(view, j)
        view.chosen = (best == j).nonzero().flatten()
        return {"cluster": j, "shares": (won.double() / max(len(best), 1)).tolist()}

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the number and the shares; nothing is kept."""
        shares = {f"share{j}": share for j, share in enumerate(state["shares"])}
        return {}, {"cluster": float(state["cluster"]), **shares}


@dataclass(frozen=True)
class SoftAnchors(LocalRule):
    """Adds (lam/2) sum_s u_s |y - c_s|^2 to the loss, c_s being the broadcast models; sends the shares u_s (FedSoft).

    u_s is the share of the client's training examples for which c_s has the smallest loss, at least `floor`. It is
    computed anew in every `every`-th round in which the client takes part and receives models.
    """

    count: int = 2
    lam: float = 0.1
    every: int = 2
    floor: float = 1e-4

    @property
    def needs(self) -> Fields:
        return frozenset(f"broadcast:cluster{j}" for j in range(self.count))

    @property
    def provides(self) -> Fields:
        return frozenset(f"extra:share{j}" for j in range(self.count))

    def init(self, base: Tensor) -> State:
        """Return equal shares."""
        return {"shares": [1 / self.count] * self.count, "rounds": 0}

    def begin(self, view: View, state: State) -> State:
        """Return the shares, computed anew if they are due, and the pull of the models."""
        if "cluster0" not in view.broadcast:
            return state
        shares = state["shares"]
        if state["rounds"] % self.every == 0:
            best = cluster_losses(view, self.count).argmin(dim=0)
            won = torch.bincount(best, minlength=self.count).double() / max(len(best), 1)
            shares = won.clamp(min=self.floor).tolist()
        pull = torch.zeros_like(view.params)
        for j, share in enumerate(shares):
            pull += share * view.broadcast[f"cluster{j}"]
        return {"shares": shares, "rounds": state["rounds"] + 1, "pull": pull}

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or "pull" not in state:
            return
        total = sum(state["shares"])
        for s in view.shared:
            view.grad[s].add_(total * view.params[s] - state["pull"][s], alpha=self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """Return the shares."""
        kept = {"shares": state["shares"], "rounds": state["rounds"]}
        return kept, {f"share{j}": share for j, share in enumerate(state["shares"])}
