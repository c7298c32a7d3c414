"""The local loop: what a client does between receiving a model and sending an update."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count, islice
from operator import add
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State, seeded
from fedloom.core.errors import UserError
from fedloom.core.layout import Columns, Layout, as_select
from fedloom.core.states import check_state
from fedloom.data.dataset import Batch, Examples, Rng
from fedloom.models.tasks.task import Task
from fedloom.training import flat
from fedloom.training.config import Training
from fedloom.training.rules import ABSENT, LocalRule, Phase, View, check_places, ends

_NOTHING = contextlib.nullcontext()
T = TypeVar("T")
loaders = 1
"""Threads of this process that load batches ahead; `fedloom.federation.rounds.worker.set_torch` sets it."""


def ahead(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what calls return, in their order, made by `loaders` threads that work one item ahead of their number.

    Decoding, resizing and tensor operations release the interpreter lock, so they run beside training. An error of a
    call is raised where its item would come; leaving the iteration early ends the threads.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(loaders, thread_name_prefix="fedloom-load") as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > loaders + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def loaded(
    examples: Examples,
    positions: Iterable[Tensor],
    device: torch.device,
    tasks: Sequence[str],
    rng: Callable[[int], Rng] = lambda number: None,
) -> Iterator[Batch]:
    """Yield the batches at some positions; other threads make them where that takes long. `rng` gives the generator of
    the first, second, ... batch.

    On a GPU these work beside what it still has to do for this thread: in the same stream, each copy to the GPU would
    wait for all steps of training that stand before it.
    """
    if not examples.prefetch:
        return (examples.batch(index, device, rng(number), tasks) for number, index in enumerate(positions))

    def beside(number: int, index: Tensor) -> Batch:
        if device.type != "cuda":
            return examples.batch(index, device, rng(number), tasks)
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            x, targets = examples.batch(index, device, rng(number), tasks)
        stream.synchronize()
        for tensor in (x, *targets.values()):  # else its memory could be given away while training still reads it
            tensor.record_stream(torch.cuda.default_stream(device))
        return x, targets

    return ahead(partial(beside, *each) for each in enumerate(positions))


@dataclass
class LocalResult:
    """The result of a client's local training."""

    steps: int = 0
    examples: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    """Mean unweighted loss per task over the examples seen that have a label of the task; 0 if none has."""
    optimizer: State = field(default_factory=dict)
    rules: State = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    waiting: float = 0.0
    """Seconds spent waiting for batches."""
    by_task: dict[str, LocalResult] = field(default_factory=dict)
    """The parts of this result if each task was trained alone."""


@dataclass(frozen=True, eq=False)
class Work:
    """The work of one client: the examples at `index`, for tasks (name -> task and loss weight)."""

    who: str
    """The name of its streams of random numbers."""
    examples: Examples
    index: Tensor
    tasks: Mapping[str, tuple[Task, float]]
    labelled: Mapping[str, Tensor] = field(default_factory=dict)
    """Task -> whether the example at each position has a label, for tasks that lack some (`Part.has`)."""
    draws: tuple[str, ...] = ()
    """Names what random layers such as dropout draw; by default ("model", who)."""
    groups: tuple[Tensor, ...] = ()
    """The examples at `index` in groups, if a batch may hold examples of one group only."""

    def labels_in(self, batch: Tensor, task: str) -> int:
        """Return how many examples of a batch (positions) have a label of the task."""
        return int(self.labelled[task][batch].sum()) if task in self.labelled else len(batch)


@dataclass(frozen=True, eq=False)
class Additions:
    """The additions of a method to local training: rules, phases that train parts one after another, the rules' view.

    `shared` are the columns that are aggregated; all fields except `rules` and `phases` are as in `View`. `received` is
    a copy of the loaded vector, if there is one already.
    """

    shared: tuple[Columns, ...] = ()
    rules: Sequence[LocalRule] = ()
    phases: tuple[Phase, ...] = ()
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    received: Tensor | None = None
    validate: Callable[[], float] = ABSENT
    losses: Callable[[], Tensor] = ABSENT
    labels: Callable[[], Iterable[Mapping[str, Tensor]]] = ABSENT


def batches(
    index: Tensor, training: Training, ctx: Ctx, client: str, skip_single: bool = False, groups: Sequence[Tensor] = ()
) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch within the round, positions of one batch), in an order that (seed, round, client, epoch) determine.

    With `steps`, passes follow each other until that many batches are drawn. `skip_single` leaves out a last batch
    of one example, on which batch norm cannot train. With several `groups` a batch is of one of them.
    """
    skip_single = skip_single and min(training.batch_size, len(index)) > 1

    def one_pass(epoch: int) -> Sequence[Tensor]:
        rng = ctx.rng("order", client, epoch)
        dealt: Sequence[Tensor] = (order := ordered(index, rng)).split(training.batch_size)
        if len(groups) > 1:
            parts = [b for group in groups for b in order[torch.isin(order, group)].split(training.batch_size)]
            dealt = [parts[i] for i in torch.randperm(len(parts), generator=rng).tolist()]
        return [batch for batch in dealt if len(batch) > 1 or not skip_single]

    epochs = range(flat.local_epochs(training)) if training.steps is None else count()
    return islice(((epoch, batch) for epoch in epochs for batch in one_pass(epoch)), training.steps)


def ordered(index: Tensor, rng: torch.Generator) -> Tensor:
    """Return the positions in the order of one epoch."""
    return index[torch.randperm(len(index), generator=rng)]


def passes(groups: Sequence[int], training: Training, skip_single: bool = False) -> int:
    """Return how many batches one pass over groups of so many examples has (see `batches`)."""
    size, all_examples = training.batch_size, sum(groups)
    alone = sum(skip_single and examples % size == 1 and min(size, all_examples) > 1 for examples in groups)
    return sum(-(-examples // size) for examples in groups) - alone


def task_losses(
    outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], tasks: Mapping[str, tuple[Task, float]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum over a client's tasks, and the unweighted loss of each."""
    losses = {name: task.loss(outputs[name], targets[name]) for name, (task, _) in tasks.items()}
    # each operation costs a node in the backward pass
    terms = [losses[name] if weight == 1 else weight * losses[name] for name, (_, weight) in tasks.items()]
    return reduce(add, terms), losses


def train(
    model: flat.FlatModel,
    work: Work,
    training: Training,
    ctx: Ctx,
    added: Additions = Additions(),
    memory: Mapping[str, State] = MappingProxyType({}),
) -> LocalResult:
    """Train `model` in place. Heads of other clients' tasks get no gradient, weight decay or momentum.

    `memory` is what the client kept from its last round: "rules" and "optimizer", as in a LocalResult.
    """
    gpu = [model.device] if model.device.type == "cuda" else []
    with seeded(ctx.seed, ctx.round, *(work.draws or ("model", work.who)), devices=gpu):
        return _train(model, work, training, ctx, added, memory)


def _train(
    model: flat.FlatModel, work: Work, training: Training, ctx: Ctx, added: Additions, memory: Mapping[str, State]
) -> LocalResult:
    names, trained, index, groups = tuple(work.tasks), model.layout.trained(work.tasks), work.index, work.groups
    applied = _Applied(model, trained, names, training, added, memory) if added.rules else None
    if applied is not None and applied.view.chosen is not None:
        index = index[applied.view.chosen]
        groups = tuple(part for group in groups if len(part := group[torch.isin(group, index)]))
    parts = _phases(model, trained, training, added.phases, groups or (index,)) if added.phases else [(trained, 0)]
    now, *later = turns = [_Turn.of(model, training, *part, memory, str(i)) for i, part in enumerate(parts)]
    half = torch.autocast(model.device.type, torch.bfloat16) if training.precision == "bf16" else _NOTHING
    sums, counts, result = dict[str, Tensor](), dict.fromkeys(names, 0), LocalResult()
    repeat = max((rule.repeat for rule in added.rules), default=1)
    plan = [*batches(index, training, ctx, work.who, model.has_batch_norm, groups)] if repeat else []
    where, rng = (model.device, names), partial(ctx.rng, "augment", work.who)
    stream = zip(plan, loaded(work.examples, [batch for _, batch in plan], *where, rng), strict=True)
    model.module.train()
    if added.phases:
        now.freeze_others(model)
    start = time.perf_counter()
    for number, ((epoch, batch), (x, targets)) in enumerate(step for step in stream for _ in range(repeat)):
        result.waiting += time.perf_counter() - start
        while number // repeat >= now.until and later:
            now = later.pop(0)
            model.module.train()
            now.freeze_others(model)
        lr = flat.learning_rate(training, ctx.round, epoch) * (1.0 if applied is None else applied.view.scale)
        flat.set_rate(now.optimizer, lr)
        if x.ndim == 4:
            x = laid_out(model, x, training.channels_last)
        model.grad.zero_()
        with half, applied.recording(lr, result.steps) if applied else _NOTHING:
            here = work.tasks if len(targets) == len(names) else {n: t for n, t in work.tasks.items() if n in targets}
            outputs = model.module(x, tuple(here))
            loss, losses = task_losses(outputs, targets, here)
            if applied is not None:
                loss = applied.penalised(loss, x, outputs, targets)
        loss.backward()
        if applied is not None:
            applied.edit()
        if training.clip_norm is not None:
            clip(now.grads, training.clip_norm)
        now.optimizer.step()
        result.steps += 1
        result.examples += len(x)
        for name, value in losses.items():
            counts[name] += (labels := work.labels_in(batch, name))
            sums[name] = sums.get(name, 0.0) + value.detach() * labels
        start = time.perf_counter()
    if applied is not None:
        result.rules, result.extra = applied.finish(result.steps)
    seen = [name for name in names if name in sums]
    totals = torch.stack([sums[name].double() for name in seen]).tolist() if seen else ()  # one transfer per client
    result.losses = {name: total / max(counts[name], 1) for name, total in zip(seen, totals, strict=True)}
    if training.keep_optimizer:
        result.optimizer = {str(i): flat.export_state(turn.optimizer) for i, turn in enumerate(turns)}
    model.module.zero_grad()
    del model.grad  # as large as the model, and of no use until the next training
    return result


class _Applied:
    """The rules that a method adds, with their view and states, during one client's training."""

    def __init__(
        self,
        model: flat.FlatModel,
        trained: Layout,
        tasks: tuple[str, ...],
        training: Training,
        added: Additions,
        memory: Mapping[str, State],
    ) -> None:
        received = model.vector.clone() if added.received is None else added.received
        self.model, self.rules = model, added.rules
        self.view = View(
            model.params,
            model.grad,
            received[: len(model.params)],
            added.shared,
            model.layout.parameters.spans(trained),
            optimizer=training.optimizer,
            tasks=tasks,
            broadcast=added.broadcast,
            module=model.module,
            buffers=model.buffers,
            received=received,
            features=flat.FeatureRecorder(model) if any(rule.features for rule in self.rules) else ABSENT,
            validate=added.validate,
            losses=added.losses,
            labels=added.labels,
        )
        states = memory.get("rules") or {str(i): rule.init(self.view.base) for i, rule in enumerate(self.rules)}
        self.states = dict[str, State]()
        for i, rule in enumerate(self.rules):
            state: Any = rule.begin(self.view, states[str(i)])
            if not isinstance(state, Mapping):  # what it holds within a round is the rule's own affair
                raise UserError(
                    f"local rule {rule!r}: begin returned {type(state).__name__}, expected the state, a dictionary"
                )
            self.states[str(i)] = cast(State, state)
        check_places(self.view, model.params, model.grad, self.rules)

    def recording(self, lr: float, step: int) -> AbstractContextManager[None]:
        """Record features inside the context for rules that ask for them; a step with this learning rate begins."""
        self.view.lr, self.view.step = lr, step
        return self.view.features.recording() if self.view.features else _NOTHING

    def penalised(
        self, loss: Tensor, x: Tensor, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss of a batch with the rules' penalties."""
        self.view.outputs, self.view.targets = outputs, targets
        self.view.under = partial(self.model.outputs_under, x=x, tasks=tuple(outputs))
        for i, rule in enumerate(self.rules):
            penalty = rule.penalty(self.view, self.states[str(i)])
            if penalty is not None:
                if not (isinstance(penalty, Tensor) and penalty.requires_grad and penalty.ndim == 0):
                    self._check_constant(rule, penalty)
                loss = loss + penalty
        return loss

    def _check_constant(self, rule: LocalRule, penalty: Any) -> None:
        """Refuse a penalty that is no number of the model's, or that never moves it.

        0 is what there is to add for a batch without labels, and features of a frozen encoder are constant.
        """
        if not isinstance(penalty, Tensor) or penalty.ndim:
            shape = f" of shape {tuple(penalty.shape)}" if isinstance(penalty, Tensor) else ""
            found = f"{type(penalty).__name__}{shape}"
            raise UserError(f"local rule {rule!r}: penalty returned a {found}, expected a scalar tensor or None")
        encoder: Any = getattr(self.model.module, "encoder", self.model.module)
        if bool(penalty != 0) and any(p.requires_grad for p in encoder.parameters()):
            raise UserError(
                f"local rule {rule!r}: penalty returned a constant, so it has no effect: view.params and the other "
                "vectors of the view are outside autograd. Compute it from view.outputs, view.features or "
                "view.module.parameters(), or add its gradient to view.grad in the method grad, as "
                "fedloom.training.Proximal does"
            )

    def edit(self) -> None:
        """Edit the gradient of a step."""
        for i, rule in enumerate(self.rules):
            rule.grad(self.view, self.states[str(i)])
            check_places(self.view, self.model.params, self.model.grad, [rule])

    def finish(self, steps: int) -> tuple[State, dict[str, Any]]:
        """Return the rules' states after so many steps, and what they provide."""
        self.view.step = steps
        states, provided = State(), dict[str, Any]()
        for i, rule in enumerate(self.rules):
            found: Any = rule.finish(self.view, self.states[str(i)])
            if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, Mapping) for one in found)):
                raise UserError(
                    f"local rule {rule!r}: finish returned {type(found).__name__}, expected a tuple of two "
                    "dictionaries: its state, and what it provides ({} for nothing)"
                )
            states[str(i)], extra = found
            check_state(rule, states[str(i)])
            declared = {name.partition(":")[2] for name in rule.provides}
            if unknown := sorted({*extra} - declared):
                bare = [name.rpartition(":")[2] for name in unknown]  # finish returns NAME for provides' "extra:NAME"
                if declared.issuperset(bare):
                    said = f"finish returned {', '.join(unknown)}, expected {', '.join(bare)}, without the kind"
                    raise UserError(f"local rule {rule!r}: {said}")
                names = ", ".join(f"extra:{name}" for name in unknown)
                raise UserError(
                    f"local rule {rule!r}: finish returned {', '.join(unknown)}, which no stage would see: declare it "
                    f"in provides ({names}, or auxiliary:NAME for a vector)"
                )
            provided |= extra
        check_places(self.view, self.model.params, self.model.grad, self.rules)
        return states, provided


def _phases(
    model: flat.FlatModel, trained: Layout, training: Training, phases: tuple[Phase, ...], groups: Sequence[Tensor]
) -> list[tuple[Layout, int]]:
    """Return for each phase the parameters that it trains, and the number of batches after which it ends."""
    batches_ = passes([len(group) for group in groups], training, model.has_batch_norm)
    until = ends(phases, training.steps or flat.local_epochs(training) * batches_)
    return [(trained.select(as_select(phase.select)), end) for phase, end in zip(phases, until, strict=True)]


@dataclass
class _Turn:
    """Parameters that one optimiser trains together, for a given number of batches."""

    layout: Layout
    optimizer: flat.Stepper | torch.optim.Optimizer
    grads: list[Tensor]
    until: int

    @staticmethod
    def of(
        model: flat.FlatModel, training: Training, part: Layout, until: int, memory: Mapping[str, State], key: str
    ) -> _Turn:
        """Return the turn of some parameters; its optimiser continues from its last state, if there is one."""
        every, parts = model.layout.parameters, [part]
        if training.optimizer.encoder_lr is not None:
            slow = part.select(name="encoder.*")
            parts = [part.without(slow), slow]
        optimizer = flat.build(training.optimizer, model.params, model.grad, *map(every.spans, parts))
        if key in memory.get("optimizer", ()):
            flat.import_state(optimizer, memory["optimizer"][key])
        return _Turn(part, optimizer, [model.grad[s] for s in every.spans(part)], until)

    def freeze_others(self, model: flat.FlatModel) -> None:
        """Put modules without trained parameters into eval mode, so that norm layers keep their statistics."""
        mine = set(self.layout.names)
        for prefix, module in model.module.named_modules():
            own = {f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)}
            if own and not own & mine:
                module.eval()


def laid_out(model: flat.FlatModel, x: Tensor, innermost: bool) -> Tensor:
    """Return images (B x C x H x W) as the model takes them: with the channels `innermost` in memory if so wanted."""
    return x.contiguous() if model.channels_first else channels_last(x) if innermost else x


def channels_last(x: Tensor) -> Tensor:
    """Return images (B x C x H x W) with the channels innermost in memory.

    With one channel both orders are the same memory; torch then takes the usual one, unless the strides differ.
    """
    if x.shape[1] != 1:
        return x.contiguous(memory_format=torch.channels_last)
    _, _, height, width = x.shape
    return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))


def clip(grads: Sequence[Tensor], limit: float) -> None:
    """Scale gradients in place so that their joint 2-norm (over the last dimension) is at most `limit`."""
    norm = torch.stack([g.norm(dim=-1) for g in grads]).norm(dim=0)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.unsqueeze(-1))
