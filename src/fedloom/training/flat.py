"""A model whose parameters, gradients and float buffers lie in consecutive memory; optimisers over such vectors."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.context import State
from fedloom.core.layout import Columns, Layout
from fedloom.training.config import Optimizer, Schedule, Training


class FlatModel:
    """A module bound to one vector, so that loading, deltas and optimiser steps do not loop over tensors.

    The vector leaves out frozen parameters: they are only in the module and never change.

    vector   parameters, then float buffers (layout.d); writing to it changes the model
    params   the first p values of `vector`
    buffers  the rest
    grad     p values; the gradients of the parameters are views of it and backward adds to them, so set it to 0 first.
             It is in memory from its first use to the end of a training (`train`)
    initial  the first values of `vector`: a copy, unless they are given

    `channels_first`: images must not have the channels last in memory (see `_harmed_by_channels_last`).
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout | None = None,
        device: str | torch.device = "cpu",
        initial: Tensor | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.layout = layout or Layout.from_module(module)
        self.vector = self.layout.bind(self.module)
        p = self.layout.parameters.d
        self.params, self.buffers = self.vector[:p], self.vector[p:]
        self.integers = integer_buffers(self.module)
        self.initial = self.vector.clone() if initial is None else initial
        self.initial_integers = {name: b.clone() for name, b in self.integers.items()}
        self.has_buffers = bool(len(self.buffers) or self.integers)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        self.has_batch_norm = bool(norms)
        self.channels_first = self.device.type == "cpu" and _harmed_by_channels_last(module)
        if self.device.type == "cuda" and torch.backends.cudnn.enabled:
            for norm in norms:
                _by_torch_itself(norm)

    @classmethod
    def copy_of(cls, module: nn.Module, device: str | torch.device = "cpu") -> FlatModel:
        """Return a copy of a module that is not trained; if the module is bound, `initial` are its values."""
        layout = Layout.from_module(module)
        vector = layout.flatten(module)
        # the vector of a bound module is not copied with it: the copy is bound to one of its own
        return cls(copy.deepcopy(module, {id(vector): vector}), layout, device, vector.to(device))

    @cached_property
    def grad(self) -> Tensor:
        """The gradients of the parameters (p), of which each parameter's is a view; not set to 0 when it is made."""
        grad, params = torch.empty_like(self.params), self.layout.parameters
        for block, s in zip(params.blocks, params.slices, strict=True):
            self.module.get_parameter(block.name).grad = grad[s].view(block.shape)
        return grad

    def outputs_under(self, vector: Tensor, x: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return predictions under another model, given as one vector: eval mode, no gradient; this model stays."""
        return _under(self.module, self.named(vector), (x, tuple(tasks)))

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a model that is given as one vector of parameters and buffers, as views, by name."""
        blocks = zip(self.layout.blocks, self.layout.slices, strict=True)
        return {block.name: vector[s].view(block.shape) for block, s in blocks}

    def load_integers(self, values: dict[str, Tensor]) -> None:
        """Set integer buffers (such as the batch counter of batch norm)."""
        for name, value in values.items():
            self.integers[name].copy_(value)


def _harmed_by_channels_last(module: nn.Module) -> bool:
    """Return whether training this model on images with the channels last would damage the process's memory: oneDNN,
    which torch uses, has such a fault in 1 x 1 convolutions with a stride of fewer than 8 channels where a processor
    has AVX2 and no AVX-512 (uxlfoundation/oneDNN, issue 6035)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return False
    convolutions = (m for m in module.modules() if isinstance(m, nn.Conv2d))
    return any(c.kernel_size == (1, 1) and max(c.stride) > 1 and c.in_channels // c.groups < 8 for c in convolutions)


def _by_torch_itself(norm: nn.Module) -> None:
    """Have a batch norm computed by torch's own kernels where its tensors, views of one vector, begin at an address
    that is no multiple of 16: for images with the channels last cuDNN's kernels end the process there."""
    tensors = (*norm.parameters(recurse=False), *norm.buffers(recurse=False))
    if any(t.data_ptr() % 16 for t in tensors if t.is_floating_point()):
        cudnn = torch.backends.cudnn
        norm.register_forward_pre_hook(lambda *_: setattr(cudnn, "enabled", False))
        norm.register_forward_hook(lambda *_: setattr(cudnn, "enabled", True), always_call=True)


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return integer buffers that belong to the model's state, such as batch norm's counter, but not unsaved tables."""
    saved = module.state_dict(keep_vars=True)
    return {n: b for n, b in module.named_buffers() if n in saved and not b.is_floating_point() and not b.is_complex()}


class FeatureRecorder:
    """Features of the last batch that went through `model.module.encoder`: B x F.

    Maps become the mean of the last map over its area, so dense tasks have features too.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self._encoder: nn.Module = model.module.encoder  # type: ignore[assignment]
        self._inputs: Tensor | None = None
        self._outputs: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store the encoder's input and output within this context."""

        with_grad = torch.is_grad_enabled()

        def keep(_module: nn.Module, args: tuple[Tensor, ...], outputs: Any) -> None:
            if torch.is_grad_enabled() == with_grad:  # a pass under another model is not the batch's own
                self._inputs, self._outputs = args[0], outputs

        handle = self._encoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @property
    def now(self) -> Tensor:
        """Features under the model in training, with a gradient."""
        return pooled(self._outputs)

    def under(self, vector: Tensor) -> Tensor:
        """Return features under another model, given as one vector of parameters and buffers, as `outputs_under`."""
        named = self.model.named(vector).items()
        tensors = {name.removeprefix("encoder."): value for name, value in named if name.startswith("encoder.")}
        return pooled(_under(self._encoder, tensors, (self._inputs,)))


def _under(module: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    """Return the outputs of a module with these tensors in place of its own: eval mode, set back after, no gradient."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, dict(tensors), inputs)
    finally:
        for part, mode in modes:
            part.training = mode


def pooled(outputs: Tensor | list[Tensor]) -> Tensor:
    """Return B x F from an encoder's output: features, a map, or a list of maps, whose last one counts."""
    last = outputs if isinstance(outputs, Tensor) else outputs[-1]
    return last.mean((2, 3)) if last.ndim == 4 else last


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
    def _move(self, piece: Tensor, g: Tensor, lr: float | Tensor) -> None: ...


class Sgd(Stepper):
    """torch.optim.SGD."""

    def _move(self, piece: Tensor, g: Tensor, lr: float | Tensor) -> None:
        if self.config.weight_decay:
            g = g.add(piece, alpha=self.config.weight_decay)
        if momentum := self.config.momentum:
            if piece in self.state:
                memory = self.state[piece]["momentum_buffer"].mul_(momentum).add_(g)
            else:
                memory = g.clone()
                self.state[piece] = {"momentum_buffer": memory}
            g = g.add(memory, alpha=momentum) if self.config.nesterov else memory
        piece.addcmul_(g, lr, value=-1) if isinstance(lr, Tensor) else piece.add_(g, alpha=-lr)


class Adam(Stepper):
    """torch.optim.Adam and AdamW, as they are with `foreach: false`."""

    def _move(self, piece: Tensor, g: Tensor, lr: float | Tensor) -> None:
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
        if isinstance(lr, Tensor):
            mean, lr = mean * lr, 1.0
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


def set_rate(optimizer: Stepper | torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Set the learning rate of the next step (K x 1: of each row), and for slices of the encoder their share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["share"]


def _pieces(optimizer: Stepper | torch.optim.Optimizer) -> list[Tensor]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]


def export_state(optimizer: Stepper | torch.optim.Optimizer) -> State:
    """Return moments and step counts by position of the slice, for a checkpoint."""
    known = [(i, optimizer.state[piece]) for i, piece in enumerate(_pieces(optimizer)) if piece in optimizer.state]
    return {str(i): {k: v for k, v in of.items() if v is not None} for i, of in known}


def import_state(optimizer: Stepper | torch.optim.Optimizer, state: State) -> None:
    """Invert `export_state`; the given tensors are copied."""
    pieces = _pieces(optimizer)
    for i, of in state.items():
        piece = pieces[int(i)]
        optimizer.state[piece] = {k: v.clone() if k == "step" else v.to(piece.device, copy=True) for k, v in of.items()}
