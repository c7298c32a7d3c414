"""Training clients of equal shape together: their parameters are the rows of one K x p matrix (torch.func.vmap).

This pays if Python and not arithmetic dominates the cost of a step, that is for tiny models; convolutions become slower
on a CPU. Results equal those of one client at a time up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.core.context import Ctx
from fedloom.core.layout import Columns
from fedloom.errors import UserError
from fedloom.training.config import Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult, Work, batches, clip, task_losses
from fedloom.training.optim import build, learning_rate, set_rate
from fedloom.training.rules import LocalRule, View

Losses = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stackable:
    """One client's part of a stack: its work, the parameters at the start (p), and its (epoch, batch) in order."""

    work: Work
    base: Tensor
    drawn: tuple[tuple[int, Tensor], ...] = ()


def refuse(module: nn.Module, training: Training, rules: Sequence[LocalRule]) -> None:
    """Raise UserError, with the reason, if clients cannot be trained stacked."""
    reasons = [f"{rule!r} works on batches or keeps state" for rule in rules if not rule.stackable]
    if any(True for _ in module.buffers()):
        reasons.append(f"the model has buffers ({next(iter(dict(module.named_buffers())))})")
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            reasons.append(f"the model has dropout ({name})")
    if training.keep_optimizer:
        reasons.append("training.keep_optimizer is set, and a stack begins with a fresh optimiser")
    if training.optimizer.encoder_lr is not None:
        reasons.append("training.optimizer.encoder_lr is set, and a stack has one learning rate")
    if training.precision != "fp32":
        reasons.append(f"training.precision is {training.precision}")
    if reasons:
        raise UserError(f"training.stacked: {'; '.join(reasons)}")


def group(clients: Sequence[Stackable], training: Training, ctx: Ctx) -> list[list[Stackable]]:
    """Clients that can share a stack: the same tasks and weights, and batches of the same sizes in every step."""
    groups: dict[object, list[Stackable]] = {}
    for c in clients:
        drawn = tuple(batches(c.work.index, training, ctx, c.work.who))
        sizes = tuple(len(batch) for _, batch in drawn)
        key = (tuple((name, weight) for name, (_, weight) in c.work.tasks.items()), sizes, id(c.work.examples))
        groups.setdefault(key, []).append(replace(c, drawn=drawn))
    return list(groups.values())


def train_stacked(
    model: FlatModel,
    clients: Sequence[Stackable],
    training: Training,
    ctx: Ctx,
    shared: tuple[Columns, ...],
    rules: Sequence[LocalRule] = (),
) -> list[tuple[Tensor, LocalResult]]:
    """Train one group (see `group`): (parameters afterwards (p), result) of each client, in their order.

    Raises UserError if the model does something that cannot be stacked.
    """
    tasks, names = clients[0].work.tasks, tuple(clients[0].work.tasks)
    layout = model.layout.parameters
    spans = model.spans(model.trained(names))
    base = torch.stack([c.base for c in clients])
    view = View(base.clone(), torch.zeros_like(base), base, shared)
    optimizer = build(training.optimizer.model_copy(update={"fused": False}), view.params, view.grad, spans)
    active = [view.grad[..., s] for s in spans]
    leaf = view.params.detach().requires_grad_()  # the same memory, with a gradient
    leaf.grad = view.grad

    def losses_of(weights: dict[str, Tensor], x: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Losses]:
        return task_losses(functional_call(model.module, weights, (x, names)), targets, tasks)

    forward = vmap(losses_of)
    sums = {name: torch.zeros(len(clients), device=model.device) for name in names}
    counts = {name: torch.zeros(len(clients), device=model.device) for name in names}
    partial = {name for c in clients for name in c.work.labelled}
    seen = 0
    model.module.train()
    for drawn in zip(*(c.drawn for c in clients), strict=True):
        epoch = drawn[0][0]
        view.lr = learning_rate(training, ctx.round, epoch)
        set_rate(optimizer, view.lr)
        x, y = clients[0].work.examples.batch(torch.cat([index for _, index in drawn]), model.device, tasks=names)
        shape = (len(clients), len(drawn[0][1]))
        view.grad.zero_()
        # one split, whose gradient is one concatenation: each slice would add a whole K x p
        pieces = leaf.split([block.size for block in layout.blocks], dim=1)
        weights = {b.name: w.view(-1, *b.shape) for b, w in zip(layout.blocks, pieces, strict=True)}
        try:
            total, losses = forward(
                weights,
                x.view(*shape, *x.shape[1:]),
                {name: y[name].view(*shape, *y[name].shape[1:]) for name in names},
            )
            total.sum().backward()
        except RuntimeError as error:
            raise UserError(f"training.stacked: the model cannot be stacked: {error}") from error
        for rule in rules:
            rule.grad(view, {})
        if training.clip_norm is not None:
            clip(active, training.clip_norm)
        optimizer.step()
        view.step += 1
        seen += shape[1]
        for name, value in losses.items():
            count: int | Tensor = shape[1]
            if name in partial:
                each = [c.work.labels_in(index, name) for c, (_, index) in zip(clients, drawn, strict=True)]
                count = torch.tensor(each, device=model.device)
            sums[name] += value.detach() * count
            counts[name] += count
    means = {name: (total / counts[name].clamp(min=1)).tolist() for name, total in sums.items()}
    return [
        (
            view.params[k],
            LocalResult(steps=view.step, examples=seen, losses={name: values[k] for name, values in means.items()}),
        )
        for k in range(len(clients))
    ]
