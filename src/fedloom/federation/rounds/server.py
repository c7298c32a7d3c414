"""The server's part of a round as pure functions: dispatch, collect, server_step, and the tail of all server steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State, seeded
from fedloom.core.layout import Columns, Layout, pieces
from fedloom.core.server import ServerRule
from fedloom.core.updates import EVERYONE, Rows, RowsNeededError, Summed, Updates
from fedloom.federation.rounds import diagnostics
from fedloom.federation.rounds.federation import Common
from fedloom.federation.rounds.messages import ALL, Message, Payload, blank, clip_counts, nothing, pack_tasks, unpacked
from fedloom.federation.rounds.recovery import Agree, nothing_received, reject_outliers, usable
from fedloom.federation.runs.checkpoint import tensors_in
from fedloom.federation.runs.reader import DIAGNOSTICS
from fedloom.methods.method import Method


def server_init(
    method: Method, layout: Layout, initial: Tensor, integers: Mapping[str, Tensor], seed: int = 0
) -> State:
    """Return the server's state before the first round, in a run of this seed, with views of the vector `initial`.

    With task vectors "tasks" are vectors by task, differences to it, and "task_buffers" their models' float buffers.
    """
    params, local = layout.parameters, method.buffers == "local"
    shared = method.shared_part(layout)
    model = params.take(initial[: params.d], shared)
    with seeded(seed, "stage"):
        stage = method.stage.init(shared)
    return {
        "model": model,
        "personal": {},
        **({"tasks": {}, "task_buffers": {}} if method.task_vectors else {}),
        "stage": stage,
        "rule": {ALL: method.server.init(model)},
        "buffers": None if local else layout.buffers.take(initial[params.d :], method.shared_buffers(layout)),
        "integers": {} if local else {name: value.clone() for name, value in integers.items()},
    }


def model_of(state: State, client: str) -> Tensor:
    """Return the server's model for a client: its personal one if there is one, else the global one."""
    return cast(Tensor, state["personal"].get(client, state["model"]))


def dispatch(common: Common, state: State, clients: Iterable[str]) -> dict[str, Message]:
    """Return the message of the server to each client. Clients that get the same vector get the same tensor."""
    if (method := common.method).task_vectors:
        tasks_of = {client: tuple(common.federation.client(client).tasks) for client in clients}
        one_with = {tasks: client for client, tasks in tasks_of.items()}
        packed = {tasks: pack_tasks(common, state, client, tasks) for tasks, client in one_with.items()}
        return {client: packed[tasks] for client, tasks in tasks_of.items()}
    keys = {client: client if client in state["personal"] else ALL for client in clients}
    has_own = method.turn.start == "own"  # then a client has its personal model already
    vectors = {key: None if has_own and key != ALL else _sent(method, state, key) for key in {*keys.values()}}
    broadcast = _broadcast(method, state, list(keys)) if any(rule.needs for rule in method.rules) else {}
    same = {key: Message(vector, state["buffers"], state["integers"]) for key, vector in vectors.items()}
    return {c: replace(same[key], broadcast=broadcast[c]) if c in broadcast else same[key] for c, key in keys.items()}


def _broadcast(method: Method, state: State, clients: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return what the rules of these clients need of the stages."""
    needed = frozenset[str]().union(*(rule.needs for rule in method.rules))
    every = method.stage.broadcast(state["stage"], clients, state["personal"])
    return {c: {name: v for name, v in mine.items() if f"broadcast:{name}" in needed} for c, mine in every.items()}


def _sent(method: Method, state: State, key: str) -> Tensor:
    """Return the vector that is sent to a client, or to all that have no model of their own (ALL)."""
    return method.server.dispatch(model_of(state, key), state["rule"][key])


TINY = 1 << 12
"""Rows of models of at most so many bytes are unpacked together, where the codec can."""


def collect(
    common: Common, payloads: Iterable[Payload], rows: Sequence[Row], dtype: torch.dtype = torch.float32
) -> tuple[Updates, list[Payload]]:
    """Return the matrix of the round, whose keys are among `rows`, and the payloads without what went into it."""
    method, federation, shared, keys = common.method, common.federation, common.shared, sorted(rows)
    if method.codec.stays_packed:
        return _collect_packed(common, payloads, dtype)
    expected, received = {row: i for i, row in enumerate(keys)}, dict[int, Payload]()
    X = torch.zeros(len(keys), shared.d, dtype=dtype)
    beside, waiting = {name: torch.zeros_like(X) for name in method.auxiliary}, dict[int, Mapping[str, Tensor]]()
    # by the size of the whole model, because the shared part of its update may be a view of all of it
    tiny = 4 * common.layout.parameters.d <= TINY and method.codec.unpacks_each and federation.whole(shared)
    for payload in payloads:
        if not payload.finite:
            continue
        mine, i = payload.rows, expected[payload.rows[0]]
        if tiny and not payload.tasks:
            waiting[i] = payload.packed
        elif mine == (*keys[i : i + len(mine)],):
            place = X[i : i + len(mine)]  # codecs may fill it without a copy in between
            place.copy_(method.codec.unpack(payload.packed, blank(shared, federation, mine, place)))
        else:  # some of its rows are missing
            like = blank(shared, federation, mine, X.new_zeros(len(mine), shared.d))
            X[[expected[row] for row in mine]] = method.codec.unpack(payload.packed, like)
        for name, matrix in beside.items():
            matrix[i] = payload.auxiliary[name]
        received[i] = _beside_rows(common, payload, dtype)
        del payload  # an update is as large as the model: let go of it before the next one arrives
    if waiting:
        X[[*waiting]] = method.codec.unpack_each([*waiting.values()])
    ordered = [received[i] for i in sorted(received)]
    if sum(len(payload.rows) for payload in ordered) < len(keys):
        here = [expected[row] for payload in ordered for row in payload.rows]
        X, beside = _compact(X, here), {name: _compact(matrix, here) for name, matrix in beside.items()}
    return assembled(common, shared, ordered, X, beside), ordered


WHOLE = 64 << 20
"""A matrix of at most so many bytes is always kept."""
Move = Callable[[Tensor, Tensor, State], tuple[Tensor, State]]
"""Makes a new model, and a rule's new memory, of a model, an update and the memory."""
Reuse = tuple[Tensor | None, diagnostics.Read | None, Move | None]
"""The matrix whose rows become the new models, what diagnostics read of it, and the server rule there."""
KEPT: Reuse = (None, None, None)


def adds_up(common: Common, rows: int) -> bool:
    """Return whether the server may add so many rows up as they come: the stage only sums, and a matrix would be large.

    Sums of rows one by one differ from those of a matrix by rounding: sum_k p_k |X_ki| (K + 2) 2^-23 at most.
    """
    fields = common.method.auxiliary or common.method.wants_support
    return common.method.stage.traits.sums and not fields and 4 * rows * common.shared.d > WHOLE


def summed(
    common: Common, payloads: Iterable[Payload], rows: Sequence[Row], dtype: torch.dtype = torch.float32
) -> tuple[Updates, list[Payload]]:
    """Return what `collect` does, but rows are added up in the order of the payloads, and none is kept."""
    shared = common.shared
    columns = diagnostics.looked_at(shared, len(rows))[-1]
    total, unit = None, 1.0
    came: dict[Row, tuple[Payload, Tensor, Tensor, Tensor]] = {}
    for payload in payloads:
        if not payload.finite:
            continue
        X = unpacked(common, payload.rows, payload.packed, dtype)[0]
        known = _beside_rows(common, payload, dtype)
        one = assembled(common, shared, [known], X, {})
        shares = common.method.stage.row_weights(one)
        for i, (size, share) in enumerate(zip(one.norms.tolist(), shares.tolist(), strict=True)):
            if share and math.isfinite(size):
                if total is None:
                    total, unit = X[i].clone(), share
                else:
                    total.add_(X[i], alpha=share / unit)
        came[payload.rows[0]] = known, shares, one.norms, X.index_select(1, columns)
        del payload, X, one  # as in `collect`
    ordered = [came[row] for row in sorted(came)]
    received = [known for known, *_ in ordered]
    none = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), torch.zeros(0, len(columns))
    shares, sizes, looked = map(torch.cat, zip(none, *(values for _, *values in ordered), strict=True))
    total = torch.zeros(shared.d, dtype=dtype) if total is None else total
    rest = Summed(shared, [total], unit, shares, sizes, len(rows), columns, looked.to(dtype))
    return assembled(common, shared, received, rest, {}), received


def _collect_packed(common: Common, payloads: Iterable[Payload], dtype: torch.dtype) -> tuple[Updates, list[Payload]]:
    """Return what `collect` does, with the rows as they were packed (`Codec.stays_packed`)."""
    shared = common.shared
    ordered = sorted((p for p in payloads if p.finite), key=lambda payload: payload.rows[0])
    rows = [blank(shared, common.federation, p.rows, nothing(len(p.rows), shared.d, dtype)) for p in ordered]
    received = [_beside_rows(common, payload, dtype) for payload in ordered]
    X: Tensor | Rows = torch.zeros(0, shared.d, dtype=dtype)
    if ordered:
        X = common.method.codec.gather([(payload.packed, like) for payload, like in zip(ordered, rows, strict=True)])
    return assembled(common, shared, received, X, {}), received


def _beside_rows(common: Common, payload: Payload, dtype: torch.dtype) -> Payload:
    """Return a payload without its rows, with the numbers of examples that count, and buffers of this dtype."""
    buffers = None if payload.buffers is None else payload.buffers.to(dtype)
    return replace(clip_counts(common, payload), packed={}, auxiliary={}, buffers=buffers)


def assembled(
    common: Common, shared: Layout, payloads: Sequence[Payload], X: Tensor | Rows, auxiliary: Mapping[str, Tensor]
) -> Updates:
    """Return rows X with the other values of the payloads, which are in the order of the rows."""
    rows = tuple(row for payload in payloads for row in payload.rows)
    n = torch.tensor([size for payload in payloads for size in payload.sizes], dtype=torch.float64)
    weight = torch.ones_like(n) if common.method.weights == "uniform" else n.clone()
    names, support = payloads[0].extra if payloads else (), None
    if common.method.wants_support:
        blocks = len(shared.blocks)
        masks = [p.support.view(-1, blocks) for p in payloads if p.support is not None]
        support = torch.cat(masks).bool() if masks else torch.zeros(0, blocks).bool()
    extra = {name: [v for p in payloads for v in (p.extra[name] if p.tasks else [p.extra[name]])] for name in names}
    present = common.federation.presence(shared, rows)
    return Updates(shared, rows, X, n, weight, None, present, extra, auxiliary=auxiliary, support=support)


def server_step(
    common: Common, payloads: Iterable[Payload], state: State, ctx: Ctx, starts: Mapping[str, Tensor] | None = None
) -> State:
    """Return the state after the server's (or a peer's) part of a round. `ctx.targets` are the participants.

    `starts` are the vectors from which clients started, if they are not in the state. Rows with nan or inf are dropped
    and logged; if none is left, or the round fails, the models stay as they were (see `recovery.py`).
    """
    updates, received = collect(common, payloads, ctx.targets or (), state["model"].dtype)
    return aggregated(common, updates, received, state, ctx, partial(bases, common.method, state, starts=starts))


def server_step_by_sums(
    common: Common, payloads: Iterable[Payload], state: State, ctx: Ctx, again: Callable[[], Iterable[Payload]]
) -> State:
    """Return what `server_step` does, with rows that are added up as they come (see `adds_up`).

    `again` gets the payloads once more; it is called where it turns out that a row must be dropped.
    """
    try:
        updates, received = summed(common, payloads, ctx.targets or (), state["model"].dtype)
        return aggregated(common, updates, received, state, ctx, partial(bases, common.method, state))
    except RowsNeededError:
        return server_step(common, again(), state, ctx)


def aggregated(
    common: Common,
    updates: Updates,
    received: Sequence[Payload],
    state: State,
    ctx: Ctx,
    start: Callable[[Sequence[str]], Tensor],
    back: Callable[[Updates], Iterable[tuple[Row, Tensor]]] | None = None,
    agree: Agree = lambda why: why,
) -> State:
    """Return the state after the stages, the server rule and the judgement of the result: the tail of server steps.

    `start` gives the vectors from which clients started. Where rows lie in several processes, `back` gives the whole
    rows of a result, and `agree` makes known to all what one of them found.
    """
    stages, traits = common.method.stage, common.method.stage.traits
    updates, sizes = usable(updates, received, ctx)
    # a stage that hides adds noise even to nothing: an empty round must not show
    if not len(updates) and not traits.hides:
        return nothing_received(state, ctx)
    if "base" in traits.reads:
        updates = updates.replace(base=start([client for client, _ in updates.rows]))

    def step(updates: Updates, received: Sequence[Payload], ctx: Ctx, last: bool) -> State:
        out, stage = stages(updates, state["stage"], ctx)
        into, read, move = _reuse(common, updates, out, stage, ctx) if last and not (traits.reduces or back) else KEPT
        if len(updates) and (ctx.peer is None or diagnostics.looks(ctx.peer, ctx.population, ctx.round)):
            ctx.record(DIAGNOSTICS, partial(diagnostics.look, updates, out, ctx.peer, read))
        rows = zip(out.rows, out.vectors(into), strict=True) if back is None else back(out)
        return apply_update(common, {**state, "stage": stage}, rows, received, updates.present, move)

    # under DP, row norms are private, so they are not used to detect outliers
    return reject_outliers(updates, {} if traits.hides else sizes, received, state, ctx, step, stages, agree)


def _reuse(common: Common, updates: Updates, out: Updates, stage: State, ctx: Ctx) -> Reuse:
    """Return how to reuse the matrix of the round, if it is large and its rows may become the clients' new models.

    It is kept if a client is missing, because the models of several rounds would each keep a whole matrix, and if the
    new state of a stage holds rows of it.
    """
    X, clients, rule = updates.given, sorted(common.federation.trainers), common.method.server
    if not isinstance(X, Tensor) or X.nbytes <= WHOLE or [client for client, _ in out.rows] != clients:
        return KEPT
    held = {x.untyped_storage().data_ptr() for x in tensors_in(stage)}
    if X.untyped_storage().data_ptr() in held or not rule.separable:
        return KEPT
    return X, diagnostics.read(updates, out, ctx.peer), partial(_in_place, rule)


def apply_update(
    common: Common,
    state: State,
    rows: Iterable[tuple[Row, Tensor]],
    received: Sequence[Payload],
    present: Tensor | None,
    move: Move | None = None,
) -> State:
    """Return the server's state after the stages' result (keys and rows) has moved the models, with new buffers.

    `move` takes the place of the server rule where the rows, which are all of a matrix, become the new models.
    `present` (K x blocks, or None for all) are the blocks that the round's rows have. Those that no row has stay as
    they are, and so does the server rule's memory of them: for them this was a round in which nobody took part.
    """
    method, new = common.method, {**state, "personal": dict(state["personal"]), "rule": dict(state["rule"])}
    if method.task_vectors:
        rows = list(rows)
        vectors = {**state["tasks"], **{str(task): x for (_, task), x in rows}}
        new["tasks"] = vectors if len(rows) == len(common.federation.tasks) else _apart(vectors)
        new = _counted(new, received) if state["integers"] else new
        if state["buffers"] is not None and len(state["buffers"]):
            known, apart = state.get("task_buffers", {}), [one for p in received for one in _by_task(p)]
            new["task_buffers"] = known | {
                task: merge_buffers(common, [p for p in apart if p.row[1] == task], known.get(task, state["buffers"]))
                for task in (str(task) for (_, task), _ in rows)
            }
        return new
    still = () if present is None or method.stage.traits.hides else _resting(common.shared, present)
    for key, update in rows:
        # a row for everyone also moves the personal models
        for name in (ALL, *state["personal"]) if key == EVERYONE else (key[0],):
            before = model_of(state, name)
            memory = state["rule"].get(name) or method.server.init(before)
            after, new["rule"][name] = (move or method.server.apply)(before, update, memory)
            for s in still:
                after[s] = before[s]
                for what, value in new["rule"][name].items():
                    if isinstance(value, Tensor) and value.shape == after.shape:
                        value[s] = memory[what][s]
            if name == ALL:
                new["model"] = after
            else:
                new["personal"][name] = after
    if new["personal"] and move is None:
        new["personal"] = _apart(new["personal"])
    if state["buffers"] is not None and len(state["buffers"]):
        new["buffers"] = merge_buffers(common, received, state["buffers"])
    return _counted(new, received) if state["integers"] else new


def _in_place(rule: ServerRule, model: Tensor, update: Tensor, memory: State) -> tuple[Tensor, State]:
    """Return what a separable rule makes of a model, in the place of the update."""
    for s in pieces(Columns(0, len(update)), 1 << 17):  # in a core's cache
        update[s] = rule.apply(model[s], update[s], memory)[0]
    return update, memory


def _apart(vectors: Mapping[str, Tensor]) -> State:
    """Return vectors in memory of their own: a row of a matrix, of this round or an earlier one, keeps all of it."""
    return {name: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for name, x in vectors.items()}


def _resting(shared: Layout, present: Tensor) -> tuple[Columns, ...]:
    """Return the columns that no row has."""
    return shared.spans(shared.having((~present.any(0)).tolist()))


def _counted(state: State, received: Sequence[Payload]) -> State:
    """Return the state with the largest of the integer buffers, counters, of which a mean would say nothing."""
    return {**state, "integers": {k: torch.stack([p.integers[k] for p in received]).amax(0) for k in state["integers"]}}


def _by_task(payload: Payload) -> list[Payload]:
    """Return a payload with rows (client, task) as one per row, with the row's examples and buffers alone."""
    rows = zip(payload.rows, payload.sizes, () if payload.buffers is None else payload.buffers, strict=True)
    return [replace(payload, row=row, n=n, buffers=buffers) for row, n, buffers in rows]


def merge_buffers(common: Common, payloads: Sequence[Payload], before: Tensor) -> Tensor:
    """Return the weighted mean, or pooled statistics, of float buffers over the clients that trained the block's task.

    A block that no client trained keeps its value. pooled: variance = mean of variances + variance of means.
    """
    method, layout, merged = common.method, common.shared_buffers, before.clone()
    means: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for block, s in zip(layout.blocks, layout.slices, strict=True):
        trained = [p for p in payloads if block.task is None or block.task in common.federation.client(p.row[0]).tasks]
        if not trained:
            continue
        w = torch.tensor([1.0 if method.weights == "uniform" else p.n for p in trained], dtype=torch.float64)
        values = torch.stack([p.buffers[s] for p in trained if p.buffers is not None])
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
    """Move some rows, in ascending order, to the top in place: a copy would need the matrix's memory again."""
    for to, row in enumerate(rows):
        if to != row:
            matrix[to] = matrix[row]
    return matrix[: len(rows)]


def bases(method: Method, state: State, clients: Sequence[str], starts: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the vectors from which clients started (K x d), unless they are given; not copied where all are one."""
    if starts is not None:
        return torch.stack([starts[client] for client in clients])
    if not state["personal"]:
        return _sent(method, state, ALL).expand(len(clients), -1)
    keys = [client if client in state["personal"] else ALL for client in clients]
    return torch.stack([_sent(method, state, key) for key in keys])
