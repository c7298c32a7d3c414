"""Optimisers over flat parameters, and the learning rate as a function of time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.context import State
from fedloom.core.layout import Columns
from fedloom.training.config import Optimizer, Schedule, Training


def rate(schedule: Schedule, epoch: int, epochs: int) -> float:
    """Factor on the learning rate in local epoch `epoch` (from 0, over all rounds) of `epochs`."""
    warmup = schedule.warmup or schedule.warmup_share * epochs
    if epoch < warmup:
        return schedule.warmup_start + (1 - schedule.warmup_start) * min(1.0, (epoch + 1) / warmup)
    past = epoch - warmup
    if schedule.name == "cosine":
        progress = min(1.0, past / max(epochs - warmup, 1))  # a fast peer may train beyond the last epoch
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.name == "step":
        return max(schedule.floor, schedule.gamma ** (past // schedule.step_every))
    return 1.0


def learning_rate(training: Training, round: int, epoch: int) -> float:
    """The learning rate in epoch `epoch` (from 0) of round `round` (from 1). A round given in steps is one epoch."""
    epochs = training.local_epochs
    now = (round - 1) * epochs + min(epoch, epochs - 1)
    return training.optimizer.lr * rate(training.schedule, now, training.rounds * epochs)


class Sgd:
    """torch.optim.SGD, bit for bit, without the second that torch takes to load its optimisers in every process."""

    def __init__(self, groups: list[dict[str, Any]], config: Optimizer) -> None:
        self.config = config
        self.param_groups = groups
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradients."""
        c = self.config
        for piece, lr in [(piece, group["lr"]) for group in self.param_groups for piece in group["params"]]:
            g = piece.grad
            if c.weight_decay:
                g = g.add(piece, alpha=c.weight_decay)
            if c.momentum:
                if piece in self.state:
                    memory = self.state[piece]["momentum_buffer"].mul_(c.momentum).add_(g)
                else:
                    memory = g.clone()
                    self.state[piece] = {"momentum_buffer": memory}
                g = g.add(memory, alpha=c.momentum) if c.nesterov else memory
            piece.add_(g, alpha=-lr)


def build(
    config: Optimizer, params: Tensor, grad: Tensor, spans: tuple[Columns, ...], encoder: tuple[Columns, ...] = ()
) -> torch.optim.Optimizer | Sgd:
    """An optimiser over slices (last dimension) of a flat vector, or of K stacked ones.

    Only these slices are touched: parameters that a client does not train neither decay nor move by momentum. The
    slices `encoder` have the learning rate `encoder_lr`.
    """

    def group(slices: tuple[Columns, ...], lr: float) -> dict[str, Any]:
        pieces = []
        for s in slices:
            piece = nn.Parameter(params[..., s])
            piece.grad = grad[..., s]
            pieces.append(piece)
        return {"params": pieces, "lr": lr, "share": lr / config.lr}

    groups = [group(spans, config.lr)]
    if encoder:
        groups.append(group(encoder, config.encoder_lr or config.lr))
    if config.name == "sgd" and not config.fused:
        return Sgd(groups, config)
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": config.fused or None}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=config.betas, eps=config.eps, **common)


def set_rate(optimizer: torch.optim.Optimizer | Sgd, lr: float) -> None:
    """The learning rate of the next step, and for slices of the encoder their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["share"]


def _pieces(optimizer: torch.optim.Optimizer | Sgd) -> list[Tensor]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]


def export_state(optimizer: torch.optim.Optimizer | Sgd) -> State:
    """Moments and step counts by position of the slice, for a checkpoint."""
    pieces = _pieces(optimizer)
    return {
        str(i): {k: v for k, v in optimizer.state[piece].items() if v is not None}
        for i, piece in enumerate(pieces)
        if piece in optimizer.state
    }


def import_state(optimizer: torch.optim.Optimizer | Sgd, state: State) -> None:
    """Inverse of `export_state`; the given tensors are copied."""
    pieces = _pieces(optimizer)
    for i, values in state.items():
        piece = pieces[int(i)]
        optimizer.state[piece] = {
            k: v.clone() if k == "step" else v.to(piece.device, copy=True) for k, v in values.items()
        }
