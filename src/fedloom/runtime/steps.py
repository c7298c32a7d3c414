"""The three pure functions that every runner uses: client_step, server_step, dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.context import Ctx, Row, derive_seed
from fedloom.methods.method import Method
from fedloom.runtime import diagnostics
from fedloom.runtime.buffers import merge_buffers
from fedloom.runtime.evaluation import evaluate, example_losses
from fedloom.runtime.federation import Client, Federation
from fedloom.runtime.state import map_tensors
from fedloom.stages.peer import AtPeer
from fedloom.stages.stage import State
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult, train
from fedloom.training.phases import Phase
from fedloom.training.rules import LocalRule
from fedloom.updates import EVERYONE, Layout, Listed, Rows, Updates

ALL = EVERYONE[0]


@dataclass(frozen=True, eq=False)
class Message:
    """From the server to one client: the shared parameters, the buffers unless they are local, and what stages tell.

    `vector` is None where the client goes on from its own model, which it has, and where rows are (client, task):
    then `packed` has the vectors of `tasks`; a task that is not among them starts from the initial model.
    """

    vector: Tensor | None
    buffers: Tensor | None = None
    integers: Mapping[str, Tensor] = field(default_factory=dict)
    told: Mapping[str, Tensor] = field(default_factory=dict)
    packed: Mapping[str, Tensor] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Payload:
    """From one client to the server: packed updates, number of examples, extras, side vectors, buffers.

    `finite` is False where local training produced nan or inf; the payload is then empty. Where rows are (client,
    task), `tasks` are the number of examples of each row, an extra is a list and support a matrix of as many rows.
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
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The keys of the rows in it."""
        return tuple((self.row[0], task) for task in self.tasks) or (self.row,)

    @property
    def sizes(self) -> tuple[float, ...]:
        """Number of examples of each row."""
        return tuple(self.tasks.values()) or (self.n,)


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
    beside = _local(
        method, model, client, ctx, training, f"{client.id}/personal", method.stream.rules, memory, {"anchor": base}
    )
    new["personal"] = memory
    if bool(torch.isfinite(model.vector).all()):
        new["personal"] = _personal(model, model.params, {"rules": beside.rules, "optimizer": beside.optimizer})
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
    """Load what was received and train; (result, parameters at the start). The trained model is left in `model`."""
    load(method, model, received, state)
    base = model.params.clone()
    layout, shared = model.layout.parameters, method.shared_part(model.layout)

    def everywhere(told: Tensor) -> Tensor:
        told = told.to(model.device)
        return layout.put(torch.zeros_like(base), shared, told) if told.ndim == 1 else told

    told = {name: everywhere(value) for name, value in received.told.items()}
    result = _local(method, model, client, ctx, training, who, method.local, state, told, method.phases)
    return result, base


def _local(
    method: Method,
    model: FlatModel,
    client: Client,
    ctx: Ctx,
    training: Training,
    who: str,
    rules: Sequence[LocalRule],
    memory: State,
    told: Mapping[str, Tensor],
    phases: tuple[Phase, ...] = (),
) -> LocalResult:
    """Local training of the loaded model; `who` names the streams of random numbers."""

    def validate() -> dict[str, float]:
        part = client.part("val")
        scores = evaluate(model, part, {name: task for name, (task, _) in client.tasks.items()}, training.batch_size)
        model.module.train()
        return {name: score["loss"] for name, score in scores.items()}

    def losses() -> Tensor:
        each = example_losses(model, client.train, client.tasks, training.batch_size)
        model.module.train()
        return each

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
            model.spans(method.shared_part(model.layout)),
            rules,
            map_tensors(memory["rules"], lambda t: t.to(model.device)) if "rules" in memory else None,
            memory.get("optimizer"),
            told,
            phases,
            validate,
            losses,
            client.train.partial(client.tasks),
        )


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
    """A client's part of a round where each of its tasks is trained alone, from the task's own vector."""
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
    rows_support = torch.stack(support) if "support" in method.extras else None
    return replace(payload, row=row, n=len(client.train), support=rows_support, tasks=sizes), merged, new


def task_messages(
    method: Method, model: FlatModel, federation: Federation, client: str, received: Message
) -> dict[str, Message]:
    """What a client received, as a message with a whole vector for each of its tasks."""
    params, shared = model.layout.parameters, method.shared_part(model.layout)
    origin = params.take(model.initial[: params.d], shared).to("cpu")
    start = dict.fromkeys(federation.clients[client].tasks, origin)
    if received.tasks:
        X = torch.zeros(len(received.tasks), shared.d, dtype=origin.dtype)
        rows = tuple((client, task) for task in received.tasks)
        X = method.codec.unpack(received.packed, blank(shared, federation, rows, X))
        start |= {task: origin + x for task, x in zip(received.tasks, X, strict=True)}
    return {task: Message(vector, received.buffers, received.integers) for task, vector in start.items()}


def for_task(
    method: Method, model: FlatModel, federation: Federation, client: str, received: Message, task: str | None
) -> Message:
    """A message with the whole vector of one task; as it is where tasks have no models of their own."""
    return received if task is None else task_messages(method, model, federation, client, received)[task]


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
        layout.buffers.put(model.buffers, method.shared_buffers(layout), buffers.to(model.device))
    if "private_buffers" in state:
        own = layout.buffers.without(method.shared_buffers(layout))
        layout.buffers.put(model.buffers, own, state["private_buffers"].to(model.device))
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
        # with what the server is told, so that both have the same model
        new["own"] = (params.take(base, shared) + sent[0]).to(torch.device("cpu"))
    # where they stay with the client, `_kept` has copied them
    buffers, integers = _state_buffers(method, model) if method.buffers != "local" else (None, {})
    payload = replace(
        payload,
        extra={name: values[0] for name, values in payload.extra.items()},
        side={name: params.take(result.extra[name], shared).to("cpu") for name in method.side},
        support=_support(model, shared, tuple(client.tasks)) if "support" in method.extras else None,
        buffers=buffers,
        integers=integers,
    )
    return payload, result, new


def _finite(model: FlatModel, base: Tensor) -> bool:
    """Whether what was trained is finite."""
    return bool(torch.isfinite(model.params - base).all() & torch.isfinite(model.buffers).all())


def _state_buffers(method: Method, model: FlatModel) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Copies of the float buffers that may leave the client, and of integer buffers."""
    layout = model.layout.buffers
    shared = layout.take(model.buffers, method.shared_buffers(model.layout))
    buffers = shared.to("cpu", copy=True) if len(shared) else None
    return buffers, {name: b.to("cpu", copy=True) for name, b in model.integers.items()}


def _kept(method: Method, model: FlatModel, base: Tensor, state: State, result: LocalResult) -> State:
    """What a client keeps of a round for the next one in which it takes part; stages at the client add theirs."""
    params, private = model.layout.parameters, method.private_part(model.layout)
    cpu = torch.device("cpu")
    new: State = {}
    if private.blocks:
        # start + update, as every server computes it: so local training is exactly mixing with the identity
        delta = model.params - base
        new["private"] = (params.take(base, private) + params.take(delta, private)).to(cpu, copy=True)
    if result.optimizer:
        new["optimizer"] = result.optimizer
    if method.local:
        new["rules"] = map_tensors(result.rules, lambda t: t.to(cpu))
    for i, rule in enumerate(method.local):
        if (personal := rule.personal(result.rules[str(i)])) is not None:
            new["personal"] = _personal(model, personal)
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
    """Which blocks got a gradient in training these tasks."""
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
    """A client's rows through the stages at the client and the codec: (payload, the stages' state, rows before it)."""
    n = torch.tensor([float(size) for size in sizes], dtype=torch.float64)
    updates = Updates(shared, rows, X, n, n.clone(), present=present, extra=extra)
    updates, state = method.edge(updates, edge or method.edge.init(shared), ctx)
    packed = {k: v.to("cpu") for k, v in method.codec.pack(updates).items()}
    return Payload(rows[0], float(n.sum()), packed, dict(updates.extra)), state, updates.X


def server_init(method: Method, layout: Layout, initial: Tensor, integers: Mapping[str, Tensor]) -> State:
    """The server's state before the first round; `initial` is the whole model vector (parameters, buffers).

    "tasks" are vectors by task, where rows are (client, task): differences to the initial model.
    """
    params = layout.parameters
    shared = method.shared_part(layout)
    model = params.take(initial[: params.d], shared).clone()
    return {
        "model": model,
        "personal": {},
        **({"tasks": {}} if method.rows == "client-task" else {}),
        "stage": method.stage.init(shared),
        "rule": {ALL: method.server.init(model)},
        "buffers": layout.buffers.take(initial[params.d :], method.shared_buffers(layout)).clone()
        if method.buffers != "local"
        else None,
        "integers": {k: v.clone() for k, v in integers.items()} if method.buffers != "local" else {},
    }


def model_of(state: State, client: str) -> Tensor:
    """The server's model for a client: its personal one where there is one, else the global one."""
    personal: Tensor = state["personal"].get(client, state["model"])
    return personal


def dispatch(
    method: Method, layout: Layout, federation: Federation, state: State, clients: Iterable[str]
) -> dict[str, Message]:
    """What the server sends to each client. Clients that get the same vector get the same tensor."""
    clients = list(clients)
    if method.rows == "client-task":
        held = {client: federation.clients[client].tasks for client in clients}
        return {client: pack_tasks(method, layout, federation, state, client, tasks) for client, tasks in held.items()}
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


def pack_tasks(
    method: Method, layout: Layout, federation: Federation, state: State, client: str, tasks: Iterable[str]
) -> Message:
    """The vectors of some tasks, packed as the client's own will be; nothing of tasks that have none yet."""
    tasks = tuple(task for task in sorted(tasks) if task in state["tasks"])
    packed: Mapping[str, Tensor] = {}
    if tasks:
        vectors = Listed(tuple(state["tasks"][task] for task in tasks))
        rows = tuple((client, task) for task in tasks)
        packed = method.codec.pack(blank(method.shared_part(layout), federation, rows, vectors))
    return Message(None, state["buffers"], state["integers"], packed=packed, tasks=tasks)


def rows_of(method: Method, federation: Federation, clients: Iterable[str]) -> tuple[Row, ...]:
    """The rows that these clients will send."""
    if method.rows == "client":
        return tuple((client, None) for client in clients)
    return tuple((client, task) for client in clients for task in sorted(federation.clients[client].tasks))


def blank(shared: Layout, federation: Federation, rows: tuple[Row, ...], X: Tensor | Rows) -> Updates:
    """Rows X of one client with its presence: what a codec fills, from zeros, or packs."""
    ones = torch.ones(len(rows), dtype=torch.float64)
    tasks = tuple(task for _, task in rows if task is not None)
    present = federation.present(federation.clients[rows[0][0]], shared, tasks)
    return Updates(shared, rows, X, ones, ones, present=present)


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
    expected = {row: i for i, row in enumerate(sorted(rows, key=lambda r: (r[0], r[1] or "")))}
    stays_packed = method.codec.stays_packed
    X = torch.zeros(0 if stays_packed else len(expected), shared.d, dtype=dtype)
    beside = {name: torch.zeros_like(X) for name in method.side}
    parts: dict[int, tuple[Mapping[str, Tensor], Updates]] = {}
    came: dict[int, Payload] = {}
    for payload in payloads:
        if not payload.finite:
            continue
        i, k = expected[payload.rows[0]], len(payload.rows)
        if stays_packed:
            nothing = torch.zeros(1, 1, dtype=dtype).expand(k, shared.d)
            parts[i] = payload.packed, blank(shared, federation, payload.rows, nothing)
        elif payload.rows == tuple(expected)[i : i + k]:
            like = blank(shared, federation, payload.rows, X[i : i + k])
            X[i : i + k] = method.codec.unpack(payload.packed, like)
        else:  # some of its rows did not come
            like = blank(shared, federation, payload.rows, X.new_zeros(k, shared.d))
            X[[expected[row] for row in payload.rows]] = method.codec.unpack(payload.packed, like)
        for name, matrix in beside.items():
            matrix[i] = payload.side[name]
        came[i] = Payload(**{**vars(payload), "packed": {}, "side": {}})
        del payload  # before the next one is made
    ordered = [came[i] for i in sorted(came)]
    here = [expected[row] for payload in ordered for row in payload.rows]
    given = method.codec.gather([parts[i] for i in sorted(parts)]) if parts else None
    if given is None and len(here) < len(expected):
        X, beside = _compact(X, here), {name: _compact(matrix, here) for name, matrix in beside.items()}
    return assembled(method, federation, shared, ordered, X if given is None else given, beside), ordered


def assembled(
    method: Method,
    federation: Federation,
    shared: Layout,
    payloads: Sequence[Payload],
    X: Tensor | Rows,
    side: Mapping[str, Tensor],
) -> Updates:
    """Rows X with what came beside them in the payloads, which are in their order."""
    n = torch.tensor([size for payload in payloads for size in payload.sizes], dtype=torch.float64)
    return Updates(
        shared,
        tuple(row for payload in payloads for row in payload.rows),
        X,
        n,
        n.clone() if method.weights == "size" else torch.ones_like(n),
        present=_presence(method, federation, shared, payloads),
        extra=_extras(method, shared, payloads),
        side=side,
    )


def _presence(method: Method, federation: Federation, shared: Layout, payloads: Sequence[Payload]) -> Tensor | None:
    """Which blocks the rows have (K x blocks), or None for all."""
    if federation.unified and method.rows == "client":
        return None
    masks = [federation.present(federation.clients[p.row[0]], shared, tuple(p.tasks)) for p in payloads]
    return torch.cat([m for m in masks if m is not None]) if masks else torch.zeros(0, len(shared.blocks)).bool()


def _extras(method: Method, shared: Layout, payloads: Sequence[Payload]) -> dict[str, Any]:
    """What came beside the rows: name -> K values."""
    extra: dict[str, Any] = {}
    for name in payloads[0].extra if payloads else ():
        extra[name] = [v for p in payloads for v in (p.extra[name] if p.tasks else [p.extra[name]])]
    if "support" in method.extras:
        blocks = len(shared.blocks)
        rows = [p.support.view(-1, blocks) for p in payloads if p.support is not None]
        extra["support"] = torch.cat(rows) if rows else torch.zeros(0, blocks)
    return extra


def server_step(
    method: Method,
    layout: Layout,
    federation: Federation,
    payloads: Iterable[Payload],
    state: State,
    ctx: Ctx,
    starts: Mapping[str, Tensor] | None = None,
) -> State:
    """The server's (or a peer's) part of a round. `ctx.targets` are the participants.

    `starts` are the vectors from which clients started, where it is not the state that says so. Rows with nan or inf
    are dropped and logged; if none is left the state stays as it was.
    """
    updates, came = collect(method, layout, federation, payloads, ctx.targets or (), state["model"].dtype)
    updates = finite_rows(updates, ctx)
    if not len(updates):
        return state
    alive = {client for client, _ in updates.rows}
    if "base" in method.stage.reads:
        clients = [client for client, _ in updates.rows]
        base = bases(method, state, clients) if starts is None else torch.stack([starts[c] for c in clients])
        updates = updates.replace(base=base)
    out, stage = method.stage(updates, state["stage"], ctx)
    peer = method.stage.own if isinstance(method.stage, AtPeer) else None
    if peer is None or diagnostics.looks(peer, ctx.population, ctx.round):
        ctx.record(diagnostics.KIND, partial(diagnostics.look, updates, out, peer))
    del updates  # the matrix is not needed any more, and there may be a model for each row below
    came = [p for p in came if p.row[0] in alive]
    return settled(method, layout, federation, {**state, "stage": stage}, zip(out.rows, out.X, strict=True), came)


def finite_rows(updates: Updates, ctx: Ctx) -> Updates:
    """Without rows that have nan or inf, which are logged."""
    updates, dropped = updates.finite()
    for client, task in dropped:
        about = {"client": client} if task is None else {"client": client, "task": task}
        ctx.log("update dropped", {**about, "why": "not finite after the client's stages"})
    return updates


def settled(
    method: Method,
    layout: Layout,
    federation: Federation,
    state: State,
    rows: Iterable[tuple[Row, Tensor]],
    came: Sequence[Payload],
) -> State:
    """The server's state with models moved by what the stages left (rows and their keys), and with new buffers."""
    new = {**state, "personal": dict(state["personal"]), "rule": dict(state["rule"])}
    if method.rows == "client-task":
        rows = list(rows)
        # views keep the whole matrix alive, so they are only good where they replace every vector
        every = len(rows) == len(federation.tasks)
        vectors = {str(task): x if every else x.clone() for (_, task), x in rows}
        return {**new, "tasks": {**state["tasks"], **vectors}}
    for key, update in rows:
        # what is meant for everyone also moves the personal models
        for name in (ALL, *state["personal"]) if key == EVERYONE else (key[0],):
            before = state["model"] if name == ALL else model_of(state, name)
            memory = state["rule"].get(name) or method.server.init(before)
            after, new["rule"][name] = method.server.apply(before, update, memory)
            if name == ALL:
                new["model"] = after
            else:
                new["personal"][name] = after
    if state["buffers"] is not None and len(state["buffers"]):
        new["buffers"] = merge_buffers(method, method.shared_buffers(layout), federation, came, state["buffers"])
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


def bases(method: Method, state: State, clients: Sequence[str]) -> Tensor:
    """The vectors from which clients started (K x d); no copy where it is the same one for all."""
    if not state["personal"]:
        return method.server.dispatch(state["model"], state["rule"][ALL]).expand(len(clients), -1)
    keys = [client if client in state["personal"] else ALL for client in clients]
    return torch.stack([method.server.dispatch(model_of(state, key), state["rule"][key]) for key in keys])
