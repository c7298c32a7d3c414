"""The three pure functions that every runner uses: client_step, server_step, dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.context import Ctx, Row, derive_seed
from fedloom.methods.method import Method
from fedloom.runtime.buffers import merge_buffers
from fedloom.runtime.evaluation import evaluate, example_losses
from fedloom.runtime.federation import Client, Federation
from fedloom.runtime.state import map_tensors
from fedloom.stages.stage import State
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult, train
from fedloom.training.phases import Phase
from fedloom.training.rules import LocalRule
from fedloom.updates import EVERYONE, Layout, Updates

ALL = EVERYONE[0]


@dataclass(frozen=True, eq=False)
class Message:
    """From the server to one client: the shared parameters, the buffers unless they are local, and what stages tell.

    `vector` is None where the client goes on from its own model, which it has.
    """

    vector: Tensor | None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    told: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Payload:
    """From one client to the server: packed updates, number of examples, extras, side vectors, buffers.

    `finite` is False where local training produced nan or inf; the payload is then empty.
    """

    row: Row
    n: float
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    side: Mapping[str, Tensor] = field(default_factory=dict)
    support: Tensor | None = None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    finite: bool = True


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

    `model` is scratch space: everything in it is overwritten. `state` is the client's from its last participation
    ({} at first) and is not changed. If the update is not finite, the state stays as it was.
    """
    load(method, model, received, state)
    base = model.params.clone()
    layout, shared = model.layout.parameters, method.shared_part(model.layout)

    def everywhere(told: Tensor) -> Tensor:
        told = told.to(model.device)
        return layout.put(torch.zeros_like(base), shared, told) if told.ndim else told

    def validate() -> dict[str, float]:
        part = client.part("val")
        scores = evaluate(model, part, {name: task for name, (task, _) in client.tasks.items()}, training.batch_size)
        model.module.train()
        return {name: score["loss"] for name, score in scores.items()}

    def losses() -> Tensor:
        each = example_losses(model, client.train, client.tasks, training.batch_size)
        model.module.train()
        return each

    def local_training(
        who: str, rules: Sequence[LocalRule], memory: State, told: Mapping[str, Tensor], phases: tuple[Phase, ...] = ()
    ) -> LocalResult:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(derive_seed(ctx.seed, ctx.round, "model", who))  # dropout and the like
            return train(
                model,
                client.train.examples,
                client.train.index,
                client.tasks,
                training,
                ctx,
                who,
                model.spans(shared),
                rules,
                map_tensors(memory["rules"], lambda t: t.to(model.device)) if "rules" in memory else None,
                memory.get("optimizer"),
                told,
                phases,
                validate,
                losses,
            )

    told = {name: everywhere(value) for name, value in received.told.items()}
    result = local_training(client.id, method.local, state, told, method.phases)
    payload, result, new = finish(method, model, federation, client, base, state, result, ctx)
    if method.stream is None or not payload.finite:
        return payload, result, new
    trained = model.vector.clone()
    memory = state.get("personal", {})
    load_personal(model, memory)
    if not memory:
        model.params.copy_(base)
    beside = local_training(f"{client.id}/personal", method.stream.rules, memory, {"anchor": base})
    new["personal"] = memory
    if bool(torch.isfinite(model.vector).all()):
        new["personal"] = _personal(model, model.params, {"rules": beside.rules, "optimizer": beside.optimizer})
    model.vector.copy_(trained)
    return payload, result, new


def _personal(model: FlatModel, params: Tensor, more: State | None = None) -> State:
    """A client's own model as state."""
    state = {"vector": torch.cat([params, model.buffers]), "integers": dict(model.integers), **(more or {})}
    kept: State = map_tensors(state, lambda t: t.to("cpu", copy=True))
    return kept


def load_personal(model: FlatModel, personal: State) -> None:
    """Put a client's own model, where there is one, in the place of what is loaded."""
    if personal:
        model.vector.copy_(personal["vector"])
        model.load_integers(personal["integers"])


def tune(method: Method, model: FlatModel, client: Client, training: Training, ctx: Ctx) -> None:
    """Train the loaded model, at the full learning rate, as the method does before a personal model is measured."""
    if method.tune is None:
        return
    ctx = replace(ctx, round=max(ctx.round, 1))  # the initial model is measured too
    changes = {"epochs": method.tune.epochs, "steps": None, "keep_optimizer": False, "schedule": Schedule()}
    longer = training.model_copy(update=changes)
    part = client.train
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(derive_seed(ctx.seed, ctx.round, "tune", client.id))
        train(
            model,
            part.examples,
            part.index,
            client.tasks,
            longer,
            ctx,
            f"{client.id}/tune",
            (),
            phases=(Phase(method.tune.select),),
        )


def load(method: Method, model: FlatModel, received: Message, state: State) -> None:
    """Put what the server sent, and what the client keeps for itself, into the model."""
    layout = model.layout
    model.vector.copy_(model.initial)
    model.load_integers(model.initial_integers)
    vector = state["own"] if received.vector is None else received.vector
    layout.parameters.put(model.params, method.shared_part(layout), vector.to(model.device))
    if "private" in state:
        layout.parameters.put(model.params, method.private_part(layout), state["private"].to(model.device))
    buffers = state.get("buffers") if method.buffers == "local" else received.buffers
    if buffers is not None:
        model.buffers.copy_(buffers)
    model.load_integers(state.get("integers", {}) if method.buffers == "local" else dict(received.integers))


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
    layout = model.layout
    params, shared, private = layout.parameters, method.shared_part(layout), method.private_part(layout)
    row: Row = (client.id, None)
    delta = model.params - base
    if not bool(torch.isfinite(delta).all() & torch.isfinite(model.buffers).all()):
        return Payload(row, len(client.train), finite=False), result, state
    cpu = torch.device("cpu")
    new: State = {}
    if private.blocks:
        # start + update, as every server computes it: so local training is exactly mixing with the identity
        new["private"] = (params.take(base, private) + params.take(delta, private)).to(cpu, copy=True)
    if result.optimizer:
        new["optimizer"] = result.optimizer
    if method.local:
        new["rules"] = map_tensors(result.rules, lambda t: t.to(cpu))
    for i, rule in enumerate(method.local):
        if (personal := rule.personal(result.rules[str(i)])) is not None:
            new["personal"] = _personal(model, personal)
    buffers = model.buffers.to(cpu, copy=True) if len(model.buffers) else None
    integers = {name: b.to(cpu, copy=True) for name, b in model.integers.items()}
    if method.buffers == "local":
        new["buffers"], new["integers"] = buffers, integers
        buffers, integers = None, {}
    trained = set(model.trained(tuple(client.tasks)).names)
    about = {"steps": float(result.steps), "domain": client.domain or "", "tasks": ",".join(sorted(client.tasks))}
    extra = {**about, **result.extra}
    updates = Updates(
        shared,
        (row,),
        params.take(delta, shared).unsqueeze(0),
        torch.tensor([float(len(client.train))], dtype=torch.float64),
        torch.tensor([float(len(client.train))], dtype=torch.float64),
        present=federation.present(client, shared),
        extra={k: [v] for k, v in extra.items() if k in method.extras},
    )
    updates, edge = method.edge(updates, state.get("edge") or method.edge.init(shared), ctx)
    if edge:
        new["edge"] = edge
    if method.start == "own":
        # with what the server is told, so that both have the same model
        new["own"] = (params.take(base, shared) + updates.X[0]).to(cpu)
    payload = Payload(
        row,
        len(client.train),
        {k: v.to(cpu) for k, v in method.codec.pack(updates).items()},
        {k: v[0] for k, v in updates.extra.items()},
        {name: params.take(result.extra[name], shared).to(cpu) for name in method.side},
        torch.tensor([b.name in trained for b in shared.blocks]) if "support" in method.extras else None,
        buffers,
        integers,
    )
    return payload, result, new


def server_init(method: Method, layout: Layout, initial: Tensor, integers: Mapping[str, Tensor]) -> State:
    """The server's state before the first round; `initial` is the whole model vector (parameters, buffers)."""
    params = layout.parameters
    shared = method.shared_part(layout)
    model = params.take(initial[: params.d], shared).clone()
    return {
        "model": model,
        "personal": {},
        "stage": method.stage.init(shared),
        "rule": {ALL: method.server.init(model)},
        "buffers": initial[params.d :].clone() if method.buffers != "local" else None,
        "integers": {k: v.clone() for k, v in integers.items()} if method.buffers != "local" else {},
    }


def model_of(state: State, client: str) -> Tensor:
    """The server's model for a client: its personal one where there is one, else the global one."""
    personal: Tensor = state["personal"].get(client, state["model"])
    return personal


def dispatch(method: Method, state: State, clients: Iterable[str]) -> dict[str, Message]:
    """What the server sends to each client. Clients that get the same vector get the same tensor."""
    clients = list(clients)
    needed = frozenset[str]().union(*(rule.needs for rule in method.local))
    told = method.stage.tell(state["stage"], clients, state["personal"]) if needed else {}
    vectors: dict[str, Tensor | None] = {}
    messages = {}
    for client in clients:
        key = client if client in state["personal"] else ALL
        if key not in vectors:
            has_it = method.start == "own" and key != ALL
            vectors[key] = None if has_it else method.server.dispatch(model_of(state, key), state["rule"][key])
        mine = {name: value for name, value in told.get(client, {}).items() if f"told:{name}" in needed}
        messages[client] = Message(vectors[key], state["buffers"], state["integers"], mine)
    return messages


def blank(shared: Layout, federation: Federation, row: Row, X: Tensor) -> Updates:
    """One row of zeros X (1 x d) with the presence of its client: what a codec fills."""
    one = torch.ones(1, dtype=torch.float64)
    return Updates(shared, (row,), X, one, one, present=federation.present(federation.clients[row[0]], shared))


def collect(
    method: Method,
    layout: Layout,
    federation: Federation,
    payloads: Iterable[Payload],
    rows: Sequence[Row],
    dtype: torch.dtype = torch.float32,
) -> tuple[Updates, list[Payload]]:
    """The matrix of the round from payloads in any order; a payload is forgotten once its row is written.

    `rows` are the expected keys; a client that fails or is not finite leaves no row.
    """
    shared = method.shared_part(layout)
    keys = sorted(rows, key=lambda r: (r[0], r[1] or ""))
    X = torch.zeros(len(keys), shared.d, dtype=dtype)
    beside = {name: torch.zeros_like(X) for name in method.side}
    came: dict[int, Payload] = {}
    for payload in payloads:
        if not payload.finite:
            continue
        i = keys.index(payload.row)
        X[i : i + 1] = method.codec.unpack(payload.packed, blank(shared, federation, payload.row, X[i : i + 1]))
        for name, matrix in beside.items():
            matrix[i] = payload.side[name]
        came[i] = Payload(**{**vars(payload), "packed": {}, "side": {}})
        del payload  # before the next one is made
    here = sorted(came)
    if len(here) < len(keys):
        X, beside = _compact(X, here), {name: _compact(matrix, here) for name, matrix in beside.items()}
    n = torch.tensor([came[i].n for i in here], dtype=torch.float64)
    extra: dict[str, Any] = {
        name: [came[i].extra[name] for i in here] for name in (came[here[0]].extra if here else ())
    }
    if "support" in method.extras:
        extra["support"] = torch.stack([came[i].support for i in here]) if here else torch.zeros(0, len(shared.blocks))  # type: ignore[misc]
    present = None
    if not federation.unified:
        masks = [federation.present(federation.clients[keys[i][0]], shared) for i in here]
        present = torch.cat([m for m in masks if m is not None]) if masks else torch.zeros(0, len(shared.blocks)).bool()
    updates = Updates(
        shared,
        tuple(keys[i] for i in here),
        X,
        n,
        n.clone() if method.weights == "size" else torch.ones_like(n),
        present=present,
        extra=extra,
        side=beside,
    )
    return updates, [came[i] for i in here]


def server_step(
    method: Method,
    layout: Layout,
    federation: Federation,
    payloads: Iterable[Payload],
    state: State,
    ctx: Ctx,
) -> State:
    """The server's (or a peer's) part of a round. `ctx.targets` are the participants.

    Rows with nan or inf are dropped and logged; if none is left the state stays as it was.
    """
    updates, came = collect(method, layout, federation, payloads, ctx.targets or (), state["model"].dtype)
    updates, dropped = updates.finite()
    for client, _ in dropped:
        ctx.log("update dropped", {"client": client, "why": "not finite after the client's stages"})
    if not len(updates):
        return state
    alive = set(updates.rows)
    if "base" in method.stage.reads:
        updates = updates.replace(base=_bases(method, state, [client for client, _ in updates.rows]))
    out, stage = method.stage(updates, state["stage"], ctx)
    del updates  # the matrix is not needed any more, and there may be a model for each row below
    new = {**state, "stage": stage, "personal": dict(state["personal"]), "rule": dict(state["rule"])}
    for key, update in zip(out.rows, out.X, strict=True):
        # what is meant for everyone also moves the personal models
        for name in (ALL, *state["personal"]) if key == EVERYONE else (key[0],):
            before = state["model"] if name == ALL else model_of(state, name)
            memory = state["rule"].get(name) or method.server.init(before)
            after, new["rule"][name] = method.server.apply(before, update, memory)
            if name == ALL:
                new["model"] = after
            else:
                new["personal"][name] = after
    came = [p for p in came if p.row in alive]
    if state["buffers"] is not None and len(state["buffers"]):
        new["buffers"] = merge_buffers(method, layout.buffers, federation, came, state["buffers"])
    if state["integers"]:
        # counters: the largest, for a mean of integers means nothing
        new["integers"] = {k: torch.stack([p.integers[k] for p in came]).amax(0) for k in state["integers"]}
    return new


def _compact(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, in ascending order, moved to the top in place: a copy would need the memory of the matrix again."""
    for to, row in enumerate(rows):
        if to != row:
            matrix[to] = matrix[row]
    return matrix[: len(rows)]


def _bases(method: Method, state: State, clients: Sequence[str]) -> Tensor:
    """The vectors from which clients started (K x d); no copy where it is the same one for all."""
    if not state["personal"]:
        return method.server.dispatch(state["model"], state["rule"][ALL]).expand(len(clients), -1)
    keys = [client if client in state["personal"] else ALL for client in clients]
    return torch.stack([method.server.dispatch(model_of(state, key), state["rule"][key]) for key in keys])
