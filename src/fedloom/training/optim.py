"""Optimisers over flat parameters, and the learning rate as a function of time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedloom.core.context import State
from fedloom.core.layout import Columns
from fedloom.training.config import Optimizer, Schedule, Training


def local_epochs(training: Training) -> int:
    """Return epochs per round, by default 1. Settings by domain must have been chosen before (see `Training.of`)."""
    return cast("int | None", training.epochs) or 1


def rate(schedule: Schedule, epoch: int, epochs: int) -> float:
    """Return the factor on the learning rate in local epoch `epoch` (from 0, over all rounds) of `epochs`."""
    warmup = schedule.warmup or schedule.warmup_share * epochs
    if epoch < warmup:
        return schedule.warmup_start + (1 - schedule.warmup_start) * min(1.0, (epoch + 1) / warmup)
    if schedule.name == "constant":
        return 1.0
    past = epoch - warmup
    if schedule.name == "cosine":
        progress = min(1.0, past / max(epochs - warmup, 1))  # a fast peer may train beyond the last epoch
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return max(schedule.floor, schedule.gamma ** (past // schedule.step_every))


def learning_rate(training: Training, round: int, epoch: int) -> float:
    """Return the learning rate in epoch `epoch` (from 0) of `round` (from 1). A round given in steps is one epoch."""
    epochs = local_epochs(training)
    now = (round - 1) * epochs + min(epoch, epochs - 1)
    return training.optimizer.lr * rate(training.schedule, now, training.rounds * epochs)


class Stepper(ABC):
    """An optimiser equal to torch's, bit for bit on a CPU, without the second that torch takes to load its own."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        self.config, self.param_groups, self.state = config, groups, dict[Tensor, dict[str, Any]]()

    @torch.no_grad()
    def step(self) -> None:
        """Take one step along the gradients."""
        for group in self.param_groups:
            for piece in group["params"]:
                self._move(piece, piece.grad, group["lr"])

    @abstractmethod
    def _move(self, piece: Tensor, g: Tensor, lr: float) -> None: ...


class Sgd(Stepper):
    """torch.optim.SGD."""

    def _move(self, piece: Tensor, g: Tensor, lr: float) -> None:
        if self.config.weight_decay:
            g = g.add(piece, alpha=self.config.weight_decay)
        if momentum := self.config.momentum:
            if piece in self.state:
                memory = self.state[piece]["momentum_buffer"].mul_(momentum).add_(g)
            else:
                memory = g.clone()
                self.state[piece] = {"momentum_buffer": memory}
            g = g.add(memory, alpha=momentum) if self.config.nesterov else memory
        piece.add_(g, alpha=-lr)


class Adam(Stepper):
    """torch.optim.Adam and AdamW, as they are with `foreach: false`."""

    def _move(self, piece: Tensor, g: Tensor, lr: float) -> None:
        c = self.config
        if piece not in self.state:
            moments = {name: torch.zeros_like(piece) for name in ("exp_avg", "exp_avg_sq")}
            self.state[piece] = {"step": torch.tensor(0.0), **moments}
        memory = self.state[piece]
        memory["step"] += 1
        if c.weight_decay and c.name == "adamw":
            piece.mul_(1 - lr * c.weight_decay)
        elif c.weight_decay:
            g = g.add(piece, alpha=c.weight_decay)
        mean, square = memory["exp_avg"], memory["exp_avg_sq"]
        mean.lerp_(g, 1 - c.betas[0])
        square.mul_(c.betas[1]).addcmul_(g, g, value=1 - c.betas[1])
        steps = memory["step"].item()
        spread = (square.sqrt() / (1 - c.betas[1] ** steps) ** 0.5).add_(c.eps)
        piece.addcdiv_(mean, spread, value=-lr / (1 - c.betas[0] ** steps))


def build(
    config: Optimizer, params: Tensor, grad: Tensor, spans: tuple[Columns, ...], encoder: tuple[Columns, ...] = ()
) -> Stepper | torch.optim.Optimizer:
    """Build an optimiser over slices (last dimension) of a flat vector, or of K stacked ones.

    Only these slices are touched: parameters that a client does not train neither decay nor move by momentum. The
    slices `encoder` have the learning rate `encoder_lr`.
    """
    groups = [_group(params, grad, spans, config.lr, 1.0)]
    if encoder:
        lr = config.encoder_lr or config.lr
        groups.append(_group(params, grad, encoder, lr, lr / config.lr))
    if not config.fused:
        return (Sgd if config.name == "sgd" else Adam)(groups, config)
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=config.betas, eps=config.eps, **common)


def _group(params: Tensor, grad: Tensor, slices: tuple[Columns, ...], lr: float, share: float) -> dict[str, Any]:
    pieces = [nn.Parameter(params[..., s]) for s in slices]
    for piece, s in zip(pieces, slices, strict=True):
        piece.grad = grad[..., s]
    return {"params": pieces, "lr": lr, "share": share}


def set_rate(optimizer: Stepper | torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, and for slices of the encoder their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["share"]


def _pieces(optimizer: Stepper | torch.optim.Optimizer) -> list[Tensor]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]


def export_state(optimizer: Stepper | torch.optim.Optimizer) -> State:
    """Return moments and step counts by position of the slice, for a checkpoint."""
    pieces = _pieces(optimizer)
    return {
        str(i): {k: v for k, v in optimizer.state[piece].items() if v is not None}
        for i, piece in enumerate(pieces)
        if piece in optimizer.state
    }


def import_state(optimizer: Stepper | torch.optim.Optimizer, state: State) -> None:
    """Invert `export_state`; the given tensors are copied."""
    pieces = _pieces(optimizer)
    for i, values in state.items():
        piece = pieces[int(i)]
        optimizer.state[piece] = {
            k: v.clone() if k == "step" else v.to(piece.device, copy=True) for k, v in values.items()
        }
