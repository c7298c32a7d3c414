"""Server rules, which apply an aggregated update: ServerRule, plain steps, momentum, adaptive steps, lookahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.settings.section import BelowOne, Checked, NonNegative, Positive


class ServerRule(Checked):
    """The server's step on one model vector (d), the same for a global model and for personal models.

    The vectors hold the shared parameters only. A round without a finite row does not call `apply`, so momentum does
    not change; a zero update of clients that took part does call it.
    """

    looks_ahead: ClassVar[bool]
    """True if clients start from something other than the model, so that `dispatch` needs the state."""
    separable: ClassVar[bool] = False
    """True if it keeps no memory and moves each value alone, so that it may be applied to some columns at a time."""

    def __init_subclass__(cls) -> None:
        cls.looks_ahead = cls.dispatch is not ServerRule.dispatch

    def init(self, model: Tensor) -> State:
        """Return the state of a model before its first update; tensors of its size hold one value per parameter."""
        return {}

    def dispatch(self, model: Tensor, state: State) -> Tensor:
        """Return the vector to send, given the model."""
        return model

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the model after an update (new minus old), and the new state. Changes none of its inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(ServerRule):
    """model + step * update (step 1 is FedAvg)."""

    separable = True
    step: float = 1.0

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        return model + (update if self.step == 1 else self.step * update), state


@dataclass(frozen=True)
class Momentum(ServerRule):
    """m <- beta m + u; model + step m (FedAvgM, Hsu et al., 2019). beta = 0 is Plain(step), bit for bit.

    In the long run a constant update is multiplied by step / (1 - beta).
    """

    beta: BelowOne = 0.9
    step: float = 1.0

    def init(self, model: Tensor) -> State:
        return {"m": torch.zeros_like(model)} if self.beta else {}

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        if not self.beta:
            return Plain(self.step).apply(model, update, state)
        m = torch.add(update, state["m"], alpha=self.beta)
        return torch.add(model, m, alpha=self.step), {"m": m}


@dataclass(frozen=True)
class Adaptive(ServerRule):
    """An adaptive step without bias correction (Reddi et al., ICLR 2021, algorithm 2), per coordinate:

    m <- b1 m + (1 - b1) u
    v <- v + u^2                             adagrad
         b2 v + (1 - b2) u^2                 adam
         v - (1 - b2) u^2 sign(v - u^2)      yogi
    model + step m / (sqrt(v) + eps)

    v starts at v0; by default v0 is eps^2.
    """

    kind: Literal["adam", "yogi", "adagrad"] = "adam"
    step: float = 0.01
    b1: BelowOne = 0.9
    b2: BelowOne = 0.99
    eps: Positive = 1e-3
    v0: NonNegative | None = None

    def init(self, model: Tensor) -> State:
        v = torch.full_like(model, self.eps**2 if self.v0 is None else self.v0)
        return {"m": torch.zeros_like(model), "v": v} if self.b1 else {"v": v}

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        m = state["m"].mul(self.b1).add_(update, alpha=1 - self.b1) if self.b1 else update
        v = self._second(update, state["v"])
        model = torch.addcdiv(model, m, v.sqrt().add_(self.eps), value=self.step)
        return model, {"m": m, "v": v} if self.b1 else {"v": v}

    def _second(self, u: Tensor, v: Tensor) -> Tensor:
        if self.kind == "adagrad":
            return torch.addcmul(v, u, u)
        if self.kind == "adam":
            return v.mul(self.b2).addcmul_(u, u, value=1 - self.b2)
        square = u * u
        return torch.addcmul(v, square, (v - square).sign_(), value=self.b2 - 1)


@dataclass(frozen=True)
class Lookahead(ServerRule):
    """Clients start from where momentum will lead (FedACG, Kim, Kim, Han, CVPR 2024):

    sent:   la = model + lam m
    then:   m <- lam m + u, model + m        with u measured from la, so that model + m = la + u

    The model is evaluated, not la. lam = 0 is Plain(), bit for bit. In the long run a constant update is multiplied by
    1 / (1 - lam).
    """

    lam: BelowOne = 0.85

    def init(self, model: Tensor) -> State:
        return {"m": torch.zeros_like(model)} if self.lam else {}

    def dispatch(self, model: Tensor, state: State) -> Tensor:
        return torch.add(model, state["m"], alpha=self.lam) if self.lam else model

    def apply(self, model: Tensor, update: Tensor, state: State) -> tuple[Tensor, State]:
        return Momentum(self.lam).apply(model, update, state)
