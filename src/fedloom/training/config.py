"""Settings of local training, as a recipe states them. Free of torch."""

from __future__ import annotations

from typing import Literal

from fedloom.core.settings.section import BelowOne, Count, NonNegative, Positive, Problems, Section, Share, UnitInterval


class Optimizer(Section):
    """The local optimiser. `momentum` and `nesterov` belong to sgd, `betas` and `eps` to adam and adamw."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.05
    encoder_lr: Positive | None = None
    """The encoder's own learning rate, which follows the same schedule; null: `lr`."""
    momentum: BelowOne = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Positive = 1e-8
    fused: bool = False

    def _problems(self) -> Problems:
        if self.name != "sgd" and (self.momentum or self.nesterov):
            yield f"momentum and nesterov are only for sgd, found {self.name}"
        if self.nesterov and not self.momentum:
            yield "nesterov needs momentum > 0"


class Schedule(Section):
    """The learning rate as a pure function of the local epoch, counted over all rounds from 0.

    Linear warm-up from `warmup_start` x lr over `warmup` epochs, or over a share of the run, then constant, cosine
    towards `floor` x lr at the end of the run, or a factor `gamma` every `step_every` epochs. If local training is
    given in steps, a round counts as one epoch.
    """

    name: Literal["constant", "cosine", "step"] = "constant"
    warmup: NonNegative = 0.0
    warmup_share: BelowOne = 0.0
    warmup_start: UnitInterval = 0.0
    floor: UnitInterval = 0.0
    step_every: Count = 30
    gamma: Share = 0.1

    def _problems(self) -> Problems:
        if self.warmup and self.warmup_share:
            yield "expected warmup (epochs) or warmup_share (of the run), found both"


class Training(Section):
    """Recipe section `training`: a client's work in a round, `epochs` passes over its data or `steps` optimiser steps.

    `epochs` may be a mapping from a client's domain to its number of epochs.
    """

    rounds: Count = 10
    epochs: Count | dict[str, Count] | None = None
    steps: Count | None = None
    batch_size: Count = 32
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip_norm: Positive | None = None
    keep_optimizer: bool = False
    """True to keep optimiser state (momentum, Adam moments) from round to round."""
    participation: Share = 1.0
    """Share of the clients that train in a round."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """fp32: all of float32, also on a GPU, where torch would round what convolutions multiply to 10 bits. tf32: a GPU
    rounds what convolutions and products multiply to 10 bits; as fp32 on a CPU. bf16: autocast to bfloat16 in training,
    and as tf32 beside it."""
    channels_last: bool = True
    stacked: bool | Literal["auto"] = False
    """Train clients together (torch.func.vmap): faster for many clients with tiny models, equal up to rounding. auto:
    where it can be done and is expected to be faster, whatever the number of workers."""

    def _problems(self) -> Problems:
        if self.epochs is not None and self.steps is not None:
            yield "expected epochs or steps, found both"

    def of(self, domain: str | None) -> Training:
        """Return the settings of a domain; None: of a client with the examples of all, which gets the most epochs."""
        if not isinstance(self.epochs, dict):
            return self
        epochs = max(self.epochs.values()) if domain is None else self.epochs[domain]
        return self.model_copy(update={"epochs": epochs})
