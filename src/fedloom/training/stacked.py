"""Training clients of equal shape together: their parameters are the rows of one K x p matrix (torch.func.vmap).

This pays if Python and not arithmetic dominates the cost of a step, that is for tiny models; convolutions become slower
on a CPU. Results equal those of one client at a time up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedloom.core.context import Ctx
from fedloom.core.errors import UserError
from fedloom.core.layout import Columns
from fedloom.core.machine import out_of_memory
from fedloom.data.dataset import without_label
from fedloom.models.tasks.task import Task
from fedloom.training.config import Training
from fedloom.training.flat import FlatModel, build, learning_rate, local_epochs, set_rate
from fedloom.training.loop import LocalResult, Work, clip, ordered, passes, task_losses
from fedloom.training.rules import LocalRule, View, check_places

Losses = dict[str, Tensor]
FEW, LIGHT, MANY = 5, {"cpu": 1.5e6, "cuda": 3e8}, 5000
"""A stack is faster from so many clients on, if a step of each takes at most so many multiplications forwards on its
kind of device; and in a run of so many steps of clients, for torch needs a second to load what stacks are made of."""

BUDGET, COPIES = 1 << 27, 12
"""A stack takes at most so many bytes, and about so many times its clients' parameters: models before and after,
gradients, their pieces, the optimiser's moments, updates, and what is packed."""


@dataclass(frozen=True, eq=False)
class Stackable:
    """One client's part of a stack: its work, and the parameters at the start (p)."""

    work: Work
    base: Tensor


def kind(tasks: Mapping[str, tuple[Task, float]]) -> tuple[tuple[str, float], ...]:
    """Return the tasks with their weights, which clients of one stack have in common."""
    return tuple((name, weight) for name, (_, weight) in tasks.items())


def refuse(module: nn.Module, training: Training, rules: Sequence[LocalRule]) -> None:
    """Raise UserError, with the reason, if clients cannot be trained stacked."""
    reasons = [f"{rule!r} works on batches or keeps state" for rule in rules if not rule.stackable]
    if any(True for _ in module.buffers()):
        reasons.append(f"the model has buffers ({next(iter(dict(module.named_buffers())))})")
    dropouts = (name for name, part in module.named_modules() if isinstance(part, nn.modules.dropout._DropoutNd))
    reasons += [f"the model has dropout ({name})" for name in dropouts]
    if training.keep_optimizer:
        reasons.append("training.keep_optimizer is set, but a stack starts with a fresh optimiser")
    if training.optimizer.encoder_lr is not None:
        reasons.append("training.optimizer.encoder_lr is set, and a stack has one learning rate")
    if training.precision != "fp32":
        reasons.append(f"training.precision is {training.precision}")
    if reasons:
        raise UserError(f"training.stacked: {'; '.join(reasons)}")


def pays(
    module: nn.Module,
    x: Tensor,
    tasks: tuple[str, ...],
    training: Training,
    clients: Sequence[float],
    kinds: int,
    device: str,
) -> bool:
    """Return whether stacks are expected to be faster for clients with so many examples, of so many `kinds` that cannot
    share a stack, on a `device`; `x` is an input (1 x ...)."""
    steps = sum(training.steps or local_epochs(training) * math.ceil(n / training.batch_size) for n in clients)
    if training.participation * len(clients) / kinds < FEW or training.rounds * training.participation * steps < MANY:
        return False
    work: list[float] = []

    def note(layer: nn.Module, _: object, out: object) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and isinstance(out, Tensor) and weight.ndim > 1:
            work.append(weight.numel() * out.numel() / weight.shape[0])

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        module(x, tasks)
    for hook in hooks:
        hook.remove()
    return training.batch_size * sum(work) <= LIGHT["cuda" if device.startswith("cuda") else "cpu"]


def stacks(module: nn.Module, x: Tensor, tasks: tuple[str, ...]) -> bool:
    """Return whether torch can train copies of a module side by side, which it tries on an input (1 x ...): not where
    the forward pass draws random numbers or depends on values, nor through every kind of layer."""
    weights = {name: p.detach().expand(2, *p.shape).clone().requires_grad_() for name, p in module.named_parameters()}

    def total(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([out.sum() for out in functional_call(module, weights, (x, tasks)).values()]).sum()

    mode = module.training
    module.train()
    try:
        with torch.random.fork_rng(devices=[]):
            vmap(total)(weights, x.expand(2, *x.shape)).sum().backward()
    except RuntimeError:
        return False
    finally:
        module.train(mode)
    return True


def group(clients: Sequence[Stackable], training: Training) -> list[list[Stackable]]:
    """Group clients that can share a stack, those with the most steps first.

    They have examples of the same data set and the same tasks and weights, and as many as each other unless the losses
    can be masked (`Task.masks`). What would take more than BUDGET bytes is dealt out to several stacks of about the
    same size.
    """
    groups: dict[object, list[Stackable]] = {}
    lengths = _lengths(clients, training)
    for c in clients:
        size = None if all(task.masks for task, _ in c.work.tasks.values()) else c.work.index.numel()
        groups.setdefault((kind(c.work.tasks), size, id(c.work.examples)), []).append(c)
    most = max(1, BUDGET // (COPIES * clients[0].base.nbytes))
    stacks = []
    for members in groups.values():
        members.sort(key=lambda c: -lengths[c.work.index.numel()][1])
        size = math.ceil(len(members) / math.ceil(len(members) / most))
        stacks += [members[at : at + size] for at in range(0, len(members), size)]
    return stacks


def _lengths(clients: Sequence[Stackable], training: Training) -> dict[int, tuple[int, int]]:
    """Return the numbers of examples that clients have -> (steps of one pass over them, steps in all)."""
    one_pass = {n: passes([n], training) for n in {c.work.index.numel() for c in clients}}
    return {n: (steps, training.steps or local_epochs(training) * steps) for n, steps in one_pass.items()}


def _drawn(clients: Sequence[Stackable], training: Training, ctx: Ctx) -> Tensor:
    """Draw positions of each client's batches, as `fedloom.training.loop.batches` draws them (K x steps x batch size).

    -1 stands where a batch has no more examples, or a client no more batches.
    """
    size, lengths = training.batch_size, _lengths(clients, training)
    drawn = np.full((len(clients), lengths[clients[0].work.index.numel()][1], size), -1)
    for places, c in zip(drawn.reshape(len(clients), -1), clients, strict=True):
        index = c.work.index
        one_pass, steps = lengths[index.numel()]
        for epoch, at in enumerate(range(0, steps * size, one_pass * size)):
            order = ordered(index, ctx.rng("order", c.work.who, epoch))
            there = places[at : at + order.numel()]
            there[:] = order.numpy()[: len(there)]
    return torch.from_numpy(drawn)


def train_stacked(
    model: FlatModel,
    clients: Sequence[Stackable],
    training: Training,
    ctx: Ctx,
    shared: tuple[Columns, ...],
    rules: Sequence[LocalRule] = (),
) -> tuple[Tensor, list[LocalResult]]:
    """Train one group (see `group`): parameters afterwards (K x p), and each client's result, in their order.

    Raises UserError if the model does something that cannot be stacked.
    """
    tasks, names = clients[0].work.tasks, tuple(clients[0].work.tasks)
    layout = model.layout.parameters
    spans = layout.spans(model.layout.trained(names))
    base = torch.stack([c.base for c in clients])
    view = View(base.clone(), torch.zeros_like(base), base, shared)
    params, grad = view.params, view.grad
    optimizer = build(training.optimizer.model_copy(update={"fused": False}), params, grad, spans)
    active = [view.grad[..., s] for s in spans]
    trained = torch.empty_like(base)

    def losses_of(weights: dict[str, Tensor], x: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Losses]:
        return task_losses(functional_call(model.module, weights, (x, names)), targets, tasks)

    forward = vmap(losses_of)
    drawn = _drawn(clients, training, ctx)
    sizes = (drawn >= 0).sum(dim=2)  # K x steps
    taking = (sizes > 0).sum(dim=0).tolist()  # how many of them, the first ones, still train
    lengths = _lengths(clients, training)
    pass_steps = [lengths[c.work.index.numel()][0] for c in clients]
    different = {*pass_steps}  # few, of however many clients
    sums = {name: torch.zeros(len(clients), device=model.device) for name in names}
    counts = {name: torch.zeros(len(clients)) for name in names}
    partial = {name for c in clients for name in c.work.labelled}
    model.module.train()
    leaf, there = view.params, 0
    for step, now in enumerate(taking):
        if now != there:
            trained[now:there] = view.params[now:there]  # the optimiser goes on to move them
            there, leaf = now, view.params[:now].detach().requires_grad_()  # the same memory, with a gradient
            leaf.grad = view.grad[:now]
        rates = {steps: learning_rate(training, ctx.round, step // steps) for steps in different}
        same = len({*rates.values()}) == 1
        view.lr = rates[pass_steps[0]] if same else base.new_tensor([rates[steps] for steps in pass_steps])[:, None]
        set_rate(optimizer, view.lr)
        count = sizes[:now, step]
        batch = drawn[:now, step, : int(count.max())]
        padding = batch < 0
        places = torch.where(padding, batch[:, :1], batch).flatten()
        x, y = clients[0].work.examples.batch(places, model.device, tasks=names)
        if padding.any():
            y = {name: without_label(labels, padding.flatten()) for name, labels in y.items()}
        view.grad.zero_()
        # one split, whose gradient is one concatenation: each slice would add a whole K x p
        pieces = leaf.split([block.size for block in layout.blocks], dim=1)
        weights = {b.name: w.view(-1, *b.shape) for b, w in zip(layout.blocks, pieces, strict=True)}
        try:
            targets = {name: y[name].view(*batch.shape, *y[name].shape[1:]) for name in names}
            total, losses = forward(weights, x.view(*batch.shape, *x.shape[1:]), targets)
            total.sum().backward()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise UserError(f"training.stacked: the model cannot be stacked, so set it to false: {error}") from error
        for rule in rules:
            rule.grad(view, {})
            check_places(view, params, grad, [rule])
        if training.clip_norm is not None:
            clip(active, training.clip_norm)
        optimizer.step()
        view.step += 1
        for name, value in losses.items():
            seen = count.float()
            for k, c in enumerate(clients[:now] if name in partial else ()):
                if name in c.work.labelled:
                    seen[k] = c.work.labels_in(batch[k][~padding[k]], name)
            sums[name][:now] += value.detach() * seen.to(value)
            counts[name][:now] += seen
    trained[:there] = view.params[:there]
    means = {name: (total.cpu() / counts[name].clamp(min=1)).tolist() for name, total in sums.items()}
    steps, examples = ((sizes > 0).sum(dim=1).tolist(), sizes.sum(dim=1).tolist())
    return trained, [
        LocalResult(steps=steps[k], examples=examples[k], losses={name: values[k] for name, values in means.items()})
        for k in range(len(clients))
    ]
