"""The content of peer messages: how peers write, read and count it, and how they judge and choose others by it.

Others judge a peer by its signal, ask for its model by a request, and get the model in a model message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.codecs import ByteCount, Raw
from fedloom.core.context import State, derive_seed
from fedloom.core.layout import Layout
from fedloom.core.untrusted import Array
from fedloom.engines.peers.community import PeerContext, Trained
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.rounds.evaluation import Scores
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Part
from fedloom.federation.rounds.messages import Payload, blank
from fedloom.federation.rounds.worker import EvalJob, Job
from fedloom.federation.runs.checkpoint import join_tree, split_tree
from fedloom.methods.peers import neighbours, similarity

Age = tuple[int, float]
NEW: Age = (0, 0.0)


@dataclass(frozen=True, eq=False)
class Heard:
    """A neighbour's model, as a peer reads it from a message.

    payload  its row is the displacement from `start` to the model (d; 0 out of scope), unless rows are (client, task)
    start    where the neighbour's training started (d), if messages say so; else where this peer's did
    age      (own local rounds that have ended, simulated seconds) since the neighbour's model was trained
    model    the neighbour's model (d), `start` out of scope; None where no stage or penalty reads it
    """

    payload: Payload
    start: Tensor
    age: Age
    model: Tensor | None = None


def write(
    context: PeerContext, trained: Trained, kind: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> PeerMessage:
    """Write a message of the peer about its trained model."""
    time = {} if trained.ended is None else {"made": trained.ended}
    return PeerMessage(kind, context.client.id, trained.round, context.layout.hash, tensors, {**values, **time})


def model_message(context: PeerContext, trained: Trained, same: bool, scope: str) -> PeerMessage:
    """Write the trained model, or the update alone for a receiver that started from the `same` model."""
    payload, part = trained.payload, context.part(scope)
    packed, buffers = payload.packed, payload.buffers
    # an update is shorter than a model where the codec compresses it, but needs a start that the receiver has
    update = same or context.tells_update
    if not context.by_task and (not update or scope != "full"):
        vector, codec = (trained.update, context.method.codec) if update else (trained.model, Raw())
        packed = codec.pack(blank(part, context.federation, (payload.row,), context.shared.take(vector, part)[None]))
    if buffers is not None:
        buffers = context.shared_buffers.take(buffers, context.buffers(scope))
    tree = replace(payload, packed=packed, buffers=buffers).tree()
    if not same and context.tells_start:
        start = context.shared.take(trained.start, part)[None]
        tree["start"] = Raw().pack(blank(part, context.federation, (payload.row,), start))["values"]
    skeleton, tensors = split_tree(tree)
    about = {"update": update, "scope": scope, "tasks": context.client.shares, "payload": skeleton}
    return write(context, trained, "model", tensors, about)


def digest(context: PeerContext, trained: Trained, scope: str) -> str:
    """Return a hash by which two peers see whether they started from the same model, in scope."""
    if scope not in trained.digests:
        values = context.shared.take(trained.start, context.part(scope)).contiguous()
        trained.digests[scope] = hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()
    return trained.digests[scope]


def acquainted(context: PeerContext, messages: Iterable[PeerMessage]) -> BuiltFederation:
    """Return the peer with the senders of messages; it knows their tasks, as they state them, and no data of theirs."""
    known = {task.name: task for task in context.federation.tasks}
    nothing = Part(context.client.train.examples, np.zeros(0, dtype=np.int64), "unknown")
    clients = dict(context.federation.clients)
    for message in messages:
        if message.sender not in clients:
            tasks = {task: (known[task], w * known[task].weight) for task, w in message.values["tasks"].items()}
            clients[message.sender] = BuiltClient(message.sender, tasks, nothing, nothing, nothing)
    return replace(context.federation, clients=dict(sorted(clients.items())))


def read(context: PeerContext, message: PeerMessage, own: Trained, age: Age = NEW) -> Heard:
    """Read a neighbour's model from its message, at a peer that has trained itself."""
    about = join_tree(message.values["payload"], message.tensors)
    start, theirs = about.pop("start", None), own.start
    payload = aged(context, Payload.of(message.sender, about), age)
    if context.by_task:
        return Heard(payload, theirs, age)
    federation, scope = acquainted(context, [message]), str(message.values["scope"])
    part = context.part(scope)
    if start is not None:
        theirs = filled(context, message, start, part, own.start)
    like = blank(part, federation, (payload.row,), torch.zeros(1, part.d, dtype=own.start.dtype))
    codec = context.method.codec if message.values["update"] else Raw()
    values = codec.unpack(payload.packed, like)[0]
    # blocks that the neighbour lacks hold any values here: no reader looks at them
    inside = values if message.values["update"] else values - context.shared.take(own.start, part)
    displacement = context.shared.put(torch.zeros_like(own.start), part, inside)
    model = None
    if context.method.turn.start == "own" or context.config.penalty or context.fine is not None:
        model = theirs + displacement
        if not message.values["update"]:  # exactly as received, because a difference and a sum may round
            model = context.shared.put(model, part, values)
    if payload.buffers is not None and own.payload.buffers is not None:
        every = context.shared_buffers
        buffers = every.put(own.payload.buffers.clone(), context.buffers(scope), payload.buffers)
        payload = replace(payload, buffers=buffers)
    return Heard(as_row(context, federation, payload, displacement), theirs, age, model)


def aged(context: PeerContext, payload: Payload, age: Age) -> Payload:
    """Return a payload with its age, where stages read that."""
    about, rows = dict(zip(("staleness", "age"), map(float, age), strict=True)), len(payload.tasks)
    extra = {name: [v] * rows if rows else v for name, v in about.items() if name in context.method.extras}
    return replace(payload, extra={**payload.extra, **extra})


def as_row(context: PeerContext, federation: BuiltFederation, payload: Payload, displacement: Tensor) -> Payload:
    """Return a payload whose row is a displacement (d) from a start to a model."""
    return replace(payload, packed=Raw().pack(blank(context.shared, federation, (payload.row,), displacement[None])))


def filled(context: PeerContext, message: PeerMessage, values: Tensor, part: Layout, rest: Tensor) -> Tensor:
    """Return a copy of `rest` (d) with raw values of a message in a part of the shared columns."""
    mine = context.shared.take(rest, part).clone().unsqueeze(0)
    like = blank(part, acquainted(context, [message]), ((message.sender, None),), mine)
    return context.shared.put(rest.clone(), part, Raw().unpack({"values": values}, like)[0])


def count(context: PeerContext, message: PeerMessage) -> ByteCount:
    """Count the bytes of a message's tensors by (role, task); they add up to `nbytes`."""
    if message.kind != "model":
        return {("signal", None): message.nbytes} if message.nbytes else {}
    if message.counted:
        return message.counted
    about = join_tree(message.values["payload"], message.tensors)
    part = context.part(message.values["scope"])
    rows = tuple((message.sender, task) for task in about["tasks"]) or ((message.sender, None),)
    like = blank(part, acquainted(context, [message]), rows, torch.zeros(len(rows), part.d))
    bytes_ = (context.method.codec if message.values["update"] else Raw()).count(about["packed"], like)
    buffers = [*([] if about["buffers"] is None else [about["buffers"]]), *about["integers"].values()]
    if buffers:
        bytes_["buffer", None] = sum(t.nbytes for t in buffers)
    if beside := message.nbytes - sum(bytes_.values()):
        bytes_["side", None] = bytes_.get(("side", None), 0) + beside
    message.counted.update(bytes_)
    return message.counted


Run = Callable[[Sequence[Job]], Iterable[Any]]
_SIMILARITY: dict[str, Callable[..., Tensor]] = {"features": similarity.features, "overlap": similarity.overlap}


def due(context: PeerContext, round: int) -> dict[str, float]:
    """Return the signals, with their weights, by which peers judge each other in a round; none where they do not."""
    judges = context.config.judges and round >= context.first
    return context.config.similarity.due(round - context.first) if judges else {}


def _judged_by(context: PeerContext, trained: Trained) -> dict[str, float]:
    """Return the signals by which a peer judges; all where it hears signals of others in a round without its own."""
    return due(context, trained.round) or dict[str, float](context.config.similarity.signals.items())


def signals(context: PeerContext, trained: Trained) -> dict[str, Tensor]:
    """Return the tensors by which others judge a peer, beside its tasks."""
    config = context.config.similarity
    wanted, sketch = _judged_by(context, trained), config.sketch
    part = similarity.shared_columns(context.shared)
    message, state = trained.as_sent(config.model)
    model = message.vector
    assert model is not None
    tensors: dict[str, Tensor] = {}
    if "gradient" in wanted and config.gradient == "update":
        tensors["gradient"] = context.shared.take(trained.update, part)
    elif "gradient" in wanted:
        tensors["gradient"] = context.probe.gradient(context.client, message, state, part)
    if "parameters" in wanted:
        tensors["parameters"] = context.shared.take(
            model if config.parameters == "model" else model - context.origin, part
        )
    if sketch is not None:
        short = similarity.Sketch(sketch.m, derive_seed(context.seed, "sketch"), sketch.kind)
        # bfloat16 halves the bytes, and its rounding is far below the error of a sketch
        tensors = {n: short(vector).bfloat16() if len(vector) > sketch.m else vector for n, vector in tensors.items()}
    if "features" in wanted:
        tensors["features"] = context.probe.features(context.client, message, state)
    if wanted.keys() & {*config.measured}:
        like = blank(context.shared, context.federation, ((context.client.id, None),), model[None])
        tensors["model"] = Raw().pack(like)["values"]
        if message.buffers is not None and len(message.buffers):
            tensors["buffers"] = message.buffers
    return tensors


def signal_fields(context: PeerContext, round: int) -> dict[str, Array]:
    """Return the schema of the tensors of `signals`, for this peer in a round."""
    wanted, sketch = due(context, round), context.config.similarity.sketch
    d = similarity.shared_columns(context.shared).d
    vector = (
        Array((d,), exact=True) if sketch is None or d <= sketch.m else Array((sketch.m,), torch.bfloat16, exact=True)
    )
    fields: dict[str, Array] = {str(name): vector for name in ("gradient", "parameters") if name in wanted}
    if "features" in wanted:
        fields["features"] = Array((2, "features"), torch.float64, exact=True)
    if wanted.keys() & {*context.config.similarity.measured}:
        like = blank(context.shared, context.federation, ((context.client.id, None),), context.origin[None])
        fields["model"] = replace(Raw().fields(like)["values"], exact=True)
        if context.method.buffers != "local" and (b := context.shared_buffers.d):
            fields["buffers"] = Array((b,))
    return fields


def judge(
    context: PeerContext,
    trained: Trained,
    state: State,
    own: Mapping[str, Tensor],
    messages: Mapping[str, PeerMessage],
    run: Run,
) -> State:
    """Compute similarities to the senders of `messages` (at least one), by their signals and the `own` ones.

    Returns the state's new "similarity" (sender -> number) and, where the recipe has them, "group" and "scope".
    """
    # groups need similarities between all pairs (N x N, the peer itself first); else one row is enough
    config, groups, me = context.config.similarity, context.config.choose.groups, context.client
    names = sorted(messages)
    parts: dict[str, Tensor] = {}
    weights = _judged_by(context, trained)
    measured = weights.keys() & {*config.measured}
    tasks = _labelled(context) if measured else {}
    losses = _losses(context, trained, tuple(tasks), messages, run) if measured else None
    for signal in weights:
        if losses is not None and signal in measured:
            # an exponential needs losses near 1; eq. 4.5 is the client's own loss, as it is
            kind = None if signal == "disparity" else config.cross_loss
            each = similarity.per_task(losses, torch.tensor([*tasks.values()]), kind in (None, "exp"))
            parts[signal] = similarity.disparity(each) if kind is None else similarity.cross_loss(each, kind)
            continue
        if signal == "overlap":
            shares = {me.id: me.shares, **{name: messages[name].values["tasks"] for name in names}}
            rows = dict(zip(sorted(shares), similarity.task_weights(shares), strict=True))
            mine, others = rows[me.id], torch.stack([rows[name] for name in names])
        else:
            mine, others = own[signal], torch.stack([messages[name].tensors[signal] for name in names])
        compare = _SIMILARITY.get(signal) or partial(similarity.gradient, scale=config.scale)
        parts[signal] = compare(mine, others) if groups is None else compare(torch.cat([mine[None], others]))
    S, new = similarity.combined(parts, weights, config.scales), dict[str, Any]()
    if groups is not None:
        new["group"] = _group(context, (me.id, *names), S)
        S = S[0, 1:]
    if context.config.scope == "adaptive" and "gradient" in weights:
        others = torch.stack([messages[name].tensors["gradient"] for name in names])
        aligned = neighbours.alignment(similarity.gradient(own["gradient"], others, "cosine").tolist())
        thresholds = context.config.adaptive
        new["scope"] = neighbours.next_scope(aligned, state["scope"], thresholds.enter, thresholds.leave)
    return {**new, "similarity": dict(zip(names, S.tolist(), strict=True))}


def chosen(context: PeerContext, alike: Mapping[str, float], group: Sequence[str]) -> tuple[str, ...]:
    """Select the neighbours to mix with, among the senders of signals; `group` is the peer's own, if any."""
    choose = context.config.choose
    if choose.groups is not None:
        alike = {name: value for name, value in alike.items() if name in group}
    names = tuple(alike)
    if choose.threshold is not None:
        names = neighbours.similar_enough(alike, choose.threshold)
    if choose.top is not None:
        names = neighbours.top_k({name: alike[name] for name in names}, choose.top)
    return names


def close(context: PeerContext, own: Trained, heard: Mapping[str, Heard]) -> frozenset[str]:
    """Return the peers whose models give outputs like the own model's, on the peer's validation data."""
    assert context.fine is not None
    mine, state = own.as_sent("trained")
    models = {context.client.id: mine}
    for name, one in heard.items():
        buffers = mine.buffers if one.payload.buffers is None else one.payload.buffers
        models[name] = replace(mine, vector=one.model, buffers=buffers)
    names, me = sorted(models), context.client.id
    each = [context.probe.outputs(context.client, models[name], state) for name in names]
    S = torch.stack([similarity.parameters(torch.stack([o[t] for o in each])) for t in each[0]]).mean(0)
    clusters = neighbours.fine_clusters(names, S, context.fine)
    return frozenset(next(group for group in clusters if me in group)) - {me}


def _group(context: PeerContext, names: Sequence[str], S: Tensor) -> list[str]:
    """Return the group of the first peer, by similarities between all (N x N); nan leaves a peer out."""
    groups = context.config.choose.groups
    assert groups is not None
    known = torch.isfinite(S[0]).nonzero().flatten().tolist()
    seed = derive_seed(context.seed, "groups") >> 32
    clusters = neighbours.coarse_clusters([names[i] for i in known], S[known][:, known], groups.low, groups.high, seed)
    return list(next((group for group in clusters if names[0] in group), (names[0],)))


def statistics(context: PeerContext, message: PeerMessage, own: Tensor | None) -> Tensor | None:
    """Return the buffers of a measured model: those sent with it, and the peer's own where the sender has none."""
    told, every = message.tensors.get("buffers"), context.shared_buffers
    if told is None or own is None:
        return own if told is None else told
    have = acquainted(context, [message]).presence(every, [(message.sender, None)])
    if have is None:
        return told
    lacked = every.having((~have[0]).tolist())
    return every.put(told.clone(), lacked, every.take(own, lacked))


def _labelled(context: PeerContext) -> dict[str, float]:
    """Return the weights of the peer's tasks that have a label where it measures models; of all if none has one."""
    me, some = context.client, context.config.similarity.samples
    part, weights = me.val if some is None else me.val.spread(some), {task: w for task, (_, w) in me.tasks.items()}
    return {task: weight for task, weight in weights.items() if len(part.of(task))} or weights


def _losses(
    context: PeerContext, trained: Trained, tasks: tuple[str, ...], messages: Mapping[str, PeerMessage], run: Run
) -> Tensor:
    """Return losses (n x tasks) of others' models on the peer's validation data; it has heads where they have none."""
    me, names, config = context.client, sorted(messages), context.config.similarity
    some = config.samples or 0
    mine, state = trained.as_sent(config.model)
    assert mine.vector is not None
    jobs: list[Job] = []
    for i, name in enumerate(names):
        model = filled(context, messages[name], messages[name].tensors["model"], context.shared, mine.vector)
        message = replace(mine, vector=model, buffers=statistics(context, messages[name], mine.buffers))
        jobs.append(EvalJob(i, message, state, me.id, "val", tasks, trained.round, some=some))
    scores: dict[int, Scores] = dict(run(jobs))
    return torch.tensor([[scores[i][task]["loss"] for task in tasks] for i in range(len(names))])
