"""The server's part of a round as pure functions: dispatch, collect, server_step, and the tail of all server steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State, row_key
from fedloom.core.layout import Columns, Layout
from fedloom.core.updates import EVERYONE, Rows, Updates
from fedloom.federation.rounds import diagnostics
from fedloom.federation.rounds.federation import BuiltFederation
from fedloom.federation.rounds.messages import ALL, Message, Payload, believed, blank, nothing, pack_tasks
from fedloom.federation.rounds.recovery import Agree, careful, nothing_came, usable
from fedloom.federation.runs.reader import DIAGNOSTICS
from fedloom.methods.method import Method


def server_init(method: Method, layout: Layout, initial: Tensor, integers: Mapping[str, Tensor]) -> State:
    """The server's state before the first round; `initial` is the whole model vector (parameters, buffers), of which
    the state has views.

    With task vectors "tasks" are vectors by task: differences to the initial model.
    """
    params = layout.parameters
    shared = method.shared_part(layout)
    model = params.take(initial[: params.d], shared)
    return {
        "model": model,
        "personal": {},
        **({"tasks": {}} if method.task_vectors else {}),
        "stage": method.stage.init(shared),
        "rule": {ALL: method.server.init(model)},
        "buffers": layout.buffers.take(initial[params.d :], method.shared_buffers(layout))
        if method.buffers != "local"
        else None,
        "integers": {k: v.clone() for k, v in integers.items()} if method.buffers != "local" else {},
    }


def model_of(state: State, client: str) -> Tensor:
    """The server's model for a client: its personal one if there is one, else the global one."""
    personal: Tensor = state["personal"].get(client, state["model"])
    return personal


def dispatch(
    method: Method, layout: Layout, federation: BuiltFederation, state: State, clients: Iterable[str]
) -> dict[str, Message]:
    """What the server sends to each client. Clients that get the same vector get the same tensor."""
    if method.task_vectors:
        held = {client: federation.client(client).tasks for client in clients}
        packed: dict[tuple[str, ...], Message] = {}
        for client, tasks in held.items():
            if (*tasks,) not in packed:
                packed[*tasks,] = pack_tasks(method, layout, federation, state, client, tasks)
        return {client: packed[*tasks,] for client, tasks in held.items()}
    keys = {client: client if client in state["personal"] else ALL for client in clients}
    has_it = method.turn.start == "own"
    vectors = {key: None if has_it and key != ALL else _sent(method, state, key) for key in {*keys.values()}}
    heard = _broadcast(method, state, list(keys)) if any(rule.needs for rule in method.rules) else {}
    rest = state["buffers"], state["integers"]
    return {client: Message(vectors[key], *rest, heard.get(client, {})) for client, key in keys.items()}


def _broadcast(method: Method, state: State, clients: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """What the rules of these clients need of the stages."""
    needed = frozenset[str]().union(*(rule.needs for rule in method.rules))
    every = method.stage.broadcast(state["stage"], clients, state["personal"])
    return {c: {name: v for name, v in mine.items() if f"broadcast:{name}" in needed} for c, mine in every.items()}


def _sent(method: Method, state: State, key: str) -> Tensor:
    """The vector that is sent to a client, or to all who have no model of their own (ALL)."""
    return method.server.dispatch(model_of(state, key), state["rule"][key])


def collect(
    method: Method,
    layout: Layout,
    federation: BuiltFederation,
    payloads: Iterable[Payload],
    rows: Sequence[Row],
    dtype: torch.dtype = torch.float32,
) -> tuple[Updates, list[Payload]]:
    """The matrix of the round from payloads in any order; each payload is dropped once its row is written.

    `rows` are the expected keys; a client that fails or whose update is not finite leaves no row.
    """
    shared, keys = method.shared_part(layout), tuple(sorted(rows, key=row_key))
    expected, stays_packed = {row: i for i, row in enumerate(keys)}, method.codec.stays_packed
    X = torch.zeros(0 if stays_packed else len(keys), shared.d, dtype=dtype)
    beside = {name: torch.zeros_like(X) for name in method.auxiliary}
    parts, came = dict[int, tuple[Mapping[str, Tensor], Updates]](), dict[int, Payload]()
    for payload in payloads:
        if not payload.finite:
            continue
        if method.weights == "declared" or method.max_examples is not None:
            payload = believed(method, federation, payload)
        i, k = expected[payload.rows[0]], len(payload.rows)
        if stays_packed:
            parts[i] = payload.packed, blank(shared, federation, payload.rows, nothing(k, shared.d, dtype))
        elif payload.rows == keys[i : i + k]:
            place = X[i : i + k]
            unpacked = method.codec.unpack(payload.packed, blank(shared, federation, payload.rows, place))
            if unpacked is not place:  # else they are there already
                place.copy_(unpacked)
        else:  # some of its rows are missing
            like = blank(shared, federation, payload.rows, X.new_zeros(k, shared.d))
            X[[expected[row] for row in payload.rows]] = method.codec.unpack(payload.packed, like)
        for name, matrix in beside.items():
            matrix[i] = payload.auxiliary[name]
        buffers = None if payload.buffers is None else payload.buffers.to(dtype)
        came[i] = replace(payload, packed={}, auxiliary={}, buffers=buffers)
        del payload  # before the next one arrives
    ordered = [came[i] for i in sorted(came)]
    if parts:
        packed = method.codec.gather([parts[i] for i in sorted(parts)])
        return assembled(method, federation, shared, ordered, packed, beside), ordered
    if sum(len(payload.rows) for payload in ordered) < len(keys):
        here = [expected[row] for payload in ordered for row in payload.rows]
        X, beside = _compact(X, here), {name: _compact(matrix, here) for name, matrix in beside.items()}
    return assembled(method, federation, shared, ordered, X, beside), ordered


def assembled(
    method: Method,
    federation: BuiltFederation,
    shared: Layout,
    payloads: Sequence[Payload],
    X: Tensor | Rows,
    auxiliary: Mapping[str, Tensor],
) -> Updates:
    """Rows X with the other values of the payloads, which are in the order of the rows."""
    rows = tuple(row for payload in payloads for row in payload.rows)
    n = torch.tensor([size for payload in payloads for size in payload.sizes], dtype=torch.float64)
    weight = torch.ones_like(n) if method.weights == "uniform" else n.clone()
    present = None if _all_present(method, federation) else _presence(federation, shared, payloads)
    support = _support(shared, payloads) if method.wants_support else None
    extra = _extras(payloads) if payloads and payloads[0].extra else {}
    return Updates(shared, rows, X, n, weight, None, present, extra, auxiliary=auxiliary, support=support)


def _all_present(method: Method, federation: BuiltFederation) -> bool:
    """Whether every row has all blocks."""
    return federation.unified and not method.turn.by_task


def _presence(federation: BuiltFederation, shared: Layout, payloads: Sequence[Payload]) -> Tensor:
    """Which blocks the rows have (K x blocks)."""
    masks = [federation.present(federation.client(p.row[0]), shared, tuple(p.tasks)) for p in payloads]
    return torch.cat([m for m in masks if m is not None]) if masks else torch.zeros(0, len(shared.blocks)).bool()


def _support(shared: Layout, payloads: Sequence[Payload]) -> Tensor:
    """Which blocks the rows' training changed (K x blocks)."""
    rows = [p.support.view(-1, len(shared.blocks)) for p in payloads if p.support is not None]
    return torch.cat(rows).bool() if rows else torch.zeros(0, len(shared.blocks)).bool()


def _extras(payloads: Sequence[Payload]) -> dict[str, Any]:
    """The extras of the rows: name -> K values."""
    extra: dict[str, Any] = {}
    for name in payloads[0].extra:
        extra[name] = [v for p in payloads for v in (p.extra[name] if p.tasks else [p.extra[name]])]
    return extra


def server_step(
    method: Method,
    layout: Layout,
    federation: BuiltFederation,
    payloads: Iterable[Payload],
    state: State,
    ctx: Ctx,
    starts: Mapping[str, Tensor] | None = None,
) -> State:
    """The server's (or a peer's) part of a round. `ctx.targets` are the participants.

    `starts` are the vectors from which clients started, if they are not in the state. Rows with nan or inf are dropped
    and logged; if none is left, or the round fails, the models stay as they were (see `recovery.py`).
    """
    updates, came = collect(method, layout, federation, payloads, ctx.targets or (), state["model"].dtype)

    def start(clients: Sequence[str]) -> Tensor:
        return bases(method, state, clients) if starts is None else torch.stack([starts[c] for c in clients])

    return aggregated(method, layout, federation, updates, came, state, ctx, start)


def aggregated(
    method: Method,
    layout: Layout,
    federation: BuiltFederation,
    updates: Updates,
    came: Sequence[Payload],
    state: State,
    ctx: Ctx,
    start: Callable[[Sequence[str]], Tensor],
    back: Callable[[Updates], Iterable[tuple[Row, Tensor]]] = lambda out: zip(out.rows, out.vectors(), strict=True),
    agree: Agree = lambda why: why,
) -> State:
    """The tail of every server step: the state after the stages, the server rule and the judgement of what came out.

    `start` gives the vectors from which clients started, `back` the whole rows of a result, where these are several
    processes'; `agree` makes known to all what one of them found.
    """
    hides = method.stage.traits.hides
    updates, sizes = usable(updates, came, ctx)
    if not len(updates) and not hides:
        return nothing_came(state, ctx)
    if "base" in method.stage.traits.reads:
        updates = updates.replace(base=start([client for client, _ in updates.rows]))

    def step(updates: Updates, came: Sequence[Payload], ctx: Ctx) -> State:
        out, stage = method.stage(updates, state["stage"], ctx)
        if len(updates) and (ctx.peer is None or diagnostics.looks(ctx.peer, ctx.population, ctx.round)):
            ctx.record(DIAGNOSTICS, partial(diagnostics.look, updates, out, ctx.peer))
        return settled(method, layout, federation, {**state, "stage": stage}, back(out), came)

    # how long rows are usually is their own secret, too
    return careful(updates, {} if hides else sizes, came, state, ctx, step, method.stage, agree)


def settled(
    method: Method,
    layout: Layout,
    federation: BuiltFederation,
    state: State,
    rows: Iterable[tuple[Row, Tensor]],
    came: Sequence[Payload],
) -> State:
    """The server's state after the models have moved by the stages' result (rows and keys), with new buffers.

    Blocks that no row of the round has stay as they are, and so does what the server rule remembers of them: for them
    this was a round in which nobody took part.
    """
    new = {**state, "personal": dict(state["personal"]), "rule": dict(state["rule"])}
    if method.task_vectors:
        rows = list(rows)
        # views keep the whole matrix alive, so they are only used if they replace every vector
        whole = len(rows) == len(federation.tasks)
        vectors = {str(task): x if whole else x.clone() for (_, task), x in rows}
        return {**new, "tasks": {**state["tasks"], **vectors}}
    still = () if _all_present(method, federation) else _still(method, federation, method.shared_part(layout), came)
    for key, update in rows:
        # a row for everyone also moves the personal models
        for name in (ALL, *state["personal"]) if key == EVERYONE else (key[0],):
            before = state["model"] if name == ALL else model_of(state, name)
            memory = state["rule"].get(name) or method.server.init(before)
            after, new["rule"][name] = method.server.apply(before, update, memory)
            for s in still:
                after[s] = before[s]
                for what, value in new["rule"][name].items():
                    if isinstance(value, Tensor) and value.shape == after.shape:
                        value[s] = memory[what][s]
            if name == ALL:
                new["model"] = after
            else:
                new["personal"][name] = after
    if state["buffers"] is not None and len(state["buffers"]):
        new["buffers"] = merge_buffers(method, method.shared_buffers(layout), federation, came, state["buffers"])
    if state["integers"]:
        # counters: the largest, because a mean of integers means nothing
        new["integers"] = {k: torch.stack([p.integers[k] for p in came]).amax(0) for k in state["integers"]}
    return new


def _still(
    method: Method, federation: BuiltFederation, shared: Layout, payloads: Sequence[Payload]
) -> tuple[Columns, ...]:
    """Columns that no row has."""
    if method.stage.traits.hides:
        return ()
    present = _presence(federation, shared, payloads)
    nobody = Layout(tuple(b for b, there in zip(shared.blocks, present.any(0).tolist(), strict=True) if not there))
    return shared.spans(nobody)


def merge_buffers(
    method: Method, layout: Layout, federation: BuiltFederation, payloads: Sequence[Payload], before: Tensor
) -> Tensor:
    """Weighted mean, or pooled statistics, of float buffers over the clients that trained the block's task.

    A block that no client trained keeps its value. pooled: variance = mean of variances + variance of means.
    """
    merged = before.clone()
    means: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for block, s in zip(layout.blocks, layout.slices, strict=True):
        who = [p for p in payloads if block.task is None or block.task in federation.client(p.row[0]).tasks]
        if not who:
            continue
        w = torch.tensor([1.0 if method.weights == "uniform" else p.n for p in who], dtype=torch.float64)
        values = torch.stack([p.buffers[s] for p in who if p.buffers is not None])
        p_k = (w / w.sum()).to(values)
        # what is the same everywhere, as frozen statistics are, stays so to the last bit
        merged[s] = torch.where((values == values[0]).all(0), values[0], p_k @ values)
        prefix, _, kind = block.name.rpartition(".")
        if kind == "running_mean":
            means[prefix] = (p_k, values, merged[s])
        elif kind == "running_var" and method.buffers == "pooled" and prefix in means:
            p_k, mu, centre = means[prefix]
            merged[s] += p_k @ (mu - centre) ** 2
    return merged


def _compact(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows, in ascending order, moved to the top in place: a copy would need the matrix's memory again."""
    for to, row in enumerate(rows):
        if to != row:
            matrix[to] = matrix[row]
    return matrix[: len(rows)]


def bases(method: Method, state: State, clients: Sequence[str]) -> Tensor:
    """The vectors from which clients started (K x d); not copied if all started from the same one."""
    if not state["personal"]:
        return _sent(method, state, ALL).expand(len(clients), -1)
    keys = [client if client in state["personal"] else ALL for client in clients]
    return torch.stack([_sent(method, state, key) for key in keys])
