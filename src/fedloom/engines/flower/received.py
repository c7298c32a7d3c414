"""Checks of messages between nodes and server: what an honest node could send, what the recipe makes necessary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.codecs import ByteCount, Codec, Raw
from fedloom.core.context import Row
from fedloom.core.layout import Layout
from fedloom.core.untrusted import Array, Each, Exactly, Named, Nothing, Number, OneOf, Sender, Text, Untrusted, shown
from fedloom.core.updates import Updates
from fedloom.engines.flower.relay import TURNS, as_counts
from fedloom.engines.flower.wire import RefusedError, decode, expect, head_of, numbers_of, reading, said, size_of
from fedloom.engines.peers.community import Community, PeerContext
from fedloom.engines.peers.messages import due, signal_fields
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import Scores
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.messages import Message, Payload, blank, nothing, rows_of
from fedloom.federation.runs.checkpoint import join_tree, tensors_in
from fedloom.federation.runs.reader import CONSTANT, WITHHELD, described
from fedloom.federation.runs.recorded import check_record
from fedloom.models.tasks.labels import Classification
from fedloom.models.tasks.task import Task
from fedloom.training.flat import integer_buffers
from fedloom.training.loop import LocalResult

_MANY = 1 << 53


@dataclass(frozen=True, eq=False)
class Packed:
    """The payload of a codec for rows like these."""

    codec: Codec
    like: Updates

    def read(self, value: Any, sender: Sender) -> Mapping[str, Tensor]:
        """Return the packed tensors, as the codec reads them."""
        return self.codec.read(value, self.like)


@dataclass(frozen=True, eq=False)
class Statistics:
    """The float buffers of a layout, end to end, in as many rows where rows are by task; variances are not negative."""

    layout: Layout
    rows: tuple[int, ...] = ()

    def read(self, value: Any, sender: Sender) -> Tensor:
        """Return the buffers, in float32."""
        read = Array((*self.rows, self.layout.d)).read(value, sender)
        for block, s in zip(self.layout.blocks, self.layout.slices, strict=True):
            if block.name.endswith("running_var") and bool((read[..., s] < 0).any()):
                least = float(read[..., s].min())
                raise ValueError(f"expected variances of at least 0 in {block.name}, found {least:g}")
        return read


def payload_fields(
    built: Built, client: BuiltClient, tree: Any, part: Layout, codec: Codec, buffers: Layout
) -> tuple[Named, Sender]:
    """Return (the schema of a client's payload, its sender): rows over `part`, buffers of that layout.

    `tree` is the received payload: it says which of the client's tasks are there. Raises ValueError where it does not.
    """
    method, shared = built.method, built.shared
    n = len(client.train) if method.counts_examples else 1
    tasks = _tasks(client, tree) if method.turn.by_task else ()
    rows: tuple[Row, ...] = tuple((client.id, task) for task in tasks) or ((client.id, None),)
    support = Array((len(rows), len(shared.blocks)) if tasks else (len(shared.blocks),), torch.bool)
    one = [_extras(built, client.only(task)) for task in tasks] or [_extras(built, client)]
    extras: dict[str, Untrusted] = {
        name: Each(tuple(each[name] for each in one)) if tasks else one[0][name] for name in one[0]
    }
    sent, statistics = method.buffers != "local", Statistics(buffers, (len(tasks),) if tasks else ())
    fields: dict[str, Untrusted] = {
        "n": Exactly(n),
        "tasks": Named({task: Number(1, n, whole=True) for task in tasks}),
        "packed": Packed(codec, blank(part, built.federation, rows, nothing(len(rows), part.d))),
        "extra": Named(extras),
        "side": Named(dict.fromkeys(method.auxiliary, Array((shared.d,)))),
        "support": support if method.wants_support else Nothing(),
        "buffers": statistics if sent and built.shared_buffers.d else Nothing(),
        "integers": Named(integer_fields(built) if sent else {}),
    }
    return Named(fields), sender_of(built, client)


def _tasks(client: BuiltClient, tree: Any) -> tuple[str, ...]:
    tasks = tree.get("tasks") if isinstance(tree, Mapping) else None
    if not (
        isinstance(tasks, Mapping) and tasks and [*tasks] == [task for task in sorted(client.tasks) if task in tasks]
    ):
        raise ValueError(
            f"tasks: expected a sorted selection of {', '.join(sorted(client.tasks))}, found {shown(tasks)}"
        )
    return tuple(tasks)


def _extras(built: Built, client: BuiltClient) -> dict[str, Untrusted]:
    """Return the schema of extras: the stages' own, made stricter by the client's domain and tasks."""
    first = next((task.channels for task, _ in client.tasks.values() if task.kind == "classification"), 0)
    known: dict[str, Untrusted] = {
        "steps": Number(0, _MANY, whole=True),
        **{name: Exactly(value) for name, value in client.extras.items()},
        "classes": Array((first,), torch.float64, 0, _MANY),
    }
    return {name: known.get(name, value) for name, value in built.method.extra_values.items()}


def integer_fields(built: Built) -> dict[str, Array]:
    """Return the schema of integer buffers: counters are not negative, others are in the model's range."""
    return {
        name: Array(tuple(value.shape), value.dtype, 0, _MANY)
        if not value.ndim or value.dtype == torch.bool
        else Array(tuple(value.shape), value.dtype, float(value.min()), float(value.max()))
        for name, value in integer_buffers(built.module).items()
    }


def sender_of(built: Built, client: BuiltClient) -> Sender:
    """Return what the server knows of a client, by which values of unknown size are judged."""
    heads, encoder = list(getattr(built.module, "heads", ())), getattr(built.module, "encoder", None)
    known = {heads.index(name): task.known for name, (task, _) in client.tasks.items()}
    classes = {head: task.channels for head, task in known.items() if isinstance(task, Classification)}
    width = getattr(encoder, "features", None)
    return Sender({} if width is None else {"features": width}, classes)


def read_peer_message(built: Built, context: PeerContext, peer_message: PeerMessage, round: int) -> None:
    """Check a peer's message, which is passed on as it is. Raises ValueError with the field."""
    me, sender = context.client, sender_of(built, context.client)
    Named({"round": Exactly(round), "sender": Exactly(me.id), "layout": Exactly(context.layout.hash)}).read(
        {"round": peer_message.round, "sender": peer_message.sender, "layout": peer_message.layout}, sender
    )
    OneOf(("signal", "request", "model")).read(peer_message.kind, sender)
    scope, flag = OneOf(("full", "encoder")), OneOf((True, False))
    tasks = Named({task: Number(0) for task in me.tasks})
    if peer_message.kind == "signal":
        Named({"tasks": tasks, "due": Exactly(bool(due(context, round)))}).read(peer_message.values, sender)
        Named(signal_fields(context, round)).read(peer_message.tensors, sender)
    elif peer_message.kind == "request":
        Named({"base": Text(), "scope": scope}).read(peer_message.values, sender)
        Named({}).read(peer_message.tensors, sender)
    else:
        about = dict(peer_message.values)
        skeleton = about.pop("payload", None)
        Named({"update": flag, "scope": scope, "tasks": tasks}).read(about, sender)
        _read_model(built, context, peer_message, join_tree(skeleton, peer_message.tensors))


def _read_model(built: Built, context: PeerContext, peer_message: PeerMessage, tree: Any) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"payload: expected fields, found {shown(tree)}")
    about, start = peer_message.values, tree.pop("start", None)
    part, buffers = context.part(about["scope"]), context.buffers(about["scope"])
    codec = context.method.codec if about["update"] or context.by_task else Raw()
    fields, sender = payload_fields(built, context.client, tree, part, codec, buffers)
    read = fields.read(tree, sender)
    if start is not None:
        like = blank(part, context.federation, ((context.client.id, None),), nothing(1, part.d))
        read["start"] = Raw().read({"values": start}, like)["values"]
    received = {id(t) for t in peer_message.tensors.values()}
    if any(id(t) not in received for t in tensors_in(read)):  # it was cast
        raise ValueError("payload: expected the dtypes of the model")


_BESIDE = 1 << 20  # most bytes of one extra of one row
ANSWER = 1 << 20
"""Most bytes of an answer's texts and numbers, beside a payload."""
_LINES = 1000  # most records, and most events, of one turn of a peer


def open_reply(content: Any, limit: int, **expected: Any) -> tuple[Any, dict[str, float]]:
    """Return (tree, numbers) of an answer of at most `limit` bytes. RefusedError, with its words, if it failed."""
    size = size_of(content)
    if size > limit:
        raise RefusedError(f"payload: expected at most {limit} bytes, found {size}")
    head = head_of(content)
    if "error" in head:
        raise RefusedError(said(head["error"]))
    expect(head, **expected)
    return decode(content), numbers_of(content)


def limit_of(built: Built, client: str) -> int:
    """Return the most bytes of a client's payload: the largest result of the codec, and all that travels beside it."""
    method, shared = built.method, built.shared
    rows = len(rows_of(built, [client]))
    vector = 4 * shared.d
    packed = rows * (vector + shared.d // 8 + len(shared.blocks) + 1024)
    sender = sender_of(built, built.federation.clients[client])
    points = 8 * sum(sender.classes.values()) * (sender.sizes.get("features", 0) + 3)
    beside = len(method.auxiliary) * vector + rows * (len(method.extras) * (_BESIDE + points) + len(shared.blocks))
    buffers = 8 * rows * built.layout.buffers.d + sum(t.nbytes for t in integer_buffers(built.module).values())
    return packed + beside + buffers + ANSWER


def payload_of(built: Built, client: str, tree: Any) -> Payload:
    """Read a client's payload. Raises ValueError, with the field, if it does not fit the method and the model."""
    holder = built.federation.clients[client]
    if isinstance(tree, dict) and tree.get("finite", True) is False:
        return Payload((client, None), 1.0, finite=False)
    shared, buffers = built.shared, built.shared_buffers
    fields, sender = payload_fields(built, holder, tree, shared, built.method.codec, buffers)
    return Payload.of(client, fields.read(tree, sender))


@dataclass(frozen=True, eq=False)
class TurnResult:
    """The result of a peer's turn, as its node states it: messages (receiver, bytes), records, events, byte counts."""

    peer_messages: list[tuple[str, Tensor]]
    records: list[tuple[str, dict[str, Any]]]
    events: list[str]
    """In the node's words."""
    up: ByteCount
    down: ByteCount


def turn_of(built: Built, community: Community, client: str, round: int, tree: Any) -> TurnResult:
    """Read the result of a peer's turn. Raises ValueError, with the field, for one that no honest peer could send."""
    if not isinstance(tree, dict) or tree.keys() != {"peer_messages", "records", "events", "up", "down"}:
        raise ValueError("expected the fields peer_messages, records, events, up, down")
    terms, names = community.context.at(client), built.federation.clients
    peer_messages = []
    for receiver, data in _some(tree["peer_messages"], "peer_messages", len(names)):
        if receiver not in names:
            raise ValueError(f"peer_messages: expected a client of this run, found {shown(receiver)}")
        data = Array((data.numel(),), torch.uint8).read(data, Sender())
        peer_messages.append((receiver, data))
    # the same bytes to several are one tensor
    for data in {id(data): data for _, data in peer_messages}.values():
        read_peer_message(built, terms, PeerMessage.decode(data.numpy().tobytes()), round)
    records = [(name, _record(client, name, fields)) for name, fields in _some(tree["records"], "records", _LINES)]
    events = _some(tree["events"], "events", _LINES)
    words = [said(f"{event}{described(fields) if isinstance(fields, dict) else ''}") for event, fields in events]
    return TurnResult(peer_messages, records, words, as_counts(tree["up"]), as_counts(tree["down"]))


def _some(value: Any, field: str, most: int) -> list[Any]:
    if not (isinstance(value, list) and len(value) <= most and all(isinstance(v, list) and len(v) == 2 for v in value)):
        raise ValueError(f"{field}: expected at most {most} pairs, found {shown(value)}")
    return value


_OF_SERVER = (CONSTANT, WITHHELD, "clock", "staleness", "privacy")


def _record(client: str, kind: Any, fields: Any) -> dict[str, Any]:
    """Read a record of a peer: plain values, about itself alone, as readers of the run expect them."""
    Text(50).read(kind, Sender())
    if kind in _OF_SERVER:
        raise ValueError(f"records: {kind!r} found, which only the server records")
    if not isinstance(fields, dict) or "kind" in fields or fields.get("peer", client) != client:
        raise ValueError(f"records: expected fields of peer {client!r}, found {shown(fields)}")
    try:
        size = len(json.dumps(fields))
    except TypeError as error:
        raise ValueError(f"records: expected plain values, but {error}") from None
    if size > ANSWER:
        raise ValueError(f"records: expected at most {ANSWER} bytes, found {size}")
    try:
        check_record(kind, fields)
    except ValueError as error:
        raise ValueError(f"records: {kind}: {error}") from None
    return fields


def result_of(numbers: Mapping[str, float], tasks: Mapping[str, Any], withheld: bool = False) -> LocalResult:
    """Read the numbers of a training: steps, examples, losses by task; losses are nan where they are `withheld`."""

    def counts(suffix: str) -> tuple[int, int]:
        return int(number_of(numbers, f"steps{suffix}", _MANY)), int(number_of(numbers, f"examples{suffix}", _MANY))

    present = [task for task in tasks if withheld or f"loss/{task}" in numbers]
    losses = {task: _score(numbers.get(f"loss/{task}", math.nan)) for task in present}
    by_task = {task: LocalResult(*counts(f"/{task}")) for task in present}
    return LocalResult(*counts(""), losses, waiting=number_of(numbers, "waiting"), by_task=by_task)


def number_of(numbers: Mapping[str, float], name: str, most: float = 1e9) -> float:
    """Return a number of a node, such as seconds; 0 for one outside 0 to `most`."""
    value = numbers.get(name, 0.0)
    return float(value) if 0 <= value <= most else 0.0


def _score(value: float) -> float:
    """Return a loss or a metric of a node; nan for one so large that the mean over clients has no value."""
    return float(value) if abs(value) < 1e150 else math.nan


def scores_of(prefix: str, numbers: Mapping[str, float], tasks: Mapping[str, Task]) -> Scores:
    """Read scores that arrived as PREFIX/TASK/METRIC: only these tasks, and only metrics that they have."""
    return {
        name: {
            metric: _score(numbers[f"{prefix}/{name}/{metric}"])
            for metric in (*task.metrics, "loss")
            if f"{prefix}/{name}/{metric}" in numbers
        }
        for name, task in tasks.items()
    }


_PERSONAL = {"global": False, "personal": True}
"""Name of a model -> whether an evaluation of it asks for the client's own."""


@dataclass(frozen=True)
class _AnyTensor:
    """A tensor. Local rules judge what stages broadcast."""

    def read(self, value: Any, sender: Sender) -> Tensor:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor, found {shown(value)}")
        return value


def _read(value: Untrusted, what: Any) -> Any:
    """Read a value of a message that needs nothing known of its sender."""
    return value.read(what, Sender())


@reading()
def read_round(rounds: int, head: Mapping[str, Any]) -> int:
    """Return the round of a message. Raises RefusedError for a round outside 0 to `rounds`."""
    return int(_read(Named({"round": Number(0, rounds, whole=True)}), {"round": head["round"]})["round"])


@reading()
def wants_trained(models: Sequence[str], tree: Mapping[str, Any]) -> bool:
    """Return whether a message asks for scores right after training. RefusedError where none are wanted."""
    return bool(_read(OneOf((False, True) if "trained" in models else (False,)), tree["evaluate_trained"]))


@reading()
def read_message(built: Built, client: str, tree: Mapping[str, Any]) -> Message:
    """Return the `message` in a server's request. Raises RefusedError, with the field, for anything else."""
    method, mine = built.method, sorted(built.federation.clients[client].tasks)
    shared, buffers = built.shared, built.shared_buffers
    value = _mapping(tree["message"])
    tasks = [*value["tasks"]]
    if tasks != [task for task in mine if method.task_vectors and task in tasks]:
        raise ValueError(f"tasks: expected a sorted selection of {', '.join(mine)}, found {shown(tasks)}")
    rows: tuple[Row, ...] = tuple((client, task) for task in tasks)
    like = blank(shared, built.federation, rows or ((client, None),), nothing(max(len(rows), 1), shared.d))
    own = method.task_vectors or (method.turn.start == "own" and value["vector"] is None)
    by_task = (len(tasks),) if tasks and buffers.d else ()
    fields: dict[str, Untrusted] = {
        "vector": Nothing() if own else Array((shared.d,)),
        "buffers": Nothing() if method.buffers == "local" else Array((*by_task, buffers.d)),
        "integers": Named({} if method.buffers == "local" else integer_fields(built)),
        "broadcast": Named({name: _AnyTensor() for name in value["broadcast"]}),
        "packed": Packed(method.codec, like) if tasks else Named({}),
        "tasks": Each(tuple(map(Exactly, tasks))),
    }
    _read(Named(fields), value)
    return Message(**{**value, "tasks": tuple(tasks)})


@reading()
def read_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marker of a client's `state`: its round (`node`), perhaps `task`, or nothing; else RefusedError."""
    # the server also has a marker for each task, of which it sends one alone where that is wanted
    marker = {name: each for name, each in _mapping(tree["state"]).items() if name != "tasks"}
    node, task = {"node": Number(0, 1 << 53, whole=True)}, {"task": Text()} if "task" in marker else {}
    return _read(Named({**node, **task} if marker else {}), marker)


@reading()
def read_turn(client: str, tree: Mapping[str, Any]) -> tuple[str, list[str], list[Tensor]]:
    """Return (turn, names of all peers, peer messages for this one). Raises RefusedError for anything else."""
    turn = str(_read(OneOf(TURNS), tree["turn"]))
    names = _read(Each(tuple([Text()] * len(tree["names"]))), tree["names"])
    if names != sorted({*names, client}):
        raise ValueError(f"names: expected the sorted names of all peers, with {client!r} among them")
    return turn, names, [_read(Array((each.numel(),), torch.uint8), each) for each in tree["peer_messages"]]


@reading()
def read_jobs(built: Built, client: str, round_: int, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations that a message asks for, with model names. Raises RefusedError for any other."""
    evaluation, last = built.recipe.evaluation, built.recipe.training.rounds
    # a private run may end after any round
    if round_ % evaluation.every and round_ != last and built.recipe.privacy is None:
        raise RefusedError(
            f"round {round_}: the recipe (evaluation.every: {evaluation.every}) measures nothing after this round"
        )
    names = {_PERSONAL[name]: name for name in evaluation.models if name in built.models}
    fields: dict[str, Untrusted] = {
        "key": Number(0, 1 << 53, whole=True),
        "client": Exactly(client),
        "split": OneOf(evaluation.splits),
        "round": Exactly(round_),
        "personal": OneOf((*names,)),
        "costly": OneOf((False, True)),
    }
    jobs = [_of_model(built, client, fields, _mapping(job)) for job in tree["jobs"]]
    keys = [(job["personal"], job["task"], job["split"]) for job in jobs]
    if len({*keys}) < len(keys):
        raise ValueError("jobs: expected each model at most once per split")
    return [{**job, "name": names[job["personal"]]} for job in jobs]


@reading()
def read_models(built: Built, client: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models that a message asks to be written down. Raises RefusedError for anything else."""
    fields: dict[str, Untrusted] = {"name": OneOf(built.models), "prefix": Text(1000)}
    models = [{key: each for key, each in _mapping(one).items() if key != "owner"} for one in tree["models"]]
    return [_of_model(built, client, fields, one) for one in models]


def _of_model(built: Built, client: str, fields: Mapping[str, Untrusted], value: Mapping[str, Any]) -> dict[str, Any]:
    """Read a request about a model: some fields, and the message and state that it is loaded from."""
    method, mine = built.method, (*built.federation.clients[client].tasks,)
    # test data of the recipe's own is the same at several clients, and measured at one of them for all
    known = tuple(task.name for task in built.federation.tasks) if built.whole else mine
    one_each = method.task_vectors or (method.turn.by_task and "global" not in built.models)
    parts: dict[str, Untrusted] = {
        **fields,
        "tasks": Each(tuple([OneOf(known)] * len(value["tasks"]))),
        "task": OneOf(mine) if one_each else Nothing(),
    }
    plain = {name: each for name, each in value.items() if name not in ("message", "state")}
    read = _read(Named(parts), plain)
    # a peer has its models itself
    message = None if built.recipe.peers is not None else read_message(built, client, value)
    return {**read, "tasks": tuple(read["tasks"]), "message": message, "state": read_state(value)}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected fields, found {shown(value)}")
    return value
