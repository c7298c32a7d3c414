"""The client's part of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State, derive_seed
from fedloom.core.layout import Layout
from fedloom.core.updates import Updates
from fedloom.methods.method import Method
from fedloom.rounds.evaluation import evaluate, example_losses
from fedloom.rounds.federation import Client, Federation
from fedloom.rounds.loading import load, load_personal, personal_state, task_messages
from fedloom.rounds.messages import Message, Payload
from fedloom.runs.checkpoint import map_tensors
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import Additions, LocalResult, train
from fedloom.training.phases import Phase


def client_step(
    method: Method,
    model: FlatModel,
    federation: Federation,
    client: Client,
    received: Message,
    state: State,
    ctx: Ctx,
    training: Training,
) -> tuple[Payload, LocalResult, State]:
    """One client's part of a round: load, train, subtract, transform, pack.

    `model` is scratch space: everything in it is overwritten. `state` is what the client kept from its last
    participation ({} at first); it is not changed. If the update is not finite, the state stays as it was.
    """
    training = training.of(client.domain)
    if method.rows == "client-task":
        return _by_task(method, model, federation, client, received, state, ctx, training)
    result, base = _train(method, model, client, received, state, ctx, training, client.id)
    payload, result, new = finish(method, model, federation, client, base, state, result, ctx)
    if method.stream is None or not payload.finite:
        return payload, result, new
    trained = model.vector.clone()
    memory = state.get("personal", {})
    load_personal(model, memory)
    if not memory:
        model.params.copy_(base)
    added = Additions(rules=method.stream.rules, broadcast={"anchor": base})
    beside = _local(method, model, client, ctx, training, f"{client.id}/personal", added, memory)
    new["personal"] = memory
    if bool(torch.isfinite(model.vector).all()):
        new["personal"] = personal_state(model, model.params, {"rules": beside.rules, "optimizer": beside.optimizer})
    model.vector.copy_(trained)
    return payload, result, new


def _train(
    method: Method,
    model: FlatModel,
    client: Client,
    received: Message,
    state: State,
    ctx: Ctx,
    training: Training,
    who: str,
) -> tuple[LocalResult, Tensor]:
    """Load the received message and train; (result, parameters at the start). `model` then holds the trained model."""
    load(method, model, received, state)
    base = model.params.clone()
    layout, shared = model.layout.parameters, method.shared_part(model.layout)

    def everywhere(value: Tensor) -> Tensor:
        value = value.to(model.device)
        return layout.put(torch.zeros_like(base), shared, value) if value.ndim == 1 else value

    broadcast = {name: everywhere(value) for name, value in received.broadcast.items()}
    added = Additions(rules=method.local, phases=method.phases, broadcast=broadcast)
    return _local(method, model, client, ctx, training, who, added, state), base


def _local(
    method: Method,
    model: FlatModel,
    client: Client,
    ctx: Ctx,
    training: Training,
    who: str,
    added: Additions,
    memory: State,
) -> LocalResult:
    """Local training of the loaded model; `who` names the streams of random numbers."""
    shared = model.spans(method.shared_part(model.layout))

    def validate() -> dict[str, float]:
        part = client.part("val")
        scores = evaluate(model, part, {name: task for name, (task, _) in client.tasks.items()}, training.batch_size)
        model.module.train()
        return {name: score["loss"] for name, score in scores.items()}

    def losses() -> Tensor:
        each = example_losses(model, client.train, client.tasks, training.batch_size)
        model.module.train()
        return each

    kept: State = {kind: memory[kind] for kind in ("rules", "optimizer") if kind in memory}
    if "rules" in kept:
        kept["rules"] = map_tensors(kept["rules"], lambda t: t.to(model.device))
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(derive_seed(ctx.seed, ctx.round, "model", who))  # for dropout and other random layers
        added = replace(added, shared=shared, validate=validate, losses=losses)
        return train(model, client.work(who), training, ctx, added, kept)


def _by_task(
    method: Method,
    model: FlatModel,
    federation: Federation,
    client: Client,
    received: Message,
    state: State,
    ctx: Ctx,
    training: Training,
) -> tuple[Payload, LocalResult, State]:
    """A client's part of a round if each of its tasks is trained alone, from the task's own vector."""
    layout, shared = model.layout.parameters, method.shared_part(model.layout)
    initial = model.initial[: layout.d]
    starts = task_messages(method, model, federation, client.id, received)
    memories = state.get("tasks", {})
    new: State = {"tasks": dict(memories)}
    results: dict[str, LocalResult] = {}
    rows: dict[str, Tensor] = {}
    extra: dict[str, list[Any]] = {}
    support: list[Tensor] = []
    for task in sorted(client.tasks):
        one, memory = client.only(task), memories.get(task, {})
        result, base = _train(method, model, one, starts[task], memory, ctx, training, f"{client.id}/{task}")
        results[task] = result
        if not _finite(model, base):
            continue
        new["tasks"][task] = _kept(method, model, base, memory, result)
        # from the initial model, which every client and the server know
        rows[task] = layout.take(model.params, shared) - layout.take(initial, shared)
        for name, value in _about(method, one, result).items():
            extra.setdefault(name, []).append(value)
        support.append(_support(model, shared, (task,)))
    merged = LocalResult(
        sum(r.steps for r in results.values()),
        sum(r.examples for r in results.values()),
        {task: results[task].losses[task] for task in client.tasks},
        waiting=sum(r.waiting for r in results.values()),
        by_task=results,
    )
    row: Row = (client.id, None)
    if not rows:
        return Payload(row, len(client.train), finite=False), merged, state
    sizes = {task: float(len(client.only(task).train)) for task in rows}
    payload, edge, _ = _payload(
        method,
        tuple((client.id, task) for task in rows),
        torch.stack(list(rows.values())),
        list(sizes.values()),
        shared,
        federation.present(client, shared, tuple(rows)),
        extra,
        state.get("edge"),
        ctx,
    )
    if edge:
        new["edge"] = edge
    rows_support = torch.stack(support) if method.wants_support else None
    return replace(payload, row=row, n=len(client.train), support=rows_support, tasks=sizes), merged, new


def tune(method: Method, model: FlatModel, client: Client, training: Training, ctx: Ctx) -> None:
    """Tune the loaded model before a personal model is measured, as the method says, at the full learning rate."""
    if method.tune is None:
        return
    ctx = replace(ctx, round=max(ctx.round, 1))  # the initial model is measured too
    changes = {"epochs": method.tune.epochs, "steps": None, "keep_optimizer": False, "schedule": Schedule()}
    longer = training.model_copy(update=changes)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(derive_seed(ctx.seed, ctx.round, "tune", client.id))
        train(model, client.work(f"{client.id}/tune"), longer, ctx, Additions(phases=(Phase(method.tune.select),)))


def finish(
    method: Method,
    model: FlatModel,
    federation: Federation,
    client: Client,
    base: Tensor,
    state: State,
    result: LocalResult,
    ctx: Ctx,
) -> tuple[Payload, LocalResult, State]:
    """From trained parameters (`base` is where they started) to a payload and the client's new state."""
    params, shared = model.layout.parameters, method.shared_part(model.layout)
    row: Row = (client.id, None)
    if not _finite(model, base):
        return Payload(row, len(client.train), finite=False), result, state
    delta = model.params - base
    new = _kept(method, model, base, state, result)
    payload, edge, sent = _payload(
        method,
        (row,),
        params.take(delta, shared).unsqueeze(0),
        [len(client.train)],
        shared,
        federation.present(client, shared),
        {name: [value] for name, value in _about(method, client, result).items()},
        state.get("edge"),
        ctx,
    )
    if edge:
        new["edge"] = edge
    if method.start == "own":
        # with the values that the server receives, so that both have the same model
        new["own"] = (params.take(base, shared) + sent[0]).to(torch.device("cpu"))
    # buffers that stay with the client were copied by `_kept`
    buffers, integers = _state_buffers(method, model) if method.buffers != "local" else (None, {})
    payload = replace(
        payload,
        extra={name: values[0] for name, values in payload.extra.items()},
        auxiliary={name: params.take(result.extra[name], shared).to("cpu") for name in method.auxiliary},
        support=_support(model, shared, tuple(client.tasks)) if method.wants_support else None,
        buffers=buffers,
        integers=integers,
    )
    return payload, result, new


def _finite(model: FlatModel, base: Tensor) -> bool:
    """Whether the trained parameters and the buffers are finite."""
    return bool(torch.isfinite(model.params - base).all() & torch.isfinite(model.buffers).all())


def _state_buffers(method: Method, model: FlatModel) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Copies of the float buffers that may leave the client, and of integer buffers."""
    layout = model.layout.buffers
    shared = layout.take(model.buffers, method.shared_buffers(model.layout))
    buffers = shared.to("cpu", copy=True) if len(shared) else None
    return buffers, {name: b.to("cpu", copy=True) for name, b in model.integers.items()}


def _kept(method: Method, model: FlatModel, base: Tensor, state: State, result: LocalResult) -> State:
    """What a client keeps of a round for its next one; stages at the client add their own state."""
    params, private = model.layout.parameters, method.private_part(model.layout)
    cpu = torch.device("cpu")
    new: State = {}
    if private.blocks:
        # start + update, as every server computes it, so that local training is exactly mixing with the identity
        delta = model.params - base
        new["private"] = (params.take(base, private) + params.take(delta, private)).to(cpu, copy=True)
    if result.optimizer:
        new["optimizer"] = result.optimizer
    if method.local:
        new["rules"] = map_tensors(result.rules, lambda t: t.to(cpu))
    for i, rule in enumerate(method.local):
        if (personal := rule.personal(result.rules[str(i)])) is not None:
            new["personal"] = personal_state(model, personal)
    if method.buffers == "local":
        new["buffers"], new["integers"] = _state_buffers(method, model)
    layout = model.layout.buffers
    own = layout.without(method.shared_buffers(model.layout))
    if own.blocks:
        new["private_buffers"] = layout.take(model.buffers, own).to(cpu, copy=True)
    return new


def _about(method: Method, client: Client, result: LocalResult) -> dict[str, Any]:
    """The extras of one row that some stage uses."""
    about: dict[str, Any] = {
        "steps": float(result.steps),
        "domain": client.domain or "",
        "tasks": ",".join(sorted(client.tasks)),
    }
    if "classes" in method.extras:
        about["classes"] = client.class_counts
    about |= {name: v.to("cpu") if isinstance(v, Tensor) else v for name, v in result.extra.items()}
    return {name: value for name, value in about.items() if name in method.extras}


def _support(model: FlatModel, shared: Layout, tasks: tuple[str, ...]) -> Tensor:
    """Which blocks received a gradient in training these tasks."""
    trained = set(model.trained(tasks).names)
    return torch.tensor([b.name in trained for b in shared.blocks])


def _payload(
    method: Method,
    rows: tuple[Row, ...],
    X: Tensor,
    sizes: Sequence[float],
    shared: Layout,
    present: Tensor | None,
    extra: Mapping[str, list[Any]],
    edge: State | None,
    ctx: Ctx,
) -> tuple[Payload, State, Tensor]:
    """A client's rows after its stages and the codec: (payload, the stages' state, the rows before the codec)."""
    n = torch.tensor([float(size) for size in sizes], dtype=torch.float64)
    updates = Updates(shared, rows, X, n, n.clone(), present=present, extra=extra)
    updates, state = method.edge(updates, edge or method.edge.init(shared), ctx)
    packed = {k: v.to("cpu") for k, v in method.codec.pack(updates).items()}
    return Payload(rows[0], float(n.sum()), packed, dict(updates.extra)), state, updates.X
